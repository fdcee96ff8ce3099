//! An image as a stream of frames: what lies in a Raft snapshot and travels to a standby.
//!
//! ```text
//! magic "TPIMAGE1" | format u32 | feature level u16 | crc32c u32
//! frame: kind u8 | shard u16 | rows u32 | raw u64 | stored u64 | crc32c u32 | stored bytes
//! ```
//! Integers are little endian; the first CRC covers the bytes before it, a frame's the header's fields before it and the
//! stored bytes. Shard frames are
//! compressed with zstd level 3 from `raw` bytes; the others are stored as they are. Order: segments, shards, tasks,
//! manifest.

use std::io::{self, Read, Write};

use super::RestoreError;
use super::manifest::{Part, PartSum};

pub(super) const MAGIC: &[u8; 8] = b"TPIMAGE1";
/// Bytes of format version and feature level, with their CRC.
pub(super) const LEVEL_BYTES: usize = 10;
/// Bytes of a frame's header.
pub(super) const HEADER_BYTES: usize = 27;
const CRC_AT: usize = 23;
/// Bytes that one frame may have, stored or raw: far above any real one.
const FRAME_BYTES_MAX: u64 = 16 << 30;
/// Bytes that one row of a shard may have: key, group, replicas and the rest.
const ROW_BYTES_MAX: u64 = 8 << 10;
/// Memory taken ahead of the bytes that fill it.
const AHEAD_BYTES: u64 = 1 << 20;
const COMPRESSION_LEVEL: i32 = 3;

/// Format version and feature level, as they follow the magic.
pub(super) fn encode_level(format: u32, feature_level: u16) -> [u8; LEVEL_BYTES] {
    let mut out = [0; LEVEL_BYTES];
    out[..4].copy_from_slice(&format.to_le_bytes());
    out[4..6].copy_from_slice(&feature_level.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(MAGIC), &out[..6]);
    out[6..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// As [`encode_level`] wrote them.
pub(super) fn decode_level(bytes: &[u8; LEVEL_BYTES]) -> Result<(u32, u16), RestoreError> {
    let format = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let level = u16::from_le_bytes([bytes[4], bytes[5]]);
    if encode_level(format, level) != *bytes {
        return Err(RestoreError::Damaged("the checksum of its head is wrong".to_owned()));
    }
    Ok((format, level))
}

/// What a frame holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Kind {
    Segments = 1,
    Shard = 2,
    Tasks = 3,
    Manifest = 4,
}

/// Header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// Number of the shard; 0 for the other kinds.
    pub(super) shard: u16,
    pub(super) rows: u32,
    /// Bytes before compression.
    pub(super) raw: u64,
    /// Bytes that follow.
    pub(super) stored: u64,
    pub(super) crc: u32,
}

impl Header {
    fn new(kind: Kind, shard: u16, rows: u32, raw: u64, stored: &[u8]) -> Header {
        let mut header = Header { kind, shard, rows, raw, stored: stored.len() as u64, crc: 0 };
        header.crc = crc32c::crc32c_append(crc32c::crc32c(&header.encode()[..CRC_AT]), stored);
        header
    }

    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0] = self.kind as u8;
        out[1..3].copy_from_slice(&self.shard.to_le_bytes());
        out[3..7].copy_from_slice(&self.rows.to_le_bytes());
        out[7..15].copy_from_slice(&self.raw.to_le_bytes());
        out[15..23].copy_from_slice(&self.stored.to_le_bytes());
        out[CRC_AT..].copy_from_slice(&self.crc.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, RestoreError> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let kind = match bytes[0] {
            1 => Kind::Segments,
            2 => Kind::Shard,
            3 => Kind::Tasks,
            4 => Kind::Manifest,
            other => return Err(RestoreError::Damaged(format!("a frame is of unknown kind {other}"))),
        };
        let shard = u16::from_le_bytes([bytes[1], bytes[2]]);
        let header = Header { kind, shard, rows: half(3), raw: word(7), stored: word(15), crc: half(CRC_AT) };
        let limit = match kind {
            Kind::Shard => (u64::from(header.rows) + 1) * ROW_BYTES_MAX,
            _ => FRAME_BYTES_MAX,
        };
        let length = header.raw.max(header.stored);
        if length > limit.min(FRAME_BYTES_MAX) {
            return Err(RestoreError::Damaged(format!("{} has {length} bytes, above {limit}", header.name())));
        }
        Ok(header)
    }
}

/// A frame as it is stored.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) stored: Vec<u8>,
}

impl Frame {
    /// Stored as it is.
    pub(super) fn plain(kind: Kind, rows: u32, bytes: Vec<u8>) -> Frame {
        Frame { header: Header::new(kind, 0, rows, bytes.len() as u64, &bytes), stored: bytes }
    }

    /// A shard's rows, compressed.
    pub(super) fn shard(number: u16, rows: u32, raw: &[u8]) -> io::Result<Frame> {
        let stored = zstd::bulk::compress(raw, COMPRESSION_LEVEL)?;
        Ok(Frame { header: Header::new(Kind::Shard, number, rows, raw.len() as u64, &stored), stored })
    }

    /// Writes it.
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&self.header.encode())?;
        out.write_all(&self.stored)
    }

    /// Reads one and checks it.
    pub(super) fn read(input: &mut dyn Read) -> Result<Frame, RestoreError> {
        let mut bytes = [0; HEADER_BYTES];
        input.read_exact(&mut bytes).map_err(cut_short)?;
        let header = Header::decode(&bytes)?;
        // Grows as bytes arrive, so that a wrong length costs no memory.
        let mut stored = Vec::with_capacity(header.stored.min(AHEAD_BYTES) as usize);
        input.take(header.stored).read_to_end(&mut stored)?;
        if stored.len() as u64 != header.stored {
            return Err(RestoreError::Damaged("it is cut short".to_owned()));
        }
        if crc32c::crc32c_append(crc32c::crc32c(&bytes[..CRC_AT]), &stored) != header.crc {
            return Err(RestoreError::Damaged(format!("the checksum of {} is wrong", header.name())));
        }
        Ok(Frame { header, stored })
    }

    /// What the manifest says of a part that is this frame.
    pub(super) fn part(&self) -> Part {
        let mut sum = PartSum::default();
        sum.add(&self.stored);
        sum.rows(self.header.rows.into());
        sum.part()
    }

    /// The header, as it is in the stream.
    pub(super) fn encoded_header(&self) -> [u8; HEADER_BYTES] {
        self.header.encode()
    }

    /// The rows' bytes.
    pub(super) fn raw(&self) -> Result<Vec<u8>, RestoreError> {
        let raw = zstd::bulk::decompress(&self.stored, self.header.raw as usize);
        let raw = raw.map_err(|e| RestoreError::Damaged(format!("{}: {e}", self.header.name())))?;
        if raw.len() as u64 != self.header.raw {
            return Err(RestoreError::Damaged(format!("{} has another length", self.header.name())));
        }
        Ok(raw)
    }
}

impl Header {
    /// For errors.
    pub(super) fn name(&self) -> String {
        match self.kind {
            Kind::Segments => "segments".to_owned(),
            Kind::Shard => format!("shard {}", self.shard),
            Kind::Tasks => "task_manager".to_owned(),
            Kind::Manifest => "the manifest".to_owned(),
        }
    }
}

/// An end of input inside a frame is damage, not a failure of the disk.
pub(super) fn cut_short(error: io::Error) -> RestoreError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => RestoreError::Damaged("it is cut short".to_owned()),
        _ => RestoreError::Io(error),
    }
}
