//! `LocalNode`: memory of this process, lent to the cluster by a datanode in it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tempfile::TempDir;
use tidepool_client::{Address, ClientOptions, Error, ErrorCode};
use tidepool_datanode::{Datanode, DatanodeOptions, Prefault};
use tokio::sync::watch;

use crate::calls::Call;
use crate::process::Process;
use crate::{args, errors, host, results};

/// How often a start looks whether its segment is mounted.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Seconds that a leave may take when nothing else is said.
const LEAVE_WITHIN: f64 = 10.0;

/// How long nodes that are open when the interpreter ends may take to leave.
const LEAVE_AT_EXIT: Duration = Duration::from_secs(2);

type Slot = Arc<Mutex<Option<Running>>>;

/// Nodes that were started, to be left when the interpreter ends. Only used under the GIL.
static STARTED: Mutex<Vec<Weak<Mutex<Option<Running>>>>> = Mutex::new(Vec::new());

struct Running {
    process: &'static Process,
    datanode: Datanode,
    /// Holds the node's identity, which ends with it.
    _directory: TempDir,
}

/// A datanode in this process. Its replicas go when it is closed.
#[pyclass(frozen, module = "tidepool._native")]
pub(crate) struct LocalNode {
    process: &'static Process,
    running: Slot,
    #[pyo3(get)]
    address: String,
    #[pyo3(get)]
    segments: Vec<String>,
    #[pyo3(get)]
    node_id: u64,
    #[pyo3(get)]
    size: u64,
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::InvalidParams, format!("the memory cannot be lent: {error}"))
}

/// Starts one and waits until its segment is mounted.
async fn start(options: DatanodeOptions, limit: Duration) -> Result<Datanode, Error> {
    let datanode = Datanode::start(options).await.map_err(failed)?;
    let ready = async {
        loop {
            if datanode.readiness().ready {
                return Ok(());
            }
            tokio::select! {
                reason = datanode.stopped() => return Err(Error::new(ErrorCode::Unavailable, format!("the node stopped: {reason}"))),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
    };
    match tokio::time::timeout(limit, ready).await {
        Ok(Ok(())) => Ok(datanode),
        Ok(Err(error)) => Err(error),
        Err(_) => {
            let doing = datanode.readiness().doing;
            datanode.vanish().await;
            let what = format!("the node was not ready within {limit:?}; it was {doing}");
            Err(Error::new(ErrorCode::DeadlineExceeded, what))
        }
    }
}

impl Running {
    /// Leaves the cluster, in order if that takes no longer than `limit`.
    fn leave(self, py: Python<'_>, limit: Duration) -> PyResult<()> {
        let datanode = self.datanode.clone();
        let leave = async move {
            if tokio::time::timeout(limit, datanode.shutdown()).await.is_err() {
                datanode.vanish().await;
            }
        };
        let call = Call { process: self.process, closed: watch::channel(false).1, loan: None };
        let left = call.run(py, None, leave, |py, ()| Ok(py.None()));
        py.detach(|| drop(self));
        left.map(|_| ())
    }
}

/// The interpreter ends: what is still lent is taken back in order, so that the masters need not notice its silence.
pub(crate) fn leave_all(py: Python<'_>) {
    let started = std::mem::take(&mut *STARTED.lock());
    for node in started.iter().filter_map(Weak::upgrade) {
        let running = node.lock().take();
        match running {
            Some(running) if running.process.is_here() => {
                // Interrupted, or the masters are gone: they notice.
                let _ = running.leave(py, LEAVE_AT_EXIT);
            }
            inherited => std::mem::forget(inherited),
        }
    }
}

#[pymethods]
impl LocalNode {
    #[new]
    #[pyo3(signature = (masters, size, *, listen = "127.0.0.1:0", advertise = None, name = None, host_id = String::new(),
        deadline = 10.0))]
    fn new(
        py: Python<'_>,
        masters: &str,
        size: u64,
        listen: &str,
        advertise: Option<&str>,
        name: Option<String>,
        host_id: String,
        deadline: f64,
    ) -> PyResult<LocalNode> {
        let raise = |error: Error| errors::raise(py, &error, None);
        let limit = args::duration(deadline, "the deadline")?;
        let masters = ClientOptions::parse_masters(masters).map_err(raise)?;
        let listen = Address::parse(listen, 0).map_err(raise)?;
        let directory = tempfile::Builder::new().prefix("tidepool-node-").tempdir().map_err(|e| raise(failed(e)))?;
        let mut options = DatanodeOptions::new(directory.path(), listen, masters, vec![size]);
        options.advertise = advertise.map(|advertise| Address::parse(advertise, 0)).transpose().map_err(raise)?;
        options.host_id = if host_id.is_empty() { host::name() } else { host_id };
        options.prefault = Prefault::Lazy;
        options.segment_names = name.into_iter().collect();
        let segments =
            if options.segment_names.is_empty() { vec!["dram-0".to_owned()] } else { options.segment_names.clone() };
        let process = Process::here(py)?;
        let made = Arc::new(Mutex::new(None));
        let kept = made.clone();
        let work = async move { start(options, limit).await.map(|datanode| *kept.lock() = Some(datanode)) };
        let call = Call { process, closed: watch::channel(false).1, loan: None };
        call.run(py, None, work, |py, outcome| results::raised(py, outcome, |()| Ok(py.None())))?;
        let datanode = made.lock().take();
        let datanode = datanode.ok_or_else(|| raise(Error::new(ErrorCode::Internal, "no node came of its start")))?;
        let (address, node_id) = (datanode.address().to_string(), datanode.node_id().map_or(0, |node| node.0));
        let running = Arc::new(Mutex::new(Some(Running { process, datanode, _directory: directory })));
        let mut started = STARTED.lock();
        started.retain(|node| node.strong_count() > 0);
        started.push(Arc::downgrade(&running));
        Ok(LocalNode { process, address, node_id, running, segments, size })
    }

    /// Whether its memory can be put to now.
    fn ready(&self) -> bool {
        self.process.is_here() && self.running.lock().as_ref().is_some_and(|running| running.datanode.readiness().ready)
    }

    /// Leaves the cluster. May be repeated.
    #[pyo3(signature = (*, deadline = LEAVE_WITHIN))]
    fn close(&self, py: Python<'_>, deadline: f64) -> PyResult<()> {
        let limit = args::duration(deadline, "the deadline")?;
        if !self.process.is_here() {
            return Ok(());
        }
        let running = self.running.lock().take();
        running.map_or(Ok(()), |running| running.leave(py, limit))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, LEAVE_WITHIN)
    }

    fn __repr__(&self) -> String {
        format!("LocalNode({}, {} bytes)", self.address, self.size)
    }
}

// Another process's is not touched: its threads are not here.
impl Drop for LocalNode {
    fn drop(&mut self) {
        if !self.process.is_here() {
            std::mem::forget(self.running.lock().take());
        }
    }
}
