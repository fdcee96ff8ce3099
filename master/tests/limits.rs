//! Limits over the real wire: what a client has granted, batches that wait for each other, and requests at the edge of what
//! is allowed, each with its own answer.
#![allow(missing_docs, clippy::disallowed_methods)]

mod support;

use std::time::Duration;

use futures::future::join_all;
use support::{Client, Datanode, Quorum, code, item, until};
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{Error, ErrorCode, v1};

const MIB: u64 = 1 << 20;

/// L5. The leader looks before it proposes, and calls that are made side by side pass that look together: apply has the
/// account. Fails without the check in apply (tried).
#[tokio::test]
async fn calls_side_by_side_are_granted_no_more_than_their_client_may_have() {
    let quorum = Quorum::start(|options| options.granted_bytes_min = 1).await;
    let (_node, client) = (quorum.datanode(32 * MIB).await, quorum.client().await);
    let calls = (0..24u32).map(|i| {
        let (mut rpc, session_id) = (client.rpc.clone(), client.session);
        async move {
            let items = vec![item(format!("k{i}").as_bytes(), MIB, rand::random())];
            let body = Some(Ask::PutStart(v1::PutStartRequest { session_id, items, ..Default::default() }));
            let request = v1::ClientRequest { id: 1, remaining_ms: 5_000, tenant: String::new(), body };
            match rpc.call(request).await.expect("answered").into_inner().body {
                Some(Answer::PutStart(answer)) => answer.grants[0].error.clone(),
                other => panic!("{other:?}"),
            }
        }
    });
    let errors: Vec<v1::ItemError> = join_all(calls).await.into_iter().flatten().collect();
    // A tenth of 32 MiB is room for three and their headers.
    assert_eq!(errors.len(), 24 - 3, "{errors:?}");
    for error in &errors {
        assert_eq!(ErrorCode::from_u32(error.code), ErrorCode::ResourceExhausted, "{error:?}");
        assert!(error.message.contains("granted and not ended; the limit is"), "{error:?}");
    }
}

/// Room that no eviction makes is said at once, with a code that clients do not repeat; room that may come is not. Tried without the
/// look at what is mounted: fails.
#[tokio::test]
async fn what_fits_nowhere_is_said_at_once_and_only_of_what_is_mounted() {
    let quorum = Quorum::start(|options| {
        options.node_suspect_timeout = Duration::from_millis(300);
        options.fits_nowhere_after = Duration::ZERO;
    })
    .await;
    // So long that the test would not end if the calls waited.
    let mut patient = Client { remaining_ms: 300_000, ..quorum.client().await };
    let mut hasty = Client { remaining_ms: 300, ..quorum.client().await };
    let request = |length: u64, replica_num: u32, mode: v1::ReplicaMode| v1::PutStartRequest {
        items: vec![item(b"k", length, rand::random())],
        replica_num,
        replica_mode: mode as i32,
        ..Default::default()
    };
    let large = || request(9 * MIB, 1, v1::ReplicaMode::BestEffort);
    assert_eq!(code(&hasty.start_all(large()).await[0].error), ErrorCode::NoSpace, "nothing is mounted yet");

    let (first, _second) = (quorum.datanode_on("a", 8 * MIB).await, quorum.datanode_on("b", 8 * MIB).await);
    let admin = AdminServiceClient::connect(quorum.uri.clone()).await.expect("admin");
    let are_suspect = || async {
        let status = admin.clone().status(v1::StatusRequest {}).await.expect("status").into_inner();
        status.nodes.iter().all(|node| node.suspect)
    };
    let mut error_of = async |request| patient.start_all(request).await[0].error.clone();
    let error = error_of(large()).await;
    assert_eq!(code(&error), ErrorCode::FitsNowhere, "{error:?}");
    assert!(error.unwrap().message.contains("the largest has 8388608"));
    let error = error_of(request(1_000, 3, v1::ReplicaMode::Strict)).await;
    assert_eq!(code(&error), ErrorCode::FitsNowhere, "{error:?}");
    assert!(error.unwrap().message.contains("so large are 2 of 2"));

    let excluding =
        v1::PutStartRequest { excluded_nodes: vec![first.node_id], ..request(1_000, 2, v1::ReplicaMode::Strict) };
    let codes = [ErrorCode::NoSpace, ErrorCode::NotEnoughReplicas];
    let excluded = code(&hasty.start_all(excluding).await[0].error);
    assert!(codes.contains(&excluded), "{excluded:?}: the client may trust that node again");
    until("both nodes are suspect", are_suspect).await;
    let suspect = code(&hasty.start_all(request(1_000, 1, v1::ReplicaMode::BestEffort)).await[0].error);
    assert!(codes.contains(&suspect), "{suspect:?}: the nodes may be back");
    let error = error_of(large()).await;
    assert_eq!(code(&error), ErrorCode::FitsNowhere, "{error:?}");
}

/// What is mounted since a moment ago may not be all that there will be: then a put waits, and is told to come again. Tried without
/// the time: fails.
#[tokio::test]
async fn what_is_not_mounted_for_long_enough_is_not_all_that_there_is() {
    let quorum = Quorum::start(|options| options.fits_nowhere_after = Duration::from_secs(3_600)).await;
    let _node = quorum.datanode(8 * MIB).await;
    let mut hasty = Client { remaining_ms: 300, ..quorum.client().await };
    let request = v1::PutStartRequest { items: vec![item(b"k", 9 * MIB, rand::random())], ..Default::default() };
    let error = hasty.start_all(request).await[0].error.clone();
    assert_eq!(code(&error), ErrorCode::NoSpace, "{error:?}");
}

/// A tenant that refuses is told so without advice to come again; one that evicts, whose objects all are leased, with it. Tried with
/// advice for both: fails.
#[tokio::test]
async fn only_a_tenant_that_evicts_its_own_is_advised_to_come_again() {
    let quorum = Quorum::start(|_| {}).await;
    let node = quorum.datanode(8 * MIB).await;
    let mut admin = AdminServiceClient::connect(quorum.uri.clone()).await.expect("admin");
    for (name, refuse_over_quota) in [("evicts", false), ("refuses", true)] {
        let tenant = v1::SetTenantRequest { name: name.into(), quota_bytes: 0, quota_objects: 1, refuse_over_quota };
        assert_eq!(admin.set_tenant(tenant).await.expect("set").into_inner().error, None);
        let mut client = Client { remaining_ms: 300, tenant: name.to_owned(), ..quorum.client().await };
        let put = |key: &'static str| v1::PutStartRequest {
            items: vec![item(key.as_bytes(), 1_000, rand::random())],
            ..Default::default()
        };
        assert_eq!(client.put_all(put("a"), &node).await, [ErrorCode::Ok]);
        let locate = v1::LocateRequest {
            keys: Some(v1::Keys::pack(["a"])),
            lease_mode: v1::LeaseMode::Grant as i32,
            lease_ttl_ms: 10_000,
            ..Default::default()
        };
        assert!(matches!(client.ask(Ask::Locate(locate)).await, Ok(Answer::Locate(_))));
        let error = client.start_all(put("b")).await[0].error.clone().expect("refused");
        assert_eq!(ErrorCode::of_item(&error), ErrorCode::TenantQuotaExceeded, "{name}: {error:?}");
        assert_eq!(error.retry_after_ms > 0, !refuse_over_quota, "{name}: {error:?}");
    }
}

/// What is larger than its tenant's whole quota is told so at once, by a code that clients do not repeat; what is within the quota
/// is told to come again, or stored. Tried without the look at the quota: it waits, and the test does not end.
#[tokio::test]
async fn what_no_quota_can_hold_is_said_at_once() {
    let quorum = Quorum::start(|_| {}).await;
    let first = quorum.datanode_on("a", 8 * MIB).await;
    let mut admin = AdminServiceClient::connect(quorum.uri.clone()).await.expect("admin");
    // So long that the test would not end if the calls waited.
    let mut patient = Client { remaining_ms: 300_000, ..quorum.client().await };
    let request = |key: &'static str, length: u64, replica_num: u32, mode: v1::ReplicaMode| v1::PutStartRequest {
        items: vec![item(key.as_bytes(), length, rand::random())],
        replica_num,
        replica_mode: mode as i32,
        ..Default::default()
    };
    let (best_effort, strict) = (v1::ReplicaMode::BestEffort, v1::ReplicaMode::Strict);
    for (name, refuse_over_quota) in [("evicts", false), ("refuses", true)] {
        let tenant = v1::SetTenantRequest { name: name.into(), quota_bytes: MIB, quota_objects: 0, refuse_over_quota };
        assert_eq!(admin.set_tenant(tenant).await.expect("set").into_inner().error, None);
        patient.tenant = name.to_owned();
        let error = patient.start_all(request("large", 2 * MIB, 1, best_effort)).await[0].error.clone();
        assert_eq!(code(&error), ErrorCode::FitsNowhere, "{name}: {error:?}");
        assert!(error.expect("refused").message.contains(&format!("tenant '{name}' may hold 1048576")));
    }
    // Two copies are above the quota; where there is room for one only, one is stored.
    patient.tenant = "evicts".to_owned();
    let codes = patient.put_all(request("one copy", 600_000, 2, best_effort), &first).await;
    assert_eq!(codes, [ErrorCode::Ok]);
    let mut hasty = Client { remaining_ms: 300, tenant: "refuses".to_owned(), ..quorum.client().await };
    assert_eq!(hasty.put_all(request("a", 600_000, 1, best_effort), &first).await, [ErrorCode::Ok]);
    let codes = hasty.put_all(request("b", 600_000, 2, best_effort), &first).await;
    assert_eq!(codes, [ErrorCode::TenantQuotaExceeded], "it fits once the first is gone");
    let _second = quorum.datanode_on("b", 8 * MIB).await;
    for mode in [best_effort, strict] {
        let error = patient.start_all(request("two copies", 600_000, 2, mode)).await[0].error.clone();
        assert_eq!(code(&error), ErrorCode::FitsNowhere, "{mode:?}: {error:?}");
        assert!(error.expect("refused").message.contains("2 times"));
    }
}

/// A datanode that restarts leaves, and comes back: so soon after a change nothing is final, and a client asks again.
#[tokio::test]
async fn what_was_mounted_a_moment_ago_is_not_the_last_word() {
    let quorum = Quorum::start(|_| {}).await;
    let (_node, mut client) = (quorum.datanode_on("a", 8 * MIB).await, quorum.client().await);
    let items = vec![item(b"k", 9 * MIB, rand::random())];
    let grants = client.start_all(v1::PutStartRequest { items, ..Default::default() }).await;
    assert_eq!(code(&grants[0].error), ErrorCode::NoSpace);
}

/// Starts, ends and comes again for what found no room, until all is stored.
async fn store(client: &mut Client, node: &Datanode, name: &str, count: usize) {
    let mut left: Vec<String> = (0..count).map(|i| format!("{name}{i:03}")).collect();
    while !left.is_empty() {
        let items = left.iter().map(|key| item(key.as_bytes(), 200_000, rand::random()));
        let request = v1::PutStartRequest { items: items.collect(), ..Default::default() };
        let mut again = Vec::new();
        for (key, grant) in left.into_iter().zip(client.start_all(request).await) {
            match code(&grant.error) {
                ErrorCode::Ok => assert_eq!(code(&client.end(key.as_bytes(), &grant, node).await.error), ErrorCode::Ok),
                ErrorCode::NoSpace => again.push(key),
                other => panic!("{key}: {other:?}"),
            }
        }
        left = again;
    }
}

/// Each holds a part of the pool that cannot be evicted before it is ended, and waits for the others' and its own. Fails, by
/// its deadline, when a call holds what it was granted until all of it is settled (tried).
#[tokio::test]
async fn batches_that_cannot_all_be_granted_do_not_wait_for_each_other() {
    let quorum = Quorum::start(|_| {}).await;
    let node = quorum.datanode(8 * MIB).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(Client { remaining_ms: 120_000, ..quorum.client().await });
    }
    let stores = clients.iter_mut().enumerate().map(|(i, client)| {
        let (node, name) = (&node, ["a", "b", "c"][i]);
        // More than the pool holds: a part is granted, and has to be ended before there is room for the rest.
        async move { store(client, node, name, 60).await }
    });
    tokio::time::timeout(Duration::from_secs(40), join_all(stores)).await.expect("nobody waits for another");
}

/// What is granted and stored of a batch beside a limit is a prefix of it.
#[tokio::test]
async fn a_batch_that_meets_a_limit_is_granted_a_prefix() {
    let quorum = Quorum::start(|options| options.hard_pinned_percent_max = 50).await;
    let (node, mut client) = (quorum.datanode(8 * MIB).await, quorum.client().await);
    let mut items: Vec<v1::PutStartItem> =
        (0..60).map(|i| item(format!("k{i:02}").as_bytes(), 100_000, rand::random())).collect();
    // These would be below the limit.
    items[50..].iter_mut().for_each(|item| item.length = 10);
    let codes = client.put_all(v1::PutStartRequest { items, hard_pin: true, ..Default::default() }, &node).await;
    let stored = codes.iter().take_while(|code| **code == ErrorCode::Ok).count();
    assert!((38..=42).contains(&stored), "{codes:?}");
    let limited = codes[stored..].iter().take_while(|code| **code == ErrorCode::HardPinLimit).count();
    assert!(limited > 0, "{codes:?}");
    // What is behind waits for nothing: it is told to come again.
    assert_eq!(codes[stored + limited..], vec![ErrorCode::NoSpace; 60 - stored - limited]);
}

fn keys(count: usize) -> Option<v1::Keys> {
    Some(v1::Keys::pack((0..count).map(|i| format!("k{i}"))))
}

/// The code of an answer: of the call, or of its first item.
fn code_of(answer: Result<Answer, Error>) -> (ErrorCode, String) {
    let first = |errors: &[v1::ItemError]| match errors.first() {
        Some(error) => (ErrorCode::of_item(error), error.message.clone()),
        None => (ErrorCode::Ok, String::new()),
    };
    match answer {
        Err(error) => (error.code(), error.message().to_owned()),
        Ok(Answer::PutStart(a)) => first(&a.grants.iter().filter_map(|g| g.error.clone()).collect::<Vec<_>>()),
        Ok(Answer::PutEnd(a)) => first(&a.results.iter().filter_map(|r| r.error.clone()).collect::<Vec<_>>()),
        Ok(Answer::PutRevoke(a)) => first(&a.errors),
        Ok(Answer::Remove(a)) => first(&a.errors),
        Ok(Answer::Pin(a)) => first(&a.errors),
        Ok(_) => (ErrorCode::Ok, String::new()),
    }
}

/// Bad input of the list, each with its specific error or its success.
#[tokio::test]
async fn requests_at_the_edge_have_their_own_answers() {
    const MANY: usize = 100_000;
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(64 * MIB).await, quorum.client().await);
    let session_id = client.session;
    let longest = vec![b'a'; 4_096];
    let too_long = vec![b'a'; 4_097];
    client.put(&longest, 100, &node).await;
    client.put(b"there", 100, &node).await;
    let items = |count: usize| (0..count).map(|i| item(format!("n{i}").as_bytes(), 1, rand::random())).collect();
    let ends = |count: usize| vec![v1::PutEndItem::default(); count];
    let one = |key: &[u8]| Some(v1::Keys::pack([key]));
    let list = |regex: &str| Ask::List(v1::ListRequest { regex: regex.to_owned(), ..Default::default() });
    let remove = |regex: &str| {
        let regex = regex.to_owned();
        Ask::RemoveMatching(v1::RemoveMatchingRequest { session_id, sequence: 900, regex, ..Default::default() })
    };
    let put = |change: &dyn Fn(&mut v1::PutStartRequest)| {
        let mut request = v1::PutStartRequest { session_id, items: items(1), ..Default::default() };
        change(&mut request);
        Ask::PutStart(request)
    };
    let (ok, params) = (ErrorCode::Ok, ErrorCode::InvalidParams);
    let enable = v1::SoftPinAction::Enable as i32;
    let deep = "(".repeat(400) + &")".repeat(400);
    let table: Vec<(&str, Ask, ErrorCode, &str)> = vec![
        // Catastrophic for a backtracking engine: linear here, on the longest key.
        ("nested repetition", list("^(((a+)+)+)+b$"), ok, ""),
        ("nested alternation", list("^(a|aa|aaa)*c$"), ok, ""),
        ("a huge automaton", list("(a{1000}){1000}"), params, "size"),
        ("many classes", list("(\\p{L}{100}){100}"), params, "size"),
        ("deep nesting", list(&deep), params, "nest"),
        ("a long regex", list(&"x".repeat(4_097)), params, "4096"),
        ("no regex", list("["), params, "unclosed"),
        ("removal by a huge automaton", remove("(a{1000}){1000}"), params, "size"),
        ("removal by nested repetition", remove("^(((a+)+)+)+b$"), ok, ""),
        (
            "exist of the longest key",
            Ask::Exist(v1::ExistRequest { keys: one(&longest), ..Default::default() }),
            ok,
            "",
        ),
        (
            "exist of a longer key",
            Ask::Exist(v1::ExistRequest { keys: one(&too_long), ..Default::default() }),
            ErrorCode::InvalidKey,
            "4097",
        ),
        ("stat of a longer key", Ask::Stat(v1::StatRequest { keys: one(&too_long) }), ErrorCode::InvalidKey, "4097"),
        ("exist of 10^5", Ask::Exist(v1::ExistRequest { keys: keys(MANY), ..Default::default() }), params, "16384"),
        ("locate of 10^5", Ask::Locate(v1::LocateRequest { keys: keys(MANY), ..Default::default() }), params, "16384"),
        ("stat of 10^5", Ask::Stat(v1::StatRequest { keys: keys(MANY) }), params, "16384"),
        (
            "remove of 10^5",
            Ask::Remove(v1::RemoveRequest { session_id, keys: keys(MANY), ..Default::default() }),
            params,
            "16384",
        ),
        ("pin of 10^5", Ask::Pin(v1::PinRequest { keys: keys(MANY), action: enable, ttl_ms: 0 }), params, "16384"),
        (
            "clear of 10^5",
            Ask::ReplicaClear(v1::ReplicaClearRequest { keys: keys(MANY), ..Default::default() }),
            params,
            "16384",
        ),
        ("put of 10^5", put(&|r| r.items = items(MANY)), params, "16384"),
        ("end of 10^5", Ask::PutEnd(v1::PutEndRequest { session_id, items: ends(MANY) }), params, "16384"),
        ("revoke of 10^5", Ask::PutRevoke(v1::PutRevokeRequest { session_id, items: ends(MANY) }), params, "16384"),
        (
            "release of 10^5",
            Ask::ReleaseLease(v1::ReleaseLeaseRequest { object_ids: vec![1; MANY], ..Default::default() }),
            params,
            "16384",
        ),
        (
            "reports of 10^5",
            Ask::ReadReport(v1::ReadReportRequest { reports: vec![v1::ReadReport::default(); MANY] }),
            params,
            "16384",
        ),
        // Times that overflow, or are beyond what is allowed.
        (
            "the longest lease",
            Ask::Exist(v1::ExistRequest { keys: one(b"there"), lease_ttl_ms: u32::MAX, ..Default::default() }),
            ok,
            "",
        ),
        ("a pin of 49 days", put(&|r| (r.soft_pin, r.soft_pin_ttl_ms) = (enable, u32::MAX)), params, "86400000"),
        (
            "a pin of what is there for 49 days",
            Ask::Pin(v1::PinRequest { keys: one(b"there"), action: enable, ttl_ms: u32::MAX }),
            params,
            "86400000",
        ),
        ("a time without a pin", put(&|r| r.soft_pin_ttl_ms = 1), params, "only when"),
        ("sixteen copies", put(&|r| r.replica_num = 16), params, "15"),
        ("2^32 copies", put(&|r| r.replica_num = u32::MAX), params, "15"),
        ("a negative data type", put(&|r| r.data_type = -1), params, "-1"),
        ("a group's name of 2000 bytes", put(&|r| r.items[0].group = vec![b'g'; 2_000].into()), params, "2000"),
        ("the last sequence", put(&|r| (r.upsert, r.sequence) = (true, u64::MAX)), ok, ""),
        (
            "a sequence below the floor",
            put(&|r| (r.upsert, r.sequence, r.floor) = (true, 5, u64::MAX)),
            ErrorCode::StaleRequest,
            "below the floor",
        ),
    ];
    for (what, body, expected, words) in table {
        let (code, message) = code_of(client.ask(body).await);
        assert_eq!(code, expected, "{what}: {message}");
        assert!(message.contains(words), "{what}: '{message}' does not say '{words}'");
    }
    let locate = v1::LocateRequest { keys: one(b"there"), lease_ttl_ms: u32::MAX, ..Default::default() };
    match client.ask(Ask::Locate(locate)).await {
        Ok(Answer::Locate(answer)) => assert_eq!(answer.objects[0].lease_ttl_ms, 10_000, "clamped (L3)"),
        other => panic!("{other:?}"),
    }
}

/// A quota is never negative: what would be is as large as can be, and overflows nothing.
#[tokio::test]
async fn huge_quotas_are_quotas_and_small_ones_hold() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(8 * MIB).await, quorum.client().await);
    let mut admin = AdminServiceClient::connect(quorum.uri.clone()).await.expect("admin");
    let table = [
        (-1i64 as u64, -1i64 as u64, ErrorCode::Ok),
        (i64::MIN as u64, u64::MAX, ErrorCode::Ok),
        (u64::MAX - 64, 1, ErrorCode::Ok),
        (1, 1, ErrorCode::FitsNowhere),
        (u64::MAX, 1, ErrorCode::TenantQuotaExceeded),
    ];
    client.tenant = "t".to_owned();
    for (i, (quota_bytes, quota_objects, expected)) in table.into_iter().enumerate() {
        let request =
            v1::SetTenantRequest { name: "t".to_owned(), quota_bytes, quota_objects, refuse_over_quota: true };
        assert_eq!(admin.set_tenant(request).await.expect("answered").into_inner().error, None);
        if i == 2 {
            // One object is all it may have.
            for key in [b"k0", b"k1"] {
                assert_eq!(client.remove(key, 10 + u64::from(key[1]), v1::RemoveMode::Force).await, ErrorCode::Ok);
            }
        }
        let items = vec![item(format!("k{i}").as_bytes(), 1_000, rand::random())];
        let codes = client.put_all(v1::PutStartRequest { items, ..Default::default() }, &node).await;
        assert_eq!(codes, [expected], "{quota_bytes} bytes, {quota_objects} objects");
    }
    for name in ["", "_own", "a\nb", &"n".repeat(129)] {
        let request = v1::SetTenantRequest { name: name.to_owned(), ..Default::default() };
        let error = admin.set_tenant(request).await.expect("answered").into_inner().error.expect("refused");
        assert_eq!(ErrorCode::from_u32(error.code), ErrorCode::InvalidParams, "{name:?}");
    }
}

/// 10^4 members exist together; a group has at most 16 384.
#[tokio::test]
async fn a_group_of_ten_thousand_members_exists_as_a_whole_up_to_its_limit() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(64 * MIB).await, quorum.client().await);
    client.remaining_ms = 60_000;
    let member = |i: usize| {
        let item = item(format!("m{i}").as_bytes(), 1, rand::random());
        v1::PutStartItem { group: "large".into(), ..item }
    };
    let exists = async |client: &mut Client, suspect_nodes: Vec<u64>| {
        let keys = Some(v1::Keys::pack(["m0", "m9999"]));
        match client.ask(Ask::Exist(v1::ExistRequest { keys, suspect_nodes, ..Default::default() })).await {
            Ok(Answer::Exist(answer)) => answer.present.to_vec(),
            other => panic!("{other:?}"),
        }
    };
    let put = async |client: &mut Client, numbers: std::ops::Range<usize>| {
        let items: Vec<v1::PutStartItem> = numbers.clone().map(member).collect();
        let request = v1::PutStartRequest { session_id: client.session, items, ..Default::default() };
        let grants = client.start_all(request).await;
        let ends = numbers.zip(&grants).filter(|(_, grant)| grant.error.is_none()).map(|(i, grant)| v1::PutEndItem {
            key: format!("m{i}").into(),
            object_id: grant.object_id,
            replicas: vec![v1::ReplicaStatus {
                replica_id: grant.replicas[0].replica_id,
                outcome: v1::ReplicaOutcome::Stored as i32,
                proof: node.proof(tidepool_proto::capability::Verb::Stored, grant.object_id, &grant.replicas[0]),
            }],
        });
        let items: Vec<v1::PutEndItem> = ends.collect();
        match client.ask(Ask::PutEnd(v1::PutEndRequest { items, session_id: client.session })).await {
            Ok(Answer::PutEnd(answer)) => assert!(answer.results.iter().all(|r| r.error.is_none())),
            other => panic!("{other:?}"),
        }
        grants.into_iter().filter_map(|grant| grant.error).collect::<Vec<_>>()
    };
    for first in (0..10_000).step_by(2_500) {
        assert_eq!(put(&mut client, first..first + 2_500).await, []);
    }
    assert_eq!(exists(&mut client, vec![]).await, [1, 1]);
    assert_eq!(exists(&mut client, vec![node.node_id + 1]).await, [1, 1]);
    assert_eq!(exists(&mut client, vec![node.node_id]).await, [0, 0]);
    let errors = put(&mut client, 10_000..16_390).await;
    assert_eq!(errors.len(), 6);
    assert_eq!(ErrorCode::from_u32(errors[0].code), ErrorCode::ResourceExhausted);
    assert!(errors[0].message.contains("16384 members"), "{:?}", errors[0]);
    let all = v1::RemoveMatchingRequest { session_id: client.session, sequence: 1, ..Default::default() };
    match client
        .ask(Ask::RemoveMatching(v1::RemoveMatchingRequest {
            prefix: "m".into(),
            mode: v1::RemoveMode::Force as i32,
            ..all
        }))
        .await
    {
        Ok(Answer::RemoveMatching(answer)) => assert!(answer.removed >= 4_096 && !answer.next.is_empty()),
        other => panic!("{other:?}"),
    }
}
