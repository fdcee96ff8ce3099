//! The one port against whoever knocks.

use std::time::Duration;

use tidepool_datanode::{Datanode, DatanodeLimits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fake_master::Quorum;
use crate::world::{World, options, pattern};

async fn dial(world: &World) -> TcpStream {
    TcpStream::connect((world.peer().host(), world.peer().port())).await.unwrap()
}

/// User report 109: a million frames of garbage, and length bombs, on the port: no crash, and the next client is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_109_a_million_garbage_frames_change_nothing() {
    let world = World::start(1).await;
    let starts: [&[u8]; 5] = [b"", b"TPDP", b"PRI ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"TPDP\xff\xff\xff\xff"];
    let mut seed = 1u64;
    for round in 0..1000 {
        let mut stream = dial(&world).await;
        let mut bytes = starts[round % starts.len()].to_vec();
        for _ in 0..1000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.extend_from_slice(&seed.to_le_bytes());
        }
        // The datanode may close before it has read it all.
        drop(stream.write_all(&bytes).await);
        drop(stream);
    }
    let place = world.place(10_000);
    world.put(&place, &pattern(10_000, 1)).await.unwrap();
    assert!(world.get(&place, 10_000).await.unwrap() == pattern(10_000, 1));
    assert!(world.metric("tidepool_datanode_connections_refused_total", "not_our_protocol") >= 150.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_silent_are_sent_away_and_counted() {
    let quorum = Quorum::new();
    let master = quorum.start(0).await;
    let dir = tempfile::tempdir().unwrap();
    let mut options = options(dir.path(), vec![master.address.clone()]);
    options.limits =
        DatanodeLimits { greeting_timeout: Duration::from_millis(100), greeting_connections_max: 4, ..options.limits };
    let datanode = Datanode::start(options).await.unwrap();
    let at = (datanode.address().host().to_owned(), datanode.address().port());
    let mut silent = Vec::new();
    for i in 0..8 {
        let mut stream = TcpStream::connect(at.clone()).await.unwrap();
        if i % 2 == 0 {
            stream.write_all(b"TP").await.unwrap();
        }
        silent.push(stream);
    }
    for mut stream in silent {
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
        assert!(closed.is_ok() && rest.is_empty(), "a silent connection stays open");
    }
}
