//! Cold recovery (I1, I5): a master's empty data directory is made from a published snapshot, as a quorum of one in a new cluster
//! and history. Only an explicit command does so; what is published starts nothing by itself.

// Files belong here; the directory has none of them.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod histories;
mod others;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::Path;

use bytes::Bytes;
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, LogTime, NodeId};
use tidepool_raft::{ClusterIdentity, Frozen, LogPosition, OpenError, Restored, is_vacant, knows_cluster};

use crate::directory::limits::HISTORIES_FEATURE_LEVEL;
use crate::directory::{Directory, EntryBuilder, FrozenDirectory, Op};
use crate::snapshots::{Catalogue, Location, PublishedImage, Rejected, StoreError};

pub use histories::go_on;
pub use others::check_others;

/// Names shown of what lies at a location.
const NAMES_SHOWN: usize = 8;

/// Why nothing was restored. The data directory is as empty as before.
#[derive(Debug, thiserror::Error)]
pub enum RestoreFailed {
    /// Nothing at the location can be used, or nothing may be.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The location cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The data directory cannot be made.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// What was restored, from what, and what was left out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Where the snapshot lies.
    pub from: String,
    /// Its cluster and history.
    pub before: ClusterIdentity,
    /// Last log index and term that it covers.
    pub saved_at: (u64, u64),
    /// The new cluster.
    pub now: ClusterIdentity,
    /// Newer candidates that were passed over: which, and why.
    pub skipped: Vec<(String, String)>,
    /// Objects in the snapshot.
    pub objects_in: u64,
    /// Objects in the new directory.
    pub objects_kept: u64,
    /// Objects that were left out, by reason.
    pub objects_dropped: BTreeMap<&'static str, u64>,
    /// Copies between datanodes that were under way; they are begun anew.
    pub copies_dropped: u64,
    /// Datanodes that have to be heard before what they hold is listed.
    pub nodes_waiting: u64,
    /// Their segments.
    pub segments_waiting: u64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, why) in &self.skipped {
            writeln!(f, "skipped: {name}: {why}")?;
        }
        writeln!(f, "restored: {}, up to entry {} of term {}", self.from, self.saved_at.0, self.saved_at.1)?;
        writeln!(f, "before: {}", self.before)?;
        writeln!(f, "now: {}", self.now)?;
        writeln!(f, "objects: {} in, {} kept", self.objects_in, self.objects_kept)?;
        for (reason, count) in &self.objects_dropped {
            writeln!(f, "dropped: {count} ({reason})")?;
        }
        if self.copies_dropped > 0 {
            writeln!(f, "copies under way: {} given up, begun anew as needed", self.copies_dropped)?;
        }
        writeln!(
            f,
            "waiting for: {} datanodes with {} segments; their objects are listed as each is heard",
            self.nodes_waiting, self.segments_waiting
        )
    }
}

/// The first payload of a log that goes on from another cluster's directory.
fn begin_history(before: ClusterIdentity) -> Result<Bytes, Error> {
    let mut entry = EntryBuilder::new(HISTORIES_FEATURE_LEVEL);
    entry.push(&Op::BeginHistory { before: (before.cluster, before.history) })?;
    // No time of its own: log time goes on where it stood (T1).
    Ok(entry.finish(LogTime(0)))
}

/// Whether a restore would begin here: the directory holds no data of a master.
pub fn is_wanted(data_dir: &Path) -> Result<bool, RestoreFailed> {
    Ok(is_vacant(data_dir)?)
}

/// Restores the newest snapshot that is whole into `data_dir`. None: the directory holds the data of a master already.
pub fn restore(
    location: &Location,
    data_dir: &Path,
    node_id: NodeId,
    address: &Address,
) -> Result<Option<Report>, RestoreFailed> {
    if !is_vacant(data_dir)? {
        return Ok(None);
    }
    let catalogue = Catalogue::open(location)?;
    let cluster = choose(&catalogue, location)?;
    let mut skipped = Vec::new();
    for candidate in catalogue.candidates()?.into_iter().filter(|candidate| candidate.place.cluster == cluster) {
        let loaded = catalogue.image(&candidate).and_then(|image| {
            let directory = image.load()?;
            check_ancestors(&image, &directory)?;
            Ok((image, directory))
        });
        match loaded {
            Ok((image, directory)) => {
                return make(&image, directory, skipped, (data_dir, node_id, address)).map(Some);
            }
            Err(why @ Rejected::Version(_)) => return Err(refuse(format!("{}: {why}", candidate.place)).into()),
            // It may be whole: what lies between it and an older one would be lost for ever.
            Err(Rejected::Unreadable(error)) => return Err(error.into()),
            Err(why) => {
                tracing::warn!(candidate = %candidate.place, %why, "passed over; an older snapshot is tried");
                skipped.push((candidate.place.to_string(), why.to_string()));
            }
        }
    }
    let others: BTreeSet<ClusterId> = catalogue.candidates()?.iter().map(|candidate| candidate.place.cluster).collect();
    let others: Vec<String> = others.iter().filter(|other| **other != cluster).map(directory_name).collect();
    let others = match others.is_empty() {
        true => String::new(),
        false => format!(
            "; the clusters that it went on from lie there too, restore one by {location}/CLUSTER: {}",
            others.join(", ")
        ),
    };
    let told: Vec<String> = skipped.iter().take(NAMES_SHOWN).map(|(name, why)| format!("{name}: {why}")).collect();
    Err(Error::new(
        ErrorCode::StorageCorrupt,
        format!(
            "none of {} snapshots of cluster {cluster} at {location} can be restored ({}){others}; to begin empty all the same, start without --restore-from and with --accept-data-loss",
            skipped.len(),
            told.join("; ")
        ),
    )
    .into())
}

/// The cluster to restore: the only one there, or the one that went on from all the others.
fn choose(catalogue: &Catalogue, location: &Location) -> Result<ClusterId, RestoreFailed> {
    let candidates = catalogue.candidates()?;
    let clusters: BTreeSet<ClusterId> = candidates.iter().map(|candidate| candidate.place.cluster).collect();
    let mut clusters: Vec<ClusterId> = clusters.into_iter().collect();
    match clusters.len() {
        0 => return Err(refuse(format!("nothing that could be restored lies at {location}")).into()),
        1 => return Ok(clusters.remove(0)),
        _ => {}
    }
    for &cluster in &clusters {
        let of_cluster = candidates.iter().filter(|candidate| candidate.place.cluster == cluster);
        let mut named = BTreeSet::new();
        for candidate in of_cluster {
            match catalogue.image(candidate) {
                Ok(image) => named.extend(image.descriptor.ancestors.iter().map(|ancestor| ancestor.cluster)),
                Err(Rejected::Unreadable(error)) => return Err(error.into()),
                // It says nothing that could be believed.
                Err(_) => {}
            }
        }
        if clusters.iter().all(|other| *other == cluster || named.contains(other)) {
            return Ok(cluster);
        }
    }
    let names: Vec<String> = clusters.iter().take(NAMES_SHOWN).map(directory_name).collect();
    Err(refuse(format!(
        "snapshots of {} clusters lie at {location}, and none of them went on from all the others: say which by {location}/CLUSTER, one of {}",
        clusters.len(),
        names.join(", ")
    ))
    .into())
}

/// As a cluster's directory is called at a location.
fn directory_name(cluster: &ClusterId) -> String {
    cluster.to_string().replace('-', "")
}

/// An image from before the present history of those who published it is not theirs: its ids would be taken for ids of that
/// history, and everything it lists would be a miss.
fn check_ancestors(image: &PublishedImage, directory: &Directory) -> Result<(), Rejected> {
    let ancestors = directory.ancestors();
    let inside = ancestors.iter().rev().map(|ancestor| (ancestor.cluster, ancestor.history));
    let said = image.descriptor.ancestors.iter().map(|ancestor| (ancestor.cluster, ancestor.history));
    if inside.eq(said) {
        return Ok(());
    }
    Err(Rejected::Foreign { file: "image", of: "an earlier history than its descriptor's".to_owned() })
}

fn make(
    image: &PublishedImage,
    directory: Directory,
    skipped: Vec<(String, String)>,
    (data_dir, node_id, address): (&Path, NodeId, &Address),
) -> Result<Report, RestoreFailed> {
    let descriptor = &image.descriptor;
    let before = ClusterIdentity { cluster: descriptor.cluster, history: descriptor.history };
    histories::check(directory.ancestors().iter().len())?;
    let counts = directory.counts();
    let copies = directory.copies(None, usize::MAX).len() as u64;
    let restored = Restored {
        node_id,
        address: address.clone(),
        at: LogPosition { term: descriptor.term, index: descriptor.index },
        state: Box::new(Image(directory.freeze())),
        payload: begin_history(before)?,
    };
    let now = restored.make(data_dir)?;
    let dropped = (counts.processing > 0).then_some(("unfinished puts", counts.processing));
    Ok(Report {
        from: image.location(),
        before,
        saved_at: (descriptor.index, descriptor.term),
        now,
        skipped,
        objects_in: counts.objects,
        objects_kept: counts.objects - counts.processing,
        objects_dropped: dropped.into_iter().collect(),
        copies_dropped: copies,
        nodes_waiting: counts.nodes,
        segments_waiting: counts.segments,
    })
}

/// What a simulated machine is restored from: the image in a snapshot that `before` agreed on.
#[cfg(feature = "sim")]
pub fn from_snapshot(
    snapshot: &tidepool_raft::snapshot::SnapshotFile,
    before: ClusterIdentity,
    node_id: NodeId,
    address: Address,
) -> Result<Restored, Error> {
    let damaged = |why: String| Error::new(ErrorCode::StorageCorrupt, why);
    let directory = Directory::new(before.history);
    directory.restore(&mut snapshot.reader()).map_err(|error| damaged(error.to_string()))?;
    let at = snapshot.position().ok_or_else(|| damaged("it covers nothing".to_owned()))?;
    histories::check(directory.ancestors().iter().len())?;
    Ok(Restored { node_id, address, at, state: Box::new(Image(directory.freeze())), payload: begin_history(before)? })
}

/// Refuses to begin an empty cluster where snapshots of another one lie, whole or not. `data_dir` is the master's.
pub fn check_nothing_to_lose(location: &Location, data_dir: &Path) -> Result<(), RestoreFailed> {
    if !is_vacant(data_dir)? || knows_cluster(data_dir)? {
        return Ok(());
    }
    let candidates = Catalogue::open(location)?.candidates()?;
    if candidates.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = candidates.iter().take(NAMES_SHOWN).map(|candidate| candidate.place.to_string()).collect();
    Err(refuse(format!(
        "the data directory {} is empty, but {} snapshots lie at {location} ({}{}): restore them with --restore-from {location}, join the cluster that is running with --join, or begin an empty one with --accept-data-loss",
        data_dir.display(),
        candidates.len(),
        names.join(", "),
        if candidates.len() > names.len() { ", ..." } else { "" }
    ))
    .into())
}

struct Image(FrozenDirectory);

impl Frozen for Image {
    fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
        self.0.write_to(out)
    }
}

fn refuse(message: String) -> Error {
    Error::new(ErrorCode::InvalidParams, message)
}
