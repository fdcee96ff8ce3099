//! One stream to one master: many requests in flight, answers in any order.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hashbrown::HashMap;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tidepool_proto::v1::client_response;
use tidepool_proto::v1::client_service_client::ClientServiceClient;
use tidepool_proto::{Address, Error, ErrorCode, v1};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use crate::resolver::{self, Resolve};

/// Requests queued on one stream; more are refused with RESOURCE_EXHAUSTED.
pub(crate) const QUEUE_MAX: usize = 4096;
/// Largest answer accepted.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// How often an HTTP/2 ping is sent, and how long its answer may take before the stream counts as dead.
const PING_INTERVAL: Duration = Duration::from_secs(1);
const PING_MAX: Duration = Duration::from_secs(2);
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;

/// An open stream.
pub(crate) struct Link {
    address: Address,
    requests: mpsc::Sender<v1::ClientRequest>,
    pending: Mutex<Pending>,
    closed: watch::Sender<bool>,
    /// Who belongs to the quorum, as the master at the other end last told.
    told: watch::Sender<Vec<v1::Member>>,
    reader: OnceLock<AbortHandle>,
    /// Keeps the connection; the stream alone would not.
    _channel: ClientServiceClient<Channel>,
}

#[derive(Default)]
struct Pending {
    closed: Option<String>,
    waiting: HashMap<u64, oneshot::Sender<v1::ClientResponse>>,
}

impl Link {
    /// Resolves, connects and opens the stream. The caller bounds the time.
    pub(crate) async fn dial(address: Address, resolver: Arc<dyn Resolve>) -> Result<Arc<Link>, Error> {
        let unavailable = |what: String| Error::new(ErrorCode::Unavailable, format!("master {address}: {what}"));
        let endpoint = Endpoint::from_static("http://tidepool-master")
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_MAX)
            .keep_alive_while_idle(true);
        let target = address.clone();
        let connector = tower::service_fn(move |_| {
            let (resolver, target) = (resolver.clone(), target.clone());
            async move { resolver::connect(resolver.as_ref(), &target).await.map(TokioIo::new) }
        });
        let channel = endpoint.connect_with_connector(connector).await.map_err(|e| unavailable(causes(&e)))?;
        let mut service = ClientServiceClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
        let (requests, queue) = mpsc::channel(QUEUE_MAX);
        let answers = service.session(ReceiverStream::new(queue)).await.map_err(|s| unavailable(causes(&s)))?;
        let link = Arc::new(Link {
            address: address.clone(),
            requests,
            pending: Mutex::default(),
            closed: watch::Sender::new(false),
            told: watch::Sender::new(Vec::new()),
            reader: OnceLock::new(),
            _channel: service,
        });
        let reader = tokio::spawn(read(Arc::downgrade(&link), answers.into_inner()));
        link.reader.get_or_init(|| reader.abort_handle());
        Ok(link)
    }

    /// Who is at the other end.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Queues a request; its id must be unused on this link.
    pub(crate) fn send(self: &Arc<Self>, request: v1::ClientRequest) -> Result<Waiting, Error> {
        let id = request.id;
        let (answer, receiver) = oneshot::channel();
        {
            let mut pending = self.pending.lock();
            if let Some(reason) = &pending.closed {
                return Err(self.lost(reason));
            }
            pending.waiting.insert(id, answer);
        }
        let waiting = Waiting { link: self.clone(), id, receiver, answered: false };
        self.requests.try_send(request).map_err(|refused| match refused {
            mpsc::error::TrySendError::Full(_) => Error::new(
                ErrorCode::ResourceExhausted,
                format!("master {} takes no requests: {QUEUE_MAX} are queued", self.address),
            ),
            mpsc::error::TrySendError::Closed(_) => self.lost("the stream ended"),
        })?;
        Ok(waiting)
    }

    /// Fails what waits for an answer, with a retryable error. The stream stays open.
    pub(crate) fn fail_pending(&self) {
        self.pending.lock().waiting.clear();
    }

    /// Ends the stream and fails what waits.
    pub(crate) fn close(&self, reason: &str) {
        {
            let mut pending = self.pending.lock();
            pending.closed.get_or_insert_with(|| reason.to_owned());
            pending.waiting.clear();
        }
        self.closed.send_replace(true);
        if let Some(reader) = self.reader.get() {
            reader.abort();
        }
    }

    /// Follows what the master tells of the quorum's members.
    pub(crate) fn watch_told(&self) -> watch::Receiver<Vec<v1::Member>> {
        self.told.subscribe()
    }

    /// Resolves when the stream has ended.
    pub(crate) async fn closed(&self) {
        let mut closed = self.closed.subscribe();
        // An error means that the link is being dropped, which is closed too.
        let _ = closed.wait_for(|closed| *closed).await;
    }

    fn lost(&self, reason: &str) -> Error {
        Error::new(ErrorCode::Unavailable, format!("lost the stream to master {}: {reason}", self.address))
    }

    fn reason(&self) -> String {
        self.pending.lock().closed.clone().unwrap_or_else(|| "another master leads".to_owned())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.get() {
            reader.abort();
        }
    }
}

async fn read(link: std::sync::Weak<Link>, mut answers: tonic::Streaming<v1::ClientResponse>) {
    let reason = loop {
        match answers.message().await {
            Ok(Some(answer)) => {
                let Some(link) = link.upgrade() else { return };
                if let Some(client_response::Body::MembersChanged(changed)) = answer.body {
                    link.told.send_replace(changed.members);
                    continue;
                }
                // A missing entry is a call that gave up; its late answer is dropped.
                if let Some(waiting) = link.pending.lock().waiting.remove(&answer.id) {
                    let _ = waiting.send(answer);
                }
            }
            Ok(None) => break "the master ended the stream".to_owned(),
            Err(status) => break causes(&status),
        }
    };
    if let Some(link) = link.upgrade() {
        link.close(&reason);
    }
}

/// A request on its way.
pub(crate) struct Waiting {
    link: Arc<Link>,
    id: u64,
    receiver: oneshot::Receiver<v1::ClientResponse>,
    answered: bool,
}

impl Waiting {
    /// The answer, or that none will come.
    pub(crate) async fn answer(&mut self) -> Result<v1::ClientResponse, Error> {
        let answer = (&mut self.receiver).await;
        self.answered = true;
        answer.map_err(|_| self.link.lost(&self.link.reason()))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.answered {
            self.link.pending.lock().waiting.remove(&self.id);
        }
    }
}

/// An error with its causes, on one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}
