//! One shard: its records as rows, and back into a shard of its own with all that follows from them.

use super::rows::{Bin, ObjectRow, OpenRow};
use super::{RestoreError, inconsistent};
use crate::directory::audit::{Account, CELL_SLOTS};
use crate::directory::core::{Core, OpenPut};
use crate::directory::digest::{Canonical, Digest, soft_pin_parts};
use crate::directory::groups::{GroupName, Joins};
use crate::directory::objects::{Asked, Location, Record, Replica, Shard, Shards, key_hash};
use crate::directory::op::{DataType, SessionId, SoftPinAction, TenantId};
use crate::directory::space::{Extent, Use};
use parking_lot::Mutex;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::ser::Serializer;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::object::{OBJECT_BYTES_MAX, extent_bytes};
use tidepool_proto::{LogTime, ObjectId, ReplicaId, SegmentId};

/// What object records refer to, as it was at the freeze.
#[derive(Debug)]
pub(super) struct References {
    /// Segment ids by slot.
    pub(super) segments: Vec<SegmentId>,
    /// The open puts.
    pub(super) open: BTreeMap<ObjectId, OpenPut>,
}

/// Records of a shard as rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Encoded {
    /// How many.
    pub(super) rows: u32,
    /// MessagePack.
    pub(super) bytes: Vec<u8>,
    /// Their part of the state digest, from the records themselves.
    pub(super) digest: u128,
}

/// Rows of these records in the order of their ids.
pub(super) fn encode<'a>(records: impl Iterator<Item = &'a Record>, references: &References) -> Encoded {
    let mut records: Vec<&Record> = records.collect();
    records.sort_unstable_by_key(|record| record.object);
    let mut digest = Digest::default();
    for record in &records {
        let open = if record.is_complete() { None } else { references.open.get(&record.object) };
        digest.add(|c| c.object_in(record, open, |slot| references.segments[slot as usize]));
    }
    let mut bytes = Vec::with_capacity(records.len() * 128);
    let mut serializer = rmp_serde::Serializer::new(&mut bytes);
    let rows = serializer.collect_seq(records.iter().map(|record| row(record, references)));
    rows.expect("rows are numbers and bytes");
    Encoded { rows: records.len() as u32, bytes, digest: digest.sum() }
}

fn row<'a>(record: &'a Record, references: &'a References) -> ObjectRow<'a> {
    let open = (!record.is_complete())
        .then(|| references.open.get(&record.object).expect("an object that is being put is open"));
    ObjectRow {
        object: record.object.0,
        tenant: record.tenant.0,
        key: Bin(&record.key),
        length: record.length,
        started: record.started.0,
        replicas: record
            .replicas
            .iter()
            .map(|replica| (replica.id.0, references.segments[replica.segment as usize].0, replica.offset))
            .collect(),
        copies: record.copies,
        granted: record.asked.granted(),
        wanted: record.asked.wanted(),
        stored_slots: record.stored_slots,
        data_type: record.data_type.0,
        hard_pinned: record.hard_pinned,
        soft_pinned_until: record.soft_pinned_until().0,
        group: Bin(record.group().map_or(&[][..], |name| name)),
        open: open.map(|open| {
            let (soft_pin, soft_pin_ttl_ms) = soft_pin_parts(open.soft_pin);
            OpenRow {
                token: Bin(&open.token),
                session: open.session.0,
                replaces: open.replaces.map_or(0, |old| old.0),
                soft_pin,
                soft_pin_ttl_ms,
            }
        }),
    }
}

/// Names of groups, shared by their members in all shards.
#[derive(Default)]
pub(super) struct GroupNames(Mutex<BTreeSet<GroupName>>);

impl GroupNames {
    fn shared(&self, tenant: TenantId, name: &[u8]) -> Arc<[u8]> {
        let name: GroupName = (tenant, name.into());
        let mut names = self.0.lock();
        if let Some((_, shared)) = names.get(&name) {
            return shared.clone();
        }
        names.insert(name.clone());
        name.1
    }
}

/// A shard that was read, and what of it belongs elsewhere.
#[derive(Default)]
pub(super) struct Loaded {
    pub(super) number: usize,
    pub(super) shard: Shard,
    pub(super) index: Vec<(ObjectId, Location)>,
    pub(super) extents: Vec<Extent>,
    /// Sums of the objects' records.
    pub(super) cells: Vec<u128>,
    record: Canonical,
    pub(super) tenants: BTreeMap<TenantId, Account>,
    pub(super) joins: Vec<(GroupName, ObjectId, Joins)>,
    pub(super) open: Vec<(ObjectId, OpenPut, u64)>,
    /// Fewer replicas than are wanted, or more.
    pub(super) degraded: Vec<ObjectId>,
    pub(super) extra: Vec<ObjectId>,
}

/// Reads the rows of a shard. `core` has the tenants and the segments.
pub(super) fn decode(
    number: usize,
    rows: u32,
    bytes: &[u8],
    core: &Core,
    names: &GroupNames,
) -> Result<Loaded, RestoreError> {
    let mut rows = Rows { loaded: Loaded { number, ..Loaded::default() }, rows, core, names, refused: None };
    let read = rmp_serde::Deserializer::from_read_ref(bytes).deserialize_seq(&mut rows);
    match (rows.refused, read) {
        (Some(refused), _) => Err(refused),
        (None, Err(error)) => Err(RestoreError::Damaged(format!("shard {number}: {error}"))),
        (None, Ok(())) => Ok(rows.loaded),
    }
}

/// Takes rows in one after the other, so that no list of them is made.
struct Rows<'c> {
    loaded: Loaded,
    rows: u32,
    core: &'c Core,
    names: &'c GroupNames,
    refused: Option<RestoreError>,
}

impl<'de> Visitor<'de> for &mut Rows<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rows", self.rows)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut rows: A) -> Result<(), A::Error> {
        let mut count = 0;
        while let Some(row) = rows.next_element::<ObjectRow<'de>>()? {
            count += 1;
            if let Err(refused) = self.loaded.add(row, self.core, self.names) {
                self.refused = Some(refused);
                return Err(A::Error::custom("a row contradicts the others"));
            }
        }
        if count != self.rows {
            return Err(A::Error::invalid_length(count as usize, &self));
        }
        Ok(())
    }
}

impl Loaded {
    fn add(&mut self, row: ObjectRow<'_>, core: &Core, names: &GroupNames) -> Result<(), RestoreError> {
        let (object, tenant) = (ObjectId(row.object), TenantId(row.tenant));
        if core.tenants.get(tenant).is_none() {
            return Err(inconsistent(format!("object {object} is of an unknown tenant")));
        }
        if row.length > OBJECT_BYTES_MAX {
            return Err(inconsistent(format!("object {object} has {} bytes", row.length)));
        }
        if row.replicas.is_empty() || row.replicas.len() > REPLICAS_PER_OBJECT_MAX {
            return Err(inconsistent(format!("object {object} has {} replicas", row.replicas.len())));
        }
        if self.index.last().is_some_and(|&(last, _)| last >= object) {
            return Err(inconsistent(format!("object {object} is out of order in shard {}", self.number)));
        }
        if (row.copies == 0) != row.open.is_some() {
            return Err(inconsistent(format!("object {object} is both being put and complete, or neither")));
        }
        let many = || inconsistent(format!("object {object} wants {} of {} replicas", row.wanted, row.granted));
        let asked = Asked::of(row.wanted, row.granted).ok_or_else(many)?;
        let open = row.open.as_ref().map(open_put).transpose()?;
        let mut record = Record {
            key: row.key.0.into(),
            object,
            length: row.length,
            started: LogTime(row.started),
            replicas: SmallVec::with_capacity(row.replicas.len()),
            extras: None,
            tenant,
            stored_slots: row.stored_slots,
            asked,
            copies: row.copies,
            data_type: DataType(row.data_type),
            hard_pinned: row.hard_pinned,
        };
        record.soft_pin(LogTime(row.soft_pinned_until));
        if !row.group.0.is_empty() {
            record.extras.get_or_insert_default().group = Some(names.shared(tenant, row.group.0));
        }
        for (id, segment, offset) in row.replicas {
            let slot = core.space.slot(SegmentId(segment)).map_err(|e| inconsistent(e.to_string()))?;
            record.replicas.push(Replica { id: ReplicaId(id), offset, segment: slot });
        }
        let hash = self.record.hash(|c| c.object(&record, open.as_ref(), &core.space));
        let at = self.place(record, open)?;
        let cell = at.slot() as usize / CELL_SLOTS;
        if self.cells.len() <= cell {
            self.cells.resize(cell + 1, 0);
        }
        self.cells[cell] = self.cells[cell].wrapping_add(hash);
        Ok(())
    }

    /// Puts a record into the shard, and notes what follows from it.
    fn place(&mut self, record: Record, open: Option<OpenPut>) -> Result<Location, RestoreError> {
        let (object, bytes) = (record.object, extent_bytes(record.length));
        let used_for = if open.is_some() { Use::Processing } else { Use::Complete };
        let account = self.tenants.entry(record.tenant).or_default();
        account.bytes += record.all_bytes();
        account.objects += 1;
        account.hard_pinned_bytes += record.hard_pinned_bytes();
        if record.is_degraded() {
            self.degraded.push(object);
        }
        if record.has_extra() {
            self.extra.push(object);
        }
        let replaces = open.and_then(|open| open.replaces);
        if let Some(name) = record.group_name() {
            let joins = match (record.is_complete(), replaces) {
                (true, _) => Joins::Finished,
                (false, None) => Joins::Put,
                (false, Some(_)) => Joins::Upsert,
            };
            self.joins.push((name, object, joins));
        }
        if let Some(open) = open {
            self.open.push((object, open, record.all_bytes()));
        }
        let hash = key_hash(record.tenant, &record.key);
        if Shards::shard_of(hash) != self.number || self.shard.is_full() {
            return Err(inconsistent(format!("object {object} is not of shard {}", self.number)));
        }
        let elder = self.shard.find(hash, record.tenant, &record.key).and_then(|slot| self.shard.record(slot));
        if elder.map(|r| (r.object, r.is_complete())) != replaces.map(|old| (old, true)) {
            return Err(inconsistent(format!("object {object} has another object's key")));
        }
        let replicas: SmallVec<[Replica; 2]> = record.replicas.iter().copied().collect();
        let at = self.shard.place(self.number, hash, record, replaces.is_none());
        self.index.push((object, at));
        self.extents.extend(replicas.iter().map(|replica| Extent {
            segment: replica.segment,
            offset: replica.offset,
            bytes,
            used_for,
            owner: Some(at),
        }));
        Ok(at)
    }
}

fn open_put(row: &OpenRow<'_>) -> Result<OpenPut, RestoreError> {
    let soft_pin = match row.soft_pin {
        0 => SoftPinAction::Preserve,
        1 => SoftPinAction::Enable { ttl_ms: row.soft_pin_ttl_ms },
        2 => SoftPinAction::Disable,
        other => return Err(inconsistent(format!("unknown soft pin action {other}"))),
    };
    Ok(OpenPut {
        token: array(row.token, "token")?,
        session: SessionId(row.session),
        replaces: Some(ObjectId(row.replaces)).filter(|old| old.0 != 0),
        soft_pin,
    })
}

/// Bytes of a fixed length.
pub(super) fn array<const N: usize>(bytes: Bin<'_>, what: &str) -> Result<[u8; N], RestoreError> {
    bytes.0.try_into().map_err(|_| inconsistent(format!("{what} has {} bytes, not {N}", bytes.0.len())))
}
