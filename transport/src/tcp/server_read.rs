//! Answers a read frame: statuses, then the extents' bytes straight from registered memory.

use tidepool_proto::{Error, ErrorCode};
use tokio::time::Instant;

use super::server::{Buffers, End, Session};
use super::wire::{self, Answer, Request};
use crate::access::ReadAccess;
use crate::memory::ReadGuard;
use crate::stats::Stats;

pub(super) async fn answer(
    session: &Session,
    request: &Request,
    deadline: Instant,
    buffers: &mut Buffers,
) -> Result<(), End> {
    let late = Instant::now() >= deadline;
    let mut guards = Vec::with_capacity(request.items);
    let mut statuses = Vec::with_capacity(request.items);
    buffers.ranges.clear();
    for access in &buffers.accesses {
        let read = if late { Err(too_late()) } else { open(session, access) };
        statuses.push(read.map(|guard| {
            buffers.ranges.push(guard.as_ptr(), guard.len());
            guards.push(guard);
        }));
    }
    Stats::add(&session.stats.reads, guards.len() as u64);
    Stats::add(&session.stats.item_errors, (request.items - guards.len()) as u64);
    buffers.body.clear();
    wire::put_read_statuses(&mut buffers.body, &statuses);
    let answer = Answer {
        kind: request.kind,
        items: request.items,
        body_bytes: buffers.body.len(),
        id: request.id,
        payload_bytes: buffers.ranges.bytes(),
    };
    buffers.answer.clear();
    answer.encode(&mut buffers.answer);
    buffers.answer.extend_from_slice(&buffers.body);
    session.send(&buffers.answer, &mut buffers.ranges, &mut buffers.window).await?;
    drop(guards);
    Ok(())
}

fn open(session: &Session, access: &ReadAccess) -> Result<ReadGuard, Error> {
    let guard = session.memory.read(access)?;
    if guard.len() as u64 != access.length {
        let what = format!("{} bytes of memory for a read of {}", guard.len(), access.length);
        return Err(Error::new(ErrorCode::Internal, what));
    }
    Ok(guard)
}

fn too_late() -> Error {
    Error::new(ErrorCode::DeadlineExceeded, "the request reached the datanode after its deadline")
}
