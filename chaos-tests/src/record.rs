//! The log a load process keeps: one JSON line a call, flushed before the next, so that what was acknowledged is known
//! even when everything else dies.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What was called.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Call {
    /// A put of a fresh key.
    Put,
    /// A put of a large value in a batch, by the bulk writer.
    Bulk,
    /// A get of an acknowledged key, bytes checked.
    Get,
    /// An exist, with leases, of acknowledged keys.
    Exist,
}

impl Call {
    /// Whether it puts a fresh key.
    pub fn is_put(self) -> bool {
        matches!(self, Call::Put | Call::Bulk)
    }
}

/// How it ended, as far as the client can know.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CallOutcome {
    /// Acknowledged (put), or answered with the right bytes (get), or every key present (exist).
    Ok,
    /// An acknowledged key was reported absent.
    Miss,
    /// Refused: certainly without effect.
    Fail,
    /// No definite answer: a put may or may not have happened.
    Unknown,
    /// Other bytes than were put.
    Corrupt,
}

/// One call of one client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CallRecord {
    /// What.
    pub call: Call,
    /// Key; of an exist, the first one missing, else the first.
    pub key: String,
    /// Content hash of what was put or expected.
    pub hash: String,
    /// Payload bytes.
    pub bytes: u64,
    /// When the schedule wanted it sent (CLOCK_MONOTONIC).
    pub intended_ns: u64,
    /// When it was sent.
    pub sent_ns: u64,
    /// When its outcome was known: for a put the acknowledgement.
    pub done_ns: u64,
    /// Outcome.
    pub outcome: CallOutcome,
    /// Copies that an acknowledged put made; 0 of another call.
    #[serde(default)]
    pub copies: u32,
    /// Error text, empty for none.
    pub error: String,
}

impl CallRecord {
    /// Time the caller waited, counted from the schedule: a call that could not be sent in time was late too.
    pub fn latency_ns(&self) -> u64 {
        self.done_ns.saturating_sub(self.intended_ns)
    }
}

/// Appends records to a client's log.
pub struct RecordWriter {
    file: File,
}

impl RecordWriter {
    /// Creates the log.
    pub fn create(path: &Path) -> Result<RecordWriter> {
        let file = File::options().create(true).append(true).open(path);
        Ok(RecordWriter { file: file.with_context(|| format!("call log {}", path.display()))? })
    }

    /// Writes one line with one write(2).
    pub fn append(&mut self, record: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        self.file.write_all(&line).context("writing the call log")
    }
}

/// Reads a whole log. A last line cut by the death of its writer is left out.
pub fn read_all<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    let file = File::open(path).with_context(|| format!("call log {}", path.display()))?;
    let mut records = Vec::new();
    let mut reader = BufReader::new(file);
    let mut line = String::new();
    while reader.read_line(&mut line)? > 0 {
        if line.ends_with('\n') {
            records.push(serde_json::from_str(&line).with_context(|| format!("call log {}", path.display()))?);
        }
        line.clear();
    }
    Ok(records)
}

/// Follows a growing log.
pub struct RecordFollower {
    path: PathBuf,
    file: Option<File>,
    at: u64,
    partial: Vec<u8>,
}

impl RecordFollower {
    /// Follows from the start; the log need not exist yet.
    pub fn new(path: &Path) -> RecordFollower {
        RecordFollower { path: path.to_owned(), file: None, at: 0, partial: Vec::new() }
    }

    /// Calls `each` with every record that became complete since the last call.
    pub fn poll(&mut self, mut each: impl FnMut(CallRecord)) -> Result<()> {
        if self.file.is_none() {
            match File::open(&self.path) {
                Ok(file) => self.file = Some(file),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(error).with_context(|| format!("call log {}", self.path.display())),
            }
        }
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        file.seek(SeekFrom::Start(self.at))?;
        self.at += file.read_to_end(&mut self.partial)? as u64;
        let complete = self.partial.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        for line in self.partial[..complete].split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
            each(serde_json::from_slice(line).with_context(|| format!("call log {}", self.path.display()))?);
        }
        self.partial.drain(..complete);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str) -> CallRecord {
        CallRecord {
            call: Call::Put,
            key: key.into(),
            hash: "h".into(),
            bytes: 1,
            intended_ns: 5,
            sent_ns: 7,
            done_ns: 9,
            outcome: CallOutcome::Ok,
            copies: 1,
            error: String::new(),
        }
    }

    #[test]
    fn a_follower_sees_whole_lines_once_and_a_cut_line_is_left_out() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("calls");
        let mut follower = RecordFollower::new(&path);
        let mut seen = Vec::new();
        follower.poll(|r| seen.push(r.key)).unwrap();
        let mut writer = RecordWriter::create(&path).unwrap();
        writer.append(&record("a")).unwrap();
        writer.file.write_all(b"{\"call\":\"pu").unwrap();
        follower.poll(|r| seen.push(r.key)).unwrap();
        follower.poll(|r| seen.push(r.key)).unwrap();
        assert_eq!(seen, ["a"]);
        let all: Vec<CallRecord> = read_all(&path).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].latency_ns(), 4);
    }
}
