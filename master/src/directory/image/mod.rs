//! The whole state as bytes, and back into an equal state. One form for log compaction, for a standby that catches up,
//! and for recovery from cold.
//!
//! Equal states have equal bytes before compression: rows are in the order of their ids, shards in the order of their
//! numbers, and a shard's number depends on the key alone. Free extents, indexes and counters are not written: they
//! follow from the rest, and the stored digest, which covers them, must come out again.
//!
//! `rows` says what is written, `frame` how it is packed, `manifest` what is checked; `copies`, `write` and `load` do it. `parts`
//! takes an image apart into the files that are published, and puts it together again.

mod copies;
mod frame;
mod load;
mod manifest;
pub mod parts;
mod rows;
mod shard;
#[cfg(test)]
pub(super) mod tests;
mod write;

pub use manifest::{FORMAT_VERSION, Manifest, Part};
pub use write::FrozenDirectory;

use super::Directory;
use super::audit::Auditor;
use super::core::Core;
use super::objects::Shards;
use std::io;

/// Why an image was not installed. The state is as before.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Reading failed.
    #[error("the image could not be read: {0}")]
    Io(#[from] io::Error),
    /// Not an image, or one of another version.
    #[error("{0}")]
    Version(String),
    /// Bytes are missing or changed.
    #[error("the image is damaged: {0}")]
    Damaged(String),
    /// Its parts contradict each other.
    #[error("the image contradicts itself: {0}")]
    Inconsistent(String),
    /// The state read has another digest than the state written.
    #[error("the image has digest {read:032x}, it was written as {written:032x}")]
    Digest {
        /// In the image.
        written: u128,
        /// Of what was read.
        read: u128,
    },
}

/// The feature level of an image, from its head alone; an error if this binary cannot read the rest (M6).
pub fn admit_image(input: &mut dyn io::Read) -> Result<u16, RestoreError> {
    load::read_head(input)
}

fn inconsistent(what: impl Into<String>) -> RestoreError {
    RestoreError::Inconsistent(what.into())
}

impl Directory {
    /// The state at the applied index. Apply waits for what is small and for the start of the undo lists, not for the
    /// objects; those are encoded by `write_to`, beside it. A second freeze before the first is dropped encodes all of
    /// them at once.
    pub fn freeze(&self) -> FrozenDirectory {
        write::freeze(&self.core.read(), &self.shards)
    }

    /// Replaces the whole state by a frozen one, after checking it wholly.
    pub fn restore(&self, input: &mut dyn io::Read) -> Result<Manifest, RestoreError> {
        let shards = Shards::new();
        let (core, manifest) = load::load(input, &shards)?;
        // What was there goes last: to free a million records takes longer than others should wait.
        let before = {
            let mut place = self.core.write();
            let mut topology = self.topology.write();
            let records = self.shards.replace(shards);
            *topology = core.topology();
            let changes = place.changes.take();
            let auditor = Auditor::after(&place.auditor);
            let core = Core { changes: changes.map(|_| Vec::new()), auditor, ..core };
            (std::mem::replace(&mut *place, core), records)
        };
        drop(before);
        Ok(manifest)
    }
}
