//! Binary encoding of everything consensus writes to disk or sends to a peer.
//!
//! One frame is `version: u8, kind: u8, body, crc32c: u32 little endian` over all before it. Integers are LEB128,
//! options one byte, byte strings length-prefixed. Decoding never panics, allocates no more than the frame's own
//! size, refuses trailing bytes, and hands out payloads as slices of the frame (no copy).

mod messages;
mod reader;
#[cfg(test)]
mod tests;

use bytes::Bytes;
pub(crate) use messages::{ENTRY_BYTES_MAX, entry_size};
pub use reader::Reader;
use thiserror::Error;
use tidepool_proto::planted;

/// Version of the encoding written here. Readers refuse higher ones.
pub const CODEC_VERSION: u8 = 1;
/// Longest frame that is decoded: an append request of one longest payload fits with room for its neighbours.
pub const FRAME_BYTES_MAX: usize = 64 << 20;
/// Most entries in one append request.
pub const REQUEST_ENTRIES_MAX: usize = 1 << 16;
/// Most members, voters and learners together, of one membership.
pub const MEMBERS_MAX: usize = 1024;
/// Most voter sets of a joint membership.
pub const JOINT_CONFIGS_MAX: usize = 8;
/// Longest advertised address.
pub const ADDRESS_BYTES_MAX: usize = 512;

/// Version, kind and checksum.
const FRAME_OVERHEAD_BYTES: usize = 2 + 4;

/// Why bytes are not the message they should be.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum CodecError {
    /// The bytes end inside a field.
    #[error("{what} is cut short")]
    Truncated {
        /// The field.
        what: &'static str,
    },
    /// Written by a later version of this program.
    #[error("encoding version {found} is newer than {known}, the newest this program reads; upgrade this node")]
    Version {
        /// Version found.
        found: u8,
        /// Newest version known.
        known: u8,
    },
    /// Another kind of message.
    #[error("message kind {found} where kind {expected} was expected")]
    Kind {
        /// Kind found.
        found: u8,
        /// Kind asked for.
        expected: u8,
    },
    /// The bytes are not those that were written.
    #[error("checksum is {computed:08x}, {stored:08x} was stored")]
    Checksum {
        /// CRC32C in the frame.
        stored: u32,
        /// CRC32C of the bytes.
        computed: u32,
    },
    /// A length above its limit.
    #[error("{what} is {len}, the limit is {max}")]
    TooLong {
        /// The field.
        what: &'static str,
        /// Its length.
        len: u64,
        /// The limit.
        max: usize,
    },
    /// A value that its field cannot have.
    #[error("{what} has a value it cannot have")]
    Invalid {
        /// The field.
        what: &'static str,
    },
    /// Bytes after the message.
    #[error("{extra} bytes follow the message")]
    Trailing {
        /// How many.
        extra: usize,
    },
}

impl From<CodecError> for std::io::Error {
    fn from(error: CodecError) -> Self {
        std::io::Error::new(std::io::ErrorKind::InvalidData, error)
    }
}

/// A value with an encoding. Implemented for what openraft stores and sends.
pub trait Message: Sized {
    /// Tells one kind of frame from another. Never reused.
    const KIND: u8;
    /// Size of the body, for allocation only; may be too small.
    fn size_hint(&self) -> usize {
        32
    }
    /// Appends the body.
    fn put(&self, out: &mut Vec<u8>);
    /// Reads the body.
    fn take(input: &mut Reader) -> Result<Self, CodecError>;
}

/// Encodes one frame.
pub fn encode<M: Message>(message: &M) -> Bytes {
    let mut out = Vec::with_capacity(message.size_hint() + FRAME_OVERHEAD_BYTES);
    encode_into(message, &mut out);
    Bytes::from(out)
}

/// Appends one frame to `out`.
pub fn encode_into<M: Message>(message: &M, out: &mut Vec<u8>) {
    let start = out.len();
    out.push(CODEC_VERSION);
    out.push(M::KIND);
    message.put(out);
    let checksum = crc32c::crc32c(&out[start..]);
    out.extend_from_slice(&checksum.to_le_bytes());
}

/// Decodes one frame, all of it.
pub fn decode<M: Message>(frame: Bytes) -> Result<M, CodecError> {
    let len = frame.len();
    if len > FRAME_BYTES_MAX {
        return Err(CodecError::TooLong { what: "frame", len: len as u64, max: FRAME_BYTES_MAX });
    }
    // The version decides how the rest is laid out, so it is looked at before the checksum.
    let Some(&version) = frame.first() else {
        return Err(CodecError::Truncated { what: "frame" });
    };
    if version > CODEC_VERSION {
        return Err(CodecError::Version { found: version, known: CODEC_VERSION });
    }
    if version == 0 {
        return Err(CodecError::Invalid { what: "encoding version" });
    }
    if len < FRAME_OVERHEAD_BYTES {
        return Err(CodecError::Truncated { what: "frame" });
    }
    let (covered, tail) = frame.split_at(len - 4);
    let stored = u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]);
    let computed = crc32c::crc32c(covered);
    if stored != computed && !planted!(UncheckedFrame) {
        return Err(CodecError::Checksum { stored, computed });
    }
    if covered[1] != M::KIND {
        return Err(CodecError::Kind { found: covered[1], expected: M::KIND });
    }
    let mut reader = Reader::new(frame.slice(2..len - 4));
    let message = M::take(&mut reader)?;
    match reader.remaining() {
        0 => Ok(message),
        extra => Err(CodecError::Trailing { extra }),
    }
}
