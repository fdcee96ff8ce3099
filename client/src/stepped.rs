//! Checksums of large values in steps: between two steps the deadline is looked at, and whether anybody still waits.
//! Without that a value of gigabytes keeps its call, and a core, long past the deadline (R4).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tidepool_proto::object::{self, BLOCK_BYTES, CHECKSUM_BYTES, HEADER_BYTES, Header, KeyHash};
use tidepool_proto::{Error, History, ObjectId};

use crate::deadline::Deadline;

/// Payload bytes between two looks: a few milliseconds, well within the allowance of a call. Whole blocks.
pub(crate) const STEP_BYTES: u64 = 16 << 20;
const _: () = assert!(STEP_BYTES.is_multiple_of(BLOCK_BYTES));

/// Whether checksums are still wanted.
#[derive(Clone)]
pub(crate) struct Wanted {
    deadline: Deadline,
    doing: &'static str,
    abandoned: Arc<AtomicBool>,
}

/// Held by whoever waits for the checksums; when it is dropped they stop at the next step.
pub(crate) struct Waiter(Arc<AtomicBool>);

impl Drop for Waiter {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Wanted {
    /// Until the deadline, or until the waiter is dropped.
    pub(crate) fn until(deadline: Deadline, doing: &'static str) -> (Wanted, Waiter) {
        let abandoned = Arc::new(AtomicBool::new(false));
        (Wanted { deadline, doing, abandoned: abandoned.clone() }, Waiter(abandoned))
    }

    fn check(&self) -> Result<(), Error> {
        if self.abandoned.load(Ordering::Relaxed) || self.deadline.expired() {
            return Err(self.deadline.error(self.doing));
        }
        Ok(())
    }
}

/// As [`object::build_prefix`].
pub(crate) fn build_prefix(
    history: History,
    object: ObjectId,
    key_hash: KeyHash,
    parts: &[&[u8]],
    wanted: &Wanted,
) -> Result<Vec<u8>, Error> {
    let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
    if length <= STEP_BYTES {
        wanted.check()?;
        return Ok(object::build_prefix(history, object, key_hash, parts));
    }
    Ok(with_header(&table(parts, wanted)?, history, object, key_hash, length))
}

/// The prefix of a value whose object is not known yet: the table, after room for the header.
pub(crate) fn table(parts: &[&[u8]], wanted: &Wanted) -> Result<Vec<u8>, Error> {
    let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
    let mut prefix = Vec::with_capacity(object::prefix_bytes(length) as usize);
    prefix.resize(HEADER_BYTES, 0);
    for step in Steps::of(parts) {
        wanted.check()?;
        // A step is whole blocks, so its table is a part of the whole one.
        let of_step = object::build_prefix(History(0), ObjectId(0), KeyHash::default(), &step.parts);
        prefix.extend_from_slice(&of_step[HEADER_BYTES..]);
    }
    Ok(prefix)
}

/// Fills in the header that [`table`] left room for.
pub(crate) fn with_header(table: &[u8], history: History, object: ObjectId, key_hash: KeyHash, length: u64) -> Vec<u8> {
    let mut prefix = table.to_vec();
    let table_crc = object::checksum(&prefix[HEADER_BYTES..]);
    prefix[..HEADER_BYTES].copy_from_slice(&Header { history, object, key_hash, length, table_crc }.encode());
    prefix
}

/// As [`object::verify_parts`], for a payload of the length that the verified prefix says.
pub(crate) fn verify_parts(prefix: &[u8], parts: &[&[u8]], wanted: &Wanted) -> Result<(), Error> {
    let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
    if length <= STEP_BYTES || prefix.len() as u64 != object::prefix_bytes(length) {
        wanted.check()?;
        return object::verify_parts(prefix, parts);
    }
    for step in Steps::of(parts) {
        wanted.check()?;
        // Entries are found by their distance from where the table begins: this window has the step's alone.
        let first = (step.first_block as usize) * CHECKSUM_BYTES;
        let blocks = object::block_count(step.bytes) as usize * CHECKSUM_BYTES;
        object::verify_parts(&prefix[first..first + HEADER_BYTES + blocks], &step.parts).map_err(|error| {
            let what = format!("from payload block {} on: {}", step.first_block, error.message());
            Error::new(error.code(), what)
        })?;
    }
    Ok(())
}

/// A run of whole blocks; the last one may be short.
struct Step<'a> {
    first_block: u64,
    bytes: u64,
    parts: Vec<&'a [u8]>,
}

struct Steps<'p, 'a> {
    parts: &'p [&'a [u8]],
    /// Bytes of the first of `parts` that earlier steps had.
    taken: usize,
    first_block: u64,
}

impl<'p, 'a> Steps<'p, 'a> {
    fn of(parts: &'p [&'a [u8]]) -> Steps<'p, 'a> {
        Steps { parts, taken: 0, first_block: 0 }
    }
}

impl<'a> Iterator for Steps<'_, 'a> {
    type Item = Step<'a>;

    fn next(&mut self) -> Option<Step<'a>> {
        let mut step = Step { first_block: self.first_block, bytes: 0, parts: Vec::new() };
        while let Some((part, after)) = self.parts.split_first() {
            let rest = &part[self.taken..];
            let take = rest.len().min((STEP_BYTES - step.bytes) as usize);
            step.parts.push(&rest[..take]);
            step.bytes += take as u64;
            if take < rest.len() {
                self.taken += take;
                break;
            }
            (self.parts, self.taken) = (after, 0);
        }
        self.first_block += step.bytes.div_ceil(BLOCK_BYTES);
        (step.bytes > 0).then_some(step)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidepool_proto::ErrorCode;

    use super::*;

    fn wanted() -> (Wanted, Waiter) {
        Wanted::until(Deadline::after(Duration::from_secs(600)), "checksumming")
    }

    fn parts(bytes: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
        let mut parts = Vec::new();
        let mut at = 0;
        for &cut in cuts.iter().chain([&bytes.len()]) {
            parts.push(bytes[at..cut].to_vec());
            at = cut;
        }
        parts
    }

    #[test]
    fn steps_give_what_one_pass_gives() {
        let (wanted, _waiter) = wanted();
        let step = STEP_BYTES as usize;
        for length in [1, step - 1, step, step + 1, 2 * step + 70_001] {
            let bytes: Vec<u8> = (0..length).map(|i| (i % 251) as u8 ^ (i >> 16) as u8).collect();
            let cut = |at: usize| at.min(length);
            for cuts in
                [vec![], vec![cut(1), cut(65_537), cut(step - 3), cut(step + 5)], vec![cut(step), cut(2 * step)]]
            {
                let owned = parts(&bytes, &cuts);
                let parts: Vec<&[u8]> = owned.iter().map(Vec::as_slice).collect();
                let prefix = build_prefix(History(1), ObjectId(2), [3; 16], &parts, &wanted).unwrap();
                assert_eq!(prefix, object::build_prefix(History(1), ObjectId(2), [3; 16], &[&bytes]), "{length}");
                verify_parts(&prefix, &parts, &wanted).unwrap();
                for at in [0, length / 2, length - 1] {
                    let mut wrong = bytes.clone();
                    wrong[at] ^= 1;
                    let error = verify_parts(&prefix, &[&wrong], &wanted).unwrap_err();
                    assert_eq!(error.code(), ErrorCode::ChecksumMismatch, "{length} {at}");
                }
                assert!(verify_parts(&prefix, &[&bytes[..length - 1]], &wanted).is_err());
            }
        }
    }

    #[test]
    fn nothing_is_computed_past_the_deadline_or_for_nobody() {
        let bytes = vec![7u8; STEP_BYTES as usize + 1];
        let (late, _waiter) = Wanted::until(Deadline::after(Duration::ZERO), "checksumming");
        let (abandoned, waiter) = wanted();
        drop(waiter);
        for wanted in [late, abandoned] {
            let error = build_prefix(History(1), ObjectId(2), [3; 16], &[&bytes], &wanted).unwrap_err();
            assert_eq!(error.code(), ErrorCode::DeadlineExceeded);
            let prefix = object::build_prefix(History(1), ObjectId(2), [3; 16], &[&bytes]);
            assert_eq!(verify_parts(&prefix, &[&bytes], &wanted).unwrap_err().code(), ErrorCode::DeadlineExceeded);
        }
    }
}
