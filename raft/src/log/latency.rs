//! How long this member's own disk takes to make an append durable, as whoever decides who leads wants to know it.

use std::sync::Arc;
use std::time::Duration;

use openraft::alias::InstantOf;
use openraft::async_runtime::Instant;
use openraft::type_config::TypeConfigExt;
use parking_lot::Mutex;

use crate::types::Config;

/// What happened longer ago says nothing of the disk as it is.
const RECENT: Duration = Duration::from_secs(1);

struct Times<I> {
    /// When the append that is under way began.
    begun: Option<I>,
    /// How long the newest one took, and when it ended.
    newest: Option<(Duration, I)>,
}

/// Time of the newest append. Cheap to clone; keeps no log open.
pub(crate) struct AppendLatency<C: Config>(Arc<Mutex<Times<InstantOf<C>>>>);

impl<C: Config> Clone for AppendLatency<C> {
    fn clone(&self) -> Self {
        AppendLatency(self.0.clone())
    }
}

impl<C: Config> AppendLatency<C> {
    /// Of a log that was not written yet.
    pub(crate) fn new() -> AppendLatency<C> {
        AppendLatency(Arc::new(Mutex::new(Times { begun: None, newest: None })))
    }

    /// A batch that must be durable goes to the disk.
    pub(super) fn begun(&self) {
        self.0.lock().begun = Some(C::now());
    }

    /// It is durable.
    pub(super) fn ended(&self) {
        let mut times = self.0.lock();
        times.newest = times.begun.take().map(|begun| (begun.elapsed(), C::now()));
    }

    /// Of the append under way; none: there is none.
    pub(super) fn pending(&self) -> Option<Duration> {
        self.0.lock().begun.as_ref().map(|begun| begun.elapsed())
    }

    /// Of the append that ended last, or of the one under way if that takes longer already; zero when nothing was appended of late.
    pub(crate) fn now(&self) -> Duration {
        let times = self.0.lock();
        let under_way = times.begun.as_ref().map_or(Duration::ZERO, |begun| begun.elapsed());
        let newest = times.newest.as_ref().filter(|(_, ended)| ended.elapsed() <= RECENT);
        newest.map_or(Duration::ZERO, |(took, _)| *took).max(under_way)
    }
}
