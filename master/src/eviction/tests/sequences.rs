//! Hand-made sequences.

use super::super::{Adaptive, Answer, Inserted, Lru, NAMES, Policy, REFUSALS_MAX, S3Fifo, by_name};
use super::traces::Draw;
use super::{Cache, block, next_victims, take_if};
use std::collections::VecDeque;
use tidepool_proto::ObjectId;

fn every() -> impl Iterator<Item = (&'static str, Box<dyn Policy>)> {
    NAMES.into_iter().map(|name| (name, by_name(name).expect("named")))
}

#[test]
fn unknown_names_make_nothing() {
    assert!(by_name("belady").is_none());
    assert_eq!(NAMES[0], "adaptive");
}

#[test]
fn a_key_put_again_is_one_object_and_the_old_id_is_stale() {
    for (name, mut policy) in every() {
        policy.inserted(Inserted { bytes: 10, ..block(1, 1) });
        policy.inserted(Inserted { bytes: 30, ..block(1, 2) });
        assert_eq!((policy.len(), policy.bytes()), (1, 30), "{name}");
        policy.removed(1, ObjectId(1));
        assert_eq!(policy.len(), 1, "{name}");
        policy.removed(1, ObjectId(2));
        policy.removed(1, ObjectId(2));
        assert_eq!((policy.len(), policy.bytes(), policy.is_empty()), (0, 0, true), "{name}");
    }
}

#[test]
fn sizes_beyond_four_gibibytes_are_exact() {
    for (name, mut policy) in every() {
        let sizes = [0, u64::from(u32::MAX) - 1, u64::from(u32::MAX), 1 << 40];
        for (key, bytes) in (1..).zip(sizes) {
            policy.inserted(Inserted { bytes, ..block(key, key) });
        }
        assert_eq!(policy.bytes(), sizes.iter().sum::<u64>(), "{name}");
        let victims = policy.victims(u64::MAX, 9, &mut |_| Answer::Take);
        assert_eq!(victims.iter().map(|victim| victim.bytes).sum::<u64>(), policy.bytes(), "{name}");
    }
}

#[test]
fn groups_go_whole_or_not_at_all() {
    for (name, mut policy) in every() {
        for key in 1..=9 {
            policy.inserted(Inserted { group: (key % 3 == 0).then_some(7), ..block(key, key) });
        }
        let mut refused = policy.victims(9, 9, &mut |candidate| take_if(candidate.key != 6));
        refused.retain(|candidate| candidate.group == Some(7));
        assert_eq!(refused, vec![], "{name}");
        let mut policy = by_name(name).expect("named");
        for key in 1..=9 {
            policy.inserted(Inserted { group: (key % 3 == 0).then_some(7), ..block(key, key) });
        }
        let victims = policy.victims(9, 9, &mut |candidate| take_if(candidate.group.is_some()));
        let mut keys: Vec<u64> = victims.iter().map(|victim| victim.key).collect();
        keys.sort_unstable();
        assert_eq!(keys, vec![3, 6, 9], "{name}");
    }
}

#[test]
fn looks_are_bounded_and_the_refused_are_put_off() {
    for (name, mut policy) in every() {
        let number = 3 * REFUSALS_MAX as u64;
        for key in 1..=number {
            policy.inserted(block(key, key));
        }
        let mut seen = Vec::new();
        for _ in 0..3 {
            let chosen = policy.victims(1, 1, &mut |candidate| {
                seen.push(candidate.key);
                Answer::Refuse
            });
            assert_eq!(chosen, vec![], "{name}");
        }
        assert_eq!(seen.len(), 3 * REFUSALS_MAX, "{name}");
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 3 * REFUSALS_MAX, "{name}: none was looked at twice");
        assert_eq!(policy.len() as u64, number, "{name}");
        assert_eq!(
            policy.victims(1, 1, &mut |_| Answer::Take).len(),
            1,
            "{name}: refused once is not refused for ever"
        );
    }
}

#[test]
fn lru_is_a_naive_lru() {
    let mut policy = Lru::new();
    // Front: used last.
    let mut naive: VecDeque<u64> = VecDeque::new();
    let mut draw = Draw(1);
    for object in 1..20_000 {
        match draw.below(4) {
            0 => {
                let key = draw.below(500);
                naive.retain(|&other| other != key);
                naive.push_front(key);
                policy.inserted(block(key, object));
            }
            1 if !naive.is_empty() => {
                let victims = policy.victims(3, 3, &mut |_| Answer::Take);
                let expected: Vec<u64> = naive.iter().rev().take(3).copied().collect();
                assert_eq!(victims.iter().map(|victim| victim.key).collect::<Vec<_>>(), expected);
                for victim in victims {
                    policy.removed(victim.key, victim.object);
                    naive.pop_back();
                }
            }
            _ => {
                let keys: Vec<u64> = (0..draw.below(5)).map(|_| draw.below(500)).collect();
                policy.requested(&keys);
                for key in keys.into_iter().rev() {
                    if naive.contains(&key) {
                        naive.retain(|&other| other != key);
                        naive.push_front(key);
                    }
                }
            }
        }
        assert_eq!(policy.len(), naive.len());
    }
}

#[test]
fn s3_fifo_admits_what_was_used_on_trial_and_what_comes_back() {
    let mut policy = S3Fifo::new();
    for key in 1..=10 {
        policy.inserted(block(key, key));
    }
    policy.requested(&[1]);
    policy.requested(&[1]);
    // 1 was used twice on trial and is promoted; 2 was not.
    assert_eq!(next_victims(&mut policy, 1), vec![2]);
    policy.removed(2, ObjectId(2));
    policy.inserted(block(2, 11));
    // 2 came back while its ghost was there: it is in the main queue, and the trial goes on with 3.
    assert_eq!(next_victims(&mut policy, 8), vec![3, 4, 5, 6, 7, 8, 9, 10]);
}

#[test]
fn adaptive_takes_the_deep_end_of_a_chain_first_even_in_one_call() {
    let mut policy = Adaptive::new();
    policy.requested(&[1, 2, 3, 4]);
    for key in 1..=4 {
        policy.inserted(block(key, key));
    }
    assert_eq!(next_victims(&mut policy, 4), vec![4, 3, 2, 1]);
}

#[test]
fn adaptive_learns_a_chain_from_later_requests_too() {
    let mut policy = Adaptive::new();
    for key in [3, 1, 2] {
        policy.inserted(block(key, key));
    }
    policy.requested(&[1, 2, 3]);
    assert_eq!(next_victims(&mut policy, 3), vec![3, 2, 1]);
}

#[test]
fn adaptive_is_not_fooled_by_circles_or_repeated_keys() {
    let mut policy = Adaptive::new();
    for key in 1..=3 {
        policy.inserted(block(key, key));
    }
    for keys in [&[1, 2, 3][..], &[3, 2, 1], &[2, 2, 2], &[3, 1], &[2, 1, 2, 3, 2]] {
        policy.requested(keys);
        policy.check();
    }
    let mut victims = next_victims(&mut policy, 3);
    victims.sort_unstable();
    assert_eq!(victims, vec![1, 2, 3]);
}

#[test]
fn adaptive_survives_the_loss_of_a_parent() {
    let mut policy = Adaptive::new();
    policy.requested(&[1, 2, 3]);
    for key in 1..=3 {
        policy.inserted(block(key, key));
    }
    policy.removed(2, ObjectId(2));
    policy.removed(1, ObjectId(1));
    policy.check();
    policy.inserted(block(1, 4));
    policy.removed(3, ObjectId(3));
    policy.check();
    assert_eq!(next_victims(&mut policy, 9), vec![1]);
}

/// Mooncake's issue 492: evicting the front of a prompt makes waste of its rest.
#[test]
fn case_028_what_survives_is_reachable_as_prefixes() {
    for (piece, step) in [(100, 1), (100, 25), (32, 1), (7, 25)] {
        let mut policy = Adaptive::new();
        let mut cache = Cache::new(&mut policy, 500, step);
        let chains: Vec<Vec<u64>> = (1..=10).map(|chain| (0..100).map(|i| chain << 16 | i).collect()).collect();
        let mut draw = Draw(28);
        for round in 0..60 {
            let chain = if round < 10 { round } else { draw.below(10) as usize };
            // The probe names the whole chain; what is put comes in pieces, whose links nothing else tells.
            cache.policy.requested(&chains[chain]);
            cache.serve(&chains[chain], piece);
            let prefix = |chain: &Vec<u64>| chain.iter().take_while(|key| cache.resident.contains_key(*key)).count();
            let reachable: usize = chains.iter().map(prefix).sum();
            let share = reachable as f64 / cache.resident.len() as f64;
            assert!(share >= 0.95, "round {round}, pieces of {piece}, {step} at once: {share:.3} reachable");
        }
    }
}
