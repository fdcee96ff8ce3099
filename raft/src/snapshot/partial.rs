//! A snapshot on its way in. What arrived is kept across broken streams and restarts, under the identity of the snapshot
//! (what it covers, its length, its checksum), so that a sender goes on where the last one ended.
//!
//! The bytes lie in one file; a second one says how many of them are synced, and their checksum:
//! ```text
//! magic "TPPART01" | received: u64 | crc32c of those bytes: u32
//! length: u64 | body checksum: u32 | meta (codec frame)  -- of the snapshot that is arriving
//! crc32c of all before: u32
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bytes::{Buf, Bytes};

use super::file::{SnapshotError, SnapshotFile};
use crate::codec;
use crate::types::SnapshotMeta;

const BYTES: &str = "incoming.part";
const PROGRESS: &str = "incoming.progress";
const PROGRESS_NEW: &str = "incoming.progress.tmp";
const MAGIC: &[u8; 8] = b"TPPART01";
const FIXED: usize = 8 + 8 + 4 + 8 + 4;
/// Bytes that may arrive before they are synced and their progress is written down: what a crash costs at most. Less for
/// short snapshots.
const SYNC_BYTES_MAX: u64 = 16 << 20;
const SYNC_BYTES_MIN: u64 = 64 << 10;
const SYNCS: u64 = 16;
/// A progress record is this long at most; the membership in its meta is bounded by the codec.
const PROGRESS_BYTES_MAX: u64 = 2 << 20;

/// What tells one snapshot from another.
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// What it covers.
    pub meta: SnapshotMeta,
    /// Length of its file.
    pub length: u64,
    /// CRC32C of its body.
    pub checksum: u32,
}

/// The bytes of one snapshot that arrived so far: a prefix of its file.
#[derive(Debug)]
pub(super) struct Partial {
    dir: PathBuf,
    wanted: Wanted,
    file: File,
    received: u64,
    /// Checksum of what was received.
    running: u32,
    synced: u64,
}

impl Partial {
    /// Begins one; whatever was there before is dropped.
    pub(super) fn begin(dir: &Path, wanted: Wanted) -> Result<Partial, SnapshotError> {
        Partial::discard(dir);
        let file = File::create(dir.join(BYTES)).map_err(failed(dir))?;
        Ok(Partial { dir: dir.to_owned(), wanted, file, received: 0, running: 0, synced: 0 })
    }

    /// What an earlier life left, as far as its bytes are those that were written down. None if there is nothing of use.
    pub(super) fn reopen(dir: &Path) -> Option<Partial> {
        match Partial::read(dir) {
            Ok(Some(partial)) => Some(partial),
            Ok(None) => {
                Partial::discard(dir);
                None
            }
            Err(error) => {
                tracing::warn!(dir = %dir.display(), %error, "what had arrived of a snapshot cannot be used; it will be sent anew");
                Partial::discard(dir);
                None
            }
        }
    }

    fn read(dir: &Path) -> io::Result<Option<Partial>> {
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
        let record = match File::open(dir.join(PROGRESS)) {
            Ok(file) => {
                let mut record = Vec::new();
                file.take(PROGRESS_BYTES_MAX).read_to_end(&mut record)?;
                record
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let (covered, stored) = record.split_last_chunk::<4>().ok_or_else(|| invalid("its progress is cut short"))?;
        if crc32c::crc32c(covered) != u32::from_le_bytes(*stored)
            || covered.len() < FIXED
            || !covered.starts_with(MAGIC)
        {
            return Err(invalid("its progress is damaged"));
        }
        let mut fields = Bytes::copy_from_slice(&covered[MAGIC.len()..]);
        let (received, running) = (fields.get_u64_le(), fields.get_u32_le());
        let (length, checksum) = (fields.get_u64_le(), fields.get_u32_le());
        let meta = codec::decode::<SnapshotMeta>(fields)?;
        let file = OpenOptions::new().read(true).write(true).open(dir.join(BYTES))?;
        if received > length || checksum_of(&file, received)? != running {
            return Err(invalid("its bytes are not those that were written down"));
        }
        // What came after the last sync may be anything.
        file.set_len(received)?;
        let wanted = Wanted { meta, length, checksum };
        Ok(Some(Partial { dir: dir.to_owned(), wanted, file, received, running, synced: received }))
    }

    /// Drops what is there, best effort: what stays is dropped when the next one begins.
    pub(super) fn discard(dir: &Path) {
        for name in [PROGRESS, PROGRESS_NEW, BYTES] {
            let path = dir.join(name);
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!(path = %path.display(), %error, "part of a snapshot stays until the next one arrives");
            }
        }
    }

    /// Of which snapshot.
    pub(super) fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// How much is here.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Takes the next bytes; they must follow the last ones. Refused bytes change nothing. Blocks on the disk.
    pub(super) fn append(&mut self, offset: u64, data: &[u8], checksum: Option<u32>) -> Result<(), SnapshotError> {
        let damaged = |why: String| SnapshotError::Damaged { path: self.dir.join(BYTES), why };
        if offset != self.received {
            return Err(damaged(format!("a chunk for offset {offset} arrived where {} was next", self.received)));
        }
        if data.len() as u64 > self.wanted.length - self.received {
            return Err(damaged(format!("more arrived than the {} bytes announced", self.wanted.length)));
        }
        if checksum.is_some_and(|announced| announced != crc32c::crc32c(data)) {
            return Err(damaged(format!("the chunk for offset {offset} is not what was sent")));
        }
        self.file.write_all_at(data, self.received).map_err(failed(&self.dir))?;
        self.received += data.len() as u64;
        self.running = crc32c::crc32c_append(self.running, data);
        let sync_bytes = (self.wanted.length / SYNCS).clamp(SYNC_BYTES_MIN, SYNC_BYTES_MAX);
        if self.received - self.synced >= sync_bytes {
            self.sync()?;
        }
        Ok(())
    }

    /// Makes durable what arrived, and how much it is.
    pub(super) fn sync(&mut self) -> Result<(), SnapshotError> {
        let mut record = MAGIC.to_vec();
        record.extend_from_slice(&self.received.to_le_bytes());
        record.extend_from_slice(&self.running.to_le_bytes());
        record.extend_from_slice(&self.wanted.length.to_le_bytes());
        record.extend_from_slice(&self.wanted.checksum.to_le_bytes());
        record.extend_from_slice(&codec::encode(&self.wanted.meta));
        record.extend_from_slice(&crc32c::crc32c(&record).to_le_bytes());
        let write = || -> io::Result<()> {
            // The bytes first: the record must never promise more than is there.
            self.file.sync_data()?;
            let new = self.dir.join(PROGRESS_NEW);
            let mut file = File::create(&new)?;
            file.write_all(&record)?;
            file.sync_data()?;
            fs::rename(new, self.dir.join(PROGRESS))
        };
        write().map_err(failed(&self.dir))?;
        self.synced = self.received;
        Ok(())
    }

    /// Checks that everything arrived and is what was announced, and moves it to `path`. What is not is dropped.
    /// Blocks on the disk.
    pub(super) fn finish(self, path: &Path) -> Result<SnapshotFile, SnapshotError> {
        let damaged = |why: String| SnapshotError::Damaged { path: self.dir.join(BYTES), why };
        if self.received != self.wanted.length {
            return Err(damaged(format!("{} of {} bytes arrived", self.received, self.wanted.length)));
        }
        let arrived = self.dir.join(BYTES);
        let checked = SnapshotFile::open(&arrived).and_then(|file| {
            if *file.meta() != self.wanted.meta || file.checksum() != self.wanted.checksum {
                return Err(damaged("it is another snapshot than was announced".to_owned()));
            }
            file.verify()?;
            fs::rename(&arrived, path).map_err(failed(&self.dir))?;
            Ok(file.moved_to(path.to_owned()))
        });
        Partial::discard(&self.dir);
        checked
    }
}

fn checksum_of(file: &File, length: u64) -> io::Result<u32> {
    let (mut at, mut sum) = (0, 0);
    let mut buffer = vec![0; 1 << 20];
    while at < length {
        let want = buffer.len().min(usize::try_from(length - at).unwrap_or(usize::MAX));
        file.read_exact_at(&mut buffer[..want], at)?;
        sum = crc32c::crc32c_append(sum, &buffer[..want]);
        at += want as u64;
    }
    Ok(sum)
}

fn failed(dir: &Path) -> impl Fn(io::Error) -> SnapshotError + '_ {
    |source| SnapshotError::Io { path: dir.to_owned(), source }
}
