//! One request to whoever leads, repeated inside the caller's deadline.
//!
//! The repeat carries what makes it recognisable (token, object id, session sequence), so this loop may send it
//! again after any failure that says nothing about the outcome. Whether an earlier attempt may have been executed
//! is told to the caller (`uncertain`).

use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::clock::BootInstant;
use tidepool_proto::v1::{client_request, client_response};
use tidepool_proto::{Error, ErrorCode, History, v1};
use tokio::sync::Semaphore;

use crate::backoff::Backoff;
use crate::deadline::Deadline;
use crate::metrics::Metrics;
use crate::quorum::{Leader, Quorum};

/// Requests of one client that may wait for an answer at once; more wait for their turn inside their deadline.
pub(crate) const IN_FLIGHT_MAX: usize = 1024;
/// An answer that takes longer makes the client ask the other members whether one of them leads by now.
const STALL_AFTER: Duration = Duration::from_millis(50);
/// How often it asks again.
const STALL_INTERVAL: Duration = Duration::from_millis(20);

/// Sends requests for all of a client's calls.
pub(crate) struct Caller {
    pub(crate) quorum: Arc<Quorum>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tenant: String,
    in_flight: Semaphore,
}

/// An answer, and what it may be held against.
pub(crate) struct Answer {
    pub(crate) body: client_response::Body,
    pub(crate) leader: Arc<Leader>,
    /// When the answered request was sent: leases count from here (T2).
    pub(crate) sent: BootInstant,
    /// An earlier attempt may have been executed.
    pub(crate) uncertain: bool,
}

/// No answer.
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// An attempt may have been executed.
    pub(crate) uncertain: bool,
}

impl Caller {
    pub(crate) fn new(quorum: Arc<Quorum>, metrics: Arc<Metrics>, tenant: String) -> Caller {
        Caller { quorum, metrics, tenant, in_flight: Semaphore::new(IN_FLIGHT_MAX) }
    }

    /// Sends what `body` makes for the present leader until one answers, a failure is final or the deadline passes.
    pub(crate) async fn call(
        &self,
        op: &'static str,
        deadline: Deadline,
        body: impl Fn(&Leader) -> client_request::Body,
    ) -> Result<Answer, Failure> {
        self.call_while(op, deadline, body, |_, _| Ok(())).await
    }

    /// As `call`, but asks `may_send(leader, uncertain)` before each attempt.
    pub(crate) async fn call_while(
        &self,
        op: &'static str,
        deadline: Deadline,
        body: impl Fn(&Leader) -> client_request::Body,
        may_send: impl Fn(&Leader, bool) -> Result<(), Error>,
    ) -> Result<Answer, Failure> {
        let certain = |error: Error| Failure { error, uncertain: false };
        let _permit = deadline
            .bound(self.in_flight.acquire())
            .await
            .ok_or_else(|| {
                certain(deadline.error(&format!("{op} waited for one of {IN_FLIGHT_MAX} places in flight")))
            })?
            .map_err(|_| certain(Error::new(ErrorCode::Unavailable, "the client is shutting down")))?;
        let mut uncertain = false;
        let mut backoff = Backoff::new();
        let mut was_sent_on = false;
        // What a master said last: more than that the time is over.
        let mut said: Option<Error> = None;
        loop {
            let leader =
                self.quorum.leader(deadline).await.map_err(|error| self.ended(Failure { error, uncertain }))?;
            may_send(&leader, uncertain).map_err(|error| Failure { error, uncertain })?;
            let failure = match self.attempt(op, deadline, &leader, body(&leader)).await {
                Ok((body, sent)) => return Ok(Answer { body, leader, sent, uncertain }),
                Err(failure) => failure,
            };
            uncertain |= failure.uncertain;
            let error = failure.error;
            tracing::debug!(op, master = %leader.link.address(), %error, uncertain, "attempt failed");
            match error.code() {
                ErrorCode::NotLeader => {
                    self.metrics.not_leader_answers.add(1);
                    self.quorum.follow(error.leader());
                    self.quorum.retract(&leader);
                }
                ErrorCode::SessionUnknown => self.quorum.retract(&leader),
                ErrorCode::Unavailable => self.quorum.stalled(),
                ErrorCode::ResourceExhausted | ErrorCode::DeadlineExceeded => {}
                _ => return Err(Failure { error, uncertain }),
            }
            let advice_ms = error.retry_after_ms();
            said = match (error.code(), said) {
                (ErrorCode::DeadlineExceeded, Some(said)) => Some(said),
                _ => Some(error),
            };
            // After a handover the search for who leads now is pause enough; one that says it leads, and then refuses again, is not.
            let is_sent_on = said.as_ref().is_some_and(|error| error.code() == ErrorCode::NotLeader) && advice_ms == 0;
            if is_sent_on && !std::mem::replace(&mut was_sent_on, true) && !deadline.expired() {
                self.metrics.requests_retried.add(1);
                continue;
            }
            if deadline.expired() || !deadline.sleep(backoff.next(advice_ms)).await {
                let said = said.map(|error| error.to_string()).unwrap_or_default();
                let last = format!("{op} was tried again; the last failure was: {said}");
                return Err(self.ended(Failure { error: deadline.error(&last), uncertain }));
            }
            self.metrics.requests_retried.add(1);
        }
    }

    /// As `call`, for what names ids of one history: in another one they may name somebody else's.
    pub(crate) async fn call_in(
        &self,
        history: History,
        op: &'static str,
        deadline: Deadline,
        body: impl Fn(&Leader) -> client_request::Body,
    ) -> Result<Answer, Failure> {
        self.call_while(op, deadline, body, |leader, _| match leader.history == history {
            true => Ok(()),
            false => Err(Error::new(
                ErrorCode::GrantLost,
                format!("{op}: the cluster was restored since; what was granted before is gone"),
            )),
        })
        .await
    }

    /// One attempt on one stream.
    async fn attempt(
        &self,
        op: &'static str,
        deadline: Deadline,
        leader: &Leader,
        body: client_request::Body,
    ) -> Result<(client_response::Body, BootInstant), Failure> {
        let certain = |error: Error| Failure { error, uncertain: false };
        let maybe = |error: Error| Failure { error, uncertain: true };
        let remaining_ms = deadline.remaining_ms().ok_or_else(|| certain(deadline.error(op)))?;
        let id = self.quorum.next_id();
        let request = v1::ClientRequest { id, remaining_ms, tenant: self.tenant.clone(), body: Some(body) };
        let sent = BootInstant::now();
        let mut waiting = leader.link.send(request).map_err(certain)?;
        self.metrics.requests_sent.add(1);
        tracing::trace!(id, op, "sent");
        let answer = {
            let mut answer = std::pin::pin!(waiting.answer());
            let mut wait = deadline.within(STALL_AFTER);
            loop {
                match wait.bound(&mut answer).await {
                    Some(answer) => break answer.map_err(maybe)?,
                    None if deadline.expired() => {
                        self.quorum.stalled();
                        return Err(maybe(deadline.error(&format!("{op} waited for {}", leader.link.address()))));
                    }
                    None => {
                        self.quorum.stalled();
                        wait = deadline.within(STALL_INTERVAL);
                    }
                }
            }
        };
        match (answer.error, answer.body) {
            (Some(error), _) => {
                let error = Error::from(error);
                // These say nothing about whether the request took effect; the others are refusals.
                let uncertain = matches!(
                    error.code(),
                    ErrorCode::Unavailable | ErrorCode::DeadlineExceeded | ErrorCode::NotLeader | ErrorCode::Internal
                );
                Err(Failure { error, uncertain })
            }
            (None, Some(body)) => {
                self.quorum.check_term(leader, answer.term).map_err(maybe)?;
                Ok((body, sent))
            }
            (None, None) => Err(maybe(Error::new(
                ErrorCode::Internal,
                format!("master {} answered {op} (request {id}) with nothing", leader.link.address()),
            ))),
        }
    }

    fn ended(&self, failure: Failure) -> Failure {
        if failure.error.code() == ErrorCode::DeadlineExceeded {
            self.metrics.deadlines_exceeded.add(1);
        }
        failure
    }
}

/// The error of a master that answered with another kind of message, or with another number of results.
pub(crate) fn malformed(op: &str, what: &str) -> Error {
    Error::new(ErrorCode::Internal, format!("the master's answer to {op} is malformed: {what}"))
}
