//! What a place for snapshots must be able to do. Keys are names joined by `/`, below the location.
//!
//! Calls block. Nothing here knows what the files mean but one rule: a directory is written so that its last file is
//! there only when all others are, whole and durable.

use std::fmt::Debug;
use std::io::{self, Read};

/// Names that one directory may have; more is not ours.
pub(super) const NAMES_MAX: usize = 100_000;

/// A place failed.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {source}")]
pub struct StoreError {
    /// What was worked on: a path or URL.
    pub place: String,
    /// Why it failed.
    pub source: io::Error,
}

impl StoreError {
    /// From a failed call.
    pub fn new(place: impl Into<String>, source: io::Error) -> StoreError {
        StoreError { place: place.into(), source }
    }

    /// One word for the reason, as the metric has it.
    pub fn reason(&self) -> &'static str {
        reason(self.source.kind())
    }
}

/// One word for why reading or writing failed.
pub(super) fn reason(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::NotFound => "missing",
        io::ErrorKind::PermissionDenied => "denied",
        io::ErrorKind::TimedOut => "timeout",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "full",
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => "damaged",
        io::ErrorKind::ConnectionAborted => "stopped",
        _ => "io",
    }
}

/// Opens the bytes of a file that is to be written; may be called again for another attempt.
pub type OpenPart<'a> = Box<dyn Fn() -> io::Result<Box<dyn Read + Send>> + Send + Sync + 'a>;

/// A file to be written.
pub struct NewFile<'a> {
    /// Its name.
    pub name: &'static str,
    /// Its length; other than what is read is an error.
    pub bytes: u64,
    /// Its bytes.
    pub open: OpenPart<'a>,
}

/// A place that holds files in directories.
pub trait Store: Debug + Send + Sync {
    /// Names of what lies directly in a directory, sorted; none when there is no such directory.
    fn list(&self, directory: &str) -> Result<Vec<String>, StoreError>;
    /// Length of a file, if it is there.
    fn length(&self, key: &str) -> Result<Option<u64>, StoreError>;
    /// A file's bytes.
    fn read(&self, key: &str) -> Result<Box<dyn Read + Send>, StoreError>;
    /// Writes a directory of files, in their order: the last of them is there, whole and durable, only when all are. What
    /// of these files was there before is replaced. A failure or the end of the process leaves at most a directory without
    /// that last file, or one whose name begins with a dot.
    fn write_directory(&self, directory: &str, files: &[NewFile<'_>]) -> Result<(), StoreError>;
    /// Writes a small file, at once and durably.
    fn write(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError>;
    /// Removes files of a directory in this order, durably, and then the directory if nothing is left in it.
    fn remove(&self, directory: &str, names: &[&str]) -> Result<(), StoreError>;
    /// Removes what an interrupted `write_directory` below `parent` left beside the directories it was to write.
    fn remove_unfinished(&self, parent: &str) -> Result<(), StoreError>;
    /// How a key is shown to people.
    fn show(&self, key: &str) -> String;
}

/// A small file's text; None when it is not there.
pub(super) fn read_text(store: &dyn Store, key: &str, bytes_max: u64) -> Result<Option<String>, StoreError> {
    let failed = |source| StoreError::new(store.show(key), source);
    let mut bytes = Vec::new();
    let file = match store.read(key) {
        Ok(file) => file,
        Err(error) if error.source.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > bytes_max {
        return Err(failed(io::Error::new(io::ErrorKind::InvalidData, format!("it is longer than {bytes_max} bytes"))));
    }
    let text = String::from_utf8(bytes);
    text.map(Some).map_err(|_| failed(io::Error::new(io::ErrorKind::InvalidData, "it is no text")))
}
