//! The store on RocksDB: kills, power cuts, damaged files, purging.

use std::fs::{self, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;
use crate::log::state::PURGE_STEP;
use crate::types::TokioConfig;

type Tokio = TokioConfig<()>;
type Store = LogStore<Tokio>;

const CACHE_BYTES: usize = 1 << 20;

fn open(path: &Path) -> Result<(Store, OpenReport), OpenLogError> {
    let (options, _) = options(Flushing::Thread, CACHE_BYTES);
    LogStore::open_rocks(path, options, &Registry::new())
}

/// A copy of a store's directory as it is on disk now: what a process started after `kill -9` of its owner finds.
fn killed(path: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("temporary directory");
    fs::create_dir(copy.path().join("db")).expect("creates");
    for folder in ["", "db"] {
        for item in fs::read_dir(path.join(folder)).expect("lists") {
            let item = item.expect("lists");
            if item.file_type().expect("has a type").is_file() {
                fs::copy(item.path(), copy.path().join(folder).join(item.file_name())).expect("copies");
            }
        }
    }
    copy
}

/// The files of the database with a suffix, oldest first.
fn files(path: &Path, suffix: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(path.join("db")).expect("lists").map(|item| item.expect("lists").path());
    let mut files: Vec<PathBuf> = all.filter(|file| file.to_string_lossy().ends_with(suffix)).collect();
    files.sort();
    files
}

fn newest_wal(path: &Path) -> PathBuf {
    files(path, ".log").pop().expect("has a write-ahead log")
}

/// A store with entries in `range`, each synced by itself, and its directory.
async fn filled(range: Range<u64>, bytes: usize) -> (tempfile::TempDir, Store) {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (mut store, _) = open(directory.path()).expect("opens");
    for index in range {
        append(&mut store, vec![sized_entry(1, index, bytes)]).await.expect("appends");
    }
    (directory, store)
}

#[tokio::test]
async fn a_kill_keeps_everything_acknowledged() {
    let (directory, mut store) = filled(0..50, 100).await;
    let vote = Vote::new_committed(3, 2);
    store.save_vote(&vote).await.expect("saved");
    store.save_committed(Some(log_id(1, 40))).await.expect("queued");
    store.truncate_after(Some(log_id(1, 44))).await.expect("truncates");
    store.purge(log_id(1, 9)).await.expect("purges");
    append(&mut store, vec![entry(3, 45)]).await.expect("appends");
    let copy = killed(directory.path());
    let (mut again, report) = open(copy.path()).expect("opens");
    assert_eq!(again.store_id(), store.store_id());
    assert_eq!(report.vote, Some(vote));
    assert_eq!(report.committed, Some(log_id(1, 40)));
    assert_eq!(report.purged, Some(log_id(1, 9)));
    assert_eq!(report.last, Some(log_id(3, 45)));
    assert_eq!(report.torn_tail, None);
    assert!(!report.is_pristine());
    let expected: Vec<(u64, u64)> = (10..45).map(|index| (1, index)).chain([(3, 45)]).collect();
    assert_eq!(log_of(&mut again).await, expected);
    drop(again);
    let (mut again, _) = open(copy.path()).expect("opens again after closing");
    assert_eq!(log_of(&mut again).await, expected);
}

#[tokio::test]
async fn truncation_and_overwrite_survive_a_kill_in_order() {
    let (directory, mut store) = filled(0..10, 100).await;
    store.truncate_after(Some(log_id(1, 4))).await.expect("truncates");
    append(&mut store, vec![entry(2, 5), entry(2, 6)]).await.expect("appends");
    let (mut again, _) = open(killed(directory.path()).path()).expect("opens");
    let expected: Vec<(u64, u64)> = (0..5).map(|index| (1, index)).chain([(2, 5), (2, 6)]).collect();
    // Shown to bite: without the delete_range of `Write::Truncate` the open refuses, 7 of term 1 follows term 2.
    assert_eq!(log_of(&mut again).await, expected);
}

/// The file ends inside the last batch: a power cut before its sync.
#[tokio::test]
async fn a_torn_end_of_the_wal_is_cut_off_and_reported() {
    let (directory, _store) = filled(0..20, 100).await;
    for lost in [1, 5, 60] {
        let copy = killed(directory.path());
        let wal = OpenOptions::new().write(true).open(newest_wal(copy.path())).expect("opens");
        let length = wal.metadata().expect("has a length").len();
        wal.set_len(length - lost).expect("shortens");
        let (mut again, report) = open(copy.path()).expect("opens");
        assert_eq!(log_of(&mut again).await, (0..19).map(|index| (1, index)).collect::<Vec<_>>());
        let torn = report.torn_tail.expect("reported");
        assert_eq!(torn.from, 19);
        assert!(torn.detail.contains("unfinished record"), "{}", torn.detail);
        append(&mut again, vec![entry(2, 19)]).await.expect("the log goes on");
        drop(again);
        let (_, report) = open(copy.path()).expect("opens");
        assert_eq!((report.last, report.torn_tail), (Some(log_id(2, 19)), None));
    }
}

/// The file has its length, its last pages were never written: a power cut on a file system that allocates late.
#[tokio::test]
async fn a_wal_that_ends_in_unwritten_pages_is_cut_off_and_reported() {
    for bytes in [20 << 10, 100 << 10] {
        let (directory, _store) = filled(0..4, bytes).await;
        let copy = killed(directory.path());
        let path = newest_wal(copy.path());
        let wal = OpenOptions::new().write(true).open(&path).expect("opens");
        let length = wal.metadata().expect("has a length").len();
        let from = (length - 8000).next_multiple_of(4096);
        wal.write_all_at(&vec![0; (length - from) as usize], from).expect("zeroes");
        // Shown to bite: without `wal::cut` RocksDB refuses the first of these, "checksum mismatch".
        let (mut again, report) = open(copy.path()).expect("opens");
        assert_eq!(log_of(&mut again).await, [(1, 0), (1, 1), (1, 2)]);
        assert_eq!(report.torn_tail.expect("reported").from, 3);
    }
}

#[tokio::test]
async fn a_flipped_bit_in_the_wal_refuses() {
    let (directory, _store) = filled(0..40, 500).await;
    let length = fs::metadata(newest_wal(directory.path())).expect("has a length").len();
    for at in (100..length - 1000).step_by(997) {
        let copy = killed(directory.path());
        let wal = OpenOptions::new().read(true).write(true).open(newest_wal(copy.path())).expect("opens");
        let mut byte = [0];
        wal.read_exact_at(&mut byte, at).expect("reads");
        wal.write_all_at(&[byte[0] ^ 0x10], at).expect("writes");
        match open(copy.path()) {
            Err(OpenLogError::DatabaseCorrupt { detail, .. }) => assert!(!detail.is_empty()),
            other => panic!("byte {at}: opened or failed otherwise: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_flipped_bit_in_a_table_file_refuses_and_names_the_index() {
    let (directory, store) = filled(0..40, 500).await;
    drop(store);
    let disk = RocksDisk::open(directory.path()).expect("opens");
    disk.flush_tables().expect("flushes");
    drop(disk);
    let table = files(directory.path(), ".sst").into_iter().max_by_key(|file| fs::metadata(file).map(|m| m.len()).ok());
    let table = OpenOptions::new().read(true).write(true).open(table.expect("has a table")).expect("opens");
    let mut byte = [0];
    table.read_exact_at(&mut byte, 9000).expect("reads");
    table.write_all_at(&[byte[0] ^ 1], 9000).expect("writes");
    match open(directory.path()) {
        Err(OpenLogError::StorageCorrupt { index, detail, .. }) => {
            assert!((1..40).contains(&index), "{index}: {detail}");
        }
        other => panic!("opened or failed otherwise: {other:?}"),
    }
}

/// Damage that RocksDB cannot see, because it was stored that way: only our own checksum and order find it.
#[tokio::test]
async fn a_hole_or_a_bad_entry_refuses_and_names_the_index() {
    let hole = Write::Truncate(7..8);
    let mut frame = crate::codec::encode(&entry(1, 7)).to_vec();
    frame[10] ^= 1;
    let bad = Write::Append { index: 7, frame: Bytes::from(frame.clone()) };
    let displaced = Write::Append { index: 7, frame: crate::codec::encode(&entry(1, 8)) };
    let last = Write::Append { index: 20, frame: Bytes::from(frame) };
    for (damage, at) in [(hole, 7), (bad, 7), (displaced, 7), (last, 20)] {
        let (directory, store) = filled(0..20, 100).await;
        drop(store);
        let disk = RocksDisk::open(directory.path()).expect("opens");
        disk.write(std::slice::from_ref(&damage)).expect("writes");
        drop(disk);
        match open(directory.path()) {
            // Batches are atomic here. Shown to bite: without `tears` in `recover` the bad last entry is cut off.
            Err(OpenLogError::StorageCorrupt { index, .. }) => assert_eq!(index, at, "{damage:?}"),
            other => panic!("{damage:?}: opened or failed otherwise: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_newer_format_another_store_and_a_lost_database_are_refused() {
    let (directory, store) = filled(0..3, 100).await;
    drop(store);
    let name = directory.path().join("STORE");
    let text = fs::read_to_string(&name).expect("reads");
    fs::write(&name, text.replace("format: 1", "format: 2")).expect("writes");
    assert!(matches!(open(directory.path()), Err(OpenLogError::NewerFormat { found: 2, known: 1, .. })));
    fs::write(&name, text.replace("store: ", "store: 0")).expect("writes");
    assert!(matches!(open(directory.path()), Err(OpenLogError::NotAStore { .. })));
    let (other, other_store) = filled(0..3, 100).await;
    drop(other_store);
    fs::copy(other.path().join("STORE"), &name).expect("copies");
    assert!(matches!(open(directory.path()), Err(OpenLogError::NotAStore { .. })));
    // Created anew it would let a wiped member vote again. Two guards: the missing file, and the name inside.
    fs::write(&name, &text).expect("writes");
    fs::remove_dir_all(directory.path().join("db")).expect("removes");
    assert!(matches!(open(directory.path()), Err(OpenLogError::NotAStore { .. })));
    // The other way round: a log that lost its name.
    fs::remove_file(other.path().join("STORE")).expect("removes");
    assert!(matches!(open(other.path()), Err(OpenLogError::NotAStore { .. })));
}

#[tokio::test]
async fn a_creation_cut_short_is_finished() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (store, report) = open(directory.path()).expect("opens");
    assert!(report.is_pristine());
    let id = store.store_id();
    drop(store);
    fs::remove_file(directory.path().join("STORE")).expect("removes");
    let (store, _) = open(directory.path()).expect("opens");
    assert_eq!(store.store_id(), id);
}

#[tokio::test]
async fn two_processes_cannot_open_one_store() {
    let (directory, _store) = filled(0..1, 10).await;
    assert!(matches!(open(directory.path()), Err(OpenLogError::InUse { .. })));
}

fn size(path: &Path) -> u64 {
    let items = fs::read_dir(path.join("db")).expect("lists").map(|item| item.expect("lists"));
    items.map(|item| item.metadata().map(|metadata| metadata.len()).unwrap_or(0)).sum()
}

/// 10^5 entries of 2 KiB pass through; at most 4096 are kept. Disk use stays near what RocksDB's buffers allow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purging_keeps_the_disk_bounded() {
    let directory = tempfile::tempdir().expect("temporary directory");
    let (options, _) = options(Flushing::Thread, CACHE_BYTES);
    let registry = Registry::new();
    let (mut store, _) = Store::open_rocks(directory.path(), options, &registry).expect("opens");
    let mut most = 0;
    for step in 0..100u64 {
        let entries = (step * 1000..(step + 1) * 1000).map(|index| sized_entry(1, index, 2048)).collect();
        append(&mut store, entries).await.expect("appends");
        if let Some(upto) = ((step + 1) * 1000).checked_sub(4096 + 1) {
            store.purge(log_id(1, upto)).await.expect("purges");
        }
        most = most.max(size(directory.path()));
    }
    store.save_vote(&Vote::new(1, 1)).await.expect("saved");
    // 200 MiB were written. Shown to bite: without delete_range and reclaim all of it is there at the end.
    assert!(most < 200 << 20, "{} MiB at most", most >> 20);
    assert!(size(directory.path()) < 140 << 20, "{} MiB at the end", size(directory.path()) >> 20);
    assert!(metric(&registry, "tidepool_raft_log_cached_bytes") <= CACHE_BYTES as f64);
    assert_eq!(metric(&registry, "tidepool_raft_log_appended_entries_total"), 100_000.0);
    let kept = store.try_get_log_entries(..).await.expect("readable");
    assert_eq!(kept.len(), 4096);
    drop(store);
    let (_, report) = open(directory.path()).expect("opens");
    assert!(report.entries <= 4096 + PURGE_STEP);
    assert_eq!(report.last, Some(log_id(1, 99_999)));
}

/// Not a check: prints what this machine's disk gives. `cargo nextest run --run-ignored only --no-capture figures`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn figures_of_group_commit() {
    for (callers, bytes) in [(1, 64), (64, 64), (1024, 64), (64, 8192), (256, 8192)] {
        let directory = tempfile::tempdir().expect("temporary directory");
        let (options, _) = options(Flushing::Thread, 64 << 20);
        let registry = Registry::new();
        let (mut store, _) = Store::open_rocks(directory.path(), options, &registry).expect("opens");
        let mut waiting = std::collections::VecDeque::new();
        let started = std::time::Instant::now();
        let mut index = 0;
        while started.elapsed().as_secs() < 3 {
            waiting.push_back(submit(&mut store, vec![sized_entry(1, index, bytes)]).await.expect("accepted"));
            index += 1;
            if waiting.len() >= callers {
                waiting.pop_front().expect("one").await.expect("answered").expect("durable");
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        let syncs = metric(&registry, "tidepool_raft_log_fsync_seconds");
        println!(
            "{callers:5} in flight, {bytes:5} bytes: {:9.0} entries/s, {:6.1} entries a sync, {:6.0} syncs/s",
            index as f64 / seconds,
            index as f64 / syncs,
            syncs / seconds,
        );
        drop(store);
        let started = std::time::Instant::now();
        let (_, report) = open(directory.path()).expect("opens");
        let bytes = report.bytes as f64;
        println!("      opened {} entries, {:.0} MB verified, in {:?}", report.entries, bytes / 1e6, started.elapsed());
    }
}
