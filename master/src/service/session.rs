//! ClientService: the session stream and its unary form.
//!
//! The answer stream is the mapped request stream: what can be answered from memory is answered inline, after one
//! linearizer barrier for all requests that had arrived; what must wait (the log, a no-lease mark) is spawned and
//! merged back. Nothing waits behind a slow call, and many small answers share one HTTP/2 frame.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use futures::stream::{self, Stream, StreamExt};
use parking_lot::Mutex;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::{Error, ErrorCode, v1};
use tidepool_raft::rt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::core::{Service, wire_members};
use super::options::{DEADLINE_MAX, SESSION_CALLS_MAX};
use super::{endings, matching, puts, reads, removal};
use crate::directory::{SessionId, TenantId};

/// Requests taken from a stream at once, to share one barrier.
const REQUESTS_PER_BARRIER: usize = 128;
/// Keys of an inline answer; a larger batch is answered by its own task so that it delays nobody.
const INLINE_KEYS_MAX: usize = 2_048;
/// How long inline answers wait for the barrier before they leave the stream's path.
const INLINE_BARRIER_WAIT: Duration = Duration::from_millis(2);

/// The gRPC face for clients.
pub struct ClientFace {
    service: Arc<Service>,
}

impl ClientFace {
    /// Serves `service`.
    pub fn new(service: Arc<Service>) -> ClientFace {
        ClientFace { service }
    }
}

type ResponseStream = Pin<Box<dyn Stream<Item = Result<v1::ClientResponse, Status>> + Send>>;

#[tonic::async_trait]
impl v1::client_service_server::ClientService for ClientFace {
    type SessionStream = ResponseStream;

    async fn session(
        &self,
        request: Request<Streaming<v1::ClientRequest>>,
    ) -> Result<Response<ResponseStream>, Status> {
        let (later, waiting) = mpsc::channel(SESSION_CALLS_MAX);
        let session = Arc::new(Session {
            service: self.service.clone(),
            later: Mutex::new(Some(later)),
            calls: Arc::new(Semaphore::new(SESSION_CALLS_MAX)),
            id: AtomicU64::new(0),
        });
        let ending = session.clone();
        let inline = request
            .into_inner()
            .ready_chunks(REQUESTS_PER_BARRIER)
            .then(move |requests| {
                let session = session.clone();
                async move { session.take(requests).await }
            })
            .flat_map(stream::iter)
            // The client says no more: the answers end with the last call that is still being worked on.
            .chain(stream::poll_fn(move |_| {
                ending.later.lock().take();
                Poll::Ready(None)
            }));
        let (over, ended) = oneshot::channel::<()>();
        let mut over = Some(over);
        let answers = stream::select(inline, ReceiverStream::new(waiting).map(Ok)).chain(stream::poll_fn(move |_| {
            over.take();
            Poll::Ready(None)
        }));
        let told = members_changed(self.service.clone()).map(Ok).take_until(ended);
        Ok(Response::new(Box::pin(stream::select(answers, told))))
    }

    async fn call(&self, request: Request<v1::ClientRequest>) -> Result<Response<v1::ClientResponse>, Status> {
        let request = request.into_inner();
        Ok(Response::new(answer(&self.service, request, 0, rt::now()).await))
    }
}

/// Tells who belongs to the quorum whenever that changed: a client that outlives all the members it was started with must
/// have heard of the new ones.
fn members_changed(service: Arc<Service>) -> impl Stream<Item = v1::ClientResponse> + Send {
    let members = service.node().watch_members();
    stream::unfold((service, members), |(service, mut members)| async move {
        // An error means that the master is gone.
        members.changed().await.ok()?;
        let now = wire_members(&members.borrow_and_update());
        let body = Answer::MembersChanged(v1::MembersChanged { members: now });
        let told = v1::ClientResponse { id: 0, term: service.term(), error: None, body: Some(body) };
        Some((told, (service, members)))
    })
}

/// One client process's stream.
struct Session {
    service: Arc<Service>,
    /// Where calls that wait send their answers; none: the client says no more.
    later: Mutex<Option<mpsc::Sender<v1::ClientResponse>>>,
    calls: Arc<Semaphore>,
    /// Session said hello with on this stream; 0 before.
    id: AtomicU64,
}

impl Session {
    fn session(&self) -> SessionId {
        SessionId(self.id.load(Ordering::Relaxed))
    }

    /// Works on the requests that had arrived: spawns what must wait, answers the rest.
    async fn take(
        self: &Arc<Self>,
        requests: Vec<Result<v1::ClientRequest, Status>>,
    ) -> Vec<Result<v1::ClientResponse, Status>> {
        let arrived = rt::now();
        self.service.clients().heard(self.session());
        let mut inline = Vec::with_capacity(requests.len());
        let mut broken = None;
        for request in requests {
            match request {
                Ok(request) if is_inline(&request) => inline.push(request),
                Ok(request) => self.spawn(request, arrived).await,
                Err(status) => broken = Some(Err(status)),
            }
        }
        let mut answers = self.answer_inline(inline, arrived).await;
        answers.extend(broken);
        answers
    }

    async fn answer_inline(
        self: &Arc<Self>,
        requests: Vec<v1::ClientRequest>,
        arrived: Instant,
    ) -> Vec<Result<v1::ClientResponse, Status>> {
        if requests.is_empty() {
            return Vec::new();
        }
        let mut answers = Vec::with_capacity(requests.len());
        let barrier = rt::timeout(INLINE_BARRIER_WAIT, self.service.barrier()).await;
        for request in requests {
            let ready = match &barrier {
                Ok(Ok(tenure)) => reads::try_answer(&self.service, tenure, &request, self.session()),
                Ok(Err(error)) => Some(Err(error.clone())),
                Err(_) => None,
            };
            match ready {
                Some(result) => answers.push(Ok(finish(&self.service, &request, result, arrived))),
                None => self.spawn(request, arrived).await,
            }
        }
        answers
    }

    /// Answers in a task of its own. Waits while the session has too many calls open: the stream is then not read.
    async fn spawn(self: &Arc<Self>, request: v1::ClientRequest, arrived: Instant) {
        let Ok(permit) = self.calls.clone().acquire_owned().await else { return };
        let Some(later) = self.later.lock().clone() else { return };
        let session = self.clone();
        rt::spawn(async move { session.work(request, arrived, permit, later).await });
    }

    async fn work(
        self: Arc<Self>,
        request: v1::ClientRequest,
        arrived: Instant,
        permit: OwnedSemaphorePermit,
        later: mpsc::Sender<v1::ClientResponse>,
    ) {
        let response = answer(&self.service, request, self.id.load(Ordering::Relaxed), arrived).await;
        if let Some(Answer::Hello(hello)) = &response.body {
            self.id.store(hello.session_id, Ordering::Relaxed);
            // Its next request may come after the next look at who is idle.
            self.service.clients().heard(self.session());
        }
        drop(permit);
        // The client may have closed its stream; nobody is left to tell.
        let _closed = later.send(response).await;
    }
}

/// Reads small enough to be answered on the stream's own path.
fn is_inline(request: &v1::ClientRequest) -> bool {
    match &request.body {
        Some(Ask::Exist(r)) => r.keys.as_ref().is_none_or(|k| k.len() <= INLINE_KEYS_MAX),
        Some(Ask::Locate(r)) => r.keys.as_ref().is_none_or(|k| k.len() <= INLINE_KEYS_MAX),
        Some(Ask::ReleaseLease(_) | Ask::ReadReport(_)) => true,
        _ => false,
    }
}

/// Answers one request inside its deadline.
async fn answer(
    service: &Arc<Service>,
    request: v1::ClientRequest,
    stream_session: u64,
    arrived: Instant,
) -> v1::ClientResponse {
    let deadline = arrived + Duration::from_millis(u64::from(request.remaining_ms)).min(DEADLINE_MAX);
    let work = rt::timeout_at(deadline, dispatch(service, &request, stream_session, deadline));
    let result = match work.await {
        Ok(result) => result,
        Err(_) => Err(Error::new(
            ErrorCode::DeadlineExceeded,
            format!("{} did not end within {} ms; its outcome is unknown", name(&request), request.remaining_ms),
        )),
    };
    finish(service, &request, result, arrived)
}

async fn dispatch(
    service: &Arc<Service>,
    request: &v1::ClientRequest,
    stream_session: u64,
    deadline: Instant,
) -> Result<Answer, Error> {
    let tenant = check_envelope(service, request)?;
    let session = |named: u64| {
        let session = SessionId(if named == 0 { stream_session } else { named });
        service.clients().heard(session);
        session
    };
    match request.body.as_ref() {
        Some(Ask::Hello(r)) => service.hello(r).await.map(Answer::Hello),
        Some(Ask::PutStart(r)) => {
            puts::start(service, r, tenant, session(r.session_id), deadline).await.map(Answer::PutStart)
        }
        Some(Ask::PutEnd(r)) => endings::end(service, &r.items, session(r.session_id)).await.map(Answer::PutEnd),
        Some(Ask::PutRevoke(r)) => {
            endings::revoke(service, &r.items, session(r.session_id)).await.map(Answer::PutRevoke)
        }
        Some(Ask::Remove(r)) => removal::remove(service, r, tenant, session(r.session_id)).await.map(Answer::Remove),
        Some(Ask::RemoveMatching(r)) => {
            matching::remove(service, r, tenant, session(r.session_id)).await.map(Answer::RemoveMatching)
        }
        Some(Ask::ReplicaClear(r)) => {
            matching::clear(service, r, tenant, session(r.session_id)).await.map(Answer::ReplicaClear)
        }
        Some(Ask::Pin(r)) => matching::pin(service, r, tenant).await.map(Answer::Pin),
        Some(_) => reads::answer(service, request, tenant, session(0)).await,
        None => Err(Error::new(ErrorCode::InvalidParams, "the request has no body this version knows")),
    }
}

/// What every request must have; answers whose name space it is in.
pub(super) fn check_envelope(service: &Service, request: &v1::ClientRequest) -> Result<TenantId, Error> {
    if request.remaining_ms == 0 {
        return Err(Error::new(ErrorCode::InvalidParams, "the request carries no time (remaining_ms is 0)"));
    }
    if request.tenant.is_empty() {
        return Ok(TenantId::DEFAULT);
    }
    if let Some(tenant) = service.directory().tenant(&request.tenant) {
        return Ok(tenant);
    }
    // Only a leader knows that there is none: a standby may be behind.
    service.tenure()?;
    let name = request.tenant.chars().take(64).collect::<String>();
    let remedy = "register it with `tidepool tenant set`";
    Err(Error::new(ErrorCode::TenantNotRegistered, format!("tenant '{name}' is not registered; {remedy}")))
}

fn finish(
    service: &Service,
    request: &v1::ClientRequest,
    result: Result<Answer, Error>,
    arrived: Instant,
) -> v1::ClientResponse {
    let elapsed = rt::since(arrived);
    if elapsed > service.options().slow_call {
        service.metrics().slow_calls.inc();
        tracing::warn!(
            op = name(request),
            request_id = request.id,
            term = service.term(),
            elapsed_ms = elapsed.as_millis() as u64,
            failed = result.is_err(),
            "slow call"
        );
    }
    let term = service.term();
    match result {
        Ok(body) => v1::ClientResponse { id: request.id, term, error: None, body: Some(body) },
        Err(error) => v1::ClientResponse { id: request.id, term, error: Some(error.into()), body: None },
    }
}

fn name(request: &v1::ClientRequest) -> &'static str {
    match request.body {
        Some(Ask::Hello(_)) => "hello",
        Some(Ask::Exist(_)) => "exist",
        Some(Ask::Locate(_)) => "locate",
        Some(Ask::PutStart(_)) => "put_start",
        Some(Ask::PutEnd(_)) => "put_end",
        Some(Ask::PutRevoke(_)) => "put_revoke",
        Some(Ask::Remove(_)) => "remove",
        Some(Ask::ReleaseLease(_)) => "release_lease",
        Some(Ask::List(_)) => "list",
        Some(Ask::Stat(_)) => "stat",
        Some(Ask::ReadReport(_)) => "read_report",
        Some(Ask::RemoveMatching(_)) => "remove_matching",
        Some(Ask::ReplicaClear(_)) => "replica_clear",
        Some(Ask::Pin(_)) => "pin",
        None => "unknown",
    }
}
