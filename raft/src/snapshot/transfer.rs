//! What precedes a snapshot on the wire: who leads, what the snapshot covers, how long it is and its checksum; and where
//! the receiver wants it to begin.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};

use super::file::SnapshotFile;
use super::pace::Pace;
use super::partial::Wanted;
use crate::codec::{self, CodecError};
use crate::types::{SnapshotMeta, Vote};

const FIXED: usize = 8 + 4 + 4;

/// A snapshot on offer to a follower.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Offer {
    /// The sender's leadership.
    pub(crate) vote: Vote,
    /// What the snapshot covers.
    pub(crate) meta: SnapshotMeta,
    /// Length of the file in bytes.
    pub(crate) length: u64,
    /// CRC32C of its body.
    pub(crate) checksum: u32,
}

impl Offer {
    pub(crate) fn new(vote: Vote, file: &SnapshotFile) -> Offer {
        Offer { vote, meta: file.meta().clone(), length: file.length(), checksum: file.checksum() }
    }

    /// The snapshot, whoever sends it.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted { meta: self.meta.clone(), length: self.length, checksum: self.checksum }
    }

    /// `length: u64, checksum: u32, vote frame length: u32, vote frame, meta frame`, little endian.
    pub(crate) fn encode(&self) -> Bytes {
        let (vote, meta) = (codec::encode(&self.vote), codec::encode(&self.meta));
        let mut out = BytesMut::with_capacity(FIXED + vote.len() + meta.len());
        out.put_u64_le(self.length);
        out.put_u32_le(self.checksum);
        out.put_u32_le(vote.len() as u32);
        out.put_slice(&vote);
        out.put_slice(&meta);
        out.freeze()
    }

    pub(crate) fn decode(bytes: Bytes) -> Result<Offer, CodecError> {
        use bytes::Buf;
        let mut input = bytes;
        if input.len() < FIXED {
            return Err(CodecError::Truncated { what: "snapshot offer" });
        }
        let (length, checksum, vote_length) = (input.get_u64_le(), input.get_u32_le(), input.get_u32_le() as usize);
        if vote_length > input.len() {
            return Err(CodecError::Truncated { what: "vote of the snapshot offer" });
        }
        let vote = codec::decode(input.split_to(vote_length))?;
        Ok(Offer { vote, meta: codec::decode(input)?, length, checksum })
    }
}

/// A snapshot on its way to a member.
#[derive(Clone, Debug)]
pub struct Feed {
    /// What precedes it.
    pub offer: Bytes,
    /// The snapshot.
    pub file: SnapshotFile,
    /// Where to begin: what is before it, the receiver has.
    pub from: u64,
    /// How fast.
    pub pace: Arc<Pace>,
}

/// The answer to an offer: how much is there already. Members that know no offers answer nothing.
pub(crate) fn encode_offset(offset: u64) -> Bytes {
    Bytes::copy_from_slice(&offset.to_le_bytes())
}

/// Reads the answer to an offer of `length` bytes.
pub(crate) fn decode_offset(answer: &[u8], length: u64) -> Result<u64, CodecError> {
    if answer.is_empty() {
        return Ok(0);
    }
    let bytes = answer.try_into().map_err(|_| CodecError::Invalid { what: "answer to a snapshot offer" })?;
    let offset = u64::from_le_bytes(bytes);
    if offset > length {
        return Err(CodecError::Invalid { what: "offset of a snapshot" });
    }
    Ok(offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{LeaderId, log_id};

    #[test]
    fn an_offer_round_trips_and_cuts_are_noticed() {
        let vote = Vote { leader_id: LeaderId { term: 4, voted_for: 2 }, committed: true };
        let meta = SnapshotMeta { last_log_id: Some(log_id(3, 9)), ..Default::default() };
        let offer = Offer { vote, meta, length: 1 << 40, checksum: 77 };
        let bytes = offer.encode();
        assert_eq!(Offer::decode(bytes.clone()), Ok(offer));
        for at in 0..bytes.len() {
            assert!(Offer::decode(bytes.slice(..at)).is_err());
        }
    }

    #[test]
    fn an_answer_beyond_the_snapshot_is_refused() {
        assert_eq!(decode_offset(&encode_offset(7), 7), Ok(7));
        assert_eq!(decode_offset(&[], 7), Ok(0));
        assert!(decode_offset(&encode_offset(8), 7).is_err());
        assert!(decode_offset(&[1, 2, 3], 7).is_err());
    }
}
