//! Whether the masters hold the same state (M3). The leader logs a checkpoint every so often; every master remembers its digest
//! there, asks the other voters for theirs, and judges itself:
//!
//! - A majority has its digest: what it holds is good, and so are the snapshots it wrote up to there.
//! - A majority has another: it hands over what it leads and starts over from the last agreed snapshot and its log.
//! - No majority is possible any more: nobody knows who is right, so nothing is written until that is resolved.
//!
//! A master whose auditor found records that do not sum up to the digest kept of them (M2) differs as well, whatever the
//! digest; unless a majority found the same, which is a bug in all of them and not to be healed by starting over.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::{Error, ErrorCode, v1};
use tokio::sync::watch;

use super::core::{Service, unexpected};
use super::tenure::Tenure;
use crate::directory::{Op, Outcome};

/// How often a master looks for a checkpoint that is not judged yet.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long another master may take to reach the checkpoint.
const ANSWER_WAIT: Duration = Duration::from_secs(2);

/// Why nothing is written, if that is so.
#[derive(Clone, Default)]
pub struct Halt(Arc<RwLock<Option<Error>>>);

impl Halt {
    /// Refuses ops while the masters disagree; those that show whether they agree again go on.
    pub fn check(&self, ops: &[Op<'_>]) -> Result<(), Error> {
        let goes_on = |op: &Op<'_>| matches!(op, Op::Checkpoint { .. } | Op::Audit | Op::SetConfig(_));
        match &*self.0.read() {
            Some(why) if !ops.iter().all(goes_on) => Err(why.clone()),
            _ => Ok(()),
        }
    }

    /// Why.
    pub fn reason(&self) -> Option<Error> {
        self.0.read().clone()
    }

    fn set(&self, why: Option<Error>) {
        *self.0.write() = why;
    }
}

/// What one master said of its state at a checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub(super) digest: u128,
    /// Its auditor found it wrong.
    pub(super) doubted: bool,
}

/// What the answers come to, for the one who asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// A majority has the own state.
    Agreed,
    /// A majority has another, or only the own auditor found something.
    Differs,
    /// No majority can have one state any more.
    Split,
    /// A majority's auditors found something: not to be healed by starting over.
    AllDoubted,
    /// Not enough answered.
    Open,
}

/// Judges the own answer at one checkpoint by those of the other voters. `votes`: whether the own one counts.
pub(super) fn judge(voters: usize, votes: bool, own: Answer, others: &[Answer]) -> Verdict {
    let majority = voters / 2 + 1;
    let counted = || others.iter().chain(votes.then_some(&own));
    let mut tally = BTreeMap::<u128, usize>::new();
    counted().for_each(|answer| *tally.entry(answer.digest).or_default() += 1);
    let (agreed, most) =
        tally.iter().max_by_key(|(_, count)| **count).map_or((0, 0), |(digest, count)| (*digest, *count));
    let silent = voters.saturating_sub(counted().count());
    if most >= majority && agreed != own.digest {
        return Verdict::Differs;
    }
    if most < majority {
        return if most + silent < majority { Verdict::Split } else { Verdict::Open };
    }
    match (own.doubted, counted().filter(|answer| answer.doubted).count()) {
        (true, doubted) if voters > 1 && doubted >= majority => Verdict::AllDoubted,
        (true, _) => Verdict::Differs,
        (false, _) => Verdict::Agreed,
    }
}

/// Logs a checkpoint that names the last one, and what the leader had there.
pub async fn propose(service: &Service, tenure: &Tenure) -> Result<(), Error> {
    let (index, digest) = service.machine().last_checkpoint().unwrap_or_default();
    match tenure.proposer.propose_one(Op::Checkpoint { index, digest }, None).await? {
        Outcome::Done => Ok(()),
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("checkpoint", &other)),
    }
}

/// Judges this master at every checkpoint until it stops.
pub async fn follow(service: Arc<Service>, mut closing: watch::Receiver<bool>) {
    let (mut ticks, mut judged) = (tokio::time::interval(LOOK_EVERY), 0);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = closing.wait_for(|closing| *closing) => return,
        }
        let Some((index, digest)) = service.machine().last_checkpoint().filter(|(index, _)| *index > judged) else {
            continue;
        };
        let verdict = tokio::select! {
            verdict = compare(&service, index, digest) => verdict,
            _ = closing.wait_for(|closing| *closing) => return,
        };
        if act(&service, index, digest, verdict).await {
            judged = index;
        }
    }
}

/// Does what the verdict asks for; false if the same checkpoint has to be looked at again.
async fn act(service: &Service, index: u64, digest: u128, verdict: Verdict) -> bool {
    service.metrics().state_comparisons.with_label_values(&[verdict.name()]).inc();
    match verdict {
        Verdict::Open => return false,
        Verdict::Agreed => {
            if service.halt().reason().is_some() {
                tracing::warn!(index, "a majority of the masters holds one state again; writes go on");
            }
            if let Err(error) = service.node().vouch(index).await {
                tracing::error!(%error, index, "that a majority vouches for the snapshots could not be written down");
                return false;
            }
        }
        Verdict::Differs => {
            let why = match service.machine().doubted() {
                Some((at, facts)) => format!("the auditor found at index {at}: {facts}"),
                None => format!(
                    "the digest at checkpoint {index} is {digest:032x} here; a majority of the masters has another"
                ),
            };
            service.node().start_over(index, why).await;
        }
        Verdict::AllDoubted => {
            tracing::error!(
                index,
                "the auditors of a majority of the masters found wrong records: a bug; keep the data directories"
            );
        }
        Verdict::Split => {
            let why = format!(
                "no majority of the masters has one state at checkpoint {index} ({digest:032x} on master {}): nothing is written until they \
                 agree; keep the data directories, and see `tidepool explain TP0082`",
                service.options().node_id
            );
            tracing::error!(index, why);
            service.metrics().state_split.set(1);
            service.halt().set(Some(Error::new(ErrorCode::StateDiverged, why)));
            return true;
        }
    }
    service.metrics().state_split.set(0);
    service.halt().set(None);
    true
}

/// Asks the other voters for their digest at a checkpoint.
async fn compare(service: &Arc<Service>, index: u64, digest: u128) -> Verdict {
    let own = Answer { digest, doubted: service.machine().doubted().is_some() };
    let members = service.node().status().members;
    let voters = members.iter().filter(|m| m.voter);
    let (own_id, mut votes, mut asked) = (service.options().node_id, false, Vec::new());
    for voter in voters {
        match voter.member.node_id == own_id {
            true => votes = true,
            false => asked.push(ask(service, &voter.member, index)),
        }
    }
    let voters = asked.len() + usize::from(votes);
    let answers = futures::future::join_all(asked).await;
    judge(voters, votes, own, &answers.into_iter().flatten().collect::<Vec<_>>())
}

/// None: it is not there, has not applied the checkpoint yet, does not remember it, or is another than it should be.
async fn ask(service: &Arc<Service>, member: &tidepool_raft::Member, index: u64) -> Option<Answer> {
    let channel = service.standbys().channel(&member.address)?;
    let request = v1::StateDigestRequest { at_least_index: index, remaining_ms: ANSWER_WAIT.as_millis() as u32 };
    let mut client = AdminServiceClient::new(channel);
    let answer = tokio::time::timeout(ANSWER_WAIT * 2, client.state_digest(request)).await.ok()?.ok()?.into_inner();
    let (theirs, ours) = (answer.identity?, service.identity());
    if answer.error.is_some() || theirs.node_id != member.node_id.0 {
        return None;
    }
    if (theirs.cluster_uuid, theirs.history) != (ours.cluster_uuid, ours.history) {
        return None;
    }
    let digest = answer.digest.first_chunk::<16>().filter(|_| answer.applied_index == index)?;
    Some(Answer { digest: u128::from_be_bytes(*digest), doubted: answer.doubted })
}

impl Verdict {
    /// Every name, so that a series is there before it counts.
    pub(super) const NAMES: [&'static str; 5] = ["agreed", "differs", "split", "all_doubted", "open"];

    fn name(self) -> &'static str {
        match self {
            Verdict::Agreed => "agreed",
            Verdict::Differs => "differs",
            Verdict::Split => "split",
            Verdict::AllDoubted => "all_doubted",
            Verdict::Open => "open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(digest: u128) -> Answer {
        Answer { digest, doubted: false }
    }

    fn doubts(digest: u128) -> Answer {
        Answer { digest, doubted: true }
    }

    #[test]
    fn the_majority_judges() {
        for (voters, own, others, verdict) in [
            (1, says(1), vec![], Verdict::Agreed),
            (1, doubts(1), vec![], Verdict::Differs),
            (2, says(1), vec![], Verdict::Open),
            (2, says(1), vec![says(1)], Verdict::Agreed),
            (2, says(1), vec![says(2)], Verdict::Split),
            (3, says(1), vec![], Verdict::Open),
            (3, says(1), vec![says(1)], Verdict::Agreed),
            (3, says(1), vec![says(2)], Verdict::Open),
            (3, says(1), vec![says(2), says(2)], Verdict::Differs),
            (3, says(1), vec![says(1), says(2)], Verdict::Agreed),
            (3, says(1), vec![says(2), says(3)], Verdict::Split),
            (3, doubts(1), vec![says(1), says(1)], Verdict::Differs),
            (3, doubts(1), vec![doubts(1), says(1)], Verdict::AllDoubted),
            (3, says(1), vec![doubts(1), says(1)], Verdict::Agreed),
            (5, says(1), vec![says(2), says(2), says(3)], Verdict::Open),
            (5, says(1), vec![says(1), says(2), says(2), says(3)], Verdict::Split),
        ] {
            assert_eq!(judge(voters, true, own, &others), verdict, "{voters} {own:?} {others:?}");
        }
        // One that only follows has no vote, and is judged all the same.
        assert_eq!(judge(3, false, says(1), &[says(2), says(2)]), Verdict::Differs);
        assert_eq!(judge(3, false, says(1), &[says(1), says(2)]), Verdict::Open);
        assert_eq!(judge(1, false, says(1), &[says(1)]), Verdict::Agreed);
    }

    #[test]
    fn a_halt_refuses_all_but_what_may_end_it() {
        let halt = Halt::default();
        let remove = Op::Discard { objects: Vec::new() };
        let checkpoint = Op::Checkpoint { index: 0, digest: 0 };
        halt.check(std::slice::from_ref(&remove)).unwrap();
        halt.set(Some(Error::new(ErrorCode::StateDiverged, "x")));
        assert_eq!(halt.check(&[remove]).unwrap_err().code(), ErrorCode::StateDiverged);
        halt.check(&[checkpoint, Op::Audit]).unwrap();
        halt.set(None);
        halt.check(&[Op::Discard { objects: Vec::new() }]).unwrap();
    }
}
