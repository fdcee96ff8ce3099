//! Varints and byte strings: the primitives that ops and snapshots are written in.

use thiserror::Error;

/// Why bytes could not be read. Reading never panics and never allocates more than the input can fill.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum DecodeError {
    /// The bytes end inside a value.
    #[error("entry ends inside {0}")]
    Truncated(&'static str),
    /// A number does not fit its type.
    #[error("{0} does not fit its type")]
    Overflow(&'static str),
    /// A value that this version does not know.
    #[error("unknown {what} {value}")]
    Unknown {
        /// Which.
        what: &'static str,
        /// Its number.
        value: u64,
    },
    /// Text is not UTF-8.
    #[error("{0} is not utf-8")]
    NotText(&'static str),
    /// Bytes are left over.
    #[error("{0} bytes follow the end")]
    Trailing(usize),
    /// More ops than an entry may carry.
    #[error("{0} ops; an entry carries at most 1024")]
    TooManyOps(usize),
    /// Written under rules that this binary does not have.
    #[error("feature level {0} is above this binary's; run the newer binary")]
    FeatureLevel(u16),
}

/// Appends a LEB128 varint.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a length and the bytes.
pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Takes values off the front of borrowed bytes.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub(super) fn remaining(&self) -> usize {
        self.rest.len()
    }

    pub(super) fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or(DecodeError::Truncated(what))?;
        self.rest = rest;
        Ok(head)
    }

    pub(super) fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated(what))?;
        self.rest = rest;
        Ok(*head)
    }

    pub(super) fn byte(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        Ok(self.array::<1>(what)?[0])
    }

    pub(super) fn varint(&mut self, what: &'static str) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::Overflow(what));
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(DecodeError::Overflow(what))
    }

    /// A count of things of at least `bytes_each` encoded bytes: never more than the input can hold.
    pub(super) fn count(&mut self, bytes_each: usize, what: &'static str) -> Result<usize, DecodeError> {
        let count = self.varint(what)?;
        if count > (self.rest.len() / bytes_each) as u64 {
            return Err(DecodeError::Truncated(what));
        }
        Ok(count as usize)
    }

    pub(super) fn bytes(&mut self, what: &'static str) -> Result<&'a [u8], DecodeError> {
        let n = self.count(1, what)?;
        self.take(n, what)
    }

    pub(super) fn text(&mut self, what: &'static str) -> Result<&'a str, DecodeError> {
        std::str::from_utf8(self.bytes(what)?).map_err(|_| DecodeError::NotText(what))
    }

    pub(super) fn ids<T>(&mut self, what: &'static str, id: fn(u64) -> T) -> Result<Vec<T>, DecodeError> {
        let n = self.count(1, what)?;
        (0..n).map(|_| Ok(id(self.varint(what)?))).collect()
    }

    pub(super) fn finish(self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            n => Err(DecodeError::Trailing(n)),
        }
    }
}
