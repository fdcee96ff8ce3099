//! Where a read lands, and the check that makes it a result: header, id, key hash, table, every block (I2, R1). Of a
//! ranged read, every block that the range touches: what the caller did not ask for lands beside and is dropped.

use std::ops::Range;

use bytes::Bytes;
use tidepool_proto::object::{self, BLOCK_BYTES, CHECKSUM_BYTES, KeyHash};
use tidepool_proto::{Error, ErrorCode, History, ObjectId};
use tidepool_transport::{Buffer, Loan, LocalMut};

use crate::stepped::{self, Wanted};

/// What the caller wants filled.
#[derive(Debug)]
pub(crate) enum Destination {
    /// New memory.
    Allocate,
    /// The caller's, in order.
    Caller(Vec<LocalMut>),
}

/// A payload that was verified.
#[derive(Debug)]
pub(crate) enum Delivered {
    Bytes(Bytes),
    /// That many bytes are in the caller's memory.
    Filled(u64),
}

/// Which object must arrive, and which part of its payload.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) history: History,
    pub(crate) object: ObjectId,
    pub(crate) key_hash: KeyHash,
    pub(crate) length: u64,
    /// Not empty, within the length.
    pub(crate) range: Range<u64>,
}

impl Expected {
    /// Payload of the blocks that the range touches.
    fn cover(&self) -> Range<u64> {
        let start = self.range.start / BLOCK_BYTES * BLOCK_BYTES;
        start..self.range.end.next_multiple_of(BLOCK_BYTES).min(self.length)
    }

    /// Payload bytes that are read.
    pub(crate) fn bytes(&self) -> u64 {
        let cover = self.cover();
        cover.end - cover.start
    }

    /// Bytes read before and after the range.
    fn margins(&self) -> (usize, usize) {
        let cover = self.cover();
        ((self.range.start - cover.start) as usize, (cover.end - self.range.end) as usize)
    }
}

/// One range of the stored object, and where it lands.
pub(crate) struct Portion {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) into: Vec<LocalMut>,
}

/// Memory that is lent to an engine.
pub(crate) struct Landing {
    expected: Expected,
    memory: Memory,
}

enum Memory {
    /// Prefix and payload in one allocation.
    Owned(Buffer),
    /// The prefix is in a [`Scratch`], and behind it the margins of the range.
    Caller { scratch: Range<usize>, loans: Vec<Loan> },
}

/// Where the prefixes and margins of a batch land whose payloads go into the callers' memory: one piece for all.
pub(crate) struct Scratch {
    buffer: Buffer,
    parts: std::vec::IntoIter<LocalMut>,
    at: usize,
}

impl Scratch {
    /// Room for what of these is not for the caller, in this order.
    pub(crate) fn for_all<'a>(fetches: impl Iterator<Item = (&'a Destination, &'a Expected)>) -> Scratch {
        let room = |(destination, expected): (&Destination, &Expected)| match destination {
            Destination::Caller(_) if expected.length <= object::OBJECT_BYTES_MAX => {
                let (before, after) = expected.margins();
                object::prefix_bytes(expected.length) as usize + before + after
            }
            _ => 0,
        };
        let lengths: Vec<usize> = fetches.map(room).collect();
        let lent = Buffer::lend(vec![0; lengths.iter().sum()], &lengths);
        let (buffer, parts) = lent.expect("the parts add up to the allocation");
        Scratch { buffer, parts: parts.into_iter(), at: 0 }
    }

    /// The part of the next one.
    fn next(&mut self) -> (Range<usize>, LocalMut) {
        let part = self.parts.next().expect("a part was made for each");
        let start = self.at;
        self.at += part.len();
        (start..self.at, part)
    }

    /// All of it, once the engine has let go of them.
    pub(crate) fn take(self) -> Result<Vec<u8>, Error> {
        drop(self.parts);
        self.buffer.take().map_err(|_| still_lent())
    }
}

impl Landing {
    /// Lends memory for what is expected; says what to read into it.
    pub(crate) fn prepare(
        destination: Destination,
        expected: Expected,
        scratch: &mut Scratch,
    ) -> Result<(Landing, Vec<Portion>), (Destination, Error)> {
        let (scratch_range, scratch_part) = scratch.next();
        let length = expected.length;
        let too_large = |what: String| Error::new(ErrorCode::InvalidParams, what);
        if length > object::OBJECT_BYTES_MAX {
            let limit = object::OBJECT_BYTES_MAX;
            return Err((destination, too_large(format!("object of {length} bytes; the limit is {limit}"))));
        }
        let Ok(bytes) = usize::try_from(expected.bytes()) else {
            return Err((
                destination,
                too_large(format!("an object of {length} bytes does not fit this host's memory")),
            ));
        };
        let prefix_bytes = object::prefix_bytes(length) as usize;
        match destination {
            Destination::Allocate => {
                let lent = Buffer::lend(vec![0; prefix_bytes + bytes], &[prefix_bytes, bytes]);
                let (buffer, parts) = lent.expect("the parts add up to the allocation");
                let portions = portions(&expected, parts);
                Ok((Landing { expected, memory: Memory::Owned(buffer) }, portions))
            }
            Destination::Caller(memory) => {
                let room: u64 = memory.iter().map(|part| part.len() as u64).sum();
                let wanted = expected.range.end - expected.range.start;
                if room < wanted {
                    let what = format!("the object has {wanted} bytes, the caller's memory {room}");
                    return Err((Destination::Caller(memory), Error::new(ErrorCode::BufferTooSmall, what)));
                }
                let (prefix, margins) = scratch_part.split_at(prefix_bytes);
                let (before, after) = margins.split_at(expected.margins().0);
                let mut parts = Vec::with_capacity(3 + memory.len());
                parts.extend([prefix, before]);
                let mut rest = wanted as usize;
                let mut loans = Vec::with_capacity(memory.len());
                for whole in memory {
                    let (loan, part) = Loan::new(whole);
                    loans.push(loan);
                    let (part, _surplus) = part.split_at(rest);
                    rest -= part.len();
                    parts.push(part);
                }
                parts.push(after);
                let portions = portions(&expected, parts);
                Ok((Landing { expected, memory: Memory::Caller { scratch: scratch_range, loans } }, portions))
            }
        }
    }

    /// Takes the memory back without a look at it.
    pub(crate) fn abandon(self) -> Result<Destination, Error> {
        match self.memory {
            Memory::Owned(_) => Ok(Destination::Allocate),
            Memory::Caller { loans, .. } => Ok(Destination::Caller(take_all(loans)?)),
        }
    }

    /// Takes the memory back and believes nothing in it that does not verify. `scratch` is what the scratch gave back.
    pub(crate) fn verify(self, scratch: &[u8], wanted: &Wanted) -> Result<Delivered, (Option<Destination>, Error)> {
        let expected = self.expected;
        let prefix_bytes = object::prefix_bytes(expected.length) as usize;
        let (before, after) = expected.margins();
        match self.memory {
            Memory::Owned(buffer) => {
                let bytes = buffer.take().map_err(|_| (Some(Destination::Allocate), still_lent()))?;
                let checked = expected.check(&bytes[..prefix_bytes], &[&bytes[prefix_bytes..]], wanted);
                checked.map_err(|error| (Some(Destination::Allocate), error))?;
                let range = prefix_bytes + before..bytes.len() - after;
                Ok(Delivered::Bytes(Bytes::from(bytes).slice(range)))
            }
            Memory::Caller { scratch: place, loans } => {
                let memory = take_all(loans).map_err(|error| (None, error))?;
                let (prefix, margins) = scratch[place].split_at(prefix_bytes);
                let length = expected.range.end - expected.range.start;
                let mut rest = length as usize;
                let mut parts: Vec<&[u8]> = vec![&margins[..before]];
                parts.extend(memory.iter().map(|part| {
                    let bytes = &part.as_slice()[..rest.min(part.len())];
                    rest -= bytes.len();
                    bytes
                }));
                parts.push(&margins[before..]);
                match expected.check(prefix, &parts, wanted) {
                    Ok(()) => Ok(Delivered::Filled(length)),
                    Err(error) => Err((Some(Destination::Caller(memory)), error)),
                }
            }
        }
    }
}

/// What to read: prefix and blocks in one piece where nothing lies between them.
fn portions(expected: &Expected, mut parts: Vec<LocalMut>) -> Vec<Portion> {
    let (prefix_bytes, cover) = (object::prefix_bytes(expected.length), expected.cover());
    let filled = |into: Vec<LocalMut>| into.into_iter().filter(|part| !part.is_empty()).collect();
    if cover.start == 0 {
        return vec![Portion { offset: 0, length: prefix_bytes + cover.end, into: filled(parts) }];
    }
    let blocks = parts.split_off(1);
    vec![
        Portion { offset: 0, length: prefix_bytes, into: parts },
        Portion { offset: prefix_bytes + cover.start, length: expected.bytes(), into: filled(blocks) },
    ]
}

impl Expected {
    fn check(&self, prefix: &[u8], payload: &[&[u8]], wanted: &Wanted) -> Result<(), Error> {
        let header = object::verify_prefix(prefix)?;
        header.expect(self.history, self.object, &self.key_hash, self.length)?;
        // The entries of these blocks, as if they were a whole object's.
        let first = (self.cover().start / BLOCK_BYTES) as usize * CHECKSUM_BYTES;
        let table = first + object::prefix_bytes(self.bytes()) as usize;
        stepped::verify_parts(&prefix[first..table], payload, wanted)
    }
}

fn take_all(loans: Vec<Loan>) -> Result<Vec<LocalMut>, Error> {
    loans.into_iter().map(|loan| loan.take().map_err(|_| still_lent())).collect()
}

fn still_lent() -> Error {
    Error::new(ErrorCode::Internal, "the transfer engine kept memory after its call had returned")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deadline::Deadline;

    fn wanted() -> Wanted {
        // A waiter that never leaves.
        let (wanted, waiter) = Wanted::until(Deadline::after(std::time::Duration::from_secs(600)), "verifying");
        std::mem::forget(waiter);
        wanted
    }

    fn expected(payload: &[u8]) -> Expected {
        Expected {
            history: History(1),
            object: ObjectId(2),
            key_hash: object::key_hash("", b"k"),
            length: payload.len() as u64,
            range: 0..payload.len() as u64,
        }
    }

    fn stored(payload: &[u8]) -> Vec<u8> {
        let mut bytes = object::build_prefix(History(1), ObjectId(2), object::key_hash("", b"k"), &[payload]);
        bytes.extend_from_slice(payload);
        bytes
    }

    fn prepare(
        destination: Destination,
        expected: Expected,
    ) -> Result<(Landing, Vec<Portion>, Scratch), (Destination, Error)> {
        let mut scratch = Scratch::for_all([(&destination, &expected)].into_iter());
        Landing::prepare(destination, expected, &mut scratch).map(|(landing, portions)| (landing, portions, scratch))
    }

    fn verify(landing: Landing, scratch: Scratch) -> Result<Delivered, (Option<Destination>, Error)> {
        let prefixes = scratch.take().unwrap();
        landing.verify(&prefixes, &wanted())
    }

    /// Reads the portions from the stored form; says how many bytes that were.
    fn fill(portions: Vec<Portion>, bytes: &[u8]) -> usize {
        let mut read = 0;
        for Portion { offset, length, mut into } in portions {
            let mut at = offset as usize;
            for part in &mut into {
                let len = part.len();
                part.as_mut_slice().copy_from_slice(&bytes[at..at + len]);
                at += len;
            }
            assert_eq!(at, (offset + length) as usize, "the parts take exactly the portion");
            read += length as usize;
        }
        read
    }

    fn caller_memory(lengths: &[usize]) -> (Buffer, Destination) {
        let (buffer, parts) = Buffer::lend(vec![0xee; lengths.iter().sum()], lengths).unwrap();
        (buffer, Destination::Caller(parts))
    }

    #[test]
    fn scattered_and_whole_landings_deliver_the_payload() {
        let payload: Vec<u8> = (0..150_001u32).map(|i| (i % 251) as u8).collect();
        let (landing, parts, scratch) = prepare(Destination::Allocate, expected(&payload)).unwrap();
        fill(parts, &stored(&payload));
        let Delivered::Bytes(bytes) = verify(landing, scratch).unwrap() else { panic!("owned memory was asked for") };
        assert_eq!(bytes, payload);

        let (buffer, destination) = caller_memory(&[1, 0, 70_000, 100_000]);
        let (landing, parts, scratch) = prepare(destination, expected(&payload)).unwrap();
        fill(parts, &stored(&payload));
        assert!(matches!(verify(landing, scratch).unwrap(), Delivered::Filled(150_001)));
        let bytes = buffer.take().unwrap();
        assert_eq!(&bytes[..150_001], &payload[..]);
        assert!(bytes[150_001..].iter().all(|&b| b == 0xee), "memory beyond the object was touched");
    }

    /// Fails when the covering blocks are cut one short, or the table's window is not moved (tried both).
    #[test]
    fn a_range_delivers_its_bytes_and_reads_no_more_than_the_blocks_it_touches() {
        let payload: Vec<u8> = (0..200_001u32).map(|i| (i % 251) as u8).collect();
        let (stored, block) = (stored(&payload), BLOCK_BYTES);
        let edges = [0, 1, block - 1, block, block + 1, 2 * block, 3 * block + 1, 200_000, 200_001];
        for start in edges {
            for end in edges.into_iter().filter(|&end| end > start) {
                let expected = Expected { range: start..end, ..expected(&payload) };
                let wanted = &payload[start as usize..end as usize];
                let touched = end.div_ceil(block) - start / block;
                let (landing, portions, scratch) = prepare(Destination::Allocate, expected.clone()).unwrap();
                let read = fill(portions, &stored);
                assert!(read as u64 <= object::prefix_bytes(200_001) + touched * block, "{start}..{end}: {read}");
                let Delivered::Bytes(bytes) = verify(landing, scratch).unwrap() else { panic!("not owned") };
                assert_eq!(bytes, wanted, "{start}..{end}");

                let (buffer, destination) = caller_memory(&[wanted.len() / 3, wanted.len(), 5]);
                let (landing, portions, scratch) = prepare(destination, expected).unwrap();
                fill(portions, &stored);
                assert!(matches!(verify(landing, scratch).unwrap(), Delivered::Filled(n) if n == end - start));
                let bytes = buffer.take().unwrap();
                assert_eq!(&bytes[..wanted.len()], wanted, "{start}..{end}");
                assert!(bytes[wanted.len()..].iter().all(|&b| b == 0xee), "memory beyond the range was touched");
            }
        }
    }

    /// A byte that the caller does not get, in a block that it gets a part of, counts too (R1).
    #[test]
    fn a_range_in_a_damaged_block_is_refused() {
        let payload = vec![3u8; 200_000];
        for (at, is_touched) in [(0, false), (65_536, true), (131_071, true), (131_072, false)] {
            let mut wrong = stored(&payload);
            wrong[object::prefix_bytes(200_000) as usize + at] ^= 1;
            let expected = Expected { range: 70_000..80_000, ..expected(&payload) };
            let (landing, portions, scratch) = prepare(Destination::Allocate, expected).unwrap();
            fill(portions, &wrong);
            assert_eq!(verify(landing, scratch).is_err(), is_touched, "{at}");
        }
    }

    #[test]
    fn what_does_not_verify_gives_the_memory_back() {
        let payload = vec![3u8; 1000];
        let mut wrong = stored(&payload);
        *wrong.last_mut().unwrap() ^= 1;
        let (_buffer, destination) = caller_memory(&[400, 600]);
        let (landing, parts, scratch) = prepare(destination, expected(&payload)).unwrap();
        fill(parts, &wrong);
        let (destination, error) = verify(landing, scratch).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ChecksumMismatch);
        let (landing, parts, scratch) = prepare(destination.unwrap(), expected(&payload)).unwrap();
        fill(parts, &stored(&payload));
        verify(landing, scratch).unwrap();
    }

    #[test]
    fn memory_that_is_too_small_is_refused_and_given_back() {
        let (_buffer, destination) = caller_memory(&[10, 9]);
        let (destination, error) = prepare(destination, expected(&[0; 20])).err().unwrap();
        assert_eq!(error.code(), ErrorCode::BufferTooSmall);
        assert!(matches!(destination, Destination::Caller(parts) if parts.len() == 2));
    }

    #[test]
    fn memory_that_is_still_lent_is_not_read() {
        let (landing, parts, scratch) = prepare(Destination::Allocate, expected(&[0; 20])).unwrap();
        assert_eq!(verify(landing, scratch).unwrap_err().1.code(), ErrorCode::Internal);
        drop(parts);
        let (_buffer, destination) = caller_memory(&[20]);
        let (_landing, parts, scratch) = prepare(destination, expected(&[0; 20])).unwrap();
        assert_eq!(scratch.take().unwrap_err().code(), ErrorCode::Internal);
        drop(parts);
    }
}
