//! The end of a node: the first fatal cause, kept for whoever waits for it. Set once, never cleared.

use crate::rt::watch;
use parking_lot::Mutex;

use crate::machine::LogPosition;

/// Why a node stopped for good. Nothing is acknowledged after it; the process must exit and recover by starting again.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FatalError {
    /// The log, the vote or a snapshot could not be written or read.
    #[error("storage failed: {0}")]
    Storage(String),
    /// The state machine refused a committed entry.
    #[error("the state machine stopped at log position {at}: {message}")]
    Machine {
        /// The entry it stopped at.
        at: LogPosition,
        /// Its own words.
        message: String,
    },
    /// A leader sent what only a newer binary can apply (M6). Nothing of it was acknowledged.
    #[error("FEATURE_LEVEL: {0}")]
    FeatureLevel(String),
    /// The data directory belongs to another cluster than the members it was started with.
    #[error("WRONG_CLUSTER: {0}")]
    WrongCluster(String),
    /// The other members go on without this one.
    #[error("MEMBER_REMOVED: {0}")]
    Removed(String),
    /// The state is not the majority's: the next start begins with the last agreed snapshot and the log (M3).
    #[error("STATE_DIVERGED: {0}")]
    Diverged(String),
    /// Consensus itself stopped: a bug.
    #[error("consensus stopped: {0}")]
    Consensus(String),
}

/// Shared place for the first fatal cause.
#[derive(Debug)]
pub(crate) struct Failure {
    first: watch::Sender<Option<FatalError>>,
    stopping: Mutex<bool>,
}

impl Failure {
    pub(crate) fn new() -> Failure {
        Failure { first: watch::Sender::new(None), stopping: Mutex::new(false) }
    }

    /// Records a cause unless there is one already or the node is stopping on request.
    pub(crate) fn report(&self, cause: FatalError) {
        if *self.stopping.lock() {
            return;
        }
        self.first.send_if_modified(|first| {
            if first.is_some() {
                return false;
            }
            tracing::error!(%cause, "raft node stopped for good");
            *first = Some(cause);
            true
        });
    }

    /// From here on a stop is what was asked for.
    pub(crate) fn expect_stop(&self) {
        *self.stopping.lock() = true;
    }

    pub(crate) fn get(&self) -> Option<FatalError> {
        self.first.borrow().clone()
    }

    /// Resolves with the cause; never, while there is none.
    pub(crate) async fn wait(&self) -> FatalError {
        let mut first = self.first.subscribe();
        loop {
            if let Some(cause) = first.borrow_and_update().clone() {
                return cause;
            }
            // The sender lives in `self`, so this only returns on a change.
            if first.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}
