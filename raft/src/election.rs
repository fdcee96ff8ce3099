//! Election profiles and the openraft settings that follow from them.
//!
//! A profile fixes heartbeat, shortest and longest election timeout. The leader lease equals the longest timeout, so
//! losing a leader costs at most lease + one election timeout + two round trips + one fsync.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use openraft::SnapshotPolicy;

/// Most entries in one append request. The log reader bounds its bytes as well.
pub const APPEND_ENTRIES_MAX: u64 = 2048;
/// Entries dropped from the log in one step.
const PURGE_STEP_ENTRIES: u64 = 1024;
/// openraft must never purge by itself (see `compaction`): more entries than any log holds.
const NEVER_PURGE: u64 = 1 << 50;
/// How long a snapshot may take to be sent and installed before the attempt is abandoned.
pub const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(600);

/// How fast a lost leader is noticed, and how much delay a healthy one may show.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ElectionProfile {
    /// 20/60/120 ms: one switch, idle CPUs.
    Lan,
    /// 50/150/300 ms.
    #[default]
    Default,
    /// 200/1000/2000 ms: sites apart, or starved CPUs.
    Wan,
}

impl ElectionProfile {
    /// Interval at which a leader makes itself heard.
    pub fn heartbeat(self) -> Duration {
        Duration::from_millis(self.figures().0)
    }
    /// Shortest election timeout.
    pub fn timeout_min(self) -> Duration {
        Duration::from_millis(self.figures().1)
    }
    /// Longest election timeout; the leader lease.
    pub fn timeout_max(self) -> Duration {
        Duration::from_millis(self.figures().2)
    }
    /// Longest silence of a leader after which a standby still counts as knowing what is committed.
    pub fn silence_max(self) -> Duration {
        self.timeout_max() * 2
    }
    /// How long a leader may answer reads after a quorum last confirmed it, without asking again: half the lease,
    /// which leaves the other half for clocks that run at different rates (R2).
    pub fn read_confirmation_age_max(self) -> Duration {
        self.timeout_max() / 2
    }
    /// How long a restarted member keeps out of elections: its predecessor may have promised a leader not to vote,
    /// and that promise was not written down (R2).
    pub fn startup_fence(self) -> Duration {
        self.timeout_max() * 5 / 4
    }

    fn figures(self) -> (u64, u64, u64) {
        match self {
            ElectionProfile::Lan => (20, 60, 120),
            ElectionProfile::Default => (50, 150, 300),
            ElectionProfile::Wan => (200, 1000, 2000),
        }
    }

    /// openraft's configuration. Elections start disabled; the start-up fence enables them.
    pub(crate) fn openraft_config(self) -> openraft::Config {
        let (heartbeat_interval, election_timeout_min, election_timeout_max) = self.figures();
        openraft::Config {
            cluster_name: "tidepool".to_owned(),
            heartbeat_interval,
            election_timeout_min,
            election_timeout_max,
            enable_elect: false,
            enable_pre_vote: Some(true),
            // A restarted leader must win a new term: leases and log time are kept by term, in memory.
            enable_leader_restore: Some(false),
            max_payload_entries: APPEND_ENTRIES_MAX,
            purge_batch_size: PURGE_STEP_ENTRIES,
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: NEVER_PURGE,
            replication_lag_threshold: NEVER_PURGE,
            install_snapshot_timeout: SNAPSHOT_TIMEOUT.as_millis() as u64,
            backoff: "20ms 50ms 100ms ...500ms".to_owned(),
            ..Default::default()
        }
    }
}

impl fmt::Display for ElectionProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElectionProfile::Lan => "lan",
            ElectionProfile::Default => "default",
            ElectionProfile::Wan => "wan",
        })
    }
}

impl FromStr for ElectionProfile {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "lan" => Ok(ElectionProfile::Lan),
            "default" => Ok(ElectionProfile::Default),
            "wan" => Ok(ElectionProfile::Wan),
            other => Err(format!("unknown election profile '{other}': use lan, default or wan")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_is_valid_and_keeps_its_margins() {
        for profile in [ElectionProfile::Lan, ElectionProfile::Default, ElectionProfile::Wan] {
            let config = profile.openraft_config().validate().unwrap();
            assert_eq!(profile.to_string().parse(), Ok(profile));
            assert_eq!(config.enable_pre_vote, Some(true));
            assert!(!config.enable_elect);
            assert!(profile.startup_fence() > profile.timeout_max());
            assert!(profile.read_confirmation_age_max() * 2 <= profile.timeout_max());
        }
        assert!("fast".parse::<ElectionProfile>().is_err());
    }
}
