//! Real files for the demo: what lies around on the machine, found by walking, never written.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// Larger files are left out: they would make the demo a test of one object.
pub const FILE_BYTES_MAX: u64 = 256 << 20;

/// One file to store.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Where it is; also its key.
    pub path: PathBuf,
    /// Its size when it was found.
    pub bytes: u64,
}

/// Takes files from `roots`, in order, until there are at least `objects` of them with at least `bytes` together.
pub fn collect(roots: &[PathBuf], objects: u64, bytes: u64) -> Result<Vec<SourceFile>> {
    let mut found = Vec::new();
    let mut found_bytes = 0u64;
    for root in roots {
        // An explicit stack: a directory tree's depth is not ours to trust.
        let mut pending = vec![root.clone()];
        while let Some(directory) = pending.pop() {
            let mut entries: Vec<PathBuf> = match fs::read_dir(&directory) {
                Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
                Err(_) => continue, // not ours to read, or gone meanwhile
            };
            entries.sort();
            for path in entries {
                if found.len() as u64 >= objects && found_bytes >= bytes {
                    return Ok(found);
                }
                let Ok(meta) = fs::symlink_metadata(&path) else { continue };
                if meta.is_dir() {
                    if !is_skipped(&path, roots) {
                        pending.push(path);
                    }
                } else if meta.is_file() && (1..=FILE_BYTES_MAX).contains(&meta.len()) && fs::File::open(&path).is_ok()
                {
                    found_bytes += meta.len();
                    found.push(SourceFile { path, bytes: meta.len() });
                }
            }
        }
    }
    if found.len() as u64 >= objects && found_bytes >= bytes {
        return Ok(found);
    }
    bail!(
        "found {} files with {found_bytes} bytes under {roots:?}, not {objects} with {bytes}; ask for less, or give more directories with --files",
        found.len()
    )
}

/// Directories that are walked later as roots of their own, or that change while the demo runs.
fn is_skipped(path: &Path, roots: &[PathBuf]) -> bool {
    roots.iter().any(|root| root == path) || path.ends_with(".git") || path.ends_with("incremental")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_when_there_is_enough_and_says_when_there_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("inner");
        fs::create_dir(&inner).unwrap();
        for i in 0..10 {
            fs::write(inner.join(format!("f{i}")), vec![1u8; 100]).unwrap();
        }
        fs::write(inner.join("empty"), b"").unwrap();
        std::os::unix::fs::symlink(inner.join("f1"), inner.join("link")).unwrap();
        let roots = [directory.path().to_owned()];
        assert_eq!(collect(&roots, 3, 450).unwrap().len(), 5);
        assert_eq!(collect(&roots, 10, 1).unwrap().len(), 10, "neither the empty file nor the link counts");
        assert!(collect(&roots, 11, 1).unwrap_err().to_string().contains("found 10 files"));
    }
}
