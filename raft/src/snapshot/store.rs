//! The directory of snapshots: a new one is written aside, synced, renamed into place and the directory synced;
//! only then is it current and only then may the log be purged. The newest two are kept.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::file::{SnapshotError, SnapshotFile};
use crate::machine::Frozen;
use crate::types::{LogId, SnapshotMeta, term_of};

/// Snapshots kept: the current one, and its predecessor to fall back to.
pub const SNAPSHOTS_KEPT: usize = 2;
const SUFFIX: &str = "snap";
const TEMPORARY: &str = "tmp";

/// Snapshots of one member. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SnapshotStore {
    dir: Arc<PathBuf>,
    /// Oldest first.
    kept: Arc<Mutex<Vec<SnapshotFile>>>,
    temporaries: Arc<AtomicU64>,
}

impl SnapshotStore {
    /// Opens the directory, verifies what lies there and drops what is unfinished. A damaged snapshot is set aside
    /// with a warning; whether the log can do without it is for the caller to see.
    pub fn open(dir: &Path) -> Result<SnapshotStore, SnapshotError> {
        let failed = |source| SnapshotError::Io { path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(failed)?;
        let mut kept = Vec::new();
        for entry in fs::read_dir(dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            match path.extension().and_then(|e| e.to_str()) {
                Some(SUFFIX) => match SnapshotFile::open(&path).and_then(|file| file.verify().map(|()| file)) {
                    Ok(file) => kept.push(file),
                    Err(error @ SnapshotError::Io { .. }) => return Err(error),
                    Err(error) => {
                        tracing::error!(%error, "a snapshot is damaged; falling back to an older one");
                        fs::rename(&path, path.with_extension("damaged")).map_err(failed)?;
                    }
                },
                Some(TEMPORARY) => fs::remove_file(&path).map_err(failed)?,
                _ => {}
            }
        }
        kept.sort_by_key(|file| file.meta().last_log_id);
        let temporaries = Arc::new(AtomicU64::new(0));
        Ok(SnapshotStore { dir: Arc::new(dir.to_owned()), kept: Arc::new(Mutex::new(kept)), temporaries })
    }

    /// The newest snapshot.
    pub fn current(&self) -> Option<SnapshotFile> {
        self.kept.lock().last().cloned()
    }

    /// Log id that the older of the kept snapshots covers: the log after it must stay, so that losing the newer one
    /// loses nothing. None while there is but one.
    pub fn fallback(&self) -> Option<LogId> {
        let kept = self.kept.lock();
        kept.len().checked_sub(SNAPSHOTS_KEPT).and_then(|at| kept[at].meta().last_log_id)
    }

    /// Writes a frozen state and makes it current. Blocks on the disk.
    pub fn write(&self, meta: &SnapshotMeta, state: Box<dyn Frozen>) -> Result<SnapshotFile, SnapshotError> {
        let path = self.temporary_path();
        let result = SnapshotFile::write(&path, meta, state).and_then(|file| {
            // Read back before the log that could replace it goes.
            file.verify()?;
            self.publish(file)
        });
        if result.is_err() {
            remove_quietly(&path);
        }
        result
    }

    /// Begins to take in a snapshot of `length` bytes from a peer.
    pub fn receive(&self, length: u64) -> Result<Incoming, SnapshotError> {
        let path = self.temporary_path();
        let file = File::create(&path).map_err(|source| SnapshotError::Io { path: path.clone(), source })?;
        Ok(Incoming { path, file: Some(file), length, received: 0 })
    }

    /// Makes a complete file the current snapshot: durable when this returns. A no-op for the current one.
    pub fn publish(&self, file: SnapshotFile) -> Result<SnapshotFile, SnapshotError> {
        let mut kept = self.kept.lock();
        let path = self.dir.join(name(file.meta()));
        if file.path() == path {
            return Ok(file);
        }
        let failed = |source| SnapshotError::Io { path: path.clone(), source };
        file.sync()?;
        fs::rename(file.path(), &path).map_err(failed)?;
        File::open(&*self.dir).and_then(|dir| dir.sync_all()).map_err(failed)?;
        let file = file.moved_to(path.clone());
        kept.retain(|old| old.path() != path);
        kept.push(file.clone());
        kept.sort_by_key(|file| file.meta().last_log_id);
        while kept.len() > SNAPSHOTS_KEPT {
            let old = kept.remove(0);
            fs::remove_file(old.path()).map_err(|source| SnapshotError::Io { path: old.path().to_owned(), source })?;
        }
        Ok(file)
    }

    fn temporary_path(&self) -> PathBuf {
        let number = self.temporaries.fetch_add(1, Ordering::Relaxed);
        self.dir.join(format!("incoming-{number}.{TEMPORARY}"))
    }
}

fn name(meta: &SnapshotMeta) -> String {
    let (index, term) = meta.last_log_id.map_or((0, 0), |id| (id.index, term_of(&id)));
    format!("{index:020}-{term:020}.{SUFFIX}")
}

fn remove_quietly(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "an unfinished snapshot stays until the next start");
    }
}

/// A snapshot that is arriving. Dropped unfinished, it leaves nothing behind.
#[derive(Debug)]
pub struct Incoming {
    path: PathBuf,
    file: Option<File>,
    length: u64,
    received: u64,
}

impl Incoming {
    /// Takes the next bytes; they must follow the last ones. Blocks on the disk.
    pub fn append(&mut self, offset: u64, data: &[u8]) -> Result<(), SnapshotError> {
        let damaged = |why: String| SnapshotError::Damaged { path: self.path.clone(), why };
        if offset != self.received {
            return Err(damaged(format!("a chunk for offset {offset} arrived where {} was next", self.received)));
        }
        if data.len() as u64 > self.length - self.received {
            return Err(damaged(format!("more arrived than the {} bytes announced", self.length)));
        }
        let file = self.file.as_mut().ok_or_else(|| damaged("it is complete already".to_owned()))?;
        file.write_all(data).map_err(|source| SnapshotError::Io { path: self.path.clone(), source })?;
        self.received += data.len() as u64;
        Ok(())
    }

    /// Checks that everything arrived and is what `meta` and `checksum` announced, and syncs it. Blocks on the disk.
    pub fn finish(mut self, meta: &SnapshotMeta, checksum: u32) -> Result<SnapshotFile, SnapshotError> {
        let damaged = |why: String| SnapshotError::Damaged { path: self.path.clone(), why };
        if self.received != self.length {
            return Err(damaged(format!("{} of {} bytes arrived", self.received, self.length)));
        }
        let file = SnapshotFile::open(&self.path)?;
        if file.meta() != meta || file.checksum() != checksum {
            return Err(damaged("it is another snapshot than was announced".to_owned()));
        }
        file.verify()?;
        file.sync()?;
        // From here on the file is the caller's.
        self.file = None;
        Ok(file)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            remove_quietly(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::types::log_id;

    struct Bytes(Vec<u8>);
    impl Frozen for Bytes {
        fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
            out.write_all(&self.0)
        }
    }

    fn meta(index: u64) -> SnapshotMeta {
        SnapshotMeta { last_log_id: Some(log_id(3, index)), ..Default::default() }
    }

    fn body(index: u64) -> Box<Bytes> {
        Box::new(Bytes(vec![index as u8; 100_000]))
    }

    fn read(file: &SnapshotFile) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut reader = file.reader();
        io::Read::read_to_end(&mut reader, &mut bytes).unwrap();
        reader.finish().unwrap();
        bytes
    }

    #[test]
    fn the_newest_two_are_kept_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path()).unwrap();
        assert!(store.current().is_none());
        for index in [5, 9, 200] {
            store.write(&meta(index), body(index)).unwrap();
        }
        assert_eq!(store.fallback(), Some(log_id(3, 9)));
        let again = SnapshotStore::open(dir.path()).unwrap();
        assert_eq!(again.current().unwrap().meta(), &meta(200));
        assert_eq!(read(&again.current().unwrap()), body(200).0);
        assert_eq!(again.fallback(), Some(log_id(3, 9)));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    /// Tried without the check of the body at opening: fails.
    #[test]
    fn any_damage_falls_back_to_the_older_one() {
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path()).unwrap();
        store.write(&meta(5), body(5)).unwrap();
        let newest = store.write(&meta(9), body(9)).unwrap();
        let whole = fs::read(newest.path()).unwrap();
        let stride = 997;
        let mut damaged: Vec<Vec<u8>> = (0..whole.len())
            .step_by(stride)
            .chain(whole.len() - 16..whole.len())
            .chain(0..60)
            .map(|at| {
                let mut bytes = whole.clone();
                bytes[at] ^= 0x10;
                bytes
            })
            .collect();
        damaged.extend((0..whole.len()).step_by(stride).map(|at| whole[..at].to_vec()));
        damaged.push([whole.clone(), vec![0]].concat());
        for bytes in damaged {
            fs::write(newest.path(), &bytes).unwrap();
            let again = SnapshotStore::open(dir.path()).unwrap();
            assert_eq!(again.current().unwrap().meta(), &meta(5));
            fs::remove_file(newest.path().with_extension("damaged")).unwrap();
        }
    }

    #[test]
    fn a_failed_write_leaves_the_current_one() {
        struct Failing;
        impl Frozen for Failing {
            fn write_to(self: Box<Self>, out: &mut dyn io::Write) -> io::Result<()> {
                out.write_all(&[1; 10])?;
                Err(io::Error::other("no space"))
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let store = SnapshotStore::open(dir.path()).unwrap();
        store.write(&meta(5), body(5)).unwrap();
        store.write(&meta(9), Box::new(Failing)).unwrap_err();
        assert_eq!(store.current().unwrap().meta(), &meta(5));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_a_complete_and_announced_snapshot_is_taken_in() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let sent = SnapshotStore::open(from.path()).unwrap().write(&meta(9), body(9)).unwrap();
        let store = SnapshotStore::open(to.path()).unwrap();
        let whole = sent.read_at(0, sent.length() as usize).unwrap();

        let mut incoming = store.receive(sent.length()).unwrap();
        incoming.append(0, &whole[..1000]).unwrap();
        assert!(incoming.append(999, &whole[999..]).is_err(), "a gap or repeat");
        assert!(incoming.append(1000, &[&whole[1000..], &[0]].concat()).is_err(), "too long");
        drop(incoming);

        let mut cut = store.receive(sent.length()).unwrap();
        cut.append(0, &whole[..1000]).unwrap();
        assert!(cut.finish(sent.meta(), sent.checksum()).is_err());

        let mut flipped = whole.to_vec();
        flipped[5000] ^= 1;
        let mut incoming = store.receive(sent.length()).unwrap();
        incoming.append(0, &flipped).unwrap();
        assert!(incoming.finish(sent.meta(), sent.checksum()).is_err());

        let mut other = store.receive(sent.length()).unwrap();
        other.append(0, &whole).unwrap();
        assert!(other.finish(&meta(10), sent.checksum()).is_err());
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0, "nothing is left behind");

        let mut incoming = store.receive(sent.length()).unwrap();
        incoming.append(0, &whole[..77]).unwrap();
        incoming.append(77, &whole[77..]).unwrap();
        let file = store.publish(incoming.finish(sent.meta(), sent.checksum()).unwrap()).unwrap();
        assert_eq!(read(&file), body(9).0);
        assert_eq!(SnapshotStore::open(to.path()).unwrap().current().unwrap().meta(), &meta(9));
    }
}
