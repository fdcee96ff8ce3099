//! The datanode's side of the transport seam: who may read and write which bytes, asked by an engine for every item.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tidepool_proto::capability::{Capability, Verb};
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{Error, ErrorCode, planted};
use tidepool_transport::{Memory, RawSlice, ReadAccess, ReadGuard, WriteAccess, WriteOutcome, WriteReply, WriteTicket};

use crate::life::Life;
use crate::metrics::{Direction, Metrics};
use crate::segment::Segment;
use crate::verify::{Expected, Verifier};
use crate::writes::{End, NotOpened, OpenWrite};

/// The memory of the current life, or none.
pub(crate) struct Payload {
    current: RwLock<Option<Arc<Life>>>,
    metrics: Arc<Metrics>,
}

impl Payload {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Payload {
        Payload { current: RwLock::new(None), metrics }
    }

    /// The life that is served.
    pub(crate) fn life(&self) -> Option<Arc<Life>> {
        self.current.read().clone()
    }

    /// Serves another life, or none. The one before is ended and returned.
    pub(crate) fn replace(&self, life: Option<Arc<Life>>) -> Option<Arc<Life>> {
        let before = std::mem::replace(&mut *self.current.write(), life);
        if let Some(before) = &before {
            before.end();
        }
        before
    }

    fn serving(&self) -> Result<Arc<Life>, Error> {
        self.life().ok_or_else(|| {
            Error::new(ErrorCode::Unavailable, "this datanode is not registered with a master at the moment")
                .retry_after(100)
        })
    }

    fn try_read(&self, request: &ReadAccess) -> Result<ReadGuard, Error> {
        let life = self.serving()?;
        let (capability, segment) = life.authorise(Verb::Read, request.object_id, &request.replica)?;
        // Zero stands for "no lease": the reader verifies what it gets, which readers do in any case (L5, R1).
        if capability.expires.0 != 0 {
            check_expiry(&life, &capability)?;
        }
        let inside = request.offset.checked_add(request.length).is_some_and(|end| end <= capability.length);
        let guard = if inside { segment.read_guard(capability.offset + request.offset, request.length) } else { None };
        guard.ok_or_else(|| {
            Error::new(
                ErrorCode::OutOfBounds,
                format!(
                    "replica {}: {} bytes at {} do not lie within its {} bytes",
                    capability.replica, request.length, request.offset, capability.length
                ),
            )
        })
    }

    /// Opens an extent for an object whose header names this history, as masters tell it.
    pub(crate) fn begin_write_of(&self, request: &WriteAccess, history: u64) -> Result<Box<dyn WriteTicket>, Error> {
        self.try_begin_write(request, history).inspect_err(|error| self.metrics.refused(Direction::Write, error.code()))
    }

    fn try_begin_write(&self, request: &WriteAccess, history: u64) -> Result<Box<dyn WriteTicket>, Error> {
        let life = self.serving()?;
        let (grant, segment) = life.authorise(Verb::Write, request.object_id, &request.replica)?;
        if request.length != grant.length {
            return Err(Error::new(
                ErrorCode::OutOfBounds,
                format!(
                    "replica {}: {} bytes announced for an extent of {}",
                    grant.replica, request.length, grant.length
                ),
            ));
        }
        match life.writes().begin(&grant) {
            Ok(open) => {
                let history = life.history_of(history);
                let expected = Expected { history, object: grant.object, stored_bytes: grant.length };
                let segment = segment.clone();
                Ok(Box::new(Ticket {
                    life,
                    segment,
                    open,
                    grant,
                    verifier: Verifier::new(expected),
                    verifying: Duration::ZERO,
                    failure: None,
                    finished: false,
                    metrics: self.metrics.clone(),
                }))
            }
            Err(NotOpened::Ended(end)) => Ok(Box::new(Settled::new(&life, &grant, end, ended_error(&grant)))),
            Err(NotOpened::Fenced) => Ok(Box::new(Settled::new(&life, &grant, End::Aborted, fenced_error(&grant)))),
            Err(reason) => Err(self.not_opened(&life, &grant, reason)),
        }
    }

    fn not_opened(&self, life: &Life, grant: &Capability, reason: NotOpened) -> Error {
        let replica = grant.replica;
        match reason {
            NotOpened::Expired => expired(grant, life),
            NotOpened::Ended(_) => ended_error(grant),
            NotOpened::Fenced => fenced_error(grant),
            NotOpened::TooOld => Error::new(
                ErrorCode::GrantLost,
                format!("replica {replica}: its grant is too old to be told from a replay; put the object again"),
            ),
            NotOpened::Over => Error::new(
                ErrorCode::GrantLost,
                format!("replica {replica}: the life that granted it has ended on this datanode; put the object again"),
            ),
            NotOpened::Busy => {
                Error::new(ErrorCode::PutInProgress, format!("replica {replica}: another connection is writing it"))
            }
            NotOpened::Overlaps(other) => {
                tracing::error!(%replica, %other, segment = %grant.segment, offset = grant.offset, "ONE-WRITER: two open grants overlap");
                Error::new(
                    ErrorCode::Internal,
                    format!(
                        "replica {replica}: its extent overlaps that of replica {other}, which is being written; refused"
                    ),
                )
            }
            NotOpened::UnderVerification => {
                Error::new(ErrorCode::ResourceExhausted, format!("replica {replica}: its extent is being verified"))
                    .retry_after(10)
            }
            NotOpened::TooMany => Error::new(
                ErrorCode::ResourceExhausted,
                format!("replica {replica}: too many writes are open (limit open_writes_max)"),
            )
            .retry_after(10),
        }
    }
}

impl Memory for Payload {
    fn read(&self, request: &ReadAccess) -> Result<ReadGuard, Error> {
        match self.try_read(request) {
            Ok(guard) => {
                self.metrics.read_items.inc();
                self.metrics.read_bytes.inc_by(request.length);
                Ok(guard)
            }
            Err(error) => {
                self.metrics.refused(Direction::Read, error.code());
                Err(error)
            }
        }
    }

    fn begin_write(&self, request: &WriteAccess) -> Result<Box<dyn WriteTicket>, Error> {
        // A client puts into the present history.
        self.begin_write_of(request, 0)
    }
}

fn check_expiry(life: &Life, capability: &Capability) -> Result<(), Error> {
    match life.writes().clock().now() {
        Some(now) if capability.expires < now => Err(expired(capability, life)),
        // Without a leader nobody can say: accepting longer is harmless, readers verify; refusing early is not (W2).
        _ => Ok(()),
    }
}

fn expired(capability: &Capability, life: &Life) -> Error {
    let ago = life.writes().clock().at(BootInstant::now()).0.saturating_sub(capability.expires.0);
    Error::new(
        ErrorCode::CapabilityRefused,
        format!(
            "replica {}: its capability expired {ago} ms ago in log time; ask the master again",
            capability.replica
        ),
    )
}

fn ended_error(grant: &Capability) -> Error {
    Error::new(ErrorCode::AlreadyEnded, format!("replica {}: its grant was used already", grant.replica))
}

fn fenced_error(grant: &Capability) -> Error {
    Error::new(ErrorCode::GrantLost, format!("replica {}: the master took the grant back", grant.replica))
}

fn reply(life: &Life, grant: &Capability, end: End, error: Option<Error>) -> WriteReply {
    let (verb, outcome) = match end {
        End::Stored => (Verb::Stored, WriteOutcome::Stored),
        End::Aborted => (Verb::Aborted, WriteOutcome::Aborted),
    };
    let error = if end == End::Stored { None } else { error };
    WriteReply { outcome, error, proof: life.sign(&Capability { verb, ..*grant }) }
}

/// A put that is arriving. The extent is touched between `enter` and `leave` only; blocks are verified in `leave`, as they came.
struct Ticket {
    life: Arc<Life>,
    segment: Arc<Segment>,
    open: Arc<OpenWrite>,
    grant: Capability,
    verifier: Verifier,
    verifying: Duration,
    failure: Option<Error>,
    finished: bool,
    metrics: Arc<Metrics>,
}

impl Ticket {
    fn step(&mut self) -> Result<(), Error> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        if self.life.is_over() {
            let incarnation = self.grant.incarnation;
            return Err(Error::new(ErrorCode::Fenced, format!("incarnation {incarnation} of this node is over")));
        }
        if self.open.enter() { Ok(()) } else { Err(fenced_error(&self.grant)) }
    }

    /// Only inside a step.
    fn verify(
        &mut self,
        arrived: u64,
        check: impl FnOnce(&mut Verifier, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let started = Instant::now();
        let arrived = arrived.min(self.grant.length);
        let (segment, verifier) = (&self.segment, &mut self.verifier);
        let checked = segment.look(self.open.claim(), arrived, |bytes| check(verifier, bytes));
        self.verifying += started.elapsed();
        checked.unwrap_or_else(|| Err(Error::new(ErrorCode::Internal, "the extent left its segment")))
    }

    fn end(&mut self, received: bool) -> (End, Option<Error>) {
        self.finished = true;
        let verified = match self.step() {
            Ok(()) if received && planted!(SkipVerification) => Ok(()),
            Ok(()) if received => self.verify(self.grant.length, |verifier, bytes| verifier.complete(bytes)),
            Ok(()) => Err(Error::new(
                ErrorCode::TransferFailed,
                format!("replica {}: the sender stopped before its last byte", self.grant.replica),
            )),
            Err(error) => Err(error),
        };
        let wanted = if verified.is_ok() { End::Stored } else { End::Aborted };
        let end = self.life.writes().finish(&self.open, wanted);
        let error = match verified {
            Ok(()) => (end == End::Aborted).then(|| fenced_error(&self.grant)),
            Err(error) => Some(error),
        };
        self.count(end, error.as_ref());
        (end, error)
    }

    fn count(&self, end: End, error: Option<&Error>) {
        self.metrics.verified_on_arrival(self.verifier.checked_bytes(), self.verifying);
        match end {
            End::Stored => {
                self.metrics.stored_items.inc();
                self.metrics.stored_bytes.inc_by(self.grant.length);
            }
            End::Aborted => self.metrics.aborted_items.inc(),
        }
        if let Some(error) = error {
            self.metrics.refused(Direction::Write, error.code());
            if error.code() == ErrorCode::ChecksumMismatch {
                self.metrics.verification_failed();
                tracing::warn!(object = %self.grant.object, replica = %self.grant.replica, %error, "a put failed verification");
            }
        }
    }
}

impl WriteTicket for Ticket {
    fn enter(&mut self) -> Result<RawSlice, Error> {
        self.step()?;
        match self.segment.writable(self.open.claim()) {
            Some(slice) => Ok(slice),
            None => {
                self.life.writes().leave(&self.open);
                Err(Error::new(ErrorCode::Internal, "the extent left its segment"))
            }
        }
    }

    fn leave(&mut self, received: u64) {
        if !planted!(SkipVerification)
            && let Err(error) = self.verify(received, Verifier::advance)
        {
            self.failure = Some(error);
        }
        self.life.writes().leave(&self.open);
    }

    fn finish(mut self: Box<Self>, received: bool) -> WriteReply {
        let (end, error) = self.end(received);
        reply(&self.life, &self.grant, end, error)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.finished {
            self.end(false);
        }
    }
}

/// A grant that ended before this request: nothing is written, and the first answer is given again.
struct Settled {
    reply: WriteReply,
    refusal: Error,
}

impl Settled {
    fn new(life: &Life, grant: &Capability, end: End, refusal: Error) -> Settled {
        Settled { reply: reply(life, grant, end, Some(refusal.clone())), refusal }
    }
}

impl WriteTicket for Settled {
    fn enter(&mut self) -> Result<RawSlice, Error> {
        Err(self.refusal.clone())
    }
    fn leave(&mut self, _received: u64) {}
    fn finish(self: Box<Self>, _received: bool) -> WriteReply {
        self.reply
    }
}

#[cfg(test)]
#[path = "payload_tests.rs"]
mod tests;
