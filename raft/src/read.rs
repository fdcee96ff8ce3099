//! Linearizable reads (R2). One confirmation of leadership, asked of openraft's linearizer, serves every caller that
//! arrived before it began; callers that arrive later share the next one. Nobody's cancellation hurts another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;

use crate::options::Member;

/// Why a read cannot be served here and now.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// This member does not lead.
    #[error("this member does not lead; {}", hint_text(.hint))]
    NotLeader {
        /// Who does, as far as known.
        hint: Option<Member>,
    },
    /// No quorum confirmed the leadership in time.
    #[error("leadership is not confirmed: {0}")]
    Unavailable(String),
    /// The node stopped for good.
    #[error("the node stopped: {0}")]
    Fatal(String),
}

pub(crate) fn hint_text(hint: &Option<Member>) -> String {
    match hint {
        Some(member) => format!("node {} at {} does", member.node_id, member.address),
        None => "the leader is not known".to_owned(),
    }
}

type Answer = Result<u64, ReadError>;

struct Round {
    begun: Arc<AtomicBool>,
    answer: Shared<BoxFuture<'static, Answer>>,
}

/// Shares confirmations among callers.
#[derive(Default)]
pub(crate) struct ReadBarrier {
    last: Mutex<Option<Round>>,
    pub(crate) rounds: AtomicU64,
}

impl ReadBarrier {
    /// Waits for a confirmation that begins after this call. `confirm` makes one.
    pub(crate) async fn wait<F>(&self, confirm: impl FnOnce() -> F) -> Answer
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        let answer = {
            let mut last = self.last.lock();
            match &*last {
                // Not begun while we hold the lock after our caller called: it begins after the call.
                Some(round) if !round.begun.load(Ordering::SeqCst) => round.answer.clone(),
                _ => {
                    self.rounds.fetch_add(1, Ordering::Relaxed);
                    let earlier = last.take().map(|round| round.answer).filter(|answer| answer.peek().is_none());
                    let begun = Arc::new(AtomicBool::new(false));
                    let (begins, confirming) = (begun.clone(), confirm());
                    let answer = async move {
                        // One at a time: what queues up meanwhile shares the next.
                        if let Some(earlier) = earlier {
                            let _ = earlier.await;
                        }
                        begins.store(true, Ordering::SeqCst);
                        confirming.await
                    };
                    let answer = answer.boxed().shared();
                    *last = Some(Round { begun, answer: answer.clone() });
                    answer
                }
            }
        };
        answer.await
    }
}

/// Notices that the machine was suspended: leases are measured on a clock that did not see that time pass, so a
/// confirmation from before proves nothing.
#[derive(Default)]
pub(crate) struct SuspendWatch {
    seen_ms: AtomicU64,
    doubtful: AtomicBool,
}

impl SuspendWatch {
    /// Starts with what the machine was suspended before.
    pub(crate) fn new(suspended: Duration) -> SuspendWatch {
        SuspendWatch { seen_ms: AtomicU64::new(suspended.as_millis() as u64), doubtful: AtomicBool::new(false) }
    }

    /// True from a suspension on until a quorum confirmed the leadership after it.
    pub(crate) fn doubtful(&self, suspended: Duration) -> bool {
        // The two clocks are read one after the other; a difference of one millisecond is that, not a suspension.
        let now = suspended.as_millis() as u64;
        if now > self.seen_ms.fetch_max(now, Ordering::Relaxed) + 1 {
            self.doubtful.store(true, Ordering::Relaxed);
        }
        self.doubtful.load(Ordering::Relaxed)
    }

    /// A quorum confirmed the leadership.
    pub(crate) fn confirmed(&self) {
        self.doubtful.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn callers_share_a_round_that_begins_after_them_and_never_one_that_began_before() {
        let barrier = Arc::new(ReadBarrier::default());
        let (begun, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let call = || {
            let (barrier, begun, gate) = (barrier.clone(), begun.clone(), gate.clone());
            tokio::spawn(async move {
                barrier
                    .wait(move || async move {
                        let round = begun.fetch_add(1, Ordering::SeqCst) as u64 + 1;
                        gate.acquire().await.map_err(|e| ReadError::Fatal(e.to_string()))?.forget();
                        Ok(round)
                    })
                    .await
            })
        };
        let first = call();
        while begun.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        let later: Vec<_> = (0..10).map(|_| call()).collect();
        // With the guard removed (tried) the later ones join the first round, and no second one is ever asked for.
        let second = async {
            while barrier.rounds.load(Ordering::Relaxed) < 2 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), second).await.expect("a round of their own");
        // The caller of the round in progress gives up; the others go on.
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        gate.add_permits(2);
        for caller in later {
            assert_eq!(caller.await.unwrap(), Ok(2), "a later caller was served by a round from before it");
        }
        assert_eq!(begun.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_suspension_is_doubted_until_a_quorum_confirms() {
        let watch = SuspendWatch::new(Duration::from_millis(500));
        assert!(!watch.doubtful(Duration::from_millis(500)));
        assert!(!watch.doubtful(Duration::from_millis(501)));
        assert!(watch.doubtful(Duration::from_millis(700)));
        assert!(watch.doubtful(Duration::from_millis(700)));
        watch.confirmed();
        assert!(!watch.doubtful(Duration::from_millis(700)));
    }
}
