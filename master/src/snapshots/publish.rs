//! Publishes one image: takes it apart, and writes its files in an order in which only a whole snapshot counts.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::SystemTime;

use tidepool_proto::{ClusterId, History, NodeId};
use tidepool_raft::rt;
use tidepool_raft::snapshot::SnapshotFile;
use xxhash_rust::xxh3::xxh3_128;

use super::catalogue::{Candidate, Catalogue, Rejected};
use super::descriptor::{Ancestor, Descriptor, MemberLine};
use super::layout::{self, DESCRIPTOR, LATEST, MANIFEST, Place};
use super::pace::Pace;
use super::store::{NewFile, StoreError};
use crate::directory::RestoreError;
use crate::directory::image::parts::{self, PARTS, PartReader, Section, Survey};

/// An image on local disk.
pub trait ImageFile: Send + Sync {
    /// Some of its bytes.
    fn section(&self, section: Section) -> io::Result<Box<dyn Read + Send>>;
    /// Number of its bytes.
    fn bytes(&self) -> u64;
}

impl ImageFile for SnapshotFile {
    fn section(&self, section: Section) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(self.body_section(section.from, section.bytes)))
    }
    fn bytes(&self) -> u64 {
        self.body_length()
    }
}

/// Whose image it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Whose {
    /// Cluster.
    pub cluster: ClusterId,
    /// History.
    pub history: History,
    /// This master.
    pub node: NodeId,
    /// The quorum.
    pub members: Vec<MemberLine>,
    /// Histories before this one.
    pub ancestors: Vec<Ancestor>,
    /// Program, for people.
    pub build: String,
    /// Wall clock, for people.
    pub created: SystemTime,
}

/// What was published.
#[derive(Clone, PartialEq, Debug)]
pub struct Published {
    /// Where below the location.
    pub place: Place,
    /// Where, for people.
    pub location: String,
    /// Bytes of all parts.
    pub bytes: u64,
    /// Seconds that reading and checking the local image took.
    pub check_seconds: f64,
    /// Seconds that writing took; zero when it was there already.
    pub upload_seconds: f64,
}

/// Why nothing was published. The local image is as before.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The local image.
    #[error("the local image cannot be published: {0}")]
    Image(#[from] RestoreError),
    /// It covers nothing.
    #[error("the local image covers no log entry yet")]
    Empty,
    /// The place.
    #[error("cannot write to {0}")]
    Store(#[from] StoreError),
    /// What was written is not there.
    #[error("{location} was written but cannot be read: {why}")]
    NotReadable {
        /// Where.
        location: String,
        /// Why.
        why: Rejected,
    },
}

impl PublishError {
    /// One word for the reason, as the metric has it.
    pub fn reason(&self) -> &'static str {
        match self {
            PublishError::Image(_) => "image",
            PublishError::Empty => "empty",
            PublishError::Store(error) => error.reason(),
            PublishError::NotReadable { .. } => "unreadable",
        }
    }
}

/// Publishes an image, unless it is there already. Blocks; see [`super::Location::store`].
pub fn publish(
    catalogue: &Catalogue,
    image: &Arc<dyn ImageFile>,
    whose: &Whose,
    pace: &Pace,
) -> Result<Published, PublishError> {
    let began = rt::now();
    let whole = Section { from: 0, bytes: image.bytes() };
    let opened = image.section(whole).map_err(RestoreError::Io)?;
    let survey = parts::survey(&mut io::BufReader::new(pace.without_limit(opened)))?;
    let (index, term) = survey.manifest.applied.ok_or(PublishError::Empty)?;
    let check_seconds = rt::since(began).as_secs_f64();
    let place = Place { cluster: whose.cluster, node: whose.node, index, term };
    let directory = place.directory();
    let store = catalogue.store();
    let node_directory = layout::node_directory(place.cluster, place.node);
    store.remove_unfinished(&node_directory)?;
    let began = rt::now();
    let is_there = match catalogue.image(&Candidate { place }) {
        Ok(there) => there.manifest == survey.manifest,
        // It may be whole: to write over it could destroy the only good one.
        Err(Rejected::Unreadable(error)) => return Err(error.into()),
        Err(_) => false,
    };
    if !is_there {
        store.write_directory(&directory, &files(image, &survey, whose, place, pace))?;
    }
    let readable = catalogue.image(&Candidate { place });
    let there = readable.map_err(|why| PublishError::NotReadable { location: store.show(&directory), why })?;
    store.write(&format!("{node_directory}/{LATEST}"), format!("{}\n", place.name()).as_bytes())?;
    let upload_seconds = if is_there { 0.0 } else { rt::since(began).as_secs_f64() };
    Ok(Published { place, location: there.location(), bytes: there.bytes(), check_seconds, upload_seconds })
}

/// A part of the local image, compared with its manifest once more while it is written: disks lose bits between two readings.
struct Checked(PartReader<Box<dyn Read + Send>>);

impl Read for Checked {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => {
                io::Error::new(error.kind(), format!("the local image is not what it was when it was checked: {error}"))
            }
            _ => error,
        })
    }
}

/// The files of a snapshot, in order.
fn files<'a>(
    image: &'a Arc<dyn ImageFile>,
    survey: &'a Survey,
    whose: &Whose,
    place: Place,
    pace: &'a Pace,
) -> Vec<NewFile<'a>> {
    let manifest = survey.manifest.to_string();
    let descriptor = Descriptor {
        cluster: whose.cluster,
        history: whose.history,
        node: whose.node,
        index: place.index,
        term: place.term,
        feature_level: survey.manifest.feature_level,
        members: whose.members.clone(),
        ancestors: whose.ancestors.clone(),
        build: whose.build.clone(),
        created: whose.created,
        manifest_xxh3: xxh3_128(manifest.as_bytes()),
    };
    let mut files: Vec<NewFile<'a>> = Vec::new();
    for (number, name) in PARTS.into_iter().enumerate() {
        let section = survey.parts[number];
        let open = move || {
            let input = pace.limited(image.section(section)?);
            Ok(Box::new(Checked(PartReader::new(input, &survey.manifest, number))) as Box<dyn Read + Send>)
        };
        files.push(NewFile { name, bytes: section.bytes, open: Box::new(open) });
    }
    for (name, text) in [(MANIFEST, manifest), (DESCRIPTOR, descriptor.encode())] {
        let bytes = text.len() as u64;
        let open = move || Ok(pace.limited(Box::new(io::Cursor::new(text.clone().into_bytes()))));
        files.push(NewFile { name, bytes, open: Box::new(open) });
    }
    files
}
