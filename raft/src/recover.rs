//! The last resort (I1): a majority is lost for ever, and one stopped member goes on alone. It becomes a quorum of one
//! under a new cluster id and a new history, so that nothing of the cluster before can speak to it, nor be taken for it.
//! Everything in its log counts as committed. What the lost ones had acknowledged beyond that is gone.

use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use tidepool_proto::{Error, ErrorCode, NodeId, planted};

use crate::codec;
use crate::divergence;
use crate::identity::{ClusterIdentity, IdentityStore};
use crate::log::{Disk, OpenReport, RocksDisk, Write, recover};
use crate::open::{OpenError, cannot_start_over};
use crate::options::{Agreement, Member};
use crate::restore::fresh_identity;
use crate::skips::{OpPlace, PayloadHash, Skips, StoppedAt};
use crate::snapshot::{SnapshotFile, SnapshotStore};
use crate::types::{self, Entry, EntryPayload, LogId, Membership, Payload, Vote, log_id, retired_of, term_of};
use crate::unfinished::Unfinished;

/// What one stopped member holds.
pub struct LastOne<D: Disk = RocksDisk> {
    data_dir: PathBuf,
    disk: D,
    identity: IdentityStore,
    membership: Membership,
    last: LogId,
    term: u64,
    log_last: Option<LogId>,
    deleted: u64,
    /// Intact ones that the log reaches, newest first.
    snapshots: Vec<SnapshotFile>,
    /// Whether a recovery was begun and cut short.
    was_begun: bool,
    /// Facts for whoever has to decide.
    pub facts: Facts,
}

/// What is known of the cluster from one member's data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// This member.
    pub node_id: NodeId,
    /// Its address, as the others knew it.
    pub address: String,
    /// Cluster and history so far.
    pub cluster: ClusterIdentity,
    /// The other members.
    pub others: Vec<Member>,
    /// Last entry of the log, and its term.
    pub last_index: u64,
    /// Its term.
    pub last_term: u64,
    /// Last entry that this member knew to be committed: beyond it the others may have had entries that are not here, and some
    /// of what is here may never have been acknowledged.
    pub committed_index: u64,
    /// Last entry that the newest snapshot covers.
    pub snapshot_index: u64,
}

fn refuse(message: String) -> OpenError {
    OpenError(Error::new(ErrorCode::InvalidParams, message))
}

/// Where the log of a data directory lies.
fn log_of(data_dir: &Path) -> Result<PathBuf, OpenError> {
    let path = data_dir.join("log");
    if path.join("STORE").exists() {
        return Ok(path);
    }
    Err(refuse(format!("{} is no data directory of a master: it holds no log", data_dir.display())))
}

/// The data of a stopped member, verified. Its log stays locked.
struct Stopped<D: Disk> {
    disk: D,
    path: PathBuf,
    report: OpenReport,
    identity: IdentityStore,
    snapshots: SnapshotStore,
}

impl Stopped<RocksDisk> {
    fn open(data_dir: &Path) -> Result<Self, OpenError> {
        let path = log_of(data_dir)?;
        let disk = RocksDisk::open(&path)?;
        Stopped::on(data_dir, path, disk)
    }
}

impl<D: Disk> Stopped<D> {
    fn on(data_dir: &Path, path: PathBuf, disk: D) -> Result<Self, OpenError> {
        let report = recover(&disk, &path, &|_| Ok(()))?;
        let identity = IdentityStore::reopen(data_dir, disk.store_id())?;
        let snapshots =
            SnapshotStore::open(&data_dir.join("snapshots"), Agreement::Majority).map_err(OpenError::storage)?;
        Ok(Stopped { disk, path, report, identity, snapshots })
    }
}

impl LastOne {
    /// Opens the data directory of a stopped member and verifies all of it. Changes nothing.
    pub fn open(data_dir: &Path) -> Result<LastOne, OpenError> {
        let before = recovery_of(data_dir)?;
        LastOne::of(data_dir, before, Stopped::open(data_dir)?)
    }

    /// Makes it a quorum of one, whose log goes on with `payload`; answers its new identity. Cut short, it is carried out again by
    /// the same call.
    pub fn go_on_alone(self, payload: Bytes) -> Result<ClusterIdentity, OpenError> {
        self.go_on_as(fresh_identity(rand::random), payload)
    }
}

/// The cluster that a recovery began to replace, if one was cut short.
fn recovery_of(data_dir: &Path) -> Result<Option<ClusterIdentity>, OpenError> {
    match Unfinished::read(data_dir).map_err(OpenError::storage)? {
        Some(Unfinished::Recovery(before)) => Ok(Some(before)),
        Some(Unfinished::Restore) => {
            Err(refuse(format!("a restore into {} was cut short: it holds nothing", data_dir.display())))
        }
        None => Ok(None),
    }
}

impl<D: Disk> LastOne<D> {
    /// The same of a simulated machine, which has its log on `disk`.
    #[cfg(feature = "sim")]
    pub(crate) fn open_on(data_dir: &Path, disk: D) -> Result<LastOne<D>, OpenError> {
        let before = recovery_of(data_dir)?;
        LastOne::of(data_dir, before, Stopped::on(data_dir, data_dir.join("log"), disk)?)
    }

    fn of(data_dir: &Path, before: Option<ClusterIdentity>, stopped: Stopped<D>) -> Result<LastOne<D>, OpenError> {
        let Stopped { disk, path, report, identity, snapshots } = stopped;
        let was_begun = before.is_some();
        let snapshot = snapshots.current().map(|file| file.meta().clone());
        let covered = snapshot.as_ref().and_then(|meta| meta.last_log_id);
        if report.purged > covered {
            return Err(OpenError::corrupt(format!(
                "the log in {} begins after index {}, and no intact snapshot covers that: this member cannot go on alone",
                path.display(),
                report.purged.map_or(0, |id| id.index)
            )));
        }
        let mut membership = snapshot.map(|meta| meta.last_membership.membership().clone()).unwrap_or_default();
        disk.scan(report.first, &mut |_, frame| {
            if let EntryPayload::Membership(newer) = codec::decode::<Entry>(frame)?.payload {
                membership = newer;
            }
            Ok(())
        })
        .map_err(OpenError::storage)?;
        let record = identity.record();
        let own = membership.get_node(&record.node_id.0).map(|node| node.address.clone());
        let (Some(last), Some(cluster), Some(address)) = (report.last.max(covered), before.or(record.cluster), own)
        else {
            return Err(refuse(format!(
                "{} is the directory of node {}, which belonged to no quorum as far as its log says",
                data_dir.display(),
                record.node_id
            )));
        };
        let others = membership.nodes().filter(|(id, _)| **id != record.node_id.0);
        let facts = Facts {
            node_id: record.node_id,
            address,
            cluster,
            others: others
                .filter_map(|(id, node)| Some(Member { node_id: NodeId(*id), address: node.address.parse().ok()? }))
                .collect(),
            last_index: last.index,
            last_term: term_of(&last),
            committed_index: report.committed.max(covered).map_or(0, |id| id.index),
            snapshot_index: covered.map_or(0, |id| id.index),
        };
        let term = report.vote.map_or(0, |vote| vote.leader_id.term).max(term_of(&last)) + 1;
        let (log_last, deleted) = (report.last, report.deleted);
        let data_dir = data_dir.to_owned();
        let snapshots = snapshots.reached_by(report.purged);
        Ok(LastOne { data_dir, disk, identity, membership, last, term, log_last, deleted, snapshots, was_begun, facts })
    }

    /// Snapshots that a start may begin with, newest first: what the state machine wrote.
    pub fn snapshots(&self) -> &[SnapshotFile] {
        &self.snapshots
    }

    /// Whether a recovery was cut short after the log had gone on with `payload`: all that is left is to say so.
    pub fn goes_on_with(&self, payload: &[u8]) -> io::Result<bool> {
        let mut is_last = false;
        if self.was_begun
            && let Some(last) = self.log_last
        {
            self.disk.scan(last.index, &mut |_, frame| {
                is_last =
                    matches!(codec::decode::<Entry>(frame)?.payload, EntryPayload::Normal(last) if last.0 == payload);
                Ok(())
            })?;
        }
        Ok(is_last)
    }

    /// Every payload of the log that this snapshot does not cover, in order; without one, of the whole log.
    pub fn payloads_since(
        &self,
        snapshot: Option<&SnapshotFile>,
        see: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let first = match snapshot.and_then(|file| file.meta().last_log_id) {
            Some(covered) => covered.index + 1,
            None => self.deleted,
        };
        self.disk.scan(first.max(self.deleted), &mut |index, frame| match codec::decode::<Entry>(frame)?.payload {
            EntryPayload::Normal(payload) => see(index, &payload.0),
            _ => Ok(()),
        })
    }

    /// [`LastOne::go_on_alone`] under this identity, which never was.
    pub(crate) fn go_on_as(self, cluster: ClusterIdentity, payload: Bytes) -> Result<ClusterIdentity, OpenError> {
        if self.goes_on_with(&payload).map_err(OpenError::storage)?
            && let Some(cluster) = self.identity.record().cluster
        {
            Unfinished::end(&self.data_dir).map_err(OpenError::storage)?;
            return Ok(cluster);
        }
        let own = self.facts.node_id.0;
        let mut retired = retired_of(&self.membership);
        self.facts.others.iter().for_each(|other| retired.insert(other.node_id.0));
        let member = types::Member { address: self.facts.address.clone(), retired };
        let alone = Membership::new(vec![[own].into()], std::collections::BTreeMap::from([(own, member)]));
        let alone = alone.map_err(|error| refuse(error.to_string()))?;
        Unfinished::Recovery(self.facts.cluster).begin(&self.data_dir).map_err(OpenError::storage)?;
        // First: from here on none of the lost ones, should it come back, is let in.
        let changed = self.identity.update(|record| {
            record.cluster = Some(cluster);
            record.roster.clear();
        });
        changed.map_err(OpenError::storage)?;
        let (mut writes, mut last) = (Vec::new(), self.last);
        if self.log_last < Some(last) {
            // A snapshot reaches beyond the log: what the log holds is covered by it.
            let end = self.log_last.map_or(0, |id| id.index + 1).max(self.deleted);
            writes.push(Write::Purge { purged: codec::encode(&last), delete: self.deleted..end });
        }
        if planted!(ForgottenLog)
            && let Some(covered) = self.snapshots.first().and_then(|file| file.meta().last_log_id)
        {
            // Nor does it know how far its log went.
            writes.extend([Write::Truncate(covered.index + 1..last.index + 1), Write::Synced(covered.index + 1)]);
            last = covered;
        }
        let index = last.index + 1;
        writes.push(Write::Vote(codec::encode(&Vote::new(self.term, own))));
        let entries = [EntryPayload::Membership(alone), EntryPayload::Normal(Payload(payload))];
        for (index, payload) in (index..).zip(entries) {
            let entry = Entry { log_id: log_id(self.term, index), payload };
            writes.push(Write::Append { index, frame: codec::encode(&entry) });
        }
        self.disk.write(&writes).and_then(|()| self.disk.sync()).map_err(OpenError::storage)?;
        Unfinished::end(&self.data_dir).map_err(OpenError::storage)?;
        Ok(cluster)
    }
}

/// Has a stopped member begin anew at its next start, from the last snapshot that a majority vouched for and its log, as it does
/// by itself when its state is found to differ (M3). Refused where that is not possible; then nothing is changed.
pub fn start_over(data_dir: &Path) -> Result<(), OpenError> {
    // The log is held until it is noted: the master must not run.
    let stopped = Stopped::open(data_dir)?;
    if !divergence::suffices(&stopped.snapshots, stopped.report.purged) {
        let why = cannot_start_over(&data_dir.display().to_string(), stopped.identity.record().node_id);
        return Err(OpenError(Error::new(ErrorCode::StateDiverged, why)));
    }
    divergence::note_wanted(data_dir).map_err(OpenError::storage)
}

/// Has an op left out by a stopped member from now on (M1): `hash` must be that of the entry in its own log. Without a hash
/// nothing is changed. Answers the hash.
pub fn skip(data_dir: &Path, place: OpPlace, hash: Option<PayloadHash>) -> Result<PayloadHash, OpenError> {
    let path = log_of(data_dir)?;
    if let Some(stopped) = StoppedAt::read(data_dir).map_err(OpenError::storage)?
        && stopped.place.index == place.index
        && stopped.place != place
    {
        return Err(refuse(format!(
            "this master stopped at op {}, not at {place}: {}",
            stopped.place, stopped.message
        )));
    }
    let disk = RocksDisk::open(&path)?;
    let frames = disk.read(place.index..place.index.saturating_add(1), usize::MAX).map_err(OpenError::storage)?;
    let Some((_, frame)) = frames.into_iter().find(|(index, _)| *index == place.index) else {
        return Err(refuse(format!(
            "the log in {} holds no entry {}: this master does not need the op left out, or has to catch up first",
            path.display(),
            place.index
        )));
    };
    let entry = codec::decode::<Entry>(frame).map_err(|error| OpenError::corrupt(error.to_string()))?;
    let EntryPayload::Normal(payload) = entry.payload else {
        return Err(refuse(format!("entry {} holds no ops", place.index)));
    };
    let found = PayloadHash::of(&payload.0);
    match hash {
        Some(hash) if hash != found => Err(refuse(format!(
            "entry {} has hash {found} here, {hash} was given: this is another log, or another entry",
            place.index
        ))),
        Some(_) => Skips::add(data_dir, place, found).map(|()| found).map_err(OpenError::storage),
        None => Ok(found),
    }
}
