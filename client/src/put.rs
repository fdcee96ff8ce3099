//! Put: PutStart, payload to the datanodes, PutEnd or PutRevoke.

use std::time::Duration;

use bytes::Bytes;

/// One object to store.
#[derive(Clone, Debug)]
pub struct PutItem {
    /// Key, 1 to 4096 bytes.
    pub key: Bytes,
    /// The payload is the concatenation of these parts. They are sent from where they are, never copied.
    pub value: Vec<Bytes>,
}

impl PutItem {
    /// An object whose payload is one part.
    pub fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> PutItem {
        PutItem { key: key.into(), value: vec![value.into()] }
    }
}

/// What to do when fewer copies than wanted can be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplicaMode {
    /// One copy is success; the outcome says how many were made.
    #[default]
    BestEffort,
    /// All copies, or the put fails and stores nothing.
    Strict,
}

/// Options of a put.
#[derive(Clone, Debug)]
pub struct PutOptions {
    /// Wanted copies.
    pub replica_num: u32,
    /// What to do when fewer can be made.
    pub mode: ReplicaMode,
    /// Time the call may take; None: the client's default.
    pub deadline: Option<Duration>,
}

impl Default for PutOptions {
    fn default() -> PutOptions {
        PutOptions { replica_num: 1, mode: ReplicaMode::BestEffort, deadline: None }
    }
}

/// A put that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PutOutcome {
    /// Copies this put made; 0 when the object existed.
    pub copies: u32,
    /// The key had a complete object already: nothing was written, that object stays (user report 41).
    pub already_existed: bool,
    /// Id of the object this put made; 0 when the object existed.
    pub object_id: u64,
}
