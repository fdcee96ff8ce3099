//! A data directory made from a saved state (I1, I5): a quorum of one in a new cluster, under a new history, whose log goes on
//! where the state was saved. Nothing is known here of where the state comes from.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use bytes::Bytes;
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, History, NodeId, planted};

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

/// A cluster and history that never were, of numbers drawn by `draw`.
pub(crate) fn fresh_identity(mut draw: impl FnMut() -> u128) -> ClusterIdentity {
    ClusterIdentity {
        cluster: ClusterId(draw().to_be_bytes()),
        history: History(if planted!(ConstantHistory) { 1 } else { (draw() as u64).max(1) }),
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
        let cluster = fresh_identity(rand::random);
        self.make_in(data_dir, cluster, open_rocks, &mut |_| Ok(())).map_err(|error| error.in_directory(data_dir))?;
        Ok(cluster)
    }

    /// Makes the data of a simulated machine, which has none.
    #[cfg(feature = "sim")]
    pub(crate) fn make_on(self, data_dir: &Path, disk: impl Disk, cluster: ClusterIdentity) -> Result<(), OpenError> {
        self.make_in(data_dir, cluster, |_| Ok(disk), &mut |_| Ok(())).map_err(|error| error.in_directory(data_dir))
    }

    /// `reached` is told after each step, and may end it there.
    fn make_in<D: Disk>(
        self,
        data_dir: &Path,
        cluster: ClusterIdentity,
        open_log: impl FnOnce(&Path) -> Result<D, OpenError>,
        reached: &mut dyn FnMut(&'static str) -> io::Result<()>,
    ) -> Result<(), Failed> {
        fs::create_dir_all(data_dir)?;
        reached("directory")?;
        Unfinished::Restore.begin(data_dir)?;
        reached("marked")?;
        for part in [LOG, SNAPSHOTS] {
            remove(&data_dir.join(part), |path| fs::remove_dir_all(path))?;
            reached("removed")?;
        }
        remove(&data_dir.join(IDENTITY), |path| fs::remove_file(path))?;
        sync_directory(data_dir)?;
        reached("emptied")?;

        let own = self.node_id.0;
        let member = types::Member::new(&self.address, Retired::default());
        let alone = Membership::new(vec![[own].into()], BTreeMap::from([(own, member)])).map_err(io::Error::other)?;
        let saved = log_id(self.at.term, self.at.index);
        let membership = StoredMembership::new(Some(saved), alone.clone());
        let meta = SnapshotMeta { last_log_id: Some(saved), last_membership: membership };
        let snapshots = SnapshotStore::open(&data_dir.join(SNAPSHOTS), Agreement::Majority).map_err(io::Error::from)?;
        snapshots.write(&meta, self.state).map_err(io::Error::from)?;
        reached("state")?;
        // What this cluster begins with: there is nobody else to ask.
        snapshots.vouch(saved.index).map_err(io::Error::from)?;
        reached("vouched")?;

        let disk = open_log(&data_dir.join(LOG))?;
        reached("log")?;
        let identity = IdentityStore::open(data_dir, self.node_id, disk.store_id(), true).map_err(OpenError::from)?;
        identity.update(|record| {
            record.cluster = Some(cluster);
            record.took_part = true;
        })?;
        reached("identity")?;
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
        reached("entries")?;
        Unfinished::end(data_dir)?;
        Ok(())
    }
}

fn open_rocks(dir: &Path) -> Result<RocksDisk, OpenError> {
    Ok(RocksDisk::open(dir)?)
}

/// What failed on the way.
enum Failed {
    Io(io::Error),
    Open(OpenError),
}

impl Failed {
    fn in_directory(self, dir: &Path) -> OpenError {
        match self {
            Failed::Io(error) => {
                OpenError::storage(io::Error::new(error.kind(), format!("{}: {error}", dir.display())))
            }
            Failed::Open(error) => error,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    struct State;

    impl Frozen for State {
        fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
            out.write_all(b"what was saved")
        }
    }

    fn restored() -> Restored {
        Restored {
            node_id: NodeId(1),
            address: "127.0.0.1:1".parse().expect("an address"),
            at: LogPosition { term: 3, index: 70 },
            state: Box::new(State),
            payload: Bytes::from_static(b"first"),
        }
    }

    /// Cut after any step, also when it is cut a second time on what the first one left, the directory is vacant and is made anew.
    /// Only after the last step it is not.
    #[test]
    fn a_restore_cut_after_any_step_leaves_a_vacant_directory() {
        let mut steps = Vec::new();
        let whole = tempfile::tempdir().unwrap();
        let cluster = fresh_identity(rand::random);
        let all = restored().make_in(whole.path(), cluster, open_rocks, &mut |step| {
            steps.push(step);
            Ok(())
        });
        assert!(all.is_ok() && !is_vacant(whole.path()).unwrap());
        assert_eq!(steps.len(), 10, "{steps:?}");
        for first in 0..steps.len() {
            let dir = tempfile::tempdir().unwrap();
            for last in [first, steps.len() - 1 - first] {
                let mut left = last;
                let cut = restored().make_in(dir.path(), cluster, open_rocks, &mut |_| {
                    left = left.checked_sub(1).ok_or_else(|| io::Error::other("cut"))?;
                    Ok(())
                });
                assert!(cut.is_err(), "cut after {}", steps[last]);
                assert!(is_vacant(dir.path()).unwrap(), "cut after {}", steps[last]);
                assert!(!knows_cluster(dir.path()).unwrap(), "cut after {}", steps[last]);
            }
            restored().make(dir.path()).unwrap();
            assert!(!is_vacant(dir.path()).unwrap());
        }
    }
}
