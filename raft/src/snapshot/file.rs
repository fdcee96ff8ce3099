//! One snapshot on disk.
//!
//! ```text
//! magic "TPSNAP01" | meta length: u32 | meta (codec frame) | crc32c of all before: u32
//! body, written by the state machine
//! body length: u64 | crc32c of the body: u32 | crc32c of these twelve bytes: u32
//! ```
//! Integers are little endian. A file is believed only when head, tail and body agree with their checksums.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use tidepool_proto::NodeId;

use super::durable;
use crate::codec;
use crate::machine::{Frozen, LogPosition};
use crate::types::{SnapshotMeta, term_of};

const MAGIC: &[u8; 8] = b"TPSNAP01";
const HEAD_FIXED: u64 = 12;
const TAIL: u64 = 16;
/// A meta holds a membership; far above any real one.
const META_BYTES_MAX: u32 = 1 << 20;
const BUFFER_BYTES: usize = 1 << 20;

/// Why a snapshot cannot be used or written.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The bytes are not those of a complete snapshot.
    #[error("snapshot {path} is damaged: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        why: String,
    },
    /// The disk failed.
    #[error("snapshot {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl From<SnapshotError> for io::Error {
    fn from(error: SnapshotError) -> io::Error {
        match error {
            SnapshotError::Io { ref source, .. } => io::Error::new(source.kind(), error),
            SnapshotError::Damaged { .. } => io::Error::new(io::ErrorKind::InvalidData, error),
        }
    }
}

/// An open snapshot: stays readable when its file is removed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SnapshotFile {
    path: PathBuf,
    file: Arc<File>,
    meta: SnapshotMeta,
    length: u64,
    body_start: u64,
    body_length: u64,
    body_checksum: u32,
    /// Shared by all handles of one file.
    agreed: Arc<AtomicBool>,
}

impl SnapshotFile {
    /// Writes a frozen state to `path`, which is not yet one that a restart would find; [`SnapshotFile::sync`] makes it durable.
    pub(super) fn write(
        path: &Path,
        meta: &SnapshotMeta,
        state: Box<dyn Frozen>,
    ) -> Result<SnapshotFile, SnapshotError> {
        let failed = |source| SnapshotError::Io { path: path.to_owned(), source };
        let file = durable::create(path).map_err(failed)?;
        let mut out = Summed { out: BufWriter::with_capacity(BUFFER_BYTES, &file), length: 0, checksum: 0 };
        let meta_frame = codec::encode(meta);
        let run = || -> io::Result<()> {
            out.write_all(MAGIC)?;
            out.write_all(&(meta_frame.len() as u32).to_le_bytes())?;
            out.write_all(&meta_frame)?;
            let head_checksum = out.checksum;
            out.write_all(&head_checksum.to_le_bytes())?;
            (out.length, out.checksum) = (0, 0);
            state.write_to(&mut out)?;
            let mut tail = out.length.to_le_bytes().to_vec();
            tail.extend_from_slice(&out.checksum.to_le_bytes());
            tail.extend_from_slice(&crc32c::crc32c(&tail).to_le_bytes());
            out.out.write_all(&tail)?;
            out.out.flush()
        };
        run().map_err(failed)?;
        SnapshotFile::open(path)
    }

    /// Stands for no snapshot where one has to be named: covers nothing, holds nothing, and is never read.
    pub(crate) fn none(dir: &Path) -> Result<SnapshotFile, SnapshotError> {
        let path = dir.to_owned();
        let file = File::open(dir).map_err(|source| SnapshotError::Io { path: path.clone(), source })?;
        let (meta, file, agreed) = (SnapshotMeta::default(), Arc::new(file), Arc::default());
        Ok(SnapshotFile { path, file, meta, length: 0, body_start: 0, body_length: 0, body_checksum: 0, agreed })
    }

    /// Opens a snapshot and checks head and tail. [`SnapshotFile::verify`] checks the body.
    pub fn open(path: &Path) -> Result<SnapshotFile, SnapshotError> {
        let failed = |source| SnapshotError::Io { path: path.to_owned(), source };
        let damaged = |why: &str| SnapshotError::Damaged { path: path.to_owned(), why: why.to_owned() };
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let read = |at: u64, len: usize| -> Result<Vec<u8>, SnapshotError> {
            let mut bytes = vec![0; len];
            file.read_exact_at(&mut bytes, at).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => damaged("it is cut short"),
                _ => failed(e),
            })?;
            Ok(bytes)
        };
        let fixed = read(0, HEAD_FIXED as usize)?;
        if &fixed[..8] != MAGIC {
            return Err(damaged("it does not begin as a snapshot does"));
        }
        let meta_length = le_u32(&fixed[8..]);
        if meta_length > META_BYTES_MAX {
            return Err(damaged("its meta is longer than any"));
        }
        let head = read(0, HEAD_FIXED as usize + meta_length as usize)?;
        let body_start = head.len() as u64 + 4;
        if le_u32(&read(head.len() as u64, 4)?) != crc32c::crc32c(&head) {
            return Err(damaged("the checksum of its head is wrong"));
        }
        let meta = codec::decode::<SnapshotMeta>(Bytes::from(head).slice(HEAD_FIXED as usize..))
            .map_err(|e| damaged(&format!("its meta: {e}")))?;
        let tail_start =
            length.checked_sub(TAIL).filter(|&at| at >= body_start).ok_or_else(|| damaged("it is cut short"))?;
        let tail = read(tail_start, TAIL as usize)?;
        let (body_length, body_checksum) = (le_u64(&tail), le_u32(&tail[8..]));
        if le_u32(&tail[12..]) != crc32c::crc32c(&tail[..12]) || body_length != tail_start - body_start {
            return Err(damaged("it has no valid end; it was not completed"));
        }
        let path = path.to_owned();
        let (file, agreed) = (Arc::new(file), Arc::new(AtomicBool::new(false)));
        Ok(SnapshotFile { path, file, meta, length, body_start, body_length, body_checksum, agreed })
    }

    /// Reads the whole body and compares its checksum.
    pub fn verify(&self) -> Result<(), SnapshotError> {
        let mut reader = self.reader();
        io::copy(&mut reader, &mut io::sink())
            .map_err(|source| SnapshotError::Io { path: self.path.clone(), source })?;
        reader.finish()
    }

    /// The body, for the state machine. Call [`BodyReader::finish`] at its end.
    pub fn reader(&self) -> BodyReader {
        let cursor = Cursor { file: self.file.clone(), at: self.body_start, left: self.body_length };
        BodyReader { input: BufReader::with_capacity(BUFFER_BYTES, cursor), checksum: 0, of: self.clone() }
    }

    /// Some of the body's bytes, unchecked: for who checks them against something of its own.
    pub fn body_section(&self, from: u64, length: u64) -> impl Read + Send + use<> {
        let from = from.min(self.body_length);
        let left = length.min(self.body_length - from);
        let cursor = Cursor { file: self.file.clone(), at: self.body_start + from, left };
        BufReader::with_capacity(BUFFER_BYTES, cursor)
    }

    /// Raw bytes of the file, as they are sent to a peer.
    pub fn read_at(&self, offset: u64, length: usize) -> Result<Bytes, SnapshotError> {
        let mut bytes = vec![0; length.min(self.length.saturating_sub(offset) as usize)];
        self.file
            .read_exact_at(&mut bytes, offset)
            .map_err(|source| SnapshotError::Io { path: self.path.clone(), source })?;
        Ok(Bytes::from(bytes))
    }

    /// Time since it was completed, by the wall clock; none if the file or the clock does not tell.
    pub fn age(&self) -> Option<std::time::Duration> {
        self.file.metadata().ok()?.modified().ok()?.elapsed().ok()
    }

    /// What it covers.
    pub fn meta(&self) -> &SnapshotMeta {
        &self.meta
    }
    /// Log position that it covers.
    pub fn position(&self) -> Option<LogPosition> {
        self.meta.last_log_id.as_ref().map(|id| LogPosition { term: term_of(id), index: id.index })
    }
    /// The members at that position, by id, with where the others reach them.
    pub fn members(&self) -> Vec<(NodeId, String)> {
        let membership = self.meta.last_membership.membership();
        membership.nodes().map(|(id, member)| (NodeId(*id), member.address.clone())).collect()
    }
    /// Length of the file in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }
    /// Length of the body in bytes.
    pub fn body_length(&self) -> u64 {
        self.body_length
    }
    /// CRC32C of the body.
    pub fn checksum(&self) -> u32 {
        self.body_checksum
    }
    /// Whether a majority vouched for the state it holds (M3): only then is it sent, published, or reason to drop log.
    pub fn is_agreed(&self) -> bool {
        self.agreed.load(Ordering::Acquire)
    }
    /// Says so to all handles of it; what a restart finds is the store's.
    pub(super) fn note_agreed(&self) {
        self.agreed.store(true, Ordering::Release);
    }
    /// Where it lay when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The same open file, now at `path`.
    pub(super) fn moved_to(mut self, path: PathBuf) -> SnapshotFile {
        self.path = path;
        self
    }
    /// Syncs the bytes to disk.
    pub(super) fn sync(&self) -> Result<(), SnapshotError> {
        durable::sync(&self.file, &self.path).map_err(|source| SnapshotError::Io { path: self.path.clone(), source })
    }
}

fn le_u32(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

fn le_u64(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

struct Summed<W> {
    out: W,
    length: u64,
    checksum: u32,
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.checksum = crc32c::crc32c_append(self.checksum, &bytes[..written]);
        self.length += written as u64;
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[derive(Debug)]
struct Cursor {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Read for Cursor {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let want = out.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.file.read_at(&mut out[..want], self.at)?;
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}

/// Reads the body and sums it up on the way.
#[derive(Debug)]
pub struct BodyReader {
    input: BufReader<Cursor>,
    checksum: u32,
    of: SnapshotFile,
}

impl BodyReader {
    /// Reads what is left and compares the checksum of all.
    pub fn finish(mut self) -> Result<(), SnapshotError> {
        io::copy(&mut self, &mut io::sink())
            .map_err(|source| SnapshotError::Io { path: self.of.path.clone(), source })?;
        if self.input.get_ref().left == 0 && self.checksum == self.of.body_checksum {
            return Ok(());
        }
        Err(SnapshotError::Damaged { path: self.of.path.clone(), why: "the checksum of its body is wrong".to_owned() })
    }
}

impl Read for BodyReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(out)?;
        self.checksum = crc32c::crc32c_append(self.checksum, &out[..read]);
        Ok(read)
    }
}
