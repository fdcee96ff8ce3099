//! The node's lasting identity: its uuid, the cluster it belongs to and those that it was in before, in the data directory, which one
//! process owns at a time.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tidepool_proto::ClusterId;

use crate::succession::Lineage;

const LOCK_FILE: &str = "lock";
const UUID_FILE: &str = "node.uuid";
const CLUSTER_FILE: &str = "cluster.uuid";
/// One line for each cluster and history, the present one first.
const LINEAGE_FILE: &str = "lineage";

/// Why the data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Another process has it.
    #[error("data directory '{}' is in use by another process; give each datanode its own", dir.display())]
    InUse {
        /// Directory.
        dir: PathBuf,
    },
    /// A file in it is not what was written.
    #[error("'{}' is damaged: {what}; remove the file to start as a new node", path.display())]
    Damaged {
        /// File.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It belongs elsewhere.
    #[error(
        "data directory '{}' belongs to cluster {ours}, the masters are of cluster {theirs}; use another --data-dir or other --masters",
        dir.display()
    )]
    OtherCluster {
        /// Directory.
        dir: PathBuf,
        /// Remembered cluster.
        ours: ClusterId,
        /// The masters' cluster.
        theirs: ClusterId,
    },
    /// The file system refused.
    #[error("'{}': {step}: {source}", path.display())]
    Io {
        /// File or directory.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// What it said.
        source: io::Error,
    },
}

/// The opened data directory; locked until dropped.
#[derive(Debug)]
pub(crate) struct IdentityStore {
    dir: PathBuf,
    node_uuid: [u8; 16],
    cluster: Option<ClusterId>,
    lineage: Lineage,
    _lock: File,
}

impl IdentityStore {
    /// Opens or makes the directory, takes its lock, and reads or draws the node's uuid.
    pub(crate) fn open(dir: &Path) -> Result<IdentityStore, IdentityError> {
        fs::create_dir_all(dir).map_err(at(dir, "create directory"))?;
        let lock_path = dir.join(LOCK_FILE);
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(at(&lock_path, "open"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(IdentityError::InUse { dir: dir.to_owned() }),
            Err(fs::TryLockError::Error(source)) => return Err(at(&lock_path, "lock")(source)),
        }
        let node_uuid = match read_uuid(&dir.join(UUID_FILE))? {
            Some(uuid) => uuid,
            None => {
                let uuid: [u8; 16] = rand::random();
                write_uuid(dir, UUID_FILE, uuid)?;
                uuid
            }
        };
        let cluster = read_uuid(&dir.join(CLUSTER_FILE))?.map(ClusterId);
        let lineage = read_lineage(&dir.join(LINEAGE_FILE))?;
        Ok(IdentityStore { dir: dir.to_owned(), node_uuid, cluster, lineage, _lock: lock })
    }

    /// Names the node across restarts.
    pub(crate) fn node_uuid(&self) -> [u8; 16] {
        self.node_uuid
    }

    /// The cluster this directory belongs to, once one was joined.
    pub(crate) fn cluster(&self) -> Option<ClusterId> {
        self.cluster
    }

    /// The clusters and histories that it was registered in.
    pub(crate) fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// Remembers those of a registration, durably.
    pub(crate) fn remember(&mut self, lineage: &Lineage) -> Result<(), IdentityError> {
        if self.lineage != *lineage {
            write_whole(&self.dir, LINEAGE_FILE, &lineage.to_string())?;
            self.lineage = lineage.clone();
        }
        Ok(())
    }

    /// Moves to the cluster that succeeds the one it belongs to, durably.
    pub(crate) fn follow(&mut self, successor: ClusterId) -> Result<(), IdentityError> {
        write_uuid(&self.dir, CLUSTER_FILE, successor.0)?;
        self.cluster = Some(successor);
        Ok(())
    }

    /// Remembers the cluster at the first registration; refuses another one for ever after.
    pub(crate) fn join(&mut self, cluster: ClusterId) -> Result<(), IdentityError> {
        match self.cluster {
            Some(ours) if ours == cluster => Ok(()),
            Some(ours) => Err(IdentityError::OtherCluster { dir: self.dir.clone(), ours, theirs: cluster }),
            None => {
                write_uuid(&self.dir, CLUSTER_FILE, cluster.0)?;
                self.cluster = Some(cluster);
                Ok(())
            }
        }
    }
}

fn at(path: &Path, step: &'static str) -> impl FnOnce(io::Error) -> IdentityError {
    let path = path.to_owned();
    move |source| IdentityError::Io { path, step, source }
}

fn read_uuid(path: &Path) -> Result<Option<[u8; 16]>, IdentityError> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(at(path, "read")(error)),
    };
    let digits: Vec<u8> = text.trim().bytes().filter(|&b| b != b'-').collect();
    let damaged = |what: &str| IdentityError::Damaged { path: path.to_owned(), what: what.to_owned() };
    if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Err(damaged("not 32 hexadecimal digits"));
    }
    let mut uuid = [0u8; 16];
    for (byte, pair) in uuid.iter_mut().zip(digits.chunks(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| damaged("not text"))?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| damaged("not hexadecimal"))?;
    }
    Ok(Some(uuid))
}

/// Nothing where there is no such file. One that cannot be understood counts as none too: what it is for is to follow more
/// restores than without it.
fn read_lineage(path: &Path) -> Result<Lineage, IdentityError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Lineage::default()),
        Err(error) => return Err(at(path, "read")(error)),
    };
    let parsed = std::str::from_utf8(&bytes).ok().and_then(|text| text.parse().ok());
    Ok(parsed.unwrap_or_else(|| {
        tracing::warn!(path = %path.display(), "damaged: the clusters that this node was in before are not known any more");
        Lineage::default()
    }))
}

fn write_uuid(dir: &Path, name: &str, uuid: [u8; 16]) -> Result<(), IdentityError> {
    write_whole(dir, name, &format!("{}\n", ClusterId(uuid)))
}

/// Whole or not at all: temporary file, fsync, rename, fsync of the directory.
fn write_whole(dir: &Path, name: &str, text: &str) -> Result<(), IdentityError> {
    let (path, temporary) = (dir.join(name), dir.join(format!("{name}.new")));
    let write = || -> io::Result<()> {
        let mut file = File::create(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(at(&path, "write"))
}

#[cfg(test)]
mod tests {
    use tidepool_proto::History;

    use super::*;

    #[test]
    fn the_uuid_survives_and_the_lock_excludes() {
        let dir = tempfile::tempdir().unwrap();
        let first = IdentityStore::open(dir.path()).unwrap();
        let uuid = first.node_uuid();
        assert!(matches!(IdentityStore::open(dir.path()), Err(IdentityError::InUse { .. })));
        drop(first);
        assert_eq!(IdentityStore::open(dir.path()).unwrap().node_uuid(), uuid);
    }

    #[test]
    fn another_cluster_is_refused_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (ClusterId([1; 16]), ClusterId([2; 16]));
        let mut store = IdentityStore::open(dir.path()).unwrap();
        store.join(a).unwrap();
        assert!(matches!(store.join(b), Err(IdentityError::OtherCluster { .. })));
        drop(store);
        let mut store = IdentityStore::open(dir.path()).unwrap();
        assert_eq!(store.cluster(), Some(a));
        let message = store.join(b).unwrap_err().to_string();
        assert!(
            message.contains("01010101-") && message.contains("02020202-") && message.contains("--data-dir"),
            "{message}"
        );
        store.join(a).unwrap();
    }

    #[test]
    fn a_successor_is_followed_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (ClusterId([1; 16]), ClusterId([2; 16]));
        let mut store = IdentityStore::open(dir.path()).unwrap();
        store.join(a).unwrap();
        store.follow(b).unwrap();
        store.join(b).unwrap();
        drop(store);
        let mut store = IdentityStore::open(dir.path()).unwrap();
        assert_eq!(store.cluster(), Some(b));
        assert!(store.join(a).is_err());
    }

    #[test]
    fn the_clusters_of_before_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = ((ClusterId([1; 16]), History(u64::MAX)), (ClusterId([2; 16]), History(7)));
        let lineage = Lineage::default().and_now(a.0, a.1).and_now(b.0, b.1);
        let mut store = IdentityStore::open(dir.path()).unwrap();
        assert_eq!(*store.lineage(), Lineage::default());
        store.remember(&lineage).unwrap();
        drop(store);
        assert_eq!(*IdentityStore::open(dir.path()).unwrap().lineage(), lineage);
        let mut many = Lineage::default();
        (1..200).for_each(|number| many = many.and_now(b.0, History(number)));
        IdentityStore::open(dir.path()).unwrap().remember(&many).unwrap();
        assert_eq!(*IdentityStore::open(dir.path()).unwrap().lineage(), many);
        for text in
            ["x", "01010101-0101-0101-0101-010101010101", "01010101-0101-0101-0101-010101010101 xyz", "\u{e9} 1"]
        {
            fs::write(dir.path().join(LINEAGE_FILE), text).unwrap();
            assert_eq!(*IdentityStore::open(dir.path()).unwrap().lineage(), Lineage::default(), "{text}");
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "xyz", "0102", "é234567890123456789012345678901"] {
            fs::write(dir.path().join(UUID_FILE), text).unwrap();
            let error = IdentityStore::open(dir.path()).unwrap_err();
            assert!(
                matches!(error, IdentityError::Damaged { .. }) && error.to_string().contains("node.uuid"),
                "{error}"
            );
        }
    }
}
