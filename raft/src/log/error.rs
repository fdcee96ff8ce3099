//! Why a store does not open, and what ends an open one.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::codec::CodecError;

/// Why a log store did not open. None of these is repaired silently.
#[derive(Debug, Error)]
pub enum OpenLogError {
    /// An entry is damaged or missing while later ones exist, or it was known to be on disk.
    #[error(
        "raft log is corrupt at index {index}: {detail}; entries up to {last_good} are intact. This node cannot vote \
         with a damaged log: move its data directory away and let it rejoin as a new member"
    )]
    StorageCorrupt {
        /// First bad or missing index.
        index: u64,
        /// Last index before it that is intact (or purged); `none` if there is none.
        last_good: String,
        /// What is wrong.
        detail: String,
    },
    /// Vote, committed or purged marker is damaged.
    #[error("raft log is corrupt: the stored {what} cannot be read: {error}")]
    StateCorrupt {
        /// Which marker.
        what: &'static str,
        /// What is wrong with it.
        error: CodecError,
    },
    /// Written by a later version.
    #[error("{} has store format {found}, this program knows up to {known}; upgrade this node", path.display())]
    NewerFormat {
        /// The directory.
        path: PathBuf,
        /// Format found.
        found: u32,
        /// Newest format known.
        known: u32,
    },
    /// The directory is not, or no longer, a raft log store.
    #[error("{} is not a usable raft log store: {detail}", path.display())]
    NotAStore {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// An entry was written under a feature level that this binary does not have.
    #[error("raft log at {}, entry {index}: {detail}; start the newer binary that wrote it", path.display())]
    FeatureLevel {
        /// The directory.
        path: PathBuf,
        /// The entry.
        index: u64,
        /// The state machine's words.
        detail: String,
    },
    /// Another process has it open.
    #[error("raft log at {} is open in another process; stop that one, or give this node a data directory of its own", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The disk failed.
    #[error("raft log at {}: {error}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The failure.
        error: io::Error,
    },
    /// The database reported damage of its own files.
    #[error(
        "raft log at {} is corrupt: {detail}. This node cannot vote with a damaged log: move its data directory away \
         and let it rejoin as a new member", path.display()
    )]
    DatabaseCorrupt {
        /// The directory.
        path: PathBuf,
        /// RocksDB's words.
        detail: String,
    },
    /// A metric could not be registered.
    #[error("raft log metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The flusher's thread could not be started.
    #[error("cannot start the raft log's flusher thread: {0}")]
    Thread(io::Error),
}

/// What ended a store. Nothing was acknowledged after it; the process must exit and recover from its disk.
#[derive(Debug, Clone, Error)]
#[error("raft log {operation} failed: {cause}; nothing is acknowledged any more, the process must restart{}", advice(.cause))]
pub struct LogFailure {
    /// `write`, `sync`, `read` or `purge`.
    pub operation: &'static str,
    /// The first failure's own words.
    pub cause: String,
}

/// What to do first, where the cause says.
fn advice(cause: &str) -> &'static str {
    match cause.contains("No space left on device") {
        true => ": free space on the file system of the data directory, and start it again",
        false => "",
    }
}

impl From<LogFailure> for io::Error {
    fn from(failure: LogFailure) -> Self {
        io::Error::other(failure)
    }
}
