//! A leader whose own disk is slow (F14). The other voters make a quorum without it, so calls go on; but while it leads, every vote,
//! truncation and restart of its waits for that disk, and one more fault among the others makes all calls wait for it. So it hands
//! leadership over (M7) to a voter whose disk is faster: only after its appends were slow for a while, only while a majority of the
//! voters keeps up without it, and rarely.

use std::time::Duration;

use openraft::async_runtime::watch::WatchReceiver;
use openraft::async_runtime::{AsyncRuntime, Instant};
use tidepool_proto::NodeId;

use crate::host::Host;
use crate::leadership::Role;
use crate::machine::StateMachine;
use crate::network::Network;
use crate::node::RaftNode;
use crate::roll_call::ask;
use crate::transfer::keeping_up;

/// An append that takes longer is slow. A disk that is fit for a log needs a fraction of it.
pub(crate) const APPEND_SLOW: Duration = Duration::from_millis(100);
/// How long appends must have been slow, one look after the other.
pub(crate) const SLOW_FOR: Duration = Duration::from_secs(3);
/// Time between two handovers that this member begins because of its disk, failed ones included.
pub(crate) const HAND_OVER_EVERY: Duration = Duration::from_secs(60);
/// A voter takes over only if its appends take no more than one part in so many of the leader's.
const FASTER_TIMES: u32 = 2;
/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long another voter may take to say how fast its disk is.
const ANSWER_LIMIT: Duration = Duration::from_millis(500);

/// What the looks so far come to. Times are by this member's own measure.
#[derive(Debug, Default)]
struct Patience {
    slow_since: Option<Duration>,
    attempted: Option<Duration>,
}

impl Patience {
    /// Whether leadership is to be handed over, after a look at `now` that found appends to take so long.
    fn is_over(&mut self, now: Duration, append: Duration) -> bool {
        if append <= APPEND_SLOW {
            self.slow_since = None;
            return false;
        }
        let since = *self.slow_since.get_or_insert(now);
        let is_rested = self.attempted.is_none_or(|at| now.saturating_sub(at) >= HAND_OVER_EVERY);
        now.saturating_sub(since) >= SLOW_FOR && is_rested
    }

    /// Nobody can take over: appends have to be slow anew.
    fn begin_anew(&mut self) {
        self.slow_since = None;
    }

    fn attempt(&mut self, now: Duration) {
        *self = Patience { slow_since: None, attempted: Some(now) };
    }
}

impl<C: Host<Outcome = M::Outcome>, M: StateMachine, N: Network> RaftNode<C, M, N> {
    /// While it leads, looks at its own disk, until the node stops.
    pub(crate) fn watch_own_disk(&self) {
        let (weak, mut stop) = self.weak_and_stop();
        drop(C::AsyncRuntime::spawn(async move {
            let stopped = async move {
                // An error means that the node is gone: the same.
                let _ = stop.wait_for(|stop| *stop).await;
            };
            let watching = async move {
                let began = <C::AsyncRuntime as AsyncRuntime>::Instant::now();
                let mut patience = Patience::default();
                loop {
                    C::AsyncRuntime::sleep(LOOK_EVERY).await;
                    // Held only while it is used: the node ends with its last handle.
                    let Some(node) = weak() else { return };
                    node.look_at_own_disk(&mut patience, || began.elapsed()).await;
                }
            };
            C::AsyncRuntime::select2(stopped, watching).await;
        }));
    }

    async fn look_at_own_disk(&self, patience: &mut Patience, now: impl Fn() -> Duration) {
        let leads = self.watch_leadership().borrow().role == Role::Leader;
        let own = if leads { self.parts().append_latency.now() } else { Duration::ZERO };
        if !patience.is_over(now(), own) {
            return;
        }
        let Some((target, theirs)) = self.faster_voter(own).await else {
            return patience.begin_anew();
        };
        patience.attempt(now());
        tracing::warn!(
            own_ms = own.as_millis() as u64,
            theirs_ms = theirs.as_millis() as u64,
            target,
            "this leader's disk is slow; it hands over to a voter whose disk is faster"
        );
        let result = self.transfer_leader(Some(NodeId(target))).await;
        let label = if result.is_ok() { "handed_over" } else { "refused" };
        self.parts().metrics.slow_disk_handovers.with_label_values(&[label]).inc();
        if let Err(why) = result {
            tracing::warn!(%why, "leadership stays where the disk is slow");
        }
    }

    /// The voter with the fastest disk, if it is much faster than `own` and a majority of all voters keeps up without this one.
    async fn faster_voter(&self, own: Duration) -> Option<(u64, Duration)> {
        let parts = self.parts();
        let (others, voters) = {
            let metrics = parts.raft.metrics().borrow_watched().clone();
            (keeping_up(&metrics, self.profile()), metrics.membership_config.membership().voter_ids().count())
        };
        if others.len() <= voters / 2 {
            return None;
        }
        let members = self.watch_members().borrow().clone();
        let asking = members.iter().filter(|member| others.contains(&member.node_id.0)).map(|member| async {
            let answer = ask::<C, N>(&parts.network, &parts.identity, member, ANSWER_LIMIT).await.ok()?;
            // One of an earlier release does not say it, and is not chosen.
            let takes = Duration::from_micros(answer.append_us?);
            let may = answer.error.is_none() && !answer.keeps_out && takes * FASTER_TIMES <= own;
            may.then_some((member.node_id.0, takes))
        });
        let faster = futures::future::join_all(asking).await;
        faster.into_iter().flatten().min_by_key(|(id, takes)| (*takes, *id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOW: Duration = Duration::from_millis(150);
    const FAST: Duration = Duration::from_millis(5);

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn one_fast_append_begins_the_wait_anew() {
        let mut patience = Patience::default();
        assert!((0..15).all(|look| !patience.is_over(at(look * 200), SLOW)), "not for long enough");
        assert!(!patience.is_over(at(3_000), FAST));
        assert!((16..31).all(|look| !patience.is_over(at(look * 200), SLOW)), "it began anew");
        assert!(patience.is_over(at(6_200), SLOW));
    }

    #[test]
    fn leadership_is_handed_over_once_a_minute_at_most() {
        let mut patience = Patience::default();
        let mut attempts = Vec::new();
        for look in 0..1_000 {
            if patience.is_over(at(look * 200), SLOW) {
                attempts.push(look * 200);
                patience.attempt(at(look * 200));
            }
        }
        assert_eq!(attempts, [3_000, 63_000, 123_000, 183_000]);
    }
}
