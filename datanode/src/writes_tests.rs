//! Tests of the write table.

use super::*;
use proptest::prelude::*;
use tidepool_proto::capability::Verb;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{Incarnation, NodeId, ObjectId};

fn table_with(limits: WriteLimits) -> Arc<WriteTable> {
    Arc::new(WriteTable::new(limits, LogClock::new(LogTime(1_000), BootInstant::now())))
}

fn table() -> Arc<WriteTable> {
    table_with(WriteLimits::default())
}

fn grant(replica: u64, offset: u64, length: u64, expires: u64) -> Capability {
    Capability {
        verb: Verb::Write,
        object: ObjectId(replica),
        replica: ReplicaId(replica),
        segment: SegmentId(1),
        incarnation: Incarnation(1),
        node: NodeId(1),
        offset,
        length,
        expires: LogTime(expires),
    }
}

fn store(table: &WriteTable, grant: &Capability) {
    let write = table.begin(grant).unwrap();
    assert!(write.enter());
    assert_eq!(table.finish(&write, End::Stored), End::Stored);
}

fn acknowledged(table: &WriteTable) -> Vec<u64> {
    let taken = table.take_acknowledgements(1, 100);
    table.acknowledgements_arrived(1);
    taken
}

#[test]
fn one_replica_has_one_writer() {
    let table = table();
    let _first = table.begin(&grant(1, 0, 64, 9_000)).unwrap();
    assert_eq!(table.begin(&grant(1, 0, 64, 9_000)).unwrap_err(), NotOpened::Busy);
}

/// ONE-WRITER: fails when `Inner::claim` does not look for overlaps (tried).
#[test]
fn overlapping_grants_are_refused_while_open() {
    let table = table();
    let first = table.begin(&grant(1, 100, 100, 9_000)).unwrap();
    for (offset, length) in [(100, 100), (50, 51), (199, 1), (0, 1000), (120, 10)] {
        let refused = table.begin(&grant(2, offset, length, 9_000)).unwrap_err();
        assert_eq!(refused, NotOpened::Overlaps(ReplicaId(1)), "{offset} {length}");
    }
    let _before = table.begin(&grant(3, 0, 100, 9_000)).unwrap();
    let _after = table.begin(&grant(4, 200, 1, 9_000)).unwrap();
    let other_segment = Capability { segment: SegmentId(2), ..grant(5, 100, 100, 9_000) };
    let _elsewhere = table.begin(&other_segment).unwrap();
    table.finish(&first, End::Aborted);
    table.begin(&grant(6, 100, 100, 9_000)).unwrap();
}

#[test]
fn a_used_grant_is_not_opened_again() {
    let table = table();
    store(&table, &grant(1, 0, 64, 9_000));
    assert_eq!(table.begin(&grant(1, 0, 64, 9_000)).unwrap_err(), NotOpened::Ended(End::Stored));
    let write = table.begin(&grant(2, 64, 64, 9_000)).unwrap();
    table.finish(&write, End::Aborted);
    assert_eq!(table.begin(&grant(2, 64, 64, 9_000)).unwrap_err(), NotOpened::Ended(End::Aborted));
}

/// Once the extent belongs to another replica, the first grant still cannot write: fails when ended ids are forgotten early.
#[test]
fn a_replay_never_overwrites_the_next_owner_of_the_extent() {
    let table = table();
    store(&table, &grant(1, 0, 64, 9_000));
    store(&table, &grant(2, 0, 64, 9_500));
    assert_eq!(table.begin(&grant(1, 0, 64, 9_000)).unwrap_err(), NotOpened::Ended(End::Stored));
    table.observe(1, LogTime(9_001), BootInstant::now());
    store(&table, &grant(3, 64, 64, 60_000));
    assert_eq!(table.figures().ended, 2, "the expired one is forgotten");
    assert_eq!(table.begin(&grant(1, 0, 64, 9_000)).unwrap_err(), NotOpened::Expired);
}

/// Fails when the floor does not rise on a set-back (tried).
#[test]
fn a_clock_set_back_revives_no_forgotten_grant() {
    let table = table();
    store(&table, &grant(1, 0, 64, 5_000));
    table.observe(1, LogTime(9_000), BootInstant::now());
    store(&table, &grant(2, 64, 64, 60_000));
    assert_eq!(table.figures().ended, 1);
    assert!(table.observe(2, LogTime(2_000), BootInstant::now()));
    assert_eq!(table.begin(&grant(1, 0, 64, 5_000)).unwrap_err(), NotOpened::TooOld);
    table.begin(&grant(3, 128, 64, 5_000)).unwrap();
}

/// Bounded memory refuses, it does not forget: fails when the floor does not rise with eviction (tried).
#[test]
fn full_memories_raise_the_floor() {
    let table = table_with(WriteLimits { ended_max: 4, fenced_max: 4, ..WriteLimits::default() });
    for id in 1..=10 {
        store(&table, &grant(id, id * 64, 64, 9_000));
    }
    assert_eq!(table.figures().ended, 4);
    for id in 1..=6 {
        assert_eq!(table.begin(&grant(id, id * 64, 64, 9_000)).unwrap_err(), NotOpened::TooOld);
    }
    let fences: Vec<_> = (20..30).map(ReplicaId).collect();
    table.fence(&fences, LogTime(1_000));
    assert_eq!(table.figures().fenced, 4);
    for id in 20..30 {
        assert!(matches!(table.begin(&grant(id, 0, 64, 9_000)), Err(NotOpened::TooOld | NotOpened::Fenced)), "{id}");
    }
}

#[test]
fn a_fence_before_the_write_refuses_it_for_ever() {
    let table = table();
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert_eq!(acknowledged(&table), [1]);
    assert_eq!(table.begin(&grant(1, 0, 64, 9_000)).unwrap_err(), NotOpened::Fenced);
    table.observe(1, LogTime(1_000 + GRANT_LIFETIME_MAX_MS + 1), BootInstant::now());
    table.begin(&grant(2, 0, 64, u64::MAX)).unwrap();
    assert_eq!(table.begin(&grant(1, 64, 64, 9_000)).unwrap_err(), NotOpened::Expired);
}

#[test]
fn an_idle_write_is_fenced_at_once_and_its_extent_is_free() {
    let table = table();
    let write = table.begin(&grant(1, 0, 64, 9_000)).unwrap();
    assert!(write.enter());
    assert!(table.leave(&write));
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert_eq!(acknowledged(&table), [1]);
    assert!(!write.enter());
    let next = table.begin(&grant(2, 0, 64, 9_000)).unwrap();
    assert_eq!(table.finish(&write, End::Stored), End::Aborted);
    assert!(next.enter(), "the fenced write's end touches nothing of the next one's");
    assert_eq!(table.finish(&next, End::Stored), End::Stored);
}

/// W5: fails when `fence` acknowledges a write that is entered (tried: the `plant` of the chaos harness).
#[test]
fn a_fence_waits_for_the_step_in_progress() {
    let table = table();
    let write = table.begin(&grant(1, 0, 64, 9_000)).unwrap();
    assert!(write.enter());
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert!(acknowledged(&table).is_empty(), "acknowledged while bytes were moving");
    assert_eq!(table.begin(&grant(2, 0, 64, 9_000)).unwrap_err(), NotOpened::Overlaps(ReplicaId(1)));
    assert!(!table.leave(&write));
    assert_eq!(acknowledged(&table), [1]);
    assert!(!write.enter());
}

#[test]
fn a_fence_during_the_last_step_aborts_it() {
    let table = table();
    let write = table.begin(&grant(1, 0, 64, 9_000)).unwrap();
    assert!(write.enter());
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert_eq!(table.finish(&write, End::Stored), End::Aborted);
    assert_eq!(acknowledged(&table), [1]);
}

#[test]
fn acknowledgements_are_sent_until_answered() {
    let table = table();
    table.fence(&[ReplicaId(1), ReplicaId(2)], LogTime(1_000));
    assert_eq!(table.take_acknowledgements(7, 1), [1]);
    assert_eq!(table.take_acknowledgements(8, 10), [2]);
    assert!(table.take_acknowledgements(9, 10).is_empty());
    table.acknowledgements_arrived(7);
    table.acknowledgements_lost();
    assert_eq!(table.take_acknowledgements(10, 10), [2], "what no beat's answer covered is sent again");
    table.acknowledgements_arrived(10);
    assert_eq!(table.figures().unacknowledged, 0);
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert_eq!(table.take_acknowledgements(11, 10), [1], "a repeated fence is acknowledged again");
}

/// While no leader is followed nobody knows log time: nothing is refused as expired, and nothing forgotten comes back. Fails when
/// `begin` lets forgotten ids pass (tried).
#[test]
fn without_a_leader_grants_neither_expire_nor_return() {
    let table = table();
    store(&table, &grant(1, 0, 64, 5_000));
    table.observe(1, LogTime(9_000), BootInstant::now());
    store(&table, &grant(2, 64, 64, 60_000));
    assert_eq!(table.begin(&grant(3, 128, 64, 8_000)).unwrap_err(), NotOpened::Expired);
    table.clock().lost();
    table.begin(&grant(3, 128, 64, 8_000)).unwrap();
    assert_eq!(table.begin(&grant(1, 0, 64, 5_000)).unwrap_err(), NotOpened::TooOld);
    assert_eq!(table.begin(&grant(2, 64, 64, 60_000)).unwrap_err(), NotOpened::Ended(End::Stored));
}

/// The leader repeats a fence until its acknowledgement is committed: only the first one hurries a beat, or the two would chase each
/// other. Fails when `fence` always notifies (tried).
#[tokio::test]
async fn a_repeated_fence_waits_for_the_regular_beat() {
    use futures::FutureExt;
    let table = table();
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert!(table.acknowledgement_ready().now_or_never().is_some());
    table.fence(&[ReplicaId(1)], LogTime(1_000));
    assert!(table.acknowledgement_ready().now_or_never().is_none());
    assert_eq!(acknowledged(&table), [1]);
}

#[test]
fn a_verification_keeps_writers_out_while_it_lasts() {
    let table = table();
    let hold = table.hold_for_verification(SegmentId(1), 0, 100).unwrap();
    assert_eq!(table.begin(&grant(1, 64, 64, 9_000)).unwrap_err(), NotOpened::UnderVerification);
    drop(hold);
    let _write = table.begin(&grant(1, 64, 64, 9_000)).unwrap();
    assert!(table.hold_for_verification(SegmentId(1), 0, 100).is_err());
}

#[test]
fn open_writes_have_a_limit() {
    let table = table_with(WriteLimits { open_max: 2, ..WriteLimits::default() });
    let _a = table.begin(&grant(1, 0, 64, 9_000)).unwrap();
    let b = table.begin(&grant(2, 64, 64, 9_000)).unwrap();
    assert_eq!(table.begin(&grant(3, 128, 64, 9_000)).unwrap_err(), NotOpened::TooMany);
    table.finish(&b, End::Aborted);
    table.begin(&grant(3, 128, 64, 9_000)).unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Begin(u64),
    Enter(u64),
    Leave(u64),
    Finish(u64),
    Fence(u64),
    Tick(u64),
    NewLeader(u64),
    Lost,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1u64..20).prop_map(Step::Begin),
        (1u64..20).prop_map(Step::Enter),
        (1u64..20).prop_map(Step::Leave),
        (1u64..20).prop_map(Step::Finish),
        (1u64..20).prop_map(Step::Fence),
        (1u64..3_000).prop_map(Step::Tick),
        (1u64..8_000).prop_map(Step::NewLeader),
        Just(Step::Lost),
    ]
}

proptest! {
    /// Whatever happens: nobody is inside an extent that another is inside of; a replica stores at most once; after its fence was
    /// acknowledged a replica is never inside.
    #[test]
    fn one_writer_whatever_happens(steps in proptest::collection::vec(step(), 1..200)) {
        let table = table_with(WriteLimits { open_max: 8, ended_max: 3, fenced_max: 3, acknowledgements_max: 100 });
        let (mut writes, mut inside) = (HashMap::new(), HashMap::<u64, u64>::new());
        let (mut stored, mut gone) = (std::collections::HashSet::new(), std::collections::HashSet::new());
        let (mut term, mut log_time) = (1, 1_000u64);
        for step in steps {
            match step {
                // A replica id has one extent and one expiry, as a grant does; ids share extents.
                Step::Begin(id) => {
                    if let Ok(write) = table.begin(&grant(id, id % 3 * 100, 100, 2_000 + id * 500)) {
                        prop_assert!(!stored.contains(&id) && !gone.contains(&id), "replica {id} opened again");
                        writes.insert(id, write);
                    }
                }
                Step::Enter(id) => if let Some(write) = writes.get(&id) && !inside.contains_key(&id) && write.enter() {
                    prop_assert!(!gone.contains(&id), "replica {id} entered after its fence was acknowledged");
                    prop_assert!(inside.values().all(|&extent| extent != id % 3), "two writers in extent {}", id % 3);
                    inside.insert(id, id % 3);
                },
                Step::Leave(id) => if inside.remove(&id).is_some() { table.leave(&writes[&id]); },
                Step::Finish(id) => if let Some(write) = writes.remove(&id) {
                    let wanted = if inside.remove(&id).is_some() { End::Stored } else { End::Aborted };
                    if table.finish(&write, wanted) == End::Stored {
                        prop_assert!(stored.insert(id), "replica {id} stored twice");
                    } else {
                        gone.insert(id);
                    }
                },
                Step::Fence(id) => table.fence(&[ReplicaId(id)], LogTime(log_time)),
                Step::Tick(ms) => {
                    log_time += ms;
                    table.observe(term, LogTime(log_time), BootInstant::now());
                }
                Step::Lost => table.clock().lost(),
                Step::NewLeader(back) => {
                    term += 1;
                    log_time = log_time.saturating_sub(back);
                    table.observe(term, LogTime(log_time), BootInstant::now());
                }
            }
            for id in acknowledged(&table) {
                prop_assert!(!inside.contains_key(&id), "fence of {id} acknowledged while inside");
                gone.insert(id);
            }
        }
    }
}

/// What a successor's life waits for: no step of a write, and no look at a range, is left.
#[tokio::test]
async fn a_table_is_quiet_once_every_step_has_ended() {
    let table = table();
    table.quiet().await;
    let inside = table.begin(&grant(1, 0, 64, 9_000)).unwrap();
    let between = table.begin(&grant(2, 64, 64, 9_000)).unwrap();
    let look = table.hold_for_verification(SegmentId(1), 128, 64).unwrap();
    assert!(inside.enter());
    table.abort_all();
    assert!(!between.enter(), "no step begins any more");
    let waiting = tokio::spawn({
        let table = table.clone();
        async move { table.quiet().await }
    });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished() && !table.is_quiet());
    assert!(!table.leave(&inside), "the write is over");
    assert!(!table.is_quiet(), "a range is still looked at");
    drop(look);
    tokio::time::timeout(std::time::Duration::from_secs(60), waiting).await.expect("it is quiet").unwrap();
    assert_eq!(table.finish(&between, End::Stored), End::Aborted);
    // Whoever still holds the table claims nothing: what has become quiet stays so.
    assert_eq!(table.begin(&grant(3, 0, 64, 9_000)).unwrap_err(), NotOpened::Over);
    assert_eq!(table.hold_for_verification(SegmentId(1), 0, 64).err(), Some(NotOpened::Over));
    assert!(table.is_quiet());
}
