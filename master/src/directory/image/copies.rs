//! `Copies`: the records of a freeze, shard by shard, copied while apply goes on changing them.
//!
//! They are copied on a thread of its own that has the priority of whoever froze, and a few at a time. The image is encoded and
//! written at a low priority: a thread like that may stand still for many milliseconds, and apply would wait for every lock that it
//! holds then.

use crate::directory::limits::SHARDS;
use crate::directory::objects::{Record, Shards};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Builder;
use tidepool_raft::Replaced;

/// Slots copied under one lock: some microseconds.
const SLOTS_AT_ONCE: u32 = 64;
/// Shards copied ahead of who encodes them.
const SHARDS_AHEAD: usize = 4;

/// Its thread holds the undo lists until all is copied, or this is dropped.
#[derive(Debug)]
pub(super) struct Copies {
    shards: Arc<Shards>,
    /// Grows when the state is replaced.
    epoch: u64,
    /// Ends early when the state was replaced. None while it is dropped.
    records: Option<Receiver<Vec<Record>>>,
    /// Ends when the thread has given the undo lists back.
    thawed: Receiver<()>,
}

/// Gives the undo lists back, whatever becomes of the thread that has it.
struct Frozen(Arc<Shards>);

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

impl Copies {
    /// Starts undo lists; None when another freeze has them, or when no thread can be had. The caller keeps apply away.
    pub(super) fn begin(shards: &Arc<Shards>) -> Option<Copies> {
        if !shards.freeze() {
            return None;
        }
        let ((sender, records), (alive, thawed)) = (sync_channel(SHARDS_AHEAD), sync_channel(0));
        let (frozen, epoch) = (Frozen(Arc::clone(shards)), shards.epoch());
        let copying = move || {
            copy_all(&frozen.0, epoch, &sender);
            drop(frozen);
            drop::<SyncSender<()>>(alive);
        };
        // Where it cannot be started, what it would have owned is dropped with it.
        match Builder::new().name("tidepool-copies".to_owned()).spawn(copying) {
            Ok(_detached) => Some(Copies { shards: Arc::clone(shards), epoch, records: Some(records), thawed }),
            Err(error) => {
                tracing::warn!(%error, "no thread to copy a snapshot beside apply: apply waits for it");
                None
            }
        }
    }

    /// The records of the next shard.
    pub(super) fn next(&mut self) -> io::Result<Vec<Record>> {
        let records = self.records.as_ref().and_then(|records| records.recv().ok());
        records.ok_or_else(|| match self.shards.epoch() == self.epoch {
            true => io::Error::other("the thread that copies the records ended before it had all"),
            false => Replaced.into(),
        })
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // The thread ends at its next shard, and before somebody else's undo lists can begin.
        drop(self.records.take());
        let _ended = self.thawed.recv();
    }
}

fn copy_all(shards: &Shards, epoch: u64, sender: &SyncSender<Vec<Record>>) {
    for number in 0..SHARDS {
        let Some(records) = copy(shards, number, epoch) else { return };
        shards.forget(number);
        if sender.send(records).is_err() {
            return;
        }
    }
}

/// The records of one shard, or None when the state was replaced. What changes between two locks is in the undo list.
fn copy(shards: &Shards, number: usize, epoch: u64) -> Option<Vec<Record>> {
    let (mut records, mut from) = (Vec::with_capacity(shards.read(number).len()), 0);
    loop {
        let shard = shards.read(number);
        // Under the lock: whoever replaces the shards says so before.
        if shards.epoch() != epoch {
            return None;
        }
        let end = shard.slots() as u32;
        let to = end.min(from + SLOTS_AT_ONCE);
        records.extend(shard.frozen_records(from..to).cloned());
        if to == end {
            return Some(records);
        }
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::objects::{Asked, key_hash};
    use crate::directory::op::{DataType, TenantId};
    use parking_lot::Mutex;
    use smallvec::SmallVec;
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tidepool_proto::{LogTime, ObjectId};

    fn record(key: u64) -> Record {
        Record {
            key: key.to_string().into_bytes().into(),
            object: ObjectId(key),
            length: 0,
            started: LogTime(0),
            replicas: SmallVec::new(),
            extras: None,
            tenant: TenantId::DEFAULT,
            stored_slots: 0,
            asked: Asked::of(1, 1).unwrap(),
            copies: 1,
            data_type: DataType::default(),
            hard_pinned: false,
        }
    }

    fn hash(key: u64) -> u64 {
        key_hash(TenantId::DEFAULT, key.to_string().as_bytes())
    }

    /// A shard of many pieces, changed all the while: its copy is what it was at the freeze. Fails when the undo list is
    /// forgotten before the last piece is copied, and when a slot is noted after its change.
    #[test]
    fn a_shard_that_changes_while_it_is_copied_is_copied_as_it_was() {
        let shards = Arc::new(Shards::new());
        let of_one_shard = |key: &u64| Shards::shard_of(hash(*key)) == 0;
        let keys: Vec<u64> = (0..).filter(of_one_shard).take(10 * SLOTS_AT_ONCE as usize).collect();
        for key in &keys {
            shards.insert(hash(*key), record(*key));
        }
        let content = |records: &[Record]| -> BTreeMap<_, _> { records.iter().map(|r| (r.object, r.length)).collect() };
        let (applies, is_done) = (Mutex::new(()), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for key in keys.iter().cycle() {
                    if is_done.load(Ordering::Relaxed) {
                        return;
                    }
                    let _guard = applies.lock();
                    let at = shards.locate(hash(*key), TenantId::DEFAULT, key.to_string().as_bytes()).unwrap();
                    let mut changed = shards.remove(at).unwrap();
                    changed.length += 1;
                    shards.insert(hash(*key), changed);
                }
            });
            for round in 0..50 {
                let guard = applies.lock();
                let before = content(&shards.read(0).records().cloned().collect::<Vec<_>>());
                assert_eq!(before.len(), keys.len());
                let mut copies = Copies::begin(&shards).unwrap();
                drop(guard);
                assert!(Copies::begin(&shards).is_none(), "two freezes have one undo list");
                assert_eq!(content(&copies.next().unwrap()), before, "round {round}");
                assert!((1..SHARDS).all(|_| copies.next().unwrap().is_empty()));
            }
            is_done.store(true, Ordering::Relaxed);
        });
    }
}
