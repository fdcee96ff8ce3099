//! `Keys`: many keys as one blob and lengths, checked once before use.

use crate::error::{Error, ErrorCode};
use crate::v1;

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 4096;

/// Refuses an empty or over-long key.
pub fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() {
        return Err(Error::new(ErrorCode::InvalidKey, "key is empty; keys are 1 to 4096 bytes"));
    }
    if key.len() > KEY_BYTES_MAX {
        let shown = String::from_utf8_lossy(&key[..64]);
        return Err(Error::new(
            ErrorCode::InvalidKey,
            format!("key '{shown}...' has {} bytes; the limit is {KEY_BYTES_MAX}", key.len()),
        ));
    }
    Ok(())
}

impl v1::Keys {
    /// Packs keys.
    pub fn pack<K: AsRef<[u8]>>(keys: impl IntoIterator<Item = K>) -> v1::Keys {
        let mut blob = Vec::new();
        let mut lengths = Vec::new();
        for key in keys {
            blob.extend_from_slice(key.as_ref());
            lengths.push(key.as_ref().len() as u32);
        }
        v1::Keys { blob: blob.into(), lengths }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// True when there is no key.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Iterates the keys after checking that the lengths add up to the blob.
    pub fn iter(&self) -> Result<impl Iterator<Item = &[u8]>, Error> {
        let total: u64 = self.lengths.iter().map(|&n| u64::from(n)).sum();
        if total != self.blob.len() as u64 {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("key lengths add up to {total} bytes but the blob has {}", self.blob.len()),
            ));
        }
        let mut at = 0usize;
        Ok(self.lengths.iter().map(move |&n| {
            let key = &self.blob[at..at + n as usize];
            at += n as usize;
            key
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip() {
        let keys = v1::Keys::pack(["a", "", "ccc"]);
        let back: Vec<&[u8]> = keys.iter().unwrap().collect();
        assert_eq!(back, [b"a" as &[u8], b"", b"ccc"]);
    }

    #[test]
    fn lengths_that_do_not_add_up_are_refused() {
        let keys = v1::Keys { blob: vec![1, 2].into(), lengths: vec![u32::MAX, 3] };
        assert_eq!(keys.iter().map(|_| ()).unwrap_err().code(), ErrorCode::InvalidParams);
    }
}
