//! How RocksDB's newest write-ahead log ends. RocksDB passes over an end that is cut short without a word, and
//! refuses one whose last pages were never written and read as zeros; both are what a power cut leaves. This module
//! finds and names the first, and cuts off the second. Damage with anything written after it is left to RocksDB,
//! which refuses to open.
//!
//! Format (RocksDB, `db/log_format.h`): blocks of 32 KiB holding records of `crc32c (masked): u32, length: u16,
//! type: u8, payload`; a record never crosses a block, longer ones are split into first, middle and last. Less than
//! a header at a block's end is padding.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

const BLOCK_BYTES: usize = 32 << 10;
const HEADER_BYTES: usize = 7;
/// What a disk writes at once: a torn write leaves whole pages of zeros.
const PAGE_BYTES: u64 = 4096;

const FULL: u8 = 1;
const FIRST: u8 = 2;
const LAST: u8 = 4;

/// A torn end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TornLog {
    /// The file.
    pub(crate) file: PathBuf,
    /// Where the last whole record ends.
    pub(crate) good: u64,
    /// Bytes after it.
    pub(crate) bytes: u64,
    /// Whether these bytes are there and partly zero (RocksDB would refuse them), not simply cut short.
    pub(crate) zeros: bool,
}

impl TornLog {
    /// One line for people.
    pub(crate) fn describe(&self) -> String {
        let name = self.file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        format!("write-ahead log {name} ended in {} bytes of an unfinished record", self.bytes)
    }
}

/// Looks at the newest write-ahead log that is not empty.
pub(crate) fn examine(database: &Path) -> io::Result<Option<TornLog>> {
    let mut newest: Option<(u64, PathBuf)> = None;
    for item in fs::read_dir(database)? {
        let item = item?;
        let name = item.file_name();
        let Some(number) = name.to_str().and_then(|name| name.strip_suffix(".log")).and_then(|n| n.parse().ok()) else {
            continue;
        };
        if item.metadata()?.len() > 0 && newest.as_ref().is_none_or(|(best, _)| number > *best) {
            newest = Some((number, item.path()));
        }
    }
    match newest {
        None => Ok(None),
        Some((_, file)) => examine_file(&file),
    }
}

/// Cuts a torn end off, durably.
pub(crate) fn cut(torn: &TornLog) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(&torn.file)?;
    file.set_len(torn.good)?;
    file.sync_all()
}

/// Where reading stopped.
enum Stop {
    /// At the end of the records.
    Clean,
    /// The file ends inside a record.
    Short,
    /// A record that should reach to this offset does not match its checksum.
    Bad { end: u64 },
}

fn examine_file(path: &Path) -> io::Result<Option<TornLog>> {
    let mut input = BufReader::with_capacity(BLOCK_BYTES * 8, File::open(path)?);
    // End of the last whole logical record, and whether a split one is open after it.
    let (mut good, mut open) = (0u64, false);
    let mut block = vec![0u8; BLOCK_BYTES];
    let mut offset = 0u64;
    let mut stop: Option<Stop> = None;
    let mut last_nonzero = 0u64;
    loop {
        let filled = fill(&mut input, &mut block)?;
        let data = &block[..filled];
        if let Some(at) = data.iter().rposition(|byte| *byte != 0) {
            last_nonzero = offset + at as u64 + 1;
        }
        let mut at = 0;
        while stop.is_none() && filled - at >= HEADER_BYTES {
            let length = usize::from(u16::from_le_bytes([data[at + 4], data[at + 5]]));
            let kind = data[at + 6];
            if kind == 0 && length == 0 {
                stop = Some(Stop::Clean);
                break;
            }
            let end = at + HEADER_BYTES + length;
            if end > filled {
                // A whole block follows no further: in the last one the file is short, before it the length is wrong.
                stop = Some(if filled < BLOCK_BYTES { Stop::Short } else { Stop::Bad { end: offset + filled as u64 } });
                break;
            }
            let stored = u32::from_le_bytes([data[at], data[at + 1], data[at + 2], data[at + 3]]);
            if masked(crc32c::crc32c(&data[at + 6..end])) != stored {
                stop = Some(Stop::Bad { end: offset + end as u64 });
                break;
            }
            open = match kind {
                FIRST => true,
                FULL | LAST => false,
                _ => open,
            };
            at = end;
            if !open {
                good = offset + at as u64;
            }
        }
        let short_header = filled < BLOCK_BYTES && at < filled && stop.is_none();
        if short_header && data[at..].iter().any(|byte| *byte != 0) {
            stop = Some(Stop::Short);
        }
        offset += filled as u64;
        if filled < BLOCK_BYTES {
            break;
        }
    }
    let torn = |zeros| Ok(Some(TornLog { file: path.to_owned(), good, bytes: offset - good, zeros }));
    match stop.unwrap_or(Stop::Clean) {
        Stop::Short => torn(false),
        // Zeros to the end of the file after a split record: its rest was never written.
        Stop::Clean if open => torn(true),
        Stop::Clean => Ok(None),
        Stop::Bad { end } => {
            let zeros_from = last_nonzero.next_multiple_of(PAGE_BYTES);
            if zeros_from > good && zeros_from < end { torn(true) } else { Ok(None) }
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn fill(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// RocksDB stores checksums rotated and offset, so that a checksum of checksums stays useful.
fn masked(checksum: u32) -> u32 {
    checksum.rotate_right(15).wrapping_add(0xa282_ead8)
}
