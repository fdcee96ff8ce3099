//! Figures of three members on one machine and one disk. Run by hand: `cargo nextest run --release -p tidepool-raft
//! --features rocksdb,sim --run-ignored only --no-capture figures`.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;

use crate::members::Quorum;

fn quantiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |q: f64| times[((times.len() as f64 * q) as usize).min(times.len() - 1)];
    format!("p50 {:?} p99 {:?} max {:?}", at(0.5), at(0.99), at(1.0))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures, asserts nothing"]
async fn figures() {
    let quorum = Quorum::started(|_| {}).await;
    let (leader, term) = quorum.leader().await;
    for (clients, bytes) in [(1, 128), (64, 128), (512, 128), (64, 8192)] {
        let end = Instant::now() + Duration::from_secs(4);
        let payload = Bytes::from(vec![7; bytes]);
        let begun = Instant::now();
        let tasks = (0..clients).map(|_| {
            let (leader, payload) = (leader.clone(), payload.clone());
            tokio::spawn(async move {
                let mut times = Vec::new();
                while Instant::now() < end {
                    let at = Instant::now();
                    leader.propose(payload.clone(), term).await.unwrap();
                    times.push(at.elapsed());
                }
                times
            })
        });
        let times: Vec<Duration> = join_all(tasks).await.into_iter().flat_map(Result::unwrap).collect();
        let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
        println!("propose: {clients} clients, {bytes} bytes: {rate:.0} a second, {}", quantiles(times));
    }
    for clients in [1, 16, 256] {
        let end = Instant::now() + Duration::from_secs(2);
        let begun = Instant::now();
        let tasks = (0..clients).map(|_| {
            let leader = leader.clone();
            tokio::spawn(async move {
                let mut times = Vec::new();
                while Instant::now() < end {
                    let at = Instant::now();
                    leader.linearize().await.unwrap();
                    times.push(at.elapsed());
                }
                times
            })
        });
        let times: Vec<Duration> = join_all(tasks).await.into_iter().flat_map(Result::unwrap).collect();
        let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
        println!("linearize: {clients} callers: {rate:.0} a second, {}", quantiles(times));
    }
}
