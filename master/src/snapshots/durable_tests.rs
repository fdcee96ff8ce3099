//! In which order files, directories and their names become durable when a snapshot is published into a directory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::durable::steps::{self, Step};
use super::layout::{FILES, LATEST};
use super::tests::{Images, unlimited, whose};
use super::*;

fn parent(path: &Path) -> PathBuf {
    path.parent().unwrap().to_owned()
}

/// Goes through what was done as a power cut sees it: what is not synced may be lost, and what is done later may be there without it.
fn expect_an_order_that_outlives_a_power_cut(steps: &[Step]) {
    let (mut unsynced, mut unsynced_names) = (BTreeSet::<PathBuf>::new(), BTreeSet::<PathBuf>::new());
    for (at, step) in steps.iter().enumerate() {
        match step {
            Step::Created(path) => {
                let is_hint = path.file_name().unwrap().to_string_lossy().ends_with(LATEST);
                assert!(!is_hint || unsynced_names.is_empty(), "step {at}: it names what may be lost: {steps:#?}");
                unsynced.insert(path.clone());
                unsynced_names.insert(parent(path));
            }
            Step::Synced(path) => drop(unsynced.remove(path)),
            Step::SyncedNames(directory) => drop(unsynced_names.remove(directory)),
            Step::Renamed(from, to) => {
                let open = unsynced.iter().chain(&unsynced_names).find(|path| path.starts_with(from));
                assert_eq!(open, None, "step {at}: {to:?} may come without it: {steps:#?}");
                unsynced_names.extend([parent(from), parent(to)]);
            }
            Step::Removed(path) => {
                assert!(!unsynced_names.contains(&parent(path)), "step {at}: what follows may be lost: {steps:#?}");
            }
        }
    }
    assert!(unsynced.is_empty() && unsynced_names.is_empty(), "{unsynced:?}, {unsynced_names:?}, {steps:#?}");
}

/// The first one, below directories that are new; the next; and one in the place of another that was damaged.
/// Fails without any one of the syncs: of a file, of the new directory's names, of those of the directory that it is renamed into, of those
/// above new directories, of the hint and of its name (each tried).
#[test]
fn files_directories_and_names_become_durable_in_this_order() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("deep/er");
    let catalogue = Catalogue::open(&Location::Directory(root.clone())).unwrap();
    let mut images = Images::new();
    steps::take();
    for is_replaced in [false, false, true] {
        let image = images.next();
        let published = publish(&catalogue, &image, &whose(), &unlimited()).unwrap();
        if is_replaced {
            steps::take();
            std::fs::write(root.join(published.place.directory()).join(FILES[0]), b"other bytes").unwrap();
            publish(&catalogue, &image, &whose(), &unlimited()).unwrap();
        }
        let steps = steps::take();
        let removed = steps.iter().filter(|step| matches!(step, Step::Removed(_))).count();
        assert_eq!((removed, steps.len() > 2 * FILES.len()), (usize::from(is_replaced), true), "{steps:#?}");
        expect_an_order_that_outlives_a_power_cut(&steps);
    }
}
