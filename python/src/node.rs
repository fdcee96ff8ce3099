//! `LocalNode`: memory of this process, lent to the cluster by a datanode in it.

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

struct Running {
    datanode: Datanode,
    /// Holds the node's identity, which ends with it.
    _directory: TempDir,
}

/// A datanode in this process. Its replicas go when it is closed.
#[pyclass(frozen, module = "tidepool._native")]
pub(crate) struct LocalNode {
    process: &'static Process,
    running: Mutex<Option<Running>>,
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
        let made = std::sync::Arc::new(Mutex::new(None));
        let kept = made.clone();
        let work = async move { start(options, limit).await.map(|datanode| *kept.lock() = Some(datanode)) };
        let call = Call { process, closed: watch::channel(false).1, loan: None };
        call.run(py, None, work, |py, outcome| results::raised(py, outcome, |()| Ok(py.None())))?;
        let datanode = made.lock().take();
        let datanode = datanode.ok_or_else(|| raise(Error::new(ErrorCode::Internal, "no node came of its start")))?;
        Ok(LocalNode {
            process,
            address: datanode.address().to_string(),
            node_id: datanode.node_id().map_or(0, |node| node.0),
            running: Mutex::new(Some(Running { datanode, _directory: directory })),
            segments,
            size,
        })
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
        let Some(running) = self.running.lock().take() else { return Ok(()) };
        let datanode = running.datanode.clone();
        let leave = async move {
            if tokio::time::timeout(limit, datanode.shutdown()).await.is_err() {
                datanode.vanish().await;
            }
        };
        let call = Call { process: self.process, closed: watch::channel(false).1, loan: None };
        call.run(py, None, leave, |py, ()| Ok(py.None()))?;
        py.detach(|| drop(running));
        Ok(())
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
            std::mem::forget(self.running.get_mut().take());
        }
    }
}
