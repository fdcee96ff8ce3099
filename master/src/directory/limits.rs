//! Named limits of the directory and its replicated configuration.
//!
//! The constants are part of the feature level: a change to one changes what apply decides, on every master.

use tidepool_proto::capability::Secret;
use tidepool_proto::{Error, ErrorCode, LogTime};

/// The highest feature level that this binary knows. Entries and images above it are refused before anything of them is
/// acknowledged or applied (M6).
pub const FEATURE_LEVEL: u16 = 2;
/// Feature level of an empty directory: what every binary knows.
pub const FEATURE_LEVEL_FIRST: u16 = 1;
/// Feature level of a directory that goes on in another cluster; one that does begins at it at least.
pub const HISTORIES_FEATURE_LEVEL: u16 = 2;
/// Shards of the key space.
pub const SHARDS: usize = 1 << SHARD_BITS;
/// Width of a shard number.
pub const SHARD_BITS: u32 = 10;
/// Objects one shard may hold; fixes the width of a slot in the id index.
pub const OBJECTS_PER_SHARD_MAX: usize = 1 << (32 - SHARD_BITS);
/// Clusters that a directory may have been restored or recovered from, one after the other.
pub const ANCESTORS_MAX: usize = 64;
/// Registered datanodes.
pub const NODES_MAX: usize = 1 << 16;
/// Mounted segments of one datanode.
pub const SEGMENTS_PER_NODE_MAX: usize = 256;
/// Largest segment: 64 TiB.
pub const SEGMENT_BYTES_MAX: u64 = 64 << 40;
/// Bytes of all segments.
pub const POOL_BYTES_MAX: u64 = 1 << 60;
/// Open client sessions.
pub const SESSIONS_MAX: usize = 1 << 16;
/// Outcomes of key-named destructive ops kept per session for late duplicates (W8).
pub use tidepool_proto::OUTCOMES_PER_SESSION_MAX;
/// Victims one PutStart may name (W9).
pub const VICTIMS_PER_OP_MAX: usize = 4096;
/// Nodes one PutStart may exclude.
pub const EXCLUDED_NODES_MAX: usize = 64;
/// Ids one Retire, Reclaim, Discard, FenceAcknowledged or ExpireSessions may name.
pub const IDS_PER_OP_MAX: usize = 65_536;
/// Bytes of a node's advertised address.
pub const ADDRESS_BYTES_MAX: usize = 300;
/// Bytes of a host id.
pub const HOST_ID_BYTES_MAX: usize = 256;
/// Bytes of a tenant's name.
pub const TENANT_NAME_BYTES_MAX: usize = 128;
/// Registered tenants, the default one included.
pub const TENANTS_MAX: usize = 4096;
/// Bytes of a group's name.
pub const GROUP_NAME_BYTES_MAX: usize = 1024;
/// Objects of one group.
pub const GROUP_MEMBERS_MAX: usize = 1 << 14;
/// Share of the pool that one client may have granted and not ended (L5), in percent; `granted_bytes_min` in a small one.
pub const GRANTED_PERCENT_MAX: u64 = 10;
/// Longest soft pin: a day.
pub const SOFT_PIN_TTL_MAX_MS: u64 = 86_400_000;
/// Copies under way.
pub const COPIES_MAX: usize = 4096;
/// Tasks that run.
pub const TASKS_RUNNING_MAX: usize = 10_000;
/// Tasks that ended and are remembered.
pub const TASKS_ENDED_KEPT: usize = 1_000;
/// Bytes of a task's message.
pub const TASK_MESSAGE_BYTES_MAX: usize = 1024;
/// Largest data type.
pub const DATA_TYPE_MAX: u8 = 9;
/// Segments one PutStart may prefer.
pub const PREFERRED_SEGMENTS_MAX: usize = 64;
/// Bytes of a segment name.
pub const SEGMENT_NAME_BYTES_MAX: usize = 256;
/// Objects one page of a listing may hold.
pub const LIST_PAGE_MAX: usize = 10_000;
/// Objects one page of a listing may look at before it answers with a cursor instead.
pub const LIST_SCAN_MAX: usize = 1 << 16;

/// What SetConfig sets: replicated settings that apply or leases read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Clamps every lease (L3).
    pub lease_ttl_max_ms: u64,
    /// Age in log time after which an open put may be preempted or discarded.
    pub put_start_discard_timeout_ms: u64,
    /// Objects the directory may hold; more puts are refused RESOURCE_EXHAUSTED.
    pub objects_max: u64,
    /// Bytes that one client may have granted and not ended in any pool, however small (L5).
    pub granted_bytes_min: u64,
    /// Share of the pool that may be pinned for good by tenants without a quota of bytes, in percent; 100: no limit.
    pub hard_pinned_percent_max: u64,
    /// How segments are drawn for puts.
    pub strategy: Strategy,
    /// Keys the capabilities (W2); all zero until the first leader draws it. Never shown or logged.
    pub secret: Secret,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            lease_ttl_max_ms: 10_000,
            put_start_discard_timeout_ms: 30_000,
            objects_max: 1 << 28,
            granted_bytes_min: 256 << 20,
            hard_pinned_percent_max: 90,
            strategy: Strategy::default(),
            secret: Secret::default(),
        }
    }
}

impl Config {
    /// Refuses values that would stop the cluster or never let space return.
    pub fn check(&self) -> Result<(), Error> {
        const DAY_MS: u64 = 86_400_000;
        let range = |name: &str, value: u64, min: u64, max: u64| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(Error::new(ErrorCode::InvalidParams, format!("{name} is {value}; it must be {min} to {max}")))
        };
        range("lease_ttl_max_ms", self.lease_ttl_max_ms, 1, DAY_MS)?;
        range("put_start_discard_timeout_ms", self.put_start_discard_timeout_ms, 1, DAY_MS)?;
        range("hard_pinned_percent_max", self.hard_pinned_percent_max, 0, 100)?;
        range("granted_bytes_min", self.granted_bytes_min, 1, 1 << 60)?;
        range("objects_max", self.objects_max, 1, 1 << 32)
    }

    /// Bytes that one client may have granted and not ended in a pool of this many (L5).
    pub fn granted_bytes_max(&self, capacity_bytes: u64) -> u64 {
        (capacity_bytes / 100 * GRANTED_PERCENT_MAX).max(self.granted_bytes_min)
    }
}

/// How segments are drawn for a put's replicas, after those it prefers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Strategy {
    /// The better of two: balanced, and a newcomer takes less than twice its share.
    #[default]
    Balanced,
    /// One.
    Random,
    /// The best of six.
    FreeRatioFirst,
}

impl Strategy {
    /// All, in the order of their numbers.
    pub const ALL: [Strategy; 3] = [Strategy::Balanced, Strategy::Random, Strategy::FreeRatioFirst];

    /// Segments drawn at once.
    pub(super) fn candidates(self) -> usize {
        match self {
            Strategy::Balanced => 2,
            Strategy::Random => 1,
            Strategy::FreeRatioFirst => 6,
        }
    }
}

/// The configuration with what a leader needs to know of its past.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ConfigState {
    /// In force.
    pub config: Config,
    /// `lease_ttl_max_ms` before it was last lowered, or the present one.
    pub lease_ttl_max_before_ms: u64,
    /// When it was lowered: leases of the old length may live until then plus the old value (L3).
    pub lease_ttl_lowered_at: LogTime,
}
