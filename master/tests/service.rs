//! The leader's promises over the real wire: grants, proofs, leases, removal, room, liveness, bad input.
#![allow(missing_docs, clippy::disallowed_methods)]

mod support;

use std::time::Duration;

use support::{Quorum, code, item, until};
use tidepool_proto::capability::Verb;
use tidepool_proto::object::{extent_bytes, stored_bytes};
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{ErrorCode, v1};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn a_put_is_readable_after_its_end_and_not_before() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let grant = client.start(b"k", 1000).await;
    assert_eq!(grant.replicas[0].length, stored_bytes(1000));
    assert_eq!(client.exist(&[b"k", b"missing"], v1::LeaseMode::Grant, 0).await, [false, false]);
    assert_eq!(code(&client.end(b"k", &grant, &node).await.error), ErrorCode::Ok);
    assert_eq!(client.exist(&[b"k", b"missing"], v1::LeaseMode::Grant, 0).await, [true, false]);
    assert_eq!(code(&client.start(b"k", 1000).await.error), ErrorCode::ObjectAlreadyExists);
}

#[tokio::test]
async fn a_retry_with_the_same_token_gets_the_same_grant() {
    let quorum = Quorum::start(|_| {}).await;
    let (_node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let first = client.start_with(b"k", 1000, [7; 16]).await;
    let second = client.start_with(b"k", 1000, [7; 16]).await;
    assert_eq!((first.object_id, &first.replicas), (second.object_id, &second.replicas));
    assert_eq!(code(&client.start_with(b"k", 1000, [8; 16]).await.error), ErrorCode::PutInProgress);
}

/// W3. With the proof check removed from `puts::statuses` the forged end commits and this fails.
#[tokio::test]
async fn an_end_without_the_datanodes_proof_commits_nothing() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let grant = client.start(b"k", 1000).await;
    for proof in [vec![], vec![0; 16], node.proof(Verb::Aborted, grant.object_id, &grant.replicas[0]).to_vec()] {
        let status = v1::ReplicaStatus {
            replica_id: grant.replicas[0].replica_id,
            outcome: v1::ReplicaOutcome::Stored as i32,
            proof: proof.into(),
        };
        let result = client.end_with(b"k", grant.object_id, vec![status]).await;
        assert_eq!(code(&result.error), ErrorCode::CapabilityRefused);
    }
    assert_eq!(client.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await, [false]);
    assert_eq!(code(&client.end(b"k", &grant, &node).await.error), ErrorCode::Ok, "the grant is still open");
}

#[tokio::test]
async fn a_leased_object_is_removed_only_with_force_and_its_space_waits_for_the_lease() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let object = client.put(b"k", 1000, &node).await;
    assert_eq!(client.exist(&[b"k"], v1::LeaseMode::Grant, 60_000).await, [true]);
    assert_eq!(client.remove(b"k", 1, v1::RemoveMode::RespectLease).await, ErrorCode::ObjectHasLease);
    assert_eq!(client.remove(b"k", 2, v1::RemoveMode::Force).await, ErrorCode::Ok);
    assert_eq!(client.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await, [false]);
    assert_eq!(segment(&quorum).await.retired_bytes, extent_bytes(1000), "leased space must not return");
    client.ask(Ask::ReleaseLease(release(&quorum, object))).await.expect("release");
    until("the space returns after the lease was given back", || async { segment(&quorum).await.retired_bytes == 0 })
        .await;
    assert_eq!(segment(&quorum).await.free_bytes, 16 * MIB);
}

/// A release of a lease of this term that runs for long.
fn release(quorum: &Quorum, object: u64) -> v1::ReleaseLeaseRequest {
    let term = quorum.master.readiness().term;
    v1::ReleaseLeaseRequest { object_ids: vec![object], term, expires_log_time_ms: vec![u64::MAX] }
}

/// L3: what a release names must still be its own lease: of this term, and not run out.
#[tokio::test]
async fn a_release_of_another_term_or_of_a_lease_that_ran_out_ends_nobody_elses() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let object = client.put(b"k", 1000, &node).await;
    client.exist(&[b"k"], v1::LeaseMode::Grant, 60_000).await;
    let own = release(&quorum, object);
    let late = v1::ReleaseLeaseRequest { expires_log_time_ms: vec![1], ..own.clone() };
    let other_term = v1::ReleaseLeaseRequest { term: own.term + 1, ..own.clone() };
    for foreign in [late, other_term] {
        client.ask(Ask::ReleaseLease(foreign)).await.expect("release");
        assert_eq!(client.remove(b"k", 1, v1::RemoveMode::RespectLease).await, ErrorCode::ObjectHasLease);
    }
    client.ask(Ask::ReleaseLease(own)).await.expect("release");
    assert_eq!(client.remove(b"k", 2, v1::RemoveMode::RespectLease).await, ErrorCode::Ok);
}

/// W8. A caller that was told of the lease is not told otherwise by a late attempt of the same call.
#[tokio::test]
async fn a_removal_refused_for_a_lease_stays_refused_under_its_number() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let object = client.put(b"k", 1000, &node).await;
    client.exist(&[b"k"], v1::LeaseMode::Grant, 60_000).await;
    assert_eq!(client.remove(b"k", 1, v1::RemoveMode::RespectLease).await, ErrorCode::ObjectHasLease);
    client.ask(Ask::ReleaseLease(release(&quorum, object))).await.expect("release");
    for mode in [v1::RemoveMode::RespectLease, v1::RemoveMode::Force] {
        assert_eq!(client.remove(b"k", 1, mode).await, ErrorCode::ObjectHasLease);
    }
    assert_eq!(client.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await, [true], "a late attempt removed it");
    assert_eq!(client.remove(b"k", 2, v1::RemoveMode::RespectLease).await, ErrorCode::Ok);
}

/// W8. Without the look at the recorded outcome the repeat meets the newer object's lease.
#[tokio::test]
async fn a_repeated_remove_answers_as_the_first_did_whatever_has_the_key_by_now() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    client.put(b"k", 1000, &node).await;
    assert_eq!(client.remove(b"k", 1, v1::RemoveMode::RespectLease).await, ErrorCode::Ok);
    client.put(b"k", 1000, &node).await;
    client.exist(&[b"k"], v1::LeaseMode::Grant, 60_000).await;
    assert_eq!(client.remove(b"k", 1, v1::RemoveMode::RespectLease).await, ErrorCode::Ok);
    assert_eq!(client.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await, [true], "the newer object stays");
}

#[tokio::test]
async fn looking_without_touching_grants_no_lease() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    client.put(b"k", 1000, &node).await;
    assert_eq!(client.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await, [true]);
    assert_eq!(client.remove(b"k", 1, v1::RemoveMode::RespectLease).await, ErrorCode::Ok);
    assert_eq!(segment(&quorum).await.free_bytes, 16 * MIB, "space of an unleased object returns in the same entry");
}

/// User report 24: a full pool refused puts although everything in it could be evicted.
#[tokio::test]
async fn case_024_a_full_pool_evicts_the_oldest_and_takes_the_put() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(4 * MIB).await, quorum.client().await);
    let mut ids = Vec::new();
    for i in 0..64u32 {
        ids.push(client.put(format!("k{i}").as_bytes(), 200_000, &node).await);
    }
    let newest: Vec<String> = (60..64).map(|i| format!("k{i}")).collect();
    let newest: Vec<&[u8]> = newest.iter().map(|k| k.as_bytes()).collect();
    assert_eq!(client.exist(&newest, v1::LeaseMode::NoTouch, 0).await, [true; 4]);
    assert_eq!(client.exist(&[b"k0"], v1::LeaseMode::NoTouch, 0).await, [false], "the oldest went");
}

#[tokio::test]
async fn a_larger_put_finds_room_among_smaller_objects() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(4 * MIB).await, quorum.client().await);
    for i in 0..100u32 {
        client.put(format!("small{i}").as_bytes(), 50_000, &node).await;
    }
    client.put(b"large", 2 * MIB, &node).await;
    assert_eq!(client.exist(&[b"large"], v1::LeaseMode::NoTouch, 0).await, [true]);
}

#[tokio::test]
async fn a_put_into_a_pool_of_leased_objects_ends_no_space_by_its_deadline() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(4 * MIB).await, quorum.client().await);
    client.put(b"leased", 7 * MIB / 8, &node).await;
    client.exist(&[b"leased"], v1::LeaseMode::Grant, 60_000).await;
    let item = item(b"big", 7 * MIB / 2, [1; 16]);
    let request = v1::PutStartRequest { session_id: client.session, items: vec![item], ..Default::default() };
    let body = Some(Ask::PutStart(request));
    let request = v1::ClientRequest { id: 1, remaining_ms: 300, tenant: String::new(), body };
    let response = client.rpc.call(request).await.expect("answered").into_inner();
    match response.body {
        Some(Answer::PutStart(r)) => assert_eq!(code(&r.grants[0].error), ErrorCode::NoSpace),
        other => panic!("{other:?} {:?}", response.error),
    }
    assert_eq!(client.exist(&[b"leased"], v1::LeaseMode::NoTouch, 0).await, [true]);
}

/// User report 38: keys stuck in PROCESSING after their writer died.
#[tokio::test]
async fn case_038_an_abandoned_put_is_discarded_and_its_space_returns_after_the_fence() {
    let quorum = Quorum::start(|o| o.put_start_discard_timeout = Duration::from_millis(300)).await;
    let (mut node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let grant = client.start(b"k", 1000).await;
    until("the grant is discarded", || async { segment(&quorum).await.processing_bytes == 0 }).await;
    assert_eq!(segment(&quorum).await.retired_bytes, extent_bytes(1000), "unclean until fenced");
    assert_eq!(code(&client.end(b"k", &grant, &node).await.error), ErrorCode::GrantLost);
    let beats = tokio_stream::iter([node.beat(1, vec![])]);
    let mut answers = node.rpc.heartbeat(beats).await.expect("heartbeat").into_inner();
    let answer = answers.message().await.expect("answered").expect("one answer");
    assert_eq!(answer.fence_replicas, [grant.replicas[0].replica_id]);
    let beats = tokio_stream::iter([node.beat(2, answer.fence_replicas)]);
    node.rpc.heartbeat(beats).await.expect("heartbeat").into_inner().message().await.expect("answered");
    until("the fenced space returns", || async { segment(&quorum).await.free_bytes == 16 * MIB }).await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        let grant = client.start(b"k", 1000).await;
        let error = client.end(b"k", &grant, &node).await.error;
        if error.is_none() {
            break;
        }
        // On a busy machine this one may be open for that long as well.
        assert_eq!(code(&error), ErrorCode::GrantLost);
        assert!(tokio::time::Instant::now() < deadline, "every put is discarded");
    }
}

#[tokio::test]
async fn a_silent_datanode_is_unlisted_and_listed_again_when_heard() {
    let quorum = Quorum::start(|o| o.node_suspect_timeout = Duration::from_millis(300)).await;
    let (mut node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    client.put(b"k", 1000, &node).await;
    let mut observer = quorum.client().await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while observer.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await == [true] {
        assert!(tokio::time::Instant::now() < deadline, "a silent node stayed listed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let beats = tokio_stream::iter([node.beat(1, vec![])]);
    node.rpc.heartbeat(beats).await.expect("heartbeat").into_inner().message().await.expect("answered");
    while observer.exist(&[b"k"], v1::LeaseMode::NoTouch, 0).await == [false] {
        assert!(tokio::time::Instant::now() < deadline, "a heard node stayed unlisted");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_stale_incarnation_is_fenced_and_a_foreign_history_is_refused() {
    let quorum = Quorum::start(|_| {}).await;
    let mut node = quorum.datanode(16 * MIB).await;
    for (incarnation, history, expected) in [
        (node.incarnation - 1, node.history.0, ErrorCode::Fenced),
        (node.incarnation + 1, node.history.0, ErrorCode::NotLeader),
        (node.incarnation, node.history.0 ^ 1, ErrorCode::WrongCluster),
    ] {
        let beat = v1::HeartbeatRequest { incarnation, history, ..node.beat(1, vec![]) };
        let mut answers = node.rpc.heartbeat(tokio_stream::iter([beat])).await.expect("heartbeat").into_inner();
        let error = answers.message().await.expect("answered").expect("one answer").error.expect("refused");
        assert_eq!(ErrorCode::from_u32(error.code), expected);
    }
}

#[tokio::test]
async fn bad_input_is_refused_by_its_own_code_and_changes_nothing() {
    let quorum = Quorum::start(|options| options.fits_nowhere_after = Duration::ZERO).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    client.put(b"there", 1000, &node).await;
    let mut other = quorum.client().await;
    let grant = client.start(b"open", 1000).await;
    let before = quorum.master.readiness().objects;
    let long = vec![b'x'; 4097];
    let keys = |key: &[u8]| Some(v1::Keys::pack([key]));
    let put = |key: &[u8], length: u64, session: u64| {
        let item = item(key, length, [3; 16]);
        Ask::PutStart(v1::PutStartRequest { session_id: session, items: vec![item], ..Default::default() })
    };
    let session = client.session;
    let table = [
        (
            "exist of an empty key",
            Ask::Exist(v1::ExistRequest { keys: keys(b""), ..Default::default() }),
            ErrorCode::InvalidKey,
        ),
        (
            "exist of a long key",
            Ask::Exist(v1::ExistRequest { keys: keys(&long), ..Default::default() }),
            ErrorCode::InvalidKey,
        ),
        ("exist of nothing", Ask::Exist(v1::ExistRequest::default()), ErrorCode::InvalidParams),
        (
            "locate of an empty key",
            Ask::Locate(v1::LocateRequest { keys: keys(b""), ..Default::default() }),
            ErrorCode::InvalidKey,
        ),
        ("put of an empty key", put(b"", 1, session), ErrorCode::InvalidKey),
        ("put of a long key", put(&long, 1, session), ErrorCode::InvalidKey),
        ("put of zero bytes", put(b"z", 0, session), ErrorCode::InvalidParams),
        ("put of absurd length", put(b"z", u64::MAX, session), ErrorCode::InvalidParams),
        ("put larger than the pool", put(b"z", 17 * MIB, session), ErrorCode::FitsNowhere),
        ("put of an unknown session", put(b"z", 1, 99), ErrorCode::SessionUnknown),
        ("put of no session", put(b"z", 1, 0), ErrorCode::SessionUnknown),
        (
            "list of a huge page",
            Ask::List(v1::ListRequest { limit: u32::MAX, ..Default::default() }),
            ErrorCode::InvalidParams,
        ),
        (
            "lengths that do not add up",
            Ask::Exist(v1::ExistRequest {
                keys: Some(v1::Keys { blob: vec![1].into(), lengths: vec![u32::MAX] }),
                ..Default::default()
            }),
            ErrorCode::InvalidParams,
        ),
    ];
    for (what, body, expected) in table {
        let got = match client.ask(body).await {
            Err(error) => error.code(),
            Ok(Answer::PutStart(r)) => code(&r.grants[0].error),
            Ok(other) => panic!("{what}: {other:?}"),
        };
        assert_eq!(got, expected, "{what}");
    }
    assert_eq!(code(&other.end(b"open", &grant, &node).await.error), ErrorCode::IllegalClient);
    assert_eq!(code(&client.end_with(b"x", 12_345 << 14, vec![]).await.error), ErrorCode::GrantLost);
    assert_eq!(client.remove(b"nothing", 7, v1::RemoveMode::Force).await, ErrorCode::ObjectNotFound);
    assert_eq!(quorum.master.readiness().objects, before);
    assert_eq!(code(&client.end(b"open", &grant, &node).await.error), ErrorCode::Ok);
    let tenant = v1::ClientRequest { id: 1, remaining_ms: 10, tenant: "nobody".to_owned(), body: None };
    let response = client.rpc.call(tenant).await.expect("answered").into_inner();
    assert_eq!(response.error.map(|e| e.code), Some(ErrorCode::TenantNotRegistered as u32));
}

async fn segment(quorum: &Quorum) -> v1::SegmentStatus {
    let mut admin = v1::admin_service_client::AdminServiceClient::connect(quorum.uri.clone()).await.expect("admin");
    admin.status(v1::StatusRequest {}).await.expect("status").into_inner().segments.remove(0)
}

/// User report 96: a client that suspected every datanode was told NO_SPACE until its deadline.
#[tokio::test]
async fn case_096_a_client_that_suspects_every_datanode_is_still_given_one() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(16 * MIB).await, quorum.client().await);
    let item = item(b"k", 1000, [1; 16]);
    let request = v1::PutStartRequest {
        session_id: client.session,
        items: vec![item],
        excluded_nodes: vec![node.node_id],
        ..Default::default()
    };
    match client.ask(Ask::PutStart(request)).await {
        Ok(Answer::PutStart(r)) => assert_eq!(code(&r.grants[0].error), ErrorCode::Ok),
        other => panic!("{other:?}"),
    }
}

/// The answers end when the client says no more and its calls are answered. Fails (for ever) when the stream of requests,
/// though it is over, keeps the way of late answers open.
#[tokio::test]
async fn a_stream_ends_after_its_client_says_no_more() {
    let quorum = Quorum::start(|_| {}).await;
    let mut client = quorum.client().await;
    let ask = |body| v1::ClientRequest { id: 1, remaining_ms: 5_000, tenant: String::new(), body: Some(body) };
    let exist = v1::ExistRequest { keys: Some(v1::Keys::pack([b"k"])), ..Default::default() };
    let list = v1::ListRequest::default();
    let requests = futures::stream::iter([ask(Ask::Exist(exist)), ask(Ask::List(list))]);
    let mut answers = client.rpc.session(requests).await.expect("a stream").into_inner();
    let all = async {
        let mut count = 0;
        while let Some(answer) = answers.message().await.expect("no error") {
            assert_eq!(answer.error, None);
            count += 1;
        }
        count
    };
    assert_eq!(tokio::time::timeout(Duration::from_secs(10), all).await, Ok(2));
}

/// M6: a new cluster needs no step of an operator's, and no level is taken back.
#[tokio::test]
async fn a_new_quorum_begins_at_the_highest_level_that_its_members_know() {
    let quorum = Quorum::start(|_| {}).await;
    let mut admin = v1::admin_service_client::AdminServiceClient::connect(quorum.uri.clone()).await.unwrap();
    let status = admin.status(v1::StatusRequest {}).await.unwrap().into_inner();
    assert_eq!(status.feature_level, status.feature_level_max);
    assert!(status.feature_level > 1 && status.promotable && status.lag_ms == Some(0), "{status:?}");
    for (to, refused) in [
        (0, ErrorCode::Ok),
        (status.feature_level, ErrorCode::Ok),
        (1, ErrorCode::InvalidParams),
        (status.feature_level + 1, ErrorCode::FeatureLevel),
    ] {
        let answer = admin.feature_level(v1::FeatureLevelRequest { raise: true, to }).await.unwrap().into_inner();
        let code = answer.error.map_or(ErrorCode::Ok, |error| ErrorCode::from_u32(error.code));
        assert_eq!((code, answer.feature_level), (refused, status.feature_level), "{to}");
        assert_eq!(answer.members[0].feature_level_max, status.feature_level_max);
    }
}
