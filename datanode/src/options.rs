//! What a datanode is told at its start, and its named limits.

use std::path::PathBuf;
use std::time::Duration;

use tidepool_proto::Address;

use crate::segment::SEGMENT_BYTES_MIN;

/// Whether to ask for huge pages of the hugetlb pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// Plain pages.
    #[default]
    Off,
    /// Huge pages where the host has enough free ones, else plain pages and one warning.
    Try,
}

/// Whether pages are taken in the background after the start, or when they are first written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Prefault {
    /// In the background, while serving.
    #[default]
    Background,
    /// When first written.
    Lazy,
}

/// Named limits.
#[derive(Clone, Copy, Debug)]
pub struct DatanodeLimits {
    /// gRPC connections at once.
    pub rpc_connections_max: usize,
    /// Data-plane connections at once.
    pub data_connections_max: usize,
    /// Connections that have not yet sent their first four bytes.
    pub greeting_connections_max: usize,
    /// How long a connection may take for its first four bytes.
    pub greeting_timeout: Duration,
    /// Writes open at once.
    pub open_writes_max: usize,
    /// Verifications for the leader that wait or run; what is over the limit is left to the leader to ask again.
    pub verifications_max: usize,
    /// Copies from other datanodes made at once (N2); more wait.
    pub copies_max: usize,
}

impl Default for DatanodeLimits {
    fn default() -> Self {
        DatanodeLimits {
            rpc_connections_max: 256,
            data_connections_max: 4096,
            greeting_connections_max: 1024,
            greeting_timeout: Duration::from_secs(5),
            open_writes_max: 16_384,
            verifications_max: 1024,
            copies_max: 4,
        }
    }
}

/// Timing of the conversation with the masters.
#[derive(Clone, Copy, Debug)]
pub struct MasterTiming {
    /// One dial, and one unary call, to one master.
    pub dial_timeout: Duration,
    /// Silence after which the leader counts as lost; at least four heartbeat intervals are allowed in any case.
    pub heartbeat_timeout: Duration,
    /// First pause after a round over all masters found no leader; it doubles from there.
    pub retry_min: Duration,
    /// Longest pause.
    pub retry_max: Duration,
    /// How long a graceful leave may take.
    pub leave_timeout: Duration,
}

impl Default for MasterTiming {
    fn default() -> Self {
        MasterTiming {
            dial_timeout: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_millis(500),
            retry_min: Duration::from_millis(20),
            retry_max: Duration::from_secs(1),
            leave_timeout: Duration::from_secs(5),
        }
    }
}

/// What [`crate::Datanode::start`] needs.
#[derive(Clone, Debug)]
pub struct DatanodeOptions {
    /// Holds the node's uuid; one process at a time.
    pub data_dir: PathBuf,
    /// Where to listen, for data and RPC. Port 0 takes a free one.
    pub listen: Address,
    /// What others are told to dial; the listen address when None. Port 0 stands for the port that was taken.
    pub advertise: Option<Address>,
    /// All members of the master quorum, or some of them.
    pub masters: Vec<Address>,
    /// Physical host: replicas spread over host ids.
    pub host_id: String,
    /// Bytes of each segment; see [`split_dram`].
    pub segments: Vec<u64>,
    /// Names of the first segments; the others are `dram-0`, `dram-1`, ... by their places.
    pub segment_names: Vec<String>,
    /// Huge pages.
    pub huge_pages: HugePages,
    /// Prefaulting.
    pub prefault: Prefault,
    /// Timing.
    pub timing: MasterTiming,
    /// Limits.
    pub limits: DatanodeLimits,
}

impl DatanodeOptions {
    /// Defaults around what has none.
    pub fn new(
        data_dir: impl Into<PathBuf>,
        listen: Address,
        masters: Vec<Address>,
        segments: Vec<u64>,
    ) -> DatanodeOptions {
        DatanodeOptions {
            data_dir: data_dir.into(),
            listen,
            advertise: None,
            masters,
            host_id: String::new(),
            segments,
            segment_names: Vec::new(),
            huge_pages: HugePages::default(),
            prefault: Prefault::default(),
            timing: MasterTiming::default(),
            limits: DatanodeLimits::default(),
        }
    }
}

/// Splits an amount of DRAM into segments of at most `segment_bytes`, as equal as whole megabytes allow.
pub fn split_dram(dram_bytes: u64, segment_bytes: u64) -> Vec<u64> {
    const UNIT: u64 = 1 << 20;
    if dram_bytes < SEGMENT_BYTES_MIN {
        return Vec::new();
    }
    let count = dram_bytes.div_ceil(segment_bytes.max(UNIT));
    let share = dram_bytes / count / UNIT * UNIT;
    let mut segments = vec![share; count as usize];
    if let Some(last) = segments.last_mut() {
        *last = dram_bytes - share * (count - 1);
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dram_splits_without_loss() {
        for (dram, segment) in
            [(1u64 << 30, 256u64 << 20), ((1 << 30) + 12_345, 300 << 20), (1 << 20, 1 << 30), (5 << 20, 0)]
        {
            let parts = split_dram(dram, segment);
            assert_eq!(parts.iter().sum::<u64>(), dram, "{parts:?}");
            assert!(parts.iter().all(|&p| p >= SEGMENT_BYTES_MIN), "{parts:?}");
        }
        assert!(split_dram(10, 1 << 30).is_empty());
    }
}
