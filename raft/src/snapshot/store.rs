//! The directory of snapshots: a new one is written aside, synced, renamed into place and the directory synced;
//! only then is it current. The newest is kept, the newest two that a majority vouched for (M3), and the one that is being
//! sent; only those vouched for allow the log to be purged.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::durable;
use super::file::{SnapshotError, SnapshotFile};
use super::partial::{Partial, Wanted};
use crate::machine::Frozen;
use crate::options::Agreement;
use crate::types::{LogId, NodeId, SnapshotMeta, term_of};

/// Agreed snapshots kept: the newest, and its predecessor to fall back to.
pub const SNAPSHOTS_KEPT: usize = 2;
const SUFFIX: &str = "snap";
const TEMPORARY: &str = "tmp";
/// An empty file of this suffix beside a snapshot: a majority vouched for it.
const AGREED: &str = "agreed";
const DAMAGED: &str = "damaged";
/// One that nobody vouched for, kept for whoever looks into it.
const DOUBTFUL: &str = "doubtful";

/// Snapshots of one member. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SnapshotStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    agreement: Agreement,
    /// Held by whoever changes files that are listed, while it does: taken before `lists`, never by async code.
    changes: Mutex<()>,
    /// Held for a look or a change in memory, never across the disk: the serving threads take it.
    lists: Mutex<Lists>,
    incoming: Mutex<Incoming>,
    temporaries: AtomicU64,
}

#[derive(Debug, Default)]
struct Lists {
    /// Oldest first.
    kept: Vec<SnapshotFile>,
    /// What is being sent to whom.
    held: Vec<(NodeId, SnapshotFile)>,
}

impl Lists {
    fn agreed(&self) -> Option<&SnapshotFile> {
        self.kept.iter().rfind(|file| file.is_agreed())
    }

    /// Takes out of the list what is neither the newest, nor one of the newest agreed ones, nor being sent.
    fn prune(&mut self) -> Vec<SnapshotFile> {
        let (mut stay, mut go, mut agreed) = (Vec::new(), Vec::new(), 0);
        for (age, file) in self.kept.drain(..).rev().enumerate() {
            agreed += usize::from(file.is_agreed());
            let newest = age == 0 || (file.is_agreed() && agreed <= SNAPSHOTS_KEPT);
            let sending = self.held.iter().any(|(_, sending)| sending.path() == file.path());
            if newest || sending { stay.push(file) } else { go.push(file) }
        }
        stay.reverse();
        self.kept = stay;
        go
    }
}

/// What arrives, and for which stream: an older stream may still be open somewhere.
#[derive(Debug, Default)]
struct Incoming {
    stream: u64,
    partial: Option<Partial>,
}

impl SnapshotStore {
    /// Opens the directory, verifies what lies there and drops what is unfinished, but for what had arrived of a snapshot. A
    /// damaged snapshot is set aside with a warning; whether the log can do without it is for the caller to see.
    pub fn open(dir: &Path, agreement: Agreement) -> Result<SnapshotStore, SnapshotError> {
        let failed = |source| SnapshotError::Io { path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(failed)?;
        let (mut kept, mut marks) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            match path.extension().and_then(|e| e.to_str()) {
                Some(SUFFIX) => match SnapshotFile::open(&path).and_then(|file| file.verify().map(|()| file)) {
                    Ok(file) => kept.push(file),
                    Err(error @ SnapshotError::Io { .. }) => return Err(error),
                    Err(error) => {
                        tracing::error!(%error, "a snapshot is damaged; falling back to an older one");
                        fs::rename(&path, path.with_extension(DAMAGED)).map_err(failed)?;
                    }
                },
                Some(TEMPORARY) => fs::remove_file(&path).map_err(failed)?,
                Some(AGREED) => marks.push(path),
                _ => {}
            }
        }
        for mark in marks {
            match kept.iter().find(|file| file.path().with_extension(AGREED) == mark) {
                Some(file) => file.note_agreed(),
                None => fs::remove_file(&mark).map_err(failed)?,
            }
        }
        if agreement == Agreement::OwnWord {
            kept.iter().for_each(SnapshotFile::note_agreed);
        }
        kept.sort_by_key(|file| file.meta().last_log_id);
        let incoming = Incoming { stream: 0, partial: Partial::reopen(dir) };
        let shared = Shared {
            dir: dir.to_owned(),
            agreement,
            changes: Mutex::default(),
            lists: Mutex::new(Lists { kept, held: Vec::new() }),
            incoming: Mutex::new(incoming),
            temporaries: AtomicU64::new(0),
        };
        Ok(SnapshotStore { shared: Arc::new(shared) })
    }

    /// The newest snapshot.
    pub fn current(&self) -> Option<SnapshotFile> {
        self.shared.lists.lock().kept.last().cloned()
    }

    /// Those from which a log that begins after `purged` goes on, newest first.
    pub(crate) fn reached_by(&self, purged: Option<LogId>) -> Vec<SnapshotFile> {
        let lists = self.shared.lists.lock();
        lists.kept.iter().rev().filter(|file| file.meta().last_log_id >= purged).cloned().collect()
    }

    /// The newest snapshot that a majority vouched for.
    pub fn agreed(&self) -> Option<SnapshotFile> {
        self.shared.lists.lock().agreed().cloned()
    }

    /// Log id that the older of the agreed snapshots covers: the log after it must stay, so that losing the newer one
    /// loses nothing. None while there is but one.
    pub fn fallback(&self) -> Option<LogId> {
        let lists = self.shared.lists.lock();
        let older = lists.kept.iter().rev().filter(|file| file.is_agreed()).nth(SNAPSHOTS_KEPT - 1);
        older.and_then(|file| file.meta().last_log_id)
    }

    /// A majority vouched for this member's state at `index` (M3), and with it for every earlier state that it came from: an
    /// error in it would have stayed. A snapshot of that very index may have been taken after it was looked at, and has to wait
    /// for the next. Durable when it returns.
    pub fn vouch(&self, index: u64) -> Result<(), SnapshotError> {
        let _changes = self.shared.changes.lock();
        let covers = |file: &SnapshotFile| file.meta().last_log_id.is_none_or(|id| id.index < index);
        let is_vouched = |file: &&SnapshotFile| !file.is_agreed() && covers(file);
        let vouched: Vec<SnapshotFile> = self.shared.lists.lock().kept.iter().filter(is_vouched).cloned().collect();
        for file in &vouched {
            self.mark(file.path())?;
        }
        if !vouched.is_empty() {
            self.sync_dir()?;
            vouched.iter().for_each(SnapshotFile::note_agreed);
            self.prune()?;
        }
        Ok(())
    }

    /// Drops every snapshot that no majority vouched for, after this member's state was found to differ (M3). With `keep_aside`
    /// they stay, under a name that no start looks for.
    pub fn drop_doubtful(&self, keep_aside: bool) -> Result<(), SnapshotError> {
        let _changes = self.shared.changes.lock();
        let doubtful: Vec<SnapshotFile> =
            self.shared.lists.lock().kept.extract_if(.., |file| !file.is_agreed()).collect();
        for file in doubtful {
            tracing::warn!(path = %file.path().display(), keep_aside, "snapshot dropped: no majority vouched for it");
            match keep_aside {
                true => self.rename(&file, DOUBTFUL)?,
                false => self.remove(&file)?,
            }
        }
        self.sync_dir()
    }

    /// A snapshot that cannot be loaded is none: as if it had been found damaged.
    pub(crate) fn set_aside(&self, file: &SnapshotFile) -> Result<(), SnapshotError> {
        let _changes = self.shared.changes.lock();
        self.rename(file, DAMAGED)?;
        self.shared.lists.lock().kept.retain(|kept| kept.path() != file.path());
        self.sync_dir()
    }

    /// What to send to a member: what is being sent to one already, if the log that follows it is still there (it begins after
    /// `purged`), or the newest that a majority vouched for. Where there is neither, the newest; whoever sends looks whether it is
    /// agreed.
    pub(crate) fn to_send(&self, purged: u64) -> Option<SnapshotFile> {
        let lists = self.shared.lists.lock();
        let held = lists.held.iter().map(|(_, file)| file).find(|file| covered(file) >= purged);
        held.or_else(|| lists.agreed()).or(lists.kept.last()).cloned()
    }

    /// From here on this snapshot is being sent to `target`: it stays, and with it the log after it.
    pub(crate) fn hold(&self, target: NodeId, file: &SnapshotFile) {
        let mut lists = self.shared.lists.lock();
        lists.held.retain(|(to, _)| *to != target);
        lists.held.push((target, file.clone()));
    }

    /// What is being sent: to whom, and the index it covers.
    pub(crate) fn held(&self) -> Vec<(NodeId, u64)> {
        let lists = self.shared.lists.lock();
        lists.held.iter().map(|(to, file)| (*to, covered(file))).collect()
    }

    /// It needs it no more.
    pub(crate) fn release(&self, target: NodeId) {
        self.shared.lists.lock().held.retain(|(to, _)| *to != target);
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

    /// How much of a snapshot that a peer offers is here already, durably. Blocks on the disk.
    pub(crate) fn offered(&self, wanted: &Wanted) -> Result<u64, SnapshotError> {
        match &mut self.shared.incoming.lock().partial {
            Some(partial) if partial.wanted() == wanted => partial.sync().map(|()| partial.received()),
            _ => Ok(0),
        }
    }

    /// Begins to take in a snapshot from a peer, or goes on with it; an older stream is over. Answers the stream's number.
    pub(crate) fn receive(&self, wanted: Wanted) -> Result<u64, SnapshotError> {
        let mut incoming = self.shared.incoming.lock();
        incoming.stream += 1;
        if incoming.partial.as_ref().is_none_or(|partial| *partial.wanted() != wanted) {
            incoming.partial = Some(Partial::begin(&self.shared.dir, wanted)?);
        }
        Ok(incoming.stream)
    }

    /// Takes the next bytes of a stream. The first ones may be those of the whole snapshot again. Blocks on the disk.
    pub(crate) fn append(
        &self,
        stream: u64,
        offset: u64,
        data: &[u8],
        checksum: Option<u32>,
    ) -> Result<(), SnapshotError> {
        let mut incoming = self.shared.incoming.lock();
        let partial = self.partial_of(&mut incoming, stream)?;
        if offset == 0 && partial.received() > 0 {
            *partial = Partial::begin(&self.shared.dir, partial.wanted().clone())?;
        }
        partial.append(offset, data, checksum)
    }

    /// Checks that everything arrived and is what was announced. It is durable and current only once it is published. Blocks on
    /// the disk.
    pub(crate) fn finish(&self, stream: u64) -> Result<SnapshotFile, SnapshotError> {
        let mut incoming = self.shared.incoming.lock();
        let partial = self.partial_of(&mut incoming, stream)?;
        if partial.received() < partial.wanted().length {
            partial.sync()?;
            let why = format!("{} of {} bytes arrived", partial.received(), partial.wanted().length);
            return Err(SnapshotError::Damaged { path: self.shared.dir.clone(), why });
        }
        let path = self.temporary_path();
        match incoming.partial.take() {
            Some(partial) => partial.finish(&path),
            None => Err(self.overtaken()),
        }
    }

    fn partial_of<'i>(&self, incoming: &'i mut Incoming, stream: u64) -> Result<&'i mut Partial, SnapshotError> {
        let current = incoming.stream == stream;
        incoming.partial.as_mut().filter(|_| current).ok_or_else(|| self.overtaken())
    }

    fn overtaken(&self) -> SnapshotError {
        let why = "another snapshot began to arrive after this one".to_owned();
        SnapshotError::Damaged { path: self.shared.dir.clone(), why }
    }

    /// Removes an arrived snapshot that was not made current.
    pub(crate) fn drop_unpublished(&self, file: &SnapshotFile) {
        if is_temporary(file) {
            remove_quietly(file.path());
        }
    }

    /// Makes current what is to be installed: one that is kept here, or one that a leader sent. Leaders send none that is not
    /// agreed.
    pub(crate) fn adopt(&self, file: SnapshotFile) -> Result<SnapshotFile, SnapshotError> {
        let arrived = is_temporary(&file);
        self.make_current(file, arrived)
    }

    /// Makes a complete file the current snapshot: durable when this returns. A no-op for the current one.
    pub fn publish(&self, file: SnapshotFile) -> Result<SnapshotFile, SnapshotError> {
        self.make_current(file, false)
    }

    fn make_current(&self, file: SnapshotFile, is_agreed: bool) -> Result<SnapshotFile, SnapshotError> {
        // Before the lock: it takes as long as the file is large.
        file.sync()?;
        let _changes = self.shared.changes.lock();
        let path = self.shared.dir.join(name(file.meta()));
        if file.path() == path {
            return Ok(file);
        }
        let failed = |source| SnapshotError::Io { path: path.clone(), source };
        // A mark that an unfinished removal left would vouch for this one.
        remove_quietly(&path.with_extension(AGREED));
        if is_agreed {
            // First: a mark alone vouches for nothing, and the snapshot without it might be the only one that the log reaches.
            self.mark(&path)?;
            self.sync_dir()?;
        }
        if is_agreed || self.shared.agreement == Agreement::OwnWord {
            file.note_agreed();
        }
        durable::rename(file.path(), &path).map_err(failed)?;
        self.sync_dir()?;
        let file = file.moved_to(path.clone());
        {
            let kept = &mut self.shared.lists.lock().kept;
            kept.retain(|old| old.path() != path);
            kept.push(file.clone());
            kept.sort_by_key(|file| file.meta().last_log_id);
        }
        self.prune()?;
        Ok(file)
    }

    /// Removes what is needed no more. The caller holds `changes`.
    fn prune(&self) -> Result<(), SnapshotError> {
        let go = self.shared.lists.lock().prune();
        go.iter().try_for_each(|file| self.remove(file))
    }

    fn remove(&self, file: &SnapshotFile) -> Result<(), SnapshotError> {
        // The mark first: it must not vouch for another file of that name.
        remove_quietly(&file.path().with_extension(AGREED));
        durable::remove(file.path()).map_err(|source| SnapshotError::Io { path: file.path().to_owned(), source })
    }

    fn rename(&self, file: &SnapshotFile, suffix: &str) -> Result<(), SnapshotError> {
        remove_quietly(&file.path().with_extension(AGREED));
        let renamed = durable::rename(file.path(), &file.path().with_extension(suffix));
        renamed.map_err(|source| SnapshotError::Io { path: file.path().to_owned(), source })
    }

    fn mark(&self, snapshot: &Path) -> Result<(), SnapshotError> {
        let path = snapshot.with_extension(AGREED);
        let written = durable::create(&path).and_then(|mark| durable::sync(&mark, &path));
        written.map_err(|source| SnapshotError::Io { path, source })
    }

    fn sync_dir(&self) -> Result<(), SnapshotError> {
        let synced = durable::sync_names(&self.shared.dir);
        synced.map_err(|source| SnapshotError::Io { path: self.shared.dir.clone(), source })
    }

    fn temporary_path(&self) -> PathBuf {
        let number = self.shared.temporaries.fetch_add(1, Ordering::Relaxed);
        self.shared.dir.join(format!("incoming-{number}.{TEMPORARY}"))
    }
}

fn name(meta: &SnapshotMeta) -> String {
    let (index, term) = meta.last_log_id.map_or((0, 0), |id| (id.index, term_of(&id)));
    format!("{index:020}-{term:020}.{SUFFIX}")
}

/// Index that it covers.
fn covered(file: &SnapshotFile) -> u64 {
    file.meta().last_log_id.map_or(0, |id| id.index)
}

fn is_temporary(file: &SnapshotFile) -> bool {
    file.path().extension().is_some_and(|e| e == TEMPORARY)
}

fn remove_quietly(path: &Path) {
    if let Err(error) = durable::remove(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a file beside the snapshots stays until the next start");
    }
}

#[cfg(test)]
mod tests;
