//! The rows of an image: MessagePack arrays, fields in the order in which they stand here.
//!
//! A field is only ever added at the end of a row, with `#[serde(default)]`: then images of the feature level before can
//! still be read. Everything else is a new format version.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes, as MessagePack `bin`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Bin<'a>(pub(super) &'a [u8]);

impl Serialize for Bin<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Bin<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bin<'a>, D::Error> {
        <&'a [u8]>::deserialize(deserializer).map(Bin)
    }
}

/// Everything but the objects and what is under way with them: the part `segments`.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct SegmentsPart<'a> {
    /// (index, term) of the last applied entry.
    pub(super) applied: Option<(u64, u64)>,
    pub(super) clock: u64,
    #[serde(borrow)]
    pub(super) config: ConfigRow<'a>,
    /// Index and digest of the last checkpoint.
    pub(super) checkpoint: Option<(u64, Bin<'a>)>,
    pub(super) next_tenant: u16,
    pub(super) tenants: Vec<TenantRow<'a>>,
    pub(super) nodes: Vec<NodeRow<'a>>,
    pub(super) segments: Vec<SegmentRow<'a>>,
    pub(super) sessions: Vec<SessionRow<'a>>,
    pub(super) retired: Vec<RetiredRow>,
    pub(super) lost: Vec<LostRow<'a>>,
    /// Left out at the first level, whose images have nothing here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) since_level_2: Option<SinceLevel2<'a>>,
}

/// What came to the part `segments` with the second feature level.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct SinceLevel2<'a> {
    /// As in the image's head.
    pub(super) feature_level: u16,
    #[serde(borrow)]
    pub(super) ancestors: Vec<AncestorRow<'a>>,
}

/// A cluster that the directory was in before.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct AncestorRow<'a> {
    #[serde(borrow)]
    pub(super) cluster: Bin<'a>,
    pub(super) history: u64,
    pub(super) until: u64,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct ConfigRow<'a> {
    pub(super) lease_ttl_max_ms: u64,
    pub(super) put_start_discard_timeout_ms: u64,
    pub(super) objects_max: u64,
    pub(super) granted_bytes_min: u64,
    pub(super) hard_pinned_percent_max: u64,
    pub(super) strategy: u8,
    #[serde(borrow)]
    pub(super) secret: Bin<'a>,
    pub(super) lease_ttl_max_before_ms: u64,
    pub(super) lease_ttl_lowered_at: u64,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct TenantRow<'a> {
    pub(super) tenant: u16,
    pub(super) name: &'a str,
    pub(super) quota_bytes: u64,
    pub(super) quota_objects: u64,
    pub(super) refuse: bool,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct NodeRow<'a> {
    pub(super) node: u64,
    #[serde(borrow)]
    pub(super) node_uuid: Bin<'a>,
    pub(super) process_uuid: Bin<'a>,
    pub(super) incarnation: u64,
    pub(super) address: &'a str,
    pub(super) host_id: &'a str,
    /// 0: heard, 1: suspect.
    pub(super) contact: u8,
    pub(super) earlier_processes: Vec<Bin<'a>>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct SegmentRow<'a> {
    pub(super) segment: u64,
    pub(super) node: u64,
    pub(super) name: &'a str,
    pub(super) capacity: u64,
    pub(super) draining: bool,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct SessionRow<'a> {
    pub(super) session: u64,
    #[serde(borrow)]
    pub(super) client_uuid: Bin<'a>,
    pub(super) host_id: &'a str,
    pub(super) floor: u64,
    /// Sequence, kind of answer, its number.
    pub(super) outcomes: Vec<(u64, u8, u64)>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct RetiredRow {
    pub(super) replica: u64,
    pub(super) object: u64,
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) clean: bool,
}

/// Keys of members that a group has lost.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct LostRow<'a> {
    pub(super) tenant: u16,
    #[serde(borrow)]
    pub(super) group: Bin<'a>,
    pub(super) keys: Vec<Bin<'a>>,
}

/// One object: a row of a shard in the part `metadata`.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct ObjectRow<'a> {
    pub(super) object: u64,
    pub(super) tenant: u16,
    #[serde(borrow)]
    pub(super) key: Bin<'a>,
    pub(super) length: u64,
    pub(super) started: u64,
    /// Id, segment id, offset.
    pub(super) replicas: Vec<(u64, u64, u64)>,
    /// 0 while it is being put.
    pub(super) copies: u8,
    pub(super) granted: u8,
    /// Replicas it should have.
    pub(super) wanted: u8,
    pub(super) stored_slots: u16,
    pub(super) data_type: u8,
    pub(super) hard_pinned: bool,
    pub(super) soft_pinned_until: u64,
    /// Empty: none.
    pub(super) group: Bin<'a>,
    /// Set while it is being put.
    pub(super) open: Option<OpenRow<'a>>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct OpenRow<'a> {
    #[serde(borrow)]
    pub(super) token: Bin<'a>,
    pub(super) session: u64,
    /// 0: none.
    pub(super) replaces: u64,
    /// 0: preserve, 1: enable, 2: disable.
    pub(super) soft_pin: u8,
    pub(super) soft_pin_ttl_ms: u64,
}

/// What is under way with objects: the part `task_manager`.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct TasksPart<'a> {
    pub(super) copies: Vec<CopyRow>,
    #[serde(borrow)]
    pub(super) tasks: Vec<TaskRow<'a>>,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct CopyRow {
    pub(super) replica: u64,
    pub(super) object: u64,
    /// 0: none.
    pub(super) instead_of: u64,
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) started: u64,
    pub(super) task: u64,
}

#[derive(Serialize, Deserialize, Debug)]
pub(super) struct TaskRow<'a> {
    pub(super) task: u64,
    pub(super) kind: u8,
    pub(super) state: u8,
    pub(super) unmount: bool,
    #[serde(borrow)]
    pub(super) token: Bin<'a>,
    pub(super) object: u64,
    pub(super) sources: Vec<u64>,
    pub(super) targets: Vec<u64>,
    pub(super) concurrency: u32,
    pub(super) created: u64,
    pub(super) ended: u64,
    pub(super) done: u64,
    pub(super) done_bytes: u64,
    pub(super) left: u64,
    pub(super) message: &'a str,
}
