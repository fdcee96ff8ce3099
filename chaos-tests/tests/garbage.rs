//! Noise on every port of every role.

mod rig;

use std::net::SocketAddr;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use rig::{WITHIN, expect_all, keys, pool, put_all};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Frames on each port; `TIDEPOOL_GARBAGE_FRAMES` sets another number (the long form of the test: 1000000).
const FRAMES: usize = 20_000;
/// Frames one connection carries, if it is let.
const FRAMES_A_CONNECTION: usize = 200;
/// What noise may make a process grow by: buffers of one read each, not what the noise claims to be long.
const GROWTH_BYTES_MAX: u64 = 96 << 20;

/// What a frame begins with.
fn openings() -> Vec<Vec<u8>> {
    let http2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let mut http2_bomb = http2.clone();
    http2_bomb.extend([0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01]); // DATA frame of 16 MiB
    let mut grpc_bomb = http2.clone();
    grpc_bomb.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]); // SETTINGS, then a message of 4 GiB
    grpc_bomb.extend([0, 0, 5, 0, 1, 0, 0, 0, 1, 0, 0xff, 0xff, 0xff, 0xff]);
    let mut plane_bomb = b"TPDP".to_vec();
    plane_bomb.extend([0xff; 60]);
    let mut plane_zero = b"TPDP".to_vec();
    plane_zero.extend([0; 60]);
    vec![
        Vec::new(),
        http2,
        http2_bomb,
        grpc_bomb,
        plane_bomb,
        plane_zero,
        b"GET / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n".to_vec(),
        b"POST /api/v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n".to_vec(),
        b"\x16\x03\x01\xff\xff\x01\x00\xff\xfc\x03\x03".to_vec(), // TLS
        b"cos\nsystem\n(S'true'\ntR.".to_vec(),                   // a pickle
    ]
}

/// Sends `frames` of noise over as many connections as it takes.
async fn babble(address: SocketAddr, frames: usize, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let openings = openings();
    let mut sent = 0;
    while sent < frames {
        let mut stream = TcpStream::connect(address).await.unwrap_or_else(|error| panic!("{address} is gone: {error}"));
        let opening = &openings[random.random_range(0..openings.len())];
        // The other side may close at any byte: that is a right answer.
        if stream.write_all(opening).await.is_err() {
            sent += 1;
            continue;
        }
        for _ in 0..FRAMES_A_CONNECTION.min(frames - sent) {
            let mut frame = vec![0; random.random_range(1..256)];
            random.fill_bytes(&mut frame);
            if random.random_ratio(1, 4) {
                frame.splice(0..0, u32::MAX.to_le_bytes());
            }
            sent += 1;
            if stream.write_all(&frame).await.is_err() {
                break;
            }
        }
        stream.shutdown().await.ok();
        // Until the other side closes, or for as long as it may take to think about it.
        let mut answer = [0; 4096];
        while let Ok(Ok(1..)) = tokio::time::timeout(Duration::from_millis(20), stream.read(&mut answer)).await {}
    }
}

/// User report 109: unauthenticated frames became remote code execution. Random frames and length bombs on every port of
/// every role: all processes live, none grows by what the frames claim to be long, nothing in the directory changes, and
/// the pool serves. Fails when a length is believed before it is checked.
#[tokio::test(flavor = "multi_thread")]
async fn case_109_garbage_on_every_port() {
    let frames = std::env::var("TIDEPOOL_GARBAGE_FRAMES").ok().and_then(|n| n.parse().ok()).unwrap_or(FRAMES);
    let mut pool = pool(|options| {
        options.segment_bytes = 32 << 20;
        // A leader that pauses for noise must not count as one that died.
        options.election = "default".into();
    })
    .await;
    let keys = keys("case-109", 50);
    put_all(&pool.client, &keys, 10_000, 1).await;
    expect_all(&pool.client, &keys, 10_000).await;
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();

    let mut grown = Vec::new();
    for role in pool.cluster.masters.iter_mut().chain(&mut pool.cluster.datanodes) {
        let at_rest = role.usage().unwrap().resident_bytes;
        let noise =
            [role.rpc, role.http].map(|address| tokio::spawn(babble(address, frames, u64::from(address.port()))));
        for noise in noise {
            noise.await.unwrap();
        }
        role.process().unwrap().expect_running().unwrap();
        // Datanodes take their segment's pages in the background; that is not the noise.
        let allowance = if role.name().starts_with("datanode") { 32 << 20 } else { 0 };
        let growth = role.usage().unwrap().resident_bytes.saturating_sub(at_rest);
        grown.push(format!("{} {} KiB", role.name(), growth >> 10));
        assert!(growth < GROWTH_BYTES_MAX + allowance, "{} grew by {growth} bytes", role.name());
    }
    println!("{frames} frames a port; grown: {}", grown.join(", "));
    let after = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert_eq!((before.objects, before.object_bytes), (after.objects, after.object_bytes));
    expect_all(&pool.client, &keys, 10_000).await;
    put_all(&pool.client, &rig::keys("after", 10), 10_000, 1).await;
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
}
