//! Crashes, failures and damage on the simulated disk, under the deterministic runtime.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::log::state::{PURGE_STEP, QUEUE_BYTES_MAX};

fn disk() -> SimulatedDisk {
    SimulatedDisk::new(StoreId(1))
}

/// A disk holding entries `0..count` of term 1, all synced, each in a batch of its own.
async fn filled(count: u64) -> SimulatedDisk {
    let disk = disk();
    let (mut store, _) = open_sim(&disk).expect("opens");
    for index in 0..count {
        append(&mut store, vec![entry(1, index)]).await.expect("appends");
    }
    disk
}

#[test]
fn entries_are_readable_before_they_are_durable_and_acknowledged_after() {
    simulate(async {
        let disk = disk();
        disk.set_sync_delay(Duration::from_millis(10));
        let (mut store, _) = open_sim(&disk).expect("opens");
        let answer = submit(&mut store, vec![entry(1, 0), entry(1, 1)]).await.expect("accepted");
        assert_eq!(log_of(&mut store).await, [(1, 0), (1, 1)]);
        assert_eq!(disk.syncs(), 0, "readable although nothing was synced");
        answer.await.expect("answered").expect("durable");
        // Shown to bite: completing a batch before `sync` in the flusher makes this 0.
        assert_eq!(disk.syncs(), 1);
    });
}

#[test]
fn calls_that_queue_up_share_one_sync() {
    simulate(async {
        let disk = disk();
        disk.set_sync_delay(Duration::from_millis(10));
        let (mut store, _) = open_sim(&disk).expect("opens");
        let first = submit(&mut store, vec![entry(1, 0)]).await.expect("accepted");
        Sim::sleep(Duration::from_millis(1)).await;
        let mut answers = Vec::new();
        for index in 1..100 {
            answers.push(submit(&mut store, vec![entry(1, index)]).await.expect("accepted"));
        }
        first.await.expect("answered").expect("durable");
        for answer in answers {
            answer.await.expect("answered").expect("durable");
        }
        assert_eq!(disk.syncs(), 2);
    });
}

/// Tried with a marker that waits for no time at all: fails.
#[test]
fn the_committed_marker_waits_for_company_and_not_for_ever() {
    simulate(async {
        let disk = disk();
        let marker = || disk.state().expect("readable").committed;
        let (mut store, _) = open_sim(&disk).expect("opens");
        append(&mut store, vec![entry(1, 0)]).await.expect("appends");
        store.save_committed(Some(log_id(1, 0))).await.expect("saved");
        Sim::sleep(Duration::from_millis(1)).await;
        assert_eq!(marker(), None, "nobody waits for it");
        append(&mut store, vec![entry(1, 1)]).await.expect("appends");
        let first = marker();
        assert!(first.is_some(), "it goes with what is written next");
        store.save_committed(Some(log_id(1, 1))).await.expect("saved");
        Sim::sleep(Duration::from_millis(100)).await;
        assert_ne!(marker(), first, "and alone after a while");
    });
}

#[test]
fn a_vote_is_durable_when_saved() {
    simulate(async {
        let disk = disk();
        disk.set_sync_delay(Duration::from_millis(10));
        let (mut store, _) = open_sim(&disk).expect("opens");
        let vote = Vote::new(5, 2);
        store.save_vote(&vote).await.expect("saved");
        // Shown to bite: with `Step::Vote` not needing a sync, the vote is lost here.
        let (mut store, report) = open_sim(&disk.crash(0, false)).expect("opens");
        assert_eq!(report.vote, Some(vote));
        assert_eq!(store.read_vote().await.expect("readable"), Some(vote));
    });
}

/// After a failed write or sync: no acknowledgement, one report, every later call refused.
fn poisoned_by(break_disk: impl Fn(&SimulatedDisk) + Send, operation: &'static str) {
    simulate(async move {
        let disk = disk();
        let (options, failures) = options(Flushing::Task, 1 << 20);
        let registry = Registry::new();
        let (mut store, _) =
            LogStore::<Sim>::open(Arc::new(disk.clone()), Path::new("simulated"), options, &registry).expect("opens");
        append(&mut store, vec![entry(1, 0)]).await.expect("healthy");
        break_disk(&disk);
        let caught = submit(&mut store, vec![entry(1, 1)]).await.expect("accepted");
        let behind = submit(&mut store, vec![entry(1, 2)]).await.expect("accepted");
        // Shown to bite: ignoring the result of `sync` in the flusher acknowledges entry 1.
        assert!(caught.await.expect("answered").is_err());
        assert!(behind.await.expect("answered").is_err());
        // The disk works again, and it does not matter.
        let failure = store.failure().expect("ended");
        assert_eq!(failure.operation, operation);
        assert!(submit(&mut store, vec![entry(1, 3)]).await.is_err());
        assert!(store.save_vote(&Vote::new(2, 1)).await.is_err());
        assert!(store.save_committed(Some(log_id(1, 0))).await.is_err());
        assert!(store.truncate_after(None).await.is_err());
        assert!(store.purge(log_id(1, 0)).await.is_err());
        assert!(store.try_get_log_entries(..).await.is_err());
        assert!(store.get_log_state().await.is_err());
        assert_eq!(failures.lock().len(), 1);
        assert_eq!(metric(&registry, "tidepool_raft_log_failed"), 1.0);
        let (mut store, _) = open_sim(&disk.crash(0, false)).expect("opens");
        assert_eq!(log_of(&mut store).await, [(1, 0)]);
    });
}

#[test]
fn a_failed_sync_never_acknowledges() {
    poisoned_by(|disk| disk.fail_next_sync(io::ErrorKind::Other), "sync");
}

#[test]
fn a_failed_write_never_acknowledges() {
    poisoned_by(|disk| disk.fail_next_write(io::ErrorKind::StorageFull), "write");
}

/// F16, F17: whatever part of truncation and overwrite survives, the old end never follows the new one.
#[test]
fn truncate_append_crash_never_resurrects() {
    simulate(async {
        // Steps: synced watermark, truncate, two appends.
        for kept in 0..=4 {
            for torn in [false, true] {
                let disk = filled(10).await;
                disk.set_sync_delay(Duration::from_millis(10));
                let (mut store, _) = open_sim(&disk).expect("opens");
                store.truncate_after(Some(log_id(1, 4))).await.expect("truncates");
                submit(&mut store, vec![entry(2, 5), entry(2, 6)]).await.expect("accepted");
                Sim::sleep(Duration::from_millis(1)).await;
                assert_eq!(disk.pending(), 4);
                let (mut store, _) = open_sim(&disk.crash(kept, torn)).expect("opens");
                let log = log_of(&mut store).await;
                let old: Vec<(u64, u64)> = (0..5).map(|index| (1, index)).collect();
                let expected: &[(u64, u64)] = match kept {
                    0 | 1 => &[(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)],
                    2 => &[],
                    3 => &[(2, 5)],
                    _ => &[(2, 5), (2, 6)],
                };
                // Shown to bite: without `Write::Truncate` in the batch, 7..=9 of term 1 follow 6 of term 2.
                assert_eq!(log, [&old[..], expected].concat(), "kept {kept}, torn {torn}");
            }
        }
    });
}

#[test]
fn a_torn_tail_is_cut_off_and_reported() {
    simulate(async {
        let disk = filled(5).await;
        disk.set_sync_delay(Duration::from_millis(10));
        let (mut store, _) = open_sim(&disk).expect("opens");
        submit(&mut store, vec![entry(1, 5), entry(1, 6)]).await.expect("accepted");
        Sim::sleep(Duration::from_millis(1)).await;
        let disk = disk.crash(2, true);
        let (mut store, report) = open_sim(&disk).expect("opens");
        let torn = report.torn_tail.expect("reported");
        assert_eq!((torn.from, torn.entries), (6, 1));
        assert_eq!(log_of(&mut store).await, (0..6).map(|index| (1, index)).collect::<Vec<_>>());
        assert_eq!(disk.indexes(), [0, 1, 2, 3, 4, 5]);
        append(&mut store, vec![entry(2, 6)]).await.expect("the log goes on");
    });
}

fn refused(disk: &SimulatedDisk, at: u64) -> String {
    match open_sim(disk) {
        Err(OpenLogError::StorageCorrupt { index, detail, .. }) => {
            assert_eq!(index, at, "{detail}");
            detail
        }
        other => panic!("opened or failed otherwise: {other:?}"),
    }
}

#[test]
fn damage_in_the_middle_refuses_and_names_the_index() {
    simulate(async {
        for bit in 0..400 {
            let disk = filled(6).await;
            disk.flip_bit(3, bit);
            refused(&disk, 3);
        }
        let disk = filled(6).await;
        disk.lose(2);
        // Shown to bite: without the comparison with `expected` in `recover` the hole opens.
        assert!(refused(&disk, 2).contains("missing, while entry 3 exists"));
    });
}

/// The last entry is below the watermark that a later batch stored: no crash explains its damage or loss.
#[test]
fn damage_of_a_synced_last_entry_refuses() {
    simulate(async {
        for lose in [false, true] {
            let disk = filled(6).await;
            let (mut store, _) = open_sim(&disk).expect("opens");
            store.save_vote(&Vote::new(2, 1)).await.expect("saved");
            if lose {
                disk.lose(5);
            } else {
                disk.flip_bit(5, 100);
            }
            let found = disk.indexes();
            // Shown to bite: without the comparisons with `synced` in `recover` entry 5 is cut off.
            refused(&disk, 5);
            assert_eq!(disk.indexes(), found, "a refused disk is left as it was found");
        }
    });
}

#[test]
fn a_term_below_the_entry_before_refuses() {
    simulate(async {
        let disk = disk();
        let (mut store, _) = open_sim(&disk).expect("opens");
        append(&mut store, vec![entry(2, 0), entry(1, 1), entry(2, 2)]).await.expect("appends");
        assert!(refused(&disk, 1).contains("its term 1 is below 2"));
    });
}

#[test]
fn an_append_that_leaves_a_hole_is_refused() {
    simulate(async {
        let (mut store, _) = open_sim(&disk()).expect("opens");
        append(&mut store, vec![entry(1, 0)]).await.expect("appends");
        let error = append(&mut store, vec![entry(1, 2)]).await.expect_err("refused");
        assert!(error.to_string().contains("append at index 2 where 1 is next"), "{error}");
        assert!(store.failure().is_none(), "a caller's error is not the disk's");
    });
}

#[test]
fn an_entry_too_long_to_be_read_again_is_refused() {
    simulate(async {
        let (mut store, _) = open_sim(&disk()).expect("opens");
        let longest = crate::types::PAYLOAD_BYTES_MAX;
        append(&mut store, vec![sized_entry(1, 0, longest)]).await.expect("appends");
        let error = append(&mut store, vec![sized_entry(1, 1, longest + 1)]).await.expect_err("refused");
        assert!(error.to_string().contains("the limit is"), "{error}");
    });
}

#[test]
fn purged_entries_leave_the_disk_in_steps() {
    simulate(async {
        let disk = disk();
        let (mut store, _) = open_sim(&disk).expect("opens");
        append(&mut store, (0..3000).map(|index| entry(1, index)).collect()).await.expect("appends");
        store.purge(log_id(1, PURGE_STEP - 2)).await.expect("purges");
        store.save_vote(&Vote::new(1, 1)).await.expect("saved");
        assert_eq!(disk.indexes().len(), 3000, "below one step nothing is removed");
        assert_eq!(log_of(&mut store).await.first(), Some(&(1, PURGE_STEP - 1)));
        store.purge(log_id(1, PURGE_STEP + 10)).await.expect("purges");
        store.save_vote(&Vote::new(1, 1)).await.expect("saved");
        assert_eq!(disk.indexes().first(), Some(&(PURGE_STEP + 11)));
        let (mut store, report) = open_sim(&disk.crash(0, false)).expect("opens");
        assert_eq!(report.purged, Some(log_id(1, PURGE_STEP + 10)));
        let state = store.get_log_state().await.expect("readable");
        assert_eq!(state.last_purged_log_id, Some(log_id(1, PURGE_STEP + 10)));
        assert_eq!(state.last_log_id, Some(log_id(1, 2999)));
    });
}

/// A follower that installs a snapshot: the log jumps ahead and goes on from there.
#[test]
fn purging_beyond_the_end_restarts_the_log() {
    simulate(async {
        let disk = filled(10).await;
        let (mut store, _) = open_sim(&disk).expect("opens");
        store.purge(log_id(3, 500)).await.expect("purges");
        append(&mut store, vec![entry(3, 501)]).await.expect("follows the snapshot");
        assert_eq!(disk.indexes(), [501]);
        let (mut store, report) = open_sim(&disk.crash(0, false)).expect("opens");
        assert_eq!((report.entries, report.purged), (1, Some(log_id(3, 500))));
        assert_eq!(log_of(&mut store).await, [(3, 501)]);
    });
}

#[test]
fn the_cache_is_bounded_and_older_entries_come_from_disk() {
    simulate(async {
        let disk = disk();
        let (options, _) = options(Flushing::Task, 64 << 10);
        let registry = Registry::new();
        let (mut store, _) =
            LogStore::<Sim>::open(Arc::new(disk.clone()), Path::new("simulated"), options, &registry).expect("opens");
        for index in 0..200 {
            append(&mut store, vec![sized_entry(1, index, 4096)]).await.expect("appends");
        }
        // Shown to bite: without `evict` all 800 KiB stay.
        assert!(metric(&registry, "tidepool_raft_log_cached_bytes") <= f64::from(64 << 10));
        let all = store.try_get_log_entries(..).await.expect("readable");
        assert_eq!(all, (0..200).map(|index| sized_entry(1, index, 4096)).collect::<Vec<_>>());
        assert!(metric(&registry, "tidepool_raft_log_disk_read_entries_total") >= 180.0);
    });
}

/// An entry of a later program at the very end is no torn write.
#[test]
fn an_entry_of_a_newer_version_refuses() {
    simulate(async {
        let disk = filled(3).await;
        let mut frame = crate::codec::encode(&entry(1, 3)).to_vec();
        frame[0] = crate::codec::CODEC_VERSION + 1;
        disk.write(&[Write::Append { index: 3, frame: Bytes::from(frame) }]).expect("writes");
        assert!(refused(&disk, 3).contains("upgrade this node"));
    });
}

#[test]
fn a_limited_read_is_limited_and_never_empty() {
    simulate(async {
        let disk = disk();
        let (mut store, _) = open_sim(&disk).expect("opens");
        for index in 0..12 {
            append(&mut store, vec![sized_entry(1, index, 1 << 20)]).await.expect("appends");
        }
        // From disk, then from memory.
        for start in [0, 11] {
            let some = store.limited_get_log_entries(start, 12).await.expect("readable");
            assert_eq!(some.first().map(|entry| entry.log_id.index), Some(start));
            assert!(some.len() <= 5, "{} entries of 1 MiB in a read of 4 MiB", some.len());
        }
    });
}

#[test]
fn appends_wait_while_the_queue_is_full() {
    simulate(async {
        let disk = disk();
        disk.set_sync_delay(Duration::from_secs(1));
        let (mut store, _) = open_sim(&disk).expect("opens");
        let payload = 8 << 20;
        let fit = (QUEUE_BYTES_MAX / payload) as u64;
        for index in 0..fit {
            let accepted =
                Sim::timeout(Duration::from_millis(1), submit(&mut store, vec![sized_entry(1, index, payload)]));
            accepted.await.expect("accepted at once").expect("accepted");
        }
        let waits = submit(&mut store, vec![sized_entry(1, fit, payload)]);
        // Shown to bite: without `has_room` this is accepted at once.
        assert!(Sim::timeout(Duration::from_millis(1), waits).await.is_err());
        let later = append(&mut store, vec![sized_entry(1, fit, payload)]);
        Sim::timeout(Duration::from_secs(60), later).await.expect("room comes").expect("appends");
    });
}

#[derive(Clone, Debug)]
enum Op {
    Append(u8),
    Truncate(u8),
    Vote,
    Purge(u8),
    Sync,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (1..5u8).prop_map(Op::Append),
        2 => any::<u8>().prop_map(Op::Truncate),
        1 => Just(Op::Vote),
        1 => any::<u8>().prop_map(Op::Purge),
        2 => Just(Op::Sync),
    ];
    proptest::collection::vec(op, 1..40)
}

/// What the log should be: one of these for every step of the ordered stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Model {
    log: Vec<(u64, u64)>,
    purged: Option<(u64, u64)>,
    vote: Option<u64>,
}

async fn observe(store: &mut LogStore<Sim>) -> Model {
    let state = store.get_log_state().await.expect("readable");
    Model {
        log: log_of(store).await,
        purged: state.last_purged_log_id.map(|id| (term_of(&id), id.index)),
        vote: store.read_vote().await.expect("readable").map(|vote| vote.leader_id.term),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Any history, cut anywhere: the log found is the log after some step, none before the last acknowledged.
    #[test]
    fn a_crash_leaves_a_prefix_that_holds_everything_acknowledged(
        ops in ops(), kept in any::<prop::sample::Index>(), torn in any::<bool>(),
    ) {
        let (found, states, acknowledged) = simulate(async move {
            let disk = disk();
            let (mut store, _) = open_sim(&disk).expect("opens");
            let (mut model, mut states, mut acknowledged) = (Model::default(), vec![Model::default()], 0);
            let (mut term, mut next) = (1, 0);
            for op in ops {
                // Nothing is synced but where the history says so.
                disk.set_sync_delay(Duration::from_secs(1000));
                match op {
                    Op::Append(count) => {
                        let entries: Vec<Entry> = (next..next + u64::from(count)).map(|i| entry(term, i)).collect();
                        next += u64::from(count);
                        for entry in &entries {
                            model.log.push((term, entry.log_id.index));
                            states.push(model.clone());
                        }
                        submit(&mut store, entries).await.expect("accepted");
                    }
                    Op::Truncate(pick) => {
                        let Some(keep) = (!model.log.is_empty()).then(|| usize::from(pick) % model.log.len()) else { continue };
                        let Some(&(kept_term, kept_index)) = model.log.get(keep) else { continue };
                        store.truncate_after(Some(log_id(kept_term, kept_index))).await.expect("truncates");
                        model.log.truncate(keep + 1);
                        next = kept_index + 1;
                        term += 1;
                        states.push(model.clone());
                    }
                    Op::Vote => {
                        term += 1;
                        model.vote = Some(term);
                        states.push(model.clone());
                        disk.set_sync_delay(Duration::ZERO);
                        store.save_vote(&Vote::new(term, 1)).await.expect("saved");
                        acknowledged = states.len() - 1;
                    }
                    Op::Purge(pick) => {
                        if model.log.is_empty() { continue }
                        let (purged_term, index) = model.log[usize::from(pick) % model.log.len()];
                        store.purge(log_id(purged_term, index)).await.expect("purges");
                        model.log.retain(|(_, i)| *i > index);
                        model.purged = Some((purged_term, index));
                        states.push(model.clone());
                    }
                    Op::Sync => {
                        disk.set_sync_delay(Duration::ZERO);
                        append(&mut store, vec![entry(term, next)]).await.expect("appends");
                        model.log.push((term, next));
                        next += 1;
                        states.push(model.clone());
                        acknowledged = states.len() - 1;
                    }
                }
                assert_eq!(observe(&mut store).await, model);
            }
            Sim::sleep(Duration::from_millis(1)).await;
            let after = disk.crash(kept.index(disk.pending() + 1), torn);
            let (mut store, _) = open_sim(&after).expect("opens");
            (observe(&mut store).await, states, acknowledged)
        });
        prop_assert!(states[acknowledged..].contains(&found), "found {:?}, not in {:?}", found, &states[acknowledged..]);
    }
}
