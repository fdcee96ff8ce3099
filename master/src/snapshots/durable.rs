//! The steps after which files and their names outlive a power cut. Nobody can see from outside what a file system has not
//! written out yet, so under test each step is noted down, and their order is looked at.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Creates a file. Neither its bytes nor its name are durable yet.
pub(super) fn create(path: &Path) -> io::Result<File> {
    let file = File::create(path)?;
    #[cfg(test)]
    steps::note(steps::Step::Created(path.to_owned()));
    Ok(file)
}

/// Creates a directory and those above it that are missing.
pub(super) fn create_directory(path: &Path) -> io::Result<()> {
    #[cfg(test)]
    for missing in path.ancestors().take_while(|dir| !dir.exists()) {
        steps::note(steps::Step::Created(missing.to_owned()));
        steps::note(steps::Step::Synced(missing.to_owned()));
    }
    fs::create_dir_all(path)
}

/// Makes a file's bytes durable; its name is another matter.
pub(super) fn sync(file: &File, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    #[cfg(test)]
    steps::note(steps::Step::Synced(path.to_owned()));
    #[cfg(not(test))]
    let _ = path;
    Ok(())
}

/// Makes the names in a directory durable.
pub(super) fn sync_names(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()?;
    #[cfg(test)]
    steps::note(steps::Step::SyncedNames(dir.to_owned()));
    Ok(())
}

/// Gives a file or directory another name; which of them a power cut leaves is open until the names are synced.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    #[cfg(test)]
    steps::note(steps::Step::Renamed(from.to_owned(), to.to_owned()));
    Ok(())
}

/// Exchanges two directories in one step, so that there is a whole one at every moment; false where the file system cannot.
pub(super) fn exchange(one: &Path, other: &Path) -> io::Result<bool> {
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Ok(()) => {}
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    #[cfg(test)]
    steps::note(steps::Step::Renamed(one.to_owned(), other.to_owned()));
    Ok(true)
}

/// Removes a file.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    fs::remove_file(path)?;
    #[cfg(test)]
    steps::note(steps::Step::Removed(path.to_owned()));
    Ok(())
}

/// Removes a directory with all that is in it.
pub(super) fn remove_directory(path: &Path) -> io::Result<()> {
    fs::remove_dir_all(path)?;
    #[cfg(test)]
    steps::note(steps::Step::Removed(path.to_owned()));
    Ok(())
}

/// What was done, in order, by the thread that asks.
#[cfg(test)]
pub(super) mod steps {
    use std::cell::RefCell;
    use std::path::PathBuf;

    #[derive(Clone, PartialEq, Eq, Debug)]
    pub enum Step {
        Created(PathBuf),
        Synced(PathBuf),
        SyncedNames(PathBuf),
        Renamed(PathBuf, PathBuf),
        Removed(PathBuf),
    }

    thread_local! {
        static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
    }

    pub fn note(step: Step) {
        STEPS.with_borrow_mut(|steps| steps.push(step));
    }

    /// Those since the last time.
    pub fn take() -> Vec<Step> {
        STEPS.take()
    }
}
