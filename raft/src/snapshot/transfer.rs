//! What precedes a snapshot on the wire: who leads, what the snapshot covers, how long it is and its checksum.

use bytes::{BufMut, Bytes, BytesMut};

use super::file::SnapshotFile;
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
}
