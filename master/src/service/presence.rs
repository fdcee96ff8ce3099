//! Whether datanodes hold what a directory of before lists on them (I2).
//!
//! A restored or recovered directory may be older than the memory that it describes: what was removed since it was saved is listed, and its
//! space was given to others. Readers never take other bytes for it, but nothing else would ever free it. So the leader asks each
//! datanode that goes on from an earlier history for the headers of what was stored there before: a batch at a time, the next when
//! the last is settled. What the datanode says is not there is dropped, by object and replica id (the directory checks both).
//!
//! No replica is asked about that was made in the present history, so none that is being written. A listed replica is never written
//! again, so an answer stays true; yet only that to the question which is open counts. Nothing of this is replicated: a new leader
//! begins again, and what is gone is gone.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidepool_proto::{Error, Incarnation, NodeId, ObjectId, ReplicaId, SegmentId, v1};

use super::core::{Service, unexpected};
use super::options::REPLICA_IDS_PER_BATCH;
use super::tenure::Tenure;
use crate::directory::{Ancestors, Contact, Directory, NodeView, Op, Outcome};

/// Pages of a segment that one round looks through for what was stored before.
const PAGES_MAX: usize = 4;

/// A datanode and its life.
type Life = (NodeId, Incarnation);

/// How far the checks of a term are, by datanode.
#[derive(Default)]
pub struct PresenceTable {
    checks: Mutex<HashMap<NodeId, Check>>,
}

struct Check {
    incarnation: Incarnation,
    step: Step,
    number: u64,
    checked: u64,
    dropped: u64,
}

#[derive(Clone)]
enum Step {
    /// The next batch begins here.
    Next(Place),
    /// Asked, and not answered yet.
    Asked(Arc<Batch>),
    /// Answered; these are to be dropped.
    Answered(Arc<Batch>, Vec<ReplicaId>),
    Done,
}

/// Segments go by id.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    segment: SegmentId,
    from: u64,
}

/// One question, and where the next one begins.
struct Batch {
    query: v1::PresenceQuery,
    next: Place,
}

impl PresenceTable {
    /// The open question to a datanode, unless it was told: `told` is the number of the one that it was told last.
    pub fn question(&self, (node, incarnation): Life, told: &mut u64) -> Option<v1::PresenceQuery> {
        let checks = self.checks.lock();
        let check = checks.get(&node).filter(|check| check.incarnation == incarnation)?;
        let Step::Asked(batch) = &check.step else { return None };
        (std::mem::replace(told, batch.query.number) != batch.query.number).then(|| batch.query.clone())
    }

    /// A datanode's answer in this term. It counts for the question that is open, and for what that names.
    pub fn answered(&self, (node, incarnation): Life, answer: &v1::PresenceAnswer) {
        let mut checks = self.checks.lock();
        let Some(check) = checks.get_mut(&node).filter(|check| check.incarnation == incarnation) else { return };
        let Step::Asked(batch) = &check.step else { return };
        if batch.query.number != answer.number {
            return;
        }
        let asked = |id: &&u64| batch.query.replicas.iter().any(|replica| replica.replica_id == **id);
        let missing =
            answer.missing.iter().take(REPLICA_IDS_PER_BATCH).filter(asked).map(|&id| ReplicaId(id)).collect();
        check.step = Step::Answered(batch.clone(), missing);
    }

    fn step(&self, (node, incarnation): Life) -> Step {
        let mut checks = self.checks.lock();
        let begin = || Check {
            incarnation,
            step: Step::Next(Place { segment: SegmentId(0), from: 0 }),
            number: 0,
            checked: 0,
            dropped: 0,
        };
        let check = checks.entry(node).or_insert_with(begin);
        if check.incarnation != incarnation {
            *check = begin();
        }
        check.step.clone()
    }

    /// The batch is settled: what of it was missing is dropped.
    fn settled(&self, life: Life, batch: &Batch, dropped: u64) {
        self.change(life, |check| {
            check.checked += batch.query.replicas.len() as u64;
            check.dropped += dropped;
            check.step = Step::Next(batch.next);
        });
    }

    fn ask(&self, life: Life, replicas: Vec<v1::VerifyReplica>, next: Place) {
        self.change(life, |check| {
            check.number += 1;
            let query = v1::PresenceQuery { number: check.number, replicas };
            check.step = Step::Asked(Arc::new(Batch { query, next }));
        });
    }

    fn change(&self, (node, incarnation): Life, change: impl FnOnce(&mut Check)) {
        let mut checks = self.checks.lock();
        if let Some(check) = checks.get_mut(&node).filter(|check| check.incarnation == incarnation) {
            change(check);
        }
    }
}

/// One round: of each datanode that goes on from an earlier history, what it answered is dropped, and the next batch is asked.
pub async fn work(service: &Service, tenure: &Tenure) -> Result<(), Error> {
    let directory = service.directory();
    let ancestors = directory.ancestors();
    let of_before = |node: &NodeView| ancestors.history_of(node.incarnation.op()).is_some();
    for node in directory.nodes().into_iter().filter(of_before) {
        // Its segments are mounted when it beats, and it is listed by then.
        if node.contact != Contact::Heard || !tenure.nodes.was_heard(node.node) {
            continue;
        }
        let (table, life) = (&tenure.presence, (node.node, node.incarnation));
        if let Step::Answered(batch, missing) = table.step(life) {
            let dropped = drop_missing(service, tenure, &batch, missing).await?;
            table.settled(life, &batch, dropped);
        }
        let Step::Next(place) = table.step(life) else { continue };
        match next_batch(directory, &ancestors, node.node, place) {
            Found::Replicas(replicas, next) => {
                table.ask(life, replicas, next);
                tenure.nodes.wake(node.node);
            }
            Found::NoneYet(next) => table.change(life, |check| check.step = Step::Next(next)),
            Found::End => table.change(life, |check| {
                check.step = Step::Done;
                let (checked, dropped) = (check.checked, check.dropped);
                tracing::info!(node = node.node.0, address = %node.address, checked, dropped, "checked what is stored there from before this history");
            }),
        }
    }
    Ok(())
}

async fn drop_missing(
    service: &Service,
    tenure: &Tenure,
    batch: &Batch,
    missing: Vec<ReplicaId>,
) -> Result<u64, Error> {
    let metrics = &service.metrics().presence_checked;
    let asked = batch.query.replicas.iter();
    let missing = asked.filter(|replica| missing.contains(&ReplicaId(replica.replica_id)));
    let drop = |replica: &v1::VerifyReplica| Op::DropReplica {
        object: ObjectId(replica.object_id),
        replica: ReplicaId(replica.replica_id),
    };
    let ops: Vec<Op<'_>> = missing.map(drop).collect();
    let mut dropped = 0;
    if !ops.is_empty() {
        for outcome in tenure.proposer.propose(&ops, None).await? {
            match outcome {
                Outcome::ReplicaDropped { .. } => dropped += 1,
                // It went by itself meanwhile.
                Outcome::Refused(_) => {}
                other => return Err(unexpected("drop_replica", &other)),
            }
        }
    }
    metrics.with_label_values(&["missing"]).inc_by(ops.len() as u64);
    metrics.with_label_values(&["held"]).inc_by((batch.query.replicas.len() - ops.len()) as u64);
    Ok(dropped)
}

enum Found {
    /// These are to be asked about; the next batch begins there.
    Replicas(Vec<v1::VerifyReplica>, Place),
    /// None so far.
    NoneYet(Place),
    End,
}

/// The next readable replicas of a node that were made in an earlier history.
fn next_batch(directory: &Directory, ancestors: &Ancestors, node: NodeId, mut place: Place) -> Found {
    let segments = directory.segments().into_iter().filter(|segment| segment.node == node);
    let mut segments: Vec<SegmentId> = segments.map(|segment| segment.segment).collect();
    segments.sort_unstable();
    for _ in 0..PAGES_MAX {
        let Some(&segment) = segments.iter().find(|&&segment| segment >= place.segment) else { return Found::End };
        let from = if segment == place.segment { place.from } else { 0 };
        let page = directory.replicas_in(segment, from, REPLICA_IDS_PER_BATCH);
        place = match page.last() {
            Some(&(offset, ..)) => Place { segment, from: offset + 1 },
            None => Place { segment: SegmentId(segment.0 + 1), from: 0 },
        };
        let of_before = page.into_iter().filter_map(|(offset, object, replica)| {
            let replica = replica.filter(|replica| ancestors.history_of(replica.op()).is_some())?;
            let at = directory
                .with_object_id(object, |view| view?.replicas.iter().find(|r| r.replica == replica).copied())?;
            Some(v1::VerifyReplica {
                object_id: object.0,
                replica_id: replica.0,
                segment_id: segment.0,
                offset,
                length: at.length,
                history: Service::history_on_wire(ancestors, object.op()),
            })
        });
        let replicas: Vec<v1::VerifyReplica> = of_before.collect();
        if !replicas.is_empty() {
            return Found::Replicas(replicas, place);
        }
    }
    Found::NoneYet(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Life = (NodeId(1), Incarnation(5));

    fn asked() -> (PresenceTable, u64) {
        let table = PresenceTable::default();
        assert!(matches!(table.step(LIFE), Step::Next(_)));
        let replicas = [7, 8].map(|replica_id| v1::VerifyReplica { replica_id, ..Default::default() }).to_vec();
        table.ask(LIFE, replicas, Place { segment: SegmentId(2), from: 0 });
        let mut told = 0;
        let number = table.question(LIFE, &mut told).unwrap().number;
        assert!(table.question(LIFE, &mut told).is_none(), "told once a conversation");
        assert!(table.question(LIFE, &mut 0).is_some(), "and in the next one again");
        (table, number)
    }

    fn missing(table: &PresenceTable) -> Option<Vec<ReplicaId>> {
        let Step::Answered(_, missing) = table.step(LIFE) else { return None };
        Some(missing)
    }

    #[test]
    fn only_the_answer_to_the_open_question_counts_and_only_for_what_it_names() {
        let (table, number) = asked();
        let answer = |number, missing: &[u64]| v1::PresenceAnswer { term: 1, number, missing: missing.to_vec() };
        table.answered(LIFE, &answer(number + 1, &[7]));
        table.answered(LIFE, &answer(number - 1, &[7]));
        table.answered((NodeId(1), Incarnation(4)), &answer(number, &[7]));
        table.answered((NodeId(2), Incarnation(5)), &answer(number, &[7]));
        assert_eq!(missing(&table), None);
        table.answered(LIFE, &answer(number, &[8, 9]));
        assert_eq!(missing(&table), Some(vec![ReplicaId(8)]));
        table.answered(LIFE, &answer(number, &[7]));
        assert_eq!(missing(&table), Some(vec![ReplicaId(8)]), "it is closed");
    }

    #[test]
    fn another_incarnation_begins_anew() {
        let (table, _) = asked();
        let later = (NodeId(1), Incarnation(6));
        assert!(matches!(table.step(later), Step::Next(Place { segment: SegmentId(0), from: 0 })));
    }
}
