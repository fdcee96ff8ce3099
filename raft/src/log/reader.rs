//! Reading entries back: the newest from memory, older ones from the disk.

use std::io;
use std::ops::Range;

use super::flusher::Shared;
use super::state::State;
use crate::codec;
use crate::types::{Config, Entry};

/// What of a wanted range lies on the disk, and what follows it in memory.
struct Parts {
    generation: u64,
    disk: Range<u64>,
    memory: Vec<Entry>,
}

impl<C: Config> State<C> {
    fn parts(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Parts> {
        self.usable()?;
        let (start, end) = (start.max(self.first), end.min(self.tail.next()));
        let end = end.max(start);
        let split = self.tail.first().clamp(start, end);
        let mut bytes = 0;
        let entries = (split..end).map_while(|index| self.tail.get(index)).take_while(|entry| {
            let fits = bytes == 0 || bytes < bytes_max;
            bytes += codec::entry_size(entry);
            fits
        });
        Ok(Parts { generation: self.generation, disk: start..split, memory: entries.cloned().collect() })
    }
}

impl<C: Config> Shared<C> {
    /// Entries of `[start, end)`, the first ones up to about `bytes_max`, if none of them is on the disk only.
    pub(super) fn read_memory(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Option<Vec<Entry>>> {
        let state = self.state.lock();
        // Asked first, so that what has to be read again below is not copied here.
        if start.max(state.first) < state.tail.first().min(end) {
            return state.usable().map(|()| None);
        }
        state.parts(start, end, bytes_max).map(|parts| Some(parts.memory))
    }

    /// The same from wherever they are. Blocks on the disk.
    pub(super) fn read(&self, start: u64, end: u64, bytes_max: usize) -> io::Result<Vec<Entry>> {
        loop {
            let Parts { generation, disk: range, memory } = self.state.lock().parts(start, end, bytes_max)?;
            if range.is_empty() {
                return Ok(memory);
            }
            let read = self.disk.read(range.clone(), bytes_max);
            // Truncation or purge may have changed what was being read: only an undisturbed read counts.
            if self.state.lock().generation != generation {
                continue;
            }
            let decoded = read.and_then(|frames| {
                let bytes = frames.iter().map(|(_, frame)| frame.len()).sum::<usize>();
                Ok((decode_run(range.start, frames)?, bytes))
            });
            let (mut entries, bytes) = decoded.map_err(|error| self.fail("read", &error))?;
            self.metrics.read_from_disk_entries.inc_by(entries.len() as u64);
            let next = range.start + entries.len() as u64;
            if bytes < bytes_max {
                // The disk stops short only at the byte limit.
                if next < range.end {
                    let error = io::Error::new(io::ErrorKind::InvalidData, format!("entry {next} is missing"));
                    return Err(self.fail("read", &error).into());
                }
                entries.extend(memory);
            }
            return Ok(entries);
        }
    }
}

/// Decodes frames that must begin at `start` and have no hole.
fn decode_run(start: u64, frames: Vec<(u64, bytes::Bytes)>) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(frames.len());
    for (expected, (index, frame)) in (start..).zip(frames) {
        let bad = |detail: String| io::Error::new(io::ErrorKind::InvalidData, format!("entry {expected}: {detail}"));
        if index != expected {
            return Err(bad(format!("missing, {index} follows")));
        }
        let entry: Entry = codec::decode(frame).map_err(|error| bad(error.to_string()))?;
        if entry.log_id.index != index {
            return Err(bad(format!("it says it is {}", entry.log_id)));
        }
        entries.push(entry);
    }
    Ok(entries)
}
