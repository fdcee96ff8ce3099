//! The judge is judged: against a second one that tries every order there is, on small histories drawn at random, and on
//! histories whose verdict is known.
#![allow(missing_docs)]

use tidepool_raft::sim::SplitMix;
use tidepool_sim::checker::{Verdict, judge};
use tidepool_sim::history::{Call, Event, object_of};

/// What a key holds, written down a second time and otherwise: the object put last, whether it is there, whether it shows.
#[derive(Clone, Copy)]
struct Key {
    object: u64,
    is_there: bool,
    shows: bool,
}

/// Whether `event` can be, and what is left.
fn happens(key: Key, event: Event) -> Option<Key> {
    let fits = match event {
        Event::Put(_) | Event::NothingToRemove => !key.is_there,
        Event::PutRefused | Event::Removed => key.is_there,
        Event::Upsert(_) | Event::Restored(_) => true,
        Event::Listed(object) => key.is_there && key.shows && object_of(key.object) == object,
        Event::Got(v) => key.is_there && key.shows && key.object == v,
        Event::Exists => key.is_there && key.shows,
        Event::Missed => !(key.is_there && key.shows),
        Event::Dropped(v) | Event::Hidden(v) | Event::Shown(v) => key.is_there && key.object == v,
    };
    fits.then_some(match event {
        Event::Put(v) | Event::Upsert(v) => Key { object: v, is_there: true, shows: true },
        Event::Removed | Event::Dropped(_) => Key { is_there: false, ..key },
        Event::Hidden(_) => Key { shows: false, ..key },
        Event::Shown(_) => Key { shows: true, ..key },
        Event::Restored(Some((v, shows))) => Key { object: v, is_there: true, shows },
        Event::Restored(None) => Key { is_there: false, ..key },
        _ => key,
    })
}

/// Every order of every choice of the calls whose end is not known.
fn some_order_fits(left: &[Call], key: Key) -> bool {
    if left.iter().all(|call| call.returned.is_none()) {
        return true;
    }
    (0..left.len()).any(|i| {
        let call = left[i];
        let rest: Vec<Call> = left.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, call)| *call).collect();
        let is_first = rest.iter().all(|other| other.returned.is_none_or(|end| end >= call.invoked));
        let taken = is_first && happens(key, call.event).is_some_and(|key| some_order_fits(&rest, key));
        taken || call.returned.is_none() && some_order_fits(&rest, key)
    })
}

fn brute_force(calls: &[Call]) -> bool {
    some_order_fits(calls, Key { object: 0, is_there: false, shows: false })
}

fn call(invoked: u64, returned: Option<u64>, event: Event) -> Call {
    Call { client: 1, key: 0, invoked, returned, event }
}

/// A history that a real key could have had, of which some answers are then changed.
fn drawn(random: &mut SplitMix) -> Vec<Call> {
    let count = random.range(2, 7);
    let mut key = Key { object: 0, is_there: false, shows: false };
    let (mut calls, mut next) = (Vec::new(), 1);
    for i in 0..count {
        let at = 10 * (i + 1);
        let event = match random.below(9) {
            8 if random.chance(50) => Event::Restored(None),
            8 if next > 1 => Event::Restored(Some((random.range(1, next - 1), random.chance(50)))),
            0 | 1 if !key.is_there => Event::Put(next),
            0 | 1 => Event::PutRefused,
            2 => Event::Upsert(next),
            3 if key.is_there && key.shows => Event::Got(key.object),
            4 if key.is_there && key.shows => Event::Exists,
            3 | 4 => Event::Missed,
            5 if key.is_there => Event::Removed,
            5 => Event::NothingToRemove,
            6 if key.is_there => Event::Dropped(key.object),
            7 if key.is_there && key.shows => Event::Hidden(key.object),
            7 if key.is_there => Event::Shown(key.object),
            _ => Event::Missed,
        };
        next += 1;
        key = happens(key, event).expect("it was chosen to fit");
        // It took effect at `at`, somewhere between its begin and its end.
        let (before, after) = (random.below(at.min(25)), random.below(25));
        let known = !random.chance(15) || event.only_looks();
        calls.push(call(at - before, known.then_some(at + after), event));
    }
    if random.chance(60) {
        let i = random.below(calls.len() as u64) as usize;
        calls[i].event = match random.below(5) {
            0 => Event::Missed,
            1 => Event::Exists,
            2 => Event::Got(random.range(1, next)),
            3 => Event::NothingToRemove,
            _ => Event::PutRefused,
        };
        calls[i].returned = calls[i].returned.or(Some(calls[i].invoked + 5));
    }
    calls
}

/// Neither judge knows the other: what one has for an answer that cannot be, the other must have too. (Tried without the bound
/// by ends, and with unknown ends that must take effect: fails.)
#[test]
fn two_judges_agree_on_small_histories() {
    let mut random = SplitMix::new(7);
    let (mut right, mut wrong) = (0, 0);
    for round in 0..20_000 {
        let calls = drawn(&mut random);
        let (expected, verdict) = (brute_force(&calls), judge(&calls));
        assert_ne!(verdict, Verdict::Undecided);
        assert_eq!(verdict == Verdict::Linearizable, expected, "round {round}: {calls:#?}");
        if expected { right += 1 } else { wrong += 1 }
    }
    println!("{right} right, {wrong} wrong");
    assert!(right > 4_000 && wrong > 4_000, "the histories say too little");
}

#[test]
fn known_histories_have_their_verdict() {
    let some = Some;
    let stale_read =
        [call(0, some(1), Event::Put(1)), call(2, some(3), Event::Upsert(2)), call(4, some(5), Event::Got(1))];
    let lost_write = [call(0, some(1), Event::Put(1)), call(2, some(3), Event::Missed)];
    let evicted =
        [call(0, some(1), Event::Put(1)), call(1, some(2), Event::Dropped(1)), call(2, some(3), Event::Missed)];
    let executed_twice = [
        call(0, some(1), Event::Put(1)),
        call(2, some(3), Event::Removed),
        call(4, some(5), Event::Put(2)),
        call(6, some(7), Event::Missed),
    ];
    let late = [call(0, None, Event::Put(1)), call(5, some(6), Event::Missed), call(7, some(8), Event::Got(1))];
    let never = [call(0, None, Event::Put(1)), call(5, some(6), Event::Missed)];
    let concurrent =
        [call(0, some(9), Event::Put(1)), call(1, some(2), Event::Missed), call(3, some(4), Event::Got(1))];
    let back_again =
        [call(0, some(9), Event::Put(1)), call(1, some(2), Event::Got(1)), call(3, some(4), Event::Missed)];
    for (name, calls, is_right) in [
        ("stale read", &stale_read[..], false),
        ("lost write", &lost_write, false),
        ("evicted", &evicted, true),
        ("executed twice", &executed_twice, false),
        ("late", &late, true),
        ("never", &never, true),
        ("concurrent", &concurrent, true),
        ("back again", &back_again, false),
    ] {
        assert_eq!(judge(calls) == Verdict::Linearizable, is_right, "{name}");
        assert_eq!(brute_force(calls), is_right, "{name}, says the second judge");
    }
}
