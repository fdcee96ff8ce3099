//! Whether what the directory lists here is here (I2): after a restore it may list what was removed, and overwritten, since it was saved.
//!
//! The leader asks in batches, the next one when the last is answered. Only headers are looked at: whoever writes over an object
//! writes over its beginning first, and readers verify the rest.

use std::sync::Arc;

use tidepool_proto::object::HEADER_BYTES;
use tidepool_proto::{ObjectId, SegmentId, v1};
use tokio::sync::watch;

use crate::life::Life;
use crate::outbox::Outbox;
use crate::verify::{Expected, Verifier};

/// A query, and the term of the leader that asked it.
type Asked = Option<(u64, Arc<v1::PresenceQuery>)>;

/// Answers queries one after the other on a blocking thread. Of those that wait only the newest counts: a leader that asks anew has
/// no use for the answer before.
pub(crate) struct PresenceChecker {
    newest: watch::Sender<Asked>,
    answers: Arc<Outbox<v1::PresenceAnswer>>,
}

impl PresenceChecker {
    /// Starts the task; it ends when this is dropped.
    pub(crate) fn new(life: Arc<Life>) -> PresenceChecker {
        let (newest, mut asked) = watch::channel::<Asked>(None);
        let answers = Arc::new(Outbox::default());
        let outbox = answers.clone();
        tokio::spawn(async move {
            while asked.changed().await.is_ok() {
                let Some((term, query)) = asked.borrow_and_update().clone() else { continue };
                let life = life.clone();
                match tokio::task::spawn_blocking(move || check(&life, term, &query)).await {
                    Ok(Some(answer)) => outbox.add(0, answer),
                    Ok(None) => {}
                    Err(error) => tracing::error!(%error, "a check of what is stored here failed"),
                }
            }
        });
        PresenceChecker { newest, answers }
    }

    pub(crate) fn ask(&self, term: u64, query: v1::PresenceQuery) {
        self.newest.send_replace(Some((term, Arc::new(query))));
    }

    pub(crate) fn answers(&self) -> &Outbox<v1::PresenceAnswer> {
        &self.answers
    }
}

/// None when the life ended meanwhile: what its memory held says nothing any more.
pub(crate) fn check(life: &Life, term: u64, query: &v1::PresenceQuery) -> Option<v1::PresenceAnswer> {
    let missing = query.replicas.iter().filter(|replica| is_missing(life, replica)).map(|replica| replica.replica_id);
    let missing = missing.collect();
    (!life.is_over()).then_some(v1::PresenceAnswer { term, number: query.number, missing })
}

/// Whether the header that lies there is not the replica's. What cannot be looked at now is not called missing: who reads it finds out.
fn is_missing(life: &Life, replica: &v1::VerifyReplica) -> bool {
    let segment_id = SegmentId(replica.segment_id);
    let header_bytes = HEADER_BYTES as u64;
    let Some(segment) = life.segments().get(&segment_id) else { return false };
    if replica.length < header_bytes || segment.address(replica.offset, replica.length).is_none() {
        return false;
    }
    let Ok(hold) = life.writes().hold_for_verification(segment_id, replica.offset, header_bytes) else { return false };
    let expected = Expected {
        history: life.history_of(replica.history),
        object: ObjectId(replica.object_id),
        stored_bytes: replica.length,
    };
    let is_another = |header: &[u8]| Verifier::new(expected).advance(header).is_err();
    segment.look(hold.claim(), header_bytes, is_another).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tidepool_proto::capability::Secret;
    use tidepool_proto::clock::BootInstant;
    use tidepool_proto::object::{build_prefix, key_hash, stored_bytes};
    use tidepool_proto::{ClusterId, History, Incarnation, LogTime, NodeId};

    use super::*;
    use crate::life::Registration;
    use crate::log_clock::LogClock;
    use crate::options::HugePages;
    use crate::segment::Segment;
    use crate::succession::Lineage;
    use crate::writes::{WriteLimits, WriteTable};

    const SEGMENT: SegmentId = SegmentId(4);
    const PAYLOAD: &[u8] = b"payload";

    /// A life in history 2 whose memory holds object 9 of history 1 at 4096.
    fn life() -> Life {
        let segment = Segment::create("dram", 1 << 20, HugePages::Off).unwrap();
        let registration = Registration {
            cluster: ClusterId([1; 16]),
            history: History(2),
            node: NodeId(1),
            incarnation: Incarnation(1),
            secret: Secret([0; 32]),
            heartbeat_interval: std::time::Duration::from_secs(1),
            registered_in: History(1),
            process_uuid: [0; 16],
            lineage: Lineage::default(),
        };
        let clock = LogClock::new(LogTime(0), BootInstant::now());
        let writes = Arc::new(WriteTable::new(WriteLimits::default(), clock));
        let life = Life::new(registration, HashMap::from([(SEGMENT, Arc::new(segment))]), writes);
        let mut stored = build_prefix(History(1), ObjectId(9), key_hash("", b"k"), &[PAYLOAD]);
        stored.extend_from_slice(PAYLOAD);
        for (at, byte) in stored.iter().enumerate() {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                life.segments()[&SEGMENT].flip_bit((4096 + at as u64) * 8 + bit);
            }
        }
        life
    }

    fn replica(id: u64, history: u64, object: u64, offset: u64) -> v1::VerifyReplica {
        let length = stored_bytes(PAYLOAD.len() as u64);
        v1::VerifyReplica { object_id: object, replica_id: id, segment_id: SEGMENT.0, offset, length, history }
    }

    #[test]
    fn what_lies_there_is_there_and_all_else_is_missing() {
        let there = replica(1, 1, 9, 4096);
        let longer = v1::VerifyReplica { replica_id: 6, length: there.length + 64, ..there };
        let replicas = vec![
            there,
            replica(2, 1, 8, 4096),
            replica(3, 3, 9, 4096),
            replica(4, 0, 9, 4096),
            replica(5, 1, 9, 8192),
            longer,
        ];
        let answer = check(&life(), 7, &v1::PresenceQuery { number: 3, replicas }).unwrap();
        assert_eq!((answer.term, answer.number, answer.missing), (7, 3, vec![2, 3, 4, 5, 6]));
    }

    #[test]
    fn what_cannot_be_looked_at_is_not_called_missing() {
        let life = life();
        let elsewhere = v1::VerifyReplica { segment_id: 5, ..replica(1, 1, 8, 4096) };
        let outside = replica(2, 1, 8, 1 << 20);
        let _held = life.writes().hold_for_verification(SEGMENT, 4096, 64).unwrap();
        let replicas = vec![elsewhere, outside, replica(3, 1, 8, 4096)];
        let query = v1::PresenceQuery { number: 1, replicas };
        assert_eq!(check(&life, 1, &query).unwrap().missing, Vec::<u64>::new());
        life.end();
        assert_eq!(check(&life, 1, &query), None);
    }
}
