//! Who is not let in: wiped members, other clusters, garbage. The quorum goes on unharmed.

use bytes::Bytes;
use futures::stream;
use tidepool_proto::v1::raft_service_client::RaftServiceClient;
use tidepool_proto::{ErrorCode, PROTOCOL_VERSION, v1};
use tonic::transport::Channel;

use crate::members::{LIMIT, Quorum, standing};

async fn refusal(quorum: &mut Quorum, id: u64) -> tidepool_proto::Error {
    let running = quorum.running.get_mut(&id).unwrap();
    let result = tokio::time::timeout(LIMIT, &mut running.taking_part).await.expect("an answer");
    result.unwrap().expect_err("it was let in").0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wiped_member_is_refused_and_told_how_to_join() {
    let mut quorum = Quorum::started(|_| {}).await;
    quorum.put(1).await;
    let (leader, term) = quorum.leader().await;
    for id in 1..=3 {
        if id == leader.node_id().0 {
            continue;
        }
        quorum.kill(id).await;
        quorum.wipe(id);
        quorum.start(id).await.unwrap();
        let error = refusal(&mut quorum, id).await;
        assert_eq!(error.code(), ErrorCode::WrongCluster);
        assert!(error.message().contains("learner under a new node id"), "{error}");
        assert_eq!(quorum.node(id).status().last_log_index, 0);
        break;
    }
    // The two others go on under the same leader.
    quorum.put(2).await;
    let (now, now_in) = quorum.leader().await;
    assert_eq!((now.node_id(), now_in), (leader.node_id(), term));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_wiped_members_found_no_second_cluster() {
    let mut quorum = Quorum::started(|_| {}).await;
    let last = quorum.put(1).await;
    quorum.converge(last).await;
    let survivor = quorum.node(3);
    let (identity, entries) = (survivor.identity(), survivor.machine().entries());
    for id in [1, 2] {
        quorum.kill(id).await;
        quorum.wipe(id);
    }
    for id in [1, 2] {
        quorum.start(id).await.unwrap();
    }
    for id in [1, 2] {
        assert_eq!(refusal(&mut quorum, id).await.code(), ErrorCode::WrongCluster);
        assert_eq!(quorum.node(id).identity(), Default::default());
    }
    assert_eq!((survivor.identity(), survivor.machine().entries()), (identity, entries));
    assert_eq!(survivor.status().fatal, None);
}

/// A member of one cluster whose directory is started with the member list of another. (Without the question where it
/// belongs it stands by for ever: tried with processes, `a_data_directory_of_another_cluster_takes_no_part`.)
#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_another_cluster_is_refused() {
    let mut ours = Quorum::started(|_| {}).await;
    let mut theirs = Quorum::started(|_| {}).await;
    ours.put(1).await;
    theirs.put(2).await;
    ours.kill(2).await;
    theirs.kill(2).await;
    // Node 2 of their cluster moves to the address of ours and calls itself one of us.
    let (leader, term) = ours.leader().await;
    theirs.members = ours.members.clone();
    let stranger = theirs.restart(2).await;
    ours.put(3).await;
    // It hears nothing that it would accept, so it asks for votes, and gets none.
    crate::members::until("it asked for votes", || {
        (!stranger.status().fenced && standing(&stranger).role != tidepool_raft::Role::Recovering).then_some(())
    })
    .await;
    let refused =
        v1::HandshakeRequest { identity: Some(identity_of(&stranger)), target_node_id: 1, store_uuid: Bytes::new() };
    let mut client = dial(&ours, 1).await;
    let answer = client.handshake(refused).await.unwrap().into_inner();
    assert_eq!(answer.error.unwrap().code, ErrorCode::WrongCluster as u32);
    for id in 10..30 {
        ours.put(id).await;
    }
    // A majority of those it was started with is another cluster: it ends, and says why.
    let fatal = tokio::time::timeout(LIMIT, stranger.fatal()).await.expect("it stands by among strangers for ever");
    let (own, other) = (stranger.identity().cluster, leader.identity().cluster);
    assert!(matches!(fatal, tidepool_raft::FatalError::WrongCluster(_)), "{fatal}");
    for fact in ["WRONG_CLUSTER", &own.to_string(), &other.to_string(), "data directory"] {
        assert!(fatal.to_string().contains(fact), "'{fatal}' does not say {fact}");
    }
    // It may have been killed before it applied its own cluster's entry; it must hold nothing of ours.
    assert!(stranger.machine().entries().iter().all(|&id| id == 2), "{:?}", stranger.machine().entries());
    let (now, now_in) = ours.leader().await;
    assert_eq!((now.node_id(), now_in), (leader.node_id(), term), "a stranger's votes moved the leadership");
}

/// One stranger on a member's address, the third member away: nobody's life ends. With the third back, the two that belong
/// together go on and the stranger ends. (Tried with one stranger counted as enough: the member ends.)
#[tokio::test(flavor = "multi_thread")]
async fn one_stranger_on_a_members_address_ends_nobody() {
    let mut ours = Quorum::started(|_| {}).await;
    let mut theirs = Quorum::started(|_| {}).await;
    let last = ours.put(1).await;
    ours.converge(last).await;
    for id in 1..=3 {
        ours.kill(id).await;
        theirs.kill(id).await;
    }
    theirs.members = ours.members.clone();
    let stranger = theirs.restart(1).await;
    let member = ours.restart(2).await;
    // Several rounds of questions long.
    tokio::time::sleep(std::time::Duration::from_secs(3)).await;
    assert_eq!((member.status().fatal, stranger.status().fatal), (None, None));
    ours.restart(3).await;
    ours.put(2).await;
    let fatal = tokio::time::timeout(LIMIT, stranger.fatal()).await.expect("the stranger is outnumbered");
    assert!(matches!(fatal, tidepool_raft::FatalError::WrongCluster(_)), "{fatal}");
    assert_eq!(member.status().fatal, None);
}

fn identity_of(node: &tidepool_raft::Node<crate::ledger::Ledger>) -> v1::Identity {
    let identity = node.identity();
    v1::Identity {
        cluster_uuid: Bytes::copy_from_slice(&identity.cluster.0),
        history: identity.history.0,
        node_id: node.node_id().0,
        protocol_version: PROTOCOL_VERSION,
        build: "test".to_owned(),
        ancestors: Vec::new(),
    }
}

async fn dial(quorum: &Quorum, id: u64) -> RaftServiceClient<Channel> {
    RaftServiceClient::connect(format!("http://{}", quorum.socket(id))).await.unwrap()
}

/// (Tried with the comparison of clusters left out: fails.) Every call with every wrong identity, and with payloads that are no messages: a specific error, and nothing changes.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_identities_and_garbage_are_refused_on_every_call() {
    let quorum = Quorum::started(|_| {}).await;
    let last = quorum.put(1).await;
    quorum.converge(last).await;
    let (leader, term) = quorum.leader().await;
    let target = leader.node_id().0;
    let peer = quorum.node((1..=3).find(|id| *id != target).unwrap());
    let right = identity_of(&peer);
    let mut client = dial(&quorum, target).await;

    let wrong = [
        (None, target, "said nothing"),
        (
            Some(v1::Identity { cluster_uuid: Bytes::copy_from_slice(&[9; 16]), ..right.clone() }),
            target,
            "another cluster",
        ),
        (Some(v1::Identity { cluster_uuid: Bytes::new(), ..right.clone() }), target, "no cluster"),
        (Some(v1::Identity { history: right.history ^ 1, ..right.clone() }), target, "another history"),
        (Some(v1::Identity { protocol_version: PROTOCOL_VERSION + 2, ..right.clone() }), target, "another protocol"),
        (Some(v1::Identity { node_id: target, ..right.clone() }), target, "the same id"),
        (Some(right.clone()), peer.node_id().0, "meant for another"),
        (Some(right.clone()), target, "another data directory"),
    ];
    for (identity, target_node_id, what) in wrong {
        let message = v1::ConsensusMessage {
            identity: identity.clone(),
            target_node_id,
            payload: Bytes::from_static(b"x"),
            ..Default::default()
        };
        for call in 0..4 {
            let answer = match call {
                0 => client.beat(message.clone()).await,
                1 => client.vote(message.clone()).await,
                2 => client.pre_vote(message.clone()).await,
                _ => client.transfer_leader(message.clone()).await,
            };
            assert_eq!(
                answer.unwrap().into_inner().error.unwrap().code,
                ErrorCode::WrongCluster as u32,
                "{what}, call {call}"
            );
        }
        let first = v1::AppendRequest {
            identity: identity.clone(),
            target_node_id,
            payload: Bytes::from_static(b"x"),
            ..Default::default()
        };
        let mut answers = client.append(stream::iter([first])).await.unwrap().into_inner();
        assert_eq!(
            answers.message().await.unwrap().unwrap().error.unwrap().code,
            ErrorCode::WrongCluster as u32,
            "{what}, append"
        );
        let first = v1::SnapshotChunk {
            identity: identity.clone(),
            target_node_id,
            header: Bytes::from_static(b"x"),
            ..Default::default()
        };
        let answer = client.snapshot(stream::iter([first])).await.unwrap().into_inner();
        assert_eq!(answer.error.unwrap().code, ErrorCode::WrongCluster as u32, "{what}, snapshot");
        let prepare = v1::PrepareRequest { identity, target_node_id, members: Vec::new(), join: false };
        assert_eq!(
            client.prepare(prepare).await.unwrap().into_inner().error.unwrap().code,
            ErrorCode::WrongCluster as u32,
            "{what}, prepare"
        );
    }

    // The right identity and garbage: the frame is named.
    let mut handshake = dial(&quorum, peer.node_id().0).await;
    let hello = v1::HandshakeRequest {
        identity: Some(identity_of(&leader)),
        target_node_id: peer.node_id().0,
        store_uuid: Bytes::new(),
    };
    let store_uuid = handshake.handshake(hello).await.unwrap().into_inner().store_uuid;
    for length in [0usize, 1, 5, 6, 7, 100, 1 << 20] {
        let payload = Bytes::from((0..length).map(|n| (n * 31 + length) as u8).collect::<Vec<u8>>());
        let message = v1::ConsensusMessage {
            identity: Some(right.clone()),
            target_node_id: target,
            payload: payload.clone(),
            store_uuid: store_uuid.clone(),
            ..Default::default()
        };
        let answer = client.vote(message).await.unwrap().into_inner();
        assert_eq!(answer.error.unwrap().code, ErrorCode::BadFrame as u32, "{length} bytes of garbage as a vote");
        let first = v1::AppendRequest {
            identity: Some(right.clone()),
            target_node_id: target,
            payload,
            store_uuid: store_uuid.clone(),
        };
        let mut answers = client.append(stream::iter([first])).await.unwrap().into_inner();
        assert_eq!(answers.message().await.unwrap().unwrap().error.unwrap().code, ErrorCode::BadFrame as u32);
    }
    quorum.put(2).await;
    let (now, now_in) = quorum.leader().await;
    assert_eq!((now.node_id(), now_in), (leader.node_id(), term));
    assert_eq!(leader.machine().entries(), [1, 2]);
}
