//! Which objects go first when space is needed.
//!
//! A `Policy` is told what happened (`inserted`, `requested`, `removed`) and asked for `victims`. It is pure: it reads no
//! clock and no random source, and the same events give the same answers. It is not replicated: the leader keeps one and
//! every standby keeps one warm by feeding it the same events.
//!
//! `lru` and `s3_fifo` are the known yardsticks; `adaptive`, the default, learns which chains of blocks come back, and
//! when. Start with the trait, then `adaptive`.

mod adaptive;
mod cells;
mod class;
mod ghosts;
mod judge;
mod lru;
mod model;
mod parents;
mod repeats;
mod resident;
mod s3_fifo;
mod shadow;
#[cfg(test)]
mod tests;

pub use adaptive::Adaptive;
pub use lru::Lru;
pub use s3_fifo::S3Fifo;

use tidepool_proto::ObjectId;

/// Names of the policies that `by_name` makes, the default first.
pub const NAMES: [&str; 3] = ["adaptive", "lru", "s3-fifo"];

/// Refused candidates after which one `victims` call gives up.
pub const REFUSALS_MAX: usize = 1024;

/// Candidates passed over after which it gives up.
pub const SKIPS_MAX: usize = 4096;

/// An object that became readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// Hash of tenant and key.
    pub key: u64,
    /// The object; an older object under the same key is replaced.
    pub object: ObjectId,
    /// Bytes that come free when it goes, all replicas together.
    pub bytes: u64,
    /// Objects of one group leave together.
    pub group: Option<u64>,
}

/// An object that may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Hash of tenant and key.
    pub key: u64,
    /// The object.
    pub object: ObjectId,
    /// Bytes that come free.
    pub bytes: u64,
    /// Its group.
    pub group: Option<u64>,
}

/// What is said of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It goes.
    Take,
    /// It is in use: it is put off, and looked at again later.
    Refuse,
    /// It is of no use to this call, which says nothing about it: it keeps its place, and this call passes over it.
    Skip,
}

/// An eviction policy. The events may arrive late and in pieces, but in the order in which they happened.
pub trait Policy: Send {
    /// An object became readable. A resident object under the same key is replaced.
    fn inserted(&mut self, object: Inserted);

    /// One request named these keys, in this order, resident or not. The order of a prompt's blocks is that of its
    /// prefix: each key is the child of the one before.
    fn requested(&mut self, keys: &[u64]);

    /// An object is gone, evicted or otherwise. An id that is not the resident one under this key is ignored.
    fn removed(&mut self, key: u64, object: ObjectId);

    /// Objects to evict, first to go first, until their bytes reach `bytes` or their number `limit`; a group is never
    /// split, so the last one may overshoot both, and goes only if all of it is taken. `REFUSALS_MAX` and `SKIPS_MAX`
    /// bound the looks. What is returned stays tracked until it is `removed` or `spared`, and is not returned again before,
    /// unless there is nothing else.
    fn victims(&mut self, bytes: u64, limit: usize, accept: &mut dyn FnMut(&Candidate) -> Answer) -> Vec<Candidate>;

    /// An object that `victims` returned does not go after all: it takes its place again. Of several, the last to go first.
    /// An id that is not resident under this key, or was not returned, is ignored.
    fn spared(&mut self, key: u64, object: ObjectId);

    /// Where a resident object stands among those that may go: the smaller, the sooner. None: not resident under this
    /// id, or others must go before it.
    fn rank(&self, key: u64, object: ObjectId) -> Option<u64>;

    /// Resident objects.
    fn len(&self) -> usize;

    /// Whether nothing is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the resident objects.
    fn bytes(&self) -> u64;

    /// Bytes of memory that the policy itself takes, an estimate from its tables' sizes.
    fn memory_bytes(&self) -> usize;
}

/// The policy of this name, empty; None when there is none.
pub fn by_name(name: &str) -> Option<Box<dyn Policy>> {
    match name {
        "adaptive" => Some(Box::new(Adaptive::new())),
        "lru" => Some(Box::new(Lru::new())),
        "s3-fifo" => Some(Box::new(S3Fifo::new())),
        _ => None,
    }
}

/// Spreads a key's bits (the finaliser of MurmurHash3), so that no table depends on how keys were hashed.
fn spread(key: u64) -> u64 {
    let mut x = key;
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}
