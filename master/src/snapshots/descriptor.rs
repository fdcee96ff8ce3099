//! The descriptor of a snapshot: whose state it is, and that it is complete.
//!
//! ```text
//! tidepool-snapshot 1
//! cluster 00112233445566778899aabbccddeeff
//! history 0123456789abcdef
//! node 2
//! applied 4711 3
//! feature-level 1
//! member 1 10.0.0.1:50051
//! ancestor 00112233445566778899aabbccddeeff 0123456789abcdef
//! build tidepool 0.1.0
//! created 2026-11-30T10:00:00Z
//! manifest xxh3 0123456789abcdef0123456789abcdef
//! check xxh3 0123456789abcdef0123456789abcdef
//! ```
//! `manifest` is of the manifest's file, `check` of all lines before it. Lines of unknown names before `manifest` are taken
//! along unread, so that a later version may add some; one that changes what the others mean raises the number in the
//! first line.

use std::fmt::Write as _;
use std::time::SystemTime;

use tidepool_proto::{ClusterId, History, NodeId};
use xxhash_rust::xxh3::xxh3_128;

use super::layout::{Place, cluster_directory, parse_cluster};

/// Version of the layout that this binary writes.
pub const VERSION: u32 = 1;
/// Lines of one name at most; far above any quorum.
const LINES_MAX: usize = 4_096;

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Cluster.
    pub cluster: ClusterId,
    /// History of the state.
    pub history: History,
    /// Master that published it.
    pub node: NodeId,
    /// Last log index it covers.
    pub index: u64,
    /// Term of that entry.
    pub term: u64,
    /// Feature level of the state.
    pub feature_level: u16,
    /// The quorum at that index.
    pub members: Vec<MemberLine>,
    /// Histories before this one, the youngest first.
    pub ancestors: Vec<Ancestor>,
    /// Program that wrote it; for people.
    pub build: String,
    /// Wall clock of the writer; for people, nothing is decided by it.
    pub created: SystemTime,
    /// XXH3-128 of the manifest's file.
    pub manifest_xxh3: u128,
}

/// A member of the quorum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberLine {
    /// Its id.
    pub node: NodeId,
    /// Where the others reach it.
    pub address: String,
}

/// A history that this one goes on from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ancestor {
    /// Its cluster.
    pub cluster: ClusterId,
    /// Its number.
    pub history: History,
}

/// Why a descriptor is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DescriptorError {
    /// Of a version this binary does not read.
    #[error("it has layout version {0}, this binary reads {VERSION}; use a newer binary")]
    Version(u32),
    /// Not as it was written.
    #[error("{0}")]
    Damaged(String),
}

impl Descriptor {
    /// Where it belongs.
    pub fn place(&self) -> Place {
        Place { cluster: self.cluster, node: self.node, index: self.index, term: self.term }
    }

    /// As text.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail; what people wrote must stay on its line.
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "tidepool-snapshot {VERSION}");
        let _ = writeln!(text, "cluster {}", cluster_directory(self.cluster));
        let _ = writeln!(text, "history {:016x}", self.history.0);
        let _ = writeln!(text, "node {}", self.node);
        let _ = writeln!(text, "applied {} {}", self.index, self.term);
        let _ = writeln!(text, "feature-level {}", self.feature_level);
        for member in &self.members {
            let _ = writeln!(text, "member {} {}", member.node, one_line(&member.address));
        }
        for ancestor in &self.ancestors {
            let cluster = cluster_directory(ancestor.cluster);
            let _ = writeln!(text, "ancestor {cluster} {:016x}", ancestor.history.0);
        }
        let _ = writeln!(text, "build {}", one_line(&self.build));
        let _ = writeln!(text, "created {}", humantime::format_rfc3339_seconds(self.created));
        let _ = writeln!(text, "manifest xxh3 {:032x}", self.manifest_xxh3);
        let check = xxh3_128(text.as_bytes());
        let _ = writeln!(text, "check xxh3 {check:032x}");
        text
    }

    /// From text. Each version is read by its own function, which answers the newest form.
    pub fn decode(text: &str) -> Result<Descriptor, DescriptorError> {
        let first = text.lines().next().and_then(|line| line.strip_prefix("tidepool-snapshot "));
        match first.and_then(|version| version.parse::<u32>().ok()) {
            Some(1) => decode_1(text),
            Some(version) if version > VERSION => Err(DescriptorError::Version(version)),
            _ => Err(DescriptorError::Damaged("it does not begin as a descriptor does".to_owned())),
        }
    }
}

fn damaged(why: impl Into<String>) -> DescriptorError {
    DescriptorError::Damaged(why.into())
}

fn decode_1(text: &str) -> Result<Descriptor, DescriptorError> {
    let body = text.strip_suffix('\n').ok_or_else(|| damaged("it is cut short"))?;
    let (before, last) = body.rsplit_once('\n').ok_or_else(|| damaged("it is cut short"))?;
    let check = last.strip_prefix("check xxh3 ").ok_or_else(|| damaged("it has no check at its end"))?;
    let before = &text[..before.len() + 1];
    if format!("{:032x}", xxh3_128(before.as_bytes())) != check {
        return Err(damaged("its checksum is wrong"));
    }
    let lines = Lines::of(before)?;
    let numbers = lines.one("applied")?.split_once(' ').ok_or_else(|| damaged("its log index is malformed"))?;
    Ok(Descriptor {
        cluster: cluster(lines.one("cluster")?)?,
        history: history(lines.one("history")?)?,
        node: NodeId(number(lines.one("node")?)?),
        index: number(numbers.0)?,
        term: number(numbers.1)?,
        feature_level: number(lines.one("feature-level")?)?,
        members: lines.all("member", |words| {
            let (node, address) = words.split_once(' ')?;
            Some(MemberLine { node: NodeId(node.parse().ok()?), address: address.to_owned() })
        })?,
        ancestors: lines.all("ancestor", |words| {
            let (id, number) = words.split_once(' ')?;
            Some(Ancestor { cluster: cluster(id).ok()?, history: history(number).ok()? })
        })?,
        build: lines.one("build")?.to_owned(),
        created: humantime::parse_rfc3339(lines.one("created")?).map_err(|_| damaged("its time is malformed"))?,
        manifest_xxh3: lines
            .one("manifest")?
            .strip_prefix("xxh3 ")
            .and_then(|hex| u128::from_str_radix(hex, 16).ok())
            .ok_or_else(|| damaged("its manifest line is malformed"))?,
    })
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, DescriptorError> {
    text.parse().map_err(|_| damaged(format!("'{text}' is no number")))
}

fn cluster(text: &str) -> Result<ClusterId, DescriptorError> {
    parse_cluster(text).ok_or_else(|| damaged(format!("'{text}' is no cluster uuid")))
}

fn history(text: &str) -> Result<History, DescriptorError> {
    u64::from_str_radix(text, 16).map(History).map_err(|_| damaged(format!("'{text}' is no history")))
}

/// Name and words of each line.
struct Lines<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Lines<'a> {
    fn of(text: &'a str) -> Result<Lines<'a>, DescriptorError> {
        let lines: Vec<_> = text.lines().map(|line| line.split_once(' ').unwrap_or((line, ""))).collect();
        if lines.len() > LINES_MAX {
            return Err(damaged(format!("it has {} lines, above {LINES_MAX}", lines.len())));
        }
        Ok(Lines(lines))
    }

    fn one(&self, name: &str) -> Result<&'a str, DescriptorError> {
        let mut found = self.0.iter().filter(|(line, _)| *line == name);
        match (found.next(), found.next()) {
            (Some((_, words)), None) => Ok(words),
            (None, _) => Err(damaged(format!("it has no line '{name}'"))),
            (Some(_), Some(_)) => Err(damaged(format!("it has two lines '{name}'"))),
        }
    }

    fn all<T>(&self, name: &str, read: impl Fn(&'a str) -> Option<T>) -> Result<Vec<T>, DescriptorError> {
        let of_name = self.0.iter().filter(|(line, _)| *line == name);
        of_name
            .map(|(_, words)| read(words).ok_or_else(|| damaged(format!("its line '{name}' is malformed"))))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor() -> Descriptor {
        Descriptor {
            cluster: ClusterId(*b"0123456789abcdef"),
            history: History(0x1234),
            node: NodeId(2),
            index: 4711,
            term: 3,
            feature_level: 1,
            members: vec![MemberLine { node: NodeId(1), address: "10.0.0.1:50051".into() }],
            ancestors: vec![Ancestor { cluster: ClusterId([9; 16]), history: History(7) }],
            build: "tidepool 0.1.0".into(),
            created: SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_764_496_800),
            manifest_xxh3: 99,
        }
    }

    fn with_check(text: &str) -> String {
        format!("{text}check xxh3 {:032x}\n", xxh3_128(text.as_bytes()))
    }

    #[test]
    fn what_is_written_is_read() {
        let descriptor = descriptor();
        assert_eq!(Descriptor::decode(&descriptor.encode()), Ok(descriptor));
    }

    /// Tried without the check line: fails.
    #[test]
    fn any_changed_or_missing_byte_is_noticed() {
        let text = descriptor().encode();
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1;
            let changed = String::from_utf8(bytes).unwrap();
            Descriptor::decode(&changed).unwrap_err();
            Descriptor::decode(&text[..at]).unwrap_err();
        }
        Descriptor::decode(&format!("{text}x")).unwrap_err();
    }

    #[test]
    fn a_line_of_a_later_version_is_taken_along() {
        let text = descriptor().encode();
        let (before, _) = text.rsplit_once("check").unwrap();
        let more = before.replace("build ", "colour blue\nbuild ");
        assert_eq!(Descriptor::decode(&with_check(&more)), Ok(descriptor()));
        let newer = before.replace("tidepool-snapshot 1", "tidepool-snapshot 2");
        assert_eq!(Descriptor::decode(&with_check(&newer)), Err(DescriptorError::Version(2)));
        for wrong in [
            before.replace("node 2\n", ""),
            before.replace("node 2\n", "node 2\nnode 3\n"),
            before.replace("node 2", "node x"),
        ] {
            assert!(matches!(Descriptor::decode(&with_check(&wrong)), Err(DescriptorError::Damaged(_))), "{wrong}");
        }
    }
}
