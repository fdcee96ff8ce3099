//! What every engine must do, as tests over a factory of (engine, peer) pairs.
//!
//! An engine's test file makes a [`Factory`] and calls [`crate::conformance_suite!`], which turns every check into a
//! test of its own. What only one kind of path can do (garbage on a socket, a link with a delay) is tested beside that
//! engine.

mod checks;
mod faults;
mod memory;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tidepool_proto::Address;

pub use checks::*;
pub use faults::*;
pub use memory::{ABORTED, INCARNATION, MAC, STORED, TestMemory};

use crate::access::{ReadAccess, WriteAccess};
use crate::engine::{Engine, ReadItem, WriteItem};
use crate::local::{Buffer, LocalMut, LocalRef};
use crate::memory::Memory;

/// Makes pairs for the checks.
pub trait Factory: Send + Sync {
    /// A server over `memory` and an engine that reaches it.
    fn pair(&self, memory: Arc<dyn Memory>) -> BoxFuture<'_, Pair>;
}

/// A server and an engine that reaches it.
pub struct Pair {
    /// The engine under test.
    pub engine: Arc<dyn Engine>,
    /// Where the server is.
    pub peer: Address,
    /// The server; it serves until this is dropped.
    pub server: Box<dyn Server>,
}

/// A running server. It must run apart from the engine's runtime: checks block in its memory, as a stopped process
/// would.
pub trait Server: Send + Sync {
    /// Cuts it off as a crash would: connections end without a word, nothing listens any more.
    fn kill(&self);
}

/// A deadline that a healthy transfer never meets.
pub fn patient() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// Bytes that differ at every position and from seed to seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(length);
    out
}

/// A read of a whole extent into one slice.
pub fn read_item(memory: &TestMemory, id: u64, offset: u64, into: Vec<LocalMut>) -> ReadItem {
    let length = into.iter().map(|part| part.len() as u64).sum();
    ReadItem {
        access: ReadAccess { object_id: id, replica: memory.replica(id, offset, length), offset: 0, length },
        into,
    }
}

/// A write of a whole extent.
pub fn write_item(memory: &TestMemory, id: u64, offset: u64, from: Vec<LocalRef>) -> WriteItem {
    let length = from.iter().map(|part| part.len() as u64).sum();
    WriteItem { access: WriteAccess { object_id: id, replica: memory.replica(id, offset, length), length }, from }
}

/// A buffer of `length` bytes that starts `skew` bytes into an allocation.
pub fn skewed(length: usize, skew: usize) -> (Buffer, LocalMut) {
    let (buffer, mut parts) = Buffer::lend(vec![0; length + skew], &[skew, length]).expect("as long as its parts");
    (buffer, parts.pop().expect("two parts"))
}

/// The bytes of a buffer whose parts were dropped; panics if the engine kept one.
pub fn taken(buffer: Buffer) -> Vec<u8> {
    buffer.take().expect("the engine kept a loan after the call returned (R4)")
}

/// One test for each check of the suite. The argument is an expression that makes the factory.
#[macro_export]
macro_rules! conformance_suite {
    ($factory:expr) => {
        $crate::conformance_suite!(@ $factory;
            case_053_all_sizes_are_byte_exact
            case_053_sizes_around_powers_of_two_are_byte_exact
            case_112_duplicate_items_each_get_their_own_bytes
            mixed_failures_stay_with_their_items
            scattered_slices_fill_in_order
            ranges_of_an_extent_are_read
            many_batches_at_once_keep_apart
            oversized_batches_are_split
            bad_items_are_refused_before_they_travel
            case_085_a_stuck_peer_costs_the_deadline_and_not_a_byte_more
            a_dropped_call_gives_its_memory_back
            a_fence_stops_a_put_at_the_next_chunk
            a_killed_peer_fails_its_items_and_finishes_its_tickets
        );
    };
    (@ $factory:expr; $($check:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
            async fn $check() {
                $crate::conformance::$check(&$factory).await;
            }
        )+
    };
}
