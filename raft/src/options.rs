//! Settings of a member.

use std::path::PathBuf;

use tidepool_proto::{Address, Error, ErrorCode, NodeId};

use crate::election::ElectionProfile;
use crate::fence::FencePolicy;

/// A member of the quorum: who and where.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Member {
    /// Its id, never reused.
    pub node_id: NodeId,
    /// Where the others reach it.
    pub address: Address,
}

/// Whose word makes a snapshot good enough to be sent, and to drop the log it covers (M3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Agreement {
    /// This member's own: for machines whose states nobody compares.
    OwnWord,
    /// A majority's, as told by [`crate::RaftNode::vouch`].
    Majority,
}

/// Settings of one member.
#[derive(Clone, Debug)]
pub struct Options {
    /// This member.
    pub node_id: NodeId,
    /// Its own directory: identity, log, snapshots.
    pub data_dir: PathBuf,
    /// Where the others reach this member.
    pub advertise: Address,
    /// The initial quorum, self included. Used once, for the bootstrap.
    pub members: Vec<Member>,
    /// Whether an empty directory waits until the leader of a cluster that exists takes it in, and begins none.
    pub join: bool,
    /// How fast a lost leader is noticed.
    pub election: ElectionProfile,
    /// A snapshot is taken when this many payload bytes were applied since the last one...
    pub snapshot_log_bytes: u64,
    /// ...or this many entries.
    pub snapshot_log_entries: u64,
    /// Entries kept in the log behind a snapshot, for followers that lag.
    pub keep_log_entries: u64,
    /// Entries kept at most for a follower that is being fed a snapshot, or catches up after one; beyond them it starts over with
    /// a newer one.
    pub feed_log_entries_max: u64,
    /// Bytes of snapshots sent a second, to all members together; 0: as fast as it goes.
    pub snapshot_send_bytes_per_s: u64,
    /// Whose word makes a snapshot good.
    pub agreement: Agreement,
    /// Whether a restart waits out the leases of its earlier life. Always, but in the test of exactly that.
    pub fence: FencePolicy,
}

impl Options {
    /// Settings with the defaults for all but who and where.
    pub fn new(node_id: NodeId, data_dir: PathBuf, advertise: Address, members: Vec<Member>) -> Options {
        Options {
            node_id,
            data_dir,
            advertise,
            members,
            join: false,
            election: ElectionProfile::Default,
            snapshot_log_bytes: 512 << 20,
            snapshot_log_entries: 1_000_000,
            keep_log_entries: 100_000,
            feed_log_entries_max: 4_000_000,
            snapshot_send_bytes_per_s: 0,
            agreement: Agreement::OwnWord,
            fence: FencePolicy::Keep,
        }
    }

    /// Sorts the members and refuses what cannot work.
    pub(crate) fn checked(mut self) -> Result<Options, Error> {
        let refuse = |message: String| Err(Error::new(ErrorCode::InvalidParams, message));
        self.members.sort();
        if self.node_id.0 == 0 || self.members.iter().any(|m| m.node_id.0 == 0) {
            return refuse("node id 0 names nobody; number the members from 1".to_owned());
        }
        for pair in self.members.windows(2) {
            if pair[0].node_id == pair[1].node_id {
                return refuse(format!(
                    "node {} is listed twice, at {} and {}",
                    pair[0].node_id, pair[0].address, pair[1].address
                ));
            }
        }
        let multi_host = self.members.iter().any(|m| !m.address.is_loopback());
        self.advertise.check_advertisable(multi_host, "advertise")?;
        for member in &self.members {
            member.address.check_advertisable(multi_host, "members")?;
        }
        match self.members.iter().find(|m| m.node_id == self.node_id) {
            Some(own) if own.address != self.advertise => refuse(format!(
                "node {} advertises {} but the member list says {}; make them equal",
                self.node_id, self.advertise, own.address
            )),
            _ => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(advertise: &str, members: &[(u64, &str)]) -> Options {
        let members =
            members.iter().map(|(id, a)| Member { node_id: NodeId(*id), address: a.parse().unwrap() }).collect();
        Options::new(NodeId(1), PathBuf::new(), advertise.parse().unwrap(), members)
    }

    /// User report 11: an unroutable address was advertised to everybody.
    #[test]
    fn case_011_unroutable_addresses_are_refused() {
        for (advertise, members, names) in [
            ("0.0.0.0:1", vec![(1, "0.0.0.0:1")], "unspecified"),
            ("127.0.0.1:1", vec![(1, "127.0.0.1:1"), (2, "10.0.0.2:1")], "loopback"),
            ("10.0.0.1:1", vec![(1, "10.0.0.1:1"), (2, "127.0.0.1:1")], "loopback"),
            ("10.0.0.1:1", vec![(1, "10.0.0.1:1"), (2, "[::]:1")], "unspecified"),
            ("10.0.0.1:0", vec![(1, "10.0.0.1:0")], "port 0"),
            ("10.0.0.1:1", vec![(1, "10.0.0.9:1")], "make them equal"),
            ("10.0.0.1:1", vec![(1, "10.0.0.1:1"), (2, "10.0.0.2:1"), (2, "10.0.0.3:1")], "listed twice"),
            ("10.0.0.1:1", vec![(0, "10.0.0.1:1")], "node id 0"),
        ] {
            let error = options(advertise, &members).checked().unwrap_err();
            assert_eq!(error.code(), ErrorCode::InvalidParams);
            assert!(error.message().contains(names), "{error} does not say '{names}'");
        }
        let sorted = options("127.0.0.1:1", &[(2, "127.0.0.1:2"), (1, "127.0.0.1:1")]).checked().unwrap();
        assert_eq!(sorted.members[0].node_id, NodeId(1));
    }
}
