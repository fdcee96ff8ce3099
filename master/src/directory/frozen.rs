//! `FrozenDirectory`: the state at one log index, written beside the apply loop.
//!
//! A freeze copies no record (M5): it starts an undo list in every shard. Apply notes a record there before it first
//! changes it; the writer prefers what is noted to what is there. So apply pauses for the shards' locks and for what is
//! small (nodes, segments, sessions, retired space), and later pays one copy per record it changes meanwhile.

use super::core::OpenPut;
use super::objects::{Record, Shards};
use super::snapshot::{MAGIC, write_object};
use super::varint::put_varint;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use tidepool_proto::{ObjectId, SegmentId};
use xxhash_rust::xxh3::Xxh3;

/// What object records refer to, as it was at the freeze.
#[derive(Debug)]
pub(super) struct References {
    /// Segment ids by slot.
    pub(super) segments: Vec<SegmentId>,
    /// The open puts.
    pub(super) open: BTreeMap<ObjectId, OpenPut>,
}

/// Encoded objects in one buffer, with where each starts.
#[derive(Debug, Default)]
pub(super) struct Objects {
    bytes: Vec<u8>,
    starts: Vec<(ObjectId, usize)>,
}

impl Objects {
    /// Encodes one more.
    pub(super) fn push(&mut self, record: &Record, references: &References) {
        self.starts.push((record.object, self.bytes.len()));
        write_object(references, record, &mut self.bytes);
    }

    /// Each object's bytes, by id.
    fn by_id(&self) -> Vec<&[u8]> {
        let ends = self.starts.iter().skip(1).map(|&(_, start)| start).chain([self.bytes.len()]);
        let mut objects: Vec<(ObjectId, &[u8])> =
            self.starts.iter().zip(ends).map(|(&(id, start), end)| (id, &self.bytes[start..end])).collect();
        objects.sort_unstable_by_key(|&(id, _)| id);
        objects.into_iter().map(|(_, bytes)| bytes).collect()
    }
}

/// Where the objects of a freeze are.
#[derive(Debug)]
pub(super) enum Source {
    /// In the shards, with their undo lists; the epoch tells whether the state was replaced since.
    Shards(Arc<Shards>, u64),
    /// Encoded at the freeze, because another freeze held the undo lists.
    Encoded(Objects),
}

/// The whole state at one index, to be written beside the apply loop.
#[derive(Debug)]
pub struct FrozenDirectory {
    pub(super) before_objects: Vec<u8>,
    pub(super) references: References,
    pub(super) source: Source,
    pub(super) after_objects: Vec<u8>,
}

impl FrozenDirectory {
    /// Writes it. Fails also when the whole state was replaced (a snapshot was installed) before it was written.
    pub fn write_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let gathered;
        let objects = match &self.source {
            Source::Encoded(objects) => objects,
            Source::Shards(shards, epoch) => {
                let mut objects = Objects::default();
                for number in 0..super::limits::SHARDS {
                    shards.read(number).frozen_records().for_each(|record| objects.push(record, &self.references));
                }
                if shards.epoch() != *epoch {
                    return Err(io::Error::other("the state was replaced before its snapshot was written"));
                }
                gathered = objects;
                &gathered
            }
        };
        let mut count = Vec::new();
        put_varint(&mut count, objects.starts.len() as u64);
        let mut hasher = Xxh3::new();
        let mut write = |bytes: &[u8]| {
            hasher.update(bytes);
            out.write_all(bytes)
        };
        for bytes in [&MAGIC[..], &self.before_objects, &count] {
            write(bytes)?;
        }
        for bytes in objects.by_id() {
            write(bytes)?;
        }
        write(&self.after_objects)?;
        let checksum = hasher.digest128();
        out.write_all(&checksum.to_le_bytes())
    }
}

impl Drop for FrozenDirectory {
    fn drop(&mut self) {
        if let Source::Shards(shards, _) = &self.source {
            shards.thaw();
        }
    }
}
