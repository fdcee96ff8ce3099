//! Being a member of the cluster: register, mount, beat, follow the leader, obey fences, leave.
//!
//! One task runs the whole conversation. It owns the order in which lives begin and end, so no two are ever served at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tidepool_proto::{Address, Error, ErrorCode, SegmentId};
use tidepool_transport::tcp::{DataIdentity, TcpServer};
use tokio::sync::watch;

use crate::beat::{Beat, BeatEnd};
use crate::identity::IdentityStore;
use crate::life::{Life, Registration};
use crate::log_clock::LogClock;
use crate::masters::Masters;
use crate::metrics::Metrics;
use crate::options::{DatanodeOptions, Prefault};
use crate::payload::Payload;
use crate::prefault;
use crate::registration::{self, is_forgotten};
use crate::segment::{Segment, SegmentError};
use crate::writes::{WriteLimits, WriteTable};

/// A life shorter than this counts as a failed one: the next registration waits.
const LIFE_MIN: Duration = Duration::from_secs(10);

/// Why a datanode stopped.
#[derive(Clone, Debug, PartialEq)]
pub enum StopReason {
    /// It was asked to.
    Shutdown,
    /// A newer incarnation of this node is registered: the process must exit (I3).
    Fenced(Error),
    /// It cannot go on; the message says why and what to do.
    Fatal(Error),
}

impl std::fmt::Display for StopReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StopReason::Shutdown => f.write_str("shut down"),
            StopReason::Fenced(error) => write!(f, "fenced: {error}"),
            StopReason::Fatal(error) => write!(f, "fatal: {error}"),
        }
    }
}

/// What the handle asks of the task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wish {
    /// Go on.
    Run,
    /// Unmount, then stop.
    Leave,
    /// Stop without a word, as a killed process would.
    Vanish,
}

/// What the outside may know of the conversation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    pub(crate) leader: Option<Address>,
    pub(crate) last_beat: Option<Instant>,
    pub(crate) heartbeat_interval: Duration,
    /// What it is doing, for people.
    pub(crate) doing: String,
}

pub(crate) struct Membership {
    pub(crate) options: DatanodeOptions,
    pub(crate) advertise: Address,
    pub(crate) masters: Masters,
    pub(crate) store: IdentityStore,
    pub(crate) payload: Arc<Payload>,
    pub(crate) server: TcpServer,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) standing: Arc<Mutex<Standing>>,
    pub(crate) wish: watch::Receiver<Wish>,
}

/// How one life ended.
enum LifeEnd {
    /// The masters no longer know this incarnation, or have a new history: register again with nothing in the segments.
    Forgotten(Error),
    Stop(StopReason),
}

impl Membership {
    /// Runs until there is a reason to stop. When it returns, no payload is served any more.
    pub(crate) async fn run(mut self, first_segments: Vec<Arc<Segment>>) -> StopReason {
        let mut segments = Some(first_segments);
        let mut pause = self.options.timing.retry_min;
        let reason = loop {
            let fresh = match segments.take().map_or_else(|| create_segments(&self.options), Ok) {
                Ok(fresh) => fresh,
                Err(error) => break StopReason::Fatal(Error::new(ErrorCode::Internal, error.to_string())),
            };
            let began = Instant::now();
            match self.live(fresh).await {
                LifeEnd::Stop(reason) => break reason,
                LifeEnd::Forgotten(error) => {
                    tracing::warn!(%error, "this incarnation is forgotten; its content is dropped, registering again");
                    self.cease();
                }
            }
            pause = if began.elapsed() < LIFE_MIN { pause * 2 } else { self.options.timing.retry_min };
            pause = pause.min(self.options.timing.retry_max);
            if self.unless_wished(tokio::time::sleep(pause)).await.is_none() {
                break StopReason::Shutdown;
            }
        };
        self.cease();
        reason
    }

    /// Ends the life that is served: nothing is answered any more, all data connections close, the content is gone.
    fn cease(&self) {
        let before = self.payload.replace(None);
        self.server.set_identity(DataIdentity::default());
        self.server.close_all();
        if let Some(before) = before {
            tokio::task::spawn_blocking(move || before.drop_content());
        }
        self.metrics.registered.set(0);
    }

    fn doing(&self, what: impl Into<String>) {
        let what = what.into();
        tracing::debug!(what, "membership");
        self.standing.lock().doing = what;
    }

    /// None as soon as the handle wants an end.
    async fn unless_wished<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut wish = self.wish.clone();
        tokio::select! {
            biased;
            _ = wish.wait_for(|wish| *wish != Wish::Run) => None,
            done = work => Some(done),
        }
    }

    async fn live(&mut self, segments: Vec<Arc<Segment>>) -> LifeEnd {
        self.doing("looking for the leader to register with");
        self.metrics.leader_searches.inc();
        let request = registration::request(&self.store, &self.advertise, &self.options.host_id);
        let registered = match self.unless_wished(registration::register(&self.masters, &request)).await {
            None => return LifeEnd::Stop(StopReason::Shutdown),
            Some(Err(error)) => return LifeEnd::Stop(final_reason(error)),
            Some(Ok(registered)) => registered,
        };
        let (leader, registered, clock) = registered;
        self.metrics.registrations.inc();
        tracing::info!(
            %leader, node = %registered.node, incarnation = %registered.incarnation, cluster = %registered.cluster,
            history = format!("{:x}", registered.history.0), "registered"
        );
        if let Err(error) = self.store.join(registered.cluster) {
            return LifeEnd::Stop(StopReason::Fatal(Error::new(ErrorCode::WrongCluster, error.to_string())));
        }
        self.doing(format!("registered as node {}, mounting", registered.node));
        let mounted =
            match self.unless_wished(registration::mount(&self.masters, &leader, &registered, &segments)).await {
                None => return LifeEnd::Stop(StopReason::Shutdown),
                Some(Err(error)) if is_forgotten(&error) => return LifeEnd::Forgotten(error),
                Some(Err(error)) => return LifeEnd::Stop(final_reason(error)),
                Some(Ok(mounted)) => mounted,
            };
        let life = self.begin(registered, mounted, clock, &segments);
        self.doing("serving");
        let beat = Beat {
            masters: &self.masters,
            timing: self.options.timing,
            verifications_max: self.options.limits.verifications_max,
            copies_max: self.options.limits.copies_max,
            payload: self.payload.clone(),
            life: life.clone(),
            metrics: self.metrics.clone(),
            standing: self.standing.clone(),
        };
        match self.unless_wished(beat.run(leader)).await {
            Some(BeatEnd::Fenced(error)) => LifeEnd::Stop(StopReason::Fenced(error)),
            Some(BeatEnd::Forgotten(error)) => LifeEnd::Forgotten(error),
            None => {
                if *self.wish.borrow() == Wish::Leave {
                    self.leave(&life).await;
                }
                LifeEnd::Stop(StopReason::Shutdown)
            }
        }
    }

    fn begin(
        &self,
        registration: Registration,
        mounted: HashMap<SegmentId, Arc<Segment>>,
        clock: LogClock,
        segments: &[Arc<Segment>],
    ) -> Arc<Life> {
        let limits = WriteLimits { open_max: self.options.limits.open_writes_max, ..WriteLimits::default() };
        let writes = Arc::new(WriteTable::new(limits, clock));
        let identity = DataIdentity {
            cluster: registration.cluster,
            history: registration.history,
            node: registration.node,
            incarnation: registration.incarnation,
        };
        for segment in segments {
            self.metrics.segment(segment.name(), segment.bytes());
        }
        {
            let mut standing = self.standing.lock();
            standing.heartbeat_interval = registration.heartbeat_interval;
            standing.last_beat = Some(Instant::now());
        }
        let life = Arc::new(Life::new(registration, mounted, writes));
        let before = self.payload.replace(Some(life.clone()));
        assert!(before.is_none(), "two lives at once");
        self.server.set_identity(identity);
        self.metrics.registered.set(1);
        if self.options.prefault == Prefault::Background
            && let Err(error) = prefault::start(segments, &self.metrics)
        {
            tracing::warn!(%error, "no thread for prefaulting; pages are taken when they are first written");
        }
        life
    }

    /// Tells the leader that everything here goes. Serves meanwhile: readers with leases finish.
    async fn leave(&self, life: &Life) {
        self.doing("leaving");
        let leader = self.standing.lock().leader.clone();
        let left = registration::unmount_all(&self.masters, leader.as_ref(), life.registration());
        match tokio::time::timeout(self.options.timing.leave_timeout, left).await {
            Ok(Ok(leader)) => tracing::info!(%leader, "left: all segments are unmounted"),
            Ok(Err(error)) => tracing::warn!(%error, "could not leave gracefully"),
            Err(_) => tracing::warn!(
                timeout_ms = self.options.timing.leave_timeout.as_millis() as u64,
                "found no leader to leave from; the masters will notice the silence"
            ),
        }
    }
}

fn final_reason(error: Error) -> StopReason {
    if error.code() == ErrorCode::Fenced { StopReason::Fenced(error) } else { StopReason::Fatal(error) }
}

/// Fresh, empty segments as the options say. Warns once when huge pages were wanted and there were none.
pub(crate) fn create_segments(options: &DatanodeOptions) -> Result<Vec<Arc<Segment>>, SegmentError> {
    let named = options.segments.iter().enumerate();
    let segments = named
        .map(|(i, &bytes)| Segment::create(&format!("dram-{i}"), bytes, options.huge_pages).map(Arc::new))
        .collect::<Result<Vec<_>, _>>()?;
    if options.huge_pages == crate::options::HugePages::Try && segments.iter().any(|s| !s.hugepages()) {
        let bytes: u64 = segments.iter().filter(|s| !s.hugepages()).map(|s| s.bytes()).sum();
        tracing::warn!(
            bytes,
            "not enough free huge pages; using plain ones. Reserve them with vm.nr_hugepages = {} more",
            bytes.div_ceil(2 << 20)
        );
    }
    Ok(segments)
}
