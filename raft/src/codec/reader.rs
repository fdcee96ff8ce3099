//! Primitives of the encoding: writers over `Vec<u8>`, a bounds-checked reader over `Bytes`.

use bytes::{Buf, Bytes};

use super::CodecError;

/// Reads a body front to back. Every read names its field in the error.
pub struct Reader {
    rest: Bytes,
}

impl Reader {
    /// Over the whole of `body`.
    pub fn new(body: Bytes) -> Reader {
        Reader { rest: body }
    }

    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// One byte.
    pub fn byte(&mut self, what: &'static str) -> Result<u8, CodecError> {
        if self.rest.is_empty() {
            return Err(CodecError::Truncated { what });
        }
        Ok(self.rest.get_u8())
    }

    /// A LEB128 integer in its shortest form: one value has one encoding.
    pub fn integer(&mut self, what: &'static str) -> Result<u64, CodecError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(CodecError::Invalid { what });
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return if byte == 0 && shift > 0 { Err(CodecError::Invalid { what }) } else { Ok(value) };
            }
        }
        Err(CodecError::Invalid { what })
    }

    /// A count or length of at most `max`.
    pub fn length(&mut self, what: &'static str, max: usize) -> Result<usize, CodecError> {
        let len = self.integer(what)?;
        match usize::try_from(len) {
            Ok(n) if n <= max => Ok(n),
            _ => Err(CodecError::TooLong { what, len, max }),
        }
    }

    /// 0 or 1.
    pub fn flag(&mut self, what: &'static str) -> Result<bool, CodecError> {
        match self.byte(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(CodecError::Invalid { what }),
        }
    }

    /// A length-prefixed slice of the frame; shares its memory.
    pub fn bytes(&mut self, what: &'static str, max: usize) -> Result<Bytes, CodecError> {
        let len = self.length(what, max)?;
        if len > self.rest.len() {
            return Err(CodecError::Truncated { what });
        }
        Ok(self.rest.split_to(len))
    }

    /// Length-prefixed UTF-8.
    pub fn text(&mut self, what: &'static str, max: usize) -> Result<String, CodecError> {
        let bytes = self.bytes(what, max)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| CodecError::Invalid { what })
    }

    /// A value that may be absent.
    pub fn option<T>(
        &mut self,
        what: &'static str,
        take: impl FnOnce(&mut Reader) -> Result<T, CodecError>,
    ) -> Result<Option<T>, CodecError> {
        if self.flag(what)? { take(self).map(Some) } else { Ok(None) }
    }
}

/// Appends a LEB128 integer.
pub fn put_integer(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value as u8 & 0x7f) | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends a length and the bytes.
pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_integer(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Appends a presence byte and the value.
pub fn put_option<T>(out: &mut Vec<u8>, value: Option<&T>, put: impl FnOnce(&mut Vec<u8>, &T)) {
    match value {
        None => out.push(0),
        Some(value) => {
            out.push(1);
            put(out, value);
        }
    }
}
