//! W5 through real sockets: a sender that stops half-way cannot hold back a fence, and cannot write after it.

use std::time::{Duration, Instant};

use prost::Message;
use tidepool_proto::capability::Verb;
use tidepool_proto::{ErrorCode, PROTOCOL_VERSION, v1};
use tidepool_transport::WriteAccess;
use tidepool_transport::tcp::MAGIC;
use tidepool_transport::tcp::wire::{self, Answer, Kind, RECORD_BYTES, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::world::{World, pattern};

/// A data connection driven byte by byte.
struct RawConnection {
    stream: TcpStream,
}

impl RawConnection {
    async fn open(world: &World) -> RawConnection {
        let mut stream = TcpStream::connect((world.peer().host(), world.peer().port())).await.unwrap();
        let identity = {
            let state = world.quorum.state.lock();
            v1::Identity {
                cluster_uuid: state.cluster.0.to_vec().into(),
                history: state.history.0,
                node_id: 0,
                protocol_version: PROTOCOL_VERSION,
                build: "raw".into(),
                ancestors: Vec::new(),
            }
        };
        let hello = v1::DataHello { identity: Some(identity) }.encode_to_vec();
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&(hello.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&hello);
        stream.write_all(&bytes).await.unwrap();
        let mut fixed = [0u8; 8];
        stream.read_exact(&mut fixed).await.unwrap();
        let mut welcome = vec![0; u32::from_le_bytes(fixed[4..].try_into().unwrap()) as usize];
        stream.read_exact(&mut welcome).await.unwrap();
        let welcome = v1::DataWelcome::decode(&welcome[..]).unwrap();
        assert_eq!(welcome.error, None);
        RawConnection { stream }
    }

    async fn announce(&mut self, access: &WriteAccess) {
        let request = Request {
            kind: Kind::Write,
            items: 1,
            record_bytes: RECORD_BYTES,
            remaining_ms: 60_000,
            id: 1,
            payload_bytes: access.length,
        };
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        wire::put_write(&mut bytes, access);
        self.stream.write_all(&bytes).await.unwrap();
    }

    async fn answer(&mut self) -> Result<tidepool_transport::WriteReply, tidepool_transport::WriteError> {
        let mut fixed = [0u8; wire::HEADER_BYTES];
        self.stream.read_exact(&mut fixed).await.unwrap();
        let answer = Answer::decode(&fixed).unwrap();
        let mut body = vec![0; answer.body_bytes];
        self.stream.read_exact(&mut body).await.unwrap();
        wire::get_write_statuses(&body, 1).unwrap().pop().unwrap()
    }
}

async fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !wanted() {
        assert!(Instant::now() < give_up, "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Fails when a fence is acknowledged without aborting: the late half then lands in the next object (tried by letting
/// `OpenWrite::enter` ignore the fence).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_sender_neither_delays_nor_outlives_its_fence() {
    let world = World::start(1).await;
    let place = world.place(500_000);
    let bytes = place.stored(&pattern(500_000, 1));
    let (half, rest) = bytes.split_at(250_000);
    let mut sender = RawConnection::open(&world).await;
    sender.announce(&place.write_access(bytes.len() as u64)).await;
    sender.stream.write_all(half).await.unwrap();
    until("the write to open", || world.metric("tidepool_datanode_open_writes", "") == 1.0).await;

    let replica = place.capability.replica.0;
    world.quorum.state.lock().fences.push(replica);
    world.quorum.until("the acknowledgement", |s| s.acknowledged.contains(&replica).then_some(())).await;

    // Acknowledged: the master gives the extent to the next object, which is stored while the old sender still has half to go.
    let next = place.with(|c| (c.object.0, c.replica.0) = (c.object.0 + 1600, c.replica.0 + 1600));
    let payload = pattern(500_000, 2);
    world.put(&next, &payload).await.unwrap();
    sender.stream.write_all(rest).await.unwrap();
    let refused = sender.answer().await.unwrap_err();
    assert_eq!(refused.error.code(), ErrorCode::GrantLost, "{refused}");
    assert_eq!(refused.aborted, Some(place.proof(Verb::Aborted)));
    assert!(world.get(&next, 500_000).await.unwrap() == payload, "a fenced sender wrote into the next object");
}

/// A sender that dies half-way: its write is over without anybody's doing, and its grant with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_sender_ends_its_write() {
    let world = World::start(1).await;
    let place = world.place(500_000);
    let bytes = place.stored(&pattern(500_000, 1));
    let mut sender = RawConnection::open(&world).await;
    sender.announce(&place.write_access(bytes.len() as u64)).await;
    sender.stream.write_all(&bytes[..250_000]).await.unwrap();
    until("the write to open", || world.metric("tidepool_datanode_open_writes", "") == 1.0).await;
    drop(sender);
    until("the write to close", || world.metric("tidepool_datanode_open_writes", "") == 0.0).await;
    let again = world.put(&place, &pattern(500_000, 1)).await.unwrap_err();
    assert_eq!(again.aborted, Some(place.proof(Verb::Aborted)), "{again}");
}

/// I3: a new history closes the data connections of the old one, whatever they were doing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_history_closes_data_connections() {
    let world = World::start(1).await;
    let place = world.place(500_000);
    let bytes = place.stored(&pattern(500_000, 1));
    let mut sender = RawConnection::open(&world).await;
    sender.announce(&place.write_access(bytes.len() as u64)).await;
    sender.stream.write_all(&bytes[..250_000]).await.unwrap();
    until("the write to open", || world.metric("tidepool_datanode_open_writes", "") == 1.0).await;
    world.quorum.forget_everything();
    let mut byte = [0u8; 1];
    let closed =
        tokio::time::timeout(Duration::from_secs(20), sender.stream.read(&mut byte)).await.expect("closed in time");
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    world.serving().await;
}
