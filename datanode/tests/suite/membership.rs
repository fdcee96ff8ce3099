//! Registering, following the leader, fences, new histories, leaving.

use std::time::Duration;

use tidepool_datanode::{Datanode, DatanodeOptions, Prefault, StopReason};
use tidepool_proto::capability::Verb;
use tidepool_proto::v1::datanode_service_client::DatanodeServiceClient;
use tidepool_proto::{Address, ErrorCode, PROTOCOL_VERSION, v1};

use crate::fake_master::Quorum;
use crate::world::{SEGMENT_BYTES, World, options, pattern};

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.unwrap_or_else(|_| panic!("not within 20 s: {what}"))
}

#[tokio::test]
async fn registers_mounts_and_beats() {
    let world = World::start(3).await;
    world.quorum.until("a second beat, which follows the first answer", |s| s.beats.get(1).map(|_| ())).await;
    let ready = world.datanode.readiness();
    assert!(ready.ready, "{ready:?}");
    assert_eq!((ready.segments, ready.bytes), (1, SEGMENT_BYTES));
    assert_eq!(ready.leader.as_deref(), Some(world.masters[0].address.to_string().as_str()));
    {
        let state = world.quorum.state.lock();
        assert_eq!(state.registers.len(), 1);
        assert_eq!(state.registers[0].address, world.peer().to_string());
        assert_eq!(state.registers[0].host_id, "127.0.0.1");
        assert_eq!(ready.node_id, state.nodes.values().next().unwrap().0);
        assert!(ready.log_time_ms >= state.log_time_ms && ready.log_time_ms < state.log_time_ms + 2_000);
    }
    assert_eq!(world.metric("tidepool_datanode_segment_bytes", "dram-0"), SEGMENT_BYTES as f64);
}

#[tokio::test]
async fn describes_itself_to_its_own_cluster_only() {
    let world = World::start(1).await;
    let mut client = DatanodeServiceClient::connect(world.peer().to_uri()).await.unwrap();
    let (cluster, history) = {
        let state = world.quorum.state.lock();
        (state.cluster.0.to_vec(), state.history.0)
    };
    let ours = v1::Identity {
        cluster_uuid: cluster.into(),
        history,
        node_id: 0,
        protocol_version: PROTOCOL_VERSION,
        build: "test".into(),
        ancestors: Vec::new(),
    };
    let mut describe = async |identity| client.describe(v1::DescribeRequest { identity }).await.unwrap().into_inner();
    let described = describe(Some(ours.clone())).await;
    assert_eq!(described.error, None);
    assert_eq!((described.segments.len(), described.segments[0].bytes), (1, SEGMENT_BYTES));
    assert_eq!(Some(described.incarnation), world.datanode.incarnation().map(|i| i.0));
    let strangers = [
        None,
        Some(v1::Identity { cluster_uuid: vec![9; 16].into(), ..ours.clone() }),
        Some(v1::Identity { history: history ^ 1, ..ours.clone() }),
        Some(v1::Identity { protocol_version: PROTOCOL_VERSION + 2, ..ours }),
    ];
    for stranger in strangers {
        let refused = describe(stranger.clone()).await;
        assert_eq!(refused.error.unwrap().code, ErrorCode::WrongCluster as u32, "{stranger:?}");
        assert!(refused.segments.is_empty());
    }
}

#[tokio::test]
async fn reports_its_segments_over_http() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::start(1).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let routes = world.datanode.routes();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    let get = async |path: &str| {
        let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let names = get("/get_all_segments").await;
    assert!(names.contains(&format!("{}/dram-0", world.peer())), "{names}");
    let segments = get("/api/v1/segments").await;
    assert!(segments.contains("\"name\":\"dram-0\"") && segments.contains("prefaulted_bytes"), "{segments}");
    let node = get("/api/v1/node").await;
    assert!(node.contains("\"ready\":true"), "{node}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follows_the_next_leader_with_the_same_incarnation() {
    let world = World::start(3).await;
    let place = world.place(1000);
    let payload = pattern(1000, 1);
    world.put(&place, &payload).await.unwrap();
    for (leader, term) in [(1, 2), (2, 3)] {
        {
            let mut state = world.quorum.state.lock();
            (state.leader, state.term) = (leader, term);
        }
        world.masters[leader - 1].kill();
        let until = format!("a beat to master {leader}");
        world.quorum.until(&until, |s| s.beats.last().filter(|(to, _)| *to == leader).map(|_| ())).await;
    }
    {
        let state = world.quorum.state.lock();
        assert_eq!(state.registers.len(), 1, "registered again for a mere failover");
        let incarnations: std::collections::BTreeSet<_> =
            state.beats.iter().map(|(_, beat)| beat.incarnation).collect();
        assert_eq!(incarnations.len(), 1);
    }
    assert!(world.get(&place, 1000).await.unwrap() == payload, "a failover lost an object");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_holed_member_delays_nothing() {
    let quorum = Quorum::new();
    let (a, b) = (quorum.start(0).await, quorum.start(1).await);
    // Accepts in the kernel and never says a word, as a stopped process does.
    let stopped = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent: Address = stopped.local_addr().unwrap().to_string().parse().unwrap();
    // Packets to it vanish, or the host refuses to route them.
    let unroutable: Address = "192.0.2.1:9".parse().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let masters = vec![unroutable, silent, a.address.clone(), b.address.clone()];
    let advertise = Some("192.0.2.2:0".parse().unwrap());
    let options = DatanodeOptions { advertise, ..options(dir.path(), masters) };
    let _datanode = Datanode::start(options).await.unwrap();
    quorum.until("the first beat", |s| s.beats.first().map(|_| ())).await;
    {
        let mut state = quorum.state.lock();
        (state.leader, state.term) = (1, 2);
    }
    a.kill();
    quorum.until("a beat to the next leader", |s| s.beats.last().filter(|(to, _)| *to == 1).map(|_| ())).await;
}

/// I3. After FENCED nothing is served, and the process is told to exit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fenced_incarnation_stops_serving_and_says_so() {
    let world = World::start(1).await;
    let place = world.place(1000);
    world.put(&place, &pattern(1000, 1)).await.unwrap();
    world.quorum.state.lock().nodes.values_mut().for_each(|node| node.1 += 1);
    let reason = within("the stop", world.datanode.stopped()).await;
    assert!(matches!(&reason, StopReason::Fenced(error) if error.code() == ErrorCode::Fenced), "{reason}");
    assert!(world.get(&place, 1000).await.is_err(), "a fenced datanode served a read");
    assert!(!world.datanode.readiness().ready);
}

/// I3: a new history drops all content; an address of the old one is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_history_drops_everything_and_registers_again() {
    let world = World::start(1).await;
    let place = world.place(100_000);
    world.put(&place, &pattern(100_000, 1)).await.unwrap();
    let old = world.datanode.incarnation().unwrap();
    world.quorum.forget_everything();
    let new = world.serving().await;
    assert_ne!(old.0, new);
    assert!(world.get(&place, 100_000).await.is_err(), "an address of the old history was served");
    // Even with every fact right but the content, nothing of the old bytes is there.
    let again = world.place(100_000).with(|c| c.offset = place.capability.offset);
    let bytes = world.read(&again, 0, again.capability.length).await.unwrap();
    assert!(bytes.iter().all(|&b| b == 0), "content outlived its history");
    world.put(&again, &pattern(100_000, 2)).await.unwrap();
    assert_eq!(world.metric("tidepool_datanode_registrations_total", ""), 2.0);
}

/// I3: terms compare within one history. A cluster restored into a new history counts them from the beginning, whoever of its masters
/// leads. Seen to fail (never registered again) while `greet` compared terms before histories.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_history_with_lower_terms_is_registered_with() {
    let world = World::start(3).await;
    world.quorum.state.lock().term = 50;
    let heard = |s: &mut crate::fake_master::State| s.beats.get(3).map(|_| ());
    world.quorum.until("the term to be heard", heard).await;
    let old = world.datanode.incarnation().unwrap();
    {
        let mut state = world.quorum.state.lock();
        (state.leader, state.term) = (1, 2);
    }
    world.quorum.forget_everything();
    world.quorum.until("the second registration", |s| (s.registers.len() == 2).then_some(())).await;
    assert_ne!(old.0, world.serving().await);
}

/// A master left over from another history of this cluster says WRONG_CLUSTER as its leader. While a master of the known history
/// answers anything at all, that ends nothing. Seen to fail (registered again) when the leftover's word was taken at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leftover_of_another_history_ends_nothing() {
    let (ours, leftover) = (Quorum::new(), Quorum::new());
    leftover.state.lock().cluster = ours.state.lock().cluster;
    let (a, b, old) = (ours.start(0).await, ours.start(1).await, leftover.start(0).await);
    let dir = tempfile::tempdir().unwrap();
    // The leftover is met only as a hint would be: it knows of no registration, and must not get one.
    let masters = vec![a.address.clone(), b.address.clone(), old.address.clone()];
    leftover.state.lock().leader = 1;
    let datanode = Datanode::start(options(dir.path(), masters)).await.unwrap();
    ours.until("the first beat", |s| s.beats.first().map(|_| ())).await;
    leftover.state.lock().leader = 0;
    let asked = |s: &mut crate::fake_master::State| s.refused_beats.ge(&3).then_some(());
    // For a while nobody of ours leads.
    ours.state.lock().leader = 9;
    leftover.until("the leftover to be asked", asked).await;
    {
        let mut state = ours.state.lock();
        (state.leader, state.term) = (1, 2);
    }
    ours.until("a beat to the next leader", |s| s.beats.last().filter(|(to, _)| *to == 1).map(|_| ())).await;
    assert_eq!(ours.state.lock().registers.len(), 1, "a leftover made it register again");
    assert!(leftover.state.lock().registers.is_empty() && datanode.incarnation().is_some());
}

#[tokio::test]
async fn another_clusters_data_directory_is_refused() {
    let world = World::start(1).await;
    world.datanode.shutdown().await;
    let other = Quorum::new();
    let master = other.start(0).await;
    let stranger = Datanode::start(options(world.dir.path(), vec![master.address.clone()])).await.unwrap();
    let reason = within("the refusal", stranger.stopped()).await;
    assert!(matches!(&reason, StopReason::Fatal(error) if error.code() == ErrorCode::WrongCluster), "{reason}");
    assert!(other.state.lock().registers.is_empty());
}

/// A master that does not compare cluster ids changes nothing: the datanode compares them too. Fails when `IdentityStore::join`
/// takes any cluster (tried).
#[tokio::test]
async fn a_registration_with_another_cluster_is_refused_here_too() {
    let world = World::start(1).await;
    world.datanode.shutdown().await;
    let remembered = std::fs::read_to_string(world.dir.path().join("cluster.uuid")).unwrap();
    assert_eq!(remembered.trim(), world.quorum.state.lock().cluster.to_string());
    let other = Quorum::new();
    other.state.lock().checks_cluster = false;
    let master = other.start(0).await;
    let stranger = Datanode::start(options(world.dir.path(), vec![master.address.clone()])).await.unwrap();
    let reason = within("the refusal", stranger.stopped()).await;
    assert!(matches!(&reason, StopReason::Fatal(error) if error.code() == ErrorCode::WrongCluster), "{reason}");
    assert!(other.state.lock().segments.is_empty(), "it mounted in another cluster");
}

#[tokio::test]
async fn keeps_its_uuid_and_excludes_a_second_process() {
    let world = World::start(1).await;
    let masters = vec![world.masters[0].address.clone()];
    let second = Datanode::start(options(world.dir.path(), masters.clone())).await.err().unwrap();
    assert!(second.to_string().contains("in use by another process"), "{second}");
    let (node, incarnation) = (world.datanode.node_id(), world.datanode.incarnation());
    assert_eq!(world.datanode.vanish().await, StopReason::Shutdown);
    let again = Datanode::start(options(world.dir.path(), masters)).await.unwrap();
    world.quorum.until("the second registration", |s| (s.registers.len() == 2).then_some(())).await;
    world.serving().await;
    assert_eq!(again.node_id(), node, "a restart made another node of it");
    assert_ne!(again.incarnation(), incarnation);
}

#[tokio::test]
async fn leaves_gracefully_and_vanishes_without_a_word() {
    let world = World::start(2).await;
    let incarnation = world.datanode.incarnation().unwrap();
    assert_eq!(world.datanode.shutdown().await, StopReason::Shutdown);
    let unmounts = world.quorum.state.lock().unmounts.clone();
    assert_eq!(unmounts.len(), 1);
    assert_eq!((unmounts[0].incarnation, unmounts[0].segment_ids.len()), (incarnation.0, 0));
    assert!(
        tokio::net::TcpStream::connect((world.peer().host(), world.peer().port())).await.is_err(),
        "still listening"
    );

    let world = World::start(1).await;
    world.datanode.vanish().await;
    assert!(world.quorum.state.lock().unmounts.is_empty());
}

/// W5: the fence arrives with a beat's answer, its acknowledgement with a later beat, and the grant is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fence_is_acknowledged_and_holds() {
    let world = World::start(1).await;
    let place = world.place(1000);
    world.quorum.state.lock().fences.push(place.capability.replica.0);
    world
        .quorum
        .until("the acknowledgement", |s| s.acknowledged.contains(&place.capability.replica.0).then_some(()))
        .await;
    let refused = world.put(&place, &pattern(1000, 1)).await.unwrap_err();
    assert_eq!(refused.error.code(), ErrorCode::GrantLost, "{refused}");
    assert_eq!(refused.aborted, Some(place.proof(Verb::Aborted)));
    let bytes = world.read(&place, 0, place.capability.length).await.unwrap();
    assert!(bytes.iter().all(|&b| b == 0), "a fenced put was written");
    assert!(world.metric("tidepool_datanode_fences_total", "") >= 1.0);
}

/// A leader that was deposed may not know this incarnation: its FENCED ends nothing. Fails when `greet` and `obey` do not compare
/// terms (tried).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deposed_leaders_word_ends_nothing() {
    let world = World::start(2).await;
    {
        let mut state = world.quorum.state.lock();
        (state.leader, state.term) = (1, 5);
    }
    // The second beat follows the first answer: the term is known.
    let to_it = |s: &mut crate::fake_master::State| s.beats.iter().filter(|(to, _)| *to == 1).nth(1).map(|_| ());
    world.quorum.until("two beats to the new leader", to_it).await;
    // The old one thinks that it leads, and that another incarnation is registered.
    world.quorum.state.lock().deposed = Some((0, 4));
    world.masters[1].kill();
    world.quorum.until("the old leader to have been asked", |s| (s.deposed_answers >= 3).then_some(())).await;
    assert!(world.datanode.incarnation().is_some(), "a deposed leader fenced this datanode");
}

/// A master of another cluster in the list is passed over, and cannot make the datanode forget anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strangers_word_ends_nothing() {
    let (ours, theirs) = (Quorum::new(), Quorum::new());
    let (a, b, stranger) = (ours.start(0).await, ours.start(1).await, theirs.start(0).await);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("cluster.uuid"), ours.state.lock().cluster.to_string()).unwrap();
    let masters = vec![stranger.address.clone(), a.address.clone(), b.address.clone()];
    let datanode = Datanode::start(options(dir.path(), masters)).await.unwrap();
    ours.until("the first beat", |s| s.beats.first().map(|_| ())).await;
    {
        let mut state = ours.state.lock();
        (state.leader, state.term) = (1, 2);
    }
    ours.until("a beat to the next leader", |s| s.beats.last().filter(|(to, _)| *to == 1).map(|_| ())).await;
    assert_eq!(ours.state.lock().registers.len(), 1, "a stranger made it register again");
    assert!(theirs.state.lock().registers.is_empty() && datanode.incarnation().is_some());
}

/// User report 56: a large segment is served at once, its pages come in the background.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_056_serves_while_pages_are_taken() {
    let quorum = Quorum::new();
    let master = quorum.start(0).await;
    let dir = tempfile::tempdir().unwrap();
    let options = DatanodeOptions {
        segments: vec![192 << 20, 64 << 20],
        prefault: Prefault::Background,
        ..options(dir.path(), vec![master.address.clone()])
    };
    let datanode = Datanode::start(options).await.unwrap();
    quorum.until("the first beat", |s| s.beats.first().map(|_| ())).await;
    assert_eq!(datanode.readiness().bytes, 256 << 20);
    let all = async {
        while datanode.readiness().prefaulted_bytes < 256 << 20 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    within("every page", all).await;
}

/// R3: the verdict is the datanode's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verifies_in_place_on_the_leaders_word() {
    let world = World::start(1).await;
    let place = world.place(300_000);
    world.put(&place, &pattern(300_000, 1)).await.unwrap();
    let c = place.capability;
    let question = v1::VerifyReplica {
        history: 0,
        object_id: c.object.0,
        replica_id: c.replica.0,
        segment_id: c.segment.0,
        offset: c.offset,
        length: c.length,
    };
    let questions = [
        (true, question),
        (false, v1::VerifyReplica { object_id: 5, replica_id: 1_000, ..question }),
        (false, v1::VerifyReplica { offset: c.offset + 64, replica_id: 1_001, ..question }),
        (false, v1::VerifyReplica { segment_id: 3, replica_id: 1_002, ..question }),
        (false, v1::VerifyReplica { length: u64::MAX, replica_id: 1_003, ..question }),
    ];
    world.quorum.state.lock().verify.extend(questions.iter().map(|(_, q)| *q));
    for (intact, question) in questions {
        let verdict = world
            .quorum
            .until("a verdict", |s| s.verdicts.iter().find(|v| v.replica_id == question.replica_id).cloned())
            .await;
        assert_eq!(verdict.intact, intact, "{question:?}: {}", verdict.message);
        assert_eq!(verdict.message.is_empty(), intact);
    }
    assert_eq!(world.quorum.state.lock().verdicts.len(), 5, "verdicts are repeated only until answered");
}
