//! Reads that meet a no-lease mark, and groups that are looked at off the stream's path.

use std::time::Duration;

use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{ObjectId, SegmentId, v1};

use super::requests::keys;
use super::{Rig, until};
use crate::directory::{SessionId, TenantId};
use crate::service::leases::{Marked, Marks};
use crate::service::reads;

fn exist(names: &[&str], suspect_nodes: Vec<u64>) -> v1::ClientRequest {
    let body = v1::ExistRequest {
        keys: keys(names),
        lease_mode: v1::LeaseMode::Grant as i32,
        lease_ttl_ms: 5_000,
        suspect_nodes,
    };
    v1::ClientRequest { id: 1, remaining_ms: 5_000, tenant: String::new(), body: Some(Ask::Exist(body)) }
}

fn locate(names: &[&str]) -> v1::ClientRequest {
    let body = v1::LocateRequest { keys: keys(names), lease_ttl_ms: 5_000, ..Default::default() };
    v1::ClientRequest { id: 1, remaining_ms: 5_000, tenant: String::new(), body: Some(Ask::Locate(body)) }
}

/// L3. A read that gives up after its leases ran out takes nobody else's with it. Fails when it gives back whatever is there.
#[tokio::test]
async fn a_read_that_outlived_its_leases_gives_none_back() {
    let rig = Rig::start(|_| {}).await;
    rig.datanode(1, 1 << 20).await;
    let session = rig.hello(1).await;
    let (front, marked) =
        (ObjectId(rig.put(session, "front", "").await), ObjectId(rig.put(session, "marked", "").await));
    let tenure = rig.service.tenure().expect("it leads");
    let mut marks = Marks::new(tenure.leases.clone());
    assert_eq!(marks.mark(marked, tenure.now_ms()), Marked::Yes);
    let mut short = exist(&["front", "marked"], vec![]);
    if let Some(Ask::Exist(body)) = &mut short.body {
        body.lease_ttl_ms = 20;
    }
    let waiting = Box::pin(reads::answer(&rig.service, &short, TenantId::DEFAULT, SessionId(session)));
    let waiting = futures::future::select(waiting, Box::pin(tokio::time::sleep(Duration::from_millis(60)))).await;
    let futures::future::Either::Right((_, waiting)) = waiting else { panic!("it waits for the mark") };
    assert_eq!(tenure.leases.live(front, tenure.now_ms()), None, "its own lease ran out");
    let long = exist(&["front"], vec![]);
    reads::answer(&rig.service, &long, TenantId::DEFAULT, SessionId(session)).await.expect("answered");
    drop(waiting);
    assert_eq!(tenure.leases.live(front, tenure.now_ms()).map(|(count, _)| count), Some(1));
}

/// L3. Fails when `Taken` gives nothing back: the object in front of the marked one is then leased twice, and one release
/// leaves it leased (tried).
#[tokio::test]
async fn a_read_that_meets_a_mark_leases_nothing_twice() {
    let rig = Rig::start(|_| {}).await;
    rig.datanode(1, 1 << 20).await;
    let session = rig.hello(1).await;
    let (front, marked) =
        (ObjectId(rig.put(session, "front", "").await), ObjectId(rig.put(session, "marked", "").await));
    let tenure = rig.service.tenure().expect("it leads");
    for request in [exist(&["front", "marked"], vec![]), locate(&["front", "marked"])] {
        let mut marks = Marks::new(tenure.leases.clone());
        assert_eq!(marks.mark(marked, tenure.now_ms()), Marked::Yes);
        assert!(reads::try_answer(&rig.service, &tenure, &request, SessionId(session)).is_none());
        assert_eq!(tenure.leases.live(front, tenure.now_ms()), None, "nobody was answered");
        // One whose time is over while it waits holds nothing either.
        let waited = reads::answer(&rig.service, &request, TenantId::DEFAULT, SessionId(session));
        assert!(tokio::time::timeout(Duration::from_millis(20), waited).await.is_err());
        assert_eq!(tenure.leases.live(front, tenure.now_ms()), None, "nobody was answered");
        let answer = reads::answer(&rig.service, &request, TenantId::DEFAULT, SessionId(session));
        let (answer, ()) = tokio::join!(answer, async {
            until("the read waits", || async { tenure.leases.live(front, tenure.now_ms()).is_some() }).await;
            drop(marks);
        });
        answer.expect("answered");
        for object in [front, marked] {
            assert_eq!(tenure.leases.live(object, tenure.now_ms()).map(|(count, _)| count), Some(1));
            tenure.leases.release(object);
            assert_eq!(tenure.leases.live(object, tenure.now_ms()), None);
        }
    }
}

/// A large group of which some node is suspected is looked at in a task of its own; else a count is enough.
#[tokio::test]
async fn a_group_is_walked_off_the_streams_path() {
    let rig = Rig::start(|_| {}).await;
    let (node, _) = rig.datanode(1, 1 << 24).await;
    let session = rig.hello(1).await;
    for i in 0..600 {
        rig.put(session, &format!("k{i}"), "g").await;
    }
    let tenure = rig.service.tenure().expect("it leads");
    let whole = exist(&["k0"], vec![]);
    assert!(reads::try_answer(&rig.service, &tenure, &whole, SessionId(session)).is_some());
    let suspecting = exist(&["k0"], vec![node + 1]);
    assert!(reads::try_answer(&rig.service, &tenure, &suspecting, SessionId(session)).is_none());
    let answer = reads::answer(&rig.service, &suspecting, TenantId::DEFAULT, SessionId(session)).await;
    assert!(matches!(answer, Ok(Answer::Exist(e)) if e.present[..] == [1]));
    assert_eq!(rig.service.directory().group_walk(TenantId::DEFAULT, b"g", &[node + 1]), 600);
    assert_eq!(rig.service.directory().group_walk(TenantId::DEFAULT, b"g", &[]), 0);
}

/// L5 by segment: half of it may be leased; above that a read is answered without a lease.
#[tokio::test]
async fn half_of_a_segment_may_be_leased() {
    let rig = Rig::start(|_| {}).await;
    // Of two segments the one is small: the pool's limit, and the client's, are far away.
    rig.datanode(1, 1 << 26).await;
    let (node, incarnation) = rig.datanode(2, 20 * 1_088).await;
    let session = rig.hello(1).await;
    let small = rig.service.directory().segments().iter().find(|s| s.node.0 == node).expect("mounted").segment;
    rig.service.tenure().expect("it leads").note_segments(rig.service.directory());
    let mut leased = 0;
    for i in 0..16 {
        let key = format!("k{i}");
        let request = v1::PutStartRequest { preferred_segments: vec!["small".to_owned()], ..Default::default() };
        put_into(&rig, session, &key, small, request).await;
        match rig.ask("", 1_000, locate(&[&key]).body.expect("a body")).await {
            Ok(Answer::Locate(answer)) => leased += u32::from(answer.objects[0].lease_ttl_ms > 0),
            other => panic!("{other:?}"),
        }
    }
    let bytes = rig.service.tenure().expect("it leads").leases.segment_bytes(small);
    assert!(
        (9..=11).contains(&leased),
        "{leased} of 16 objects in a segment for 20, {bytes} bytes, life {incarnation}"
    );
}

/// Puts an object into a segment: elsewhere nodes are excluded.
async fn put_into(rig: &Rig, session: u64, key: &str, segment: SegmentId, request: v1::PutStartRequest) {
    let others = rig.service.directory().segments();
    let excluded_nodes = others.iter().filter(|s| s.segment != segment).map(|s| s.node.0).collect();
    let item = super::requests::item(key, 900, rand::random(), "");
    let request = v1::PutStartRequest { session_id: session, items: vec![item], excluded_nodes, ..request };
    let Ok(Answer::PutStart(mut answer)) = rig.ask("", 5_000, Ask::PutStart(request)).await else {
        panic!("not started")
    };
    let grant = answer.grants.remove(0);
    assert_eq!((grant.error.clone(), grant.replicas[0].segment_id), (None, segment.0));
    let item = super::requests::ending(&rig.service, key, &grant, v1::ReplicaOutcome::Stored);
    let end = v1::PutEndRequest { session_id: session, items: vec![item] };
    assert!(
        matches!(rig.ask("", 5_000, Ask::PutEnd(end)).await, Ok(Answer::PutEnd(e)) if e.results[0].error.is_none())
    );
}

/// The leader has every master audit; readiness and metrics say how far it came.
#[tokio::test]
async fn the_auditor_runs_and_says_what_it_found() {
    let rig = Rig::start(|options| options.audit_interval = Duration::from_millis(5)).await;
    rig.datanode(1, 1 << 20).await;
    let session = rig.hello(1).await;
    rig.put(session, "k", "g").await;
    until("two passes are made", || async { rig.master.readiness().audit_passes >= 2 }).await;
    assert_eq!(rig.master.readiness().audit_violations, 0);
    rig.service.directory().spoil_a_counter();
    until("it is found", || async { rig.master.readiness().audit_violations > 0 }).await;
    let families = rig.master.metrics().gather();
    let found = families.iter().find(|f| f.name() == "tidepool_audit_violations_total").expect("registered");
    let counted: f64 = found.get_metric().iter().map(|m| m.get_counter().get_value()).sum();
    assert!(counted >= 1.0);
    assert_eq!(found.get_metric().len(), 5, "every kind is there from the start");
    assert!(families.iter().any(|f| f.name() == "tidepool_audit_step_seconds"));
}
