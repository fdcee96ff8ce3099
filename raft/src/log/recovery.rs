//! The check of everything on disk before a store opens: checksums, contiguity, order, markers.

use std::io;
use std::path::Path;

use bytes::Bytes;

use super::disk::{Disk, Write};
use super::error::OpenLogError;
use crate::codec::{self, CodecError, Message};
use crate::machine::MachineError;
use crate::types::{Entry, EntryPayload, LogId, Vote, log_id, term_of};

/// What a store held when it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenReport {
    /// Entries verified.
    pub entries: u64,
    /// Their encoded bytes.
    pub bytes: u64,
    /// The vote.
    pub vote: Option<Vote>,
    /// Last committed log id known to this node.
    pub committed: Option<LogId>,
    /// The log begins after it.
    pub purged: Option<LogId>,
    /// Last log id, the purged one if no entry is left.
    pub last: Option<LogId>,
    /// What a crash had left half written and was cut off.
    pub torn_tail: Option<TornTail>,
    /// End of the range already removed from disk.
    pub(crate) deleted: u64,
    /// Lowest index an entry may have.
    pub(crate) first: u64,
}

impl OpenReport {
    /// Whether nothing was ever stored: no vote, no entry, no snapshot taken.
    pub fn is_pristine(&self) -> bool {
        self.vote.is_none() && self.last.is_none() && self.committed.is_none()
    }
}

/// Entries cut off because the crash came before their sync; they were never acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TornTail {
    /// First index cut off.
    pub from: u64,
    /// Keys that were found from there on; 0 if the disk left them out by itself.
    pub entries: u64,
    /// What was wrong with the first.
    pub detail: String,
}

/// First thing found wrong in a scan.
struct Fault {
    index: u64,
    detail: String,
    /// Bad or displaced keys seen from there on, and the end of their range.
    keys: u64,
    end: u64,
}

/// Whether this binary can apply a payload (M6).
pub(crate) type Admits<'a> = &'a dyn Fn(&[u8]) -> Result<(), MachineError>;

/// Reads everything, cuts off a torn tail, and refuses what a crash cannot explain, and what this binary could not apply.
pub(crate) fn recover(disk: &dyn Disk, path: &Path, admits: Admits<'_>) -> Result<OpenReport, OpenLogError> {
    let io_error = |error: io::Error| OpenLogError::Io { path: path.to_owned(), error };
    let state = disk.state().map_err(io_error)?;
    let mut report = OpenReport {
        vote: marker("vote", state.vote)?,
        committed: marker("committed log id", state.committed)?,
        purged: marker("purged log id", state.purged)?,
        deleted: state.deleted,
        ..OpenReport::default()
    };
    report.first = report.purged.map_or(0, |id| id.index + 1);
    report.last = report.purged;
    let torn_by_disk = disk.torn();

    let mut fault: Option<Fault> = None;
    let mut newer: Option<CodecError> = None;
    let mut unsupported: Option<String> = None;
    let mut expected = report.first;
    let scanned = disk.scan(report.first, &mut |index, frame| {
        let bytes = frame.len() as u64;
        let read = check(index, frame, report.last, admits);
        if let Err(Wrong::Unsupported(error)) = &read {
            unsupported = Some(error.to_string());
            return Err(io::Error::other("above this binary's feature level"));
        }
        if let Err(Wrong::Codec(error @ CodecError::Version { .. })) = &read {
            newer = Some(error.clone());
            return Err(io::Error::other("newer version"));
        }
        match (&mut fault, read) {
            (Some(fault), read) => {
                fault.keys += 1;
                fault.end = index + 1;
                if read.is_ok() {
                    // An intact entry follows the fault, so no crash tore the end off: this is a hole.
                    return Err(io::Error::other("an intact entry follows"));
                }
            }
            (None, Ok(id)) if index == expected => {
                report.last = Some(id);
                report.entries += 1;
                report.bytes += bytes;
                expected += 1;
            }
            (None, Ok(_)) => {
                let detail = format!("missing, while entry {index} exists");
                fault = Some(Fault { index: expected, detail, keys: 1, end: index + 1 });
                return Err(io::Error::other("hole"));
            }
            (None, Err(wrong)) => {
                fault = Some(Fault { index: expected, detail: wrong.to_string(), keys: 1, end: index + 1 });
                if index != expected {
                    return Err(io::Error::other("hole"));
                }
            }
        }
        Ok(())
    });

    if let Some(detail) = unsupported {
        return Err(OpenLogError::FeatureLevel { path: path.to_owned(), index: expected, detail });
    }
    if let Some(error) = newer {
        return Err(OpenLogError::StorageCorrupt {
            index: expected,
            last_good: name(report.last),
            detail: error.to_string(),
        });
    }
    let stopped = scanned.err();
    match (fault, stopped) {
        (None, None) => {}
        // The disk itself failed to read on: everything up to there was intact.
        (None, Some(error)) => {
            return Err(OpenLogError::StorageCorrupt {
                index: expected,
                last_good: name(report.last),
                detail: error.to_string(),
            });
        }
        (Some(fault), stopped) => {
            let torn = stopped.is_none() && disk.tears() && fault.index >= state.synced;
            if !torn {
                return Err(OpenLogError::StorageCorrupt {
                    index: fault.index,
                    last_good: name(report.last),
                    detail: fault.detail,
                });
            }
            disk.write(&[Write::Truncate(fault.index..fault.end)]).map_err(io_error)?;
            disk.sync().map_err(io_error)?;
            report.torn_tail = Some(TornTail { from: fault.index, entries: fault.keys, detail: fault.detail });
        }
    }
    // The watermark of a batch speaks of entries synced before it: a log that ends below it lost some of them.
    // (The committed marker promises less: it may run ahead of the log while a snapshot is being installed.)
    if report.last.map_or(0, |id| id.index + 1) < state.synced {
        return Err(OpenLogError::StorageCorrupt {
            index: expected,
            last_good: name(report.last),
            detail: format!("missing, while entries up to {} were on disk before", state.synced - 1),
        });
    }
    if let (None, Some(detail)) = (&report.torn_tail, torn_by_disk) {
        report.torn_tail = Some(TornTail { from: expected, entries: 0, detail });
    }
    Ok(report)
}

/// What is wrong with one entry.
#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Unsupported(MachineError),
    #[error("it says it is {said}")]
    Displaced { said: LogId },
    #[error("its term {} is below {} of the entry before", term_of(.id), term_of(.before))]
    Unordered { id: LogId, before: LogId },
}

fn check(index: u64, frame: Bytes, before: Option<LogId>, admits: Admits<'_>) -> Result<LogId, Wrong> {
    let entry = codec::decode::<Entry>(frame)?;
    if let EntryPayload::Normal(payload) = &entry.payload {
        admits(&payload.0).map_err(Wrong::Unsupported)?;
    }
    let id = entry.log_id;
    if id.index != index {
        return Err(Wrong::Displaced { said: id });
    }
    match before {
        Some(before) if term_of(&before) > term_of(&id) => Err(Wrong::Unordered { id, before }),
        _ => Ok(id),
    }
}

fn marker<M: Message>(what: &'static str, frame: Option<Bytes>) -> Result<Option<M>, OpenLogError> {
    frame.map(codec::decode).transpose().map_err(|error| OpenLogError::StateCorrupt { what, error })
}

fn name(id: Option<LogId>) -> String {
    match id {
        None => "none".to_owned(),
        Some(id) => log_id(term_of(&id), id.index).to_string(),
    }
}
