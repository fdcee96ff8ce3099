//! Publishing this master's images: when `snapshots::policy` says so, on demand, and at the stop. One at a time, on a thread
//! of low priority, beside everything else. The log and the local image never depend on it. Only an image that a majority of
//! the masters vouched for leaves this host (M3): one that was just made waits for the next checkpoint.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::{Error, ErrorCode, v1};
use tidepool_raft::rt;
use tidepool_raft::rt::watch;
use tidepool_raft::snapshot::SnapshotFile;
use tidepool_raft::{LogPosition, NodeStatus, Role};

use super::agreement;
use super::core::Service;
use crate::snapshots::policy::{Decision, Facts, Policy, Position};
use crate::snapshots::{
    Ancestor, Catalogue, ImageFile, Location, MemberLine, Pace, PublishError, Published, StoreError, Whose, prune,
    publish,
};

/// How often it is decided whether to publish.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How often the leader asks the standbys what they published, and how long it waits for them.
const ASK_INTERVAL: Duration = Duration::from_secs(10);
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// Pause after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(30);
/// Entries that a standby may lack and still be the one that publishes.
const LAG_MAX: u64 = 100_000;
/// How long a member may be silent and still count as a standby.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// How long one publication may take in all, without a limit of bytes a second; with one, what that needs comes on top.
const PUBLISH_LIMIT: Duration = Duration::from_secs(3_600);
/// How long a stop waits for the last publication.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// How many checkpoints a new image waits to be agreed, and for how long at least.
const AGREED_WITHIN_CHECKPOINTS: u32 = 4;
const AGREED_WITHIN_MIN: Duration = Duration::from_secs(10);
/// How long a stop waits for it at most. Without a quorum it does not wait at all.
const AGREED_AT_STOP: Duration = Duration::from_secs(8);
/// What a checkpoint takes from when it is due until it is judged.
const JUDGED_WITHIN: Duration = Duration::from_secs(2);
/// How often it is looked whether it was.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// What this master has published, and whether it may go on.
pub struct Snapshots {
    location: Option<Location>,
    one_at_a_time: tokio::sync::Mutex<()>,
    is_stopped: Arc<AtomicBool>,
    state: Mutex<State>,
}

struct State {
    /// Newest whole snapshot of this master at the location.
    published: Option<Known>,
    /// Since when nothing was published: the last one, or the start.
    since: Instant,
    /// Log time then.
    at: Duration,
    last_error: String,
    not_before: Option<Instant>,
    due_since: Option<Instant>,
    /// What the others say; the leader asks.
    others: Option<(Instant, Option<Duration>)>,
    looked: bool,
    /// Whether what is applied is known to be of the present history.
    is_of_this_history: bool,
}

#[derive(Clone)]
struct Known {
    index: u64,
    bytes: u64,
    location: String,
    created: SystemTime,
}

/// What was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// What it covers.
    pub at: LogPosition,
    /// Bytes, of the file or of the parts published.
    pub bytes: u64,
    /// Where it lies.
    pub location: String,
    /// Whether that is outside of this host's data directory.
    pub is_published: bool,
}

impl Snapshots {
    /// Publishing to `location`, or nowhere.
    pub fn new(location: Option<Location>) -> Snapshots {
        let state = State {
            published: None,
            since: rt::now(),
            at: Duration::ZERO,
            last_error: String::new(),
            not_before: None,
            due_since: None,
            others: None,
            looked: false,
            is_of_this_history: false,
        };
        Snapshots {
            location,
            one_at_a_time: tokio::sync::Mutex::default(),
            is_stopped: Arc::default(),
            state: Mutex::new(state),
        }
    }

    /// Cuts short what is under way.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// For `status` and `/readyz`.
    pub fn status(&self) -> v1::SnapshotStatus {
        let state = self.state.lock();
        let known = state.published.as_ref();
        let age = known.map(|known| rt::wall_clock().duration_since(known.created).unwrap_or_default());
        v1::SnapshotStatus {
            url: self.location.as_ref().map(Location::to_string).unwrap_or_default(),
            published_index: known.map_or(0, |known| known.index),
            age_ms: age.map_or(0, |age| age.as_millis() as u64),
            since_ms: rt::since(state.since).as_millis() as u64,
            bytes: known.map_or(0, |known| known.bytes),
            location: known.map(|known| known.location.clone()).unwrap_or_default(),
            last_error: state.last_error.clone(),
        }
    }
}

/// Publishes when it is due, until the master stops.
pub async fn follow(service: Arc<Service>, mut closing: watch::Receiver<bool>) {
    if service.snapshots().location.is_none() {
        return;
    }
    let mut ticks = rt::ticks(CHECK_INTERVAL);
    loop {
        tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => return,
            _ = ticks.tick() => {}
        }
        look_once(&service).await;
        ask_standbys(&service).await;
        let wanted = match decide(&service) {
            Decision::Publish => Image::New,
            Decision::PublishImage => Image::Newest,
            Decision::Wait | Decision::PutOff => continue,
        };
        if let Err(error) = take(&service, wanted).await {
            tracing::warn!(%error, "snapshot not published; trying again in {RETRY_PAUSE:?}");
            service.snapshots().state.lock().not_before = Some(rt::now() + RETRY_PAUSE);
        }
    }
}

/// Publishes a last time, if that is wanted and there is something new: what is agreed by now. A master whose state is in doubt
/// publishes nothing.
pub async fn at_stop(service: &Arc<Service>) {
    let snapshots = service.snapshots();
    let applied = service.directory().applied().map_or(0, |(index, _)| index);
    let published = snapshots.state.lock().published.as_ref().map_or(0, |known| known.index);
    let wanted = snapshots.location.is_some() && service.options().snapshot_on_shutdown && published < applied;
    if wanted && let Some(why) = in_doubt(service) {
        tracing::warn!(why, "no last snapshot is published: the state of this master is in doubt");
    } else if wanted {
        let last = async {
            let wait = (service.options().checkpoint_interval + JUDGED_WITHIN).min(AGREED_AT_STOP);
            if let Err(error) = make(service, wait).await {
                tracing::warn!(%error, "the newest state is not agreed in time; the last snapshot is an older one");
            }
            match agreed_of_this_history(service).and_then(|file| file.position()) {
                Some(at) if at.index > published => take(service, Image::Newest).await,
                _ => Err(Error::new(ErrorCode::Unavailable, "nothing newer than what is published is agreed")),
            }
        };
        match rt::timeout(STOP_LIMIT, last).await {
            Ok(Ok(taken)) => {
                tracing::info!(location = taken.location, index = taken.at.index, "last snapshot published")
            }
            Ok(Err(error)) => tracing::warn!(%error, "the last snapshot was not published"),
            Err(_) => tracing::warn!("the last snapshot was not published within {STOP_LIMIT:?}"),
        }
    }
    snapshots.stop();
}

/// Answers an operator. What was begun goes on when nobody waits for it any more.
pub async fn on_demand(service: &Arc<Service>, limit: Duration) -> v1::TakeSnapshotResponse {
    let began = rt::now();
    let owned = service.clone();
    let taking = rt::spawn(async move { take(&owned, Image::New).await });
    let result = match rt::timeout(limit, taking).await {
        Ok(joined) => joined.unwrap_or_else(|error| Err(Error::new(ErrorCode::Internal, error.to_string()))),
        Err(_) => {
            let why = format!("the snapshot is not done after {limit:?}; it goes on: see tidepool status");
            Err(Error::new(ErrorCode::DeadlineExceeded, why))
        }
    };
    let elapsed_ms = rt::since(began).as_millis() as u64;
    match result {
        Ok(taken) => v1::TakeSnapshotResponse {
            error: None,
            index: taken.at.index,
            term: taken.at.term,
            bytes: taken.bytes,
            elapsed_ms,
            location: taken.location,
            published: taken.is_published,
        },
        Err(error) => v1::TakeSnapshotResponse { error: Some(error.into()), elapsed_ms, ..Default::default() },
    }
}

/// Which image is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Image {
    /// Of everything applied by now.
    New,
    /// The one that is there.
    Newest,
}

/// Why nothing of this master's state may leave it.
fn in_doubt(service: &Service) -> Option<String> {
    let doubt = service.machine().doubted().map(|(index, facts)| format!("at index {index}: {facts}"));
    let starts_over = || service.node().is_doubted().then(|| "it starts over".to_owned());
    doubt.or_else(starts_over).or_else(|| service.halt().reason().map(|why| why.to_string()))
}

/// Makes an image of everything applied by now, and waits until it is agreed.
async fn make(service: &Arc<Service>, wait: Duration) -> Result<(), Error> {
    let unavailable = |why: String| Error::new(ErrorCode::Unavailable, why);
    let index = service.node().compact().await.map_err(|error| unavailable(error.to_string()))?;
    let is_agreed = || {
        let agreed = service.node().agreed_snapshot().and_then(|file| file.position());
        agreed.is_some_and(|at| at.index >= index)
    };
    if is_agreed() {
        return Ok(());
    }
    // The leader need not wait until the next one is due.
    if let Ok(tenure) = service.tenure() {
        agreement::propose(service, &tenure).await?;
    }
    let deadline = rt::now() + wait;
    while !is_agreed() {
        if let Some(why) = in_doubt(service) {
            return Err(Error::new(
                ErrorCode::StateDiverged,
                format!("the image of entry {index} is not agreed: {why}"),
            ));
        }
        let why = match can_be_agreed(service) {
            false => "no majority of the masters is heard",
            true if rt::now() > deadline => "no majority of the masters has the same state at a later checkpoint yet",
            true => {
                rt::sleep(LOOK_AGAIN).await;
                continue;
            }
        };
        return Err(unavailable(format!("the image of entry {index} is not agreed after {wait:?}: {why}")));
    }
    Ok(())
}

/// The newest agreed image, if it is one of the present history (I1): a restored or recovered cluster begins with an image of the
/// cluster before, which is not its own and must not bear its name.
fn agreed_of_this_history(service: &Service) -> Option<SnapshotFile> {
    let file = service.node().agreed_snapshot()?;
    let directory = service.directory();
    let leadership = service.node().status().leadership;
    let applied_term = directory.applied().map_or(0, |(_, term)| term);
    let mut state = service.snapshots().state.lock();
    state.is_of_this_history |= knows_its_history(leadership.role, leadership.term, applied_term);
    let began = directory.ancestors().iter().last().map(|ancestor| ancestor.until);
    (state.is_of_this_history && covers_beginning(file.position()?.index, began)).then_some(file)
}

/// Whether the op with which the present history began was applied: until then the directory names the histories of an image from
/// before. Whoever leads in a term had that op in its log before the first entry of the term; and only who has applied an entry of its
/// own term leads.
fn knows_its_history(role: Role, term: u64, applied_term: u64) -> bool {
    role == Role::Leader || applied_term > 0 && applied_term == term
}

/// Whether an image of this index covers the op with which the present history began; the first history began with none.
fn covers_beginning(index: u64, began: Option<u64>) -> bool {
    began.is_none_or(|began| index >= began)
}

/// Whether checkpoints are logged that this master hears of.
fn can_be_agreed(service: &Service) -> bool {
    let status = service.node().status();
    let heard = match status.leadership.role {
        Role::Leader if status.members.iter().filter(|m| m.voter).count() == 1 => return true,
        Role::Leader => status.quorum_confirmed_ago,
        _ => status.leader_heard_ago,
    };
    heard.is_some_and(|ago| ago < SILENCE_MAX)
}

/// Publishes an image; without a location, makes it only.
pub async fn take(service: &Arc<Service>, wanted: Image) -> Result<Taken, Error> {
    let snapshots = service.snapshots();
    let _turn = snapshots.one_at_a_time.lock().await;
    snapshots.state.lock().due_since = None;
    let began = rt::now();
    let nothing = || Error::new(ErrorCode::Unavailable, "nothing was applied yet; there is nothing to snapshot");
    let Some(location) = snapshots.location.clone() else {
        service.node().compact().await.map_err(|error| Error::new(ErrorCode::Unavailable, error.to_string()))?;
        let file = service.node().current_snapshot().ok_or_else(nothing)?;
        let (at, location) = (file.position().ok_or_else(nothing)?, file.path().display().to_string());
        return Ok(Taken { at, bytes: file.length(), location, is_published: false });
    };
    if wanted == Image::New {
        let wait = service.options().checkpoint_interval * AGREED_WITHIN_CHECKPOINTS;
        let made = make(service, wait.max(AGREED_WITHIN_MIN)).await;
        made.inspect_err(|error| {
            service.metrics().snapshot_failures.with_label_values(&["unagreed"]).inc();
            snapshots.state.lock().last_error = error.to_string();
        })?;
    }
    let build_seconds = rt::since(began).as_secs_f64();
    let of_before = || {
        let why = "no image of the cluster's present history is agreed yet; the one from before it is never published";
        service.metrics().snapshot_failures.with_label_values(&["history"]).inc();
        snapshots.state.lock().last_error = why.to_owned();
        Error::new(ErrorCode::Unavailable, why)
    };
    let file = agreed_of_this_history(service).ok_or_else(of_before)?;
    let at = file.position().ok_or_else(nothing)?;
    let result = send(service, location, file).await;
    let metrics = service.metrics();
    match result {
        Ok((published, whose)) => {
            metrics.snapshot_seconds.with_label_values(&["build"]).observe(build_seconds);
            metrics.snapshot_seconds.with_label_values(&["check"]).observe(published.check_seconds);
            metrics.snapshot_seconds.with_label_values(&["upload"]).observe(published.upload_seconds);
            tracing::info!(
                location = published.location,
                index = at.index,
                bytes = published.bytes,
                "snapshot published"
            );
            let known = Known {
                index: at.index,
                bytes: published.bytes,
                location: published.location.clone(),
                created: whose.created,
            };
            let mut state = snapshots.state.lock();
            (state.published, state.since, state.last_error) = (Some(known), rt::now(), String::new());
            state.at = Duration::from_millis(service.directory().log_time().0);
            Ok(Taken { at, bytes: published.bytes, location: published.location, is_published: true })
        }
        Err(error) => {
            metrics.snapshot_failures.with_label_values(&[error.reason()]).inc();
            snapshots.state.lock().last_error = error.to_string();
            let code = match &error {
                Failure::Publish(PublishError::Image(_)) => ErrorCode::StorageCorrupt,
                _ => ErrorCode::Unavailable,
            };
            Err(Error::new(code, format!("snapshot of entry {}: {error}; the local image is untouched", at.index)))
        }
    }
}

/// Why a publication failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Publish(#[from] PublishError),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("no thread for it: {0}")]
    Thread(#[from] std::io::Error),
}

impl Failure {
    fn reason(&self) -> &'static str {
        match self {
            Failure::Publish(error) => error.reason(),
            Failure::Store(error) => error.reason(),
            Failure::Thread(_) => "thread",
        }
    }
}

async fn send(service: &Service, location: Location, file: SnapshotFile) -> Result<(Published, Whose), Failure> {
    let rate = service.options().snapshot_upload_bytes_per_second;
    // Twice what it takes at that rate.
    let needed = Duration::from_secs(file.length().checked_div(rate).map_or(0, |seconds| seconds * 2));
    let pace = Pace::new(rate, rt::now() + PUBLISH_LIMIT + needed, service.snapshots().is_stopped.clone());
    let whose = whose(service, &file);
    let (retain, own) = (service.options().snapshot_retain, whose.clone());
    let published = rt::background("publish", move || {
        let catalogue = Catalogue::open(&location)?;
        let image: Arc<dyn ImageFile> = Arc::new(file);
        let published = publish(&catalogue, &image, &own, &pace)?;
        match prune(&catalogue, own.cluster, own.node, retain) {
            Ok(removed) if removed != Default::default() => tracing::info!(?removed, "older snapshots removed"),
            Ok(_) => {}
            // What is there too long costs space only; the next run removes it.
            Err(error) => tracing::warn!(%error, "older snapshots were not removed"),
        }
        Ok::<_, Failure>(published)
    });
    Ok((published.await??, whose))
}

fn whose(service: &Service, file: &SnapshotFile) -> Whose {
    let identity = service.node().identity();
    let ancestors: Vec<_> = service.directory().ancestors().iter().copied().collect();
    let members = file.members().into_iter().map(|(node, address)| MemberLine { node, address });
    Whose {
        cluster: identity.cluster,
        history: identity.history,
        node: service.options().node_id,
        members: members.collect(),
        // The youngest first.
        ancestors: ancestors.iter().rev().map(|a| Ancestor { cluster: a.cluster, history: a.history }).collect(),
        build: concat!("tidepool ", env!("CARGO_PKG_VERSION")).to_owned(),
        created: rt::wall_clock(),
    }
}

/// Finds what an earlier life of this master published.
async fn look_once(service: &Arc<Service>) {
    let snapshots = service.snapshots();
    let identity = service.node().identity();
    if snapshots.state.lock().looked || identity.cluster == Default::default() {
        return;
    }
    let (Some(location), node) = (snapshots.location.clone(), service.options().node_id) else { return };
    let found = rt::background("publish", move || {
        let catalogue = Catalogue::open(&location)?;
        let own = catalogue.candidates_of(identity.cluster, node)?;
        Ok::<_, StoreError>(own.iter().find_map(|candidate| catalogue.image(candidate).ok()).map(|image| Known {
            index: image.descriptor.index,
            bytes: image.bytes(),
            location: image.location(),
            created: image.descriptor.created,
        }))
    });
    let found = found.await;
    let mut state = snapshots.state.lock();
    match found {
        Ok(Ok(known)) => {
            (state.published, state.looked) = (known, true);
            state.at = Duration::from_millis(service.directory().log_time().0);
        }
        Ok(Err(error)) if state.last_error.is_empty() => {
            tracing::warn!(%error, "cannot look at the snapshots published so far; trying again");
            state.last_error = error.to_string();
        }
        _ => {}
    }
    if !state.looked {
        state.not_before = Some(rt::now() + CHECK_INTERVAL);
    }
}

fn decide(service: &Service) -> Decision {
    let status = service.node().status();
    let snapshots = service.snapshots();
    let image = agreed_of_this_history(service);
    let mut state = snapshots.state.lock();
    if !state.looked || state.not_before.is_some_and(|at| rt::now() < at) {
        return Decision::Wait;
    }
    let voters: Vec<_> = status.members.iter().filter(|m| m.voter).map(|m| m.member.node_id).collect();
    let rank = voters.iter().filter(|id| **id < status.node_id).count();
    let facts = Facts {
        position: position_of(&status, &state),
        rank,
        voters: voters.len(),
        log_time: Duration::from_millis(service.directory().log_time().0),
        applied_index: status.applied_index,
        backlog: status.committed_index.saturating_sub(status.applied_index),
        published_index: state.published.as_ref().map(|known| known.index),
        published_at: state.at,
        image_index: image.and_then(|file| file.position()).map(|at| at.index),
        put_off: state.due_since.map_or(Duration::ZERO, rt::since),
    };
    let decision = Policy { interval: service.options().snapshot_interval }.decide(&facts);
    if decision == Decision::PutOff {
        state.due_since.get_or_insert_with(rt::now);
    }
    decision
}

fn standbys(status: &NodeStatus) -> impl Iterator<Item = &tidepool_raft::MemberStatus> {
    let is_heard = |member: &&tidepool_raft::MemberStatus| {
        member.last_heard.is_some_and(|ago| ago < SILENCE_MAX) && member.member.node_id != status.node_id
    };
    status.members.iter().filter(|member| member.voter).filter(is_heard)
}

fn position_of(status: &NodeStatus, state: &State) -> Position {
    let leadership = &status.leadership;
    match leadership.role {
        Role::Leader => {
            let holds = |member: &tidepool_raft::MemberStatus| {
                member.matched_index.is_some_and(|index| index + LAG_MAX >= status.last_log_index)
            };
            Position::Leader {
                standby_caught_up: standbys(status).any(holds),
                others_published: state.others.and_then(|(asked, since)| since.map(|since| since + rt::since(asked))),
            }
        }
        Role::Standby => Position::Standby {
            caught_up: leadership.leader.is_some()
                && status.fatal.is_none()
                && status.applied_index + LAG_MAX >= status.committed_index,
        },
        _ => Position::Other,
    }
}

/// A leader learns what the standbys published.
async fn ask_standbys(service: &Arc<Service>) {
    let status = service.node().status();
    let state = &service.snapshots().state;
    if status.leadership.role != Role::Leader {
        state.lock().others = None;
        return;
    }
    if state.lock().others.is_some_and(|(asked, _)| rt::since(asked) < ASK_INTERVAL) {
        return;
    }
    let ask = |address| async move {
        let mut client = AdminServiceClient::new(service.standbys().channel(&address)?);
        let answer = rt::timeout(ANSWER_WAIT, client.status(v1::StatusRequest {})).await.ok()?.ok()?;
        let snapshot = answer.into_inner().snapshot?;
        (snapshot.published_index > 0).then(|| Duration::from_millis(snapshot.since_ms))
    };
    let addresses = standbys(&status).map(|member| member.member.address.clone());
    let answers = futures::future::join_all(addresses.map(ask)).await;
    state.lock().others = Some((rt::now(), answers.into_iter().flatten().min()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A standby that has just started from an image of before names no ancestors yet, or too few: nothing of it is published until it
    /// has applied what the present leader logged. Fails when everybody is taken to know its history (tried).
    #[test]
    fn who_has_applied_nothing_of_the_present_term_does_not_know_its_history() {
        assert!(!knows_its_history(Role::Standby, 5, 4) && !knows_its_history(Role::Standby, 0, 0));
        assert!(!knows_its_history(Role::Candidate, 5, 4));
        assert!(knows_its_history(Role::Standby, 5, 5) && knows_its_history(Role::Leader, 5, 5));
    }

    #[test]
    fn an_image_from_before_the_history_is_not_of_it() {
        assert!(covers_beginning(5, None));
        assert!(!covers_beginning(9, Some(10)));
        assert!(covers_beginning(10, Some(10)) && covers_beginning(11, Some(10)));
    }
}
