//! Ops that operators had recorded as refused (M1). A machine that violates an assumption at an op stops its member, and
//! would stop it again at every start; on a majority of stopped members `tidepool member recover --skip` makes that op a
//! refusal.
//!
//! In the data directory `STOPPED` says where this member stopped last, `INDEX.ORDINAL HASH MESSAGE`, and `SKIPS` has one
//! line for each op that is left out, `INDEX.ORDINAL HASH`. The hash is that of the entry's payload, so that what is recorded
//! for one log is never taken for another. A member without the record stops at the op; one that leaves out what the
//! others applied has another state digest from there on, and starts over (M3).

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::str::FromStr;

use xxhash_rust::xxh3::xxh3_128;

use crate::machine::{LogPosition, MachineError};

const STOPPED: &str = "STOPPED";
const SKIPS: &str = "SKIPS";
/// Ops that may be left out in one log: who needs more has another problem.
pub const SKIPS_MAX: usize = 1_024;
const FILE_BYTES_MAX: u64 = 1 << 20;

/// One op of one entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpPlace {
    /// Log index of the entry.
    pub index: u64,
    /// Number of the op in it, from 0.
    pub ordinal: u32,
}

impl fmt::Display for OpPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.ordinal)
    }
}

impl FromStr for OpPlace {
    type Err = String;
    fn from_str(text: &str) -> Result<OpPlace, String> {
        let numbers = text.split_once('.').and_then(|(i, o)| Some((i.parse().ok()?, o.parse().ok()?)));
        let (index, ordinal) = numbers.ok_or_else(|| format!("'{text}' is no INDEX.ORDINAL, such as 81234.0"))?;
        Ok(OpPlace { index, ordinal })
    }
}

/// Hash of an entry's payload, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PayloadHash(u128);

impl PayloadHash {
    /// Of these bytes.
    pub fn of(payload: &[u8]) -> PayloadHash {
        PayloadHash(xxh3_128(payload))
    }
}

impl fmt::Display for PayloadHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for PayloadHash {
    type Err = String;
    fn from_str(text: &str) -> Result<PayloadHash, String> {
        let digits = Some(text).filter(|text| text.len() == 32);
        let number = digits.and_then(|text| u128::from_str_radix(text, 16).ok());
        number.map(PayloadHash).ok_or_else(|| format!("'{text}' is no hash of 32 hexadecimal digits"))
    }
}

/// Where a member stopped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoppedAt {
    /// The op.
    pub place: OpPlace,
    /// Of the payload of its entry.
    pub hash: PayloadHash,
    /// What was violated.
    pub message: String,
}

fn read_text(path: &Path) -> io::Result<Option<String>> {
    match File::open(path) {
        Ok(file) => {
            let mut text = String::new();
            file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
            Ok(Some(text))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write_text(dir: &Path, name: &str, text: &str) -> io::Result<()> {
    let new = dir.join(name).with_extension("tmp");
    let mut file = File::create(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, dir.join(name))?;
    File::open(dir)?.sync_all()
}

fn invalid(path: &Path, line: &str, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: line '{line}': {why}", path.display()))
}

fn parse_line(path: &Path, line: &str) -> io::Result<(OpPlace, PayloadHash, String)> {
    let mut words = line.splitn(3, ' ');
    let mut word = || words.next().unwrap_or_default();
    let place = word().parse().map_err(|why: String| invalid(path, line, &why))?;
    let hash = word().parse().map_err(|why: String| invalid(path, line, &why))?;
    Ok((place, hash, word().to_owned()))
}

impl StoppedAt {
    /// Where the member of this directory stopped last, if an op stopped it.
    pub fn read(dir: &Path) -> io::Result<Option<StoppedAt>> {
        let path = dir.join(STOPPED);
        let Some(text) = read_text(&path)? else { return Ok(None) };
        let (place, hash, message) = parse_line(&path, text.lines().next().unwrap_or_default())?;
        Ok(Some(StoppedAt { place, hash, message }))
    }

    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let message = self.message.replace(['\n', '\r'], " ");
        write_text(dir, STOPPED, &format!("{} {} {message}\n", self.place, self.hash))
    }
}

/// What is left out, by index.
#[derive(Clone, Default, Debug)]
pub(crate) struct Skips(BTreeMap<OpPlace, PayloadHash>);

impl Skips {
    pub(crate) fn read(dir: &Path) -> io::Result<Skips> {
        let path = dir.join(SKIPS);
        let text = read_text(&path)?.unwrap_or_default();
        let parsed = text.lines().map(|line| parse_line(&path, line).map(|(place, hash, _)| (place, hash)));
        Ok(Skips(parsed.collect::<io::Result<_>>()?))
    }

    /// Adds one, durably.
    pub(crate) fn add(dir: &Path, place: OpPlace, hash: PayloadHash) -> io::Result<()> {
        let Skips(mut all) = Skips::read(dir)?;
        all.insert(place, hash);
        if all.len() > SKIPS_MAX {
            let why = format!("{} has {SKIPS_MAX} ops already, which is the limit", dir.join(SKIPS).display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let lines: String = all.iter().map(|(place, hash)| format!("{place} {hash}\n")).collect();
        write_text(dir, SKIPS, &lines)
    }

    /// Ordinals of the ops of this entry that are left out.
    pub(crate) fn of(&self, at: LogPosition, payload: &[u8]) -> Result<Vec<u32>, MachineError> {
        if self.0.is_empty() {
            return Ok(Vec::new());
        }
        let [first, last] = [0, u32::MAX].map(|ordinal| OpPlace { index: at.index, ordinal });
        let mut ordinals = Vec::new();
        for (place, recorded) in self.0.range(first..=last) {
            let hash = PayloadHash::of(payload);
            if *recorded != hash {
                let why = format!(
                    "op {place} is to be left out of an entry of hash {recorded}, this one has {hash}: another log"
                );
                return Err(MachineError::new(why));
            }
            ordinals.push(place.ordinal);
        }
        Ok(ordinals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tried without comparing the hash: fails.
    #[test]
    fn what_is_recorded_is_read_again_and_holds_for_one_payload() {
        let dir = tempfile::tempdir().unwrap();
        let at = |index| LogPosition { term: 2, index };
        assert!(Skips::read(dir.path()).unwrap().of(at(7), b"a").unwrap().is_empty());
        let hash = PayloadHash::of(b"a");
        for (index, ordinal) in [(7, 3), (7, 0), (9, 1)] {
            Skips::add(dir.path(), OpPlace { index, ordinal }, hash).unwrap();
        }
        let skips = Skips::read(dir.path()).unwrap();
        assert_eq!(skips.of(at(7), b"a"), Ok(vec![0, 3]));
        assert_eq!(skips.of(at(8), b"b"), Ok(vec![]));
        assert!(skips.of(at(9), b"b").unwrap_err().message.contains("another log"));
        let stopped = StoppedAt { place: "7.3".parse().unwrap(), hash, message: "index out of bounds: 3".to_owned() };
        stopped.write(dir.path()).unwrap();
        assert_eq!(StoppedAt::read(dir.path()).unwrap(), Some(stopped));
        assert_eq!(hash.to_string().parse(), Ok(hash));
        for bad in ["7", "7.", ".3", "7.x", "-1.0", ""] {
            assert!(bad.parse::<OpPlace>().is_err(), "{bad}");
        }
        fs::write(dir.path().join(SKIPS), "7.3 zz\n").unwrap();
        assert!(Skips::read(dir.path()).is_err());
    }
}
