//! The one error enum: stable numeric codes, each with the Mooncake number its users test for.

use crate::v1;

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal, $mooncake:literal, $retry:ident;)+) => {
        /// Stable error codes. A code is never renumbered or reused; `docs/reference/errors.md` has a page part for each.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u32)]
        pub enum ErrorCode { $($(#[$doc])* $name = $code),+ }

        impl ErrorCode {
            /// Every code, in order.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name),+];
            /// The code of a number from the wire; an unknown one (a newer peer's) reads as INTERNAL.
            pub fn from_u32(code: u32) -> ErrorCode {
                match code { $($code => ErrorCode::$name,)+ _ => ErrorCode::Internal }
            }
            /// Upper-case name, as printed.
            pub fn name(self) -> &'static str {
                match self { $(ErrorCode::$name => $text),+ }
            }
            /// The number Mooncake's API returns for it (0 or negative).
            pub fn mooncake(self) -> i32 {
                match self { $(ErrorCode::$name => $mooncake),+ }
            }
            /// Whether the same call may succeed later without anything being changed by the caller.
            pub fn is_retryable(self) -> bool {
                match self { $(ErrorCode::$name => error_codes!(@ $retry)),+ }
            }
        }
    };
    (@ retry) => { true };
    (@ fatal) => { false };
}

error_codes! {
    /// No error.
    Ok = 0, "OK", 0, fatal;
    /// A bug or a violated assumption in the answering process.
    Internal = 1, "INTERNAL", -1, fatal;
    /// An argument is out of its stated range.
    InvalidParams = 2, "INVALID_PARAMS", -600, fatal;
    /// A key is empty or too long.
    InvalidKey = 3, "INVALID_KEY", -600, fatal;
    /// The deadline passed; the outcome of a mutation is unknown.
    DeadlineExceeded = 4, "DEADLINE_EXCEEDED", -901, retry;
    /// This master does not lead; the answer may carry a hint.
    NotLeader = 5, "NOT_LEADER", -1011, retry;
    /// No quorum, or the process is starting or stopping.
    Unavailable = 6, "UNAVAILABLE", -900, retry;
    /// A named limit (queue, batch, in-flight bytes, leases) is reached; slow down and retry.
    ResourceExhausted = 7, "RESOURCE_EXHAUSTED", -1401, retry;
    /// The peer belongs to another cluster, history or protocol version, or is not who was dialled.
    WrongCluster = 8, "WRONG_CLUSTER", -300, fatal;
    /// The feature is off, or not in this version.
    NotSupported = 9, "NOT_SUPPORTED", -1012, fatal;
    /// The tenant is not registered.
    TenantNotRegistered = 10, "TENANT_NOT_REGISTERED", -1701, fatal;

    /// The tenant's quota is used up and nothing of its own could be evicted.
    TenantQuotaExceeded = 11, "TENANT_QUOTA_EXCEEDED", -1700, retry;
    /// The tenant still holds objects.
    TenantNotEmpty = 12, "TENANT_NOT_EMPTY", -1702, fatal;

    /// No such object.
    ObjectNotFound = 20, "OBJECT_NOT_FOUND", -704, fatal;
    /// A COMPLETE object has this key already.
    ObjectAlreadyExists = 21, "OBJECT_ALREADY_EXISTS", -705, fatal;
    /// Another writer is putting this key right now.
    PutInProgress = 22, "PUT_IN_PROGRESS", -705, retry;
    /// The object exists but no copy is COMPLETE.
    NotReady = 23, "REPLICA_IS_NOT_READY", -703, retry;
    /// A reader holds a lease.
    ObjectHasLease = 24, "OBJECT_HAS_LEASE", -706, retry;
    /// The read took longer than its lease; the bytes were discarded.
    LeaseExpired = 25, "LEASE_EXPIRED", -707, retry;
    /// The grant was revoked, preempted or never was; nothing was stored.
    GrantLost = 26, "GRANT_LOST", -700, fatal;
    /// The put was ended already.
    AlreadyEnded = 27, "ALREADY_ENDED", -700, fatal;
    /// Not the client that started this put.
    IllegalClient = 28, "ILLEGAL_CLIENT", -601, fatal;
    /// No space: nothing evictable made room in time.
    NoSpace = 29, "NO_SPACE", -200, retry;
    /// Fewer copies than a strict put asked for.
    NotEnoughReplicas = 30, "NOT_ENOUGH_REPLICAS", -200, retry;
    /// No copy could be read.
    ReplicaUnavailable = 31, "REPLICA_UNAVAILABLE", -702, retry;
    /// A session's sequence number is below its floor: a late duplicate, not executed.
    StaleRequest = 32, "STALE_REQUEST", -600, fatal;
    /// The session is unknown: say hello again.
    SessionUnknown = 33, "SESSION_UNKNOWN", -103, retry;

    /// A copy or move of this object is under way.
    ObjectHasTask = 34, "OBJECT_HAS_REPLICATION_TASK", -708, retry;
    /// The object has no such replica.
    ReplicaNotFound = 35, "REPLICA_NOT_FOUND", -710, fatal;
    /// The object has a replica there already.
    ReplicaAlreadyExists = 36, "REPLICA_ALREADY_EXISTS", -711, fatal;
    /// The put would pin more for good than may be without a quota.
    HardPinLimit = 37, "HARD_PIN_LIMIT_EXCEEDED", -200, fatal;
    /// The put fits nowhere, however much is evicted: no segment is large enough, there are too few of them for its copies, or it is
    /// above its tenant's whole quota.
    FitsNowhere = 38, "FITS_NOWHERE", -200, fatal;

    /// No such segment, or of another node.
    SegmentNotFound = 40, "SEGMENT_NOT_FOUND", -101, fatal;
    /// The segment name is taken with another size.
    SegmentAlreadyExists = 41, "SEGMENT_ALREADY_EXISTS", -102, fatal;
    /// The node is not registered.
    NodeUnknown = 42, "NODE_UNKNOWN", -103, retry;
    /// A newer incarnation of this node is registered; this process must exit.
    Fenced = 43, "FENCED", -101, fatal;

    /// No such task, or it was forgotten after it ended.
    TaskNotFound = 50, "TASK_NOT_FOUND", -1400, fatal;
    /// As many tasks as may be are waiting or running.
    TaskLimit = 51, "TASK_PENDING_LIMIT_EXCEEDED", -1401, retry;

    /// The data plane failed: connection, short transfer, refused item.
    TransferFailed = 60, "TRANSFER_FAIL", -800, retry;
    /// Bytes did not match their checksum, id or key.
    ChecksumMismatch = 61, "CHECKSUM_MISMATCH", -801, retry;
    /// The capability's MAC is wrong or it has expired.
    CapabilityRefused = 62, "CAPABILITY_REFUSED", -600, fatal;
    /// Address or length lies outside the segment or the grant.
    OutOfBounds = 63, "OUT_OF_BOUNDS", -600, fatal;
    /// The caller's buffer is smaller than the object.
    BufferTooSmall = 64, "BUFFER_TOO_SMALL", -600, fatal;
    /// A frame or message is malformed or over its limit; the connection is closed.
    BadFrame = 65, "BAD_FRAME", -600, fatal;

    /// The node id was a member of the quorum before; ids are never used again.
    MemberIdUsed = 70, "MEMBER_ID_USED", -600, fatal;
    /// Too few of the members that would be left answer: the quorum would be lost.
    QuorumAtRisk = 71, "QUORUM_AT_RISK", -900, retry;
    /// Another change of the members is under way.
    MembershipChanging = 72, "MEMBERSHIP_CHANGING", -900, retry;
    /// The new member follows, but did not catch up in time to vote.
    MemberBehind = 73, "MEMBER_BEHIND", -901, retry;
    /// This master left the quorum for good: it takes part in nothing more, and its process ends.
    MemberRemoved = 74, "MEMBER_REMOVED", -900, fatal;

    /// A binary is too old for what the cluster's log holds, or the cluster's feature level is too low for what is asked.
    FeatureLevel = 75, "FEATURE_LEVEL", -1012, fatal;

    /// The local log or snapshot is damaged; the node refuses to serve.
    StorageCorrupt = 80, "STORAGE_CORRUPT", -1, fatal;
    /// A write or fsync failed; the process ends.
    StorageFailed = 81, "STORAGE_FAILED", -1503, fatal;
    /// The masters hold different states at one log index: the one in the minority starts over from what they agree on, and without
    /// a majority nothing is written.
    StateDiverged = 82, "STATE_DIVERGED", -900, retry;
}

/// An error with its facts: code, and a message that names key, node, limit and remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct Error {
    code: ErrorCode,
    message: String,
    retry_after_ms: u32,
    leader: Option<v1::LeaderHint>,
    node: Option<String>,
}

impl Error {
    /// An error with its message.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Error {
        debug_assert!(code != ErrorCode::Ok);
        Error { code, message: message.into(), retry_after_ms: 0, leader: None, node: None }
    }
    /// Adds advice when to retry.
    pub fn retry_after(mut self, ms: u32) -> Error {
        self.retry_after_ms = ms;
        self
    }
    /// Adds who leads.
    pub fn with_leader(mut self, leader: Option<v1::LeaderHint>) -> Error {
        self.leader = leader;
        self
    }
    /// Adds which node it is about, as an address or an id; empty: none. Not sent over the wire: each side names the nodes it dealt with.
    pub fn with_node(mut self, node: impl Into<String>) -> Error {
        self.node = Some(node.into()).filter(|node| !node.is_empty());
        self
    }
    /// The code.
    pub fn code(&self) -> ErrorCode {
        self.code
    }
    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }
    /// When to retry, in milliseconds; 0 means no advice.
    pub fn retry_after_ms(&self) -> u32 {
        self.retry_after_ms
    }
    /// Who leads, when the answering master knew.
    pub fn leader(&self) -> Option<&v1::LeaderHint> {
        self.leader.as_ref()
    }
    /// The node it is about, when that is known here.
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }
    /// As the failure of item `index` of a batch.
    pub fn for_item(&self, index: usize) -> v1::ItemError {
        let known = self.code.as_known_before();
        v1::ItemError {
            index: index as u32,
            code: known.unwrap_or(self.code) as u32,
            message: self.message.clone(),
            retry_after_ms: self.retry_after_ms,
            newer_code: known.map_or(0, |_| self.code as u32),
        }
    }
}

impl From<Error> for v1::CallError {
    fn from(e: Error) -> Self {
        v1::CallError { code: e.code as u32, message: e.message, retry_after_ms: e.retry_after_ms, leader: e.leader }
    }
}

impl From<v1::CallError> for Error {
    fn from(e: v1::CallError) -> Self {
        Error {
            code: ErrorCode::from_u32(e.code),
            message: e.message,
            retry_after_ms: e.retry_after_ms,
            leader: e.leader,
            node: None,
        }
    }
}

impl ErrorCode {
    /// What is sent beside a code that clients of earlier releases do not know, and would take for INTERNAL.
    fn as_known_before(self) -> Option<ErrorCode> {
        (self == ErrorCode::FitsNowhere).then_some(ErrorCode::NoSpace)
    }

    /// The code of an item's failure: the more precise one, if this release knows it.
    pub fn of_item(error: &v1::ItemError) -> ErrorCode {
        match ErrorCode::from_u32(error.newer_code) {
            ErrorCode::Ok | ErrorCode::Internal => ErrorCode::from_u32(error.code),
            newer => newer,
        }
    }
}

impl From<v1::ItemError> for Error {
    fn from(e: v1::ItemError) -> Self {
        Error {
            code: ErrorCode::of_item(&e),
            message: e.message,
            retry_after_ms: e.retry_after_ms,
            leader: None,
            node: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_read_back() {
        let mut seen = std::collections::BTreeSet::new();
        for &code in ErrorCode::ALL {
            assert!(seen.insert(code as u32), "{code:?} reuses a number");
            assert_eq!(ErrorCode::from_u32(code as u32), code);
            assert!(code.mooncake() <= 0);
        }
        assert_eq!(ErrorCode::from_u32(u32::MAX), ErrorCode::Internal);
    }

    #[test]
    fn mooncake_users_find_their_numbers() {
        for (code, number) in [
            (ErrorCode::ObjectNotFound, -704),
            (ErrorCode::ObjectHasLease, -706),
            (ErrorCode::LeaseExpired, -707),
            (ErrorCode::NoSpace, -200),
            (ErrorCode::ChecksumMismatch, -801),
            (ErrorCode::InvalidParams, -600),
        ] {
            assert_eq!(code.mooncake(), number);
        }
    }
}
