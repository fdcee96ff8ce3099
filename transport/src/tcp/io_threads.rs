//! The threads that move payload: each drives its own connections and nothing else.
//!
//! Copying megabytes in and out of sockets would hold up whatever shares a runtime with it: heartbeats, elections. And
//! a connection that always runs on one thread keeps its data in that core's cache: two stripes on a work-stealing
//! runtime moved 16 MiB items at two thirds of the speed.

use std::sync::atomic::{AtomicUsize, Ordering};

use tidepool_proto::{Error, ErrorCode};
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;

/// A fixed set of threads with a runtime each; they end when this is dropped, and with them what runs there.
pub(super) struct IoThreads {
    handles: Vec<Handle>,
    next: AtomicUsize,
    _running: watch::Sender<()>,
}

impl IoThreads {
    /// Starts them. An engine without threads answers every call with this error.
    pub(super) fn start(name: &str, count: usize) -> Result<IoThreads, Error> {
        let failed = |error: std::io::Error| {
            let what = format!("{count} data-plane threads could not be started: {error}; raise the limit on tasks");
            Error::new(ErrorCode::ResourceExhausted, what)
        };
        let (running, ended) = watch::channel(());
        let mut handles = Vec::with_capacity(count.max(1));
        for i in 0..count.max(1) {
            let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
            handles.push(runtime.handle().clone());
            let mut ended = ended.clone();
            let thread = std::thread::Builder::new().name(format!("{name}-{i}"));
            // `changed` fails when the sender was dropped.
            let run = move || while runtime.block_on(ended.changed()).is_ok() {};
            thread.spawn(run).map_err(failed)?;
        }
        Ok(IoThreads { handles, next: AtomicUsize::new(0), _running: running })
    }

    /// The next thread in turn.
    pub(super) fn pick(&self) -> &Handle {
        &self.handles[self.next.fetch_add(1, Ordering::Relaxed) % self.handles.len()]
    }
}

/// As many threads as can be of use: a few move what a network card can carry.
pub(super) fn default_count() -> usize {
    std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(1, 4))
}
