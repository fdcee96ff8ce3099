//! The types consensus runs on: one openraft configuration, generic over the async runtime and over what applying
//! an entry returns. Production is [`TokioConfig`], the deterministic simulation `SimConfig`.
//!
//! Leadership is standard Raft: at most one leader a term, so that a term alone names a leader. (openraft's default
//! lets a second leader win the same term; a term carried in replies could then not tell a stale master.)

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

use bytes::Bytes;
use openraft::impls::{BoxedErrorSource, InlineBatch, OneshotResponder, leader_id_std};
use openraft::vote::RaftLeaderId;
use openraft::{OptionalSend, RaftTypeConfig};

use crate::retired::Retired;

/// A member's number, never reused in a cluster.
pub type NodeId = u64;
/// Raft term.
pub type Term = u64;
/// Term and the node that asks for or holds its leadership.
pub type LeaderId = leader_id_std::LeaderId<Term, NodeId>;
/// A leader that a quorum elected: its term.
pub type CommittedLeaderId = <LeaderId as RaftLeaderId>::Committed;
/// Term and index of a log entry.
pub type LogId = openraft::LogId<CommittedLeaderId>;
/// A vote given or a leadership acknowledged.
pub type Vote = openraft::Vote<LeaderId>;
/// Voters and learners.
pub type Membership = openraft::Membership<NodeId, Member>;
/// Membership and the log id of the entry that set it.
pub type StoredMembership = openraft::StoredMembership<CommittedLeaderId, NodeId, Member>;
/// What a log entry carries.
pub type EntryPayload = openraft::EntryPayload<Payload, NodeId, Member>;
/// A log entry.
pub type Entry = openraft::Entry<CommittedLeaderId, EntryPayload>;
/// What a snapshot covers.
pub type SnapshotMeta = openraft::SnapshotMeta<CommittedLeaderId, NodeId, Member>;

/// Longest payload of one entry. Proposers refuse longer ones; the codec refuses to read them.
pub const PAYLOAD_BYTES_MAX: usize = 16 << 20;

/// Opaque bytes that the log replicates. Cloning shares them.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Payload(pub Bytes);

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// How to reach a member; the node id is the key it is stored under.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Member {
    /// Advertised address, as people write it (`host:port`).
    pub address: String,
    /// Whoever left the quorum before; the same with every member of a membership (I4).
    pub retired: Retired,
}

impl Member {
    /// At an address, in a membership that those left before.
    pub fn new(address: &tidepool_proto::Address, retired: Retired) -> Member {
        Member { address: address.to_string(), retired }
    }
}

/// Everybody that left before this membership.
pub fn retired_of(membership: &Membership) -> Retired {
    let mut all = Retired::default();
    membership.nodes().for_each(|(_, member)| all.join(&member.retired));
    all
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

/// A log id from its parts.
pub fn log_id(term: Term, index: u64) -> LogId {
    LogId::new_term_index(term, index)
}

/// The term of a log id.
pub fn term_of(id: &LogId) -> Term {
    id.committed_leader_id().term
}

/// The openraft configuration of this crate. Everything in the crate is generic over it and nothing in the crate
/// spawns, sleeps or reads a clock but through `C::AsyncRuntime`.
pub trait Config:
    RaftTypeConfig<
        D = Payload,
        R = Option<Self::Outcome>,
        NodeId = NodeId,
        Node = Member,
        Term = Term,
        LeaderId = LeaderId,
        Vote = Vote,
        Payload = EntryPayload,
        Entry = Entry,
        Responder<openraft::raft::ClientWriteResult<Self>> = OneshotResponder<
            Self,
            openraft::raft::ClientWriteResult<Self>,
        >,
    >
{
    /// What applying a payload returns: the state machine's own type, never serialised. Entries without a payload
    /// answer `None`.
    type Outcome: fmt::Debug + Send + Sync + 'static;
}

/// Declares a configuration struct. `openraft::declare_raft_types!` cannot declare generic ones, and deriving the
/// comparison traits would ask the same of `O`.
macro_rules! declare_config {
    ($(#[$attribute:meta])* $name:ident, $runtime:ty) => {
        $(#[$attribute])*
        pub struct $name<O>(PhantomData<fn() -> O>);

        impl<O> Clone for $name<O> {
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<O> Copy for $name<O> {}
        impl<O> Default for $name<O> {
            fn default() -> Self {
                $name(PhantomData)
            }
        }
        impl<O> fmt::Debug for $name<O> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($name))
            }
        }
        impl<O> PartialEq for $name<O> {
            fn eq(&self, _: &Self) -> bool {
                true
            }
        }
        impl<O> Eq for $name<O> {}
        impl<O> PartialOrd for $name<O> {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }
        impl<O> Ord for $name<O> {
            fn cmp(&self, _: &Self) -> Ordering {
                Ordering::Equal
            }
        }
        impl<O> Hash for $name<O> {
            fn hash<H: Hasher>(&self, _: &mut H) {}
        }

        impl<O: fmt::Debug + Send + Sync + 'static> RaftTypeConfig for $name<O> {
            type D = Payload;
            type R = Option<O>;
            type NodeId = NodeId;
            type Node = Member;
            type Term = Term;
            type LeaderId = LeaderId;
            type Vote = Vote;
            type Payload = EntryPayload;
            type Entry = Entry;
            type AsyncRuntime = $runtime;
            type Responder<T>
                = OneshotResponder<Self, T>
            where
                T: OptionalSend + 'static;
            type Batch<T>
                = InlineBatch<T>
            where
                T: OptionalSend + 'static;
            type ErrorSource = BoxedErrorSource;
        }

        impl<O: fmt::Debug + Send + Sync + 'static> Config for $name<O> {
            type Outcome = O;
        }
    };
}

declare_config!(
    /// Production: tokio. `O` is the state machine's outcome.
    TokioConfig,
    openraft_rt_tokio::TokioRuntime
);

#[cfg(any(test, feature = "sim"))]
declare_config!(
    /// Deterministic simulation: one thread, virtual time, seeded. `O` is the state machine's outcome.
    SimConfig,
    crate::sim::MachineRuntime
);
