//! How a cluster begins (I4). Every initial member must be reachable, empty and agree on one fresh identity, which the
//! member with the lowest id draws; all write it down, then that one initialises. An empty directory that meets a
//! member with data never initialises and never votes: it says how to join instead. One that is to join a cluster waits
//! for its leader, which alone knows whether its id is fresh.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use openraft::Raft;
use openraft::async_runtime::AsyncRuntime;
use parking_lot::Mutex;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, NodeId, planted, v1};

use crate::apply::Adapter;
use crate::host::Host;
use crate::identity::{ClusterIdentity, IdentityStore, check_protocol, store_to_wire, wire_cluster, wire_store};
use crate::log::StoreId;
use crate::machine::StateMachine;
use crate::network::{LinkError, Network};
use crate::options::{Member, Options};
use crate::retired::Retired;
use crate::roll_call::{ANSWER_LIMIT, roll_call};
use crate::types;

/// Pause between two looks at the other members.
const ROUND_INTERVAL: Duration = Duration::from_millis(100);
/// Rounds between two lines in the log about what is waited for.
const ROUNDS_PER_WARNING: u32 = 50;

/// What one member said about itself.
#[derive(Debug)]
struct Seen {
    member: Member,
    store: StoreId,
    cluster: Option<ClusterIdentity>,
    initialized: bool,
}

/// One start of an empty member.
pub(crate) struct Bootstrap<'a, C: Host<Outcome = M::Outcome>, M: StateMachine, N> {
    pub(crate) raft: &'a Raft<C, Adapter<C, M>>,
    pub(crate) identity: &'a Arc<IdentityStore>,
    pub(crate) network: &'a N,
    pub(crate) options: &'a Options,
    pub(crate) waiting_for: &'a Mutex<Option<String>>,
}

fn wrong(message: String) -> Error {
    Error::new(ErrorCode::WrongCluster, message)
}

fn stopped(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::Unavailable, format!("consensus does not answer: {error}"))
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> Bootstrap<'_, C, M, N> {
    /// Returns once this member holds the beginning of a log; at once if it does already.
    pub(crate) async fn run(&self) -> Result<(), Error> {
        let result = self.rounds().await;
        *self.waiting_for.lock() = None;
        result
    }

    async fn rounds(&self) -> Result<(), Error> {
        for round in 0u32.. {
            if self.raft.is_initialized().await.map_err(stopped)? {
                return Ok(());
            }
            let waits = self.round().await?;
            if let Some(waits) = &waits
                && round % ROUNDS_PER_WARNING == ROUNDS_PER_WARNING - 1
            {
                tracing::warn!(waits, "still not part of a cluster");
            }
            *self.waiting_for.lock() = waits;
            C::AsyncRuntime::sleep(ROUND_INTERVAL).await;
        }
        Ok(())
    }

    /// One look around. Answers what is still missing.
    async fn round(&self) -> Result<Option<String>, Error> {
        let own = self.options.node_id;
        if self.options.join || !self.options.members.iter().any(|m| m.node_id == own) {
            return Ok(Some(self.awaits()));
        }
        let Some(leads) = self.options.members.first().map(|m| m.node_id) else {
            return Err(Error::new(ErrorCode::InvalidParams, "the member list is empty"));
        };
        if leads != own && self.identity.record().cluster.is_some() {
            return Ok(Some(format!("node {leads} to initialise the cluster")));
        }
        let (seen, missing) = self.look_around().await?;
        // Read after the answers: a member that was prepared meanwhile is no stranger to those it met.
        let record = self.identity.record();
        if let Some(other) =
            seen.iter().find(|s| s.initialized && (record.cluster.is_none() || s.cluster != record.cluster))
        {
            return Err(wrong(how_to_join(own, other)));
        }
        if leads != own {
            return Ok(Some(match missing.is_empty() {
                true => format!("node {leads} to propose a cluster"),
                false => missing.join("; "),
            }));
        }
        if !missing.is_empty() {
            return Ok(Some(missing.join("; ")));
        }
        self.lead(seen).await
    }

    /// Asks every other initial member who it is.
    async fn look_around(&self) -> Result<(Vec<Seen>, Vec<String>), Error> {
        let answers = roll_call::<C, N>(self.network, self.identity, self.options.node_id, &self.options.members).await;
        let (mut seen, mut missing) = (Vec::new(), Vec::new());
        for (member, answer) in answers {
            match answer {
                Ok(answer) => match understand(member, answer) {
                    Ok(one) => seen.push(one),
                    Err(error) if passes(&error) => {
                        missing.push(format!("node {} at {}: {error}", member.node_id, member.address))
                    }
                    Err(error) => return Err(error),
                },
                Err(LinkError::Refused(error)) => return Err(error),
                Err(error) => missing.push(format!("node {} at {}: {error}", member.node_id, member.address)),
            }
        }
        Ok((seen, missing))
    }

    /// All are there and empty: draw an identity, have all write it down, then initialise.
    async fn lead(&self, seen: Vec<Seen>) -> Result<Option<String>, Error> {
        let record = self.identity.record();
        if let Some(other) = seen.iter().find(|s| s.cluster.is_some() && s.cluster != record.cluster) {
            return Err(wrong(format!(
                "node {} at {} was prepared for another cluster before; if that bootstrap was never completed, empty its data directory",
                other.member.node_id, other.member.address
            )));
        }
        let cluster = record.cluster.unwrap_or_else(|| ClusterIdentity {
            cluster: ClusterId(C::random().to_be_bytes()),
            history: History(if planted!(ConstantHistory) { 1 } else { (C::random() as u64).max(1) }),
        });
        let mut roster: BTreeMap<NodeId, StoreId> = seen.iter().map(|s| (s.member.node_id, s.store)).collect();
        roster.insert(self.options.node_id, record.store);
        self.persist(cluster, roster.clone()).await?;

        let named = self.options.members.iter().filter_map(|m| {
            let store_uuid = store_to_wire(*roster.get(&m.node_id)?);
            Some(v1::RaftMember { node_id: m.node_id.0, address: m.address.to_string(), store_uuid })
        });
        let named: Vec<v1::RaftMember> = named.collect();
        let named = &named;
        let answers = futures::future::join_all(seen.iter().map(|other| async move {
            let request = v1::PrepareRequest {
                identity: Some(self.identity.to_wire()),
                target_node_id: other.member.node_id.0,
                members: named.clone(),
                join: false,
            };
            let address = other.member.address.to_string();
            let asking = self.network.prepare(&address, request, ANSWER_LIMIT);
            let answer = C::AsyncRuntime::timeout(ANSWER_LIMIT * 2, asking).await;
            (&other.member, answer.unwrap_or(Err(LinkError::Timeout(ANSWER_LIMIT))))
        }))
        .await;
        let mut missing = Vec::new();
        for (member, answer) in answers {
            match answer {
                Ok(v1::PrepareResponse { error: None, .. }) => {}
                Ok(v1::PrepareResponse { error: Some(error), .. }) => {
                    let error = Error::from(error);
                    if !passes(&error) {
                        return Err(error);
                    }
                    missing.push(format!("node {} at {}: {error}", member.node_id, member.address));
                }
                Err(error) => missing.push(format!("node {} at {}: {error}", member.node_id, member.address)),
            }
        }
        if !missing.is_empty() {
            return Ok(Some(missing.join("; ")));
        }
        let members =
            self.options.members.iter().map(|m| (m.node_id.0, types::Member::new(&m.address, Retired::default())));
        let members: BTreeMap<u64, types::Member> = members.collect();
        self.raft.initialize(members).await.map_err(stopped)?;
        tracing::info!(%cluster, "cluster initialised");
        Ok(None)
    }

    /// Not an initial member: whoever leads the cluster says when it takes this one in, and which cluster that is (I4).
    /// Until then it knows no cluster, and nobody is let in.
    fn awaits(&self) -> String {
        let own = self.options.node_id;
        match self.identity.record().cluster {
            Some(cluster) => format!("the leader of {cluster} to send its log to node {own}"),
            None => format!("the leader to take this member in: tidepool member add {own}@{}", self.options.advertise),
        }
    }

    async fn persist(&self, cluster: ClusterIdentity, roster: BTreeMap<NodeId, StoreId>) -> Result<(), Error> {
        let identity = self.identity.clone();
        let failed = |e: std::io::Error| {
            Error::new(ErrorCode::StorageFailed, format!("the identity file cannot be written: {e}"))
        };
        let write = move || {
            identity.update(|record| {
                record.cluster = Some(cluster);
                record.roster = roster;
            })
        };
        C::blocking(write).await.map_err(failed)?.map_err(failed)
    }
}

/// Whether an answer is about the moment, not about the configuration.
fn passes(error: &Error) -> bool {
    error.code().is_retryable() || error.code() == ErrorCode::StorageFailed
}

fn understand(member: &Member, answer: v1::HandshakeResponse) -> Result<Seen, Error> {
    if let Some(error) = answer.error {
        return Err(error.into());
    }
    let peer = answer.identity.ok_or_else(|| wrong(format!("{} does not say who it is", member.address)))?;
    check_protocol(&peer)?;
    if peer.node_id != member.node_id.0 {
        let message =
            format!("{} is node {}, the member list says node {}", member.address, peer.node_id, member.node_id);
        return Err(wrong(message));
    }
    let store = wire_store(&answer.store_uuid)
        .ok_or_else(|| wrong(format!("{} does not name its data directory", member.address)))?;
    Ok(Seen { member: member.clone(), store, cluster: wire_cluster(&peer), initialized: answer.initialized })
}

fn how_to_join(own: NodeId, other: &Seen) -> String {
    let cluster = other.cluster.map_or_else(|| "a cluster".to_owned(), |c| c.to_string());
    format!(
        "the data directory of node {own} is empty, but node {} at {} belongs to {cluster}, which exists already: an empty \
         member must not vote under an id that may have voted before. If node {own} lost its data, start it as a learner \
         under a new node id with --join, and have the leader take it in with `tidepool member replace`; if this is meant to be a new \
         cluster, correct the member list",
        other.member.node_id, other.member.address
    )
}
