//! What others are told of the history in which something was made, once a directory has gone on in another one.

use tidepool_proto::v1::node_service_server::NodeService;
use tidepool_proto::v1::read_report::Kind;
use tidepool_proto::{ClusterId, History, ObjectId};

use super::*;
use crate::directory::{Contact, CopyStart, ObjectView, Op, Outcome, TaskId};
use crate::service::copying::{self, Told};
use crate::service::upkeep;

const BEFORE: History = History(77);

async fn registered(rig: &Rig, uuid: u8) -> v1::RegisterResponse {
    let answer = NodeService::register(&rig.nodes, Request::new(requests::register(uuid, uuid, "h"))).await;
    let answer = answer.expect("answered").into_inner();
    assert_eq!(answer.error, None);
    answer
}

/// Datanodes compare headers with it, of what they copy and of what they verify, and go on with a life of that history only.
/// Fails when the answer to a registration, the order of a copy or the question about a replica names the present one (each tried).
#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_before_is_named_with_its_history() {
    let rig = Rig::start(|options| options.node_suspect_timeout = Duration::from_secs(60)).await;
    let (source, _) = rig.datanode(1, 1 << 24).await;
    let session = rig.hello(1).await;
    let old = ObjectId(rig.put(session, "old", "").await);
    let tenure = rig.service.tenure().expect("it leads");
    let begins = Op::BeginHistory { before: (ClusterId([7; 16]), BEFORE) };
    assert_eq!(tenure.proposer.propose_one(begins, None).await, Ok(Outcome::Done));

    assert_eq!(registered(&rig, 1).await.registered_history, BEFORE.0, "the life goes on");
    let is_listed = || rig.service.directory().nodes().iter().all(|node| node.contact == Contact::Heard);
    until("it is listed again", || async { is_listed() }).await;
    let session = rig.hello(2).await;
    let new = ObjectId(rig.put(session, "new", "").await);
    let (target, _) = rig.datanode(2, 1 << 24).await;
    assert_eq!(registered(&rig, 2).await.registered_history, 0, "it is of the present one");

    let (old_history, new_history) = (BEFORE.0, 0);
    let copy = |object| CopyStart { object, instead_of: None, targets: Default::default(), task: TaskId(0), up_to: 0 };
    let started = copying::start(&rig.service, &tenure, &[copy(old), copy(new)]).await.expect("started");
    assert!(started.iter().all(Result::is_ok), "{started:?}");
    let orders = Told::default().fresh(&rig.service, &tenure, NodeId(target));
    let mut histories: Vec<_> = orders.iter().map(|order| (ObjectId(order.object_id), order.history)).collect();
    histories.sort_unstable();
    assert_eq!(histories, [(old, old_history), (new, new_history)]);

    let replica_of = |object| {
        let first = |view: &ObjectView<'_>| view.listed().next().map(|place| place.replica.0);
        rig.service.directory().with_object_id(object, |view| view.and_then(first)).expect("a replica")
    };
    let report = |object: ObjectId| v1::ReadReport {
        object_id: object.0,
        replica_id: replica_of(object),
        kind: Kind::Corrupt as i32,
        ..Default::default()
    };
    let reports = v1::ReadReportRequest { reports: vec![report(old), report(new)] };
    rig.ask("", 5_000, Ask::ReadReport(reports)).await.expect("taken");
    let asked = tenure.nodes.take_verifications(NodeId(source), 9);
    let histories: Vec<_> = asked.iter().map(|question| (ObjectId(question.object_id), question.history)).collect();
    assert_eq!(histories, [(old, old_history), (new, new_history)]);
    rig.master.shutdown().await;
}

/// However soon a silent datanode is forgotten: one of an earlier history that was not heard yet has time to follow. Fails with
/// the timeout as it is set (tried).
#[tokio::test(flavor = "multi_thread")]
async fn a_node_of_before_is_not_forgotten_before_it_could_follow() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = agreement::options(dir.path(), 1, |_| {}).remove(0);
    let rig = agreement::start(&options).await;
    until("it leads", || async { rig.service.tenure().is_ok() }).await;
    rig.datanode(1, 1 << 24).await;
    let session = rig.hello(1).await;
    rig.put(session, "k", "").await;
    let begins = Op::BeginHistory { before: (ClusterId([7; 16]), BEFORE) };
    let begun = rig.service.tenure().expect("it leads").proposer.propose_one(begins, None).await;
    assert_eq!(begun, Ok(Outcome::Done));
    rig.datanode(2, 1 << 24).await;
    rig.master.shutdown().await;

    let mut options = options;
    options.node_forget_timeout = Duration::from_millis(300);
    let rig = agreement::start(&options).await;
    until("it leads", || async { rig.service.tenure().is_ok() }).await;
    let tenure = rig.service.tenure().expect("it leads");
    // Forgotten as it should be: it was registered in this history.
    until("the other one is forgotten", || async { rig.service.directory().nodes().len() < 2 }).await;
    until("more looks were taken", || async { tenure.age() > 4 * options.node_forget_timeout }).await;
    let counts = rig.service.directory().counts();
    assert!(counts.objects == 1 || tenure.age() >= upkeep::FOLLOWS_WITHIN, "{counts:?}");
    rig.master.shutdown().await;
}
