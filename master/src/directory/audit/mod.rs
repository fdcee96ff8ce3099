//! The auditor: recomputes, a bounded step an op, what is kept up incrementally, and says where the two differ (M2).
//!
//! A pass walks the object records cell by cell (`books`), then groups, retired replicas, sessions, lost members and free
//! extents, then compares the accounts. What was walked and changes before the pass ends is booked again by the change
//! itself, so a pass needs no pause: its sums are those of the state at the end. What a change forgets to tell the books
//! is found by the pass after it.
//!
//! The ops have no effect on the state. How far a pass has come is private to a master, like the slots of its records: two
//! masters walk the same records in different steps. A violation is told to the service; apply goes on.

mod books;
mod part;
mod step;

use super::Directory;
use super::groups::GroupName;
use super::limits::SHARDS;
use super::op::SessionId;
use tidepool_proto::{ObjectId, ReplicaId, SegmentId};

pub(super) use books::{Account, CELL_SLOTS, ObjectSums};
pub(super) use part::Part;
pub(super) use step::step;

/// Slots, members, replicas, outcomes or extents that one step looks at before it ends; one more cell, session or group of
/// lost members is finished.
pub const STEP_ITEMS: usize = 256;
/// Violations kept for the service; more are only counted.
const VIOLATIONS_KEPT: usize = 100;

/// What was found wrong.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ViolationKind {
    /// A part of the state digest is not that of its records.
    Digest,
    /// Bytes of a segment do not add up, or its extents overlap or are owned by nobody (SPACE-ADDS-UP).
    Space,
    /// A segment's, tenant's or session's counter is not the sum over the records.
    Counter,
    /// A record is not where an index says, or an index names what is not there.
    Index,
    /// A group is not its members.
    Group,
}

impl ViolationKind {
    /// All of them.
    pub const ALL: [ViolationKind; 5] = [
        ViolationKind::Digest,
        ViolationKind::Space,
        ViolationKind::Counter,
        ViolationKind::Index,
        ViolationKind::Group,
    ];

    /// Name for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            ViolationKind::Digest => "digest",
            ViolationKind::Space => "space",
            ViolationKind::Counter => "counter",
            ViolationKind::Index => "index",
            ViolationKind::Group => "group",
        }
    }
}

/// One difference between the state and what is kept up about it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// What kind.
    pub kind: ViolationKind,
    /// Ids, what was expected and what was seen.
    pub facts: String,
    /// Log index of the step that found it.
    pub index: u64,
}

/// How far the auditor of this process has come.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AuditProgress {
    /// Whole passes.
    pub passes: u64,
    /// Log index at which the last one ended.
    pub last_pass_index: u64,
    /// Violations found, those of every pass counted.
    pub violations: u64,
}

/// Where a pass is.
#[derive(Clone, Default, Debug)]
enum Phase {
    #[default]
    Start,
    Objects(books::Cell),
    Groups(Option<GroupCursor>),
    Retired(ReplicaId),
    Sessions(SessionId),
    LostMembers(Option<GroupName>),
    FreeExtents(SegmentId, u64),
    Accounts,
}

/// The next object of a group's members, or of the upserts of them.
#[derive(Clone, Debug)]
struct GroupCursor {
    group: GroupName,
    upserts: bool,
    object: ObjectId,
}

/// Parts of the digest that may be large, by key.
#[derive(Default, Debug)]
pub(super) struct Parts {
    pub(super) retired: Part<ReplicaId>,
    pub(super) sessions: Part<SessionId>,
    pub(super) lost_members: Part<GroupName>,
}

impl Parts {
    pub(super) fn sum(&self) -> u128 {
        self.retired.sum().wrapping_add(self.sessions.sum()).wrapping_add(self.lost_members.sum())
    }
}

/// The running pass, and what was found.
#[derive(Debug)]
pub(super) struct Auditor {
    phase: Phase,
    pub(super) step_items: usize,
    pub(super) progress: AuditProgress,
    found: Vec<Violation>,
}

impl Default for Auditor {
    fn default() -> Auditor {
        Auditor { phase: Phase::Start, step_items: STEP_ITEMS, progress: AuditProgress::default(), found: Vec::new() }
    }
}

impl Auditor {
    /// A new one where the whole state was replaced; what was found before it stays counted.
    pub(super) fn after(before: &Auditor) -> Auditor {
        Auditor { progress: before.progress, found: before.found.clone(), ..Auditor::default() }
    }

    fn note(&mut self, kind: ViolationKind, index: u64, facts: String) {
        self.progress.violations += 1;
        if self.found.len() < VIOLATIONS_KEPT {
            self.found.push(Violation { kind, facts, index });
        }
    }
}

impl Directory {
    /// Violations that were found since the last call.
    pub fn take_violations(&self) -> Vec<Violation> {
        if self.core.read().auditor.found.is_empty() {
            return Vec::new();
        }
        std::mem::take(&mut self.core.write().auditor.found)
    }

    /// Makes a counter wrong, for tests of who is told.
    #[cfg(test)]
    pub fn spoil_a_counter(&self) {
        self.core.write().space.spoil();
    }

    /// Makes the running digest wrong, as an error of apply would.
    #[cfg(test)]
    pub fn spoil_the_digest(&self, by: u64) {
        self.core.write().digest.add(|c| c.clock(tidepool_proto::LogTime(u64::MAX - by)));
    }

    /// Flips a bit of a record in memory, which the running digest does not notice.
    #[cfg(test)]
    pub fn flip_a_record(&self) {
        let at = self.core.read().index.values().next().copied().expect("an object");
        self.shards.write(at.shard()).record_mut(at.slot()).expect("it is there").stored_slots ^= 2;
    }

    /// Slots of object records, vacant ones included: what a pass walks.
    pub fn slots(&self) -> u64 {
        (0..SHARDS).map(|number| self.shards.read(number).slots() as u64).sum()
    }

    /// How far the auditor of this process has come.
    pub fn audit_progress(&self) -> AuditProgress {
        self.core.read().auditor.progress
    }
}
