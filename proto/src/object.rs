//! The self-describing object: what a replica's extent holds (I2, R1).
//!
//! ```text
//! offset  bytes  field (little endian)
//!      0      4  magic "TPO1"
//!      4      2  format version, 1
//!      6      2  flags, 0
//!      8      8  history
//!     16      8  object id
//!     24     16  key hash: xxh3-128 of (tenant length as u32, tenant, key)
//!     40      8  payload length
//!     48      8  CRC-64/NVME of the checksum table
//!     56      8  CRC-64/NVME of bytes 0..56
//!     64    8*n  checksum table: CRC-64/NVME of each 64 KiB block of payload, n = ceil(length / 64 KiB)
//!    ...         payload
//! ```
//! A reader believes nothing it has not checked: header CRC, id, key hash, length, table CRC, then every block.

use crate::error::{Error, ErrorCode};
use crate::ids::{History, ObjectId};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Payload bytes under one checksum.
pub const BLOCK_BYTES: u64 = 64 << 10;
/// Bytes of one checksum in the table.
pub const CHECKSUM_BYTES: usize = 8;
/// Largest payload of one object.
pub const OBJECT_BYTES_MAX: u64 = 64 << 30;
/// Extents start and end on multiples of this.
pub const EXTENT_ALIGN: u64 = 64;

const MAGIC: [u8; 4] = *b"TPO1";
const VERSION: u16 = 1;

/// 128-bit hash of (tenant, key) that every stored object carries.
pub type KeyHash = [u8; 16];

/// Hash of (tenant, key) as stored in headers: xxh3-128, seed 0.
pub fn key_hash(tenant: &str, key: &[u8]) -> KeyHash {
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    hasher.update(&(tenant.len() as u32).to_le_bytes());
    hasher.update(tenant.as_bytes());
    hasher.update(key);
    hasher.digest128().to_le_bytes()
}

/// CRC-64/NVME, the checksum of headers, tables and blocks.
pub fn checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Blocks of a payload.
pub fn block_count(payload_bytes: u64) -> u64 {
    payload_bytes.div_ceil(BLOCK_BYTES)
}

/// Header plus table, in bytes.
pub fn prefix_bytes(payload_bytes: u64) -> u64 {
    HEADER_BYTES as u64 + block_count(payload_bytes) * CHECKSUM_BYTES as u64
}

/// What an object of this payload occupies when stored: header, table and payload, without the padding of its extent.
pub fn stored_bytes(payload_bytes: u64) -> u64 {
    prefix_bytes(payload_bytes) + payload_bytes
}

/// What the allocator reserves for it.
pub fn extent_bytes(payload_bytes: u64) -> u64 {
    stored_bytes(payload_bytes).next_multiple_of(EXTENT_ALIGN)
}

/// Who a stored object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Life of the directory it was put in.
    pub history: History,
    /// The put.
    pub object: ObjectId,
    /// Hash of (tenant, key).
    pub key_hash: KeyHash,
    /// Payload bytes.
    pub length: u64,
    /// CRC of the checksum table.
    pub table_crc: u64,
}

impl Header {
    /// Encodes with its own CRC.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[8..16].copy_from_slice(&self.history.0.to_le_bytes());
        out[16..24].copy_from_slice(&self.object.0.to_le_bytes());
        out[24..40].copy_from_slice(&self.key_hash);
        out[40..48].copy_from_slice(&self.length.to_le_bytes());
        out[48..56].copy_from_slice(&self.table_crc.to_le_bytes());
        let crc = checksum(&out[..56]);
        out[56..64].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes and checks magic, version and CRC.
    pub fn decode(bytes: &[u8]) -> Result<Header, Error> {
        let corrupt = |what: String| Error::new(ErrorCode::ChecksumMismatch, what);
        if bytes.len() < HEADER_BYTES {
            return Err(corrupt(format!("object header has {} bytes, not {HEADER_BYTES}", bytes.len())));
        }
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if bytes[0..4] != MAGIC {
            return Err(corrupt("object header has no magic: the extent holds no object".into()));
        }
        if checksum(&bytes[..56]) != word(56) {
            return Err(corrupt("object header does not match its CRC".into()));
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != VERSION {
            return Err(corrupt(format!("object format version {version}; this binary reads {VERSION}")));
        }
        Ok(Header {
            history: History(word(8)),
            object: ObjectId(word(16)),
            key_hash: bytes[24..40].try_into().expect("16 bytes"),
            length: word(40),
            table_crc: word(48),
        })
    }

    /// Checks that this is the object that was asked for.
    pub fn expect(&self, history: History, object: ObjectId, key_hash: &KeyHash, length: u64) -> Result<(), Error> {
        let mismatch = |what: String| Err(Error::new(ErrorCode::ChecksumMismatch, what));
        if self.history != history || self.object != object {
            return mismatch(format!(
                "extent holds object {} of history {:x}, not {} of {:x}",
                self.object, self.history.0, object, history.0
            ));
        }
        if &self.key_hash != key_hash {
            return mismatch(format!("object {object} carries another key's hash"));
        }
        if self.length != length {
            return mismatch(format!("object {object} has {} payload bytes, not {length}", self.length));
        }
        Ok(())
    }
}

/// Builds header and table for a payload given as parts (their concatenation is the payload).
pub fn build_prefix(history: History, object: ObjectId, key_hash: KeyHash, parts: &[&[u8]]) -> Vec<u8> {
    let length: u64 = parts.iter().map(|p| p.len() as u64).sum();
    let mut prefix = vec![0u8; prefix_bytes(length) as usize];
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    let (mut in_block, mut at) = (0u64, HEADER_BYTES);
    for part in parts {
        let mut rest = *part;
        while !rest.is_empty() {
            let take = rest.len().min((BLOCK_BYTES - in_block) as usize);
            digest.update(&rest[..take]);
            rest = &rest[take..];
            in_block += take as u64;
            if in_block == BLOCK_BYTES {
                prefix[at..at + CHECKSUM_BYTES].copy_from_slice(&digest.finalize().to_le_bytes());
                digest.reset();
                (in_block, at) = (0, at + CHECKSUM_BYTES);
            }
        }
    }
    if in_block > 0 {
        prefix[at..at + CHECKSUM_BYTES].copy_from_slice(&digest.finalize().to_le_bytes());
    }
    let table_crc = checksum(&prefix[HEADER_BYTES..]);
    prefix[..HEADER_BYTES].copy_from_slice(&Header { history, object, key_hash, length, table_crc }.encode());
    prefix
}

/// Checks header and table (`prefix`), returning the header. The payload is checked with [`verify_blocks`].
pub fn verify_prefix(prefix: &[u8]) -> Result<Header, Error> {
    let header = Header::decode(prefix)?;
    if prefix.len() as u64 != prefix_bytes(header.length) {
        return Err(Error::new(
            ErrorCode::ChecksumMismatch,
            format!("object {} has a table for another length", header.object),
        ));
    }
    if checksum(&prefix[HEADER_BYTES..]) != header.table_crc {
        return Err(Error::new(
            ErrorCode::ChecksumMismatch,
            format!("object {}: checksum table does not match its CRC", header.object),
        ));
    }
    Ok(header)
}

/// Checks whole payload blocks against the table of a verified prefix; `first_block` is the index of the first.
pub fn verify_blocks(prefix: &[u8], first_block: u64, blocks: &[u8]) -> Result<(), Error> {
    for (i, block) in blocks.chunks(BLOCK_BYTES as usize).enumerate() {
        let index = first_block as usize + i;
        let at = HEADER_BYTES + index * CHECKSUM_BYTES;
        let stored = prefix.get(at..at + CHECKSUM_BYTES).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")));
        if stored != Some(checksum(block)) {
            return Err(Error::new(
                ErrorCode::ChecksumMismatch,
                format!("payload block {index} does not match its CRC"),
            ));
        }
    }
    Ok(())
}

/// Checks a whole payload given as parts (their concatenation is the payload) against the table of a verified prefix.
pub fn verify_parts(prefix: &[u8], parts: &[&[u8]]) -> Result<(), Error> {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    let (mut index, mut in_block) = (0usize, 0u64);
    let check = |index: usize, crc: u64| {
        let at = HEADER_BYTES + index * CHECKSUM_BYTES;
        let stored = prefix.get(at..at + CHECKSUM_BYTES).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")));
        if stored == Some(crc) {
            return Ok(());
        }
        Err(Error::new(ErrorCode::ChecksumMismatch, format!("payload block {index} does not match its CRC")))
    };
    for part in parts {
        let mut rest = *part;
        while !rest.is_empty() {
            let take = rest.len().min((BLOCK_BYTES - in_block) as usize);
            digest.update(&rest[..take]);
            rest = &rest[take..];
            in_block += take as u64;
            if in_block == BLOCK_BYTES {
                check(index, digest.finalize())?;
                digest.reset();
                (index, in_block) = (index + 1, 0);
            }
        }
    }
    if in_block > 0 {
        check(index, digest.finalize())?;
        index += 1;
    }
    if prefix.len() != HEADER_BYTES + index * CHECKSUM_BYTES {
        return Err(Error::new(
            ErrorCode::ChecksumMismatch,
            format!("payload has {index} blocks, its table another number"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(payload: &[u8]) -> Vec<u8> {
        build_prefix(History(1), ObjectId(2), key_hash("", b"k"), &[payload])
    }

    #[test]
    fn prefix_round_trips_for_lengths_around_block_edges() {
        for length in [0u64, 1, 63, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5] {
            let payload: Vec<u8> = (0..length).map(|i| (i * 31 % 251) as u8).collect();
            let prefix = sample(&payload);
            let header = verify_prefix(&prefix).unwrap();
            header.expect(History(1), ObjectId(2), &key_hash("", b"k"), length).unwrap();
            verify_blocks(&prefix, 0, &payload).unwrap();
        }
    }

    #[test]
    fn parts_and_whole_have_one_prefix() {
        let payload: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let (a, b) = payload.split_at(70_001);
        assert_eq!(build_prefix(History(1), ObjectId(2), key_hash("", b"k"), &[a, b]), sample(&payload));
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let payload = vec![5u8; 70_000];
        let prefix = sample(&payload);
        for at in 0..prefix.len() {
            let mut bad = prefix.clone();
            bad[at] ^= 1;
            assert!(verify_prefix(&bad).is_err(), "flip at {at} passed");
        }
        for at in [0, 65_535, 65_536, 69_999] {
            let mut bad = payload.clone();
            bad[at] ^= 0x80;
            assert!(verify_blocks(&prefix, 0, &bad).is_err(), "flip at {at} passed");
        }
    }

    #[test]
    fn parts_are_verified_as_the_whole_is() {
        let payload: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let prefix = sample(&payload);
        for cut in [0, 1, 65_535, 65_536, 65_537, 131_072, 199_999, 200_000] {
            let (a, b) = payload.split_at(cut);
            verify_parts(&prefix, &[a, b]).unwrap();
        }
        let mut bad = payload.clone();
        bad[199_999] ^= 1;
        assert!(verify_parts(&prefix, &[&bad]).is_err());
        assert!(verify_parts(&prefix, &[&payload[..131_072]]).is_err(), "a missing block passed");
        assert!(verify_parts(&prefix, &[&payload, &[0; 65_536]]).is_err(), "a surplus block passed");
    }

    #[test]
    fn another_objects_bytes_are_refused() {
        let header = verify_prefix(&sample(b"x")).unwrap();
        let hash = key_hash("", b"k");
        assert!(header.expect(History(9), ObjectId(2), &hash, 1).is_err());
        assert!(header.expect(History(1), ObjectId(9), &hash, 1).is_err());
        assert!(header.expect(History(1), ObjectId(2), &key_hash("t", b"k"), 1).is_err());
        assert!(header.expect(History(1), ObjectId(2), &hash, 2).is_err());
    }
}
