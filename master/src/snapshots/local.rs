//! Snapshots in a directory. A snapshot is written into a directory beside its place, everything is synced, and it is
//! renamed into place, or exchanged with what is there.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::durable;
use super::store::{NAMES_MAX, NewFile, Store, StoreError};

/// What the name of a directory begins with while it is written.
const WRITING: &str = ".writing-";
/// What it ends with, besides, when it is what was there before.
const BEFORE: &str = ".before";
const BUFFER_BYTES: usize = 1 << 20;

/// A directory of snapshots.
#[derive(Debug)]
pub(super) struct LocalStore {
    root: PathBuf,
}

impl LocalStore {
    pub(super) fn new(root: PathBuf) -> LocalStore {
        LocalStore { root }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.root.join(key)
    }

    fn write_aside(&self, aside: &Path, files: &[NewFile<'_>]) -> Result<(), StoreError> {
        durable::create_directory(aside).map_err(|e| failed(aside, e))?;
        for file in files {
            let path = aside.join(file.name);
            let copy = || -> io::Result<u64> {
                let mut out = durable::create(&path)?;
                let copied = copy((file.open)()?, &mut out)?;
                durable::sync(&out, &path)?;
                Ok(copied)
            };
            let copied = copy().map_err(|e| failed(&path, e))?;
            if copied != file.bytes {
                let why = format!("{copied} bytes were written where {} were announced", file.bytes);
                return Err(failed(&path, io::Error::new(io::ErrorKind::InvalidData, why)));
            }
        }
        sync_directory(aside)
    }

    /// By renaming, where there is nothing yet and where two directories cannot be exchanged: what was there goes aside first,
    /// and comes back if the new one does not come.
    fn put_in_place(&self, aside: &Path, place: &Path, before: Option<&Path>) -> Result<(), StoreError> {
        if let Some(before) = before {
            self.remove_unfinished_one(before)?;
            durable::rename(place, before).map_err(|e| failed(place, e))?;
        }
        if let Err(error) = durable::rename(aside, place) {
            if let Some(before) = before {
                durable::rename(before, place).map_err(|e| failed(before, e))?;
            }
            return Err(failed(place, error));
        }
        Ok(())
    }

    /// Creates the directories above `path` and makes their names durable.
    fn create_parents(&self, path: &Path) -> Result<(), StoreError> {
        let Some(parent) = path.parent() else { return Ok(()) };
        let missing: Vec<&Path> = parent.ancestors().take_while(|dir| !dir.exists()).collect();
        durable::create_directory(parent).map_err(|e| failed(parent, e))?;
        for dir in missing {
            if let Some(above) = dir.parent() {
                sync_directory(above)?;
            }
        }
        Ok(())
    }
}

fn failed(path: &Path, source: io::Error) -> StoreError {
    StoreError::new(path.display().to_string(), source)
}

fn sync_directory(path: &Path) -> Result<(), StoreError> {
    durable::sync_names(path).map_err(|e| failed(path, e))
}

/// As `io::copy`, with a large buffer and no shortcut past the reader, which may slow it down or stop it.
fn copy(mut input: Box<dyn Read + Send>, out: &mut File) -> io::Result<u64> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut copied = 0;
    loop {
        let read = match input.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(read) => read,
            Err(error) => return Err(error),
        };
        out.write_all(&buffer[..read])?;
        copied += read as u64;
    }
}

fn remove_if_there(path: &Path) -> Result<(), StoreError> {
    match durable::remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(path, error)),
        _ => Ok(()),
    }
}

impl Store for LocalStore {
    fn list(&self, directory: &str) -> Result<Vec<String>, StoreError> {
        let path = self.path(directory);
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            // A file where a directory would be is somebody else's.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(Vec::new());
            }
            Err(error) => return Err(failed(&path, error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|e| failed(&path, e))?;
            names.extend(entry.file_name().into_string());
            if names.len() > NAMES_MAX {
                return Err(failed(&path, io::Error::other(format!("it has more than {NAMES_MAX} names"))));
            }
        }
        names.sort();
        Ok(names)
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StoreError> {
        let path = self.path(key);
        match fs::metadata(&path) {
            Ok(meta) => Ok(meta.is_file().then_some(meta.len())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(&path, error)),
        }
    }

    fn read(&self, key: &str) -> Result<Box<dyn Read + Send>, StoreError> {
        let path = self.path(key);
        let file = File::open(&path).map_err(|e| failed(&path, e))?;
        Ok(Box::new(io::BufReader::with_capacity(BUFFER_BYTES, file)))
    }

    fn write_directory(&self, directory: &str, files: &[NewFile<'_>]) -> Result<(), StoreError> {
        let place = self.path(directory);
        let name = place.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent = place.parent().unwrap_or(&self.root);
        let aside = parent.join(format!("{WRITING}{name}"));
        self.create_parents(&place)?;
        let written = self.write_aside(&aside, files).and_then(|()| {
            let had_one = place.exists();
            let before = match had_one {
                true if durable::exchange(&aside, &place).map_err(|e| failed(&place, e))? => aside.clone(),
                _ => parent.join(format!("{WRITING}{name}{BEFORE}")),
            };
            if before != aside {
                self.put_in_place(&aside, &place, had_one.then_some(&*before))?;
            }
            sync_directory(parent)?;
            if had_one { self.remove_unfinished_one(&before) } else { Ok(()) }
        });
        if written.is_err() {
            // What cannot be removed now is removed by the next run.
            let _ = self.remove_unfinished_one(&aside);
        }
        written
    }

    fn write(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.path(key);
        self.create_parents(&path)?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let aside = path.with_file_name(format!("{WRITING}{name}"));
        let run = || -> io::Result<()> {
            let mut file = durable::create(&aside)?;
            file.write_all(bytes)?;
            durable::sync(&file, &aside)?;
            durable::rename(&aside, &path)
        };
        if let Err(error) = run() {
            let _ = fs::remove_file(&aside);
            return Err(failed(&path, error));
        }
        path.parent().map_or(Ok(()), sync_directory)
    }

    fn remove(&self, directory: &str, names: &[&str]) -> Result<(), StoreError> {
        let path = self.path(directory);
        if !path.is_dir() {
            return Ok(());
        }
        if let Some((first, rest)) = names.split_first() {
            remove_if_there(&path.join(first))?;
            // What makes it whole is gone for good before anything else goes.
            sync_directory(&path)?;
            for name in rest {
                remove_if_there(&path.join(name))?;
            }
        }
        match fs::remove_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&path, error)),
            _ => path.parent().map_or(Ok(()), sync_directory),
        }
    }

    fn remove_unfinished(&self, parent: &str) -> Result<(), StoreError> {
        for name in self.list(parent)? {
            if name.starts_with(WRITING) {
                self.remove_unfinished_one(&self.path(parent).join(name))?;
            }
        }
        Ok(())
    }

    fn show(&self, key: &str) -> String {
        self.path(key).display().to_string()
    }
}

impl LocalStore {
    fn remove_unfinished_one(&self, path: &Path) -> Result<(), StoreError> {
        let removed = if path.is_dir() { durable::remove_directory(path) } else { durable::remove(path) };
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(path, error)),
            _ => Ok(()),
        }
    }
}
