//! Looking without touching: where objects are, and which there are.

use bytes::Bytes;
use tidepool_proto::v1;

use crate::matching::Matching;

/// Directory entry of one object, and its replicas.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectStat {
    /// Id.
    pub object_id: u64,
    /// Payload bytes.
    pub length: u64,
    /// `PROCESSING` or `COMPLETE`.
    pub state: String,
    /// Where the copies are.
    pub replicas: Vec<ReplicaStat>,
    /// Live leases on it.
    pub leases: u32,
    /// Time until the last of them ends.
    pub lease_remaining_ms: u32,
    /// Log time since PutStart.
    pub age_ms: u64,
    /// What it holds.
    pub data_type: v1::DataType,
    /// Never evicted.
    pub hard_pinned: bool,
    /// Time until its soft pin ends; 0: it has none.
    pub soft_pin_remaining_ms: u64,
    /// Name of its group; empty: none.
    pub group: Bytes,
}

/// One copy.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplicaStat {
    /// As the directory has it.
    pub replica: v1::ReplicaStat,
    /// Address of its node, when known.
    pub address: String,
    /// Physical host of its node, when known.
    pub host_id: String,
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Key.
    pub key: Bytes,
    /// Id.
    pub object_id: u64,
    /// Payload bytes.
    pub length: u64,
    /// Copies.
    pub replicas: u32,
    /// What it holds.
    pub data_type: v1::DataType,
    /// Never evicted.
    pub hard_pinned: bool,
}

/// Which objects a listing wants.
#[derive(Clone, Debug, Default)]
pub struct ListFilter {
    /// Keys.
    pub matching: Matching,
    /// Objects that hold this; None: all.
    pub data_type: Option<v1::DataType>,
}

/// One page of a listing, in the order of the directory (by hash, stable).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListPage {
    /// Objects.
    pub objects: Vec<ListedObject>,
    /// True when there is more.
    pub more: bool,
    /// Where the next page starts: what to pass as `after`.
    pub next: Bytes,
}
