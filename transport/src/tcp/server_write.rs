//! Answers a write frame: payload straight into the extents, a chunk at a time under each ticket's fence (W5).
//!
//! Items are taken in groups of a chunk's size, so that many small extents fill with one system call and at most one
//! group of tickets is open at a time. An item that is refused or fenced costs its bytes, not the frame: they are
//! thrown away and the others go on.
#![allow(unsafe_code)]

use std::io;

use tidepool_proto::{Error, ErrorCode};
use tokio::io::Interest;
use tokio::time::Instant;

use super::options::CHUNK_BYTES_MAX;
use super::server::{Buffers, End, Session};
use super::socket::{RANGES_MAX, receive, wait_until};
use super::wire::{self, Answer, Request};
use crate::access::{ReadAccess, WriteAccess};
use crate::memory::{WriteOutcome, WriteReply, WriteTicket};
use crate::stats::Stats;

const SCRATCH_BYTES: usize = 64 << 10;

/// One put of the group that is arriving.
struct Arriving {
    length: u64,
    received: u64,
    ticket: Option<Ticket>,
    status: Option<Result<WriteReply, Error>>,
}

/// A ticket that is finished exactly once: a connection that dies or is aborted finishes it as not received.
struct Ticket(Option<Box<dyn WriteTicket>>);

impl Ticket {
    fn finish(mut self, received: bool) -> WriteReply {
        self.0.take().expect("finish consumes the ticket").finish(received)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(ticket) = self.0.take() {
            // Nobody is left to be told; the datanode keeps the outcome.
            let _reply = ticket.finish(false);
        }
    }
}

pub(super) async fn answer(
    session: &Session,
    request: &Request,
    deadline: Instant,
    buffers: &mut Buffers,
) -> Result<(), End> {
    let total = buffers.accesses.iter().try_fold(0u64, |sum, access| sum.checked_add(access.length));
    if total != Some(request.payload_bytes) {
        let what = format!("write request with {} bytes of payload for items of {total:?}", request.payload_bytes);
        return Err(Error::new(ErrorCode::BadFrame, what).into());
    }
    buffers.scratch.resize(SCRATCH_BYTES, 0);
    buffers.body.clear();
    let accesses = std::mem::take(&mut buffers.accesses);
    let mut rest = &accesses[..];
    while !rest.is_empty() {
        let (group, after) = rest.split_at(group_length(rest));
        rest = after;
        let mut group: Vec<Arriving> = group.iter().map(|access| begin(session, access, deadline)).collect();
        receive_group(session, &mut group, deadline, buffers).await?;
        for item in group {
            let status = item.status.unwrap_or_else(|| Err(Error::new(ErrorCode::Internal, "put without an outcome")));
            let stored = matches!(&status, Ok(reply) if reply.outcome == WriteOutcome::Stored);
            Stats::add(if stored { &session.stats.writes } else { &session.stats.item_errors }, 1);
            wire::put_write_status(&mut buffers.body, &status);
        }
    }
    buffers.accesses = accesses;
    let answer = Answer {
        kind: request.kind,
        items: request.items,
        body_bytes: buffers.body.len(),
        id: request.id,
        payload_bytes: 0,
    };
    buffers.answer.clear();
    answer.encode(&mut buffers.answer);
    buffers.answer.extend_from_slice(&buffers.body);
    buffers.ranges.clear();
    session.send(&buffers.answer, &mut buffers.ranges, &mut buffers.window).await?;
    Ok(())
}

/// How many items arrive together: up to a chunk's bytes, at least one.
fn group_length(accesses: &[ReadAccess]) -> usize {
    let mut bytes = 0;
    let fits = |access: &&ReadAccess| {
        bytes += access.length;
        bytes <= CHUNK_BYTES_MAX as u64
    };
    accesses.iter().take(RANGES_MAX / 2).take_while(fits).count().max(1)
}

fn begin(session: &Session, access: &ReadAccess, deadline: Instant) -> Arriving {
    let mut item = Arriving { length: access.length, received: 0, ticket: None, status: None };
    if Instant::now() >= deadline {
        item.status = Some(Err(too_late()));
        return item;
    }
    let access = WriteAccess { object_id: access.object_id, replica: access.replica.clone(), length: access.length };
    match session.memory.begin_write(&access) {
        Ok(ticket) => item.ticket = Some(Ticket(Some(ticket))),
        Err(error) => item.status = Some(Err(error)),
    }
    item.finish_if_complete();
    item
}

impl Arriving {
    /// The put is over before its bytes were.
    fn abort(&mut self, error: Error) {
        if let Some(ticket) = self.ticket.take() {
            let mut reply = ticket.finish(false);
            reply.error.get_or_insert(error);
            self.status = Some(Ok(reply));
        }
    }

    fn finish_if_complete(&mut self) {
        if self.received == self.length
            && let Some(ticket) = self.ticket.take()
        {
            self.status = Some(Ok(ticket.finish(true)));
        }
    }
}

async fn receive_group(
    session: &Session,
    group: &mut [Arriving],
    deadline: Instant,
    buffers: &mut Buffers,
) -> Result<(), End> {
    let mut left: u64 = group.iter().map(|item| item.length).sum();
    let mut first = 0;
    let mut progress = Instant::now();
    while left > 0 {
        match receive_chunk(session, &mut group[first..], buffers) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(n) => {
                left -= n as u64;
                first += group[first..].iter().take_while(|item| item.received == item.length).count();
                progress = Instant::now();
                Stats::add(&session.stats.bytes_in, n as u64);
                tokio::task::coop::consume_budget().await;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let stalled = progress + session.options.stall_timeout;
                let open = group.iter().any(|item| item.ticket.is_some());
                let until = if open { stalled.min(deadline) } else { stalled };
                match wait_until(&session.stream, Interest::READABLE, until).await {
                    Err(error) if error.kind() == io::ErrorKind::TimedOut && until < stalled => {
                        group.iter_mut().for_each(|item| item.abort(too_late()));
                    }
                    result => result?,
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// One non-blocking receive of at most a chunk into the group's extents, between `enter` and `leave` of each.
fn receive_chunk(session: &Session, group: &mut [Arriving], buffers: &mut Buffers) -> io::Result<usize> {
    let ranges = &mut buffers.ranges;
    ranges.clear();
    let mut entered = 0;
    for item in group.iter_mut() {
        if ranges.bytes() >= CHUNK_BYTES_MAX as u64 {
            break;
        }
        entered += 1;
        let room = CHUNK_BYTES_MAX as u64 - ranges.bytes();
        let want = (item.length - item.received).min(room) as usize;
        match item.ticket.as_mut().and_then(|ticket| ticket.0.as_mut()).map(|ticket| ticket.enter()) {
            Some(Ok(memory)) if memory.len() as u64 == item.length => {
                ranges.push(memory.as_ptr().wrapping_add(item.received as usize), want);
                continue;
            }
            Some(Ok(memory)) => {
                let what = format!("{} bytes of memory for a put of {}", memory.len(), item.length);
                item.leave();
                item.abort(Error::new(ErrorCode::Internal, what));
            }
            Some(Err(error)) => item.abort(error),
            None => {}
        }
        let mut discard = want;
        while discard > 0 {
            let n = discard.min(SCRATCH_BYTES);
            ranges.push(buffers.scratch.as_mut_ptr(), n);
            discard -= n;
        }
    }
    // SAFETY: each extent range comes from a ticket that was entered above and is left below: its memory is mapped,
    // writable and ours until then. The scratch buffer is exclusively borrowed with `buffers`.
    let result = unsafe { receive(&session.stream, ranges, CHUNK_BYTES_MAX, &mut buffers.window) };
    let mut n = *result.as_ref().unwrap_or(&0) as u64;
    for item in &mut group[..entered] {
        let got = n.min(item.length - item.received);
        n -= got;
        item.received += got;
        if item.ticket.is_some() {
            item.leave();
            item.finish_if_complete();
        } else {
            Stats::add(&session.stats.bytes_discarded, got);
        }
    }
    result
}

impl Arriving {
    fn leave(&mut self) {
        if let Some(ticket) = self.ticket.as_mut().and_then(|ticket| ticket.0.as_mut()) {
            ticket.leave(self.received);
        }
    }
}

fn too_late() -> Error {
    Error::new(ErrorCode::DeadlineExceeded, "the put did not arrive by its deadline")
}
