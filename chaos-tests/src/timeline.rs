//! What the masters said of themselves around a fault, looked at every few milliseconds: when the loss was noticed, when somebody
//! else led, and how long clients took from there. Only for the breakdown of an outage; whether it was one, clients judge.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tidepool_proto::v1::StatusRequest;

use crate::admin;
use crate::clock::{monotonic_ns, ns_to_ms};
use crate::process::Fault;

/// Pause between two looks: the precision of the breakdown.
const LOOK_EVERY: Duration = Duration::from_millis(4);
/// Deadline of one look.
const LOOK_WITHIN: Duration = Duration::from_millis(100);
/// Sightings that are kept.
const SIGHTINGS_MAX: usize = 20_000;

/// A master as it was seen. Only changes are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// When the answer was there (CLOCK_MONOTONIC).
    pub at_ns: u64,
    /// Which master.
    pub master: usize,
    /// leader, standby, candidate...
    pub role: String,
    /// Its term.
    pub term: u64,
    /// Whether it knew a leader.
    pub sees_leader: bool,
}

/// The parts of an outage, one after the other.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Breakdown {
    /// From the fault until a surviving master missed the leader (it campaigns, or knows none, or has a new term).
    pub detect_ms: Option<f64>,
    /// From there until a master leads in a new term.
    pub elect_ms: Option<f64>,
    /// From there until the first put that was sent after the fault was acknowledged.
    pub commit_ms: Option<f64>,
    /// From there until every client had a success.
    pub reroute_ms: Option<f64>,
}

/// Looks at masters until it is stopped.
pub struct Watch {
    stop: Arc<AtomicBool>,
    sightings: Arc<Mutex<Vec<Sighting>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Watch {
    /// Begins to look at these masters.
    pub fn start(addresses: Vec<String>) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let sightings = Arc::new(Mutex::new(Vec::new()));
        let tasks = addresses.into_iter().enumerate().map(|(master, address)| {
            let (stop, sightings) = (stop.clone(), sightings.clone());
            tokio::spawn(async move { look(master, &address, &stop, &sightings).await })
        });
        Watch { tasks: tasks.collect(), stop, sightings }
    }

    /// Ends it; answers what was seen, by time.
    pub async fn end(self) -> Vec<Sighting> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            // A look that failed has seen nothing.
            let _ = task.await;
        }
        let mut seen = std::mem::take(&mut *self.sightings.lock());
        seen.sort_by_key(|sighting| sighting.at_ns);
        seen
    }
}

async fn look(master: usize, address: &str, stop: &AtomicBool, sightings: &Mutex<Vec<Sighting>>) {
    let mut last: Option<Sighting> = None;
    let mut connection = None;
    while !stop.load(Ordering::Relaxed) {
        if connection.is_none() {
            let dialled = tokio::time::timeout(LOOK_WITHIN, admin::connect(address)).await;
            connection = dialled.ok().and_then(Result::ok);
        }
        if let Some(service) = connection.as_mut() {
            match tokio::time::timeout(LOOK_WITHIN, service.status(StatusRequest {})).await {
                Ok(Ok(answer)) => {
                    let status = answer.into_inner();
                    let seen = Sighting {
                        at_ns: monotonic_ns(),
                        master,
                        sees_leader: status.leader.is_some(),
                        role: status.role,
                        term: status.term,
                    };
                    let same = last.as_ref().is_some_and(|last| {
                        (&last.role, last.term, last.sees_leader) == (&seen.role, seen.term, seen.sees_leader)
                    });
                    let mut all = sightings.lock();
                    if !same && all.len() < SIGHTINGS_MAX {
                        all.push(seen.clone());
                    }
                    last = Some(seen);
                }
                _ => connection = None,
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

impl Breakdown {
    /// Of one outage. `struck` is the master that was struck, if one was; `written_ns` when the first put sent after the fault was
    /// acknowledged, `all_back_ns` when the last client had its first success.
    pub fn of(
        sightings: &[Sighting],
        fault: Fault,
        struck: Option<usize>,
        written_ns: Option<u64>,
        all_back_ns: Option<u64>,
    ) -> Breakdown {
        let before = sightings.iter().filter(|seen| seen.at_ns <= fault.at_ns).map(|seen| seen.term).max();
        let old_term = before.unwrap_or(0);
        let mut after = sightings.iter().filter(|seen| seen.at_ns > fault.at_ns);
        let elected = after.clone().find(|seen| seen.role == "leader" && seen.term > old_term).map(|seen| seen.at_ns);
        // Who leads in a new term noticed before.
        let noticed = after
            .find(|seen| {
                Some(seen.master) != struck
                    && (seen.term > old_term
                        || seen.role == "candidate"
                        || (seen.role == "standby" && !seen.sees_leader))
            })
            .map(|seen| seen.at_ns)
            .filter(|_| elected.is_some());
        let part = |from: Option<u64>, to: Option<u64>| Some(ns_to_ms(to?.saturating_sub(from?)));
        Breakdown {
            detect_ms: part(Some(fault.at_ns), noticed),
            elect_ms: part(noticed, elected),
            commit_ms: part(elected, written_ns),
            reroute_ms: part(written_ns, all_back_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn seen(at_ms: u64, master: usize, role: &str, term: u64, sees_leader: bool) -> Sighting {
        Sighting { at_ns: at_ms * MS, master, role: role.into(), term, sees_leader }
    }

    #[test]
    fn the_parts_of_an_outage_follow_each_other() {
        let fault = Fault { at_ns: 100 * MS, certain_ns: 101 * MS };
        let sightings = [
            seen(1, 0, "leader", 3, true),
            seen(1, 1, "standby", 3, true),
            seen(104, 0, "standby", 3, false), // the struck one's own view does not count
            seen(180, 1, "candidate", 4, false),
            seen(190, 1, "leader", 4, true),
        ];
        let parts = Breakdown::of(&sightings, fault, Some(0), Some(200 * MS), Some(230 * MS));
        assert_eq!((parts.detect_ms, parts.elect_ms), (Some(80.0), Some(10.0)));
        assert_eq!((parts.commit_ms, parts.reroute_ms), (Some(10.0), Some(30.0)));
    }

    #[test]
    fn without_another_leader_there_is_nothing_to_detect() {
        let fault = Fault { at_ns: 100 * MS, certain_ns: 101 * MS };
        let sightings = [seen(1, 0, "leader", 3, true), seen(1, 1, "standby", 3, true)];
        let parts = Breakdown::of(&sightings, fault, Some(1), Some(102 * MS), Some(110 * MS));
        assert_eq!((parts.detect_ms, parts.elect_ms, parts.commit_ms), (None, None, None));
        assert_eq!(parts.reroute_ms, Some(8.0));
    }
}
