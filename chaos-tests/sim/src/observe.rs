//! What the masters apply, as they apply it: the state of every key after every entry, in log order. It gives the
//! judge the events that no client caused, and compares the digests of all masters entry by entry.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_master::directory::{Contact, Directory, ObjectState, Op, TenantId};

use crate::client::key_name;
use crate::history::{Event, History, now};
use crate::params::{Fault, Params};
use crate::trace::Trace;

/// A key: the object that can be read under it in principle, and whether it can now.
type State = Option<(u64, bool)>;

/// What is known of the log. Cheap to clone.
#[derive(Clone)]
pub struct Observer {
    inner: Arc<Mutex<Inner>>,
    history: History,
    trace: Trace,
    keys: u64,
    /// Whether bytes may go bad by themselves.
    bits_flip: bool,
    /// How late a message may be.
    late: Duration,
}

/// What the judge knows of datanodes by itself.
#[derive(Clone, Copy, Default, Debug)]
pub struct Known {
    /// Since when a datanode's process is dead.
    pub dead_since: Option<u64>,
}

#[derive(Default)]
struct Inner {
    datanodes: BTreeMap<String, Known>,
    /// When the first entry of the newest term was applied.
    term: (u64, u64),
    digests: BTreeMap<u64, (u128, u64)>,
    /// The last index whose state is in `states`, and when it was first applied.
    last: Option<(u64, u64)>,
    states: BTreeMap<u64, State>,
}

impl Observer {
    /// Of these keys.
    pub fn new(params: &Params, history: History, trace: Trace) -> Observer {
        Observer {
            inner: Arc::default(),
            history,
            trace,
            keys: params.keys,
            bits_flip: params.faults.contains(&Fault::FlipBit),
            late: Duration::from_millis(params.late.1 + 100),
        }
    }

    /// A datanode's process died, or another one took its place.
    pub fn datanode(&self, address: &str, is_dead: bool) {
        let known = Known { dead_since: is_dead.then(now) };
        self.inner.lock().datanodes.insert(address.to_owned(), known);
    }

    /// What no master may propose, whatever the clients do.
    fn check_ops(&self, inner: &Inner, directory: &Directory, ops: &[Op<'_>]) {
        for op in ops {
            match op {
                Op::DropReplica { object, replica } if !self.bits_flip => self.history.wrong(format!(
                    "replica {replica} of object {object} is dropped as corrupt, and no bit went bad (R3)"
                )),
                Op::SetContact { node, contact: Contact::Heard, .. } => {
                    let Some(node) = directory.node(*node) else { continue };
                    let known = inner.datanodes.get(&*node.address).copied().unwrap_or_default();
                    let Some(dead) = known.dead_since else { continue };
                    // Its last words may have been late; those of before the term were said to another.
                    if dead + (self.late.as_nanos() as u64) < inner.term.1 {
                        self.history.wrong(format!(
                            "datanode {} is listed again in term {}, and was dead before the term began (N1)",
                            node.address, inner.term.0
                        ));
                    }
                }
                _ => {}
            }
        }
    }

    /// A master applied the entry at `index`, or took in a snapshot of it.
    pub fn applied(&self, master: u64, directory: &Directory, index: u64, ops: &[Op<'_>]) {
        let digest = directory.digest();
        self.trace.note("apply", (master, index), digest as u64);
        let mut inner = self.inner.lock();
        match inner.digests.get(&index) {
            Some(&(known, by)) if known != digest => {
                self.history.wrong(format!(
                    "SAME-INDEX-SAME-HASH: at index {index} master {master} has {digest:032x}, master {by} had {known:032x}"
                ));
            }
            Some(_) => {}
            None => drop(inner.digests.insert(index, (digest, master))),
        }
        let (before, since) = inner.last.unwrap_or((0, 0));
        // The first to apply an entry says what it did; one that skipped some by a snapshot of them cannot.
        if inner.last.is_some() && index <= before {
            return;
        }
        let at = now();
        let term = directory.applied().map_or(0, |(_, term)| term);
        if term > inner.term.0 {
            inner.term = (term, at);
        }
        self.check_ops(&inner, directory, ops);
        for key in 0..self.keys {
            let state = state_of(directory, key);
            let was = inner.states.insert(key, state).unwrap_or_default();
            for event in events(key, was, state, ops) {
                self.history.log_event(key, (since, at), event);
            }
        }
        inner.last = Some((index, at));
    }

    /// What is known of a key.
    pub fn state(&self, key: u64) -> State {
        self.inner.lock().states.get(&key).copied().flatten()
    }
}

fn state_of(directory: &Directory, key: u64) -> State {
    directory.with_object(TenantId::DEFAULT, &key_name(key), |object| {
        let object = object.filter(|object| object.state == ObjectState::Complete)?;
        Some((object.object.0, object.is_readable()))
    })
}

/// What no client caused: everything but the ends of puts and the removals of this very entry.
fn events(key: u64, was: State, is: State, ops: &[Op<'_>]) -> Vec<Event> {
    let removed = |object: u64| {
        ops.iter().any(|op| match op {
            Op::Remove(remove) => remove.key == key_name(key).as_slice(),
            Op::RemoveObjects { objects, .. } => objects.iter().any(|o| o.0 == object),
            _ => false,
        })
    };
    let ended = |object: u64| ops.iter().any(|op| matches!(op, Op::PutEnd(end) if end.object.0 == object));
    let mut events = Vec::new();
    match (was, is) {
        (Some((a, visible)), Some((b, now_visible))) if a == b => match (visible, now_visible) {
            (true, false) => events.push(Event::Hidden(a)),
            (false, true) => events.push(Event::Shown(a)),
            _ => {}
        },
        (Some((a, _)), Some((b, visible))) => {
            if !ended(b) {
                events.push(Event::Dropped(a));
            }
            if !visible {
                events.push(Event::Hidden(b));
            }
        }
        (Some((a, _)), None) if !removed(a) => events.push(Event::Dropped(a)),
        (None, Some((b, false))) => events.push(Event::Hidden(b)),
        _ => {}
    }
    events
}
