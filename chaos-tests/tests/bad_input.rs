//! Everything a pool must refuse: each with its own error, every process alive, the directory unchanged.

mod rig;

use std::fmt::Debug;
use std::process::Stdio;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rig::{Pool, WITHIN, assert_space_adds_up, expect_all, keys, pool, put_all, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::rogue::RogueClient;
use tidepool_client::{Error, ErrorCode};
use tidepool_proto::object::{OBJECT_BYTES_MAX, build_prefix, key_hash, stored_bytes};
use tidepool_proto::v1::client_request::Body;
use tidepool_proto::v1::node_service_client::NodeServiceClient;
use tidepool_proto::{Address, ClusterId, History, ObjectId, v1};
use tidepool_transport::tcp::{DataIdentity, TcpEngine, TcpOptions};
use tidepool_transport::{Engine, LocalRef, ReadAccess, ReadItem, WriteAccess, WriteItem};

/// One row of the table: what was refused, with which code, in words that name the fact.
struct Row {
    name: &'static str,
    code: ErrorCode,
    words: &'static str,
}

const fn row(name: &'static str, code: ErrorCode, words: &'static str) -> Row {
    Row { name, code, words }
}

impl Row {
    /// Checks what really came back.
    fn is<T: Debug>(&self, outcome: Result<T, Error>) {
        match outcome {
            Ok(value) => panic!("{}: accepted: {value:?}", self.name),
            Err(error) => {
                assert_eq!(error.code(), self.code, "{}: {error}", self.name);
                let message = error.message().to_lowercase();
                assert!(message.contains(self.words), "{}: '{message}' does not say '{}'", self.name, self.words);
            }
        }
    }
    /// The same for a call whose transport may fail too.
    fn is_call<T: Debug>(&self, outcome: anyhow::Result<T>) {
        self.is(outcome.map_err(|error| match error.downcast::<Error>() {
            Ok(error) => error,
            Err(other) => panic!("{}: not an error of ours: {other:#}", self.name),
        }));
    }
}

fn item<T>(error: Option<v1::ItemError>, otherwise: T) -> Result<T, Error> {
    error.map_or(Ok(otherwise), |error| Err(error.into()))
}

fn grant(grants: anyhow::Result<Vec<v1::PutGrant>>) -> anyhow::Result<v1::PutGrant> {
    let grant = grants?.remove(0);
    match grant.error.clone() {
        Some(error) => Err(Error::from(error).into()),
        None => Ok(grant),
    }
}

/// A put that a test drives step by step.
struct Steps {
    object_id: u64,
    replica: v1::Replica,
    key: &'static str,
    payload: &'static [u8],
}

impl Steps {
    async fn start(client: &mut RogueClient, key: &'static str, payload: &'static [u8]) -> Steps {
        let grant = grant(client.put_start(&[key.as_bytes()], payload.len() as u64, 1).await).unwrap();
        Steps { object_id: grant.object_id, replica: grant.replicas[0].clone(), key, payload }
    }

    fn write(&self, history: u64) -> WriteItem {
        let prefix = build_prefix(
            History(history),
            ObjectId(self.object_id),
            key_hash("", self.key.as_bytes()),
            &[self.payload],
        );
        let access = WriteAccess {
            object_id: self.object_id,
            replica: self.replica.clone(),
            length: stored_bytes(self.payload.len() as u64),
        };
        WriteItem { access, from: vec![prefix.into(), Bytes::from_static(self.payload).into()] }
    }

    fn end(&self, outcome: v1::ReplicaOutcome, proof: &[u8]) -> v1::PutEndItem {
        v1::PutEndItem {
            key: self.key.as_bytes().to_vec().into(),
            object_id: self.object_id,
            replicas: vec![v1::ReplicaStatus {
                replica_id: self.replica.replica_id,
                outcome: outcome as i32,
                proof: proof.to_vec().into(),
            }],
        }
    }
}

/// The client side of the directory: one table over raw requests to the leader.
#[tokio::test(flavor = "multi_thread")]
async fn every_bad_request_gets_its_own_error_and_changes_nothing() {
    let mut pool = pool(|_| {}).await;
    let good = keys("good", 10);
    put_all(&pool.client, &good, 10_000, 1).await;
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let address = pool.cluster.masters[leader].rpc;
    let mut client = RogueClient::open(address).await.unwrap();
    let mut other = RogueClient::open(address).await.unwrap();
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();

    // Keys and lengths.
    let long = vec![b'k'; 4097];
    row("empty key", ErrorCode::InvalidKey, "empty").is_call(grant(client.put_start(&[b""], 1, 1).await));
    row("long key", ErrorCode::InvalidKey, "4097").is_call(grant(client.put_start(&[&long], 1, 1).await));
    row("exist of an empty key", ErrorCode::InvalidKey, "empty").is_call(client.exists(b"", WITHIN).await);
    row("zero length", ErrorCode::InvalidParams, "0 bytes").is_call(grant(client.put_start(&[b"k"], 0, 1).await));
    for absurd in [OBJECT_BYTES_MAX + 1, u64::MAX] {
        row("absurd length", ErrorCode::InvalidParams, "bytes")
            .is_call(grant(client.put_start(&[b"k"], absurd, 1).await));
    }
    row("larger than any segment", ErrorCode::NoSpace, "the largest free extent has")
        .is_call(grant(client.put_start(&[b"k"], 40 << 30, 1).await));
    row("too many copies", ErrorCode::InvalidParams, "16").is_call(grant(client.put_start(&[b"k"], 1, 16).await));
    let bent = v1::Keys { blob: Bytes::from_static(b"abc"), lengths: vec![u32::MAX, 9] };
    let bent = Body::Exist(v1::ExistRequest { keys: Some(bent), ..v1::ExistRequest::default() });
    row("key lengths that do not add up", ErrorCode::InvalidParams, "add up").is_call(client.call(bent).await);

    // Who asks, and when.
    let mut stranger = RogueClient::connect(address).await.unwrap();
    row("no session", ErrorCode::SessionUnknown, "hello").is_call(grant(stranger.put_start(&[b"k"], 1, 1).await));
    let hello = |identity: v1::Identity| {
        Body::Hello(v1::HelloRequest {
            identity: Some(identity),
            client_uuid: Bytes::from_static(&[7; 16]),
            host_id: String::new(),
            lineage: Vec::new(),
        })
    };
    let ours = client.identity.clone();
    let elsewhere = v1::Identity { cluster_uuid: Bytes::from_static(&[9; 16]), ..ours.clone() };
    row("another cluster", ErrorCode::WrongCluster, "another cluster").is_call(stranger.call(hello(elsewhere)).await);
    let bygone = v1::Identity { history: ours.history ^ 1, ..ours.clone() };
    row("another history", ErrorCode::WrongCluster, "history").is_call(stranger.call(hello(bygone)).await);
    let future = v1::Identity { protocol_version: 99, ..ours.clone() };
    row("another protocol", ErrorCode::WrongCluster, "99").is_call(stranger.call(hello(future)).await);
    let exist = Body::Exist(v1::ExistRequest { keys: Some(v1::Keys::pack(["k"])), ..v1::ExistRequest::default() });
    row("no time", ErrorCode::InvalidParams, "remaining_ms").is_call(client.call_within(exist, Duration::ZERO).await);

    // The life of a put, against its order.
    let data = data_plane(&ours);
    let step = Steps::start(&mut client, "steps", b"payload").await;
    let peer = node_address(&before, step.replica.node_id);
    row("absent until ended", ErrorCode::PutInProgress, "").is_call(grant(other.put_start(&[b"steps"], 7, 1).await));
    let end = step.end(v1::ReplicaOutcome::Stored, &[0; 16]);
    row("end with a forged proof", ErrorCode::CapabilityRefused, "proof").is(ended(client.put_end(end).await));

    // The data plane: capabilities and bounds.
    let write = |change: &dyn Fn(&mut WriteItem)| {
        let mut item = step.write(ours.history);
        change(&mut item);
        item
    };
    let forged = write(&|item| item.access.replica.mac = Bytes::from_static(&[1; 16]));
    row("forged MAC", ErrorCode::CapabilityRefused, "").is(put_one(&data, &peer, forged).await);
    let moved = write(&|item| item.access.replica.offset += 64);
    row("grant moved to another place", ErrorCode::CapabilityRefused, "").is(put_one(&data, &peer, moved).await);
    let expired = write(&|item| item.access.replica.expires_log_time_ms = 1);
    row("grant made to expire at once", ErrorCode::CapabilityRefused, "").is(put_one(&data, &peer, expired).await);
    let as_reader = ReadAccess { object_id: step.object_id, replica: step.replica.clone(), offset: 0, length: 64 };
    row("reading with a grant to write", ErrorCode::CapabilityRefused, "").is(read_one(&data, &peer, as_reader).await);
    let corrupt = write(&|item| item.from[1] = LocalRef::from_static(b"pAyload"));
    row("bytes that are not what was checksummed", ErrorCode::ChecksumMismatch, "")
        .is(put_one(&data, &peer, corrupt).await);

    // That put is over at its datanode; another one goes all the way.
    let step = Steps::start(&mut client, "whole", b"payload").await;
    let peer = node_address(&before, step.replica.node_id);
    let proof = put_one(&data, &peer, step.write(ours.history)).await.expect("a right put is stored");
    let end = step.end(v1::ReplicaOutcome::Stored, &proof);
    row("end by another client", ErrorCode::IllegalClient, "session").is(ended(other.put_end(end.clone()).await));
    row("revoke by another client", ErrorCode::IllegalClient, "session")
        .is(item(other.put_revoke(end.clone()).await.unwrap(), ()));
    ended(client.put_end(end.clone()).await).expect("the right end");
    ended(client.put_end(end.clone()).await).expect("the same end again is answered as the first");
    let fewer = step.end(v1::ReplicaOutcome::Unknown, &[]);
    row("end again with another outcome", ErrorCode::AlreadyEnded, "ended").is(ended(client.put_end(fewer).await));
    row("revoke after end", ErrorCode::AlreadyEnded, "ended").is(item(client.put_revoke(end).await.unwrap(), ()));
    row("the key again", ErrorCode::ObjectAlreadyExists, "").is_call(grant(other.put_start(&[b"whole"], 7, 1).await));

    let step = Steps::start(&mut client, "revoked", b"payload").await;
    let end = step.end(v1::ReplicaOutcome::Unknown, &[]);
    item(client.put_revoke(end.clone()).await.unwrap(), ()).expect("a right revocation");
    row("end after revoke", ErrorCode::GrantLost, "").is(ended(client.put_end(end).await));
    let unknown = v1::PutEndItem { object_id: 1 << 40, ..v1::PutEndItem::default() };
    row("end of an unknown object", ErrorCode::GrantLost, "").is(ended(client.put_end(unknown).await));

    // Removal.
    let remove = |sequence: u64, floor: u64| {
        Body::Remove(v1::RemoveRequest {
            session_id: client.session_id,
            sequence,
            floor,
            keys: Some(v1::Keys::pack(["nothing"])),
            mode: v1::RemoveMode::RespectLease as i32,
        })
    };
    let (first, late) = (remove(5, 5), remove(3, 3));
    row("remove of nothing", ErrorCode::ObjectNotFound, "nothing").is(removed(client.call(first).await));
    row("a late duplicate", ErrorCode::StaleRequest, "").is(removed(client.call(late).await));

    datanode_rows(&pool, &before).await;

    // Nothing of this stays but the one whole put. Open grants end by themselves.
    for role in pool.cluster.masters.iter_mut().chain(&mut pool.cluster.datanodes) {
        role.process().unwrap().expect_running().unwrap();
    }
    expect_all(&pool.client, &good, 10_000).await;
    let after = wait_for("the open grants to end", async || {
        let status = pool.cluster.leader_status(WITHIN).await.ok()?;
        (status.grants_open == 0 && status.segments.iter().all(|s| s.processing_bytes == 0)).then_some(status)
    })
    .await;
    assert_space_adds_up(&after);
    assert_eq!((after.term, after.objects), (before.term, before.objects + 1));
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
}

fn ended(result: anyhow::Result<v1::PutEndResult>) -> Result<u32, Error> {
    let result = result.expect("the call itself is fine");
    item(result.error, result.copies)
}

fn removed(answer: anyhow::Result<v1::client_response::Body>) -> Result<(), Error> {
    match answer.map_err(|error| error.downcast::<Error>().expect("an error of ours"))? {
        v1::client_response::Body::Remove(answer) => item(answer.errors.into_iter().next(), ()),
        other => panic!("remove was answered with {other:?}"),
    }
}

fn data_plane(identity: &v1::Identity) -> TcpEngine {
    let cluster = ClusterId(identity.cluster_uuid[..].try_into().expect("16 bytes"));
    TcpEngine::new(TcpOptions::new(DataIdentity {
        cluster,
        history: History(identity.history),
        ..DataIdentity::default()
    }))
}

fn node_address(status: &v1::StatusResponse, node_id: u64) -> Address {
    let node = status.nodes.iter().find(|node| node.node_id == node_id).expect("the grant names a known datanode");
    node.address.parse().expect("an address")
}

async fn put_one(data: &TcpEngine, peer: &Address, item: WriteItem) -> Result<[u8; 16], Error> {
    let mut results = data.write(peer, vec![item], Instant::now() + WITHIN).await;
    match results.remove(0) {
        Ok(reply) => Ok(reply.proof),
        Err(failed) => Err(failed.error),
    }
}

async fn read_one(data: &TcpEngine, peer: &Address, access: ReadAccess) -> Result<(), Error> {
    let (_buffer, into) = tidepool_transport::Buffer::zeroed(access.length as usize);
    data.read(peer, vec![ReadItem { access, into: vec![into] }], Instant::now() + WITHIN).await.remove(0)
}

/// What a datanode may not do.
async fn datanode_rows(pool: &Pool, status: &v1::StatusResponse) {
    let leader = pool.client.leader().expect("the client knows the leader");
    let mut service = NodeServiceClient::connect(leader.to_uri()).await.unwrap();
    let node = &status.nodes[0];
    let whole = |error: Option<v1::CallError>| error.map_or(Ok(()), |error| Err(Error::from(error)));

    let leave = |incarnation: u64, segment_ids: Vec<u64>| v1::UnmountRequest {
        node_id: node.node_id,
        incarnation,
        segment_ids,
        identity: status.identity.clone(),
    };
    let mut foreign = leave(node.incarnation, Vec::new());
    if let Some(identity) = &mut foreign.identity {
        identity.cluster_uuid = vec![9; 16].into();
    }
    let answer = service.unmount(foreign).await.unwrap().into_inner();
    row("leave of another cluster's node", ErrorCode::WrongCluster, "cluster").is(whole(answer.error));

    let unmount = leave(node.incarnation, vec![1 << 40]);
    let answer = service.unmount(unmount).await.unwrap().into_inner();
    row("unknown segment", ErrorCode::SegmentNotFound, "segment").is(whole(answer.error));

    let stale = leave(1, Vec::new());
    let answer = service.unmount(stale).await.unwrap().into_inner();
    row("leave by a stale incarnation", ErrorCode::Fenced, "").is(whole(answer.error));

    let mount = v1::MountRequest {
        node_id: node.node_id,
        incarnation: 1,
        segments: vec![v1::MountSegment { name: "x".into(), bytes: 1 << 20 }],
        identity: status.identity.clone(),
    };
    let answer = service.mount(mount).await.unwrap().into_inner();
    let error = answer.error.map(Error::from).or_else(|| answer.segments[0].error.clone().map(Error::from));
    row("mount by a stale incarnation", ErrorCode::Fenced, "").is(error.map_or(Ok(()), Err));

    let history = status.identity.as_ref().unwrap().history;
    for (name, code, beat) in [
        (
            "stale beat",
            ErrorCode::Fenced,
            v1::HeartbeatRequest { node_id: node.node_id, incarnation: 1, history, ..Default::default() },
        ),
        (
            "beat of another history",
            ErrorCode::WrongCluster,
            v1::HeartbeatRequest {
                node_id: node.node_id,
                incarnation: node.incarnation,
                history: history ^ 1,
                ..Default::default()
            },
        ),
        (
            "beat of an unknown node",
            ErrorCode::NodeUnknown,
            v1::HeartbeatRequest { node_id: 1 << 40, incarnation: 1, history, ..Default::default() },
        ),
    ] {
        let mut answers = service.heartbeat(futures::stream::iter([beat])).await.unwrap().into_inner();
        let answer = answers.message().await.unwrap().expect("an answer");
        row(name, code, "").is(whole(answer.error));
    }

    let register = v1::RegisterRequest {
        identity: Some(v1::Identity {
            cluster_uuid: Bytes::from_static(&[9; 16]),
            protocol_version: 1,
            ..Default::default()
        }),
        node_uuid: Bytes::from_static(&[1; 16]),
        address: "127.0.0.1:1".into(),
        host_id: String::new(),
        process_uuid: Bytes::from_static(&[2; 16]),
    };
    let answer = service.register(register).await.unwrap().into_inner();
    row("a datanode of another cluster", ErrorCode::WrongCluster, "another cluster").is(whole(answer.error));
}

/// Runs the binary until it ends; a start that must be refused never serves.
async fn refused_start(arguments: &[&str]) -> (i32, String) {
    let mut command = tokio::process::Command::new(rig::binary());
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = tokio::time::timeout(WITHIN, command.output()).await;
    let output = output.unwrap_or_else(|_| panic!("{arguments:?} runs; it must be refused")).unwrap();
    (output.status.code().unwrap_or(-1), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Command lines and configurations that must be refused before anything is served.
#[tokio::test(flavor = "multi_thread")]
async fn every_bad_start_is_refused_with_its_reason() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data").display().to_string();
    let file = directory.path().join("bad.toml");
    std::fs::write(&file, "[master]\nlease_tll = \"5s\"\n").unwrap();
    let file = file.display().to_string();
    let spread = "1=127.0.0.1:50051,2=10.1.1.2:50051,3=10.1.1.3:50051";
    let table: [(&str, Vec<&str>, &str); 6] = [
        ("unspecified address", vec!["master", "--listen", "0.0.0.0:50051", "--data-dir", &data], "--advertise"),
        ("loopback in a quorum of hosts", vec!["master", "--members", spread, "--data-dir", &data], "--members"),
        ("unspecified datanode", vec!["datanode", "--listen", "0.0.0.0:50052", "--data-dir", &data], "--advertise"),
        ("unknown key in the file", vec!["--config", &file, "master", "--data-dir", &data], "lease_ttl"),
        ("unknown flag", vec!["master", "--lease-tll", "5s"], "--lease-ttl"),
        ("size without sense", vec!["datanode", "--dram", "lots", "--data-dir", &data], "512MiB"),
    ];
    for (name, arguments, words) in table {
        let (code, text) = refused_start(&arguments).await;
        assert_eq!(code, 2, "{name}: {text}");
        assert!(text.contains(words), "{name}: '{text}' does not say '{words}'");
    }
    assert!(!directory.path().join("data").exists(), "a refused start leaves no data directory");
}

fn swap(one: &std::path::Path, other: &std::path::Path) {
    let aside = one.with_extension("aside");
    std::fs::rename(one, &aside).unwrap();
    std::fs::rename(other, one).unwrap();
    std::fs::rename(&aside, other).unwrap();
}

/// A master started over the data directory of another cluster takes no part in this one, and ends with the reason (I4).
/// Fails without the question where a member belongs: it stands by for ever (tried).
#[tokio::test(flavor = "multi_thread")]
async fn a_data_directory_of_another_cluster_takes_no_part() {
    let mut ours = pool(|_| {}).await;
    let mut theirs = pool(|options| options.datanodes = 0).await;
    let keys = keys("ours", 20);
    put_all(&ours.client, &keys, 1000, 1).await;
    let before = ours.cluster.leader_status(WITHIN).await.unwrap();
    let elsewhere = theirs.cluster.leader_status(WITHIN).await.unwrap();
    let leader = ours.cluster.leader(WITHIN).await.unwrap();
    let victim = (leader + 1) % 3;
    theirs.cluster.masters[victim].kill().unwrap();
    ours.cluster.masters[victim].kill().unwrap();
    swap(&ours.cluster.masters[victim].data_dir, &theirs.cluster.masters[victim].data_dir);
    ours.cluster.masters[victim].start().unwrap();

    // It ends by itself, and says which clusters these are, where its data lies, and what to do.
    let foreign = ours.cluster.masters[victim].process().unwrap().wait(WITHIN).await.unwrap();
    assert!(!foreign.success(), "{foreign}");
    let told = std::fs::read_to_string(ours.cluster.masters[victim].log()).unwrap();
    let uuid = |status: &v1::StatusResponse| {
        let bytes: [u8; 16] = status.identity.as_ref().unwrap().cluster_uuid[..].try_into().unwrap();
        ClusterId(bytes).to_string()
    };
    let data_dir = ours.cluster.masters[victim].data_dir.display().to_string();
    let facts = [&*uuid(&before), &*uuid(&elsewhere), &*data_dir, "WRONG_CLUSTER", "data directory of its own cluster"];
    for fact in facts {
        assert!(told.contains(fact), "the log of the foreign master does not say '{fact}':\n{told}");
    }
    put_all(&ours.client, &rig::keys("more", 20), 1000, 1).await;
    expect_all(&ours.client, &keys, 1000).await;
    assert_eq!(ours.cluster.leader_status(WITHIN).await.unwrap().term, before.term, "the leader was disturbed");

    // With its own data back it is a member again.
    swap(&ours.cluster.masters[victim].data_dir, &theirs.cluster.masters[victim].data_dir);
    ours.cluster.masters[victim].start().unwrap();
    ours.cluster.wait_caught_up(victim, WITHIN).await.unwrap();
    assert!(ours.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
}

/// Two of three members come back with empty disks: they never vote, so no quorum forms from emptiness, and nothing that
/// was acknowledged is forgotten (I4). With their disks back the cluster is what it was.
#[tokio::test(flavor = "multi_thread")]
async fn two_wiped_members_of_three_elect_nobody() {
    let mut pool = pool(|_| {}).await;
    let keys = keys("kept", 20);
    put_all(&pool.client, &keys, 1000, 1).await;
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();
    for master in &mut pool.cluster.masters {
        master.kill().unwrap();
    }
    let saved: Vec<_> = pool.cluster.masters[..2].iter().map(|m| m.data_dir.with_extension("saved")).collect();
    for (master, saved) in pool.cluster.masters[..2].iter().zip(&saved) {
        std::fs::rename(&master.data_dir, saved).unwrap();
    }
    for master in &mut pool.cluster.masters {
        master.start().unwrap();
    }
    // Many election timeouts (120 ms at most) long: whoever would win, would have.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        for master in &pool.cluster.masters {
            if let Ok(status) = admin::status(master.rpc).await {
                assert_ne!(status.role, "leader", "{} leads; two of three members are empty", master.name());
            }
        }
    }
    for master in &mut pool.cluster.masters {
        if master.is_running().unwrap() {
            master.kill().unwrap();
        }
    }
    for (master, saved) in pool.cluster.masters[..2].iter().zip(&saved) {
        if master.data_dir.exists() {
            std::fs::remove_dir_all(&master.data_dir).unwrap();
        }
        std::fs::rename(saved, &master.data_dir).unwrap();
    }
    for master in &mut pool.cluster.masters {
        master.start().unwrap();
    }
    pool.cluster.wait_serving(WITHIN).await.unwrap();
    let after = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert_eq!(before.identity.unwrap().cluster_uuid, after.identity.unwrap().cluster_uuid);
    expect_all(&pool.client, &keys, 1000).await;
}
