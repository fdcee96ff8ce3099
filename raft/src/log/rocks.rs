//! The RocksDB disk: entries in one column family, markers in the default one, both behind one write-ahead log.
//!
//! A batch is one RocksDB write, atomic and checksummed in its log: a crash leaves whole batches. Only the flusher
//! writes, and only it syncs, so a sync covers exactly what was written before it.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rocksdb::{
    ColumnFamilyDescriptor, DB, DBCompressionType, DBRecoveryMode, ErrorKind, LogLevel, Options, ReadOptions,
    WriteBatch, WriteOptions,
};

use super::directory;
use super::disk::{Disk, StoreId, StoredState, Write};
use super::error::OpenLogError;
use super::wal;

const ENTRIES: &str = "entries";

const VOTE: &[u8] = b"vote";
const COMMITTED: &[u8] = b"committed";
const PURGED: &[u8] = b"purged";
const SYNCED: &[u8] = b"synced";
const DELETED: &[u8] = b"deleted";
const STORE: &[u8] = b"store";

/// Entries gather in memory up to this before they become a table file.
const MEMTABLE_BYTES: usize = 32 << 20;
/// Markers change in place: their memtable never fills, so it is what keeps old write-ahead logs alive. Above this
/// total RocksDB flushes it and drops them.
const WAL_BYTES_MAX: u64 = 96 << 20;

/// A log on RocksDB.
pub struct RocksDisk {
    db: DB,
    store_id: StoreId,
    torn: Option<String>,
}

impl RocksDisk {
    /// Opens the store at `path`, creating it if there is none.
    pub fn open(path: &Path) -> Result<RocksDisk, OpenLogError> {
        let io_error = |error: io::Error| OpenLogError::Io { path: path.to_owned(), error };
        let not_a_store = |detail: String| OpenLogError::NotAStore { path: path.to_owned(), detail };
        let published = directory::read(path)?;
        let database = directory::database(path);
        if published.is_some() && !database.join("CURRENT").exists() {
            return Err(not_a_store(format!("its database {} is gone", database.display())));
        }
        std::fs::create_dir_all(&database).map_err(io_error)?;
        let torn = wal::examine(&database).map_err(io_error)?;
        if let Some(torn) = torn.as_ref().filter(|torn| torn.zeros) {
            wal::cut(torn).map_err(io_error)?;
        }
        let db = open_database(&database, published.is_none()).map_err(|error| {
            let (path, kind, detail) = (path.to_owned(), error.kind(), error.into_string());
            match kind {
                ErrorKind::Corruption => OpenLogError::DatabaseCorrupt { path, detail },
                ErrorKind::IOError if detail.contains("lock ") => OpenLogError::InUse { path },
                _ => OpenLogError::Io { path, error: io::Error::other(detail) },
            }
        })?;
        let torn = torn.map(|torn| torn.describe());
        let mut disk = RocksDisk { db, store_id: StoreId(0), torn };
        let stored = disk.get(STORE).map_err(io_error)?.map(|bytes| {
            let array: Result<[u8; 16], _> = bytes.as_ref().try_into();
            array.map(|array| StoreId(u128::from_be_bytes(array)))
        });
        disk.store_id = match (published, stored) {
            (_, Some(Err(_))) => return Err(not_a_store("the store id in its database is damaged".to_owned())),
            (Some(published), Some(Ok(stored))) if published == stored => stored,
            (Some(published), Some(Ok(stored))) => {
                return Err(not_a_store(format!("it is named {published}, its database belongs to {stored}")));
            }
            (Some(published), None) => {
                return Err(not_a_store(format!("it is named {published}, its database has no name")));
            }
            // The identity file is the last step of creation: without it nothing was ever stored.
            (None, stored) => disk
                .create(path, stored.and_then(Result::ok))
                .map_err(io_error)?
                .ok_or_else(|| not_a_store("its identity file is gone while its database holds a log".to_owned()))?,
        };
        Ok(disk)
    }

    /// Names a new store, or finishes naming one whose creation was cut short. `None` if it holds a log already.
    fn create(&self, path: &Path, begun: Option<StoreId>) -> io::Result<Option<StoreId>> {
        let mut used = self.state()? != StoredState::default();
        let seen = self.scan(0, &mut |_, _| {
            used = true;
            Err(io::Error::other("one is enough"))
        });
        if used {
            return Ok(None);
        }
        seen?;
        let id = match begun {
            Some(id) => id,
            None => {
                let id = StoreId::random();
                let mut synced = WriteOptions::default();
                synced.set_sync(true);
                self.db.put_opt(STORE, id.0.to_be_bytes(), &synced).map_err(failed)?;
                id
            }
        };
        directory::write(path, id)?;
        Ok(Some(id))
    }

    fn entries(&self) -> io::Result<&rocksdb::ColumnFamily> {
        self.db.cf_handle(ENTRIES).ok_or_else(|| io::Error::other("the entries column family is gone"))
    }

    fn get(&self, key: &[u8]) -> io::Result<Option<Bytes>> {
        Ok(self.db.get(key).map_err(failed)?.map(Bytes::from))
    }

    fn get_index(&self, key: &[u8]) -> io::Result<u64> {
        let Some(bytes) = self.get(key)? else { return Ok(0) };
        let array: [u8; 8] = bytes.as_ref().try_into().map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidData, format!("marker '{}' is damaged", key.escape_ascii()))
        })?;
        Ok(u64::from_be_bytes(array))
    }

    /// Calls `visit` with the entries of a range until it says stop.
    fn walk(&self, range: Range<u64>, visit: &mut dyn FnMut(u64, &[u8]) -> io::Result<bool>) -> io::Result<()> {
        let mut options = ReadOptions::default();
        // Never from the beginning: purged entries leave tombstones there.
        options.set_iterate_lower_bound(range.start.to_be_bytes());
        options.set_iterate_upper_bound(range.end.to_be_bytes());
        options.fill_cache(false);
        let mut iterator = self.db.raw_iterator_cf_opt(self.entries()?, options);
        iterator.seek_to_first();
        while let Some((key, value)) = iterator.item() {
            let key: [u8; 8] = key.try_into().map_err(|_| {
                io::Error::new(io::ErrorKind::InvalidData, format!("key '{}' is no index", key.escape_ascii()))
            })?;
            if !visit(u64::from_be_bytes(key), value)? {
                return Ok(());
            }
            iterator.next();
        }
        iterator.status().map_err(failed)
    }

    /// Turns memtables into table files now.
    pub fn flush_tables(&self) -> io::Result<()> {
        self.db.flush_cf(self.entries()?).map_err(failed)
    }

    /// Bytes of table files and memtables of entries, about.
    pub fn entry_bytes(&self) -> io::Result<u64> {
        let entries = self.entries()?;
        let property = |name: &str| self.db.property_int_value_cf(entries, name).map_err(failed);
        let files = property("rocksdb.total-sst-files-size")?.unwrap_or(0);
        Ok(files + property("rocksdb.cur-size-all-mem-tables")?.unwrap_or(0))
    }
}

fn failed(error: rocksdb::Error) -> io::Error {
    let kind = match error.kind() {
        ErrorKind::Corruption => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error.into_string())
}

fn open_database(path: &PathBuf, create: bool) -> Result<DB, rocksdb::Error> {
    let mut options = Options::default();
    options.create_if_missing(create);
    options.create_missing_column_families(create);
    // A torn end of the write-ahead log is what a crash leaves; damage before it refuses to open. The manifest
    // knows which logs exist, so a missing or shortened closed one is found too.
    options.set_wal_recovery_mode(DBRecoveryMode::TolerateCorruptedTailRecords);
    options.set_track_and_verify_wals_in_manifest(true);
    options.set_paranoid_checks(true);
    options.set_max_total_wal_size(WAL_BYTES_MAX);
    options.set_max_background_jobs(2);
    options.set_max_open_files(256);
    options.set_keep_log_file_num(4);
    options.set_log_level(LogLevel::Warn);
    options.set_stats_dump_period_sec(0);

    let mut entries = Options::default();
    entries.set_write_buffer_size(MEMTABLE_BYTES);
    entries.set_max_write_buffer_number(4);
    entries.set_compression_type(DBCompressionType::None);
    entries.set_level_zero_file_num_compaction_trigger(2);
    let mut markers = Options::default();
    markers.set_write_buffer_size(1 << 20);
    markers.set_compression_type(DBCompressionType::None);

    let families = [
        ColumnFamilyDescriptor::new(rocksdb::DEFAULT_COLUMN_FAMILY_NAME, markers),
        ColumnFamilyDescriptor::new(ENTRIES, entries),
    ];
    DB::open_cf_descriptors(&options, path, families)
}

impl Disk for RocksDisk {
    fn store_id(&self) -> StoreId {
        self.store_id
    }

    fn write(&self, batch: &[Write]) -> io::Result<()> {
        let entries = self.entries()?;
        let mut writes = WriteBatch::default();
        for write in batch {
            match write {
                Write::Append { index, frame } => writes.put_cf(entries, index.to_be_bytes(), frame),
                Write::Truncate(range) => {
                    writes.delete_range_cf(entries, range.start.to_be_bytes(), range.end.to_be_bytes());
                }
                Write::Vote(frame) => writes.put(VOTE, frame),
                Write::Committed(frame) => writes.put(COMMITTED, frame),
                Write::Synced(index) => writes.put(SYNCED, index.to_be_bytes()),
                Write::Purge { purged, delete } => {
                    writes.put(PURGED, purged);
                    if !delete.is_empty() {
                        writes.delete_range_cf(entries, delete.start.to_be_bytes(), delete.end.to_be_bytes());
                        writes.put(DELETED, delete.end.to_be_bytes());
                    }
                }
            }
        }
        self.db.write_opt(writes, &WriteOptions::default()).map_err(failed)
    }

    fn sync(&self) -> io::Result<()> {
        self.db.flush_wal(true).map_err(failed)
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>> {
        let mut frames = Vec::new();
        let mut bytes = 0;
        self.walk(range, &mut |index, value| {
            bytes += value.len();
            frames.push((index, Bytes::copy_from_slice(value)));
            Ok(bytes < bytes_max)
        })?;
        Ok(frames)
    }

    fn scan(&self, from: u64, visit: &mut dyn FnMut(u64, Bytes) -> io::Result<()>) -> io::Result<()> {
        self.walk(from..u64::MAX, &mut |index, value| {
            visit(index, Bytes::copy_from_slice(value))?;
            Ok(true)
        })
    }

    fn state(&self) -> io::Result<StoredState> {
        Ok(StoredState {
            vote: self.get(VOTE)?,
            committed: self.get(COMMITTED)?,
            purged: self.get(PURGED)?,
            synced: self.get_index(SYNCED)?,
            deleted: self.get_index(DELETED)?,
        })
    }

    fn torn(&self) -> Option<String> {
        self.torn.clone()
    }

    fn reclaim(&self, index: u64) -> io::Result<()> {
        let Some(last) = index.checked_sub(1) else { return Ok(()) };
        self.db.delete_file_in_range_cf(self.entries()?, 0u64.to_be_bytes(), last.to_be_bytes()).map_err(failed)
    }
}
