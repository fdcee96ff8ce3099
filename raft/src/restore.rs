//! A data directory made from a saved state (I1, I5): a quorum of one in a new cluster, under a new history, whose log goes on
//! where the state was saved. Nothing is known here of where the state comes from.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use bytes::Bytes;
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, History, NodeId};

use crate::codec;
use crate::identity::{ClusterIdentity, IdentityStore};
use crate::log::{Disk, RocksDisk, Write, recover};
use crate::machine::{Frozen, LogPosition};
use crate::open::OpenError;
use crate::options::Agreement;
use crate::retired::Retired;
use crate::snapshot::SnapshotStore;
use crate::types::{self, Entry, EntryPayload, Membership, Payload, SnapshotMeta, StoredMembership, Vote, log_id};
use crate::unfinished::{Unfinished, sync_directory};

const LOG: &str = "log";
const SNAPSHOTS: &str = "snapshots";
const IDENTITY: &str = "identity";

/// Who begins anew, and from what.
pub struct Restored {
    /// This member.
    pub node_id: NodeId,
    /// Its address.
    pub address: Address,
    /// Where in the log the state was saved.
    pub at: LogPosition,
    /// The state, as the state machine wrote it.
    pub state: Box<dyn Frozen>,
    /// The first payload of the new log.
    pub payload: Bytes,
}

/// A cluster and history that never were.
pub(crate) fn fresh_identity() -> ClusterIdentity {
    ClusterIdentity {
        cluster: ClusterId(rand::random::<u128>().to_be_bytes()),
        history: History(rand::random::<u64>().max(1)),
    }
}

/// Whether a data directory holds nothing that counts: it is not there, or empty, or waits for a cluster to begin, or is the rest
/// of a restore that was cut short.
pub fn is_vacant(data_dir: &Path) -> Result<bool, OpenError> {
    match Unfinished::read(data_dir).map_err(OpenError::storage)? {
        Some(Unfinished::Restore) => return Ok(true),
        Some(Unfinished::Recovery(_)) => return Ok(false),
        None => {}
    }
    let log = data_dir.join(LOG);
    if !log.join("STORE").exists() {
        return Ok(!data_dir.join(IDENTITY).exists());
    }
    let disk = RocksDisk::open(&log)?;
    if !recover(&disk, &log, &|_| Ok(()))?.is_pristine() {
        return Ok(false);
    }
    let snapshots = SnapshotStore::open(&data_dir.join(SNAPSHOTS), Agreement::Majority).map_err(OpenError::storage)?;
    Ok(snapshots.current().is_none())
}

/// Whether a vacant data directory was prepared for a cluster that is beginning (I4): it is waited for there.
pub fn knows_cluster(data_dir: &Path) -> Result<bool, OpenError> {
    let log = data_dir.join(LOG);
    let unfinished = Unfinished::read(data_dir).map_err(OpenError::storage)?;
    if unfinished.is_some() || !log.join("STORE").exists() || !data_dir.join(IDENTITY).exists() {
        return Ok(false);
    }
    let disk = RocksDisk::open(&log)?;
    Ok(IdentityStore::reopen(data_dir, disk.store_id())?.record().cluster.is_some())
}

impl Restored {
    /// Makes the directory, which must be vacant. Cut short at any moment, it is vacant again.
    pub fn make(self, data_dir: &Path) -> Result<ClusterIdentity, OpenError> {
        if !is_vacant(data_dir)? {
            return Err(OpenError::from(Error::new(
                ErrorCode::InvalidParams,
                format!("{} holds the data of a master; a restore needs an empty directory", data_dir.display()),
            )));
        }
        self.make_in(data_dir).map_err(|error| match error {
            Failed::Io(error) => {
                OpenError::storage(io::Error::new(error.kind(), format!("{}: {error}", data_dir.display())))
            }
            Failed::Open(error) => error,
        })
    }

    fn make_in(self, data_dir: &Path) -> Result<ClusterIdentity, Failed> {
        fs::create_dir_all(data_dir)?;
        Unfinished::Restore.begin(data_dir)?;
        for part in [LOG, SNAPSHOTS] {
            remove(&data_dir.join(part), |path| fs::remove_dir_all(path))?;
        }
        remove(&data_dir.join(IDENTITY), |path| fs::remove_file(path))?;
        sync_directory(data_dir)?;

        let own = self.node_id.0;
        let member = types::Member::new(&self.address, Retired::default());
        let alone = Membership::new(vec![[own].into()], BTreeMap::from([(own, member)])).map_err(io::Error::other)?;
        let saved = log_id(self.at.term, self.at.index);
        let membership = StoredMembership::new(Some(saved), alone.clone());
        let meta = SnapshotMeta { last_log_id: Some(saved), last_membership: membership };
        let snapshots = SnapshotStore::open(&data_dir.join(SNAPSHOTS), Agreement::Majority).map_err(io::Error::from)?;
        snapshots.write(&meta, self.state).map_err(io::Error::from)?;
        // What this cluster begins with: there is nobody else to ask.
        snapshots.vouch(saved.index).map_err(io::Error::from)?;

        let disk = RocksDisk::open(&data_dir.join(LOG)).map_err(OpenError::from)?;
        let identity = IdentityStore::open(data_dir, self.node_id, disk.store_id(), true).map_err(OpenError::from)?;
        let cluster = fresh_identity();
        identity.update(|record| {
            record.cluster = Some(cluster);
            record.took_part = true;
        })?;
        let (term, next) = (self.at.term + 1, self.at.index + 1);
        let entries = [EntryPayload::Membership(alone), EntryPayload::Normal(Payload(self.payload))];
        let mut writes = vec![
            Write::Purge { purged: codec::encode(&saved), delete: 0..0 },
            Write::Vote(codec::encode(&Vote::new(term, own))),
        ];
        for (index, payload) in (next..).zip(entries) {
            let entry = Entry { log_id: log_id(term, index), payload };
            writes.push(Write::Append { index, frame: codec::encode(&entry) });
        }
        disk.write(&writes)?;
        disk.sync()?;
        drop(disk);
        Unfinished::end(data_dir)?;
        Ok(cluster)
    }
}

/// What failed on the way.
enum Failed {
    Io(io::Error),
    Open(OpenError),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Failed {
        Failed::Io(error)
    }
}

impl From<OpenError> for Failed {
    fn from(error: OpenError) -> Failed {
        Failed::Open(error)
    }
}

fn remove(path: &Path, remove: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    match remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
