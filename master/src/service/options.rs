//! What a master is started with, and the named limits of its service.

use std::path::PathBuf;
use std::time::Duration;

use tidepool_proto::capability::GRANT_LIFETIME_MAX_MS;
use tidepool_proto::{Address, Error, ErrorCode, NodeId};
use tidepool_raft::{Agreement, ElectionProfile, Member};

use crate::directory::{Config, Strategy};
use crate::snapshots::{Location, RETAIN_MIN};

/// Settings of one master. Every limit is named here and shown by `tidepool config show`.
#[derive(Clone, Debug)]
pub struct MasterOptions {
    /// This master's id; unique in the quorum and never reused.
    pub node_id: NodeId,
    /// Identity, log and snapshots.
    pub data_dir: PathBuf,
    /// Where the RPC port binds.
    pub listen: Address,
    /// What others dial; must be routable for every member.
    pub advertise: Address,
    /// The initial quorum, this master included; the same list on every member.
    pub members: Vec<Member>,
    /// Whether a fresh master waits to be taken in by a cluster that exists; then `members` is empty.
    pub join: bool,
    /// Masters that are taken into the quorum as they come up, by whoever leads: after a restore, those that were listed.
    pub gather: Vec<Member>,
    /// Heartbeat and election timeouts.
    pub election: ElectionProfile,
    /// Lease of a read that asks for none in particular.
    pub lease_ttl_default: Duration,
    /// Longest lease; replicated when the first leader takes office.
    pub lease_ttl_max: Duration,
    /// After which an unfinished put may be preempted (log time).
    pub put_start_discard_timeout: Duration,
    /// What a new leader does when its reserve is gone before its predecessor's leases ran out (L4).
    pub failover_reclaim: FailoverReclaim,
    /// Beat interval given to datanodes.
    pub node_heartbeat_interval: Duration,
    /// How long the mounted segments must have been the same before a put that fits none of them is refused for good: a datanode that
    /// restarts leaves in order and comes back.
    pub fits_nowhere_after: Duration,
    /// Silence after which a datanode is SUSPECT.
    pub node_suspect_timeout: Duration,
    /// Silence after which a datanode's replicas are dropped.
    pub node_forget_timeout: Duration,
    /// Which objects go first when space is needed; one of `eviction::NAMES`.
    pub eviction_policy: String,
    /// Whether soft-pinned objects may be evicted when nothing else is left.
    pub evict_soft_pinned: bool,
    /// Soft pin of a put that asks for no time in particular.
    pub soft_pin_ttl_default: Duration,
    /// Objects in the directory; a put above it evicts by count. Replicated.
    pub objects_max: u64,
    /// How segments are drawn for puts. Replicated.
    pub allocation_strategy: Strategy,
    /// Whether puts prefer the segments of the caller's host.
    pub local_first: bool,
    /// Silence after which a client session without open puts ends.
    pub session_idle_timeout: Duration,
    /// Bytes a second that are copied for objects that lack a copy, and as many for hot ones.
    pub heal_bytes_per_second: u64,
    /// Bytes that one client may have granted and not ended in any pool, however small (L5). Replicated.
    pub granted_bytes_min: u64,
    /// Share of the pool that may be pinned for good by tenants without a quota of bytes, in percent; 100: no limit. Replicated.
    pub hard_pinned_percent_max: u64,
    /// How often the leader has every master audit one more shard; zero: never.
    pub audit_interval: Duration,
    /// What is done about objects that are read often.
    pub dynamic_replication: DynamicReplication,
    /// Reads within a window that make an object hot.
    pub dynamic_replication_reads: u32,
    /// The window.
    pub dynamic_replication_window: Duration,
    /// Replicas of a hot object, those that are wanted included.
    pub dynamic_replicas_max: usize,
    /// Calls slower than this are logged.
    pub slow_call: Duration,
    /// Log bytes after which a snapshot is taken and the log purged.
    pub snapshot_log_bytes: u64,
    /// Entries kept behind the snapshot for lagging standbys.
    pub keep_log_entries: u64,
    /// Where snapshots are published; none: nowhere.
    pub snapshot_location: Option<Location>,
    /// Time between two publications of one master; zero: only what the log's growth makes, and on demand.
    pub snapshot_interval: Duration,
    /// Published snapshots that this master keeps, at least two.
    pub snapshot_retain: usize,
    /// Bytes a second that publishing may take; 0: no limit.
    pub snapshot_upload_bytes_per_second: u64,
    /// Whether a master that is stopped publishes a last time.
    pub snapshot_on_shutdown: bool,
    /// Entries kept at most for a standby that is fed a snapshot, or catches up after one.
    pub feed_log_entries_max: u64,
    /// Bytes of snapshots sent to standbys a second; 0: as fast as it goes.
    pub snapshot_send_bytes_per_s: u64,
    /// How often the masters compare their states; zero: never, and a snapshot is good on its writer's own word.
    pub checkpoint_interval: Duration,
}

/// What is done about objects that are read often.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DynamicReplication {
    /// Nothing; reads are not counted.
    Off,
    /// They are counted and shown.
    Observe,
    /// They get replicas on other hosts.
    Enforce,
}

impl DynamicReplication {
    /// As the setting has it.
    pub fn name(self) -> &'static str {
        match self {
            DynamicReplication::Off => "off",
            DynamicReplication::Observe => "observe",
            DynamicReplication::Enforce => "enforce",
        }
    }
}

/// Choice of L4 for the first lease window of a term.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailoverReclaim {
    /// Reclaim space that the predecessor may have leased; a late reader gets a miss, and a metric counts it.
    Allow,
    /// Refuse the put with NO_SPACE until the window is over.
    Protect,
}

impl MasterOptions {
    /// Defaults for everything but identity and addresses.
    pub fn new(node_id: NodeId, data_dir: PathBuf, listen: Address, advertise: Address, members: Vec<Member>) -> Self {
        MasterOptions {
            node_id,
            data_dir,
            listen,
            advertise,
            members,
            join: false,
            gather: Vec::new(),
            election: ElectionProfile::Default,
            lease_ttl_default: Duration::from_secs(10),
            lease_ttl_max: Duration::from_secs(10),
            put_start_discard_timeout: Duration::from_secs(30),
            failover_reclaim: FailoverReclaim::Allow,
            node_heartbeat_interval: Duration::from_millis(200),
            fits_nowhere_after: Duration::from_secs(10),
            node_suspect_timeout: Duration::from_secs(2),
            node_forget_timeout: Duration::from_secs(600),
            eviction_policy: crate::eviction::NAMES[0].to_owned(),
            evict_soft_pinned: true,
            soft_pin_ttl_default: Duration::from_secs(1_800),
            objects_max: Config::default().objects_max,
            allocation_strategy: Strategy::default(),
            local_first: false,
            session_idle_timeout: Duration::from_secs(600),
            heal_bytes_per_second: 256 << 20,
            granted_bytes_min: Config::default().granted_bytes_min,
            hard_pinned_percent_max: Config::default().hard_pinned_percent_max,
            audit_interval: Duration::from_secs(1),
            dynamic_replication: DynamicReplication::Off,
            dynamic_replication_reads: 50,
            dynamic_replication_window: Duration::from_secs(10),
            dynamic_replicas_max: 2,
            slow_call: Duration::from_millis(500),
            snapshot_log_bytes: 256 << 20,
            keep_log_entries: 50_000,
            snapshot_location: None,
            snapshot_interval: Duration::from_secs(600),
            snapshot_retain: RETAIN_MIN,
            snapshot_upload_bytes_per_second: 0,
            snapshot_on_shutdown: true,
            feed_log_entries_max: 4_000_000,
            snapshot_send_bytes_per_s: 0,
            checkpoint_interval: Duration::from_secs(5),
        }
    }

    /// Refuses settings that contradict what others rely on.
    pub fn check(&self) -> Result<(), Error> {
        let longest = Duration::from_millis(GRANT_LIFETIME_MAX_MS);
        Config {
            lease_ttl_max_ms: self.lease_ttl_max.as_millis() as u64,
            put_start_discard_timeout_ms: self.put_start_discard_timeout.as_millis() as u64,
            objects_max: self.objects_max,
            granted_bytes_min: self.granted_bytes_min,
            hard_pinned_percent_max: self.hard_pinned_percent_max,
            ..Config::default()
        }
        .check()?;
        if self.put_start_discard_timeout > longest {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!(
                    "put_start_discard_timeout is {:?}; datanodes remember grants for {longest:?}, which is the limit",
                    self.put_start_discard_timeout
                ),
            ));
        }
        let window = self.dynamic_replication_window;
        if !(WINDOW_MIN..=WINDOW_MAX).contains(&window) {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("dynamic_replication_window is {window:?}; it must be {WINDOW_MIN:?} to {WINDOW_MAX:?}"),
            ));
        }
        if self.snapshot_location.as_ref().is_some_and(Location::names_a_cluster) {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                "snapshot_url ends with the directory of one cluster, which is for reading; name the directory above it",
            ));
        }
        if self.snapshot_retain < RETAIN_MIN {
            let why =
                format!("snapshot_retain is {}; keep {RETAIN_MIN} or more: one may be damaged", self.snapshot_retain);
            return Err(Error::new(ErrorCode::InvalidParams, why));
        }
        if self.lease_ttl_default > self.lease_ttl_max {
            return Err(Error::new(
                ErrorCode::InvalidParams,
                format!("lease_ttl {:?} is longer than lease_ttl_max {:?}", self.lease_ttl_default, self.lease_ttl_max),
            ));
        }
        Ok(())
    }

    /// The part that concerns the log.
    pub(super) fn raft(&self) -> tidepool_raft::Options {
        let mut raft = tidepool_raft::Options::new(
            self.node_id,
            self.data_dir.clone(),
            self.advertise.clone(),
            self.members.clone(),
        );
        raft.election = self.election;
        raft.join = self.join;
        // Not all at once: each member's log may grow a little more than the one's before it, up to a quarter.
        let rank = self.members.iter().filter(|member| member.node_id < self.node_id).count() as u64;
        let members = self.members.len().max(1) as u64;
        raft.snapshot_log_bytes = self.snapshot_log_bytes + self.snapshot_log_bytes / 4 / members * rank;
        raft.keep_log_entries = self.keep_log_entries;
        raft.feed_log_entries_max = self.feed_log_entries_max;
        raft.snapshot_send_bytes_per_s = self.snapshot_send_bytes_per_s;
        raft.agreement = if self.checkpoint_interval.is_zero() { Agreement::OwnWord } else { Agreement::Majority };
        raft
    }
}

/// Bounds of the window in which reads are counted.
const WINDOW_MIN: Duration = Duration::from_millis(100);
const WINDOW_MAX: Duration = Duration::from_secs(3_600);

/// Items one batch call may carry.
pub const BATCH_ITEMS_MAX: usize = 16_384;
/// Calls of one session being worked on; above it the stream is not read (HTTP/2 pushes back).
pub const SESSION_CALLS_MAX: usize = 1_024;
/// Ops waiting for an entry; above it calls answer RESOURCE_EXHAUSTED.
pub const QUEUED_OPS_MAX: usize = 65_536;
/// Entries proposed and not yet applied; while it is reached, ops gather for the next entry.
pub const ENTRIES_IN_FLIGHT_MAX: usize = 4;
/// Encoded bytes after which an entry is closed.
pub const ENTRY_BYTES_MAX: usize = 256 << 10;
/// Longest deadline that is honoured; longer ones are cut to it.
pub const DEADLINE_MAX: Duration = Duration::from_secs(300);
/// Objects of one page of a listing.
pub const LIST_PAGE_MAX: usize = 10_000;
/// Share of the pool, and of each segment, that may be under lease (L5), in percent.
pub const LEASED_PERCENT_MAX: u64 = 50;
/// Share of capacity that one client may have under lease (L5), in percent.
pub const LEASED_PERCENT_PER_CLIENT_MAX: u64 = 25;
/// Share of capacity kept free ahead of need (L4), in percent.
pub const RESERVE_PERCENT_MAX: u64 = 5;
/// Ids of one fence, verify or reclaim batch.
pub const REPLICA_IDS_PER_BATCH: usize = 1_024;
/// Corruption reports waiting for one node's verdict.
pub const VERIFIES_PER_NODE_MAX: usize = 1_024;
