//! Guards that a simulation switches off, one at a time, to see that what they prevent would be found. Only the build that
//! simulates has them; there each guard asks [`Plant::is_on`], which is false on every thread that planted nothing.

use std::cell::Cell;

/// A guard that is left out. The rule it keeps is in parentheses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Plant {
    /// Log time is stamped from the time of day (T1).
    WallClock,
    /// Every life of the directory has the same number (I1).
    ConstantHistory,
    /// A datanode says stored without having verified (W3).
    SkipVerification,
    /// A datanode acknowledges a fence and lets the write go on (W5).
    FenceWithoutAbort,
    /// A put of a key that is being put is told that the object exists (W6).
    ExistsWhileProcessing,
    /// A numbered request that comes late is executed again (W8).
    LateDuplicate,
    /// Whether leases live is looked at before the mark that stops new ones is set (L1).
    LookBeforeMark,
    /// Reads and leases do not pass through the linearizer (R2).
    NoReadFence,
    /// A reader's word that a replica is corrupt drops it (R3).
    TrustReporter,
    /// A suspect datanode is listed again before it was heard (N1).
    ListUnheard,
    /// The end of a put is acknowledged before it is logged (ACK-DURABLE).
    LostWrite,
    /// One master applies some entries twice.
    DoubleApply,
    /// One master leaves some entries out.
    DroppedEntry,
    /// Space is reclaimed while leases on it live (L1).
    EarlyReuse,
    /// Space is granted that is in use (ONE-WRITER).
    DoubleGrant,
    /// A snapshot lacks some of the state (M2).
    SnapshotWithoutPart,
    /// A removal that was refused for a lease takes no number: a late attempt of it removes (W8).
    ForgottenRefusal,
    /// Datanodes are told a log time that no entry bears yet (W2).
    TimeAheadOfLog,
    /// A member of a group is evicted without the others.
    PartOfGroup,
    /// What is pinned for good is evicted like anything else.
    EvictPinned,
    /// A tenant's quota is not looked at.
    OverQuota,
    /// A listing leaves some objects out.
    ListingLacks,
    /// A listing names objects that are still being put.
    ListingInvents,
    /// A removal by match removes more than matches.
    MatchTooMuch,
    /// Whoever goes on alone does so from its snapshot, without what its log holds beyond (I1).
    ForgottenLog,
    /// Damaged frames of the log are taken for whole ones (M3).
    UncheckedFrame,
    /// Clients hardly call: the run shows nothing, which it must say.
    IdleClients,
}

thread_local! {
    static PLANTED: Cell<Option<Plant>> = const { Cell::new(None) };
}

/// Plants one on this thread, or none.
pub fn plant(what: Option<Plant>) {
    PLANTED.set(what);
}

impl Plant {
    /// All of them.
    pub const ALL: &'static [Plant] = &[
        Plant::WallClock,
        Plant::ConstantHistory,
        Plant::SkipVerification,
        Plant::FenceWithoutAbort,
        Plant::ExistsWhileProcessing,
        Plant::LateDuplicate,
        Plant::LookBeforeMark,
        Plant::NoReadFence,
        Plant::TrustReporter,
        Plant::ListUnheard,
        Plant::LostWrite,
        Plant::DoubleApply,
        Plant::DroppedEntry,
        Plant::EarlyReuse,
        Plant::DoubleGrant,
        Plant::SnapshotWithoutPart,
        Plant::ForgottenRefusal,
        Plant::TimeAheadOfLog,
        Plant::PartOfGroup,
        Plant::EvictPinned,
        Plant::OverQuota,
        Plant::ListingLacks,
        Plant::ListingInvents,
        Plant::MatchTooMuch,
        Plant::ForgottenLog,
        Plant::UncheckedFrame,
        Plant::IdleClients,
    ];

    /// Whether this thread runs without the guard.
    pub fn is_on(self) -> bool {
        PLANTED.get() == Some(self)
    }
}
