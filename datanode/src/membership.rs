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
use crate::registration::{self, NotRegistered, is_forgotten};
use crate::segment::{Segment, SegmentError};
use crate::succession::{Legacy, Succeeded, Successor};
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
    /// Its cluster goes on in another one: follow, with what is stored.
    Succeeded(Succeeded),
    Stop(StopReason),
}

impl Membership {
    /// Runs until there is a reason to stop. When it returns, no payload is served any more.
    pub(crate) async fn run(mut self, first_segments: Vec<Arc<Segment>>) -> StopReason {
        let mut segments = Some(first_segments);
        let mut legacy = None;
        let mut pause = self.options.timing.retry_min;
        let reason = loop {
            let fresh = match segments.take().map_or_else(|| create_segments(&self.options), Ok) {
                Ok(fresh) => fresh,
                Err(error) => break StopReason::Fatal(Error::new(ErrorCode::Internal, error.to_string())),
            };
            let began = Instant::now();
            match self.live(fresh, &mut legacy).await {
                LifeEnd::Stop(reason) => break reason,
                LifeEnd::Succeeded(Succeeded { successor, error }) => {
                    tracing::warn!(%error, cluster = %successor.cluster, "this cluster goes on in another one; following it");
                    let left = self.succeed(successor, legacy.take()).await;
                    segments = left.segments();
                    legacy = Some(left);
                }
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

    /// Ends the life that is served, if there is one, and keeps what is stored: returns when nothing of it is written any more.
    async fn succeed(&self, successor: Successor, earlier: Option<Legacy>) -> Legacy {
        self.doing("ending the life in the cluster before");
        let before = self.payload.replace(None);
        self.server.set_identity(DataIdentity::default());
        self.server.close_all();
        self.metrics.registered.set(0);
        match (before, earlier) {
            // Nobody was registered with the one that was followed, and it goes on in yet another one.
            (None, Some(earlier)) => earlier.goes_on_in(successor),
            (before, _) => Legacy::of(before, successor).await,
        }
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

    async fn live(&mut self, mut segments: Vec<Arc<Segment>>, legacy: &mut Option<Legacy>) -> LifeEnd {
        self.doing("looking for the leader to register with");
        self.metrics.leader_searches.inc();
        let request = registration::request(&self.store, &self.advertise, &self.options.host_id, legacy.as_ref());
        let before = self.store.lineage().clone();
        let registered = match self.unless_wished(registration::register(&self.masters, &request, &before)).await {
            None => return LifeEnd::Stop(StopReason::Shutdown),
            Some(Err(NotRegistered::Refused(error))) => return LifeEnd::Stop(final_reason(error)),
            Some(Err(NotRegistered::Succeeded(succeeded))) => return LifeEnd::Succeeded(succeeded),
            Some(Ok(registered)) => registered,
        };
        let (leader, registered, clock) = registered;
        self.metrics.registrations.inc();
        tracing::info!(
            %leader, node = %registered.node, incarnation = %registered.incarnation, cluster = %registered.cluster,
            history = format!("{:x}", registered.history.0), "registered"
        );
        let joined = match legacy {
            Some(_) => self.store.follow(registered.cluster),
            None => self.store.join(registered.cluster),
        };
        if let Err(error) = joined {
            return LifeEnd::Stop(StopReason::Fatal(Error::new(ErrorCode::WrongCluster, error.to_string())));
        }
        // It is needed only to follow another restore after a restart: no reason to stop.
        if let Err(error) = self.store.remember(&registered.lineage) {
            tracing::warn!(%error, "the clusters that this datanode was in are not on disk");
        }
        let inherited = legacy.as_ref().is_some_and(|legacy| legacy.is_continued_by(&registered));
        if let Some(legacy) = legacy.take() {
            match self.inherit(legacy, &registered).await {
                Ok(Some(fresh)) => segments = fresh,
                Ok(None) => {}
                Err(error) => return LifeEnd::Stop(StopReason::Fatal(error)),
            }
        }
        self.doing(format!("registered as node {}, mounting", registered.node));
        let mounted =
            match self.unless_wished(registration::mount(&self.masters, &leader, &registered, &segments)).await {
                None => return LifeEnd::Stop(StopReason::Shutdown),
                Some(Err(error)) if is_forgotten(&error) => return LifeEnd::Forgotten(error),
                Some(Err(error)) => return LifeEnd::Stop(final_reason(error)),
                Some(Ok(mounted)) => mounted,
            };
        let life = self.begin(registered, mounted, clock, &segments, inherited);
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
            Some(BeatEnd::Succeeded(succeeded)) => LifeEnd::Succeeded(succeeded),
            None => {
                if *self.wish.borrow() == Wish::Leave {
                    self.leave(&life).await;
                }
                LifeEnd::Stop(StopReason::Shutdown)
            }
        }
    }

    /// Takes over what the life before stored, or gives it back and makes fresh segments when the directory knows another life.
    async fn inherit(&self, legacy: Legacy, now: &Registration) -> Result<Option<Vec<Arc<Segment>>>, Error> {
        legacy.assert_quiet();
        if legacy.is_continued_by(now) {
            tracing::info!(incarnation = %now.incarnation, "the directory knows this life: its content stays");
            self.metrics.successions.with_label_values(&["kept"]).inc();
            return Ok(None);
        }
        if !legacy.has_content() {
            return Ok(None);
        }
        tracing::warn!("the directory was saved before this life began; its content is dropped");
        self.metrics.successions.with_label_values(&["dropped"]).inc();
        let options = self.options.clone();
        let fresh = tokio::task::spawn_blocking(move || {
            legacy.drop_content();
            create_segments(&options)
        });
        match fresh.await {
            Ok(Ok(fresh)) => Ok(Some(fresh)),
            Ok(Err(error)) => Err(Error::new(ErrorCode::Internal, error.to_string())),
            Err(error) => Err(Error::new(ErrorCode::Internal, error.to_string())),
        }
    }

    fn begin(
        &self,
        registration: Registration,
        mounted: HashMap<SegmentId, Arc<Segment>>,
        clock: LogClock,
        segments: &[Arc<Segment>],
        inherited: bool,
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
        // Inherited pages are in place, or on their way.
        if self.options.prefault == Prefault::Background
            && !inherited
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
        .map(|(i, &bytes)| {
            let name = options.segment_names.get(i).cloned().unwrap_or_else(|| format!("dram-{i}"));
            Segment::create(&name, bytes, options.huge_pages).map(Arc::new)
        })
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
