//! The keys of a run, the bytes of their values, and what is special about some keys: tenant, group, pin.

use tidepool_raft::sim::SplitMix;

use crate::history::Value;

/// The tenant with a quota.
pub const SMALL: &str = "small";
/// Keys repeat what is special about them after this many.
const ROUND: u64 = 4;

/// What a run makes special.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Keys {
    /// Keys 0 and 1 of each round are one group.
    pub groups: bool,
    /// Key 2 of each round is put with a hard pin, now and then.
    pub pins: bool,
    /// Key 3 of each round is of the tenant [`SMALL`], which may hold so many objects; 0: there is no such tenant.
    pub quota_objects: u64,
    /// Whether a put over the quota is refused; otherwise it evicts the tenant's own.
    pub refuse: bool,
}

/// Key number `key`, as bytes.
pub fn key_name(key: u64) -> Vec<u8> {
    format!("key-{key}").into_bytes()
}

/// Whose key it is.
pub fn tenant(keys: Keys, key: u64) -> &'static str {
    if keys.quota_objects > 0 && key % ROUND == 3 { SMALL } else { "" }
}

/// Which group an object put under it joins; empty: none.
pub fn group(keys: Keys, key: u64) -> &'static [u8] {
    if keys.groups && key % ROUND < 2 { b"pair" } else { b"" }
}

/// Whether what is put under it may be pinned for good.
pub fn is_pinned(keys: Keys, key: u64) -> bool {
    keys.pins && key % ROUND == 2
}

/// The bytes of a value: nobody else's are the same.
pub fn content(value: Value, length: u64) -> Vec<u8> {
    let mut random = SplitMix::new(value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ length);
    let mut bytes = Vec::with_capacity(length as usize + 8);
    while (bytes.len() as u64) < length {
        bytes.extend_from_slice(&random.number().to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}
