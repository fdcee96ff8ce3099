//! One key on its way from the pool: where its copies are, which were tried, what went wrong.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::ids::REPLICAS_PER_OBJECT_MAX;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, v1};

use crate::landing::{Delivered, Destination, Expected};
use crate::nodes::Node;
use crate::suspects::Suspects;

/// Goes on with each read, in steps that no batch size is in step with.
static TURN: AtomicU64 = AtomicU64::new(0);
const TURN_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// One position of a batched get.
pub(crate) struct Fetch {
    pub(crate) position: usize,
    pub(crate) key: Bytes,
    /// The part of the payload that is wanted; None: all of it.
    pub(crate) range: Option<Range<u64>>,
    /// None while it is lent out, and for good when it could not be had back.
    pub(crate) destination: Option<Destination>,
    pub(crate) located: Option<Located>,
    /// Replicas that were tried since the last locate: a bit for each of `located.replicas`.
    tried: u64,
    /// Which of `located.replicas` to read next.
    chosen: Option<usize>,
    /// A copy was read, or tried to be, since the call began.
    was_tried: bool,
    /// Nodes that kept the call waiting, for nothing.
    kept_waiting: Vec<u64>,
    /// No copy on a node that is well could be read: those on suspects are read too.
    pub(crate) is_last_resort: bool,
    /// The last failure.
    pub(crate) failure: Option<Error>,
    /// How long the last failed attempt took.
    pub(crate) took: Duration,
}

/// What the directory said.
pub(crate) struct Located {
    pub(crate) expected: Expected,
    pub(crate) cluster: ClusterId,
    /// The present one; an object of before a restore has its own.
    pub(crate) history: History,
    pub(crate) replicas: Vec<v1::Replica>,
    /// Copies that the master did not name, on nodes that this client suspects.
    pub(crate) suspect_copies: u32,
    pub(crate) nodes: Arc<HashMap<u64, Node>>,
    /// None: there is no lease (R1).
    pub(crate) lease_ends: Option<BootInstant>,
}

/// What there is beside the chosen copy, should that one keep the call waiting.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Beside {
    /// A copy on a node that is well, as far as this client knows.
    Well,
    /// Copies on nodes that this client suspects; one may be well again.
    Suspect,
    Nothing,
}

impl Fetch {
    pub(crate) fn new(position: usize, key: Bytes, range: Option<Range<u64>>, destination: Destination) -> Fetch {
        Fetch {
            position,
            key,
            range,
            destination: Some(destination),
            located: None,
            tried: 0,
            chosen: None,
            was_tried: false,
            kept_waiting: Vec::new(),
            is_last_resort: false,
            failure: None,
            took: Duration::ZERO,
        }
    }

    /// The directory has answered.
    pub(crate) fn locate(&mut self, located: Located) {
        (self.located, self.tried, self.chosen) = (Some(located), 0, None);
    }

    /// The replica to read next, or read last.
    pub(crate) fn chosen(&self) -> Option<&v1::Replica> {
        self.located.as_ref()?.replicas.get(self.chosen?)
    }

    /// Where it lands and what that is, when it can be read: located, with a replica chosen, and the memory here.
    pub(crate) fn landing(&self) -> Option<(&Destination, &Expected)> {
        self.chosen()?;
        Some((self.destination.as_ref()?, &self.located.as_ref()?.expected))
    }

    /// The wanted part of a payload of this length.
    pub(crate) fn range_of(&self, length: u64) -> Result<Range<u64>, Error> {
        match &self.range {
            None => Ok(0..length),
            Some(range) if range.start < range.end && range.end <= length => Ok(range.clone()),
            Some(range) => Err(Error::new(
                ErrorCode::InvalidParams,
                format!(
                    "key '{}' has {length} bytes; {} bytes from {} on are no part of it",
                    self.shown_key(),
                    range.end.saturating_sub(range.start),
                    range.start
                ),
            )),
        }
    }

    /// The chosen replica was at a limit: it may be chosen again.
    pub(crate) fn untry(&mut self) {
        if let Some(chosen) = self.chosen {
            self.tried &= !bit(chosen);
        }
    }

    /// Picks the replica to read: not tried, not suspect (as a last resort: suspects last), memory before disk, this host before
    /// others, and otherwise each in turn, so that the reads of one object are spread over its replicas. False when none is left.
    pub(crate) fn choose(&mut self, suspects: &Suspects, host_id: &str) -> bool {
        let Some(located) = &self.located else { return false };
        let spread = TURN.fetch_add(TURN_STEP, Ordering::Relaxed) >> 33;
        let count = located.replicas.len().max(1) as u64;
        let best = located
            .replicas
            .iter()
            .enumerate()
            .filter(|(i, _)| self.tried & bit(*i) == 0)
            .filter_map(|(i, replica)| Some((i, replica, located.nodes.get(&replica.node_id)?)))
            .map(|(i, replica, node)| (i, replica, node, suspects.contains(replica.node_id)))
            .filter(|(_, replica, _, suspect)| !suspect || self.may_ask_suspect(replica.node_id))
            .min_by_key(|(i, replica, node, suspect)| {
                let near = !host_id.is_empty() && node.host_id == host_id;
                let in_memory = replica.kind() == v1::ReplicaKind::Memory;
                (*suspect, !in_memory, !near, (*i as u64).wrapping_add(spread) % count)
            })
            .map(|(i, ..)| i);
        self.tried |= best.map_or(0, bit);
        self.chosen = best;
        self.was_tried |= best.is_some();
        self.chosen.is_some()
    }

    fn may_ask_suspect(&self, node: u64) -> bool {
        self.is_last_resort && !self.kept_waiting.contains(&node)
    }

    /// Which other copies there are to turn to if the chosen one keeps us waiting.
    pub(crate) fn beside(&self, suspects: &Suspects) -> Beside {
        let Some(located) = &self.located else { return Beside::Nothing };
        let mut beside = if located.suspect_copies > 0 { Beside::Suspect } else { Beside::Nothing };
        for (i, replica) in located.replicas.iter().enumerate() {
            let is_untried = self.tried & bit(i) == 0;
            if !suspects.contains(replica.node_id) {
                if is_untried {
                    return Beside::Well;
                }
            } else if (is_untried || !self.is_last_resort && self.chosen != Some(i))
                && !self.kept_waiting.contains(&replica.node_id)
            {
                beside = Beside::Suspect;
            }
        }
        beside
    }

    /// What there will be beside the copy that is chosen first.
    pub(crate) fn outlook(&self, suspects: &Suspects) -> Beside {
        let Some(located) = &self.located else { return Beside::Nothing };
        let well = located.replicas.iter().filter(|replica| !suspects.contains(replica.node_id)).count();
        match (well, located.suspect_copies) {
            (2.., _) => Beside::Well,
            (_, 0) => Beside::Nothing,
            _ => Beside::Suspect,
        }
    }

    /// A node kept the call waiting and did not answer.
    pub(crate) fn note_waiting(&mut self, node: u64) {
        if !self.kept_waiting.contains(&node) {
            self.kept_waiting.push(node);
        }
    }

    /// Nodes that kept the call waiting.
    pub(crate) fn kept_waiting(&self) -> &[u64] {
        &self.kept_waiting
    }

    /// Before the directory is asked again: whether copies on suspects are all that is left. Not of an object of which no copy was
    /// tried: suspects are not asked before others were.
    pub(crate) fn resort_to_suspects(&mut self, suspects: &Suspects) {
        self.is_last_resort = self.was_tried && self.beside(suspects) == Beside::Suspect;
    }

    /// No replica is left: what the caller is told if asking again does not help.
    pub(crate) fn exhausted(&mut self, suspects: &Suspects) {
        let suspect: Vec<String> = self
            .located
            .iter()
            .flat_map(|l| &l.replicas)
            .filter(|r| suspects.contains(r.node_id))
            .map(|r| r.node_id.to_string())
            .collect();
        let unreachable = match &self.failure {
            None => true,
            Some(error) => Suspects::is_telling(error, self.took),
        };
        if unreachable && !suspect.is_empty() {
            self.failure = Some(
                Error::new(
                    ErrorCode::ReplicaUnavailable,
                    format!(
                        "key '{}' has copies only on datanodes that do not answer this client: {}",
                        self.shown_key(),
                        suspect.join(", ")
                    ),
                )
                .with_node(suspect.first().cloned().unwrap_or_default()),
            );
        } else if self.failure.is_none() {
            self.failure = Some(Error::new(
                ErrorCode::ReplicaUnavailable,
                format!("the master names no readable copy of key '{}'", self.shown_key()),
            ));
        }
    }

    /// Whether the lease of the last locate still stands (T2).
    pub(crate) fn lease_holds(&self, now: BootInstant) -> bool {
        self.located.as_ref().and_then(|l| l.lease_ends).is_some_and(|ends| now < ends)
    }

    /// Whether asking the directory again may help. It does not when the caller's memory is too small.
    pub(crate) fn may_relocate(&self) -> bool {
        self.destination.is_some()
            && self.failure.as_ref().is_none_or(|error| {
                !matches!(error.code(), ErrorCode::BufferTooSmall | ErrorCode::InvalidParams | ErrorCode::Internal)
            })
    }

    /// Why an object that a restored directory lists is not there: since it was saved its space was given to something else.
    pub(crate) fn restored_in_vain(&self) -> Option<&Error> {
        let restored = self.located.as_ref().is_some_and(|located| located.expected.history != located.history);
        self.failure.as_ref().filter(|error| restored && error.code() == ErrorCode::ChecksumMismatch)
    }

    /// What the caller gets when the directory did not say where it is: what went wrong before tells more.
    pub(crate) fn not_located(self, error: &Error) -> (usize, Result<Delivered, Error>) {
        (self.position, Err(self.failure.unwrap_or_else(|| error.clone())))
    }

    /// What the caller gets when nothing helped.
    pub(crate) fn into_failure(self) -> (usize, Result<Delivered, Error>) {
        let key = self.shown_key();
        let past_lease =
            self.located.as_ref().and_then(|l| l.lease_ends).is_some_and(|ends| BootInstant::now() >= ends);
        let lost = self.restored_in_vain().map(|error| {
            Error::new(
                ErrorCode::ObjectNotFound,
                format!("key '{key}' was restored, but its space holds something else by now: {}", error.message()),
            )
        });
        let error = match lost.or(self.failure) {
            Some(error) if error.code() == ErrorCode::ChecksumMismatch && past_lease => Error::new(
                ErrorCode::LeaseExpired,
                format!("reading key '{key}' outlived its lease and the bytes did not verify; they were discarded"),
            ),
            Some(error) => error,
            None => Error::new(ErrorCode::ReplicaUnavailable, format!("no copy of key '{key}' could be read")),
        };
        (self.position, Err(error))
    }

    pub(crate) fn shown_key(&self) -> String {
        String::from_utf8_lossy(&self.key[..self.key.len().min(256)]).into_owned()
    }
}

/// Objects have far fewer replicas than bits; a master that names more has the others left alone.
fn bit(replica: usize) -> u64 {
    const { assert!(REPLICAS_PER_OBJECT_MAX < 63) };
    1 << replica.min(63)
}
