//! Replicas that the leader makes and drops, over the real wire: tasks, healing, hot objects, cleared replicas.
#![allow(missing_docs, clippy::disallowed_methods)]

mod support;

use std::time::Duration;

use support::{Client, Datanode, Quorum, code, item, until};
use tidepool_master::{DynamicReplication, MasterOptions};
use tidepool_proto::capability::Verb;
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{ErrorCode, v1};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

const MIB: u64 = 1 << 20;
const WINDOW: Duration = Duration::from_millis(400);

type Beats = (mpsc::Sender<v1::HeartbeatRequest>, Streaming<v1::HeartbeatResponse>);

/// Opens a node's stream with one beat and takes the answer to it.
async fn converse(node: &Datanode) -> Beats {
    let (beats, sent) = mpsc::channel(64);
    beats.send(node.beat(1, Vec::new())).await.expect("a beat");
    let mut rpc = node.rpc.clone();
    let mut answers = rpc.heartbeat(ReceiverStream::new(sent)).await.expect("heartbeat").into_inner();
    let answer = answers.message().await.expect("an answer").expect("an answer");
    assert_eq!((answer.error, answer.sequence), (None, 1));
    (beats, answers)
}

/// A node that makes every copy it is told of, as soon as it hears of it.
async fn obedient(node: &Datanode) -> tokio::task::JoinHandle<()> {
    let (beats, mut answers) = converse(node).await;
    let (secret, history) = (tidepool_proto::capability::Secret(node.secret.0), node.history);
    let bare = node.beat(0, Vec::new());
    tokio::spawn(async move {
        let mut sequence = 1;
        let mut ticks = tokio::time::interval(Duration::from_millis(50));
        loop {
            let mut copies = Vec::new();
            tokio::select! {
                _ = ticks.tick() => {}
                answer = answers.message() => {
                    let Ok(Some(answer)) = answer else { return };
                    for order in answer.copy {
                        let target = order.target.expect("a target");
                        let object = tidepool_proto::ObjectId(order.object_id);
                        let stored = tidepool_proto::capability::Capability::from_replica(Verb::Stored, object, &target);
                        copies.push(v1::CopyReport {
                            task_id: order.task_id,
                            replica_id: target.replica_id,
                            outcome: v1::ReplicaOutcome::Stored as i32,
                            proof: stored.sign(&secret, history).to_vec().into(),
                            message: String::new(),
                        });
                    }
                    if copies.is_empty() {
                        continue;
                    }
                }
            }
            sequence += 1;
            if beats.send(v1::HeartbeatRequest { sequence, copies, ..bare.clone() }).await.is_err() {
                return;
            }
        }
    })
}

async fn admin(quorum: &Quorum) -> AdminServiceClient<Channel> {
    AdminServiceClient::connect(quorum.uri.clone()).await.expect("admin")
}

async fn create(quorum: &Quorum, request: v1::CreateTaskRequest) -> u64 {
    let request = v1::CreateTaskRequest { token: rand::random::<[u8; 16]>().to_vec().into(), ..request };
    let created = admin(quorum).await.create_task(request).await.expect("create").into_inner();
    assert_eq!(created.error, None);
    created.task_id
}

async fn task(quorum: &Quorum, task_id: u64) -> v1::TaskStatus {
    let listed = admin(quorum).await.list_tasks(v1::ListTasksRequest { task_id }).await.expect("list").into_inner();
    assert_eq!(listed.error, None);
    listed.tasks.into_iter().next().expect("the task")
}

async fn stat(client: &mut Client, key: &[u8]) -> v1::ObjectStat {
    match client.ask(Ask::Stat(v1::StatRequest { keys: Some(v1::Keys::pack([key])) })).await {
        Ok(Answer::Stat(mut answer)) => answer.objects.remove(0),
        other => panic!("stat answered {other:?}"),
    }
}

/// Segments that hold a replica of a key, sorted.
async fn holders(client: &mut Client, key: &[u8]) -> Vec<u64> {
    let mut segments: Vec<u64> = stat(client, key).await.replicas.iter().map(|r| r.segment_id).collect();
    segments.sort_unstable();
    segments
}

async fn read(client: &mut Client, key: &[u8], times: usize) {
    for _ in 0..times {
        let keys = Some(v1::Keys::pack([key]));
        // Short leases: what is retired comes free soon.
        let locate = v1::LocateRequest { keys, lease_ttl_ms: 20, ..Default::default() };
        assert!(matches!(client.ask(Ask::Locate(locate)).await, Ok(Answer::Locate(_))));
    }
}

async fn hot(quorum: &Quorum) -> v1::ListHotObjectsResponse {
    let request = v1::ListHotObjectsRequest { limit: 0 };
    admin(quorum).await.list_hot_objects(request).await.expect("hot").into_inner()
}

/// Puts keys of a size, in batches; each must be stored.
async fn put_many(client: &mut Client, node: &Datanode, name: &str, count: usize, length: u64) {
    for first in (0..count).step_by(512) {
        let keys: Vec<String> = (first..count.min(first + 512)).map(|i| format!("{name}{i:05}")).collect();
        let items = keys.iter().map(|key| item(key.as_bytes(), length, rand::random())).collect();
        let codes = client.put_all(v1::PutStartRequest { items, ..Default::default() }, node).await;
        assert!(codes.iter().all(|code| *code == ErrorCode::Ok), "{codes:?}");
    }
}

/// Fails when a leader that is the whole quorum waits for others to confirm it (was so: NOT_LEADER once it was idle).
#[tokio::test]
async fn an_idle_quorum_of_one_answers_beats() {
    let quorum = Quorum::start(|_| {}).await;
    let node = quorum.datanode(4 * MIB).await;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    converse(&node).await;
}

/// Fails when a datanode is told of copies in answers to its beats only (was so: here there is no second beat).
#[tokio::test]
async fn a_copy_is_ordered_without_waiting_for_a_beat() {
    let quorum = Quorum::start(|_| {}).await;
    let (first, mut client) = (quorum.datanode_on("a", 4 * MIB).await, quorum.client().await);
    client.put(b"k", 1000, &first).await;
    let second = quorum.datanode_on("b", 4 * MIB).await;
    let (beats, mut answers) = converse(&second).await;
    let copy = v1::CreateTaskRequest {
        kind: v1::TaskKind::Copy as i32,
        key: b"k"[..].into(),
        target_segments: vec![second.segment_id.to_string()],
        ..Default::default()
    };
    let task_id = create(&quorum, copy).await;
    let told = tokio::time::timeout(Duration::from_secs(20), answers.message()).await.expect("it is told");
    let told = told.expect("a message").expect("a message");
    assert_eq!((told.error, told.sequence, told.copy.len()), (None, 1, 1), "under the beat that was answered");
    let order = &told.copy[0];
    assert_eq!((order.task_id, order.length), (task_id, 1000));
    assert_eq!(order.target.as_ref().map(|t| t.node_id), Some(second.node_id));
    // It is told again in its beats, until it has reported.
    tokio::time::sleep(Duration::from_millis(150)).await;
    beats.send(second.beat(2, Vec::new())).await.expect("a beat");
    let again = answers.message().await.expect("an answer").expect("an answer");
    assert_eq!((again.sequence, &again.copy.len()), (2, &1));
    drop(beats);
}

/// More replicas than one look at a segment shows are counted and moved.
#[tokio::test]
async fn a_drain_of_many_counts_all_of_them() {
    let quorum = Quorum::start(|_| {}).await;
    let (first, mut client) = (quorum.datanode_on("a", 16 * MIB).await, quorum.client().await);
    put_many(&mut client, &first, "k", 5_000, 100).await;
    let second = quorum.datanode_on("b", 16 * MIB).await;
    let drain = v1::CreateTaskRequest {
        kind: v1::TaskKind::Drain as i32,
        source_segments: vec![first.segment_id.to_string()],
        concurrency: 256,
        ..Default::default()
    };
    let drain = create(&quorum, drain).await;
    let running = task(&quorum, drain).await;
    assert_eq!((running.state.as_str(), running.left, running.moved), ("RUNNING", 5_000, 0));
    let obedient = obedient(&second).await;
    until("the drain ends", || async { task(&quorum, drain).await.state != "RUNNING" }).await;
    let ended = task(&quorum, drain).await;
    assert_eq!((ended.state.as_str(), ended.left, ended.moved), ("SUCCEEDED", 0, 5_000), "{}", ended.message);
    assert_eq!(ended.moved_bytes, 5_000 * tidepool_proto::object::extent_bytes(100));
    assert_eq!((ended.under_way, ended.blocked), (0, 0));
    for key in ["k00000", "k02500", "k04999"] {
        assert_eq!(holders(&mut client, key.as_bytes()).await, [second.segment_id]);
    }
    obedient.abort();
}

/// The same token is the same task, also when what it names is gone by then. Fails when the token is looked at only after
/// the key (was so: OBJECT_NOT_FOUND).
#[tokio::test]
async fn a_repeated_request_for_a_task_is_one_task() {
    let quorum = Quorum::start(|_| {}).await;
    let (first, mut client) = (quorum.datanode_on("a", 4 * MIB).await, quorum.client().await);
    let second = quorum.datanode_on("b", 4 * MIB).await;
    let put = v1::PutStartRequest {
        items: vec![item(b"k", 1000, [1; 16])],
        preferred_segments: vec!["dram0".into()],
        ..Default::default()
    };
    let grant = client.start_all(put).await.remove(0);
    let (holder, other) =
        if grant.replicas[0].node_id == first.node_id { (&first, &second) } else { (&second, &first) };
    assert_eq!(code(&client.end(b"k", &grant, holder).await.error), ErrorCode::Ok);
    let request = v1::CreateTaskRequest {
        kind: v1::TaskKind::Copy as i32,
        key: b"k"[..].into(),
        target_segments: vec![other.segment_id.to_string()],
        token: vec![7; 16].into(),
        ..Default::default()
    };
    let mut admin = admin(&quorum).await;
    let mut ask = async || admin.create_task(request.clone()).await.expect("create").into_inner();
    let created = ask().await;
    assert_eq!(created.error, None);
    assert_eq!(ask().await, created);
    assert_eq!(client.remove(b"k", 1, v1::RemoveMode::Force).await, ErrorCode::Ok);
    assert_eq!(ask().await, created);
    let listed = admin.list_tasks(v1::ListTasksRequest { task_id: 0 }).await.expect("list").into_inner();
    assert_eq!(listed.tasks.len(), 1);
}

/// What a put asked for is made up for when a second host comes. Fails when only copies that were made count as missing
/// (was so).
#[tokio::test]
async fn copies_that_were_never_made_are_made_when_there_is_a_second_host() {
    let quorum = Quorum::start(|_| {}).await;
    let (first, mut client) = (quorum.datanode_on("a", 4 * MIB).await, quorum.client().await);
    let items = [item(b"two", 1000, [1; 16]), item(b"three", 1000, [2; 16])];
    for (items, replica_num) in [(vec![items[0].clone()], 2), (vec![items[1].clone()], 3)] {
        let codes = client.put_all(v1::PutStartRequest { items, replica_num, ..Default::default() }, &first).await;
        assert_eq!(codes, [ErrorCode::Ok]);
    }
    client.put(b"one", 1000, &first).await;
    let second = quorum.datanode_on("b", 4 * MIB).await;
    let obedient = obedient(&second).await;
    let mut both = vec![first.segment_id, second.segment_id];
    both.sort_unstable();
    for key in ["two", "three"] {
        until("it is healed", || {
            let (quorum, both, key) = (&quorum, &both, key);
            async move { holders(&mut quorum.client().await, key.as_bytes()).await == *both }
        })
        .await;
    }
    assert_eq!(holders(&mut client, b"one").await, [first.segment_id], "it asked for no more");
    obedient.abort();
}

/// Copies that were never made are not made from what is kept free for puts. Fails when the reserve is not looked at.
#[tokio::test]
async fn a_full_pool_is_not_filled_with_copies_that_were_never_made() {
    let quorum = Quorum::start(|_| {}).await;
    let (first, mut client) = (quorum.datanode_on("a", 16 * MIB).await, quorum.client().await);
    let items = vec![item(b"two", 200_000, [1; 16])];
    let put = v1::PutStartRequest { items, replica_num: 2, ..Default::default() };
    assert_eq!(client.put_all(put, &first).await, [ErrorCode::Ok]);
    put_many(&mut client, &first, "fill", 80, 200_000).await;
    // About 0.6 MiB of 16.5 are free, less than the reserve, and the new segment has room for it.
    let second = quorum.datanode_on("b", MIB / 2).await;
    let obedient = obedient(&second).await;
    let move_ = v1::CreateTaskRequest {
        kind: v1::TaskKind::Copy as i32,
        key: b"fill00000"[..].into(),
        target_segments: vec![second.segment_id.to_string()],
        ..Default::default()
    };
    // Some rounds of healing go by while a copy that an operator asks for is made.
    let copied = create(&quorum, move_).await;
    until("the copy is made", || async { task(&quorum, copied).await.state != "RUNNING" }).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(holders(&mut client, b"two").await, [first.segment_id]);
    obedient.abort();
}

fn dynamic(options: &mut MasterOptions, mode: DynamicReplication) {
    options.dynamic_replication = mode;
    options.dynamic_replication_reads = 20;
    options.dynamic_replication_window = WINDOW;
}

/// Fails when extra replicas are not dropped when cold, or are made on the same host (tried).
#[tokio::test]
async fn a_hot_key_gains_a_replica_on_another_host_and_loses_it_when_it_is_cold() {
    let quorum = Quorum::start(|options| dynamic(options, DynamicReplication::Enforce)).await;
    let (first, mut client) = (quorum.datanode_on("a", 4 * MIB).await, quorum.client().await);
    for key in [&b"hot"[..], b"cold"] {
        client.put(key, 1000, &first).await;
    }
    // A second segment on its own host is no place for it.
    let same = quorum.datanode_on("a", 8 * MIB).await;
    let second = quorum.datanode_on("b", 4 * MIB).await;
    let obedient = [obedient(&same).await, obedient(&second).await];
    let mut both = vec![first.segment_id, second.segment_id];
    both.sort_unstable();
    until("the hot key has a replica on the other host", || {
        let quorum = &quorum;
        let both = &both;
        async move {
            let mut client = quorum.client().await;
            read(&mut client, b"hot", 40).await;
            read(&mut client, b"cold", 1).await;
            let holders = holders(&mut client, b"hot").await;
            assert!(!holders.contains(&same.segment_id), "it went to its own host");
            holders == *both
        }
    })
    .await;
    let listed = hot(&quorum).await;
    assert_eq!((listed.error, listed.mode.as_str()), (None, "enforce"));
    let [one] = &listed.objects[..] else { panic!("{:?}", listed.objects) };
    assert_eq!((&one.key[..], one.replicas, one.wanted, one.tenant.as_str()), (&b"hot"[..], 2, 1, "default"));
    assert_eq!(holders(&mut client, b"cold").await, [first.segment_id]);
    // At most so many: it is as hot as before, and stays at two.
    for _ in 0..10 {
        read(&mut client, b"hot", 40).await;
        assert_eq!(holders(&mut client, b"hot").await.len(), 2);
    }
    until("the extra replica goes", || {
        let quorum = &quorum;
        async move { holders(&mut quorum.client().await, b"hot").await.len() == 1 }
    })
    .await;
    assert!(hot(&quorum).await.objects.is_empty());
    obedient.iter().for_each(|task| task.abort());
}

#[tokio::test]
async fn observe_shows_what_is_hot_and_changes_nothing() {
    let quorum = Quorum::start(|options| dynamic(options, DynamicReplication::Observe)).await;
    let (first, mut client) = (quorum.datanode_on("a", 4 * MIB).await, quorum.client().await);
    client.put(b"hot", 1000, &first).await;
    let second = quorum.datanode_on("b", 4 * MIB).await;
    let obedient = obedient(&second).await;
    until("it is seen to be hot", || {
        let quorum = &quorum;
        async move {
            let mut client = quorum.client().await;
            read(&mut client, b"hot", 40).await;
            hot(quorum).await.objects.iter().any(|o| o.key == b"hot"[..] && o.reads >= 20)
        }
    })
    .await;
    for _ in 0..20 {
        read(&mut client, b"hot", 40).await;
        tokio::time::sleep(WINDOW / 8).await;
    }
    assert_eq!(holders(&mut client, b"hot").await, [first.segment_id]);
    obedient.abort();
}

#[tokio::test]
async fn off_counts_nothing() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(4 * MIB).await, quorum.client().await);
    client.put(b"hot", 1000, &node).await;
    read(&mut client, b"hot", 200).await;
    let listed = hot(&quorum).await;
    let error = listed.error.expect("nothing is counted");
    assert_eq!((ErrorCode::from_u32(error.code), listed.mode.as_str()), (ErrorCode::NotSupported, "off"));
}

/// Extra replicas go first when space is needed, however hot their object is. Fails when pressure is not looked at.
#[tokio::test]
async fn a_pool_that_fills_up_takes_extra_replicas_back_first() {
    let quorum = Quorum::start(|options| {
        dynamic(options, DynamicReplication::Enforce);
        options.lease_ttl_max = Duration::from_millis(500);
        options.lease_ttl_default = Duration::from_millis(100);
    })
    .await;
    let (first, mut client) = (quorum.datanode_on("a", 8 * MIB).await, quorum.client().await);
    client.put(b"hot", 100_000, &first).await;
    let second = quorum.datanode_on("b", 8 * MIB).await;
    let obedient = obedient(&second).await;
    until("the hot key has two replicas", || {
        let quorum = &quorum;
        async move {
            let mut client = quorum.client().await;
            read(&mut client, b"hot", 40).await;
            holders(&mut client, b"hot").await.len() == 2
        }
    })
    .await;
    let nodes = [&first, &second];
    let mut number = 0;
    let mut is_back = false;
    while !is_back {
        assert!(number < 400, "the pool is full twice over and the extra replica is still there");
        read(&mut client, b"hot", 20).await;
        let key = format!("fill{number:04}");
        let grant = client.start(key.as_bytes(), 100_000).await;
        assert_eq!(grant.error, None);
        let node = nodes.iter().find(|node| node.node_id == grant.replicas[0].node_id).expect("one of the two");
        assert_eq!(code(&client.end(key.as_bytes(), &grant, node).await.error), ErrorCode::Ok);
        number += 1;
        // Slowly enough that the leader looks at its pool before the last twentieth of it is used up.
        tokio::time::sleep(WINDOW / 25).await;
        // In this order: what was evicted by now was evicted while there was an extra replica.
        let evicted = evicted(&quorum);
        is_back = holders(&mut client, b"hot").await.len() == 1;
        assert!(is_back || evicted == 0, "{evicted} objects were evicted while there was an extra replica");
    }
    assert!(hot(&quorum).await.objects.iter().any(|o| o.key == b"hot"[..]), "it is as hot as before");
    obedient.abort();
}

/// Limits what the default tenant may hold; 0: nothing is limited.
async fn set_quota(quorum: &Quorum, quota_bytes: u64) {
    let tenant = v1::SetTenantRequest { name: "default".into(), quota_bytes, ..Default::default() };
    assert_eq!(admin(quorum).await.set_tenant(tenant).await.expect("set").into_inner().error, None);
}

/// A tenant's extra replicas count against its quota: near it none is made, and those that are there go, however hot.
#[tokio::test]
async fn extra_replicas_keep_clear_of_the_quota() {
    let quorum = Quorum::start(|options| dynamic(options, DynamicReplication::Enforce)).await;
    let (first, mut client) = (quorum.datanode_on("a", 8 * MIB).await, quorum.client().await);
    client.put(b"hot", MIB, &first).await;
    let second = quorum.datanode_on("b", 8 * MIB).await;
    let obedient = obedient(&second).await;
    set_quota(&quorum, 2 * MIB + MIB / 16).await;
    until("it is hot", || async {
        read(&mut quorum.client().await, b"hot", 40).await;
        hot(&quorum).await.objects.len() == 1
    })
    .await;
    for _ in 0..20 {
        read(&mut client, b"hot", 40).await;
        assert_eq!(holders(&mut client, b"hot").await.len(), 1, "a replica more would fill the quota");
        tokio::time::sleep(WINDOW / 4).await;
    }
    for (quota, replicas) in [(0, 2), (2 * MIB + MIB / 16, 1)] {
        set_quota(&quorum, quota).await;
        until("the replicas follow the quota", || async {
            let mut client = quorum.client().await;
            read(&mut client, b"hot", 40).await;
            holders(&mut client, b"hot").await.len() == replicas
        })
        .await;
    }
    assert!(hot(&quorum).await.objects.iter().any(|o| o.key == b"hot"[..]), "it is as hot as before");
    obedient.abort();
}

/// Objects evicted, for whatever reason.
fn evicted(quorum: &Quorum) -> u64 {
    let families = quorum.master.metrics().gather();
    let evicted = families.iter().find(|family| family.name() == "tidepool_master_evicted_objects_total");
    evicted.map_or(0, |family| family.get_metric().iter().map(|metric| metric.get_counter().get_value() as u64).sum())
}

async fn clear(client: &mut Client, sequence: u64, floor: u64) -> Result<Vec<u8>, tidepool_proto::Error> {
    let request = v1::ReplicaClearRequest {
        keys: Some(v1::Keys::pack([&b"k"[..], b"none"])),
        session_id: client.session,
        sequence,
        floor,
        ..Default::default()
    };
    match client.ask(Ask::ReplicaClear(request)).await? {
        Answer::ReplicaClear(answer) => Ok(answer.cleared.to_vec()),
        other => panic!("replica clear answered {other:?}"),
    }
}

/// W8. Fails when the number is not looked at (was so: the duplicate clears the newer object).
#[tokio::test]
async fn a_late_duplicate_of_a_clear_leaves_the_newer_object() {
    let quorum = Quorum::start(|_| {}).await;
    let (node, mut client) = (quorum.datanode(4 * MIB).await, quorum.client().await);
    client.put(b"k", 1000, &node).await;
    assert_eq!(clear(&mut client, 1, 1).await.expect("cleared"), [1, 0]);
    assert_eq!(stat(&mut client, b"k").await.code, ErrorCode::ObjectNotFound as u32);
    let newer = client.put(b"k", 1000, &node).await;
    client.put(b"none", 1000, &node).await;
    assert_eq!(clear(&mut client, 1, 1).await.expect("the first answer"), [1, 0]);
    assert_eq!(stat(&mut client, b"k").await.object_id, newer);
    assert_eq!(stat(&mut client, b"none").await.code, 0, "what was not there then is left now");
    assert_eq!(clear(&mut client, 3, 3).await.expect("cleared"), [1, 1]);
    assert_eq!(clear(&mut client, 1, 1).await.unwrap_err().code(), ErrorCode::StaleRequest);
    // A client of before sends no number: it is executed, each time.
    client.put(b"k", 1000, &node).await;
    assert_eq!(clear(&mut client, 0, 0).await.expect("cleared"), [1, 0]);
}

/// Copies on nodes that the reader suspects are not named, but counted: so it knows whether there is something to turn to. Tried
/// without the count: fails.
#[tokio::test]
async fn copies_on_suspects_are_counted_and_not_named() {
    let quorum = Quorum::start(|_| {}).await;
    let (first, second) = (quorum.datanode_on("a", 8 * MIB).await, quorum.datanode_on("b", 8 * MIB).await);
    let mut client = quorum.client().await;
    let put =
        v1::PutStartRequest { items: vec![item(b"k", 1_000, rand::random())], replica_num: 2, ..Default::default() };
    assert_eq!(client.put_all(put, &first).await, [ErrorCode::Ok]);
    let nodes = [first.node_id, second.node_id];
    for (suspect_nodes, named) in [(vec![], 2), (vec![nodes[0]], 1), (vec![nodes[1], 77], 1), (nodes.to_vec(), 0)] {
        let locate = v1::LocateRequest {
            keys: Some(v1::Keys::pack(["k"])),
            suspect_nodes: suspect_nodes.clone(),
            ..Default::default()
        };
        let Ok(Answer::Locate(answer)) = client.ask(Ask::Locate(locate)).await else { panic!("not located") };
        let object = &answer.objects[0];
        assert_eq!(object.replicas.len(), named);
        assert!(object.replicas.iter().all(|replica| !suspect_nodes.contains(&replica.node_id)));
        // Where none is named the answer is that there is none.
        assert_eq!(object.suspect_copies as usize, if named > 0 { 2 - named } else { 0 }, "{suspect_nodes:?}");
        assert_eq!(object.code == 0, named > 0);
    }
}
