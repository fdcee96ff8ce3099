//! Values that prove themselves: the bytes of a key follow from the key and a seed, so any reader can check them.

use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

/// The bytes of `key` under `seed`.
pub fn value_of(key: &str, seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = xxh3_64_with_seed(key.as_bytes(), seed);
    let mut value = Vec::with_capacity(bytes.next_multiple_of(8));
    while value.len() < bytes {
        // splitmix64: one multiplication chain a word, and every key its own sequence.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
    }
    value.truncate(bytes);
    value
}

/// Content hash as written into acknowledgement logs: xxh3-128 in hexadecimal.
pub fn content_hash(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_from_key_seed_and_length_only() {
        let value = value_of("a", 1, 1000);
        assert_eq!(value.len(), 1000);
        assert_eq!(value, value_of("a", 1, 1000));
        assert_ne!(content_hash(&value), content_hash(&value_of("b", 1, 1000)));
        assert_ne!(content_hash(&value), content_hash(&value_of("a", 2, 1000)));
        assert_ne!(content_hash(&value), content_hash(&value[..999]));
        assert!(value_of("a", 1, 0).is_empty());
    }
}
