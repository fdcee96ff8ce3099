//! What a contender logs: one line a call, written when its end is known.

use serde::{Deserialize, Serialize};

/// What was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Asked {
    /// A put that an object under this key refuses.
    Put,
    /// A put that replaces what is there.
    Replace,
    /// A get, bytes checked.
    Get,
    /// Whether the key is there.
    Exist,
    /// A removal, forced or not.
    Remove,
}

/// How it ended, as far as the client can know.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ended {
    /// It did, or found, what was asked for.
    Ok,
    /// A get, a look or a removal found nothing.
    Absent,
    /// A put found an object there.
    Present,
    /// Refused, or failed: certainly without effect, and without an answer.
    Fail,
    /// No definite answer: a change may have happened, or happen yet.
    Unknown,
    /// A get returned bytes that nobody put.
    Corrupt,
}

/// One call of one process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContestRecord {
    /// Which process.
    pub process: u32,
    /// What.
    pub asked: Asked,
    /// On which key.
    pub key: String,
    /// The value that was put, or that came; 0: none.
    pub value: u64,
    /// Copies that an acknowledged put made; 0 of another call.
    pub copies: u32,
    /// When the schedule wanted it sent (CLOCK_MONOTONIC).
    pub intended_ns: u64,
    /// When it was sent.
    pub sent_ns: u64,
    /// When its end was known.
    pub done_ns: u64,
    /// How it ended.
    pub ended: Ended,
    /// The client had a reason of its own to call a key absent that the directory lists: it suspects a datanode, or could not read this key
    /// a moment ago. Then a look that found nothing says nothing.
    pub doubts: bool,
    /// Error text, empty for none.
    pub error: String,
}
