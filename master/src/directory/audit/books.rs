//! What the auditor adds up from the object records: their part of the digest, by cells that are recomputed at once, and
//! the accounts of tenants, segments and sessions, that are compared after a whole pass.

use super::part::Walked;
use crate::directory::core::OpenPut;
use crate::directory::digest::{Canonical, Sign};
use crate::directory::limits::SHARDS;
use crate::directory::objects::{Location, Record, SegmentSlot};
use crate::directory::op::{SessionId, TenantId};
use crate::directory::space::Space;
use std::collections::BTreeMap;

/// Slots of a shard that are recomputed together: what bounds a step of the auditor, whatever the directory holds.
pub(in crate::directory) const CELL_SLOTS: usize = 256;

/// Place of a cell: shard, and number within it.
pub(in crate::directory) type Cell = (usize, usize);

/// A tenant's or a session's account.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::directory) struct Account {
    pub(in crate::directory) bytes: u64,
    pub(in crate::directory) objects: u64,
    pub(in crate::directory) hard_pinned_bytes: u64,
}

/// A segment's bytes by use, and the extents in use of objects.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::directory) struct SegmentBooks {
    pub(in crate::directory) processing: u64,
    pub(in crate::directory) complete: u64,
    pub(in crate::directory) retired: u64,
    pub(in crate::directory) extents: u64,
}

/// Sums over what a pass has walked. They wrap, so that a wrong state is found and not a panic.
#[derive(Default, Debug)]
pub(in crate::directory) struct Books {
    pub(in crate::directory) tenants: Vec<Account>,
    pub(in crate::directory) segments: Vec<SegmentBooks>,
    pub(in crate::directory) sessions: BTreeMap<SessionId, Account>,
    pub(in crate::directory) records: u64,
    pub(in crate::directory) processing: u64,
    pub(in crate::directory) degraded: u64,
    pub(in crate::directory) extra: u64,
    pub(in crate::directory) unclean: u64,
}

impl Books {
    pub(in crate::directory) fn tenant(&mut self, id: TenantId) -> &mut Account {
        at(&mut self.tenants, usize::from(id.0))
    }

    pub(in crate::directory) fn segment(&mut self, slot: SegmentSlot) -> &mut SegmentBooks {
        at(&mut self.segments, slot as usize)
    }

    /// Books a record.
    fn count(&mut self, record: &Record, session: Option<SessionId>, sign: Sign) {
        let bytes = record.extent_bytes();
        let tenant = self.tenant(record.tenant);
        sign.count(&mut tenant.bytes, record.all_bytes());
        sign.count(&mut tenant.objects, 1);
        sign.count(&mut tenant.hard_pinned_bytes, record.hard_pinned_bytes());
        for replica in &record.replicas {
            let segment = self.segment(replica.segment);
            let used = if record.is_complete() { &mut segment.complete } else { &mut segment.processing };
            sign.count(used, bytes);
            sign.count(&mut segment.extents, 1);
        }
        sign.count(&mut self.records, 1);
        sign.count(&mut self.degraded, record.is_degraded().into());
        sign.count(&mut self.extra, record.has_extra().into());
        if !record.is_complete() {
            sign.count(&mut self.processing, 1);
            let account = self.sessions.entry(session.unwrap_or_default()).or_default();
            sign.count(&mut account.objects, 1);
            sign.count(&mut account.bytes, record.all_bytes());
            if *account == Account::default() {
                self.sessions.remove(&session.unwrap_or_default());
            }
        }
    }
}

fn at<T: Clone + Default>(of: &mut Vec<T>, place: usize) -> &mut T {
    if of.len() <= place {
        of.resize(place + 1, T::default());
    }
    &mut of[place]
}

/// The object records' part of the digest, in all and by cell, and the books of the running pass.
#[derive(Debug)]
pub(in crate::directory) struct ObjectSums {
    total: u128,
    cells: Box<[Vec<u128>]>,
    record: Canonical,
    walked: Walked<Cell>,
    pub(in crate::directory) books: Books,
}

impl ObjectSums {
    pub(in crate::directory) fn new() -> ObjectSums {
        ObjectSums {
            total: 0,
            cells: vec![Vec::new(); SHARDS].into(),
            record: Canonical::default(),
            walked: Walked::Nothing,
            books: Books::default(),
        }
    }

    /// Sum over all records.
    pub(in crate::directory) fn sum(&self) -> u128 {
        self.total
    }

    /// Sum of the cells; equal to that of all records.
    pub(in crate::directory) fn sum_of_cells(&self) -> u128 {
        self.cells.iter().flatten().fold(0, |sum, &cell| sum.wrapping_add(cell))
    }

    /// Running sum of a cell.
    pub(in crate::directory) fn cell(&self, (shard, number): Cell) -> u128 {
        self.cells[shard].get(number).copied().unwrap_or(0)
    }

    /// A record came or went.
    pub(in crate::directory) fn change(
        &mut self,
        at: Location,
        record: &Record,
        open: Option<&OpenPut>,
        space: &Space,
        sign: Sign,
    ) {
        let hash = self.record.hash(|c| c.object(record, open, space));
        let (shard, number) = (at.shard(), at.slot() as usize / CELL_SLOTS);
        sign.apply(&mut self.total, hash);
        let cells = &mut self.cells[shard];
        if cells.len() <= number {
            cells.resize(number + 1, 0);
        }
        sign.apply(&mut cells[number], hash);
        if self.walked.has(&(shard, number)) {
            self.books.count(record, open.map(|open| open.session), sign);
        }
    }

    /// Takes in a shard that was read: the sums of its cells.
    pub(in crate::directory) fn load(&mut self, shard: usize, cells: Vec<u128>) {
        self.total = cells.iter().fold(self.total, |sum, &cell| sum.wrapping_add(cell));
        self.cells[shard] = cells;
    }

    /// A pass begins.
    pub(in crate::directory) fn restart(&mut self) {
        self.walked = Walked::Nothing;
        self.books = Books::default();
    }

    /// Takes a record in that the pass has come to; says its part of the digest.
    pub(in crate::directory) fn walk(&mut self, record: &Record, open: Option<&OpenPut>, space: &Space) -> u128 {
        self.books.count(record, open.map(|open| open.session), Sign::Add);
        self.record.hash(|c| c.object(record, open, space))
    }

    /// The pass goes on at this cell; none: it has walked all.
    pub(in crate::directory) fn go_on_at(&mut self, next: Option<Cell>) {
        self.walked = next.map_or(Walked::All, Walked::Below);
    }

    /// Makes the running sums wrong.
    #[cfg(test)]
    pub(in crate::directory) fn spoil(&mut self, at: Location) {
        let cell = &mut self.cells[at.shard()][at.slot() as usize / CELL_SLOTS];
        *cell = cell.wrapping_add(1);
    }
}
