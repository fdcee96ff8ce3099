//! Noise on every port of every role.

mod noise;
mod rig;

use std::time::Instant;

use noise::{DATANODE_METHODS, MASTER_METHODS, Port, babble};
use rig::{WITHIN, expect_all, keys, pool, put_all};
use tidepool_proto::v1;

/// Frames on each port; `TIDEPOOL_GARBAGE_FRAMES` sets another number (the long form of the test: 1000000).
const FRAMES: usize = 20_000;
/// What noise may make a process grow by: buffers of one read each, not what the noise claims to be long.
const GROWTH_BYTES_MAX: u64 = 96 << 20;

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

    let identity = v1::Identity { node_id: 0, ..before.identity.clone().unwrap() };
    let mut grown = Vec::new();
    for role in pool.cluster.masters.iter_mut().chain(&mut pool.cluster.datanodes) {
        let at_rest = role.usage().unwrap().resident_bytes;
        let port = match role.name().starts_with("master") {
            true => Port::Rpc(MASTER_METHODS),
            false => Port::Data(DATANODE_METHODS, identity.clone()),
        };
        let began = Instant::now();
        let seed = u64::from(role.rpc.port());
        let (rpc, http) =
            tokio::join!(babble(role.rpc, port, frames, seed), babble(role.http, Port::Http, frames, seed + 1));
        for shared in [rpc, http] {
            assert!(shared > frames / 2, "{}: only {shared} frames were answered on shared connections", role.name());
        }
        println!("{}: {frames} frames a port in {:.1} s", role.name(), began.elapsed().as_secs_f64());
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
