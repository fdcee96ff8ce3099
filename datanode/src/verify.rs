//! Verification of a stored object in place, as far as its bytes have arrived.
//!
//! The datanode knows the object and its length from the grant and the history from its registration. It cannot know the key, so the
//! key hash is left to readers (I2).

use tidepool_proto::object::{self, BLOCK_BYTES, HEADER_BYTES};
use tidepool_proto::{Error, ErrorCode, History, ObjectId};

/// What an extent must hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Expected {
    pub(crate) history: History,
    pub(crate) object: ObjectId,
    /// Stored bytes: header, table and payload.
    pub(crate) stored_bytes: u64,
}

/// Follows bytes as they arrive; each is checked once, while it is likely to be in the cache.
#[derive(Debug)]
pub(crate) struct Verifier {
    expected: Expected,
    stage: Stage,
    /// Bytes from the extent's start that are known to be right.
    checked_bytes: u64,
}

#[derive(Debug)]
enum Stage {
    Header,
    Table { prefix_bytes: u64 },
    Blocks { prefix_bytes: u64 },
    Failed(Error),
}

impl Verifier {
    pub(crate) fn new(expected: Expected) -> Verifier {
        Verifier { expected, stage: Stage::Header, checked_bytes: 0 }
    }

    /// Bytes checked so far.
    pub(crate) fn checked_bytes(&self) -> u64 {
        self.checked_bytes
    }

    /// Checks what became checkable with `arrived`, the extent's first bytes. Once failed it stays failed.
    pub(crate) fn advance(&mut self, arrived: &[u8]) -> Result<(), Error> {
        if let Stage::Failed(error) = &self.stage {
            return Err(error.clone());
        }
        let result = self.step(arrived);
        if let Err(error) = &result {
            self.stage = Stage::Failed(error.clone());
        }
        result
    }

    /// Checks the rest; `whole` is all of the stored form.
    pub(crate) fn complete(&mut self, whole: &[u8]) -> Result<(), Error> {
        self.advance(whole)?;
        if self.checked_bytes == self.expected.stored_bytes {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::ChecksumMismatch,
            format!(
                "object {}: {} of {} bytes arrived",
                self.expected.object, self.checked_bytes, self.expected.stored_bytes
            ),
        ))
    }

    fn step(&mut self, arrived: &[u8]) -> Result<(), Error> {
        let Expected { stored_bytes, .. } = self.expected;
        let arrived = &arrived[..arrived.len().min(stored_bytes as usize)];
        if let Stage::Header = self.stage {
            if arrived.len() < HEADER_BYTES {
                return Ok(());
            }
            let prefix_bytes = self.check_header(&arrived[..HEADER_BYTES])?;
            self.stage = Stage::Table { prefix_bytes };
        }
        if let Stage::Table { prefix_bytes } = self.stage {
            let Some(prefix) = arrived.get(..prefix_bytes as usize) else { return Ok(()) };
            object::verify_prefix(prefix)?;
            self.checked_bytes = prefix_bytes;
            self.stage = Stage::Blocks { prefix_bytes };
        }
        if let Stage::Blocks { prefix_bytes } = self.stage {
            let (prefix, payload) = arrived.split_at(prefix_bytes as usize);
            let checked = self.checked_bytes - prefix_bytes;
            let whole = arrived.len() as u64 == stored_bytes;
            // The last block may be short; every other one is checked when it is whole.
            let checkable = if whole { payload.len() as u64 } else { payload.len() as u64 / BLOCK_BYTES * BLOCK_BYTES };
            if checkable > checked {
                let blocks = &payload[checked as usize..checkable as usize];
                object::verify_blocks(prefix, checked / BLOCK_BYTES, blocks).map_err(|e| self.named(e))?;
                self.checked_bytes = prefix_bytes + checkable;
            }
        }
        Ok(())
    }

    fn check_header(&self, bytes: &[u8]) -> Result<u64, Error> {
        let Expected { history, object, stored_bytes } = self.expected;
        let header = object::Header::decode(bytes).map_err(|e| self.named(e))?;
        if header.history != history || header.object != object {
            return Err(self.mismatch(format!("it says object {} of history {:x}", header.object, header.history.0)));
        }
        // Compared before it is used: a length near 2^64 would overflow the sums.
        if header.length > stored_bytes || object::stored_bytes(header.length) != stored_bytes {
            return Err(self.mismatch(format!(
                "its {} payload bytes do not fit the {stored_bytes} bytes of the grant",
                header.length
            )));
        }
        Ok(object::prefix_bytes(header.length))
    }

    fn mismatch(&self, what: String) -> Error {
        Error::new(
            ErrorCode::ChecksumMismatch,
            format!("header of object {} of history {:x}: {what}", self.expected.object, self.expected.history.0),
        )
    }

    fn named(&self, error: Error) -> Error {
        Error::new(error.code(), format!("object {}: {}", self.expected.object, error.message()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tidepool_proto::object::{build_prefix, key_hash};

    fn stored(payload: &[u8]) -> Vec<u8> {
        let mut bytes = build_prefix(History(1), ObjectId(2), key_hash("", b"k"), &[payload]);
        bytes.extend_from_slice(payload);
        bytes
    }

    fn expected(stored_bytes: usize) -> Expected {
        Expected { history: History(1), object: ObjectId(2), stored_bytes: stored_bytes as u64 }
    }

    fn verify_in_steps(bytes: &[u8], expected: Expected, step: usize) -> Result<(), Error> {
        let mut verifier = Verifier::new(expected);
        for arrived in (0..bytes.len()).step_by(step) {
            verifier.advance(&bytes[..arrived])?;
        }
        verifier.complete(bytes)
    }

    #[test]
    fn whole_objects_pass_in_any_steps() {
        for length in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 5] {
            let bytes = stored(&vec![9; length as usize]);
            for step in [1 << 20, 70_000, 4096, 61] {
                verify_in_steps(&bytes, expected(bytes.len()), step).unwrap();
            }
        }
    }

    #[test]
    fn a_short_or_long_arrival_is_refused() {
        let bytes = stored(&[7; 100_000]);
        let mut verifier = Verifier::new(expected(bytes.len()));
        assert!(verifier.complete(&bytes[..bytes.len() - 1]).is_err());
        for granted in [bytes.len() - 1, bytes.len() + 1, bytes.len() + 8, HEADER_BYTES] {
            assert!(Verifier::new(expected(granted)).complete(&bytes).is_err(), "{granted}");
        }
    }

    #[test]
    fn another_object_history_or_absurd_length_is_refused() {
        let bytes = stored(b"x");
        let e = expected(bytes.len());
        assert!(Verifier::new(Expected { history: History(3), ..e }).complete(&bytes).is_err());
        assert!(Verifier::new(Expected { object: ObjectId(3), ..e }).complete(&bytes).is_err());
        let absurd = object::Header {
            history: History(1),
            object: ObjectId(2),
            key_hash: [0; 16],
            length: u64::MAX,
            table_crc: 0,
        };
        assert!(Verifier::new(e).complete(&absurd.encode()).is_err());
    }

    #[test]
    fn once_failed_it_stays_failed() {
        let good = stored(&[7; 100_000]);
        let mut bad = good.clone();
        bad[70_000] ^= 1;
        let mut verifier = Verifier::new(expected(good.len()));
        assert!(verifier.advance(&bad).is_err());
        assert!(verifier.complete(&good).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_flipped_bit_is_found(length in 0usize..200_000, at in any::<prop::sample::Index>(), bit in 0u8..8, step in 1000usize..100_000) {
            let mut bytes = stored(&vec![3; length]);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(verify_in_steps(&bytes, expected(bytes.len()), step).is_err());
        }
    }
}
