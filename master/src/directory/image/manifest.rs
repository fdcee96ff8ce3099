//! The manifest of an image: what parts it has, how long they are, what they hash to, and the digest of the state.
//!
//! ```text
//! tidepool-image 1
//! feature-level 1
//! applied 4711 3
//! part segments bytes 1234 rows 5 xxh3 0123456789abcdef0123456789abcdef
//! part metadata bytes 5678 rows 1000 xxh3 ...
//! part task_manager bytes 3 rows 0 xxh3 ...
//! digest 0123456789abcdef0123456789abcdef
//! ```
//! `bytes` and `xxh3` are of the part as stored; `rows` are the segments, objects and tasks. Each line ends with a
//! newline, fields are separated by one space, there is nothing else.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::Xxh3;

/// Format version: what a reader must know to read the parts.
pub const FORMAT_VERSION: u32 = 1;

/// Length, rows and hash of one part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Part {
    /// Bytes as stored.
    pub bytes: u64,
    /// Segments, objects or tasks.
    pub rows: u64,
    /// XXH3-128 of the bytes as stored.
    pub xxh3: u128,
}

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Manifest {
    /// Version of the format.
    pub format: u32,
    /// Feature level of the state.
    pub feature_level: u16,
    /// (index, term) of the last entry it covers.
    pub applied: Option<(u64, u64)>,
    /// Nodes, segments, tenants, sessions, retired space.
    pub segments: Part,
    /// Objects.
    pub metadata: Part,
    /// Copies and tasks.
    pub task_manager: Part,
    /// Digest of the state (M2).
    pub digest: u128,
}

/// Sums up a part as it goes by.
#[derive(Clone, Default)]
pub(super) struct PartSum {
    hasher: Xxh3,
    part: Part,
}

impl PartSum {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
        self.part.bytes += bytes.len() as u64;
    }
    pub(super) fn rows(&mut self, rows: u64) {
        self.part.rows += rows;
    }
    pub(super) fn part(&self) -> Part {
        Part { xxh3: self.hasher.digest128(), ..self.part }
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tidepool-image {}", self.format)?;
        writeln!(f, "feature-level {}", self.feature_level)?;
        if let Some((index, term)) = self.applied {
            writeln!(f, "applied {index} {term}")?;
        }
        for (name, part) in
            [("segments", self.segments), ("metadata", self.metadata), ("task_manager", self.task_manager)]
        {
            writeln!(f, "part {name} bytes {} rows {} xxh3 {:032x}", part.bytes, part.rows, part.xxh3)?;
        }
        writeln!(f, "digest {:032x}", self.digest)
    }
}

impl FromStr for Manifest {
    type Err = String;

    fn from_str(text: &str) -> Result<Manifest, String> {
        let mut manifest = Manifest::default();
        let wrong = |line: &str| format!("manifest line '{}' is malformed", line.chars().take(100).collect::<String>());
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let hex = |word: &str| u128::from_str_radix(word, 16).map_err(|_| wrong(line));
            match words[..] {
                ["tidepool-image", version] => manifest.format = version.parse().map_err(|_| wrong(line))?,
                ["feature-level", level] => manifest.feature_level = level.parse().map_err(|_| wrong(line))?,
                ["applied", index, term] => {
                    let number = |word: &str| word.parse::<u64>().map_err(|_| wrong(line));
                    manifest.applied = Some((number(index)?, number(term)?));
                }
                ["part", name, "bytes", bytes, "rows", rows, "xxh3", xxh3] => {
                    let number = |word: &str| word.parse::<u64>().map_err(|_| wrong(line));
                    let part = Part { bytes: number(bytes)?, rows: number(rows)?, xxh3: hex(xxh3)? };
                    match name {
                        "segments" => manifest.segments = part,
                        "metadata" => manifest.metadata = part,
                        "task_manager" => manifest.task_manager = part,
                        _ => return Err(wrong(line)),
                    }
                }
                ["digest", digest] => manifest.digest = hex(digest)?,
                _ => return Err(wrong(line)),
            }
        }
        // What is written is canonical, so what is read must come out the same: nothing missing, twice or reordered.
        if manifest.to_string() != text {
            return Err("the manifest is not in its canonical form".to_owned());
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let part = Part { bytes: 1, rows: 2, xxh3: u128::MAX / 3 };
        Manifest {
            format: FORMAT_VERSION,
            feature_level: 1,
            applied: Some((4711, 3)),
            segments: part,
            metadata: Part { xxh3: 0, ..part },
            task_manager: part,
            digest: 77,
        }
    }

    #[test]
    fn a_manifest_round_trips_and_no_other_text_passes() {
        for manifest in [manifest(), Manifest { applied: None, ..manifest() }] {
            let text = manifest.to_string();
            assert_eq!(text.parse(), Ok(manifest));
            for at in 0..text.len() {
                assert_ne!(text[..at].parse(), Ok(manifest), "cut at {at}");
                let mut changed = text.clone().into_bytes();
                changed[at] ^= 1;
                let changed = String::from_utf8(changed).unwrap();
                assert_ne!(changed.parse(), Ok(manifest), "change at {at}");
            }
            assert!(format!("{text}\n").parse::<Manifest>().is_err());
            assert!(format!("{text}{text}").parse::<Manifest>().is_err());
        }
    }
}
