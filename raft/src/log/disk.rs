//! What the log store needs of a disk: one ordered stream of writes, a sync, reads by index.

use std::fmt;
use std::io;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;

/// Identity of one store, drawn when it is created. A member that comes back with another one has lost its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StoreId(pub u128);

impl StoreId {
    /// A fresh one.
    pub fn random() -> StoreId {
        StoreId(rand::random())
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for StoreId {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 32 {
            return Err(format!("store id '{text}' is not 32 hexadecimal digits"));
        }
        u128::from_str_radix(text, 16).map(StoreId).map_err(|error| format!("store id '{text}': {error}"))
    }
}

/// One step of the ordered stream. Bytes are frames of `crate::codec`; the disk does not look into them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// An entry at its index.
    Append {
        /// Log index, the key.
        index: u64,
        /// The entry's frame.
        frame: Bytes,
    },
    /// Entries with these indexes are gone: a new leader overwrote them.
    Truncate(Range<u64>),
    /// The vote; replaces the one before.
    Vote(Bytes),
    /// Last committed log id known here; replaces the one before.
    Committed(Bytes),
    /// Every entry below this index was synced before this batch was written. A crash can only tear above it.
    Synced(u64),
    /// The log begins after this log id. Entries of `delete` are removed from the disk.
    Purge {
        /// Frame of the last purged log id.
        purged: Bytes,
        /// Indexes to remove now, all of them purged.
        delete: Range<u64>,
    },
}

/// What a disk knows beside its entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredState {
    /// Last [`Write::Vote`].
    pub vote: Option<Bytes>,
    /// Last [`Write::Committed`].
    pub committed: Option<Bytes>,
    /// Last [`Write::Purge`].
    pub purged: Option<Bytes>,
    /// Last [`Write::Synced`].
    pub synced: u64,
    /// End of the last removed range: entries below may still lie there only from this index on.
    pub deleted: u64,
}

/// A disk. Writes of one batch and of successive batches take effect in their order; after a crash a prefix of
/// them is found, holding at least everything that was synced.
pub trait Disk: Send + Sync + 'static {
    /// Identity drawn when the store was created; another one means another store.
    fn store_id(&self) -> StoreId;
    /// Applies a batch. Readable on return, not yet durable.
    fn write(&self, batch: &[Write]) -> io::Result<()>;
    /// Makes everything written so far durable.
    fn sync(&self) -> io::Result<()>;
    /// Entries of `range` in index order: all of them, or the first ones up to about `bytes_max`, at least one.
    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>>;
    /// Calls `visit` with every entry from `from` on, in index order, until it fails.
    fn scan(&self, from: u64, visit: &mut dyn FnMut(u64, Bytes) -> io::Result<()>) -> io::Result<()>;
    /// Vote, committed and the like.
    fn state(&self) -> io::Result<StoredState>;
    /// Gives back the space of entries below `index`, which a synced [`Write::Purge`] removed.
    fn reclaim(&self, index: u64) -> io::Result<()>;
    /// Whether a crash can leave a part of a batch, or half an entry, behind. A disk with atomic, checksummed
    /// batches never shows a torn entry: a bad one there is corruption even at the very end.
    fn tears(&self) -> bool {
        false
    }
    /// What the disk itself found half written, and left out, when it was opened.
    fn torn(&self) -> Option<String> {
        None
    }
    /// Virtual time that a sync takes when flushing on a task (simulation only).
    fn sync_delay(&self) -> Duration {
        Duration::ZERO
    }
}
