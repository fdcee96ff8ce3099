//! What the masters apply, as they apply it: the state of every key after every entry, in log order. It gives the
//! judge the events that no client caused, and compares the digests of all masters entry by entry.

mod events;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_master::directory::{Contact, Directory, ObjectState, ObjectView, Op, TenantId};
use tidepool_proto::ObjectId;

use self::events::{Is, events, is_victim, loses_copies};
use crate::history::{Event, History, LOG, now, object_of};
use crate::keys::{Keys, SMALL, group, key_name, tenant};
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
    special: Keys,
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
    /// Digest after each entry, with who had it first and the entry's term.
    digests: BTreeMap<u64, (u128, u64, u64)>,
    /// The last index whose state is in `states`, and when it was first applied.
    last: Option<(u64, u64)>,
    states: BTreeMap<u64, State>,
    /// As they were before the last entry.
    before: BTreeMap<u64, State>,
    /// Objects that are pinned for good.
    pinned: BTreeSet<u64>,
    /// What was known after each entry: keys, and what is pinned for good.
    known: BTreeMap<u64, (BTreeMap<u64, State>, BTreeSet<u64>)>,
    /// Number of the present history.
    history: u64,
    /// Whoever went on alone, and did not say yet what it holds.
    alone: Option<Alone>,
    /// Keys that were something else before a majority was lost.
    forgotten: u64,
}

/// A master that goes on alone.
#[derive(Clone, Copy)]
struct Alone {
    /// Since when there is no other.
    since: u64,
    /// The history that it begins.
    history: u64,
}

impl Inner {
    /// Whether this entry ends the present history.
    fn begins_history(&self, ops: &[Op<'_>]) -> bool {
        ops.iter().any(|op| matches!(op, Op::BeginHistory { before: (_, history) } if history.0 == self.history))
    }
}

impl Observer {
    /// Of these keys.
    pub fn new(params: &Params, history: History, trace: Trace) -> Observer {
        Observer {
            inner: Arc::default(),
            history,
            trace,
            keys: params.keys,
            special: params.special,
            bits_flip: params.faults.contains(&Fault::FlipBit),
            late: Duration::from_millis(params.late.1 + 100),
        }
    }

    /// A cluster began, or goes on: in this history.
    pub fn begins(&self, history: u64) {
        self.inner.lock().history = history;
        self.history.begins(history);
    }

    /// All masters are gone, and one is about to begin from an image of this index, in another history. Answers how many keys have an
    /// object in it.
    pub fn restored(&self, index: u64, history: u64) -> u64 {
        let at = now();
        let kept = {
            let mut inner = self.inner.lock();
            let (_, (states, pinned)) =
                inner.known.range(..=index).next_back().map_or_else(Default::default, |(i, k)| (*i, k.clone()));
            for key in 0..self.keys {
                let state = states.get(&key).copied().flatten();
                self.history.log_event(key, (at, at), Event::Restored(state));
            }
            inner.digests.retain(|known, _| *known <= index);
            inner.known.retain(|known, _| *known <= index);
            (inner.before, inner.states, inner.pinned) = (states.clone(), states, pinned);
            (inner.last, inner.term) = (Some((index, at)), (0, at));
            inner.states.values().flatten().count() as u64
        };
        self.begins(history);
        kept
    }

    /// All masters but one are gone, and that one goes on alone in another history. Of its log it knew the entries up to `committed` to be
    /// committed: these are what they were. What comes after them is what it says until it begins the history; no client caused that
    /// and none was told of it.
    pub fn goes_on_alone(&self, committed: u64, history: u64) {
        let inner = &mut *self.inner.lock();
        let since = now();
        let applied = inner.last.map_or(0, |(index, _)| index);
        let first = committed.min(applied) + 1;
        inner.known.split_off(&first);
        let (states, pinned) = inner.known.values().next_back().cloned().unwrap_or_default();
        (inner.before, inner.states, inner.pinned) = (inner.states.clone(), states, pinned);
        inner.last = Some((first - 1, since));
        inner.alone = Some(Alone { since, history });
    }

    /// Whether somebody goes on alone and did not begin its history yet.
    pub fn is_alone(&self) -> bool {
        self.inner.lock().alone.is_some()
    }

    /// Keys that were something else before a majority was lost than they are in what was left.
    pub fn forgotten(&self) -> u64 {
        self.inner.lock().forgotten
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
                // Of an earlier history: the datanode was asked whether it has it (I2).
                Op::DropReplica { object, .. } if directory.ancestors().history_of(object.op()).is_some() => {}
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
        let inner = &mut *self.inner.lock();
        let term = directory.applied().map_or(0, |(_, term)| term);
        if inner.alone.is_some() && inner.begins_history(ops) {
            // From here on it is another log, whose terms say nothing of those before.
            inner.digests.split_off(&index);
        }
        self.check_digest(inner, (master, index, term), digest);
        let (before, since) = inner.last.unwrap_or((0, 0));
        // The first to apply an entry says what it did; one that skipped some by a snapshot of them cannot.
        if inner.last.is_some() && index <= before {
            return;
        }
        let at = now();
        if term > inner.term.0 {
            inner.term = (term, at);
            self.history.term_begins();
        }
        self.trace.explain(|| format!("entry {index}: {ops:?}"));
        match inner.alone {
            Some(alone) => self.goes_on(inner, alone, directory, ops),
            None => self.happened(inner, directory, (since, at), ops),
        }
        let pinned = (0..self.keys)
            .filter_map(|key| self.view(directory, key, |object| object.hard_pinned.then_some(object.object.0))?);
        inner.pinned = pinned.collect();
        inner.last = Some((index, at));
        let known = (inner.states.clone(), inner.pinned.clone());
        inner.known.insert(index, known);
    }

    /// All masters have one state after one entry. Whoever goes on alone has another entry where its log was not the majority's.
    fn check_digest(&self, inner: &mut Inner, (master, index, term): (u64, u64, u64), digest: u128) {
        match inner.digests.get(&index) {
            Some(&(.., of)) if of != term && inner.alone.is_some() => drop(inner.digests.split_off(&index)),
            Some(&(known, by, _)) if known != digest => {
                return self.history.wrong(format!(
                    "SAME-INDEX-SAME-HASH: at index {index} master {master} has {digest:032x}, master {by} had {known:032x}"
                ));
            }
            Some(_) => return,
            None => {}
        }
        inner.digests.insert(index, (digest, master, term));
    }

    /// An entry of the one cluster that there is: what it did without a call, and whether it may.
    fn happened(&self, inner: &mut Inner, directory: &Directory, between: (u64, u64), ops: &[Op<'_>]) {
        self.check_ops(inner, directory, ops);
        let mut dropped = BTreeSet::new();
        inner.before = inner.states.clone();
        for key in 0..self.keys {
            let state = self.state_of(directory, key, inner.history);
            let was = inner.states.insert(key, state).unwrap_or_default();
            for (event, is) in events(key, was, state, ops) {
                match is {
                    Is::Sure => self.history.log_event(key, between, event),
                    Is::Possible => self.history.log(LOG, key, between.0, false, event),
                }
                if let Event::Dropped(object) = event {
                    dropped.insert((key, object));
                }
            }
        }
        self.check_evictions(inner, &dropped, ops);
        self.check_quota(directory);
    }

    /// An entry that only whoever goes on alone has, or that it has again. When it begins its history each key is what it holds, whatever
    /// others had acknowledged: a stated loss.
    fn goes_on(&self, inner: &mut Inner, alone: Alone, directory: &Directory, ops: &[Op<'_>]) {
        for key in 0..self.keys {
            inner.states.insert(key, self.state_of(directory, key, inner.history));
        }
        if !inner.begins_history(ops) {
            return;
        }
        for (key, state) in &inner.states {
            let value = |state: Option<&State>| state.copied().flatten().map(|(value, _)| value);
            inner.forgotten += u64::from(value(inner.before.get(key)) != value(Some(state)));
            self.history.log_event(*key, (alone.since, now()), Event::Restored(*state));
        }
        (inner.alone, inner.history) = (None, alone.history);
        self.history.begins(alone.history);
    }

    /// What is evicted was not pinned for good, and of its group nothing is left. `dropped`: keys whose objects went in this entry without
    /// a call.
    fn check_evictions(&self, inner: &Inner, dropped: &BTreeSet<(u64, u64)>, ops: &[Op<'_>]) {
        // Where copies went with their datanode, it was no eviction.
        if ops.iter().any(loses_copies) {
            return;
        }
        let victims = dropped.iter().map(|(key, value)| (*key, object_of(*value)));
        for (key, object) in victims.filter(|(_, object)| is_victim(*object, ops)) {
            if inner.pinned.contains(&object) {
                self.history.wrong(format!("key {key}: object {object} was evicted, and is pinned for good"));
            }
            let own = group(self.special, key);
            let left = (0..self.keys).filter(|other| !own.is_empty() && group(self.special, *other) == own);
            for other in
                left.filter(|other| inner.before.get(other).is_some_and(|was| inner.states.get(other) == Some(was)))
            {
                if inner.states.get(&other).copied().flatten().is_some() {
                    self.history.wrong(format!("key {key} was evicted, and key {other} of its group was not"));
                }
            }
        }
    }

    /// No tenant holds more than it may.
    fn check_quota(&self, directory: &Directory) {
        let held = (0..self.keys).filter(|key| tenant(self.special, *key) == SMALL);
        let held = held.filter(|key| self.view(directory, *key, |_| ()).is_some()).count() as u64;
        if held > self.special.quota_objects {
            let may = self.special.quota_objects;
            self.history.wrong(format!("tenant '{SMALL}' holds {held} objects and may hold {may}"));
        }
    }

    /// A key's record, whatever its state.
    fn view<R>(&self, directory: &Directory, key: u64, look: impl FnOnce(&ObjectView<'_>) -> R) -> Option<R> {
        let tenant = match tenant(self.special, key) {
            "" => TenantId::DEFAULT,
            name => directory.tenant(name)?,
        };
        directory.with_object(tenant, &key_name(key), |object| object.map(look))
    }

    fn state_of(&self, directory: &Directory, key: u64, present: u64) -> State {
        let ancestors = directory.ancestors();
        let value = |object: ObjectId| {
            let history = ancestors.history_of(object.op()).map_or(present, |history| history.0);
            self.history.value(history, object.0)
        };
        self.view(directory, key, |object| {
            (object.state == ObjectState::Complete).then(|| (value(object.object), object.is_readable()))
        })?
    }

    /// What is known of a key.
    pub fn state(&self, key: u64) -> State {
        self.inner.lock().states.get(&key).copied().flatten()
    }
}
