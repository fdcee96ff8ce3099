//! Linearizability, key by key: is there an order of all calls, each between its begin and its end, in which every
//! answer is right? After Wing and Gong (1993) with Lowe's memory of visited states (2016).
//!
//! A call of unknown end may take effect at any time after its begin, or never. What the log did without a call (evictions,
//! datanodes that became suspect) are calls of the log's, with begin and end: an object that goes without one is lost.

use std::collections::{BTreeMap, HashSet};

use crate::event::{Call, Event, Value, object_of};

/// Steps of one key's search, after which it is given up.
pub const STEPS_MAX: u64 = 3_000_000;

/// What a key holds: an object, and whether it can be read now.
type State = Option<(Value, bool)>;

/// What the search came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// There is such an order.
    Linearizable,
    /// There is none: the calls up to the first end that no order reaches.
    Violated(Vec<Call>),
    /// Not found within [`STEPS_MAX`].
    Undecided,
}

/// State after `event`; none: it cannot have answered so in this state.
pub fn step(state: State, event: Event) -> Option<State> {
    match (event, state) {
        (Event::Put(value), None) => Some(Some((value, true))),
        (Event::PutRefused, Some(_)) => Some(state),
        (Event::Upsert(value), _) => Some(Some((value, true))),
        (Event::Got(value), Some((is, true))) if is == value => Some(state),
        (Event::Listed(object), Some((is, true))) if object_of(is) == object => Some(state),
        (Event::Restored(to), _) => Some(to),
        (Event::Missed, None | Some((_, false))) => Some(state),
        (Event::Exists, Some((_, true))) => Some(state),
        (Event::Removed, Some(_)) => Some(None),
        (Event::NothingToRemove, None) => Some(state),
        (Event::Dropped(value), Some((is, _))) if is == value => Some(None),
        (Event::Hidden(value), Some((is, _))) if is == value => Some(Some((is, false))),
        (Event::Shown(value), Some((is, _))) if is == value => Some(Some((is, true))),
        _ => None,
    }
}

/// Calls that took effect, as a set.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
struct Done(Vec<u64>);

impl Done {
    fn has(&self, i: usize) -> bool {
        self.0.get(i / 64).is_some_and(|word| word >> (i % 64) & 1 == 1)
    }

    fn with(&self, i: usize) -> Done {
        let mut set = self.0.clone();
        if set.len() <= i / 64 {
            set.resize(i / 64 + 1, 0);
        }
        set[i / 64] |= 1 << (i % 64);
        Done(set)
    }
}

/// Judges the calls of one key, which held nothing at first.
pub fn judge(calls: &[Call]) -> Verdict {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| (call.invoked, call.returned.unwrap_or(u64::MAX)));
    let ends = |call: &Call| call.returned.unwrap_or(u64::MAX);
    let definite = calls.iter().filter(|call| call.returned.is_some()).count();
    let mut seen: HashSet<(Done, State)> = HashSet::new();
    // What has taken effect, the state after it, and how many of these are definite.
    let mut stack = vec![(Done::default(), None::<(Value, bool)>, 0usize)];
    let (mut steps, mut furthest) = (0u64, Done::default());
    let mut most = 0;
    while let Some((done, state, count)) = stack.pop() {
        if count == definite {
            return Verdict::Linearizable;
        }
        if count > most {
            (most, furthest) = (count, done.clone());
        }
        steps += 1;
        if steps > STEPS_MAX {
            return Verdict::Undecided;
        }
        // Nothing may take effect after the end of one that has not.
        let limit = calls.iter().enumerate().filter(|(i, _)| !done.has(*i)).map(|(_, call)| ends(call)).min();
        let limit = limit.unwrap_or(u64::MAX);
        for (i, call) in calls.iter().enumerate().take_while(|(_, call)| call.invoked <= limit) {
            if done.has(i) {
                continue;
            }
            let Some(next) = step(state, call.event) else { continue };
            let next = (done.with(i), next);
            if seen.insert(next.clone()) {
                stack.push((next.0, next.1, count + usize::from(call.returned.is_some())));
            }
        }
    }
    let stuck = calls.iter().enumerate().filter(|(i, _)| !furthest.has(*i)).map(|(_, call)| ends(call)).min();
    let stuck = stuck.unwrap_or(u64::MAX);
    Verdict::Violated(calls.into_iter().filter(|call| call.invoked <= stuck).collect())
}

/// Judges all keys; answers the first that is violated, and how many were not decided.
pub fn judge_all(calls: &[Call]) -> (Option<(u64, Vec<Call>)>, u64) {
    let mut by_key: BTreeMap<u64, Vec<Call>> = BTreeMap::new();
    for call in calls {
        by_key.entry(call.key).or_default().push(*call);
    }
    let mut undecided = 0;
    for (key, calls) in by_key {
        match judge(&calls) {
            Verdict::Linearizable => {}
            Verdict::Undecided => undecided += 1,
            Verdict::Violated(calls) => return (Some((key, minimal(&calls))), undecided),
        }
    }
    (None, undecided)
}

/// As few of the calls as are still wrong together, as far as looks can be left out: what a person reads. What changes the key stays, since
/// what a change explains would be another mistake without it.
pub fn minimal(calls: &[Call]) -> Vec<Call> {
    let mut kept = calls.to_vec();
    let is_wrong = |calls: &[Call]| matches!(judge(calls), Verdict::Violated(_));
    let mut i = 0;
    while i < kept.len() {
        let mut fewer = kept.clone();
        match fewer.remove(i).event.only_looks() && is_wrong(&fewer) {
            true => kept = fewer,
            false => i += 1,
        }
    }
    kept
}
