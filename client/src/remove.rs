//! Remove: the key-named destructive call, numbered so that a late duplicate is never executed (W8).

/// What a remove does about readers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RemoveMode {
    /// OBJECT_HAS_LEASE while a reader may be on it.
    #[default]
    RespectLease,
    /// Unlisted now; the bytes stay valid for live leases.
    Force,
}
