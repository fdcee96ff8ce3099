//! One connection to a peer: a task that sends frames, a task that takes the answers, and the exchanges between them.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;

use super::exchange::{Exchange, Sent, WriteExchange};
use super::options::PADDING_BYTES_MAX;
use super::socket::{Ranges, Window, send_bytes, wait};
use super::wire::{self, Answer, HEADER_BYTES, Kind, Request};
use crate::stats::Stats;

/// Requests sent with one system call, in bytes of heads.
const HEADS_BYTES_TARGET: usize = 64 << 10;
/// How often a waiting reader looks whether its peer is stuck.
const STALL_CHECK: Duration = Duration::from_millis(250);
const SCRATCH_BYTES: usize = 64 << 10;

/// For sends whose stall the reader notices: the answer that never comes.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 3600);

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Called once when the connection has ended.
pub(super) type OnEnd = Box<dyn FnOnce(&Ended<'_>) + Send>;

/// How a connection ended.
pub(super) struct Ended<'a> {
    /// Why.
    pub(super) error: &'a Error,
    /// When it was opened.
    pub(super) opened: Instant,
    /// Whether it ever was answered.
    pub(super) answered: bool,
    /// Whether this side left it, which says nothing of the peer.
    pub(super) left: bool,
}

/// A live or ended connection.
pub(super) struct Connection {
    shared: Arc<Shared>,
    queue: mpsc::Sender<Queued>,
}

struct Shared {
    peer: String,
    stream: TcpStream,
    lane: Mutex<Lane>,
    permits: Arc<Semaphore>,
    closed: AtomicBool,
    leaving: AtomicBool,
    closing: Notify,
    answered: AtomicBool,
    pending_bytes: AtomicU64,
    opened: Instant,
    on_end: Mutex<Option<OnEnd>>,
    stall_timeout: Duration,
    stats: Arc<Stats>,
}

#[derive(Default)]
struct Lane {
    in_flight: VecDeque<InFlight>,
    next_id: u64,
    /// Nothing more is sent; what was sent whole is still answered.
    leaving: Option<Error>,
    closed: Option<Error>,
}

struct Queued {
    exchange: Arc<Exchange>,
    _permit: OwnedSemaphorePermit,
}

struct InFlight {
    id: u64,
    exchange: Arc<Exchange>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// Takes over a stream whose handshake is done.
    pub(super) fn start(
        peer: String,
        stream: TcpStream,
        in_flight_frames_max: usize,
        stall_timeout: Duration,
        stats: Arc<Stats>,
        on_end: OnEnd,
    ) -> Arc<Connection> {
        let (queue, queued) = mpsc::channel(in_flight_frames_max);
        let shared = Arc::new(Shared {
            peer,
            stream,
            lane: Mutex::default(),
            permits: Arc::new(Semaphore::new(in_flight_frames_max)),
            closed: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            closing: Notify::new(),
            answered: AtomicBool::new(false),
            pending_bytes: AtomicU64::new(0),
            opened: Instant::now(),
            on_end: Mutex::new(Some(on_end)),
            stall_timeout,
            stats,
        });
        Stats::add(&shared.stats.connections_opened, 1);
        Stats::add(&shared.stats.connections_open, 1);
        let mut sending = Sending { shared: shared.clone(), queue: queued };
        let receiving = Receiving(shared.clone());
        tokio::spawn(async move { write_all(&sending.shared, &mut sending.queue).await });
        tokio::spawn(async move { read_all(&receiving.0).await });
        Arc::new(Connection { shared, queue })
    }

    /// Whether frames may still be sent.
    pub(super) fn is_open(&self) -> bool {
        !self.shared.leaving.load(Ordering::Acquire) && !self.has_ended()
    }

    /// Whether nothing is awaited on it any more.
    pub(super) fn has_ended(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// Payload bytes asked for and not answered yet.
    pub(super) fn pending_bytes(&self) -> u64 {
        self.shared.pending_bytes.load(Ordering::Relaxed)
    }

    /// Queues a frame; waits while too many are in flight. On a closed connection the exchange ends at once.
    pub(super) async fn submit(&self, exchange: Arc<Exchange>) {
        let permit = match self.shared.permits.clone().acquire_owned().await {
            Ok(permit) => permit,
            Err(_) => return exchange.end(&self.shared.why_closed()),
        };
        self.shared.pending_bytes.fetch_add(exchange.facts().payload_bytes, Ordering::Relaxed);
        // The queue has a place for every permit, so it is full never, closed at most.
        if let Err(error) = self.queue.try_send(Queued { exchange, _permit: permit }) {
            error.into_inner().exchange.end(&self.shared.why_closed());
        }
    }

    /// Ends it; exchanges in flight fail with `error`.
    pub(super) fn close(&self, error: Error) {
        self.shared.on_end.lock().take();
        self.shared.close(error);
    }
}

/// The half that sends: when it ends, with its runtime too, what was not sent is told so.
struct Sending {
    shared: Arc<Shared>,
    queue: mpsc::Receiver<Queued>,
}

impl Drop for Sending {
    fn drop(&mut self) {
        // One that was left sends nothing more, and still takes its answers.
        if !self.shared.leaving.load(Ordering::Acquire) {
            self.shared.end_with_runtime();
        }
        self.queue.close();
        while let Ok(queued) = self.queue.try_recv() {
            queued.exchange.end(&self.shared.why_closed());
        }
    }
}

/// The half that takes answers.
struct Receiving(Arc<Shared>);

impl Drop for Receiving {
    fn drop(&mut self) {
        self.0.end_with_runtime();
    }
}

impl Shared {
    fn why_closed(&self) -> Error {
        let lane = self.lane.lock();
        let why = lane.closed.as_ref().or(lane.leaving.as_ref());
        why.cloned()
            .unwrap_or_else(|| Error::new(ErrorCode::TransferFailed, format!("connection to {} closed", self.peer)))
    }

    /// A task of this connection is gone. If the connection did not end before, its runtime has: that says nothing of the peer.
    fn end_with_runtime(&self) {
        if !self.closed.load(Ordering::Acquire) {
            self.on_end.lock().take();
            let what = format!("connection to {}: the runtime that it lived in has ended", self.peer);
            self.close(Error::new(ErrorCode::Unavailable, what));
        }
    }

    /// Sends nothing more: a frame was left half sent. The peer answers what it has whole, then meets the end of the
    /// stream and closes; exchanges that were not sent end with `error` at once.
    fn leave(&self, error: Error) {
        tracing::debug!(peer = %self.peer, %error, "data connection left");
        self.lane.lock().leaving.get_or_insert(error);
        self.leaving.store(true, Ordering::Release);
        self.permits.close();
        // An already dead socket fails here: the reader finds out.
        let _already_dead = socket2::SockRef::from(&self.stream).shutdown(Shutdown::Write);
    }

    fn close(&self, error: Error) {
        let (error, left, in_flight) = {
            let mut lane = self.lane.lock();
            if lane.closed.is_some() {
                return;
            }
            let left = lane.leaving.is_some();
            let error = lane.leaving.clone().unwrap_or(error);
            lane.closed = Some(error.clone());
            (error, left, std::mem::take(&mut lane.in_flight))
        };
        self.closed.store(true, Ordering::Release);
        self.permits.close();
        self.closing.notify_one();
        // The other task wakes with an end of stream or a broken pipe. An already dead socket fails here: that is fine.
        let _already_dead = socket2::SockRef::from(&self.stream).shutdown(Shutdown::Both);
        Stats::sub(&self.stats.connections_open, 1);
        if error.code() == ErrorCode::BadFrame {
            Stats::add(&self.stats.bad_frames, 1);
        }
        tracing::debug!(peer = %self.peer, %error, in_flight = in_flight.len(), "data connection closed");
        in_flight.iter().for_each(|it| it.exchange.end(&error));
        if let Some(on_end) = self.on_end.lock().take() {
            let answered = self.answered.load(Ordering::Relaxed);
            on_end(&Ended { error: &error, opened: self.opened, answered, left });
        }
    }

    fn failed(&self, doing: &str, error: io::Error) -> Error {
        let what = match error.kind() {
            io::ErrorKind::UnexpectedEof => "the peer closed the connection".to_owned(),
            _ => error.to_string(),
        };
        Error::new(ErrorCode::TransferFailed, format!("{} {doing}: {what}", self.peer))
    }

    /// For those that shared the connection with a put that was given up: the peer is well, and nothing of theirs failed.
    fn left_half_sent(&self, left: u64) -> Error {
        let what = format!(
            "the connection to {} was left: a put on it was given up with {left} bytes to go (limit {PADDING_BYTES_MAX})",
            self.peer
        );
        Error::new(ErrorCode::ResourceExhausted, what)
    }

    fn bad(&self, what: String) -> Error {
        Error::new(ErrorCode::BadFrame, format!("{} answered out of turn: {what}", self.peer))
    }

    /// Registers the exchange as sent and appends its head; false if nobody waits for it any more.
    fn announce(&self, queued: Queued, head: &mut Vec<u8>) -> bool {
        let facts = queued.exchange.facts();
        if queued.exchange.is_settled() {
            self.pending_bytes.fetch_sub(facts.payload_bytes, Ordering::Relaxed);
            return false;
        }
        let remaining = facts.deadline.saturating_duration_since(Instant::now()).as_millis();
        let remaining_ms = u32::try_from(remaining).unwrap_or(u32::MAX).max(1);
        let kind = queued.exchange.kind();
        let payload_bytes = if kind == Kind::Write { facts.payload_bytes } else { 0 };
        let mut lane = self.lane.lock();
        if let Some(error) = lane.closed.as_ref().or(lane.leaving.as_ref()) {
            queued.exchange.end(error);
            return false;
        }
        let id = lane.next_id;
        lane.next_id += 1;
        let record_bytes = wire::RECORD_BYTES;
        Request { kind, items: facts.items, record_bytes, remaining_ms, id, payload_bytes }.encode(head);
        head.extend_from_slice(&facts.records);
        lane.in_flight.push_back(InFlight { id, exchange: queued.exchange, _permit: queued._permit });
        true
    }

    /// Whether the oldest exchange is overdue although nothing has arrived since `progress`.
    fn is_stalled(&self, progress: Instant) -> bool {
        let due = self.lane.lock().in_flight.front().map(|it| it.exchange.facts().deadline);
        due.is_some_and(|due| due.max(progress) + self.stall_timeout < Instant::now())
    }

    /// Waits for bytes; fails when the peer is stuck, so that a frozen peer does not hold the queue for ever.
    async fn readable(&self, progress: Instant) -> io::Result<()> {
        loop {
            match wait(&self.stream, Interest::READABLE, STALL_CHECK).await {
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    if self.is_stalled(progress) {
                        let what = format!("no answer within {} ms after its deadline", self.stall_timeout.as_millis());
                        return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                    }
                }
                result => return result,
            }
        }
    }

    /// Fills `bytes`.
    async fn fill(&self, bytes: &mut [u8]) -> io::Result<()> {
        let (mut at, mut progress) = (0, Instant::now());
        while at < bytes.len() {
            match self.stream.try_read(&mut bytes[at..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (at, progress) = (at + n, Instant::now()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable(progress).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Sends queued frames until the connection ends or nobody can queue any more.
async fn write_all(shared: &Shared, queue: &mut mpsc::Receiver<Queued>) {
    let error = loop {
        let first = tokio::select! {
            biased;
            () = shared.closing.notified() => break Some(shared.why_closed()),
            queued = queue.recv() => queued,
        };
        let Some(first) = first else {
            let what = format!("connection to {}: the engine was dropped", shared.peer);
            break Some(Error::new(ErrorCode::Unavailable, what));
        };
        match write_some(shared, first, queue).await {
            Ok(Whole::Sent) => {}
            Ok(Whole::GivenUp(left)) => {
                shared.leave(shared.left_half_sent(left));
                break None;
            }
            Err(error) => break Some(error),
        }
    };
    if let Some(error) = error {
        shared.close(error);
    }
}

/// Sends one frame and whatever small ones are queued before the first that has payload.
async fn write_some(shared: &Shared, first: Queued, queue: &mut mpsc::Receiver<Queued>) -> Result<Whole, Error> {
    let mut head = Vec::new();
    let mut next = Some(first);
    while let Some(queued) = next {
        let exchange = queued.exchange.clone();
        if shared.announce(queued, &mut head) && matches!(&*exchange, Exchange::Write(_)) {
            let Exchange::Write(write) = &*exchange else { unreachable!("matched above") };
            return write_payload(shared, &head, write, exchange.facts().payload_bytes)
                .await
                .map_err(|e| shared.failed("while sending", e));
        }
        next = if head.len() < HEADS_BYTES_TARGET { queue.try_recv().ok() } else { None };
    }
    send_bytes(&shared.stream, &head, NO_LIMIT).await.map_err(|e| shared.failed("while sending", e))?;
    Ok(Whole::Sent)
}

/// Whether frames went out whole.
enum Whole {
    Sent,
    /// The caller took its put back with so many bytes to go.
    GivenUp(u64),
}

async fn write_payload(
    shared: &Shared,
    head: &[u8],
    exchange: &WriteExchange,
    payload_bytes: u64,
) -> io::Result<Whole> {
    let (mut ranges, mut window) = (Ranges::default(), Window::default());
    ranges.push(head.as_ptr(), head.len());
    let mut left = payload_bytes;
    while ranges.bytes() > 0 || left > 0 {
        match exchange.send(&shared.stream, &mut ranges, &mut window) {
            Ok(Sent::Bytes(n)) => {
                left -= n as u64;
                Stats::add(&shared.stats.bytes_out, n as u64);
                tokio::task::coop::consume_budget().await;
            }
            Ok(Sent::Settled) if left > PADDING_BYTES_MAX => return Ok(Whole::GivenUp(left)),
            Ok(Sent::Settled) => {
                // The frame must be completed for those behind it. Nobody waits for this put: its checksums refuse it.
                let unsent = head.len() - ranges.bytes() as usize;
                send_bytes(&shared.stream, &head[unsent..], NO_LIMIT).await?;
                while left > 0 {
                    let n = left.min(ZEROS.len() as u64);
                    send_bytes(&shared.stream, &ZEROS[..n as usize], NO_LIMIT).await?;
                    left -= n;
                }
                return Ok(Whole::Sent);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::task::coop::consume_budget().await;
                shared.stream.writable().await?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Whole::Sent)
}

/// Takes answers until the connection ends.
async fn read_all(shared: &Shared) {
    let mut buffers = ReadBuffers { window: Window::default(), scratch: vec![0; SCRATCH_BYTES] };
    let error = loop {
        if let Err(error) = read_answer(shared, &mut buffers).await {
            break error;
        }
        shared.answered.store(true, Ordering::Relaxed);
        // A peer that answers faster than we take keeps this thread no longer than its share.
        tokio::task::coop::consume_budget().await;
    };
    shared.close(error);
}

struct ReadBuffers {
    window: Window,
    scratch: Vec<u8>,
}

async fn read_answer(shared: &Shared, buffers: &mut ReadBuffers) -> Result<(), Error> {
    let failed = |error| shared.failed("while answering", error);
    let mut header = [0u8; HEADER_BYTES];
    shared.fill(&mut header).await.map_err(failed)?;
    let answer = Answer::decode(&header)?;
    let mut body = vec![0u8; answer.body_bytes];
    shared.fill(&mut body).await.map_err(failed)?;
    if answer.kind == Kind::Refusal {
        let error = wire::get_refusal(&body)?;
        return Err(Error::new(error.code(), format!("{} refused: {}", shared.peer, error.message())));
    }
    // The exchange stays in flight until its payload is in: that is what a stall is measured on.
    let front = shared.lane.lock().in_flight.front().map(|it| (it.id, it.exchange.clone()));
    let Some((id, exchange)) = front else {
        return Err(shared.bad(format!("exchange {} was not asked for", answer.id)));
    };
    let facts = exchange.facts();
    if (id, exchange.kind(), facts.items) != (answer.id, answer.kind, answer.items) {
        return Err(shared.bad(format!("exchange {} of {} items where {id} was due", answer.id, answer.items)));
    }
    match &*exchange {
        Exchange::Write(write) => write.finish(wire::get_write_statuses(&body, facts.items)?),
        Exchange::Read(read) => {
            let mut left = read.begin(wire::get_read_statuses(&body, facts.items)?);
            if left != answer.payload_bytes {
                return Err(shared.bad(format!("{} bytes of payload where {left} were due", answer.payload_bytes)));
            }
            let mut progress = Instant::now();
            while left > 0 {
                let discarded = &shared.stats.bytes_discarded;
                match read.receive(&shared.stream, left, &mut buffers.window, &mut buffers.scratch, discarded) {
                    Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                    Ok(n) => {
                        left -= n as u64;
                        progress = Instant::now();
                        Stats::add(&shared.stats.bytes_in, n as u64);
                        tokio::task::coop::consume_budget().await;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        shared.readable(progress).await.map_err(failed)?;
                    }
                    Err(error) => return Err(failed(error)),
                }
            }
            read.finish();
        }
    }
    shared.pending_bytes.fetch_sub(facts.payload_bytes, Ordering::Relaxed);
    shared.lane.lock().in_flight.pop_front();
    Ok(())
}
