//! Capabilities: what lets a client touch a datanode's memory without the datanode asking the master (W2).
//!
//! The master signs (verb, history, object, replica, place, expiry) with the cluster secret that datanodes get at
//! registration. Expiry is in log time, which every datanode follows from its heartbeats and never overtakes, so a
//! late datanode may accept a little longer but never refuses early; readers verify what they get in any case. That holds across
//! leaders: see [`LOG_TIME_TOLD_BEHIND_MS`].

use crate::ids::{History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};
use crate::v1;

/// Longest a write grant may be valid, in log time. The master signs none that expires later than this after it was
/// given; a datanode keeps a fence for as long, after which no grant from before the fence can be presented.
pub const GRANT_LIFETIME_MAX_MS: u64 = 15 * 60 * 1000;

/// How far what datanodes are told lies behind the newest applied entry, and how far they may go on from it by themselves until they are
/// told again. So no datanode's clock is ahead of the newest entry that its leader had applied; that entry is committed, and a later
/// leader begins where it ends. Without this a datanode that still follows the leader of before would refuse what the new one signs.
pub const LOG_TIME_TOLD_BEHIND_MS: u64 = 2_000;

/// What the holder may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Verb {
    /// Read the extent.
    Read = 1,
    /// Fill the extent, once.
    Write = 2,
    /// The datanode's statement that it stored and verified the replica.
    Stored = 3,
    /// The datanode's statement that nothing more will be written to the replica.
    Aborted = 4,
}

/// The signed facts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capability {
    /// Allowed verb.
    pub verb: Verb,
    /// Object the extent belongs to.
    pub object: ObjectId,
    /// Replica.
    pub replica: ReplicaId,
    /// Segment.
    pub segment: SegmentId,
    /// Incarnation of the owning node.
    pub incarnation: Incarnation,
    /// Owning node.
    pub node: NodeId,
    /// Bytes from the segment's start.
    pub offset: u64,
    /// Stored bytes.
    pub length: u64,
    /// End of validity in log time.
    pub expires: LogTime,
}

/// Truncated keyed BLAKE3.
pub type Mac = [u8; 16];

/// The cluster secret; never logged.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Secret(pub [u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Capability {
    /// Signs. 80 bytes of input, two BLAKE3 blocks.
    pub fn sign(&self, secret: &Secret, history: History) -> Mac {
        let mut input = [0u8; 80];
        input[0] = self.verb as u8;
        let words = [
            history.0,
            self.object.0,
            self.replica.0,
            self.segment.0,
            self.incarnation.0,
            self.node.0,
            self.offset,
            self.length,
            self.expires.0,
        ];
        for (i, word) in words.iter().enumerate() {
            input[8 + i * 8..16 + i * 8].copy_from_slice(&word.to_le_bytes());
        }
        let hash = blake3::keyed_hash(&secret.0, &input);
        hash.as_bytes()[..16].try_into().expect("16 of 32 bytes")
    }

    /// Checks a MAC in constant time.
    pub fn verify(&self, secret: &Secret, history: History, mac: &[u8]) -> bool {
        let expected = self.sign(secret, history);
        mac.len() == expected.len() && expected.iter().zip(mac).fold(0u8, |acc, (a, b)| acc | (a ^ b)) == 0
    }

    /// As handed to a client.
    pub fn to_replica(&self, secret: &Secret, history: History) -> v1::Replica {
        v1::Replica {
            replica_id: self.replica.0,
            segment_id: self.segment.0,
            incarnation: self.incarnation.0,
            node_id: self.node.0,
            offset: self.offset,
            length: self.length,
            kind: v1::ReplicaKind::Memory as i32,
            expires_log_time_ms: self.expires.0,
            mac: bytes::Bytes::copy_from_slice(&self.sign(secret, history)),
        }
    }

    /// Back from what a client presents.
    pub fn from_replica(verb: Verb, object: ObjectId, replica: &v1::Replica) -> Capability {
        Capability {
            verb,
            object,
            replica: ReplicaId(replica.replica_id),
            segment: SegmentId(replica.segment_id),
            incarnation: Incarnation(replica.incarnation),
            node: NodeId(replica.node_id),
            offset: replica.offset,
            length: replica.length,
            expires: LogTime(replica.expires_log_time_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capability() -> Capability {
        Capability {
            verb: Verb::Read,
            object: ObjectId(1),
            replica: ReplicaId(2),
            segment: SegmentId(3),
            incarnation: Incarnation(4),
            node: NodeId(5),
            offset: 6,
            length: 7,
            expires: LogTime(8),
        }
    }

    #[test]
    fn every_field_is_signed() {
        let (secret, history) = (Secret([7; 32]), History(9));
        let c = capability();
        let mac = c.sign(&secret, history);
        assert!(c.verify(&secret, history, &mac));
        let forged: [(&str, Capability); 9] = [
            ("verb", Capability { verb: Verb::Write, ..c }),
            ("object", Capability { object: ObjectId(10), ..c }),
            ("replica", Capability { replica: ReplicaId(10), ..c }),
            ("segment", Capability { segment: SegmentId(10), ..c }),
            ("incarnation", Capability { incarnation: Incarnation(10), ..c }),
            ("node", Capability { node: NodeId(10), ..c }),
            ("offset", Capability { offset: 10, ..c }),
            ("length", Capability { length: 10, ..c }),
            ("expires", Capability { expires: LogTime(10), ..c }),
        ];
        for (field, forged) in forged {
            assert!(!forged.verify(&secret, history, &mac), "{field} is not signed");
        }
        assert!(!c.verify(&secret, History(10), &mac), "history is not signed");
        assert!(!c.verify(&Secret([8; 32]), history, &mac), "secret is not used");
        assert!(!c.verify(&secret, history, &mac[..15]) && !c.verify(&secret, history, &[]));
    }
}
