//! A data directory made from a saved state: a quorum of one in a new cluster, which takes the others in.

use std::io;
use std::time::Duration;

use tidepool_proto::{ErrorCode, NodeId};
use tidepool_raft::{
    ClusterIdentity, Frozen, LogPosition, MemberChange, OpenError, Options, Restored, Role, is_vacant,
};

use crate::ledger::Ledger;
use crate::members::{LIMIT, Quorum};

struct Saved(Vec<u64>);

impl Frozen for Saved {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        self.0.iter().try_for_each(|id| out.write_all(&id.to_le_bytes()))
    }
}

/// A state that cannot be read to its end.
struct Cut;

impl Frozen for Cut {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        out.write_all(&[7; 8])?;
        Err(io::Error::other("the store went away"))
    }
}

fn second_joins(options: &mut Options) {
    if options.node_id == NodeId(2) {
        (options.join, options.members) = (true, Vec::new());
    }
}

fn make(quorum: &Quorum, state: Box<dyn Frozen>) -> Result<ClusterIdentity, OpenError> {
    let options = quorum.options(1);
    let at = LogPosition { term: 9, index: 700 };
    let address = options.advertise.clone();
    Restored { node_id: NodeId(1), address, at, state, payload: Ledger::payload(99) }.make(&options.data_dir)
}

/// The log goes on where the state was saved, under a new cluster; who waits to be taken in is taken in.
#[tokio::test(flavor = "multi_thread")]
async fn a_restored_member_leads_alone_and_takes_others_in() {
    let mut quorum = Quorum::new(2, second_joins).await;
    let dir = quorum.options(1).data_dir;
    assert!(is_vacant(&dir).unwrap());
    let cluster = make(&quorum, Box::new(Saved((1..=50).collect()))).unwrap();
    assert!(!is_vacant(&dir).unwrap());
    let node = quorum.start(1).await.unwrap();
    let mut leadership = node.watch_leadership();
    let leads = leadership.wait_for(|now| now.role == Role::Leader);
    let term = tokio::time::timeout(LIMIT, leads).await.expect("it leads").unwrap().term;
    assert!(term > 9, "terms go on: {term}");
    assert_eq!(node.identity(), cluster);
    let expected: Vec<u64> = (1..=50).chain([99]).collect();
    assert_eq!(node.machine().entries(), expected);
    let applied = node.propose(Ledger::payload(100), term).await.unwrap();
    assert!(applied.at.index > 702, "{:?}", applied.at);

    quorum.start(2).await.unwrap();
    let change = MemberChange { add: Some(quorum.members[1].clone()), remove: None };
    node.change_members(change, Duration::from_secs(30)).await.result.unwrap();
    quorum.converge(applied.at.index).await;
    let expected: Vec<u64> = expected.into_iter().chain([100]).collect();
    assert_eq!(quorum.node(2).machine().entries(), expected);

    // With data in it, it is nobody's to restore into.
    quorum.kill(1).await;
    let refused = make(&quorum, Box::new(Saved(Vec::new()))).unwrap_err();
    assert_eq!(refused.0.code(), ErrorCode::InvalidParams);
}

/// What was cut short counts as nothing: it does not start, and is made anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_was_cut_short_does_not_start_and_is_made_anew() {
    let mut quorum = Quorum::new(1, |_| {}).await;
    let dir = quorum.options(1).data_dir;
    make(&quorum, Box::new(Cut)).unwrap_err();
    assert!(is_vacant(&dir).unwrap());
    let refused = quorum.start(1).await.err().expect("half of a state is no state");
    assert!(refused.0.message().contains("cut short"), "{refused}");
    make(&quorum, Box::new(Saved(vec![5]))).unwrap();
    let node = quorum.start(1).await.unwrap();
    let mut leadership = node.watch_leadership();
    let leads = leadership.wait_for(|now| now.role == Role::Leader);
    tokio::time::timeout(LIMIT, leads).await.expect("it leads").unwrap();
    assert_eq!(node.machine().entries(), [5, 99]);
}
