//! What one process has once: the runtime with the thread that keeps it, and the thread that hands results of asynchronous calls to
//! Python.
//!
//! A fork takes neither along, so each is tied to the process id that made it: a child makes its own, and what it inherited is
//! never touched again, not even to free it (a lock in it may be held by a thread that the child does not have).

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::Handle;

use crate::buffers::Held;
use crate::driver::{Driver, HandedOver};

/// Results delivered under one hold of the GIL.
const DELIVERIES_MAX: usize = 256;

/// Work that needs the GIL, from a thread that must not wait for it.
pub(crate) enum Errand {
    /// A result to deliver.
    Deliver(Box<dyn FnOnce(Python<'_>) + Send>),
    /// Buffers to give back.
    Release(Held),
    /// The interpreter ends.
    Stop,
}

/// The runtime of one process.
pub(crate) struct Process {
    pid: u32,
    driver: Arc<Driver>,
    errands: Mutex<Sender<Errand>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

/// The process's own; an inherited one is replaced, and leaked.
static CURRENT: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

impl Process {
    /// This process's, made at the first use. Under the GIL, so that it is made once.
    // The pointer is either null or a leaked box.
    #[allow(unsafe_code)]
    pub(crate) fn here(_py: Python<'_>) -> PyResult<&'static Process> {
        // SAFETY: what was stored is a box that is never freed.
        let current = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
        match current {
            Some(process) if process.is_here() => Ok(process),
            _ => {
                let process: &'static Process = Box::leak(Box::new(Process::start()?));
                CURRENT.store(std::ptr::from_ref(process).cast_mut(), Ordering::Release);
                Ok(process)
            }
        }
    }

    fn start() -> PyResult<Process> {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new()
            .name("tidepool-python".into())
            .spawn(move || deliver(receiver))
            .map_err(no_threads)?;
        let driver = Driver::start().map_err(no_threads)?;
        Ok(Process { pid: std::process::id(), driver, errands: Mutex::new(sender), thread: Mutex::new(Some(thread)) })
    }

    /// Whether the calling process made it.
    pub(crate) fn is_here(&self) -> bool {
        self.pid == std::process::id()
    }

    /// The process that made it.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.driver.handle()
    }

    /// Polls `work` in this thread for at most `limit`. None: it is not done.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>, limit: Duration) -> Option<T> {
        self.driver.block_on(work, limit)
    }

    /// Begins work that no thread waits for.
    pub(crate) fn hand_over(&self) -> HandedOver {
        self.driver.hand_over()
    }

    /// Has something done under the GIL, soon.
    pub(crate) fn send(&self, errand: Errand) {
        // Fails when the interpreter has ended: then nobody waits for it, and memory is not given back any more.
        if let Err(unsent) = self.errands.lock().send(errand) {
            std::mem::forget(unsent);
        }
    }

    /// Ends the thread that needs the GIL, before the interpreter goes.
    pub(crate) fn stop(&self, py: Python<'_>) {
        self.send(Errand::Stop);
        let thread = self.thread.lock().take();
        py.detach(|| thread.map(std::thread::JoinHandle::join));
    }

    /// The current process's, if there is one: for what must not make one.
    #[allow(unsafe_code)]
    pub(crate) fn existing() -> Option<&'static Process> {
        // SAFETY: as in `here`.
        unsafe { CURRENT.load(Ordering::Acquire).as_ref() }.filter(|process| process.is_here())
    }
}

fn no_threads(error: std::io::Error) -> PyErr {
    PyRuntimeError::new_err(format!("cannot start threads: {error}"))
}

fn deliver(errands: Receiver<Errand>) {
    while let Ok(first) = errands.recv() {
        let stop = Python::try_attach(|py| {
            let more = std::iter::from_fn(|| errands.try_recv().ok());
            for errand in std::iter::once(first).chain(more).take(DELIVERIES_MAX) {
                match errand {
                    Errand::Deliver(result) => result(py),
                    Errand::Release(held) => held.release(py),
                    Errand::Stop => return true,
                }
            }
            false
        });
        // None: the interpreter is going.
        if stop.unwrap_or(true) {
            return;
        }
    }
}
