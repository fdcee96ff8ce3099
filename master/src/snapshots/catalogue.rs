//! What lies at a location: which snapshots, which of them are whole, and their bytes.
//!
//! The names in the listing are candidates only. One counts when its descriptor and its manifest fit each other, the place
//! and the lengths of the parts; the bytes are compared with the manifest when they are read. `latest.txt` is a hint for
//! people: the listing decides.

use std::io::{self, Read};
use std::sync::Arc;

use tidepool_proto::{ClusterId, History, NodeId};
use xxhash_rust::xxh3::xxh3_128;

use super::descriptor::{Descriptor, DescriptorError};
use super::layout::{self, DESCRIPTOR, FILES, MANIFEST, Place};
use super::location::Location;
use super::store::{self, Store, StoreError};
use crate::directory::image::parts::{self, PARTS, PartReader};
use crate::directory::{Directory, FEATURE_LEVEL, FORMAT_VERSION, Manifest};

/// Bytes that a descriptor or a manifest may have.
const TEXT_BYTES_MAX: u64 = 1 << 20;

/// Snapshots at a location. Calls block; see [`Location::store`].
#[derive(Clone, Debug)]
pub struct Catalogue {
    store: Arc<dyn Store>,
    only: Option<ClusterId>,
}

/// A directory that is named as a snapshot is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Where, and of what.
    pub place: Place,
}

/// A candidate that was passed over.
#[derive(Debug)]
pub struct Skipped {
    /// Which.
    pub candidate: Candidate,
    /// Why.
    pub why: Rejected,
}

/// Why a candidate is no snapshot to restore from.
#[derive(Debug, thiserror::Error)]
pub enum Rejected {
    /// A file is not there: it was never completed, or is being removed.
    #[error("{0} is missing; it was never completed, or is being removed")]
    Incomplete(&'static str),
    /// A file is not as it was written.
    #[error("{file}: {why}")]
    Damaged {
        /// Which.
        file: &'static str,
        /// What is wrong.
        why: String,
    },
    /// A file is of another snapshot, or of another cluster.
    #[error("{file} is of {of}; files were mixed up")]
    Foreign {
        /// Which.
        file: &'static str,
        /// Where it belongs.
        of: String,
    },
    /// A newer binary wrote it.
    #[error("{0}")]
    Version(String),
    /// The place could not be read.
    #[error(transparent)]
    Unreadable(#[from] StoreError),
}

impl Rejected {
    /// One word for it, to count by.
    pub fn reason(&self) -> &'static str {
        match self {
            Rejected::Incomplete(_) => "incomplete",
            Rejected::Damaged { .. } => "damaged",
            Rejected::Foreign { .. } => "foreign",
            Rejected::Version(_) => "version",
            Rejected::Unreadable(error) => error.reason(),
        }
    }
}

impl Catalogue {
    /// Of a location, or of one cluster's directory there.
    pub fn open(location: &Location) -> Result<Catalogue, StoreError> {
        let (location, only) = location.split_cluster();
        Ok(Catalogue { store: location.store()?, only })
    }

    #[cfg(test)]
    pub(super) fn of(store: Arc<dyn Store>) -> Catalogue {
        Catalogue { store, only: None }
    }

    /// What is read from.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Everything that is named as a snapshot is: by cluster, the newest of each first. Other names are not ours.
    pub fn candidates(&self) -> Result<Vec<Candidate>, StoreError> {
        let clusters: Vec<ClusterId> = match self.only {
            Some(cluster) => vec![cluster],
            None => self.store.list("")?.iter().filter_map(|name| layout::parse_cluster(name)).collect(),
        };
        let mut found = Vec::new();
        for cluster in clusters {
            for node in self.store.list(&layout::cluster_directory(cluster))? {
                if let Some(node) = layout::parse_node(&node) {
                    found.extend(self.candidates_of(cluster, node)?);
                }
            }
        }
        found.sort_by_key(|Candidate { place }| {
            (place.cluster, std::cmp::Reverse((place.index, place.term)), place.node)
        });
        Ok(found)
    }

    /// Those of one node, the newest first.
    pub fn candidates_of(&self, cluster: ClusterId, node: NodeId) -> Result<Vec<Candidate>, StoreError> {
        let names = self.store.list(&layout::node_directory(cluster, node))?;
        let mut places: Vec<Place> = names.iter().filter_map(|name| Place::parse(cluster, node, name)).collect();
        places.sort_by_key(|place| std::cmp::Reverse((place.index, place.term)));
        Ok(places.into_iter().map(|place| Candidate { place }).collect())
    }

    /// Checks a candidate but for the bytes of its parts, which [`PublishedImage::reader`] checks.
    pub fn image(&self, candidate: &Candidate) -> Result<PublishedImage, Rejected> {
        let place = candidate.place;
        let directory = place.directory();
        let names = self.store.list(&directory)?;
        if let Some(missing) = FILES.iter().rev().find(|file| !names.iter().any(|name| name == *file)) {
            return Err(Rejected::Incomplete(missing));
        }
        let descriptor = self.descriptor(&directory)?;
        if descriptor.place() != place {
            return Err(Rejected::Foreign { file: DESCRIPTOR, of: descriptor.place().to_string() });
        }
        let manifest = self.manifest(&directory, &descriptor)?;
        for (number, file) in PARTS.into_iter().enumerate() {
            let found = self.store.length(&format!("{directory}/{file}"))?.ok_or(Rejected::Incomplete(file))?;
            let expected = parts::file_bytes(&manifest, number);
            if found != expected {
                return Err(Rejected::Damaged { file, why: format!("it has {found} bytes, not {expected}") });
            }
        }
        Ok(PublishedImage { store: self.store.clone(), directory, descriptor, manifest })
    }

    fn text(&self, directory: &str, file: &'static str) -> Result<String, Rejected> {
        match store::read_text(&*self.store, &format!("{directory}/{file}"), TEXT_BYTES_MAX) {
            Ok(Some(text)) => Ok(text),
            Ok(None) => Err(Rejected::Incomplete(file)),
            Err(error) if error.source.kind() == io::ErrorKind::InvalidData => {
                Err(Rejected::Damaged { file, why: error.source.to_string() })
            }
            Err(error) => Err(error.into()),
        }
    }

    fn descriptor(&self, directory: &str) -> Result<Descriptor, Rejected> {
        let text = self.text(directory, DESCRIPTOR)?;
        Descriptor::decode(&text).map_err(|error| match error {
            DescriptorError::Version(_) => Rejected::Version(error.to_string()),
            DescriptorError::Damaged(why) => Rejected::Damaged { file: DESCRIPTOR, why },
        })
    }

    fn manifest(&self, directory: &str, descriptor: &Descriptor) -> Result<Manifest, Rejected> {
        let text = self.text(directory, MANIFEST)?;
        let damaged = |why: String| Rejected::Damaged { file: MANIFEST, why };
        let is_described = xxh3_128(text.as_bytes()) == descriptor.manifest_xxh3;
        let manifest = match text.parse::<Manifest>() {
            Ok(manifest) => manifest,
            Err(why) if is_described => {
                return Err(Rejected::Version(format!("{MANIFEST}: {why}; use a newer binary")));
            }
            Err(why) => return Err(damaged(why)),
        };
        if manifest.applied != Some((descriptor.index, descriptor.term)) {
            let of =
                manifest.applied.map_or("nothing".to_owned(), |(index, term)| format!("entry {index} of term {term}"));
            return Err(Rejected::Foreign { file: MANIFEST, of });
        }
        if !is_described {
            return Err(damaged("its checksum is not the one in the descriptor".to_owned()));
        }
        if manifest.format > FORMAT_VERSION || manifest.feature_level > FEATURE_LEVEL {
            return Err(Rejected::Version(format!(
                "it has format {} and feature level {}, this binary reads {FORMAT_VERSION} and {FEATURE_LEVEL}; use a newer binary",
                manifest.format, manifest.feature_level
            )));
        }
        Ok(manifest)
    }

    /// The newest snapshot that opens, and what was passed over before it was found. `accept` may reject one for reasons of
    /// its own, such as what its bytes are.
    pub fn newest<T>(
        &self,
        mut accept: impl FnMut(PublishedImage) -> Result<T, Rejected>,
    ) -> Result<(Option<T>, Vec<Skipped>), StoreError> {
        let mut skipped = Vec::new();
        for candidate in self.candidates()? {
            match self.image(&candidate).and_then(&mut accept) {
                Ok(found) => return Ok((Some(found), skipped)),
                Err(why) => skipped.push(Skipped { candidate, why }),
            }
        }
        Ok((None, skipped))
    }
}

/// A snapshot whose descriptor and manifest were checked.
#[derive(Clone, Debug)]
pub struct PublishedImage {
    store: Arc<dyn Store>,
    directory: String,
    /// Whose state it is.
    pub descriptor: Descriptor,
    /// What its parts are.
    pub manifest: Manifest,
}

impl PublishedImage {
    /// The image, byte for byte as the master wrote it. A part that is not as the manifest says is an error of the kind
    /// `InvalidData` before the bytes after it are given out.
    pub fn reader(&self) -> Result<impl Read + Send + use<>, Rejected> {
        let segments = self.part(0)?;
        let metadata = self.part(1)?;
        let tasks = self.part(2)?;
        Ok(io::Cursor::new(parts::head(&self.manifest))
            .chain(segments)
            .chain(metadata)
            .chain(tasks)
            .chain(io::Cursor::new(parts::manifest_frame(&self.manifest))))
    }

    fn part(&self, number: usize) -> Result<PartReader<Box<dyn Read + Send>>, Rejected> {
        let file = self.store.read(&format!("{}/{}", self.directory, PARTS[number]))?;
        Ok(PartReader::new(file, &self.manifest, number))
    }

    /// Reads one of [`PARTS`] through and compares it with the manifest.
    pub fn verify_part(&self, number: usize) -> Result<(), Rejected> {
        let mut part = self.part(number)?;
        io::copy(&mut part, &mut io::sink()).map(drop).map_err(|error| self.rejected(PARTS[number], error))
    }

    /// Reads everything into a directory, whose digest must come out as it was written.
    pub fn load(&self) -> Result<Directory, Rejected> {
        let directory = Directory::new(History(0));
        let loaded = directory.restore(&mut self.reader()?);
        match loaded {
            Ok(_) => Ok(directory),
            Err(crate::directory::RestoreError::Io(error)) => Err(self.rejected("image", error)),
            Err(crate::directory::RestoreError::Version(why)) => Err(Rejected::Version(why)),
            Err(error) => Err(Rejected::Damaged { file: "image", why: error.to_string() }),
        }
    }

    fn rejected(&self, file: &'static str, error: io::Error) -> Rejected {
        match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                Rejected::Damaged { file, why: error.to_string() }
            }
            _ => Rejected::Unreadable(StoreError::new(self.store.show(&self.directory), error)),
        }
    }

    /// Where it lies, for people.
    pub fn location(&self) -> String {
        self.store.show(&self.directory)
    }

    /// Bytes of its parts.
    pub fn bytes(&self) -> u64 {
        (0..PARTS.len()).map(|number| parts::file_bytes(&self.manifest, number)).sum()
    }
}
