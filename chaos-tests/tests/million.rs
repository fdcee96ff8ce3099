//! What a directory of a million objects costs who serves and who returns. Figures, not verdicts: run it alone, on a quiet machine.

mod rig;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rig::saved::{lose_masters, read, saved_pool, start_restoring};
use rig::{Pool, WITHIN, connect, goes_on, http_get, keys, load, not_one_failed, pool, wait_for};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::bench::pressure::percentile_99;
use tidepool_chaos_tests::clock::{monotonic_ns, ns_to_ms};
use tidepool_chaos_tests::record::{Call, CallRecord};
use tidepool_client::{PutItem, PutOptions};
use tidepool_proto::object::extent_bytes;
use tokio::task::JoinSet;

/// Objects, unless `TIDEPOOL_FIGURE_OBJECTS` says how many.
const OBJECTS: usize = 1_000_000;
const VALUE_BYTES: usize = 8;
const BATCH: usize = 1_000;
/// Of writers that are to hold the apply loop for short times, often.
const SMALL_BATCH: usize = 64;
const WRITERS: usize = 4;
/// Calls a second of the load.
const RATE_PER_S: f64 = 500.0;
/// How long puts are timed, without snapshots and with them.
const TIMED: Duration = Duration::from_secs(20);
const ROUNDS: usize = 3;
/// Between two snapshots, where there are pauses: much shorter than any that is set by default.
const PAUSE: Duration = Duration::from_secs(5);

fn objects() -> usize {
    std::env::var("TIDEPOOL_FIGURE_OBJECTS").ok().and_then(|text| text.parse().ok()).unwrap_or(OBJECTS)
}

/// Puts `count` tiny objects by several writers at once.
async fn fill(pool: &Pool, prefix: &str, count: usize) {
    fill_by(pool, prefix, count, BATCH).await;
}

async fn fill_by(pool: &Pool, prefix: &str, count: usize, batch: usize) {
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let client = pool.client.clone();
        let mine = keys(&format!("{prefix}/{writer}"), count / WRITERS);
        writers.spawn(async move {
            for batch in mine.chunks(batch) {
                let items = batch.iter().map(|key| PutItem::new(key.clone(), vec![7; VALUE_BYTES])).collect();
                let options = PutOptions { deadline: Some(WITHIN), ..PutOptions::default() };
                client.put_many(items, options).await.into_iter().for_each(|put| assert!(put.is_ok(), "{put:?}"));
            }
        });
    }
    writers.join_all().await;
}

/// Milliseconds from when a put was to be sent until it was acknowledged, of those that were to be sent in this time.
fn put_millis(logs: &[Vec<CallRecord>], (from, to): (u64, u64)) -> Vec<f64> {
    let puts = logs.iter().flatten().filter(|call| call.call == Call::Put && (from..to).contains(&call.intended_ns));
    puts.map(|call| ns_to_ms(call.done_ns - call.intended_ns)).collect()
}

/// The masters write one snapshot after the other, with pauses; answers when that was, and how many were written.
async fn snapshots(pool: &Pool, pause: Duration) -> ((u64, u64), usize) {
    let (start, until, mut taken) = (monotonic_ns(), Instant::now() + TIMED, 0);
    for master in pool.cluster.masters.iter().cycle() {
        if Instant::now() >= until {
            break;
        }
        admin::compact(master.rpc).await.unwrap();
        taken += 1;
        tokio::time::sleep(pause).await;
    }
    ((start, monotonic_ns()), taken)
}

/// Seconds until a master says that it is ready.
async fn ready(pool: &Pool, at: usize) -> f64 {
    let began = Instant::now();
    let http = pool.cluster.masters[at].http;
    wait_for("the master to be ready", async || (http_get(http, "/readyz").await?.0 == 200).then_some(())).await;
    began.elapsed().as_secs_f64()
}

/// Prints: p99 of puts without and with snapshots, one after the other on every master, with pauses and without; how long a standby takes that comes back by a
/// snapshot under load; how long a quorum takes that starts from cold, to ready and to the first get.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; run alone"]
async fn measure_what_a_million_objects_cost() {
    let count = objects();
    let mut pool = pool(|options| {
        options.datanodes = 1;
        // So that who was away comes back by a snapshot, not by the log.
        options.master_arguments = vec!["--keep-log-entries".into(), "0".into()];
        options.segment_bytes =
            (count as u64 * 2).next_multiple_of(1 << 16) * extent_bytes(VALUE_BYTES as u64) + (4 << 30);
    })
    .await;
    let began = Instant::now();
    fill(&pool, "old", count).await;
    println!("{count} objects in {:.1} s", began.elapsed().as_secs_f64());

    for round in 1..=ROUNDS {
        let fleet = load(&pool, RATE_PER_S);
        goes_on(&fleet).await;
        let start = monotonic_ns();
        tokio::time::sleep(TIMED).await;
        let without = (start, monotonic_ns());
        let (at_times, few) = snapshots(&pool, PAUSE).await;
        let (always, many) = snapshots(&pool, Duration::ZERO).await;
        let logs = not_one_failed(fleet, 1_000).await;
        let p99 = |span| percentile_99(&mut put_millis(&logs, span));
        let (without, at_times, always) = (p99(without), p99(at_times), p99(always));
        println!(
            "round {round}: put p99 {without:.2} ms without snapshots; {at_times:.2} ms, {:.2} times, while {few} were written with {PAUSE:?} \
             between them; {always:.2} ms, {:.2} times, while {many} were written without a pause",
            at_times / without,
            always / without
        );
    }

    for round in 1..=ROUNDS {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let (behind, other) = ((leader + 1) % 3, (leader + 2) % 3);
        pool.cluster.masters[behind].kill().unwrap();
        for step in 0..3 {
            fill(&pool, &format!("meanwhile-{round}-{step}"), 20_000).await;
            for at in [leader, other] {
                admin::compact(pool.cluster.masters[at].rpc).await.unwrap();
            }
        }
        let fleet = load(&pool, RATE_PER_S);
        goes_on(&fleet).await;
        pool.cluster.masters[behind].start().unwrap();
        let seconds = ready(&pool, behind).await;
        let status = admin::status(pool.cluster.masters[behind].rpc).await.unwrap();
        not_one_failed(fleet, 100).await;
        println!("round {round}: a standby is back after {seconds:.2} s with {} objects", status.objects);
    }

    for round in 1..=ROUNDS {
        for master in &mut pool.cluster.masters {
            master.kill().unwrap();
        }
        let began = Instant::now();
        for master in &mut pool.cluster.masters {
            master.start().unwrap();
        }
        let got = pool.client.get("old/0/0", Some(WITHIN)).await;
        let first_get = began.elapsed().as_secs_f64();
        assert_eq!(got.unwrap(), vec![7; VALUE_BYTES]);
        for at in 0..3 {
            ready(&pool, at).await;
        }
        let all_ready = began.elapsed().as_secs_f64();
        println!(
            "round {round}: from the start of all masters {first_get:.2} s to the first get, {all_ready:.2} s to all ready"
        );
    }
}

/// Seconds up to which an entry held a master's apply loop, and how many did since it started. Cumulative, as a scrape says it.
async fn apply_held(pool: &Pool, at: usize) -> BTreeMap<String, u64> {
    let (_, text) = http_get(pool.cluster.masters[at].http, "/metrics").await.expect("a scrape");
    let of_entries =
        |line: &&str| line.starts_with("tidepool_raft_apply_held_seconds_bucket") && line.contains("entry");
    let bucket = |line: &str| {
        let upto = line.split("le=\"").nth(1)?.split('"').next()?;
        Some((upto.to_owned(), line.rsplit(' ').next()?.trim().parse::<f64>().ok()? as u64))
    };
    text.lines().filter(of_entries).filter_map(bucket).collect()
}

/// Entries between two scrapes: how many, how many longer than 2.56 ms, and a time that the longest did not take.
fn held_between(before: &BTreeMap<String, u64>, after: &BTreeMap<String, u64>) -> (u64, u64, f64) {
    let seconds = |upto: &str| upto.parse().unwrap_or(f64::INFINITY);
    let mut grown: Vec<(f64, u64)> =
        after.iter().map(|(upto, count)| (seconds(upto), count - before.get(upto).unwrap_or(&0))).collect();
    grown.sort_by(|a, b| a.0.total_cmp(&b.0));
    let all = grown.last().map_or(0, |(_, count)| *count);
    let short = grown.iter().rev().find(|(upto, _)| *upto < 0.002_6).map_or(0, |(_, count)| *count);
    let longest = grown.iter().find(|(_, count)| *count == all).map_or(0.0, |(upto, _)| *upto);
    (all, all - short, longest * 1e3)
}

/// Peak of the resident memory of a master, in megabytes.
fn peak_mb(pool: &Pool, at: usize) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pool.cluster.masters[at].id().unwrap())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// What masters write in the background, one step of it.
#[derive(Clone, Copy, Debug)]
enum Written {
    Nothing,
    /// A standby's image, as its log's growth asks for.
    OneImage,
    /// The same, made and published, as the interval asks for.
    Publication,
    /// All masters' at once: their logs grow alike.
    AllImages,
}

/// Has it written once under the load; answers when that was, and when the time it is measured in was.
async fn write_once(pool: &mut Pool, what: Written) -> ((u64, u64), (u64, u64)) {
    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    let addresses: Vec<_> = pool.cluster.masters.iter().map(|master| master.rpc).collect();
    let standby = addresses[(leader + 1) % addresses.len()];
    let (start, until) = (monotonic_ns(), Instant::now() + TIMED);
    match what {
        Written::Nothing => {}
        Written::OneImage => _ = admin::compact(standby).await.unwrap(),
        Written::Publication => _ = admin::take_snapshot(standby).await.unwrap(),
        Written::AllImages => {
            let images: JoinSet<_> = addresses.into_iter().map(admin::compact).collect();
            images.join_all().await.into_iter().for_each(|image| _ = image.unwrap());
        }
    }
    let written = monotonic_ns();
    tokio::time::sleep(until.saturating_duration_since(Instant::now())).await;
    ((start, written), (start, monotonic_ns()))
}

/// Prints what snapshots cost as the default settings take them: now and then, one at a time; how long entries hold the apply loops of
/// masters that write an image while every shard changes; and how long a restore takes from the start of the process to the first
/// bytes, and what memory.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "measures; run alone"]
async fn measure_snapshots_as_they_are_by_default() {
    let count = objects();
    let mut pool = saved_pool(|options| {
        options.datanodes = 1;
        options.segment_bytes =
            (count as u64 * 2).next_multiple_of(1 << 16) * extent_bytes(VALUE_BYTES as u64) + (4 << 30);
    })
    .await;
    fill(&pool, "old", count).await;
    for at in 0..3 {
        println!("master {}: peak {} MB after {count} objects", at + 1, peak_mb(&pool, at));
    }

    let fleet = load(&pool, RATE_PER_S);
    goes_on(&fleet).await;
    let mut spans = Vec::new();
    for what in [Written::Nothing, Written::OneImage, Written::Publication, Written::AllImages, Written::Nothing] {
        spans.push((what, write_once(&mut pool, what).await));
    }
    let logs = not_one_failed(fleet, 1_000).await;
    for (what, (writing, measured)) in spans {
        let p99 = |span| percentile_99(&mut put_millis(&logs, span));
        let seconds = ns_to_ms(measured.1 - measured.0) / 1e3;
        print!("{what:?}: put p99 {:.2} ms over {seconds:.0} s", p99(measured));
        match what {
            Written::Nothing => println!(),
            _ => println!("; {:.2} ms in its {:.2} s", p99(writing), ns_to_ms(writing.1 - writing.0) / 1e3),
        }
    }

    for images in [false, true] {
        let (mut held, began) = (Vec::new(), Instant::now());
        for at in 0..3 {
            held.push(apply_held(&pool, at).await);
        }
        let prefix = format!("more-{images}");
        let writing = fill_by(&pool, &prefix, count / 10, SMALL_BATCH);
        let addresses: Vec<_> = pool.cluster.masters.iter().map(|master| master.rpc).collect();
        let imaging = async {
            let images: JoinSet<_> = addresses.into_iter().filter(|_| images).map(admin::compact).collect();
            images.join_all().await.into_iter().for_each(|image| _ = image.unwrap());
            began.elapsed().as_secs_f64()
        };
        let ((), imaged) = tokio::join!(writing, imaging);
        let wrote = began.elapsed().as_secs_f64();
        for (at, before) in held.iter().enumerate() {
            let (entries, long, longest_ms) = held_between(before, &apply_held(&pool, at).await);
            println!(
                "master {}, images: {images} ({imaged:.2} of {wrote:.2} s): {entries} entries, {long} longer than 2.56 ms, all within {longest_ms:.2} ms",
                at + 1
            );
        }
    }

    let leader = pool.cluster.leader(WITHIN).await.unwrap();
    admin::take_snapshot(pool.cluster.masters[leader].rpc).await.unwrap();
    for round in 1..=ROUNDS {
        lose_masters(&mut pool.cluster);
        let began = Instant::now();
        start_restoring(&mut pool.cluster, "");
        pool.cluster.leader(WITHIN).await.unwrap();
        let leads = began.elapsed().as_secs_f64();
        let client = connect(&pool.cluster).await;
        let got = read(&client, "old/0/0").await;
        let first_get = began.elapsed().as_secs_f64();
        assert_eq!(got.unwrap(), vec![7; VALUE_BYTES]);
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        println!(
            "round {round}: from the start with --restore-from {leads:.2} s to a leader, {first_get:.2} s to the first get, peak {} MB",
            peak_mb(&pool, 0)
        );
    }
}
