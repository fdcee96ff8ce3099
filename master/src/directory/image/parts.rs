//! The parts of an image as files of their own, as they are published: where each lies in the image, how a file is
//! checked, and what puts them together again byte for byte.
//!
//! A part's file holds the part's frames with their headers. Head and manifest frame follow from the manifest's text.

use std::io::{self, Read};

use xxhash_rust::xxh3::Xxh3;

use super::RestoreError;
use super::frame::{Frame, HEADER_BYTES, Kind, LEVEL_BYTES, MAGIC, cut_short, decode_level, encode_level};
use super::manifest::{Manifest, Part, PartSum};

/// Names of the parts, in the order of the image.
pub const PARTS: [&str; 3] = ["segments", "metadata", "task_manager"];
const CRC_BYTES: usize = 4;

/// A run of an image's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Section {
    /// First byte.
    pub from: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// What an image that was read through consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Survey {
    /// Its manifest.
    pub manifest: Manifest,
    /// Where each of [`PARTS`] lies, headers included.
    pub parts: [Section; 3],
}

/// Reads an image through; checks every frame, and every part against the manifest.
pub fn survey(input: &mut dyn Read) -> Result<Survey, RestoreError> {
    let (mut magic, mut level) = ([0; MAGIC.len()], [0; LEVEL_BYTES]);
    input.read_exact(&mut magic).map_err(cut_short)?;
    if &magic != MAGIC {
        return Err(RestoreError::Version("this is not an image of a directory, or not of this version".to_owned()));
    }
    input.read_exact(&mut level).map_err(cut_short)?;
    decode_level(&level)?;
    let mut at = (MAGIC.len() + LEVEL_BYTES) as u64;
    let mut sections = [Section { from: at, bytes: 0 }; 3];
    let mut sums = [Part::default(); 3];
    let mut metadata = PartSum::default();
    let manifest = loop {
        let frame = Frame::read(input)?;
        let number = match frame.header.kind {
            Kind::Segments => 0,
            Kind::Shard => 1,
            Kind::Tasks => 2,
            Kind::Manifest => break read_text(&frame)?,
        };
        if number == 1 {
            metadata.add(&frame.encoded_header());
            metadata.add(&frame.stored);
            metadata.rows(frame.header.rows.into());
        } else {
            sums[number] = frame.part();
        }
        let bytes = (HEADER_BYTES + frame.stored.len()) as u64;
        if sections[number].bytes == 0 {
            sections[number].from = at;
        } else if number != 1 || sections[number].from + sections[number].bytes != at {
            return Err(RestoreError::Damaged(format!("{} comes twice", frame.header.name())));
        }
        sections[number].bytes += bytes;
        at += bytes;
    };
    if sections[1].bytes == 0 {
        // No objects: an empty file between the other two.
        sections[1].from = sections[0].from + sections[0].bytes;
    }
    if input.read(&mut [0])? != 0 {
        return Err(RestoreError::Damaged("bytes follow its end".to_owned()));
    }
    sums[1] = metadata.part();
    for (at, name) in PARTS.iter().enumerate() {
        let written = part_of(&manifest, at);
        if sums[at] != written {
            return Err(RestoreError::Damaged(format!("{name} is not what the manifest says")));
        }
    }
    Ok(Survey { manifest, parts: sections })
}

fn read_text(frame: &Frame) -> Result<Manifest, RestoreError> {
    let text =
        std::str::from_utf8(&frame.stored).map_err(|_| RestoreError::Damaged("the manifest is no text".into()))?;
    text.parse().map_err(RestoreError::Damaged)
}

fn part_of(manifest: &Manifest, number: usize) -> Part {
    [manifest.segments, manifest.metadata, manifest.task_manager][number]
}

/// Whether a part is one frame, whose header the manifest's sum does not cover.
fn is_one_frame(number: usize) -> bool {
    number != 1
}

/// Length of a part's file.
pub fn file_bytes(manifest: &Manifest, number: usize) -> u64 {
    let header = if is_one_frame(number) { HEADER_BYTES as u64 } else { 0 };
    part_of(manifest, number).bytes.saturating_add(header)
}

/// The image's bytes before its first part.
pub fn head(manifest: &Manifest) -> Vec<u8> {
    [&MAGIC[..], &encode_level(manifest.format, manifest.feature_level)].concat()
}

/// The image's bytes after its last part.
pub fn manifest_frame(manifest: &Manifest) -> Vec<u8> {
    let mut bytes = Vec::new();
    let frame = Frame::plain(Kind::Manifest, 0, manifest.to_string().into_bytes());
    frame.write(&mut bytes).expect("a vector takes every byte");
    bytes
}

/// Reads a part's file and compares it with the manifest: a wrong byte, one too few or too many is an error at the end
/// (`InvalidData`), before the end is reported.
pub struct PartReader<R> {
    input: R,
    number: usize,
    expected: Part,
    left: u64,
    /// The header of a part that is one frame, as far as it was read.
    header: Vec<u8>,
    hasher: Xxh3,
    crc: u32,
    is_checked: bool,
}

impl<R: Read> PartReader<R> {
    /// Of the file of part `number`.
    pub fn new(input: R, manifest: &Manifest, number: usize) -> PartReader<R> {
        PartReader {
            input,
            number,
            expected: part_of(manifest, number),
            left: file_bytes(manifest, number),
            header: Vec::new(),
            hasher: Xxh3::new(),
            crc: 0,
            is_checked: false,
        }
    }

    fn sum(&mut self, mut bytes: &[u8]) {
        if is_one_frame(self.number) && self.header.len() < HEADER_BYTES {
            let (head, rest) = bytes.split_at(bytes.len().min(HEADER_BYTES - self.header.len()));
            self.header.extend_from_slice(head);
            bytes = rest;
            if self.header.len() < HEADER_BYTES {
                return;
            }
            self.crc = crc32c::crc32c(&self.header[..HEADER_BYTES - CRC_BYTES]);
        }
        self.hasher.update(bytes);
        if is_one_frame(self.number) {
            self.crc = crc32c::crc32c_append(self.crc, bytes);
        }
    }

    fn check(&mut self) -> io::Result<()> {
        let name = PARTS[self.number];
        let wrong = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, format!("{name}: {why}")));
        if self.left > 0 {
            return wrong(format!("it is {} bytes short", self.left));
        }
        if self.input.read(&mut [0])? != 0 {
            return wrong("it is longer than the manifest says".to_owned());
        }
        if self.hasher.digest128() != self.expected.xxh3 {
            return wrong("its checksum is wrong".to_owned());
        }
        if is_one_frame(self.number) && self.header[HEADER_BYTES - CRC_BYTES..] != self.crc.to_le_bytes() {
            return wrong("the checksum of its frame is wrong".to_owned());
        }
        self.is_checked = true;
        Ok(())
    }
}

impl<R: Read> Read for PartReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() || self.is_checked {
            return Ok(0);
        }
        let wanted = out.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = if wanted == 0 { 0 } else { self.input.read(&mut out[..wanted])? };
        if read == 0 {
            self.check()?;
            return Ok(0);
        }
        self.sum(&out[..read]);
        self.left -= read as u64;
        Ok(read)
    }
}
