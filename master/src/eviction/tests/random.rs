//! Random events: every policy against a naive set of what is resident.

use super::super::{Adaptive, Answer, Candidate, Inserted, NAMES, Policy, by_name};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use tidepool_proto::ObjectId;

#[derive(Clone, Debug)]
enum Event {
    Insert { key: u64, bytes: u64, group: Option<u64> },
    Request(Vec<u64>),
    Remove { key: u64 },
    RemoveStale { key: u64 },
    Evict { bytes: u64, limit: usize, answers: Answers },
}

/// Keys with this remainder of six are refused or passed over; how many removals never come.
#[derive(Clone, Copy, Debug)]
struct Answers {
    refused: u64,
    skipped: u64,
    forgets: u8,
}

impl Answers {
    fn of(self, candidate: &Candidate) -> Answer {
        match candidate.key % 6 {
            key if key == self.refused => Answer::Refuse,
            key if key == self.skipped => Answer::Skip,
            _ => Answer::Take,
        }
    }
}

fn event() -> impl Strategy<Value = Event> {
    let key = 0u64..40;
    let bytes = prop_oneof![4 => 0u64..100, 1 => Just(u64::from(u32::MAX) + 1)];
    let group = proptest::option::weighted(0.2, 0u64..4);
    prop_oneof![
        6 => (key.clone(), bytes, group).prop_map(|(key, bytes, group)| Event::Insert { key, bytes, group }),
        4 => proptest::collection::vec(key.clone(), 0..12).prop_map(Event::Request),
        2 => (key.clone(), 1usize..12)
            .prop_map(|(from, number)| Event::Request((from..).take(number).collect())),
        1 => key.clone().prop_map(|key| Event::Remove { key }),
        1 => key.clone().prop_map(|key| Event::RemoveStale { key }),
        3 => (0u64..300, 0usize..20, 0u64..6, 0u64..8, 0u8..4).prop_map(|(bytes, limit, refused, skipped, forgets)| {
            Event::Evict { bytes, limit, answers: Answers { refused, skipped, forgets } }
        }),
    ]
}

/// What is resident, by key.
type Naive = BTreeMap<u64, Inserted>;

fn evict<P: Policy + ?Sized>(
    policy: &mut P,
    naive: &mut Naive,
    bytes: u64,
    limit: usize,
    answers: Answers,
) -> Vec<Candidate> {
    let victims = policy.victims(bytes, limit, &mut |candidate| answers.of(candidate));
    let mut keys = BTreeSet::new();
    for victim in &victims {
        let Inserted { key, object, bytes, group } = naive[&victim.key];
        assert_eq!(*victim, Candidate { key, object, bytes, group }, "a victim is resident as it was inserted");
        assert_eq!(answers.of(victim), Answer::Take, "one that is refused or passed over is no victim");
        assert!(keys.insert(victim.key), "victims are distinct");
    }
    for group in victims.iter().filter_map(|victim| victim.group) {
        let members = naive.values().filter(|object| object.group == Some(group));
        members.for_each(|member| assert!(keys.contains(&member.key), "a group goes whole"));
    }
    let sum: u64 = victims.iter().map(|victim| victim.bytes).sum();
    let stopped_late = victims.last().is_some_and(|last| {
        let unit = |victim: &&Candidate| victim.group.is_some() && victim.group == last.group || victim.key == last.key;
        let last_unit: u64 = victims.iter().filter(unit).map(|victim| victim.bytes).sum();
        sum - last_unit >= bytes
    });
    assert!(!stopped_late, "no more than asked for");
    // Some of the victims' removals never come.
    for victim in victims.iter().filter(|victim| answers.forgets == 0 || victim.key % 3 != 0) {
        naive.remove(&victim.key);
        policy.removed(victim.key, victim.object);
    }
    victims
}

/// Plays the events, then empties the policy; gives all victims in order.
fn play<P: Policy + ?Sized>(policy: &mut P, events: &[Event], check: impl Fn(&P)) -> Vec<Candidate> {
    let mut all = Vec::new();
    let mut naive = Naive::new();
    for (event, object) in events.iter().zip(1..) {
        match event {
            &Event::Insert { key, bytes, group } => {
                let object = Inserted { key, object: ObjectId(object), bytes, group };
                naive.insert(key, object);
                policy.inserted(object);
            }
            Event::Request(keys) => policy.requested(keys),
            Event::Remove { key } => {
                if let Some(object) = naive.remove(key) {
                    policy.removed(*key, object.object);
                }
            }
            Event::RemoveStale { key } => policy.removed(*key, ObjectId(u64::MAX)),
            &Event::Evict { bytes, limit, answers } => {
                all.extend(evict(policy, &mut naive, bytes, limit, answers));
            }
        }
        assert_eq!(policy.len(), naive.len());
        assert_eq!(policy.bytes(), naive.values().map(|object| object.bytes).sum::<u64>());
        if object % 16 == 0 {
            check(policy);
        }
    }
    check(policy);
    // In the end everything can go: calls without refusals reach all that is resident.
    for _ in 0..naive.len() {
        for victim in policy.victims(u64::MAX, usize::MAX, &mut |_| Answer::Take) {
            assert_eq!(naive.remove(&victim.key).map(|object| object.object), Some(victim.object));
            policy.removed(victim.key, victim.object);
            all.push(victim);
        }
    }
    assert_eq!((policy.len(), naive.len(), policy.bytes()), (0, 0, 0));
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_policy_tracks_exactly_what_is_resident(events in proptest::collection::vec(event(), 1..200)) {
        for name in NAMES {
            play(&mut *by_name(name).expect("named"), &events, |_| ());
        }
    }

    #[test]
    fn the_same_events_give_the_same_victims(events in proptest::collection::vec(event(), 1..100)) {
        for name in NAMES {
            let once = || play(&mut *by_name(name).expect("named"), &events, |_| ());
            prop_assert_eq!(once(), once());
        }
    }

    #[test]
    fn the_links_of_adaptive_are_consistent(events in proptest::collection::vec(event(), 1..200)) {
        play(&mut Adaptive::new(), &events, Adaptive::check);
    }
}
