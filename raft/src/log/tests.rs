//! Tests of the log store: openraft's own suite, crashes and damage on the simulated disk, the same on RocksDB.

#[cfg(feature = "rocksdb")]
mod rocks;
mod simulated;
mod suite;
mod threaded;

use std::io;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use openraft::RaftLogReader;
use openraft::async_runtime::AsyncRuntime;
use openraft::storage::{IOFlushed, RaftLogStorage};
use openraft::type_config::TypeConfigExt;
use parking_lot::Mutex;
use prometheus::Registry;

use super::*;
use crate::host::Host;
use crate::types::{Entry, EntryPayload, LogId, Payload, SimConfig, Vote, log_id, term_of};

type Sim = SimConfig<()>;

/// The failures a store reported.
type Failures = Arc<Mutex<Vec<LogFailure>>>;

fn entry(term: u64, index: u64) -> Entry {
    sized_entry(term, index, 40)
}

/// An entry whose payload tells term and index, so that a resurrected one shows.
fn sized_entry(term: u64, index: u64, bytes: usize) -> Entry {
    let mut payload = format!("{term}.{index}.").into_bytes();
    payload.resize(bytes.max(payload.len()), b'x');
    Entry { log_id: log_id(term, index), payload: EntryPayload::Normal(Payload(Bytes::from(payload))) }
}

fn options(flushing: Flushing, cache_bytes: usize) -> (LogOptions, Failures) {
    let failures = Failures::default();
    let fatal = {
        let failures = failures.clone();
        Box::new(move |failure| failures.lock().push(failure))
    };
    (LogOptions { flushing, cache_bytes, admits: Box::new(|_| Ok(())), fatal }, failures)
}

/// A store of the simulation over `disk`; call inside its runtime.
fn open_sim(disk: &SimulatedDisk) -> Result<(LogStore<Sim>, OpenReport), OpenLogError> {
    let (options, _) = options(Flushing::Task, 1 << 20);
    LogStore::open(Arc::new(disk.clone()), Path::new("simulated"), options, &Registry::new())
}

fn simulate<T: Send + 'static>(test: impl Future<Output = T> + Send) -> T {
    openraft_rt_sim::SimRuntime::with_seed(7).block_on(test)
}

/// Hands entries over; the receiver resolves when they are acknowledged.
async fn submit<C: Host>(
    store: &mut LogStore<C>,
    entries: Vec<Entry>,
) -> io::Result<openraft::alias::OneshotReceiverOf<C, io::Result<()>>> {
    let (sender, receiver) = C::oneshot();
    store.append(entries, IOFlushed::signal(sender)).await?;
    Ok(receiver)
}

/// Appends and waits for the acknowledgement.
async fn append<C: Host>(store: &mut LogStore<C>, entries: Vec<Entry>) -> io::Result<()> {
    submit(store, entries).await?.await.map_err(|_| io::Error::other("no answer"))?
}

/// Term and index of every entry in the log.
async fn log_of<C: Host>(store: &mut LogStore<C>) -> Vec<(u64, u64)> {
    let entries = store.try_get_log_entries(..).await.expect("readable");
    entries.iter().map(|entry| (term_of(&entry.log_id), entry.log_id.index)).collect()
}

/// One sample of a metric without labels: counters and gauges their value, histograms their count.
fn metric(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).expect("registered");
    let metric = &family.get_metric()[0];
    metric.get_gauge().get_value() + metric.get_counter().get_value() + metric.get_histogram().get_sample_count() as f64
}

/// Fails (an overflow) when the batch that is being written is counted off by the failure and again when it ends.
#[test]
fn what_is_being_written_when_the_log_fails_is_counted_off_once() {
    let mut state = state::State::<Sim>::new(&OpenReport::default(), 1 << 20);
    state.append(vec![entry(1, 0), entry(1, 1)], state::Done::Nobody).expect("the first entries");
    let batch = state.take_batch();
    state.append(vec![entry(1, 2)], state::Done::Nobody).expect("it follows");
    let failure = LogFailure { operation: "sync", cause: "no disk".into() };
    assert_eq!(state.fail(failure).len(), 1, "what is queued is answered");
    assert_eq!(state.queued_bytes(), batch.bytes);
    state.flushed(batch.bytes, 2);
    assert_eq!(state.queued_bytes(), 0);
}

/// Tried with the marker added to every batch: fails.
#[test]
fn the_committed_marker_never_comes_before_what_it_covers() {
    let mut state = state::State::<Sim>::new(&OpenReport::default(), 1 << 20);
    let last = state::BATCH_CALLS_MAX as u64;
    for index in 0..=last {
        state.append(vec![entry(1, index)], state::Done::Nobody).expect("it follows");
    }
    state.save_committed(log_id(1, last));
    let marked = |batch: &state::Batch<Sim>| matches!(batch.steps.last(), Some(state::Step::Committed(_)));
    let (first, second) = (state.take_batch(), state.take_batch());
    assert!(!marked(&first), "the entry that it names is not among these");
    assert!(marked(&second) && second.steps.len() == 2);
    assert!(!state.only_marker_waits(), "once");
}
