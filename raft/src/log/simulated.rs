//! A disk in memory that forgets, tears and fails on demand: what the deterministic simulation runs on.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use super::disk::{Disk, StoreId, StoredState, Write};

/// A simulated disk. Clones are the same disk. What was written and not synced survives a [`crash`](Self::crash)
/// only as far as the crash says, in order; syncs and writes can be made to fail.
#[derive(Clone)]
pub struct SimulatedDisk {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    store_id: StoreId,
    /// What a reader sees: everything written.
    seen: Content,
    /// What a crash leaves for sure.
    durable: Content,
    /// Written after the last sync, in order.
    pending: Vec<Write>,
    sync_delay: Duration,
    fail_write: Option<io::ErrorKind>,
    fail_sync: Option<io::ErrorKind>,
    /// The machine lost power: this handle belongs to a dead process.
    dead: bool,
    syncs: u64,
}

#[derive(Clone, Default)]
struct Content {
    entries: BTreeMap<u64, Bytes>,
    state: StoredState,
}

impl Content {
    fn apply(&mut self, write: &Write) {
        match write {
            Write::Append { index, frame } => {
                self.entries.insert(*index, frame.clone());
            }
            Write::Truncate(range) => self.entries.retain(|index, _| !range.contains(index)),
            Write::Vote(frame) => self.state.vote = Some(frame.clone()),
            Write::Committed(frame) => self.state.committed = Some(frame.clone()),
            Write::Synced(index) => self.state.synced = *index,
            Write::Purge { purged, delete } => {
                self.state.purged = Some(purged.clone());
                if !delete.is_empty() {
                    self.entries.retain(|index, _| !delete.contains(index));
                    self.state.deleted = delete.end;
                }
            }
        }
    }
}

impl SimulatedDisk {
    /// An empty disk.
    pub fn new(store_id: StoreId) -> SimulatedDisk {
        Self::with(store_id, Content::default(), Duration::ZERO)
    }

    fn with(store_id: StoreId, content: Content, sync_delay: Duration) -> SimulatedDisk {
        let inner = Inner {
            store_id,
            seen: content.clone(),
            durable: content,
            pending: Vec::new(),
            sync_delay,
            fail_write: None,
            fail_sync: None,
            dead: false,
            syncs: 0,
        };
        SimulatedDisk { inner: Arc::new(Mutex::new(inner)) }
    }

    /// Steps written and not synced: a crash may keep any number of the first ones.
    pub fn pending(&self) -> usize {
        self.inner.lock().pending.len()
    }

    /// Power cut. The disk after the reboot holds what was synced and the first `kept` of the pending steps; with
    /// `torn`, the entry after these is found with its second half missing. This disk fails from now on.
    pub fn crash(&self, kept: usize, torn: bool) -> SimulatedDisk {
        let mut inner = self.inner.lock();
        inner.dead = true;
        let mut content = inner.durable.clone();
        for write in inner.pending.iter().take(kept) {
            content.apply(write);
        }
        if torn && let Some(Write::Append { index, frame }) = inner.pending.get(kept) {
            content.entries.insert(*index, frame.slice(..frame.len() / 2));
        }
        Self::with(inner.store_id, content, inner.sync_delay)
    }

    /// Virtual time of a sync, for stores that flush on a task.
    pub fn set_sync_delay(&self, delay: Duration) {
        self.inner.lock().sync_delay = delay;
    }

    /// The next write fails, and nothing of it is seen.
    pub fn fail_next_write(&self, kind: io::ErrorKind) {
        self.inner.lock().fail_write = Some(kind);
    }

    /// The next sync fails; what it should have covered stays pending.
    pub fn fail_next_sync(&self, kind: io::ErrorKind) {
        self.inner.lock().fail_sync = Some(kind);
    }

    /// Faults that were asked for and did not happen yet do not.
    pub fn heal(&self) {
        let inner = &mut *self.inner.lock();
        (inner.fail_write, inner.fail_sync) = (None, None);
    }

    /// Syncs so far.
    pub fn syncs(&self) -> u64 {
        self.inner.lock().syncs
    }

    /// The index below which every entry was known to be synced when the last batch was written.
    pub fn synced(&self) -> u64 {
        self.inner.lock().seen.state.synced
    }

    /// Flips one bit of a stored entry, on the platter and for readers.
    pub fn flip_bit(&self, index: u64, bit: usize) {
        let inner = &mut *self.inner.lock();
        for content in [&mut inner.seen, &mut inner.durable] {
            if let Some(frame) = content.entries.get_mut(&index) {
                let mut bytes = frame.to_vec();
                let at = bit % (bytes.len() * 8);
                bytes[at / 8] ^= 1 << (at % 8);
                *frame = Bytes::from(bytes);
            }
        }
    }

    /// Loses one stored entry.
    pub fn lose(&self, index: u64) {
        let inner = &mut *self.inner.lock();
        inner.seen.entries.remove(&index);
        inner.durable.entries.remove(&index);
    }

    /// Indexes of the entries a reader would find.
    pub fn indexes(&self) -> Vec<u64> {
        self.inner.lock().seen.entries.keys().copied().collect()
    }
}

fn dead() -> io::Error {
    io::Error::other("the machine lost power")
}

impl Disk for SimulatedDisk {
    fn store_id(&self) -> StoreId {
        self.inner.lock().store_id
    }

    fn write(&self, batch: &[Write]) -> io::Result<()> {
        let inner = &mut *self.inner.lock();
        if inner.dead {
            return Err(dead());
        }
        if let Some(kind) = inner.fail_write.take() {
            return Err(kind.into());
        }
        for write in batch {
            inner.seen.apply(write);
            inner.pending.push(write.clone());
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let inner = &mut *self.inner.lock();
        if inner.dead {
            return Err(dead());
        }
        if let Some(kind) = inner.fail_sync.take() {
            return Err(kind.into());
        }
        for write in inner.pending.drain(..) {
            inner.durable.apply(&write);
        }
        inner.syncs += 1;
        Ok(())
    }

    fn read(&self, range: Range<u64>, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>> {
        let inner = self.inner.lock();
        if inner.dead {
            return Err(dead());
        }
        let mut bytes = 0;
        let fits = |(_, frame): &(u64, Bytes)| {
            let fits = bytes == 0 || bytes < bytes_max;
            bytes += frame.len();
            fits
        };
        Ok(inner.seen.entries.range(range).map(|(index, frame)| (*index, frame.clone())).take_while(fits).collect())
    }

    fn scan(&self, from: u64, visit: &mut dyn FnMut(u64, Bytes) -> io::Result<()>) -> io::Result<()> {
        let entries = self.inner.lock().seen.entries.clone();
        entries.range(from..).try_for_each(|(index, frame)| visit(*index, frame.clone()))
    }

    fn state(&self) -> io::Result<StoredState> {
        Ok(self.inner.lock().seen.state.clone())
    }

    fn reclaim(&self, _index: u64) -> io::Result<()> {
        Ok(())
    }

    fn tears(&self) -> bool {
        true
    }

    fn sync_delay(&self) -> Duration {
        self.inner.lock().sync_delay
    }
}
