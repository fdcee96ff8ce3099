//! A cluster that goes on in another one (I1, I3): its directory was restored or recovered into a new cluster and history, whose
//! masters name the clusters that it was in before.
//!
//! A datanode follows when a leader of such a successor answers and nobody of the known cluster does. First everything of the life
//! before ends: connections are closed, copies stop, and no step of any write is left. Only then it registers with the successor,
//! as the same process. A directory that knows this process answers the incarnation it had, and what is stored here is offered
//! again; one that was saved before this life began answers another, and the content goes.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use tidepool_proto::{ClusterId, Error, History, Incarnation, NodeId, v1};

use crate::life::{Life, Registration};
use crate::segment::Segment;

/// A cluster that another one went on in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Successor {
    pub(crate) cluster: ClusterId,
    pub(crate) history: History,
}

/// Clusters remembered that a node was registered in one after the other.
const LINEAGE_MAX: usize = 64;

/// The clusters and histories of a node, the present one first. A snapshot that was saved in an earlier one may be restored again
/// when the later ones are lost. As text, one line each: cluster and history.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Lineage(Vec<(ClusterId, History)>);

impl Lineage {
    /// As before, and now in this one.
    pub(crate) fn and_now(&self, cluster: ClusterId, history: History) -> Lineage {
        let mut all = self.0.clone();
        all.retain(|one| *one != (cluster, history));
        all.insert(0, (cluster, history));
        all.truncate(LINEAGE_MAX);
        Lineage(all)
    }
}

impl fmt::Display for Lineage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(cluster, history)| writeln!(f, "{cluster} {:016x}", history.0))
    }
}

/// A text that is no lineage.
#[derive(Debug)]
pub(crate) struct NoLineage;

impl FromStr for Lineage {
    type Err = NoLineage;

    fn from_str(text: &str) -> Result<Lineage, NoLineage> {
        let line = |line: &str| {
            let (cluster, history) = line.split_once(' ')?;
            let digits: String = cluster.chars().filter(|&digit| digit != '-').collect();
            let cluster = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
            let history = u64::from_str_radix(history, 16).ok()?;
            Some((ClusterId(cluster.to_be_bytes()), History(history)))
        };
        text.lines().take(LINEAGE_MAX).map(line).collect::<Option<_>>().map(Lineage).ok_or(NoLineage)
    }
}

impl Successor {
    /// Of a node that was registered: the cluster of a master that names one of its clusters and histories as an ancestor.
    pub(crate) fn of(lineage: &Lineage, identity: &v1::Identity) -> Option<Successor> {
        let (present, _) = *lineage.0.first()?;
        Successor::if_named(present, identity, |ancestor| {
            let known = |(cluster, history): &(ClusterId, History)| {
                cluster.0[..] == ancestor.cluster_uuid && history.0 == ancestor.history
            };
            lineage.0.iter().any(known)
        })
    }

    /// Of a process that knows its cluster only from its directory.
    pub(crate) fn of_cluster(cluster: ClusterId, identity: &v1::Identity) -> Option<Successor> {
        Successor::if_named(cluster, identity, |ancestor| ancestor.cluster_uuid[..] == cluster.0)
    }

    fn if_named(present: ClusterId, theirs: &v1::Identity, known: impl Fn(&v1::Ancestor) -> bool) -> Option<Successor> {
        let cluster = <[u8; 16]>::try_from(&theirs.cluster_uuid[..]).ok()?;
        (theirs.history != 0 && cluster != present.0 && theirs.ancestors.iter().any(known))
            .then_some(Successor { cluster: ClusterId(cluster), history: History(theirs.history) })
    }
}

/// What is followed, and what the life before left.
pub(crate) struct Legacy {
    pub(crate) successor: Successor,
    /// None: this process has not been registered yet.
    life: Option<Arc<Life>>,
}

impl Legacy {
    /// Of a life that has ended: returns when nothing of it can touch the memory any more.
    pub(crate) async fn of(life: Option<Arc<Life>>, successor: Successor) -> Legacy {
        if let Some(life) = &life {
            assert!(life.is_over(), "a life that goes on leaves nothing");
            life.writes().abort_all();
            life.writes().quiet().await;
        }
        Legacy { successor, life }
    }

    /// The successor that is followed instead of the first one.
    pub(crate) fn goes_on_in(self, successor: Successor) -> Legacy {
        Legacy { successor, ..self }
    }

    /// The retry token under which the directory may know this process.
    pub(crate) fn process_uuid(&self) -> Option<[u8; 16]> {
        Some(self.life.as_ref()?.registration().process_uuid)
    }

    /// Whether a registration continues that life: the same incarnation, of the same history. Incarnations of two histories may
    /// have one number.
    pub(crate) fn is_continued_by(&self, now: &Registration) -> bool {
        let of = |registration: &Registration| -> (NodeId, Incarnation, History) {
            (registration.node, registration.incarnation, registration.registered_in)
        };
        self.life.as_ref().is_some_and(|life| of(life.registration()) == of(now))
    }

    /// ONE-WRITER across histories: nothing is written any more under the life before.
    pub(crate) fn assert_quiet(&self) {
        let quiet = self.life.as_ref().is_none_or(|life| life.writes().is_quiet());
        assert!(quiet, "a write of the history before is still open");
    }

    /// Whether there is content that may be kept.
    pub(crate) fn has_content(&self) -> bool {
        self.life.is_some()
    }

    /// The memory it had, by name.
    pub(crate) fn segments(&self) -> Option<Vec<Arc<Segment>>> {
        let mut segments: Vec<Arc<Segment>> = self.life.as_ref()?.segments().values().cloned().collect();
        segments.sort_by(|a, b| a.name().cmp(b.name()));
        Some(segments)
    }

    /// Gives the memory back: the directory of the successor does not know it.
    pub(crate) fn drop_content(self) {
        if let Some(life) = self.life {
            life.drop_content();
        }
    }
}

/// The error with which a master of another cluster ended a search, and what it succeeds.
#[derive(Clone, Debug)]
pub(crate) struct Succeeded {
    pub(crate) successor: Successor,
    pub(crate) error: Error,
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use tidepool_proto::capability::{Capability, Secret, Verb};
    use tidepool_proto::clock::BootInstant;
    use tidepool_proto::{LogTime, ObjectId, ReplicaId, SegmentId};

    use super::*;
    use crate::log_clock::LogClock;
    use crate::writes::{End, WriteLimits, WriteTable};

    fn registration(node: u64, incarnation: u64, registered_in: u64) -> Registration {
        Registration {
            cluster: ClusterId([1; 16]),
            history: History(9),
            node: NodeId(node),
            incarnation: Incarnation(incarnation),
            secret: Secret([0; 32]),
            heartbeat_interval: Duration::from_secs(1),
            registered_in: History(registered_in),
            process_uuid: [3; 16],
            lineage: Lineage::default(),
        }
    }

    fn life(registration: Registration) -> Arc<Life> {
        let clock = LogClock::new(LogTime(1_000), BootInstant::now());
        let writes = Arc::new(WriteTable::new(WriteLimits::default(), clock));
        Arc::new(Life::new(registration, HashMap::new(), writes))
    }

    const NEXT: Successor = Successor { cluster: ClusterId([2; 16]), history: History(77) };

    /// Incarnations are log indexes: those of two branches of one past may have one number. Fails when the history is not compared (tried).
    #[tokio::test]
    async fn only_the_same_incarnation_of_the_same_history_goes_on() {
        let before = life(registration(4, 5, 7));
        before.end();
        let legacy = Legacy::of(Some(before), NEXT).await;
        assert!(legacy.is_continued_by(&registration(4, 5, 7)));
        for other in [registration(4, 5, 8), registration(4, 6, 7), registration(3, 5, 7)] {
            assert!(!legacy.is_continued_by(&other), "{other:?}");
        }
    }

    /// ONE-WRITER across histories: whoever is inside a step of a write holds up what follows, until the step has ended.
    /// Fails without waiting for that (tried).
    #[tokio::test]
    async fn a_life_is_left_only_when_nobody_writes_any_more() {
        let before = life(registration(4, 5, 7));
        let grant = Capability {
            verb: Verb::Write,
            object: ObjectId(1),
            replica: ReplicaId(1),
            segment: SegmentId(1),
            incarnation: Incarnation(5),
            node: NodeId(4),
            offset: 0,
            length: 128,
            expires: LogTime(9_000),
        };
        let write = before.writes().begin(&grant).unwrap();
        assert!(write.enter());
        before.end();
        let mut leaving = Box::pin(Legacy::of(Some(before.clone()), NEXT));
        assert!(futures::poll!(leaving.as_mut()).is_pending(), "a step is under way");
        before.writes().finish(&write, End::Aborted);
        leaving.await.assert_quiet();
    }

    fn identity(cluster: u8, ancestors: &[(u8, u64)]) -> v1::Identity {
        let ancestor = |&(number, history): &(u8, u64)| v1::Ancestor { cluster_uuid: vec![number; 16].into(), history };
        let ancestors = ancestors.iter().map(ancestor).collect();
        v1::Identity { cluster_uuid: vec![cluster; 16].into(), history: 77, ancestors, ..Default::default() }
    }

    #[test]
    fn only_who_names_the_known_cluster_and_history_succeeds_it() {
        let known = ClusterId([1; 16]);
        let lineage = Lineage::default().and_now(ClusterId([4; 16]), History(9)).and_now(known, History(5));
        let of = |identity: &v1::Identity| Successor::of(&lineage, identity);
        let successor = Some(Successor { cluster: ClusterId([2; 16]), history: History(77) });
        assert_eq!(of(&identity(2, &[(1, 5)])), successor);
        assert_eq!(of(&identity(2, &[(9, 1), (1, 5), (8, 1)])), successor, "over several restores");
        assert_eq!(of(&identity(2, &[(4, 9)])), successor, "the snapshot of before, restored again");
        assert_eq!(of(&identity(2, &[])), None, "a stranger");
        assert_eq!(of(&identity(2, &[(1, 6)])), None, "another history of it");
        assert_eq!(of(&identity(2, &[(3, 5)])), None);
        assert_eq!(of(&identity(1, &[(1, 5)])), None, "nobody succeeds itself");
        assert_eq!(
            Successor::of_cluster(known, &identity(2, &[(1, 6)])),
            successor,
            "a restarted process knows no history"
        );
    }
}
