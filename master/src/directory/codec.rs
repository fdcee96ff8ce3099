//! The binary encoding of entries.
//!
//! ```text
//! entry: version u8 | feature level u16 | log time u64 | op count u16 | ops      (fixed integers little endian)
//! op:    tag u8 | fields in the order of `Op`: ids and numbers as LEB128 varints, keys and text as length and bytes,
//!        uuids and tokens as 16 bytes, choices as one byte, lists as count and items
//! ```
//! Decoding borrows keys and text from the entry. What is well formed but wrong is left to apply, which refuses it;
//! what is not well formed is an error of the log, not of a client.

mod decode;
mod encode;

use super::limits::FEATURE_LEVEL;
use super::op::{Entry, Op};
pub use super::varint::DecodeError;
use super::varint::Reader;
use bytes::Bytes;
pub use encode::encode_op;
use tidepool_proto::ids::OPS_PER_ENTRY_MAX;
use tidepool_proto::{Error, ErrorCode, LogTime};

/// Version of the encoding.
pub const ENTRY_VERSION: u8 = 1;
/// Bytes before the first op.
pub const HEADER_BYTES: usize = 1 + 2 + 8 + 2;

mod tag {
    pub(super) const REGISTER_NODE: u8 = 1;
    pub(super) const MOUNT_SEGMENT: u8 = 2;
    pub(super) const UNMOUNT_SEGMENT: u8 = 3;
    pub(super) const SET_CONTACT: u8 = 4;
    pub(super) const DROP_NODE: u8 = 5;
    pub(super) const OPEN_SESSION: u8 = 6;
    pub(super) const EXPIRE_SESSIONS: u8 = 7;
    pub(super) const PUT_START: u8 = 8;
    pub(super) const PUT_END: u8 = 9;
    pub(super) const PUT_REVOKE: u8 = 10;
    pub(super) const REMOVE: u8 = 11;
    pub(super) const RETIRE: u8 = 12;
    pub(super) const RECLAIM: u8 = 13;
    pub(super) const DISCARD: u8 = 14;
    pub(super) const FENCE_ACKNOWLEDGED: u8 = 15;
    pub(super) const DROP_REPLICA: u8 = 16;
    pub(super) const SET_CONFIG: u8 = 17;
    pub(super) const CHECKPOINT: u8 = 18;
    pub(super) const REMOVE_OBJECTS: u8 = 19;
    pub(super) const SET_PIN: u8 = 20;
    pub(super) const SET_TENANT: u8 = 21;
    pub(super) const DROP_TENANT: u8 = 22;
    pub(super) const COPY_START: u8 = 23;
    pub(super) const COPY_END: u8 = 24;
    pub(super) const CREATE_TASK: u8 = 25;
    pub(super) const END_TASK: u8 = 26;
    /// Of feature level 2.
    pub(super) const BEGIN_HISTORY: u8 = 36;
    pub(super) const AUDIT: u8 = 31;
    /// SET_CONFIG with the limits on what is granted and pinned; the first form leaves them at their defaults.
    pub(super) const SET_CONFIG_2: u8 = 32;
    pub(super) const DROP_EXTRA: u8 = 30;
    pub(super) const CLEAR_REPLICAS: u8 = 33;
    /// As COPY_START, which is no longer written, with the number of replicas it may make.
    pub(super) const COPY_START_UP_TO: u8 = 34;
    pub(super) const RAISE_FEATURE_LEVEL: u8 = 35;
}

/// Ops being gathered into an entry. Ops may be encoded elsewhere (`encode_op`) and only copied here.
#[derive(Debug)]
pub struct EntryBuilder {
    bytes: Vec<u8>,
    ops: usize,
}

impl EntryBuilder {
    /// An empty entry of a feature level.
    pub fn new(feature_level: u16) -> EntryBuilder {
        let mut bytes = Vec::with_capacity(1024);
        bytes.push(ENTRY_VERSION);
        bytes.extend_from_slice(&feature_level.to_le_bytes());
        bytes.resize(HEADER_BYTES, 0);
        EntryBuilder { bytes, ops: 0 }
    }

    /// Appends an op and says its ordinal.
    pub fn push(&mut self, op: &Op<'_>) -> Result<usize, Error> {
        self.admit()?;
        encode_op(op, &mut self.bytes);
        self.ops += 1;
        Ok(self.ops - 1)
    }

    /// Appends an op that `encode_op` encoded, and says its ordinal.
    pub fn push_encoded(&mut self, op: &[u8]) -> Result<usize, Error> {
        self.admit()?;
        self.bytes.extend_from_slice(op);
        self.ops += 1;
        Ok(self.ops - 1)
    }

    fn admit(&self) -> Result<(), Error> {
        if self.ops < OPS_PER_ENTRY_MAX {
            return Ok(());
        }
        Err(Error::new(ErrorCode::ResourceExhausted, format!("entry has {OPS_PER_ENTRY_MAX} ops, the most it carries")))
    }

    /// Ops so far.
    pub fn ops(&self) -> usize {
        self.ops
    }

    /// Bytes so far.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The encoded entry, stamped.
    pub fn finish(mut self, log_time: LogTime) -> Bytes {
        self.bytes[3..11].copy_from_slice(&log_time.0.to_le_bytes());
        self.bytes[11..13].copy_from_slice(&(self.ops as u16).to_le_bytes());
        self.bytes.into()
    }
}

impl<'a> Entry<'a> {
    /// Decodes an entry, borrowing from its bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<Entry<'a>, DecodeError> {
        let mut reader = Reader::new(bytes);
        let feature_level = read_head(&mut reader)?;
        let log_time = LogTime(u64::from_le_bytes(reader.array("log time")?));
        let count = usize::from(u16::from_le_bytes(reader.array("op count")?));
        if count > OPS_PER_ENTRY_MAX {
            return Err(DecodeError::TooManyOps(count));
        }
        let mut ops = Vec::with_capacity(count.min(reader.remaining()));
        for _ in 0..count {
            ops.push(decode::decode_op(&mut reader)?);
        }
        reader.finish()?;
        Ok(Entry { feature_level, log_time, ops })
    }

    /// Whether this binary can apply an entry, by its head alone (M6).
    pub fn admit(bytes: &[u8]) -> Result<(), DecodeError> {
        read_head(&mut Reader::new(bytes)).map(drop)
    }

    /// Encodes the whole entry.
    pub fn encode(&self) -> Result<Bytes, Error> {
        let mut builder = EntryBuilder::new(self.feature_level);
        for op in &self.ops {
            builder.push(op)?;
        }
        Ok(builder.finish(self.log_time))
    }
}

/// Version and feature level, if this binary has both.
fn read_head(reader: &mut Reader<'_>) -> Result<u16, DecodeError> {
    let version = reader.byte("entry version")?;
    if version != ENTRY_VERSION {
        return Err(DecodeError::Unknown { what: "entry version", value: version.into() });
    }
    let feature_level = u16::from_le_bytes(reader.array("feature level")?);
    if feature_level > FEATURE_LEVEL {
        return Err(DecodeError::FeatureLevel(feature_level));
    }
    Ok(feature_level)
}
