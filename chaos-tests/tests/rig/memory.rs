//! A bit that flips in the memory of a running process, as bad memory does it. The process stands still meanwhile.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;

use rustix::param::page_size;
use tidepool_chaos_tests::process::Process;

/// Bytes looked at in one step.
const STEP_BYTES: usize = 4 << 20;

/// Flips the lowest bit of the last byte of `text` wherever it is in memory that the process may write; answers how often it was
/// there.
pub fn flip(process: &mut Process, text: &[u8]) -> io::Result<usize> {
    process.pause().map_err(io::Error::other)?;
    let flipped = flip_all(process.id(), text);
    process.resume().map_err(io::Error::other)?;
    flipped
}

fn flip_all(pid: u32, text: &[u8]) -> io::Result<usize> {
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let mut flipped = 0;
    for (from, to) in writable(pid)? {
        for place in find(&memory, from, to, text)? {
            let last = place + text.len() as u64 - 1;
            memory.write_all_at(&[text[text.len() - 1] ^ 1], last)?;
            flipped += 1;
        }
    }
    Ok(flipped)
}

/// Runs of pages that the process may write and has touched: from, to.
fn writable(pid: u32) -> io::Result<Vec<(u64, u64)>> {
    let page = page_size() as u64;
    let mut pages = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
        let Some((from, to)) = range.split_once('-') else { continue };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else { continue };
        if !rights.starts_with("rw") || rights.ends_with('s') {
            continue;
        }
        pages.seek(SeekFrom::Start(from / page * 8))?;
        let mut entries = vec![0; ((to - from) / page * 8) as usize];
        pages.read_exact(&mut entries)?;
        for (number, entry) in entries.chunks_exact(8).enumerate() {
            let at = from + number as u64 * page;
            // proc(5): the highest bit of an entry says that the page is there.
            if entry[7] & 0x80 == 0 {
                continue;
            }
            match runs.last_mut() {
                Some(run) if run.1 == at => run.1 = at + page,
                _ => runs.push((at, at + page)),
            }
        }
    }
    Ok(runs)
}

fn find(memory: &File, from: u64, to: u64, text: &[u8]) -> io::Result<Vec<u64>> {
    let (mut found, mut at) = (Vec::new(), from);
    let mut bytes = vec![0; STEP_BYTES + text.len() - 1];
    while at < to {
        let wanted = (to - at).min(bytes.len() as u64) as usize;
        memory.read_exact_at(&mut bytes[..wanted], at)?;
        let places = bytes[..wanted].windows(text.len()).enumerate();
        found.extend(places.filter(|(_, window)| *window == text).map(|(place, _)| at + place as u64));
        at += STEP_BYTES as u64;
    }
    Ok(found)
}
