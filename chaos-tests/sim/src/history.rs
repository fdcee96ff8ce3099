//! What clients did and saw: each call with when it began and ended, on which key, and how it ended.

use std::sync::Arc;

use parking_lot::Mutex;
use tidepool_raft::sim::surroundings;

use crate::trace::Trace;
pub use tidepool_checker::{Call, Event, LOG, Value, object_of};

/// What is wrong whatever the order of calls was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wrong {
    /// When it was seen.
    pub at: u64,
    /// What.
    pub what: String,
}

/// Everything that clients log. Cheap to clone.
#[derive(Clone)]
pub struct History {
    inner: Arc<Mutex<Inner>>,
    trace: Trace,
}

#[derive(Default)]
struct Inner {
    calls: Vec<Call>,
    wrong: Vec<Wrong>,
    definite: u64,
    outlived: u64,
    broken: u64,
    /// When the newest term of masters was first seen.
    term_began: u64,
    /// Histories of the cluster, oldest first.
    histories: Vec<u64>,
}

/// True time in nanoseconds.
pub fn now() -> u64 {
    surroundings::elapsed().as_nanos() as u64
}

impl History {
    /// Nothing happened yet.
    pub fn new(trace: Trace) -> History {
        History { inner: Arc::default(), trace }
    }

    /// A cluster begins, or goes on in another history, whose number must be a new one (I1).
    pub fn begins(&self, history: u64) {
        let is_new = {
            let mut inner = self.inner.lock();
            let is_new = !inner.histories.contains(&history);
            inner.histories.push(history);
            is_new
        };
        if !is_new {
            self.wrong(format!("a restore begins history {history:x}, in which the cluster was before (I1)"));
        }
    }

    /// The value that a put of an object in a history made.
    pub fn value(&self, history: u64, object: u64) -> Value {
        let place = self.inner.lock().histories.iter().position(|known| *known == history).unwrap_or(0);
        tidepool_checker::value(place, object)
    }

    /// A call, ended now or of unknown end.
    pub fn log(&self, client: u64, key: u64, invoked: u64, is_known: bool, event: Event) {
        if !is_known && event.only_looks() {
            return;
        }
        let returned = is_known.then(now);
        self.trace.say(&format!("call {client} key {key} {event:?}{}", if is_known { "" } else { " ?" }));
        let mut inner = self.inner.lock();
        inner.definite += u64::from(is_known);
        inner.calls.push(Call { client, key, invoked, returned, event });
    }

    /// What a call saw of a key beside others: counted once, by whoever asked.
    pub fn log_beside(&self, client: u64, key: u64, invoked: u64, event: Event) {
        self.trace.say(&format!("call {client} key {key} listed {event:?}"));
        self.inner.lock().calls.push(Call { client, key, invoked, returned: Some(now()), event });
    }

    /// What the log did, between two instants.
    pub fn log_event(&self, key: u64, between: (u64, u64), event: Event) {
        self.trace.say(&format!("log key {key} {event:?}"));
        let call = Call { client: LOG, key, invoked: between.0, returned: Some(between.1), event };
        self.inner.lock().calls.push(call);
    }

    /// Something that must not be.
    pub fn wrong(&self, what: String) {
        self.trace.say(&format!("WRONG {what}"));
        self.inner.lock().wrong.push(Wrong { at: now(), what });
    }

    /// A reader believed in its lease, and was refused or found other bytes: a miss. Wrong if all clocks go alike.
    pub fn outlived(&self) {
        self.inner.lock().outlived += 1;
    }

    /// Masters work in a new term from now on.
    pub fn term_begins(&self) {
        self.inner.lock().term_began = now();
    }

    /// A lease was asked for at `invoked` and did not hold. Answers whether a leader of a later term may have broken it (L4), and counts
    /// it then: a miss.
    pub fn may_be_broken(&self, invoked: u64) -> bool {
        let mut inner = self.inner.lock();
        let may_be = inner.term_began >= invoked;
        inner.broken += u64::from(may_be);
        may_be
    }

    /// How often that was so.
    pub fn all_broken(&self) -> u64 {
        self.inner.lock().broken
    }

    /// How often a reader believed in vain.
    pub fn all_outlived(&self) -> u64 {
        self.inner.lock().outlived
    }

    /// Calls that ended.
    pub fn definite(&self) -> u64 {
        self.inner.lock().definite
    }

    /// All calls.
    pub fn calls(&self) -> Vec<Call> {
        self.inner.lock().calls.clone()
    }

    /// All that must not be.
    pub fn all_wrong(&self) -> Vec<Wrong> {
        self.inner.lock().wrong.clone()
    }
}
