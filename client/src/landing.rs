//! Where a read lands, and the check that makes it a result: header, id, key hash, table, every block (I2, R1).

use std::ops::Range;

use bytes::Bytes;
use tidepool_proto::object::{self, KeyHash};
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

/// Which object must arrive.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
    pub(crate) history: History,
    pub(crate) object: ObjectId,
    pub(crate) key_hash: KeyHash,
    pub(crate) length: u64,
}

/// Memory that is lent to an engine.
pub(crate) struct Landing {
    expected: Expected,
    memory: Memory,
}

enum Memory {
    /// Prefix and payload in one allocation.
    Owned(Buffer),
    /// The prefix is in a [`Scratch`].
    Caller { prefix: Range<usize>, loans: Vec<Loan> },
}

/// Where the prefixes of a batch land whose payloads go into the callers' memory: one piece for all.
pub(crate) struct Scratch {
    buffer: Buffer,
    parts: std::vec::IntoIter<LocalMut>,
    at: usize,
}

impl Scratch {
    /// Room for the prefixes of these, in this order.
    pub(crate) fn for_all<'a>(fetches: impl Iterator<Item = (&'a Destination, u64)>) -> Scratch {
        let room = |(destination, length): (&Destination, u64)| match destination {
            Destination::Caller(_) if length <= object::OBJECT_BYTES_MAX => object::prefix_bytes(length) as usize,
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

    /// All prefixes, once the engine has let go of them.
    pub(crate) fn take(self) -> Result<Vec<u8>, Error> {
        drop(self.parts);
        self.buffer.take().map_err(|_| still_lent())
    }
}

impl Landing {
    /// Lends memory for an object of this length; the parts take header, table and payload in order.
    pub(crate) fn prepare(
        destination: Destination,
        expected: Expected,
        scratch: &mut Scratch,
    ) -> Result<(Landing, Vec<LocalMut>), (Destination, Error)> {
        let (prefix, prefix_part) = scratch.next();
        let length = expected.length;
        let too_large = |what: String| Error::new(ErrorCode::InvalidParams, what);
        let (Ok(prefix_bytes), Ok(payload_bytes)) =
            (usize::try_from(object::prefix_bytes(length.min(object::OBJECT_BYTES_MAX))), usize::try_from(length))
        else {
            return Err((
                destination,
                too_large(format!("an object of {length} bytes does not fit this host's memory")),
            ));
        };
        if length > object::OBJECT_BYTES_MAX {
            let limit = object::OBJECT_BYTES_MAX;
            return Err((destination, too_large(format!("object of {length} bytes; the limit is {limit}"))));
        }
        match destination {
            Destination::Allocate => {
                let lent = Buffer::lend(vec![0; prefix_bytes + payload_bytes], &[prefix_bytes, payload_bytes]);
                let (buffer, parts) = lent.expect("the parts add up to the allocation");
                Ok((Landing { expected, memory: Memory::Owned(buffer) }, parts))
            }
            Destination::Caller(memory) => {
                let room: u64 = memory.iter().map(|part| part.len() as u64).sum();
                if room < length {
                    let what = format!("the object has {length} bytes, the caller's memory {room}");
                    return Err((Destination::Caller(memory), Error::new(ErrorCode::BufferTooSmall, what)));
                }
                let mut parts = Vec::with_capacity(1 + memory.len());
                parts.push(prefix_part);
                let mut rest = payload_bytes;
                let mut loans = Vec::with_capacity(memory.len());
                for whole in memory {
                    let (loan, part) = Loan::new(whole);
                    loans.push(loan);
                    let (part, _surplus) = part.split_at(rest);
                    rest -= part.len();
                    if !part.is_empty() {
                        parts.push(part);
                    }
                }
                Ok((Landing { expected, memory: Memory::Caller { prefix, loans } }, parts))
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

    /// Takes the memory back and believes nothing in it that does not verify. `prefixes` is what the scratch gave back.
    pub(crate) fn verify(self, prefixes: &[u8], wanted: &Wanted) -> Result<Delivered, (Option<Destination>, Error)> {
        let expected = self.expected;
        match self.memory {
            Memory::Owned(buffer) => {
                let bytes = buffer.take().map_err(|_| (Some(Destination::Allocate), still_lent()))?;
                let at = object::prefix_bytes(expected.length) as usize;
                let checked = expected.check(&bytes[..at], &[&bytes[at..]], wanted);
                checked.map_err(|error| (Some(Destination::Allocate), error))?;
                Ok(Delivered::Bytes(Bytes::from(bytes).slice(at..)))
            }
            Memory::Caller { prefix, loans } => {
                let memory = take_all(loans).map_err(|error| (None, error))?;
                let mut rest = expected.length as usize;
                let parts: Vec<&[u8]> = memory
                    .iter()
                    .map(|part| {
                        let bytes = &part.as_slice()[..rest.min(part.len())];
                        rest -= bytes.len();
                        bytes
                    })
                    .collect();
                match expected.check(&prefixes[prefix], &parts, wanted) {
                    Ok(()) => Ok(Delivered::Filled(expected.length)),
                    Err(error) => Err((Some(Destination::Caller(memory)), error)),
                }
            }
        }
    }
}

impl Expected {
    fn check(&self, prefix: &[u8], payload: &[&[u8]], wanted: &Wanted) -> Result<(), Error> {
        let header = object::verify_prefix(prefix)?;
        header.expect(self.history, self.object, &self.key_hash, self.length)?;
        stepped::verify_parts(prefix, payload, wanted)
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
    ) -> Result<(Landing, Vec<LocalMut>, Scratch), (Destination, Error)> {
        let mut scratch = Scratch::for_all([(&destination, expected.length)].into_iter());
        Landing::prepare(destination, expected, &mut scratch).map(|(landing, parts)| (landing, parts, scratch))
    }

    fn verify(landing: Landing, scratch: Scratch) -> Result<Delivered, (Option<Destination>, Error)> {
        let prefixes = scratch.take().unwrap();
        landing.verify(&prefixes, &wanted())
    }

    fn fill(mut parts: Vec<LocalMut>, bytes: &[u8]) {
        let mut at = 0;
        for part in &mut parts {
            let len = part.len();
            part.as_mut_slice().copy_from_slice(&bytes[at..at + len]);
            at += len;
        }
        assert_eq!(at, bytes.len(), "the parts take exactly the stored form");
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
