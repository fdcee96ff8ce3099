//! Snapshots in a directory: what is published is read back byte for byte, whatever is damaged is passed over by name, and
//! nothing that is not ours is touched.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidepool_proto::{ClusterId, History, NodeId};

use super::layout::FILES;
use super::store::{NewFile, Store};
use super::*;
use crate::directory::image::parts::Section;
use crate::directory::tests::replay::{busy, bytes_of};
use crate::directory::tests::world::World;

const CLUSTER: ClusterId = ClusterId(*b"0123456789abcdef");
const NODE: NodeId = NodeId(2);

pub(super) struct Bytes(pub(super) Vec<u8>);

impl ImageFile for Bytes {
    fn section(&self, section: Section) -> io::Result<Box<dyn Read + Send>> {
        let bytes = &self.0[section.from as usize..][..section.bytes as usize];
        Ok(Box::new(io::Cursor::new(bytes.to_vec())))
    }
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

pub(super) fn whose() -> Whose {
    Whose {
        cluster: CLUSTER,
        history: History(7),
        node: NODE,
        members: vec![MemberLine { node: NodeId(1), address: "10.0.0.1:50051".into() }],
        ancestors: Vec::new(),
        build: "tidepool 0.0.0".into(),
        created: std::time::SystemTime::UNIX_EPOCH,
    }
}

pub(super) fn unlimited() -> Pace {
    Pace::new(0, Instant::now() + Duration::from_secs(3_600), Arc::default())
}

/// Images of a state at growing log indexes.
pub(super) struct Images(World);

impl Images {
    pub(super) fn new() -> Images {
        Images(busy())
    }
    pub(super) fn next(&mut self) -> Arc<dyn ImageFile> {
        self.0.tenant(&format!("t{}", self.0.directory.applied().unwrap().0), Default::default());
        Arc::new(Bytes(self.bytes()))
    }
    pub(super) fn bytes(&self) -> Vec<u8> {
        bytes_of(self.0.directory.freeze())
    }
}

struct Fixture {
    dir: tempfile::TempDir,
    catalogue: Catalogue,
    images: Images,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::open(&Location::Directory(dir.path().join("deep/er"))).unwrap();
        Fixture { dir, catalogue, images: Images::new() }
    }
    fn publish(&mut self) -> Published {
        let image = self.images.next();
        publish(&self.catalogue, &image, &whose(), &unlimited()).unwrap()
    }
    fn path(&self, published: &Published) -> PathBuf {
        self.dir.path().join("deep/er").join(published.place.directory())
    }
    /// Place of the newest snapshot that is read through, and what was passed over.
    fn newest(&self) -> (Option<Place>, Vec<&'static str>) {
        let loaded = |image: PublishedImage| image.load().map(|_| image.descriptor.place());
        let (found, skipped) = self.catalogue.newest(loaded).unwrap();
        (found, skipped.iter().map(|skipped| skipped.why.reason()).collect())
    }
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_published_is_read_back_byte_for_byte() {
    let mut place = Fixture::new();
    let published = place.publish();
    let image = place.catalogue.image(&place.catalogue.candidates().unwrap()[0]).unwrap();
    let mut bytes = Vec::new();
    image.reader().unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, place.images.bytes());
    assert_eq!(image.load().unwrap().digest(), place.images.0.directory.digest());
    assert_eq!(image.descriptor.history, History(7));
    let parent = place.path(&published).parent().unwrap().to_owned();
    assert_eq!(fs::read_to_string(parent.join("latest.txt")).unwrap(), published.place.name() + "\n");
    assert_eq!(names(&parent), [published.place.name(), "latest.txt".to_owned()]);
    // Again: nothing to write.
    let again: Arc<dyn ImageFile> = Arc::new(Bytes(bytes));
    assert_eq!(publish(&place.catalogue, &again, &whose(), &unlimited()).unwrap().upload_seconds, 0.0);
}

#[test]
fn an_empty_directory_is_published_too() {
    let world = World::with_nodes(0, 0).0;
    let dir = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::open(&Location::Directory(dir.path().to_owned())).unwrap();
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(bytes_of(world.directory.freeze())));
    publish(&catalogue, &image, &whose(), &unlimited()).unwrap();
    let image = catalogue.image(&catalogue.candidates().unwrap()[0]).unwrap();
    assert_eq!(image.load().unwrap().digest(), world.directory.digest());
}

/// Every byte of every file, in turn: the older snapshot is chosen and the newer one named, never half of it.
#[test]
fn any_damage_falls_back_to_the_older_snapshot() {
    let mut place = Fixture::new();
    let older = place.publish();
    let newer = place.publish();
    for file in FILES {
        let path = place.path(&newer).join(file);
        let whole = fs::read(&path).unwrap();
        let stride = (whole.len() / 40).max(1);
        let flipped = (0..whole.len()).step_by(stride).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            bytes
        });
        let cut = (0..whole.len()).step_by(stride).map(|at| whole[..at].to_vec());
        for bytes in flipped.chain(cut).chain([[&whole[..], b"x"].concat()]).collect::<Vec<_>>() {
            fs::write(&path, bytes).unwrap();
            let (found, why) = place.newest();
            assert_eq!(found, Some(older.place), "{file}");
            assert!(matches!(why[..], ["damaged" | "foreign" | "version"]), "{file}: {why:?}");
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(place.newest(), (Some(older.place), vec!["incomplete"]), "{file}");
        // The same file of another snapshot.
        fs::copy(place.path(&older).join(file), &path).unwrap();
        let (found, why) = place.newest();
        if fs::read(&path).unwrap() != whole {
            assert_eq!(found, Some(older.place), "{file}");
            assert_eq!(why.len(), 1, "{file}");
        }
        fs::write(&path, whole).unwrap();
        assert_eq!(place.newest(), (Some(newer.place), vec![]));
    }
}

/// Tried without the comparison of the descriptor with its place: fails.
#[test]
fn a_snapshot_in_another_clusters_or_nodes_place_is_refused() {
    let mut place = Fixture::new();
    let published = place.publish();
    let from = place.path(&published);
    for to in [
        Place { node: NodeId(3), ..published.place },
        Place { cluster: ClusterId([9; 16]), ..published.place },
        Place { index: 99_999, ..published.place },
    ] {
        let to = place.dir.path().join("deep/er").join(to.directory());
        fs::create_dir_all(&to).unwrap();
        for file in FILES {
            fs::copy(from.join(file), to.join(file)).unwrap();
        }
    }
    let (found, why) = place.newest();
    assert_eq!(found, Some(published.place));
    // The other cluster's comes first; that of the other node, with the same index, comes after the one that is chosen.
    assert_eq!(why, ["foreign", "foreign"]);
    assert_eq!(place.catalogue.candidates().unwrap().len(), 4);
}

/// Parts and manifest fit each other, their index is that of the descriptor, and they are of another state. Fails
/// when the manifest is not compared with the descriptor's hash of it (tried).
#[test]
fn parts_and_manifest_of_another_state_of_the_same_index_are_refused() {
    let published = |name: &str| {
        let mut place = Fixture::new();
        place.images.0.tenant(name, Default::default());
        let image: Arc<dyn ImageFile> = Arc::new(Bytes(place.images.bytes()));
        let published = publish(&place.catalogue, &image, &whose(), &unlimited()).unwrap();
        (place, published)
    };
    let ((one, at), (other, also)) = (published("one"), published("two"));
    assert_eq!(at.place, also.place);
    for file in FILES.into_iter().filter(|file| *file != super::layout::DESCRIPTOR) {
        fs::copy(other.path(&also).join(file), one.path(&at).join(file)).unwrap();
    }
    assert_eq!(one.newest(), (None, vec!["damaged"]));
    assert_eq!(other.newest(), (Some(also.place), vec![]));
}

#[test]
fn files_with_the_names_of_directories_are_passed_over() {
    let mut place = Fixture::new();
    let published = place.publish();
    let node = place.path(&published).parent().unwrap().to_owned();
    let cluster = node.parent().unwrap();
    let named = |index| node.join(Place { index, ..published.place }.name());
    let names = [cluster.with_file_name("f".repeat(32)), cluster.join("node-9"), named(9_999), named(0)];
    for path in &names {
        fs::write(path, b"mine").unwrap();
    }
    assert_eq!(place.newest(), (Some(published.place), vec!["incomplete"]));
    assert_eq!(prune(&place.catalogue, CLUSTER, NODE, 2).unwrap(), Removed::default());
    assert!(names.iter().all(|path| path.exists()));
}

#[test]
fn a_newer_layout_or_format_is_refused_by_name() {
    let mut place = Fixture::new();
    let published = place.publish();
    let path = place.path(&published).join("descriptor.txt");
    let text = fs::read_to_string(&path).unwrap().replace("tidepool-snapshot 1", "tidepool-snapshot 2");
    fs::write(&path, text).unwrap();
    assert_eq!(place.newest(), (None, vec!["version"]));
}

/// Tried without looking for files that are not a snapshot's: fails.
#[test]
fn retention_keeps_the_newest_whole_ones_and_touches_nothing_else() {
    let mut place = Fixture::new();
    let published: Vec<Published> = (0..5).map(|_| place.publish()).collect();
    let node = place.path(&published[0]).parent().unwrap().to_owned();
    // Damaged: counts for nothing and stays. Unfinished: goes once a newer whole one is there.
    fs::write(place.path(&published[4]).join("metadata"), b"x").unwrap();
    fs::remove_file(place.path(&published[1]).join("descriptor.txt")).unwrap();
    // Not ours, in every place.
    let foreign = [
        "notes.txt",
        "00000000000000000000-00000000000000000001.old",
        "00000000000000000000-00000000000000000002/x",
        "1/y",
    ];
    for name in foreign {
        let path = node.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"mine").unwrap();
    }
    let other = node.parent().unwrap().join("node-3/00000000000000000000-00000000000000000001/segments");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::write(&other, b"theirs").unwrap();
    fs::create_dir_all(node.join(".writing-00000000000000000000-00000000000000000001")).unwrap();

    let removed = prune(&place.catalogue, CLUSTER, NODE, 0).unwrap();
    assert_eq!(removed, Removed { surplus: vec![published[0].place], unfinished: vec![published[1].place] });
    for kept in [2, 3, 4] {
        assert!(place.path(&published[kept]).join("descriptor.txt").exists(), "{kept}");
    }
    for name in foreign {
        assert_eq!(fs::read(node.join(name)).unwrap(), b"mine", "{name}");
    }
    assert!(other.exists());
    place.publish();
    assert!(!names(&node).iter().any(|name| name.starts_with('.')));
    assert_eq!(prune(&place.catalogue, CLUSTER, NODE, 2).unwrap().surplus, [published[2].place]);
    assert_eq!(prune(&place.catalogue, CLUSTER, NODE, 2).unwrap(), Removed::default());
}

/// Ends after so many bytes, as a disk that is full or a master that stops does.
struct EndsAfter(Vec<u8>, std::sync::atomic::AtomicUsize);

impl ImageFile for EndsAfter {
    fn section(&self, section: Section) -> io::Result<Box<dyn Read + Send>> {
        let bytes = &self.0[section.from as usize..][..section.bytes as usize];
        let left = self.1.load(Ordering::Relaxed);
        self.1.store(left.saturating_sub(bytes.len()), Ordering::Relaxed);
        if left < bytes.len() {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "full"));
        }
        Ok(Box::new(io::Cursor::new(bytes.to_vec())))
    }
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Tried with a pace that never stops: fails.
#[test]
fn an_interrupted_publication_leaves_the_last_one_and_is_repeated() {
    let mut place = Fixture::new();
    let older = place.publish();
    place.images.next();
    let bytes = place.images.bytes();
    // Read once to be checked, then the parts, which are most of it.
    for more in (0..8).map(|tenth| bytes.len() * tenth / 10) {
        let image: Arc<dyn ImageFile> = Arc::new(EndsAfter(bytes.clone(), (bytes.len() + more).into()));
        match publish(&place.catalogue, &image, &whose(), &unlimited()) {
            Err(error) => assert_eq!(error.reason(), "full"),
            Ok(_) => panic!("it was cut short"),
        }
        assert_eq!(place.newest(), (Some(older.place), vec![]));
    }
    let stop = Arc::new(AtomicBool::new(true));
    let stopped = Pace::new(0, Instant::now() + Duration::from_secs(60), stop.clone());
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(bytes));
    assert!(publish(&place.catalogue, &image, &whose(), &stopped).is_err());
    let late = Pace::new(0, Instant::now(), Arc::default());
    assert!(publish(&place.catalogue, &image, &whose(), &late).is_err());
    stop.store(false, Ordering::Relaxed);
    publish(&place.catalogue, &image, &whose(), &stopped).unwrap();
    assert_ne!(place.newest().0, Some(older.place));
}

#[test]
fn a_damaged_local_image_is_not_published() {
    let mut place = Fixture::new();
    let older = place.publish();
    place.images.next();
    let mut bytes = place.images.bytes();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(bytes));
    let error = publish(&place.catalogue, &image, &whose(), &unlimited()).unwrap_err();
    assert_eq!(error.reason(), "image");
    assert_eq!(place.newest(), (Some(older.place), vec![]));
}

/// Loses a bit after it was read once.
struct Decays {
    bytes: Vec<u8>,
    flips: usize,
    was_read: AtomicBool,
}

impl ImageFile for Decays {
    fn section(&self, section: Section) -> io::Result<Box<dyn Read + Send>> {
        let mut bytes = self.bytes.clone();
        if self.was_read.swap(true, Ordering::Relaxed) {
            bytes[self.flips] ^= 4;
        }
        Ok(Box::new(io::Cursor::new(bytes[section.from as usize..][..section.bytes as usize].to_vec())))
    }
    fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }
}

/// Tried without the comparison while it is written: fails, what lies there has the right lengths and wrong bytes.
#[test]
fn an_image_that_decays_after_it_was_checked_is_not_published() {
    let mut place = Fixture::new();
    let older = place.publish();
    place.images.next();
    let bytes = place.images.bytes();
    let survey = crate::directory::image::parts::survey(&mut &bytes[..]).unwrap();
    for part in survey.parts {
        for at in [0, part.bytes / 2, part.bytes - 1] {
            let flips = (part.from + at) as usize;
            let image: Arc<dyn ImageFile> =
                Arc::new(Decays { bytes: bytes.clone(), flips, was_read: AtomicBool::new(false) });
            let error = publish(&place.catalogue, &image, &whose(), &unlimited()).unwrap_err();
            assert_eq!(error.reason(), "damaged", "{error}");
            assert!(error.to_string().contains("when it was checked"), "{error}");
            assert_eq!(place.newest(), (Some(older.place), vec![]));
        }
    }
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(bytes));
    publish(&place.catalogue, &image, &whose(), &unlimited()).unwrap();
    assert_ne!(place.newest().0, Some(older.place));
}

/// Somebody who reads it meanwhile finds it there at every moment. Tried with two renames: fails.
#[test]
fn a_snapshot_is_replaced_in_one_step() {
    let mut place = Fixture::new();
    let published = place.publish();
    let path = place.path(&published);
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(place.images.bytes()));
    let is_over = Arc::new(AtomicBool::new(false));
    let (own, watched) = (is_over.clone(), path.clone());
    let watcher = std::thread::spawn(move || {
        let (mut looks, mut missing) = (0_u64, 0);
        while !own.load(Ordering::Relaxed) {
            looks += 1;
            missing += u64::from(!watched.is_dir());
        }
        (looks, missing)
    });
    for _ in 0..100 {
        fs::write(path.join(FILES[0]), b"other bytes").unwrap();
        publish(&place.catalogue, &image, &whose(), &unlimited()).unwrap();
    }
    is_over.store(true, Ordering::Relaxed);
    let (looks, missing) = watcher.join().unwrap();
    assert_eq!(missing, 0, "of {looks}");
    assert!(looks > 100, "nobody looked");
    assert_eq!(names(path.parent().unwrap()), [published.place.name(), "latest.txt".to_owned()]);
}

/// Does not answer for a while when it is asked what is there, as a busy object store does.
#[derive(Debug)]
struct Unsteady {
    store: Arc<dyn Store>,
    fails: Arc<AtomicBool>,
}

impl Unsteady {
    fn answer<T>(&self, key: &str, answer: impl FnOnce(&dyn Store) -> Result<T, StoreError>) -> Result<T, StoreError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(StoreError::new(key, io::ErrorKind::TimedOut.into()));
        }
        answer(&*self.store)
    }
}

impl Store for Unsteady {
    fn list(&self, directory: &str) -> Result<Vec<String>, StoreError> {
        self.answer(directory, |store| store.list(directory))
    }
    fn length(&self, key: &str) -> Result<Option<u64>, StoreError> {
        self.answer(key, |store| store.length(key))
    }
    fn read(&self, key: &str) -> Result<Box<dyn Read + Send>, StoreError> {
        self.store.read(key)
    }
    fn write_directory(&self, directory: &str, _: &[NewFile<'_>]) -> Result<(), StoreError> {
        panic!("{directory} is written again")
    }
    fn write(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.store.write(key, bytes)
    }
    fn remove(&self, directory: &str, names: &[&str]) -> Result<(), StoreError> {
        self.store.remove(directory, names)
    }
    fn remove_unfinished(&self, parent: &str) -> Result<(), StoreError> {
        self.store.remove_unfinished(parent)
    }
    fn show(&self, key: &str) -> String {
        self.store.show(key)
    }
}

/// What cannot be looked at may be whole, and is never written over.
#[test]
fn a_snapshot_that_cannot_be_looked_at_is_not_written_again() {
    let mut place = Fixture::new();
    let published = place.publish();
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(place.images.bytes()));
    let fails = Arc::new(AtomicBool::new(true));
    let store = Unsteady { store: place.catalogue.store().clone(), fails: fails.clone() };
    let unsteady = Catalogue::of(Arc::new(store));
    assert_eq!(publish(&unsteady, &image, &whose(), &unlimited()).unwrap_err().reason(), "timeout");
    assert_eq!(place.newest(), (Some(published.place), vec![]));
    fails.store(false, Ordering::Relaxed);
    assert_eq!(publish(&unsteady, &image, &whose(), &unlimited()).unwrap().upload_seconds, 0.0);
}

/// A damaged one is replaced in its place, and what it was is gone.
#[test]
fn a_damaged_snapshot_is_published_again_in_its_place() {
    let mut place = Fixture::new();
    let published = place.publish();
    let path = place.path(&published);
    fs::write(path.join(FILES[0]), b"other bytes").unwrap();
    assert_eq!(place.newest().0, None);
    let image: Arc<dyn ImageFile> = Arc::new(Bytes(place.images.bytes()));
    publish(&place.catalogue, &image, &whose(), &unlimited()).unwrap();
    assert_eq!(place.newest(), (Some(published.place), vec![]));
    assert_eq!(names(path.parent().unwrap()), [published.place.name(), "latest.txt".to_owned()]);
}
