//! The runtime of one process, and who drives it.
//!
//! A thread that waits for its call drives the runtime itself: what it sends and what it waits for is written and read by the very
//! thread, and no other one has to be woken in between, which costs more than all else that a small call does. A thread of the
//! runtime's own, the keeper, drives it while nobody waits, while several wait (the one that drove would have to hand over to the
//! next each time its call ends), and while calls of an asyncio loop are under way.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;

/// How long the keeper stands aside after the last waiting thread has left: for so long nobody drives.
const ASIDE_AFTER_LAST: Duration = Duration::from_millis(1);
/// For how long threads count as several after two were seen to wait at once.
const CROWD: Duration = Duration::from_millis(20);

/// A runtime that is driven by who waits for it.
pub(crate) struct Driver {
    runtime: Runtime,
    shared: Arc<Shared>,
}

struct Shared {
    started: Instant,
    /// Threads that wait for a call now.
    waiting: AtomicUsize,
    /// Calls of asyncio loops under way.
    handed_over: AtomicUsize,
    /// Calls that threads have waited for so far: one that is done at its first poll drives nothing, and does not count.
    calls: AtomicU64,
    /// Until when threads count as several, in microseconds since `started`.
    crowd_until_us: AtomicU64,
    /// Asks the keeper to stand aside, once until it did.
    step_aside: Notify,
    asked: AtomicBool,
    /// Whether the keeper stands aside, and what ends that before its time.
    aside: Mutex<bool>,
    wanted: Condvar,
}

impl Driver {
    /// A runtime, and the thread that keeps it for as long as the process lives.
    pub(crate) fn start() -> std::io::Result<Arc<Driver>> {
        let runtime = Builder::new_current_thread().enable_all().thread_name("tidepool").build()?;
        let shared = Arc::new(Shared {
            started: Instant::now(),
            waiting: AtomicUsize::new(0),
            handed_over: AtomicUsize::new(0),
            calls: AtomicU64::new(0),
            crowd_until_us: AtomicU64::new(0),
            step_aside: Notify::new(),
            asked: AtomicBool::new(false),
            aside: Mutex::new(false),
            wanted: Condvar::new(),
        });
        let driver = Arc::new(Driver { runtime, shared });
        let keeper = driver.clone();
        std::thread::Builder::new().name("tidepool".into()).spawn(move || keeper.keep())?;
        Ok(driver)
    }

    fn keep(&self) {
        loop {
            self.runtime.block_on(self.shared.step_aside.notified());
            self.shared.stand_aside();
        }
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Polls `work` in this thread for at most `limit`. None: it is not done.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>, limit: Duration) -> Option<T> {
        let _here = self.shared.enter();
        let (mut work, mut counted) = (pin!(work), false);
        let work = poll_fn(|cx| {
            let polled = work.as_mut().poll(cx);
            if polled.is_pending() && !std::mem::replace(&mut counted, true) {
                self.shared.calls.fetch_add(1, Ordering::SeqCst);
            }
            polled
        });
        self.runtime.block_on(async { tokio::time::timeout(limit, work).await.ok() })
    }

    /// Work that no thread waits for: the keeper drives until the answer is dropped.
    pub(crate) fn hand_over(&self) -> HandedOver {
        self.shared.handed_over.fetch_add(1, Ordering::SeqCst);
        self.shared.call_back();
        HandedOver(self.shared.clone())
    }
}

/// A thread that waits.
struct Here<'a>(&'a Shared);

impl Drop for Here<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Work that an asyncio loop waits for.
pub(crate) struct HandedOver(Arc<Shared>);

impl Drop for HandedOver {
    fn drop(&mut self) {
        self.0.handed_over.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Shared {
    fn now_us(&self) -> u64 {
        self.started.elapsed().as_micros() as u64
    }

    fn enter(&self) -> Here<'_> {
        let others = self.waiting.fetch_add(1, Ordering::SeqCst);
        let now_us = self.now_us();
        if others > 0 {
            self.crowd_until_us.store(now_us + CROWD.as_micros() as u64, Ordering::Relaxed);
            self.call_back();
        } else if self.keeper_may_rest(now_us) && !*self.aside.lock() && !self.asked.swap(true, Ordering::SeqCst) {
            self.step_aside.notify_one();
        }
        Here(self)
    }

    fn keeper_may_rest(&self, now_us: u64) -> bool {
        self.handed_over.load(Ordering::SeqCst) == 0 && now_us >= self.crowd_until_us.load(Ordering::Relaxed)
    }

    /// Has the keeper drive again, if it does not.
    fn call_back(&self) {
        if *self.aside.lock() {
            self.wanted.notify_one();
        }
    }

    /// Waits until the keeper is needed: nobody waits any more, or not one thread alone.
    fn stand_aside(&self) {
        let mut aside = self.aside.lock();
        *aside = true;
        let mut calls = self.calls.load(Ordering::SeqCst);
        while self.keeper_may_rest(self.now_us()) {
            self.wanted.wait_for(&mut aside, ASIDE_AFTER_LAST);
            let seen = self.calls.load(Ordering::SeqCst);
            if seen == calls && self.waiting.load(Ordering::SeqCst) == 0 {
                break;
            }
            calls = seen;
        }
        *aside = false;
        self.asked.store(false, Ordering::SeqCst);
    }
}
