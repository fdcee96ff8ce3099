//! The heartbeat conversation of one life: beats to the leader, its commands back, and the next leader when this one is lost.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{Address, ClusterId, Error, ErrorCode, History, LogTime, ReplicaId, v1};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::clock_rate::{ClockRate, is_off};
use crate::copier::Copier;
use crate::inspection::Inspector;
use crate::life::Life;
use crate::masters::{Client, Masters, status_error};
use crate::membership::Standing;
use crate::metrics::Metrics;
use crate::options::MasterTiming;
use crate::payload::Payload;
use crate::presence::PresenceChecker;
use crate::registration::{is_forgotten, wire_identity};
use crate::succession::{Lineage, Succeeded, Successor};

/// Acknowledgements, and verdicts, that one beat carries.
const PER_BEAT_MAX: usize = 4096;
/// Beats that may wait for the connection; more means that the leader does not read.
const UNSENT_BEATS_MAX: usize = 4;

/// Why the beats of a life ended.
#[derive(Debug)]
pub(crate) enum BeatEnd {
    /// Another incarnation is registered.
    Fenced(Error),
    /// The masters do not know this incarnation, or are in another history of the cluster.
    Forgotten(Error),
    /// Nobody of this cluster answers, and a leader of the one that goes on from it does.
    Succeeded(Succeeded),
}

pub(crate) struct Beat<'a> {
    pub(crate) masters: &'a Masters,
    pub(crate) timing: MasterTiming,
    pub(crate) verifications_max: usize,
    pub(crate) copies_max: usize,
    pub(crate) payload: Arc<Payload>,
    pub(crate) life: Arc<Life>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) standing: Arc<Mutex<Standing>>,
}

/// What the leader asks for beside fences, and what is to be said about it.
struct Duties {
    inspector: Inspector,
    copier: Copier,
    presence: PresenceChecker,
    clock_rate: Mutex<ClockRate>,
}

impl Duties {
    /// The stream is gone: all that was said and not answered is said again.
    fn lost(&self) {
        self.inspector.verdicts().lost();
        self.copier.reports().lost();
        self.presence.answers().lost();
    }

    /// The beat of this number was answered.
    fn arrived(&self, sequence: u64) {
        self.inspector.verdicts().arrived(sequence);
        self.copier.reports().arrived(sequence);
        self.presence.answers().arrived(sequence);
    }
}

/// An open stream to a leader.
struct Conversation {
    leader: Address,
    beats: mpsc::Sender<v1::HeartbeatRequest>,
    answers: Streaming<v1::HeartbeatResponse>,
}

/// Why a conversation ended.
enum Lost {
    /// Look for the leader, at this address first.
    Leader(Option<Address>, String),
    Life(BeatEnd),
}

impl Beat<'_> {
    /// Beats until the life is over.
    pub(crate) async fn run(self, registered_with: Address) -> BeatEnd {
        let duties = Duties {
            inspector: Inspector::new(self.life.clone(), self.metrics.clone(), self.verifications_max),
            copier: Copier::new(self.life.clone(), self.payload.clone(), self.metrics.clone(), self.copies_max),
            presence: PresenceChecker::new(self.life.clone()),
            clock_rate: Mutex::default(),
        };
        let mut sequence = 0;
        let mut first = Some(registered_with);
        loop {
            self.life.writes().acknowledgements_lost();
            duties.lost();
            let (mut conversation, answer) = match self.open(first.as_ref(), &mut sequence).await {
                Ok(opened) => opened,
                Err(end) => return end,
            };
            tracing::info!(leader = %conversation.leader, term = answer.term, "following the leader");
            {
                let mut standing = self.standing.lock();
                standing.leader = Some(conversation.leader.clone());
                standing.doing = "serving".into();
            }
            let lost = match self.obey(answer, &duties) {
                Ok(()) => self.converse(&mut conversation, &duties, &mut sequence).await,
                Err(lost) => lost,
            };
            self.life.writes().clock().lost();
            {
                let mut standing = self.standing.lock();
                standing.leader = None;
                standing.doing = "serving; looking for the leader".into();
            }
            match lost {
                Lost::Life(end) => return end,
                Lost::Leader(hint, why) => {
                    tracing::warn!(leader = %conversation.leader, why, hint = ?hint, "lost the leader");
                    first = hint;
                }
            }
        }
    }

    /// Opens the stream with whichever master answers a beat as the leader.
    async fn open(
        &self,
        first: Option<&Address>,
        sequence: &mut u64,
    ) -> Result<(Conversation, v1::HeartbeatResponse), BeatEnd> {
        self.metrics.leader_searches.inc();
        *sequence += 1;
        let beat = self.bare_beat(*sequence);
        let known = Known::of(&self.life);
        let lineage = &self.life.registration().lineage;
        loop {
            let goes_on = Mutex::new(None);
            let asked = self.masters.ask(first, |client| greet(client, beat.clone(), known, lineage, &goes_on)).await;
            match asked {
                Ok((leader, Ok((beats, answers, answer)))) => {
                    return Ok((Conversation { leader, beats, answers }, answer));
                }
                Ok((_, Err(forgotten))) => return Err(BeatEnd::Forgotten(forgotten)),
                Err(error) if error.code() == ErrorCode::Fenced => return Err(BeatEnd::Fenced(error)),
                // Only a leader of this cluster may end a life. Where only strangers answer (wiped masters, another
                // cluster behind a reused address), its own masters may yet return: what is stored stays. Where a
                // leader of what this cluster goes on in answers and nobody of the known one, they will not.
                Err(error) => {
                    if let Some(end) = goes_on.into_inner() {
                        return Err(end);
                    }
                    tracing::warn!(%error, "no master of this cluster answers; what is stored stays");
                    tokio::time::sleep(self.timing.retry_max).await;
                }
            }
        }
    }

    async fn converse(&self, conversation: &mut Conversation, duties: &Duties, sequence: &mut u64) -> Lost {
        let interval = self.life.registration().heartbeat_interval;
        let patience = self.timing.heartbeat_timeout.max(interval * 4);
        let mut ticker = tokio::time::interval(interval);
        ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let silence = tokio::time::sleep(patience);
        tokio::pin!(silence);
        // A beat that found the connection full is sent as soon as it is not: what it carries waits for nothing else.
        let mut unsent = false;
        loop {
            tokio::select! {
                answer = conversation.answers.message() => {
                    let answer = match answer {
                        Ok(Some(answer)) => answer,
                        Ok(None) => return Lost::Leader(None, "it closed the stream".into()),
                        Err(status) => return Lost::Leader(None, status_error(status).to_string()),
                    };
                    silence.as_mut().reset(tokio::time::Instant::now() + patience);
                    if let Err(lost) = self.obey(answer, duties) {
                        return lost;
                    }
                    continue;
                }
                () = &mut silence => return Lost::Leader(None, format!("it was silent for {} ms", patience.as_millis())),
                _ = ticker.tick() => {}
                () = self.life.writes().acknowledgement_ready() => {}
                () = duties.inspector.verdicts().ready() => {}
                () = duties.copier.reports().ready() => {}
                () = duties.presence.answers().ready() => {}
                _ = conversation.beats.reserve(), if unsent => {}
            }
            *sequence += 1;
            let mut beat = self.bare_beat(*sequence);
            match conversation.beats.try_reserve() {
                Ok(slot) => {
                    unsent = false;
                    beat.fenced_replicas = self.life.writes().take_acknowledgements(*sequence, PER_BEAT_MAX);
                    beat.verdicts = duties.inspector.verdicts().take(*sequence, PER_BEAT_MAX);
                    beat.copies = duties.copier.reports().take(*sequence, PER_BEAT_MAX);
                    beat.presence = duties.presence.answers().take(*sequence, 1).pop();
                    self.metrics.fence_acknowledgements.inc_by(beat.fenced_replicas.len() as u64);
                    slot.send(beat);
                }
                // The silence timer decides what an unread beat means.
                Err(mpsc::error::TrySendError::Full(())) => unsent = true,
                Err(mpsc::error::TrySendError::Closed(())) => {
                    return Lost::Leader(None, "the connection closed".into());
                }
            }
        }
    }

    fn bare_beat(&self, sequence: u64) -> v1::HeartbeatRequest {
        let registration = self.life.registration();
        v1::HeartbeatRequest {
            node_id: registration.node.0,
            incarnation: registration.incarnation.0,
            history: registration.history.0,
            sequence,
            fenced_replicas: Vec::new(),
            verdicts: Vec::new(),
            identity: Some(wire_identity(Some(registration.cluster), registration.history, registration.node)),
            copies: Vec::new(),
            presence: None,
        }
    }

    /// Does what an answer says.
    fn obey(&self, answer: v1::HeartbeatResponse, duties: &Duties) -> Result<(), Lost> {
        let known = Known::of(&self.life);
        if !known.is_same_life(answer.identity.as_ref()) {
            return Err(Lost::Leader(None, "it speaks for another history or cluster".into()));
        }
        let term = known.term;
        if let Some(error) = answer.error.map(Error::from) {
            if answer.term < term {
                return Err(Lost::Leader(None, format!("it speaks for term {}, which is over: {error}", answer.term)));
            }
            return Err(match error.code() {
                ErrorCode::Fenced => Lost::Life(BeatEnd::Fenced(error)),
                _ if is_forgotten(&error) => Lost::Life(BeatEnd::Forgotten(error)),
                _ => Lost::Leader(error.leader().and_then(|hint| hint.address.parse().ok()), error.to_string()),
            });
        }
        let writes = self.life.writes();
        let log_time = LogTime(answer.log_time_ms);
        let now = BootInstant::now();
        if !writes.observe(answer.term, log_time, now) {
            return Err(Lost::Leader(None, format!("it leads term {}, which is over", answer.term)));
        }
        if let Some(rate) = duties.clock_rate.lock().heard(answer.term, log_time, now) {
            self.metrics.leader_clock_rate.set(rate);
            if is_off(rate) {
                tracing::warn!(
                    rate,
                    "the leader's clock and this host's differ by more than 5 %: leases will be refused; run tidepool doctor on both hosts"
                );
            }
        }
        self.metrics.beats.inc();
        self.standing.lock().last_beat = Some(Instant::now());
        writes.acknowledgements_arrived(answer.sequence);
        duties.arrived(answer.sequence);
        self.masters.learn(&answer.masters);
        if !answer.fence_replicas.is_empty() {
            let replicas: Vec<ReplicaId> = answer.fence_replicas.iter().map(|&id| ReplicaId(id)).collect();
            tracing::info!(count = replicas.len(), first = %replicas[0], term = answer.term, "fencing on the leader's word");
            writes.fence(&replicas, log_time);
            self.metrics.fences.inc_by(replicas.len() as u64);
        }
        for verify in answer.verify {
            duties.inspector.inspect(verify);
        }
        for order in answer.copy {
            duties.copier.copy(order);
        }
        if let Some(query) = answer.presence {
            duties.presence.ask(answer.term, query);
        }
        Ok(())
    }
}

type Opened = (mpsc::Sender<v1::HeartbeatRequest>, Streaming<v1::HeartbeatResponse>, v1::HeartbeatResponse);

/// Whose word counts, and up to which term it was heard. Terms compare within one history only: a restored cluster counts anew.
#[derive(Clone, Copy)]
struct Known {
    cluster: ClusterId,
    history: History,
    term: u64,
}

impl Known {
    fn of(life: &Life) -> Known {
        let registration = life.registration();
        Known { cluster: registration.cluster, history: registration.history, term: life.writes().clock().term() }
    }

    /// False for a master that says it belongs to another cluster or history. One that knows of none yet says nothing.
    fn is_same_life(&self, identity: Option<&v1::Identity>) -> bool {
        identity.is_none_or(|theirs| {
            (theirs.cluster_uuid.is_empty() || theirs.cluster_uuid[..] == self.cluster.0)
                && (theirs.history == 0 || theirs.history == self.history.0)
        })
    }

    fn is_cluster(&self, theirs: &v1::Identity) -> bool {
        theirs.cluster_uuid[..] == self.cluster.0
    }
}

/// Opens a stream with one beat; only a leader's answer counts. An error that ends the life is handed through as a value, unless a
/// master of another cluster or history gives it. That of a leader in another history of this cluster, or in the cluster that succeeds
/// it, is kept in `goes_on`: it counts once nobody of the known one is found.
async fn greet(
    mut client: Client,
    beat: v1::HeartbeatRequest,
    known: Known,
    lineage: &Lineage,
    goes_on: &Mutex<Option<BeatEnd>>,
) -> Result<Result<Opened, Error>, Error> {
    let (beats, unsent) = mpsc::channel(UNSENT_BEATS_MAX);
    let sequence = beat.sequence;
    let closed = |what: &str| Error::new(ErrorCode::Unavailable, format!("the heartbeat stream {what}"));
    beats.try_send(beat).map_err(|_| closed("took no beat"))?;
    let mut answers = client.heartbeat(ReceiverStream::new(unsent)).await.map_err(status_error)?.into_inner();
    let answer = answers.message().await.map_err(status_error)?.ok_or_else(|| closed("ended at once"))?;
    if !known.is_same_life(answer.identity.as_ref()) {
        let said = answer.error.map(Error::from);
        // A master says so in office only; a standby says NOT_LEADER.
        if let Some(error) = said.filter(|error| error.code() == ErrorCode::WrongCluster)
            && let Some(identity) = &answer.identity
        {
            let successor = Successor::of(lineage, identity);
            if let Some(successor) = successor {
                *goes_on.lock() = Some(BeatEnd::Succeeded(Succeeded { successor, error }));
            } else if known.is_cluster(identity) {
                *goes_on.lock() = Some(BeatEnd::Forgotten(error));
            }
        }
        return Err(Error::new(ErrorCode::WrongCluster, "this master belongs to another cluster or history"));
    }
    let term = known.term;
    if let Some(error) = answer.error.clone().map(Error::from) {
        if answer.identity.as_ref().is_some_and(|theirs| theirs.cluster_uuid.is_empty()) {
            let what = format!("it belongs to no cluster yet: {}", error.message());
            return Err(Error::new(ErrorCode::Unavailable, what));
        }
        // A leader of the past may not know this incarnation yet; its word ends nothing.
        if answer.term < term && (error.code() == ErrorCode::Fenced || is_forgotten(&error)) {
            let what = format!("it speaks for term {}; term {term} was heard already", answer.term);
            return Err(Error::new(ErrorCode::NotLeader, what));
        }
        return if is_forgotten(&error) { Ok(Err(error)) } else { Err(error) };
    }
    if answer.term < term || answer.sequence != sequence {
        return Err(Error::new(
            ErrorCode::NotLeader,
            format!("it leads term {}; term {term} was heard already", answer.term),
        ));
    }
    Ok(Ok((beats, answers, answer)))
}
