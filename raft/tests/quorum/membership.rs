//! Members that come and go: one to three and back, dead ones, leaders, under load; and who is not taken in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::NodeId;
use tidepool_raft::{ChangeReport, FatalError, LastOne, Member, MemberChange, MembershipError, Node, Options, Role};
use tokio::task::JoinHandle;

use crate::ledger::Ledger;
use crate::members::{LIMIT, Quorum, standing, until};

/// How long one change may take here.
const WITHIN: Duration = Duration::from_secs(30);

fn joins(options: &mut Options, initial: usize) {
    options.join = options.node_id.0 > initial as u64;
    let keep = if options.join { 0 } else { initial };
    options.members.truncate(keep);
}

fn one(options: &mut Options) {
    joins(options, 1);
}

fn three(options: &mut Options) {
    joins(options, 3);
}

fn three_without_log(options: &mut Options) {
    joins(options, 3);
    options.keep_log_entries = 0;
}

fn add(quorum: &Quorum, id: u64) -> MemberChange {
    MemberChange { add: Some(quorum.members[id as usize - 1].clone()), remove: None }
}

fn remove(id: u64) -> MemberChange {
    MemberChange { add: None, remove: Some(NodeId(id)) }
}

fn replace(quorum: &Quorum, old: u64, new: u64) -> MemberChange {
    MemberChange { remove: Some(NodeId(old)), ..add(quorum, new) }
}

/// Asks whoever leads, and the next one when that one hands over in order to leave, as the command line does.
async fn change(quorum: &Quorum, change: MemberChange) -> ChangeReport {
    let deadline = tokio::time::Instant::now() + LIMIT;
    let mut steps = Vec::new();
    loop {
        let (leader, _) = quorum.leader().await;
        let report = leader.change_members(change.clone(), WITHIN).await;
        steps.extend(report.steps);
        let passes = matches!(report.result, Err(MembershipError::NotLeader { .. } | MembershipError::Changing(_)));
        if !passes || tokio::time::Instant::now() > deadline {
            return ChangeReport { steps, result: report.result };
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn done(quorum: &Quorum, wanted: MemberChange) -> Vec<String> {
    let report = change(quorum, wanted.clone()).await;
    report.result.unwrap_or_else(|error| panic!("{wanted:?}: {error}; done: {:?}", report.steps));
    report.steps
}

async fn voters(quorum: &Quorum) -> Vec<u64> {
    let (leader, _) = quorum.leader().await;
    let members = leader.status().members;
    members.iter().filter(|m| m.voter).map(|m| m.member.node_id.0).collect()
}

/// Proposals all the time, by whoever leads.
struct Load {
    stop: Arc<AtomicBool>,
    acknowledged: Arc<Mutex<Vec<u64>>>,
    task: JoinHandle<()>,
}

impl Load {
    fn start(nodes: Vec<Node<Ledger>>) -> Load {
        let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (stopping, noted, next) = (stop.clone(), acknowledged.clone(), AtomicU64::new(1_000_000));
        let task = tokio::spawn(async move {
            while !stopping.load(Ordering::Relaxed) {
                let leads = |n: &&Node<Ledger>| standing(n).role == Role::Leader;
                let Some(leader) = nodes.iter().filter(leads).max_by_key(|n| standing(n).term) else {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    continue;
                };
                let id = next.fetch_add(1, Ordering::Relaxed);
                let proposal = leader.propose(Ledger::payload(id), standing(leader).term);
                match tokio::time::timeout(Duration::from_secs(2), proposal).await {
                    Ok(Ok(_)) => noted.lock().push(id),
                    Ok(Err(_)) | Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        });
        Load { stop, acknowledged, task }
    }

    /// Ends the load; everything acknowledged must be in the leader's book, in that order.
    async fn end(self, quorum: &Quorum) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
        quorum.put(7).await;
        let (leader, _) = quorum.leader().await;
        let entries = leader.machine().entries();
        let mut at = entries.iter();
        let acknowledged = self.acknowledged.lock();
        assert!(acknowledged.len() > 10, "the load did next to nothing: {}", acknowledged.len());
        for id in acknowledged.iter() {
            assert!(at.any(|entry| entry == id), "proposal {id} was acknowledged and is lost or out of order");
        }
    }
}

async fn removed(node: &Node<Ledger>) {
    let fatal = tokio::time::timeout(LIMIT, node.fatal()).await.expect("a removed member stands by for ever");
    assert!(matches!(&fatal, FatalError::Removed(why) if why.contains("left the quorum")), "{fatal}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_of_one_grows_to_three_and_shrinks_to_one_under_load() {
    let mut quorum = Quorum::new(3, one).await;
    let mut nodes = Vec::new();
    for id in 1..=3 {
        nodes.push(quorum.start(id).await.unwrap());
    }
    quorum.put(1).await;
    let identity = quorum.node(1).identity();
    let load = Load::start(nodes.clone());
    let waits = until("node 2 says what it waits for", || nodes[1].status().waiting_for).await;
    assert!(waits.contains("tidepool member add 2@"), "{waits}");
    assert_eq!(nodes[1].identity(), Default::default(), "it took over an identity without being asked");

    let steps = done(&quorum, add(&quorum, 2)).await;
    assert_eq!(steps.len(), 4, "{steps:?}");
    done(&quorum, add(&quorum, 3)).await;
    assert_eq!(voters(&quorum).await, [1, 2, 3]);
    assert!(nodes.iter().all(|node| node.identity() == identity));
    until("all vote", || nodes.iter().all(|n| matches!(standing(n).role, Role::Standby | Role::Leader)).then_some(()))
        .await;
    // The call again finds nothing to do.
    assert_eq!(done(&quorum, add(&quorum, 3)).await, Vec::<String>::new());
    assert_eq!(*nodes[0].watch_members().borrow(), quorum.members);

    // Back to one, and not the one it began with: leaders hand over before they leave.
    done(&quorum, remove(1)).await;
    removed(&nodes[0]).await;
    quorum.kill(1).await;
    done(&quorum, remove(2)).await;
    removed(&nodes[1]).await;
    quorum.kill(2).await;
    assert_eq!(voters(&quorum).await, [3]);
    load.end(&quorum).await;

    // The last one comes back alone.
    drop(nodes);
    quorum.kill(3).await;
    quorum.restart(3).await;
    quorum.put(8).await;
    assert_eq!(quorum.node(3).identity(), identity);
}

/// User report 19 (openraft#808): a crashed member could not be removed. With two of three alive it is, in seconds; then a
/// fourth joins, whose log begins with a snapshot, and takes its place.
#[tokio::test(flavor = "multi_thread")]
async fn case_019_a_dead_member_is_removed_and_another_joins_by_snapshot() {
    let mut quorum = Quorum::new(4, three_without_log).await;
    for id in 1..=3 {
        quorum.start(id).await.unwrap();
    }
    for id in 0..200 {
        quorum.put(id).await;
    }
    let (leader, _) = quorum.leader().await;
    let dead = (1..=3).find(|id| *id != leader.node_id().0).unwrap();
    quorum.kill(dead).await;
    let report = leader.change_members(remove(dead), Duration::from_secs(10)).await;
    report.result.unwrap();
    quorum.purge(&[leader.node_id().0], 200).await;

    let node = quorum.start(4).await.unwrap();
    done(&quorum, add(&quorum, 4)).await;
    assert!(node.status().snapshot_index > 0, "it caught up without a snapshot");
    let last = quorum.put(1000).await;
    quorum.converge(last).await;
    // It counts: without the other old one, it and the leader hold the quorum.
    let gone = (1..=3).find(|id| *id != dead && *id != leader.node_id().0).unwrap();
    quorum.kill(gone).await;
    let last = quorum.put(1001).await;
    quorum.converge(last).await;
    // The dead one, started again, is told.
    let late = quorum.restart(dead).await;
    removed(&late).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_member_is_replaced_under_load_the_leader_too() {
    let mut quorum = Quorum::new(6, three).await;
    for id in 1..=6 {
        quorum.start(id).await.unwrap();
    }
    quorum.put(1).await;
    let load = Load::start((1..=6).map(|id| quorum.node(id)).collect());
    for (old, new) in [(1, 4), (2, 5), (3, 6)] {
        done(&quorum, replace(&quorum, old, new)).await;
        removed(&quorum.node(old)).await;
        quorum.kill(old).await;
        assert_eq!(done(&quorum, replace(&quorum, old, new)).await, Vec::<String>::new(), "it was done already");
    }
    assert_eq!(voters(&quorum).await, [4, 5, 6]);
    load.end(&quorum).await;
    let last = quorum.put(9).await;
    quorum.converge(last).await;
    for id in 4..=6 {
        quorum.kill(id).await;
    }
    for id in 4..=6 {
        quorum.restart(id).await;
    }
    let last = quorum.put(10).await;
    quorum.converge(last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_leader_hands_over_first_and_takes_no_part_afterwards() {
    let quorum = Quorum::started(|_| {}).await;
    quorum.put(1).await;
    let (leader, term) = quorum.leader().await;
    until("a standby can take over", || {
        let status = leader.status();
        status.members.iter().all(|m| m.matched_index == Some(status.last_log_index)).then_some(())
    })
    .await;
    let report = leader.change_members(remove(leader.node_id().0), WITHIN).await;
    let Err(MembershipError::NotLeader { hint: Some(next) }) = report.result.clone() else { panic!("{report:?}") };
    assert_ne!(next.node_id, leader.node_id());
    assert_eq!(report.steps.len(), 1, "{report:?}");
    assert_eq!(voters(&quorum).await.len(), 3, "it left before another led");
    done(&quorum, remove(leader.node_id().0)).await;
    removed(&leader).await;
    assert!(leader.status().fatal.is_some_and(|why| why.contains("MEMBER_REMOVED")));
    let (now, now_in) = quorum.leader().await;
    assert!(now.node_id() != leader.node_id() && now_in > term);
    quorum.put(2).await;
}

/// I4. (Tried without the record of who left: node 3 is taken in again, and with a wiped directory.)
#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_left_is_refused_for_ever_by_whoever_leads() {
    let mut quorum = Quorum::new(4, three_without_log).await;
    for id in 1..=3 {
        quorum.start(id).await.unwrap();
    }
    quorum.put(1).await;
    done(&quorum, remove(3)).await;
    removed(&quorum.node(3)).await;
    quorum.kill(3).await;
    let last = quorum.put(2).await;
    quorum.converge(last).await;
    // Known from a snapshot alone, after a restart of all, and to whoever leads then.
    quorum.purge(&[1, 2], 10).await;
    for id in [1, 2] {
        quorum.kill(id).await;
    }
    for id in [1, 2] {
        quorum.restart(id).await;
    }
    quorum.put(3).await;
    quorum.wipe(3);
    let node = quorum.start(4).await.unwrap();
    let mut third = add(&quorum, 4);
    third.add.as_mut().unwrap().node_id = NodeId(3);
    for _ in 0..2 {
        let (leader, _) = quorum.leader().await;
        let error = leader.change_members(third.clone(), WITHIN).await.result.unwrap_err();
        assert!(matches!(error, MembershipError::IdUsed(_)), "{error}");
        assert!(matches!(leader.plan_members(&third).await, Err(MembershipError::IdUsed(_))));
        // One that votes already is not taken in anew either: it may have been wiped.
        done(&quorum, add(&quorum, leader.node_id().0)).await;
        quorum.kill(leader.node_id().0).await;
        quorum.restart(leader.node_id().0).await;
        quorum.put(4).await;
    }
    // The newcomer learns it with its first snapshot, and remembers it when it is alone.
    done(&quorum, add(&quorum, 4)).await;
    for id in [1, 2] {
        done(&quorum, remove(id)).await;
    }
    let error = node.change_members(third, WITHIN).await.result.unwrap_err();
    assert!(matches!(error, MembershipError::IdUsed(_)), "{error}");
}

/// I4: a wiped voter that is started to join is let in by nobody: it would vote for a log that it forgot.
/// (Tried with an identity learned from whoever answers, without the leader's invitation: it admits the others' calls.)
#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_voter_that_is_started_to_join_gets_no_vote() {
    let mut quorum = Quorum::started(|options| options.join = options.data_dir.join("joins").exists()).await;
    quorum.put(1).await;
    let (leader, _) = quorum.leader().await;
    let wiped = (1..=3).find(|id| *id != leader.node_id().0).unwrap();
    quorum.kill(wiped).await;
    quorum.wipe(wiped);
    std::fs::write(quorum.options(wiped).data_dir.join("joins"), "").unwrap();
    let node = quorum.start(wiped).await.unwrap();
    until("it waits to be taken in", || node.status().waiting_for).await;
    until("the leader hears nothing of it", || {
        let members = leader.status().members;
        let wiped = members.iter().find(|m| m.member.node_id.0 == wiped)?;
        wiped.last_heard.is_none_or(|ago| ago > Duration::from_secs(1)).then_some(())
    })
    .await;
    let again = MemberChange { add: Some(quorum.members[wiped as usize - 1].clone()), remove: None };
    let error = leader.change_members(again, WITHIN).await.result.unwrap_err();
    assert!(matches!(&error, MembershipError::Unreachable(why) if why.contains("under a new id")), "{error}");
    assert_eq!((node.identity(), node.status().last_log_index), (Default::default(), 0));
    quorum.put(2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_would_lose_the_quorum_is_refused_and_changes_nothing() {
    let mut quorum = Quorum::started(|_| {}).await;
    quorum.put(1).await;
    let (leader, term) = quorum.leader().await;
    let others: Vec<u64> = (1..=3).filter(|id| *id != leader.node_id().0).collect();
    quorum.kill(others[0]).await;
    until("the dead one counts as silent", || {
        let members = leader.status().members;
        let dead = members.iter().find(|m| m.member.node_id.0 == others[0])?;
        dead.last_heard.is_none_or(|ago| ago > Duration::from_secs(1)).then_some(())
    })
    .await;
    let error = leader.change_members(remove(others[1]), WITHIN).await.result.unwrap_err();
    assert!(matches!(&error, MembershipError::AtRisk(why) if why.contains(&format!("node {}", others[0]))), "{error}");
    assert!(matches!(leader.plan_members(&remove(others[1])).await, Err(MembershipError::AtRisk(_))));
    assert_eq!(voters(&quorum).await, [1, 2, 3]);
    quorum.put(2).await;
    let (now, now_in) = quorum.leader().await;
    assert_eq!((now.node_id(), now_in), (leader.node_id(), term));
    assert_eq!(leader.plan_members(&remove(others[0])).await.unwrap().len(), 1, "the dead one may go");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_what_it_should_be_is_not_taken_in() {
    let mut quorum = Quorum::new(5, three).await;
    for id in 1..=4 {
        quorum.start(id).await.unwrap();
    }
    quorum.put(1).await;
    let strangers = Quorum::started(|_| {}).await;
    strangers.put(1).await;
    let mut forming = Quorum::new(2, |_| {}).await;
    forming.start(1).await.unwrap();
    let (leader, _) = quorum.leader().await;
    let at = |id: u64, address: &Member| MemberChange {
        add: Some(Member { node_id: NodeId(id), address: address.address.clone() }),
        remove: None,
    };
    let fourth = &quorum.members[3];
    for (wanted, says) in [
        (at(9, fourth), "calls itself node 4"),
        (at(7, &forming.members[0]), "calls itself node 1"),
        (at(7, &quorum.members[0]), "address of node"),
    ] {
        let error = leader.change_members(wanted, WITHIN).await.result.unwrap_err();
        assert!(matches!(&error, MembershipError::Invalid(why) if why.contains(says)), "{error} does not say {says}");
    }
    // Right by its number, but of another cluster, or not started to join. Its own number is free here.
    let mut alone = Quorum::new(5, |options| options.members.retain(|m| m.node_id == options.node_id)).await;
    alone.start(5).await.unwrap();
    alone.put(1).await;
    let error = leader.change_members(at(5, &alone.members[4]), WITHIN).await.result.unwrap_err();
    assert!(matches!(&error, MembershipError::Invalid(why) if why.contains("belongs to cluster")), "{error}");
    let mut waiting = Quorum::new(6, |options| options.members.retain(|m| m.node_id.0 >= 5)).await;
    waiting.start(6).await.unwrap();
    let error = leader.change_members(at(6, &waiting.members[5]), WITHIN).await.result.unwrap_err();
    assert!(matches!(&error, MembershipError::Invalid(why) if why.contains("--join")), "{error}");
    assert_eq!(waiting.node(6).identity(), Default::default());
    // Nobody there: told in time, and nothing is left behind.
    let error = leader.change_members(add(&quorum, 5), WITHIN).await.result.unwrap_err();
    assert!(matches!(&error, MembershipError::Unreachable(why) if why.contains("does not answer")), "{error}");
    assert_eq!(leader.status().members.len(), 3);
    done(&quorum, add(&quorum, 4)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_change_at_a_time_and_each_call_ends_by_its_time() {
    let mut quorum = Quorum::new(4, three).await;
    for id in 1..=3 {
        quorum.start(id).await.unwrap();
    }
    quorum.put(1).await;
    // The port of node 4 takes connections, and nobody answers there: it is waited for.
    let (leader, _) = quorum.leader().await;
    let (first, wanted) = (leader.clone(), add(&quorum, 4));
    let waiting = tokio::spawn(async move {
        loop {
            let report = first.change_members(wanted.clone(), WITHIN).await;
            // The second one may have been first.
            if !matches!(report.result, Err(MembershipError::Changing(_))) {
                return report;
            }
        }
    });
    let second = until("the first one is under way", || {
        let leader = leader.clone();
        let error = futures::executor::block_on(leader.change_members(remove(99), WITHIN)).result.unwrap_err();
        matches!(error, MembershipError::Changing(_)).then_some(error)
    })
    .await;
    assert!(second.to_string().contains("node 4 is added"), "{second}");
    let error = waiting.await.unwrap().result.unwrap_err();
    assert!(matches!(error, MembershipError::Unreachable(_)), "{error}");
    let report = leader.change_members(add(&quorum, 4), Duration::from_millis(100)).await;
    let error = report.result.unwrap_err();
    assert!(matches!(&error, MembershipError::TimedOut(why) if why.contains("node 4")), "{error}");
    assert_eq!(report.steps, Vec::<String>::new());
    assert_eq!(voters(&quorum).await, [1, 2, 3]);
}

/// Who stops leading while it looks whether a change is safe hears nobody any more, and must not take that for a risk.
/// Fails when the plan is judged without asking whether one leads still (tried).
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_hands_over_meanwhile_sends_a_change_on() {
    let mut quorum = Quorum::started(|_| ()).await;
    quorum.put(1).await;
    let (leader, _) = quorum.leader().await;
    let dies = [1, 2, 3].into_iter().find(|id| *id != leader.node_id().0).unwrap();
    let stays = NodeId(6 - dies - leader.node_id().0);
    quorum.kill(dies).await;
    let silent = |leader: &Node<Ledger>| {
        let members = leader.status().members;
        members.iter().any(|m| m.member.node_id.0 == dies && m.last_heard.is_some_and(|ago| ago.as_millis() > 1000))
    };
    until("the dead one is silent", || silent(&leader).then_some(())).await;
    let (asked, wanted) = (leader.clone(), remove(stays.0));
    let waiting = tokio::spawn(async move { asked.change_members(wanted, WITHIN).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    leader.transfer_leader(Some(stays)).await.unwrap();
    let error = waiting.await.unwrap().result.unwrap_err();
    assert!(matches!(error, MembershipError::NotLeader { .. }), "{error}");
}

fn alone_if_told(options: &mut Options) {
    if options.data_dir.join("alone").exists() {
        options.members.retain(|member| member.node_id == options.node_id);
    }
}

/// I1: a majority is gone for ever. What is left goes on alone, in another cluster and history, with all it held; the lost
/// ones, should they come back, are strangers, and their ids are used up.
/// Fails when the old identity is kept (tried).
#[tokio::test(flavor = "multi_thread")]
async fn the_last_one_goes_on_alone_in_a_new_history() {
    let mut quorum = Quorum::started(alone_if_told).await;
    for id in 0..50 {
        quorum.put(id).await;
    }
    let last = quorum.put(50).await;
    quorum.converge(last).await;
    let covered = quorum.node(3).compact().await.unwrap();
    let last = quorum.put(51).await;
    quorum.converge(last).await;
    let before = quorum.node(3).identity();
    let entries = quorum.node(3).machine().entries();
    for id in 1..=3 {
        quorum.kill(id).await;
    }
    let dir = quorum.options(3).data_dir;
    let found = LastOne::open(&dir).unwrap();
    assert_eq!((found.facts.node_id, found.facts.cluster), (NodeId(3), before));
    assert!(found.facts.last_index >= last && found.facts.snapshot_index == covered, "{:?}", found.facts);
    assert_eq!(found.facts.others, quorum.members[..2]);
    drop(found);
    // Cut short after its first step, or repeated: the same in the end.
    LastOne::open(&dir).unwrap().go_on_alone(Ledger::payload(60)).unwrap();
    let now = LastOne::open(&dir).unwrap().go_on_alone(Ledger::payload(61)).unwrap();
    assert!(now.cluster != before.cluster && now.history != before.history);

    std::fs::write(dir.join("alone"), "").unwrap();
    let survivor = quorum.restart(3).await;
    let term = until("it leads alone", || {
        let standing = standing(&survivor);
        (standing.role == Role::Leader).then_some(standing.term)
    })
    .await;
    let entries: Vec<_> = entries.into_iter().chain([60, 61]).collect();
    assert_eq!((survivor.identity(), survivor.machine().entries()), (now, entries));
    // The lost ones come back and go on among themselves: two clusters that do not know each other.
    for id in [1, 2] {
        quorum.restart(id).await;
    }
    let old = quorum.node(1);
    until("the old ones lead each other", || standing(&old).leader).await;
    survivor.propose(Ledger::payload(100), term).await.unwrap();
    assert_eq!((old.identity(), survivor.status().fatal), (before, None));
    assert!(!old.machine().entries().contains(&100));
    let error = survivor.change_members(add(&quorum, 1), WITHIN).await.result.unwrap_err();
    assert!(matches!(error, MembershipError::IdUsed(_)), "{error}");
}

/// User report 18 (openraft#1544): a panic in replication under rapid joins, promotions and elections.
#[tokio::test(flavor = "multi_thread")]
async fn case_018_fifty_joins_and_removals_with_forced_elections() {
    const CYCLES: u64 = 50;
    let mut quorum = Quorum::new(3 + CYCLES, three).await;
    for id in 1..=3 {
        quorum.start(id).await.unwrap();
    }
    quorum.put(0).await;
    for cycle in 1..=CYCLES {
        let (new, (leader, term)) = (3 + cycle, quorum.leader().await);
        let joined = quorum.start(new).await.unwrap();
        let election = async {
            // Refused when nobody is ready; the next cycle comes at another moment.
            drop(leader.transfer_leader(None).await);
        };
        let (steps, ()) = tokio::join!(done(&quorum, add(&quorum, new)), election);
        assert!(!steps.is_empty());
        if cycle.is_multiple_of(5) {
            let (leader, _) = quorum.leader().await;
            let dies = leader.node_id().0;
            quorum.kill(dies).await;
            quorum.put(cycle * 10).await;
            quorum.restart(dies).await;
        }
        quorum.put(cycle * 10 + 1).await;
        done(&quorum, remove(new)).await;
        removed(&quorum.node(new)).await;
        drop(joined);
        quorum.kill(new).await;
        let last = quorum.put(cycle * 10 + 2).await;
        quorum.converge(last).await;
        assert!(quorum.leader().await.1 >= term);
        let stopped = quorum.running.values().find_map(|running| running.node.status().fatal);
        assert_eq!(stopped, None, "cycle {cycle}");
    }
    assert_eq!(voters(&quorum).await, [1, 2, 3]);
}
