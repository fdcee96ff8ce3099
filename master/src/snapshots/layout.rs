//! What the names below a location mean.
//!
//! ```text
//! <cluster uuid, 32 hex digits>/node-<id>/<log index, 20 digits>-<term, 20 digits>/{segments, metadata, task_manager,
//!                                                                              manifest.txt, descriptor.txt}
//! <cluster uuid, 32 hex digits>/node-<id>/latest.txt
//! ```
//! Anything else there is somebody else's: never read, never removed.

use std::fmt;

use tidepool_proto::{ClusterId, NodeId};

use crate::directory::image::parts::PARTS;

/// Name of the manifest.
pub(super) const MANIFEST: &str = "manifest.txt";
/// Name of the descriptor, which makes a snapshot complete.
pub(super) const DESCRIPTOR: &str = "descriptor.txt";
/// Name of the hint that names a node's newest snapshot.
pub(super) const LATEST: &str = "latest.txt";
/// Files of a snapshot, in the order in which they are published.
pub(super) const FILES: [&str; 5] = [PARTS[0], PARTS[1], PARTS[2], MANIFEST, DESCRIPTOR];

const NODE_PREFIX: &str = "node-";
const NUMBER_DIGITS: usize = 20;

/// Where one snapshot lies below a location: whose, and of which log position.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// Cluster.
    pub cluster: ClusterId,
    /// Master that published it.
    pub node: NodeId,
    /// Last log index it covers.
    pub index: u64,
    /// Term of that entry.
    pub term: u64,
}

impl Place {
    /// Directory of the snapshot.
    pub fn directory(&self) -> String {
        format!("{}/{}", node_directory(self.cluster, self.node), self.name())
    }

    /// Name of that directory below its node's.
    pub fn name(&self) -> String {
        format!("{:020}-{:020}", self.index, self.term)
    }

    /// From the three names, if that is what they are.
    pub(super) fn parse(cluster: ClusterId, node: NodeId, name: &str) -> Option<Place> {
        let (index, term) = name.split_once('-')?;
        let number = |text: &str| {
            (text.len() == NUMBER_DIGITS && text.bytes().all(|b| b.is_ascii_digit()))
                .then(|| text.parse::<u64>().ok())?
        };
        Some(Place { cluster, node, index: number(index)?, term: number(term)? })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.directory())
    }
}

/// Directory of a cluster.
pub(super) fn cluster_directory(cluster: ClusterId) -> String {
    cluster.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Directory of a node.
pub(super) fn node_directory(cluster: ClusterId, node: NodeId) -> String {
    format!("{}/{NODE_PREFIX}{node}", cluster_directory(cluster))
}

/// The cluster that a directory is named after.
pub(super) fn parse_cluster(name: &str) -> Option<ClusterId> {
    let digits = name.as_bytes();
    if digits.len() != 32 || !digits.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    u128::from_str_radix(name, 16).ok().map(|number| ClusterId(number.to_be_bytes()))
}

/// The node that a directory is named after.
pub(super) fn parse_node(name: &str) -> Option<NodeId> {
    let node = NodeId(name.strip_prefix(NODE_PREFIX)?.parse().ok()?);
    (format!("{NODE_PREFIX}{node}") == name).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_names_are_ours() {
        let cluster = ClusterId(*b"0123456789abcdef");
        assert_eq!(parse_cluster(&cluster_directory(cluster)), Some(cluster));
        for name in ["", "x", &"g".repeat(32), &"A".repeat(32), &"0".repeat(31), &"0".repeat(33)] {
            assert_eq!(parse_cluster(name), None, "{name}");
        }
        assert_eq!(parse_node("node-7"), Some(NodeId(7)));
        for name in ["node-", "node-07", "node-x", "node-+7", "7", "node-7.old", "node--7"] {
            assert_eq!(parse_node(name), None, "{name}");
        }
        let place = Place { cluster, node: NodeId(7), index: 4711, term: 3 };
        assert_eq!(Place::parse(cluster, NodeId(7), &place.name()), Some(place));
        let long = format!("{}-{}", "9".repeat(20), "0".repeat(20));
        for name in
            ["", "4711-3", "latest.txt", &format!(".writing-{}", place.name()), &format!("{}.tmp", place.name()), &long]
        {
            assert_eq!(Place::parse(cluster, NodeId(7), name), None, "{name}");
        }
    }
}
