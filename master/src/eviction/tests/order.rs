//! The order of eviction: what is passed over keeps its place, and ranks follow it.

use super::super::{Adaptive, Answer, Candidate, Inserted, NAMES, Policy, SKIPS_MAX, by_name};
use super::traces::Draw;
use super::{block, next_victims, take_if};
use tidepool_proto::ObjectId;

const BLOCKS: u64 = 200;

/// A policy that has seen chains, uses and evictions; each time the same.
fn used(name: &str) -> Box<dyn Policy> {
    let mut policy = by_name(name).expect("named");
    let mut draw = Draw(7);
    for key in 1..=BLOCKS {
        policy.inserted(block(key, key));
    }
    for _ in 0..60 {
        let first = 1 + draw.below(BLOCKS - 8);
        let keys: Vec<u64> = (first..first + 1 + draw.below(8)).collect();
        policy.requested(&keys);
    }
    for victim in policy.victims(u64::MAX, 20, &mut |_| Answer::Take) {
        policy.removed(victim.key, victim.object);
    }
    policy
}

fn every() -> impl Iterator<Item = (&'static str, Box<dyn Policy>)> {
    NAMES.into_iter().map(|name| (name, used(name)))
}

/// Victims that could be had one after the other.
fn order(policy: &mut dyn Policy) -> Vec<u64> {
    let mut order = Vec::new();
    while let Some(victim) = policy.victims(1, 1, &mut |_| Answer::Take).pop() {
        policy.removed(victim.key, victim.object);
        order.push(victim.key);
    }
    order
}

/// Fails when what was passed over is put back in the order in which it was met. (On the way through its queues S3-FIFO
/// promotes what was used, so that its order is not the same after a look at everything.)
#[test]
fn what_is_passed_over_keeps_its_place() {
    for name in ["lru", "adaptive"] {
        let (untouched, mut policy) = (order(&mut *used(name)), used(name));
        for _ in 0..2 {
            assert_eq!(policy.victims(u64::MAX, usize::MAX, &mut |_| Answer::Skip), [], "{name}");
        }
        assert_eq!(order(&mut *policy), untouched, "{name}");
    }
}

/// Fails for each policy when what was chosen and did not go comes later than it did. (Which of its two queues S3-FIFO takes
/// from depends on what is in them, so that it is not asked for everything.)
#[test]
fn what_was_chosen_and_spared_keeps_its_place() {
    for name in NAMES {
        for number in [1, 3, 40, if name == "s3-fifo" { 60 } else { usize::MAX }] {
            let mut policy = used(name);
            let first: Vec<Candidate> = policy.victims(u64::MAX, number, &mut |_| Answer::Take);
            // Chosen once: others are chosen meanwhile.
            let others = policy.victims(u64::MAX, 5, &mut |c| take_if(!first.contains(c)));
            assert!(others.iter().all(|other| !first.contains(other)), "{name}");
            for victim in others.iter().rev().chain(first.iter().rev()) {
                policy.spared(victim.key, victim.object);
            }
            let again: Vec<Candidate> = policy.victims(u64::MAX, first.len(), &mut |_| Answer::Take);
            let keys = |all: &[Candidate]| all.iter().map(|c| c.key).collect::<Vec<u64>>();
            assert_eq!(keys(&again), keys(&first), "{name}, {number}");
            for victim in &again {
                policy.spared(victim.key, ObjectId(u64::MAX));
                policy.removed(victim.key, victim.object);
                policy.spared(victim.key, victim.object);
            }
            let next: Vec<u64> = next_victims(&mut *policy, others.len());
            assert_eq!(next, keys(&others), "{name}, {number}");
        }
    }
}

/// Fails when a block that was spared has lost its parent, which then goes before it.
#[test]
fn what_was_spared_still_has_its_parent() {
    let mut policy = Adaptive::new();
    for key in 1..=9 {
        policy.inserted(block(key, key));
    }
    policy.requested(&[1, 2, 3]);
    let chosen = policy.victims(u64::MAX, usize::MAX, &mut |_| Answer::Take);
    for victim in chosen.iter().rev() {
        policy.spared(victim.key, victim.object);
        policy.check();
    }
    let order = next_victims(&mut policy, usize::MAX);
    let place = |key| order.iter().position(|&other| other == key);
    assert!(place(3) < place(2) && place(2) < place(1), "{order:?}");
    assert_eq!(order.len(), 9);
}

/// Fails for each policy when `Skip` is worked off as `Refuse` is.
#[test]
fn what_is_passed_over_goes_next_when_others_were_taken() {
    for (name, mut policy) in every() {
        let passed: Vec<u64> = next_two_leaves(name);
        let taken = policy.victims(u64::MAX, 3, &mut |candidate| {
            if passed.contains(&candidate.key) { Answer::Skip } else { Answer::Take }
        });
        assert_eq!(taken.len(), 3, "{name}");
        assert!(taken.iter().all(|victim| !passed.contains(&victim.key)), "{name}");
        for victim in taken {
            policy.removed(victim.key, victim.object);
        }
        assert_eq!(next_victims(&mut *policy, 2), passed, "{name}");
    }
}

/// The first two to go, neither of which waits for the other.
fn next_two_leaves(name: &str) -> Vec<u64> {
    let mut leaves = Vec::new();
    used(name).victims(u64::MAX, usize::MAX, &mut |candidate| {
        leaves.push(candidate.key);
        Answer::Skip
    });
    leaves.truncate(2);
    leaves
}

#[test]
fn a_call_passes_over_a_bounded_number() {
    for name in NAMES {
        let mut policy = by_name(name).expect("named");
        for key in 1..=2 * SKIPS_MAX as u64 {
            policy.inserted(block(key, key));
        }
        for _ in 0..2 {
            let mut looks = 0;
            let chosen = policy.victims(1, 1, &mut |_| {
                looks += 1;
                Answer::Skip
            });
            assert_eq!((chosen.len(), looks), (0, SKIPS_MAX), "{name}");
        }
    }
}

/// Fails when each member of a group that is passed over makes all of them be looked at again.
#[test]
fn a_group_that_is_passed_over_is_looked_at_once() {
    const MEMBERS: u64 = 1000;
    for name in NAMES {
        let mut policy = by_name(name).expect("named");
        for key in 1..=MEMBERS {
            policy.inserted(Inserted { group: Some(1), ..block(key, key) });
        }
        policy.inserted(block(MEMBERS + 1, MEMBERS + 1));
        let mut looks = 0;
        let mut accept = |candidate: &Candidate| {
            looks += 1;
            if candidate.key == MEMBERS / 2 { Answer::Skip } else { Answer::Take }
        };
        let chosen: Vec<u64> = policy.victims(u64::MAX, 9, &mut accept).iter().map(|victim| victim.key).collect();
        assert_eq!(chosen, [MEMBERS + 1], "{name}");
        assert!(looks <= MEMBERS + 1, "{name}: {looks} looks");
        assert_eq!(policy.len() as u64, MEMBERS + 1, "{name}");
    }
}

/// What was in use once is found when all the rest is passed over. Fails when what was put off comes back only when
/// nothing else is left.
#[test]
fn what_was_put_off_is_looked_at_when_nothing_else_is_taken() {
    for (name, mut policy) in every() {
        let is_busy = |candidate: &Candidate| candidate.key.is_multiple_of(2);
        policy.victims(u64::MAX, usize::MAX, &mut |c| if is_busy(c) { Answer::Refuse } else { Answer::Skip });
        let chosen = policy.victims(u64::MAX, 1, &mut |c| if is_busy(c) { Answer::Take } else { Answer::Skip });
        assert_eq!(chosen.len(), 1, "{name}");
    }
}

/// Fails when a policy's ranks do not follow its order.
#[test]
fn ranks_follow_the_order() {
    for name in ["lru", "adaptive"] {
        let mut policy = used(name);
        let mut leaves = Vec::new();
        policy.victims(u64::MAX, usize::MAX, &mut |candidate| {
            leaves.push(*candidate);
            Answer::Skip
        });
        let ranks: Vec<Option<u64>> = leaves.iter().map(|leaf| policy.rank(leaf.key, leaf.object)).collect();
        assert!(leaves.len() > 20 && ranks.iter().all(Option::is_some), "{name}");
        assert!(ranks.is_sorted(), "{name}: {ranks:?}");
    }
}

#[test]
fn what_has_children_has_no_rank() {
    let mut policy = Adaptive::new();
    policy.requested(&[1, 2]);
    for key in 1..=2 {
        policy.inserted(block(key, key));
    }
    assert_eq!(policy.rank(1, block(1, 1).object), None);
    assert!(policy.rank(2, block(2, 2).object).is_some());
    assert_eq!(policy.rank(2, block(2, 3).object), None, "another object");
}

/// What a queue of S3-FIFO would keep stands behind what it would not.
#[test]
fn s3_fifo_ranks_what_it_would_keep_last() {
    let mut policy = super::super::S3Fifo::new();
    for key in 1..=3 {
        policy.inserted(block(key, key));
    }
    policy.requested(&[1]);
    policy.requested(&[1]);
    let ranks: Vec<_> = (1..=3).map(|key| policy.rank(key, block(key, key).object)).collect();
    assert!(ranks[1] < ranks[2] && ranks[2] < ranks[0], "{ranks:?}");
}
