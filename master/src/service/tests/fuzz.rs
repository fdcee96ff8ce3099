//! Random orders of every RPC of clients, datanodes and operators, by right and wrong callers, with stale ids, lost grants
//! and duplicates. Nothing panics, every refusal is specific, every invariant holds after each sequence, and each op that
//! reached the log had the outcome that the naive model predicts.
//!
//! A run is a fresh master and some sequences; its seed decides all requests. What decides beside it is the timing of the
//! master's own loops, so a seed that failed may have to be tried more than once.

use std::collections::BTreeMap;
use std::time::Duration;

use tidepool_proto::{ErrorCode, OpId};

use super::Rig;
use super::fuzzer::{Fuzzer, GROUPS, KEYS};
use crate::directory::tests::model::Model;
use crate::directory::{Entry, Outcome};

const STEPS: usize = 10;
/// Sequences of a run, and of one of the long runs.
const SEQUENCES: u64 = 250;
const LONG_SEQUENCES: u64 = 2_500;
/// Runs, and at most so many until all kinds of answers were seen.
const RUNS: usize = 4;
const MOST_RUNS: u64 = 16;

/// The naive model, fed with what was applied.
struct Watcher {
    model: Model,
    /// Of the last entry fed.
    index: Option<u64>,
}

impl Watcher {
    /// Takes in what was applied and compares all reads, while nothing more is applied.
    fn check(&mut self, rig: &Rig) {
        let mut history = rig.service.machine().history();
        for (index, payload, outcomes) in history.drain(..) {
            assert!(self.index.is_none_or(|last| index > last), "entry {index} after {:?}", self.index);
            self.index = Some(index);
            let Ok(entry) = Entry::decode(&payload) else { continue };
            self.model.advance(entry.log_time.0);
            for (ordinal, (op, outcome)) in entry.ops.iter().zip(&outcomes).enumerate() {
                // What is malformed is refused before anything is looked at: nothing that the model knows of.
                let malformed = [ErrorCode::InvalidParams, ErrorCode::InvalidKey];
                if matches!(outcome, Outcome::Refused(error) if malformed.contains(&error.code())) {
                    continue;
                }
                self.model.apply(OpId::new(index, ordinal, 0), op, outcome);
            }
        }
        let directory = rig.service.directory();
        directory.check_invariants().unwrap_or_else(|broken| panic!("{broken}"));
        self.model.check_reads(directory, &KEYS, &GROUPS);
    }
}

/// Says how to try a failed run again.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let seed = self.0;
            eprintln!(
                "try again: TIDEPOOL_FUZZ_SEED={seed} cargo nextest run --release -p tidepool-master --lib --profile full -E 'test(every_rpc_in_any_order)'"
            );
        }
    }
}

/// One run; answers what was seen how often.
async fn run(seed: u64, sequences: u64) -> BTreeMap<String, u64> {
    let _replay = Replay(seed);
    let rig = Rig::start(|options| {
        options.lease_ttl_max = Duration::from_millis(40);
        options.lease_ttl_default = Duration::from_millis(10);
        options.node_suspect_timeout = Duration::from_millis(150);
        options.node_forget_timeout = Duration::from_millis(900);
        options.audit_interval = Duration::from_millis(2);
        options.snapshot_log_bytes = 256 << 10;
        options.keep_log_entries = 100;
        options.objects_max = 12;
        options.slow_call = Duration::from_secs(60);
    })
    .await;
    let mut watcher = Watcher { model: Model::new(), index: None };
    let mut fuzzer = Fuzzer::start(&rig, seed).await;
    for _ in 0..sequences {
        for _ in 0..STEPS {
            fuzzer.step().await;
        }
        watcher.check(&rig);
        assert_eq!(rig.master.readiness().audit_violations, 0);
    }
    assert!(rig.master.readiness().audit_passes > 0);
    let seen = std::mem::take(&mut fuzzer.seen);
    rig.master.shutdown().await;
    seen
}

/// Seeds of the environment, or those of the test.
fn seeds(otherwise: std::ops::Range<u64>) -> Vec<u64> {
    match std::env::var("TIDEPOOL_FUZZ_SEED") {
        Ok(seed) => vec![seed.parse().expect("TIDEPOOL_FUZZ_SEED is a number")],
        Err(_) => otherwise.collect(),
    }
}

/// What the runs must have reached, or they test little.
const EXPECTED: &[&str] = &[
    "cancel_task OK",
    "create_task OK",
    "create_task SEGMENT_NOT_FOUND",
    "drop_tenant TENANT_NOT_EMPTY",
    "exist OK",
    "heartbeat FENCED",
    "heartbeat OK",
    "list INVALID_PARAMS",
    "list OK",
    "mount FENCED",
    "mount OK",
    "mount SEGMENT_ALREADY_EXISTS",
    "pin OBJECT_NOT_FOUND",
    "put_end ALREADY_ENDED",
    "put_end CAPABILITY_REFUSED",
    "put_end GRANT_LOST",
    "put_end ILLEGAL_CLIENT",
    "put_end OK",
    "put_revoke GRANT_LOST",
    "put_revoke OK",
    "put_start INVALID_PARAMS",
    "put_start NOT_ENOUGH_REPLICAS",
    "put_start NO_SPACE",
    "put_start OBJECT_ALREADY_EXISTS",
    "put_start OK",
    "put_start PUT_IN_PROGRESS",
    "put_start SESSION_UNKNOWN",
    "put_start TENANT_NOT_REGISTERED",
    "put_start TENANT_QUOTA_EXCEEDED",
    "register OK",
    "register WRONG_CLUSTER",
    "remove OBJECT_NOT_FOUND",
    "remove OK",
    "remove REPLICA_IS_NOT_READY",
    "remove STALE_REQUEST",
    "remove_matching OK",
    "replica_clear OK",
    "set_tenant INVALID_PARAMS",
    "set_tenant OK",
    "state_digest OK",
    "unmount OK",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rpc_in_any_order() {
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    let all = seeds(0..MOST_RUNS);
    for (runs, &seed) in all.iter().enumerate() {
        // What is rare on a busy machine takes a few more.
        if runs >= RUNS && EXPECTED.iter().all(|what| seen.contains_key(*what)) {
            break;
        }
        for (what, count) in run(seed, SEQUENCES).await {
            *seen.entry(what).or_default() += count;
        }
    }
    let missing: Vec<&&str> = EXPECTED.iter().filter(|what| !seen.contains_key(**what)).collect();
    assert!(missing.is_empty() || all.len() == 1, "never seen: {missing:?}; seen: {seen:#?}");
}

/// 100 000 sequences.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_every_rpc_in_any_order() {
    for seed in seeds(1_000..1_000 + 100_000 / LONG_SEQUENCES) {
        run(seed, LONG_SEQUENCES).await;
    }
}
