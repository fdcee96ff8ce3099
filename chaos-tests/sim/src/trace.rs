//! What happened, in order, as one number: equal numbers mean equal runs.

use std::sync::Arc;

use parking_lot::Mutex;
use tidepool_raft::sim::surroundings;
use xxhash_rust::xxh3::Xxh3;

/// Newest lines kept for whoever looks into a failure.
const LINES_KEPT: usize = 200_000;

/// The trace of one run. Cheap to clone.
#[derive(Clone, Default)]
pub struct Trace {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    hash: Xxh3,
    events: u64,
    lines: Option<Vec<String>>,
}

impl Trace {
    /// One that keeps its lines.
    pub fn verbose() -> Trace {
        let trace = Trace::default();
        trace.inner.lock().lines = Some(Vec::new());
        trace
    }

    /// An event: what, about whom, and any number that says how.
    pub fn note(&self, what: &str, who: (u64, u64), how: u64) {
        let mut inner = self.inner.lock();
        let at = surroundings::elapsed().as_nanos() as u64;
        inner.events += 1;
        inner.hash.update(what.as_bytes());
        for number in [at, who.0, who.1, how] {
            inner.hash.update(&number.to_le_bytes());
        }
        if let Some(lines) = inner.lines.as_mut().filter(|lines| lines.len() < LINES_KEPT) {
            lines.push(format!("{:>12.6} {what} {} {} {how:x}", at as f64 / 1e9, who.0, who.1));
        }
    }

    /// An event in words.
    pub fn say(&self, words: &str) {
        let mut inner = self.inner.lock();
        let at = surroundings::elapsed().as_nanos() as u64;
        inner.events += 1;
        inner.hash.update(words.as_bytes());
        inner.hash.update(&at.to_le_bytes());
        if let Some(lines) = inner.lines.as_mut().filter(|lines| lines.len() < LINES_KEPT) {
            lines.push(format!("{:>12.6} {words}", at as f64 / 1e9));
        }
    }

    /// More about an event, for whoever reads the lines; it is no part of the hash.
    pub fn explain(&self, words: impl FnOnce() -> String) {
        if let Some(lines) = self.inner.lock().lines.as_mut().filter(|lines| lines.len() < LINES_KEPT) {
            lines.push(format!("{:>12} {}", "", words()));
        }
    }

    /// The hash of all events so far.
    pub fn hash(&self) -> u64 {
        self.inner.lock().hash.digest()
    }

    /// How many there were.
    pub fn events(&self) -> u64 {
        self.inner.lock().events
    }

    /// The lines, if they are kept.
    pub fn lines(&self) -> Vec<String> {
        self.inner.lock().lines.clone().unwrap_or_default()
    }
}
