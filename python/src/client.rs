//! `Client`: every call that Python can make of the cluster. Each takes its arguments apart and says what to do; [`requests`] has
//! what they share, `calls` waits.

mod requests;

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tidepool_client::{Client as RustClient, GetRange, ListFilter, Matching, RemoveMode, SoftPin};
use tidepool_proto::v1::{CreateTaskRequest, TaskKind};

use self::requests::{Memory, Open, Settings, unbound};
use crate::args::{self, PutOptions};
use crate::process::Process;
use crate::results::{self, Shown};
use crate::{admin, moves};

type Object = Py<PyAny>;

/// A connection to one cluster, for any number of threads.
#[pyclass(frozen, module = "tidepool._native")]
pub(crate) struct Client {
    process: &'static Process,
    open: Mutex<Option<Open>>,
    #[pyo3(get)]
    tenant: String,
    #[pyo3(get)]
    host_id: String,
    #[pyo3(get)]
    deadline: f64,
}

// The drop of a client that another process made touches nothing of it.
impl Drop for Client {
    fn drop(&mut self) {
        if !self.process.is_here() {
            std::mem::forget(self.open.get_mut().take());
        }
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (masters, *, tenant = String::new(), host_id = String::new(), deadline = 5.0, connect_deadline = 5.0))]
    fn new(
        py: Python<'_>,
        masters: &str,
        tenant: String,
        host_id: String,
        deadline: f64,
        connect_deadline: f64,
    ) -> PyResult<Client> {
        let settings = Settings::new(masters, tenant, host_id, deadline, connect_deadline, py)?;
        let process = Process::here(py)?;
        let connected = Arc::new(Mutex::new(None));
        let (options, made) = (settings.options.clone(), connected.clone());
        let work = async move { RustClient::connect(options).await.map(|client| *made.lock() = Some(client)) };
        unbound(process).run(py, None, work, |py, outcome| results::raised(py, outcome, |()| Ok(py.None())))?;
        let client = connected.lock().take();
        let client = client.ok_or_else(|| PyValueError::new_err("connecting ended without a client"))?;
        Ok(settings.client(process, client))
    }

    /// As the constructor, for asyncio.
    #[staticmethod]
    #[pyo3(signature = (r#loop, masters, *, tenant = String::new(), host_id = String::new(), deadline = 5.0, connect_deadline = 5.0))]
    fn connect_async(
        py: Python<'_>,
        r#loop: &Bound<'_, PyAny>,
        masters: &str,
        tenant: String,
        host_id: String,
        deadline: f64,
        connect_deadline: f64,
    ) -> PyResult<Object> {
        let settings = Settings::new(masters, tenant, host_id, deadline, connect_deadline, py)?;
        let process = Process::here(py)?;
        let work = RustClient::connect(settings.options.clone());
        unbound(process).run(py, Some(r#loop), work, move |py, outcome| {
            results::raised(py, outcome, |client| Ok(Py::new(py, settings.client(process, client))?.into_any()))
        })
    }

    #[getter]
    fn closed(&self) -> bool {
        !self.process.is_here() || self.open.lock().is_none()
    }

    /// Ends it; calls under way in other threads fail.
    fn close(&self, py: Python<'_>) {
        if !self.process.is_here() {
            return;
        }
        // Not in the head of the `if`: the lock would be held while another thread has the interpreter and wants it.
        let open = self.open.lock().take();
        if let Some(open) = open {
            open.closed.send_replace(true);
            py.detach(|| drop(open.client));
        }
    }

    #[pyo3(signature = (keys, values, options = None, *, groups = None, deadline = None, codes = false, r#loop = None))]
    fn put_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        values: &Bound<'_, PyAny>,
        options: Option<&PutOptions>,
        groups: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        let groups = args::groups(groups, keys.len())?;
        let options = moves::options(options, args::deadline(deadline)?);
        let memory = Memory::of_objects(py, values, "values", keys.len(), false)?;
        self.put(py, keys, memory, groups, options, codes, r#loop)
    }

    #[pyo3(signature = (keys, addresses, sizes, options = None, *, groups = None, deadline = None, codes = false,
        unchecked = false, r#loop = None))]
    fn put_from_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        options: Option<&PutOptions>,
        groups: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        codes: bool,
        unchecked: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        let groups = args::groups(groups, keys.len())?;
        let options = moves::options(options, args::deadline(deadline)?);
        let memory = Memory::at_addresses(addresses, sizes, keys.len(), false, unchecked)?;
        self.put(py, keys, memory, groups, options, codes, r#loop)
    }

    #[pyo3(signature = (keys, *, deadline = None, r#loop = None))]
    fn get_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        self.each(py, keys, false, r#loop, move |client, keys| async move { client.get_many(&keys, deadline).await })
    }

    #[pyo3(signature = (keys, *, deadline = None, missing = None, r#loop = None))]
    fn get_bytes_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        missing: Option<Object>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.get_many(&asked, deadline).await };
        call.run(py, r#loop, work, move |py, results| {
            results::list_or(py, &keys, results, missing.as_ref(), |py, bytes| {
                Ok(PyBytes::new(py, &bytes).into_any().unbind())
            })
        })
    }

    #[pyo3(signature = (keys, buffers, *, deadline = None, codes = false, r#loop = None))]
    fn get_into_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        buffers: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        let deadline = self.limit(deadline)?;
        let memory = Memory::of_objects(py, buffers, "buffers", keys.len(), true)?;
        self.get_into(py, keys, memory, deadline, codes, r#loop)
    }

    #[pyo3(signature = (keys, addresses, sizes, *, deadline = None, codes = false, unchecked = false, r#loop = None))]
    fn get_into_addresses_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        codes: bool,
        unchecked: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        let deadline = self.limit(deadline)?;
        let memory = Memory::at_addresses(addresses, sizes, keys.len(), true, unchecked)?;
        self.get_into(py, keys, memory, deadline, codes, r#loop)
    }

    #[pyo3(signature = (keys, offsets, lengths, *, deadline = None, r#loop = None))]
    fn get_range_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        offsets: Vec<u64>,
        lengths: Vec<u64>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        args::same_length("offsets", offsets.len(), keys.len())?;
        args::same_length("lengths", lengths.len(), keys.len())?;
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let ranges = keys.iter().zip(offsets).zip(lengths);
        let items = ranges.map(|((key, offset), length)| GetRange { key: key.clone(), offset, length }).collect();
        let work = async move { client.get_range_many(items, deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, false))
    }

    #[pyo3(signature = (keys, offsets, buffers, *, deadline = None, codes = false, r#loop = None))]
    fn get_range_into_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        offsets: Vec<u64>,
        buffers: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        args::same_length("offsets", offsets.len(), keys.len())?;
        let deadline = self.limit(deadline)?;
        let memory = Memory::of_objects(py, buffers, "buffers", keys.len(), true)?;
        self.get_ranges_into(py, keys, offsets, memory, deadline, codes, r#loop)
    }

    #[pyo3(signature = (keys, offsets, addresses, sizes, *, deadline = None, codes = false, unchecked = false, r#loop = None))]
    fn get_range_into_addresses_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        offsets: Vec<u64>,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        codes: bool,
        unchecked: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = args::keys(keys)?;
        args::same_length("offsets", offsets.len(), keys.len())?;
        let deadline = self.limit(deadline)?;
        let memory = Memory::at_addresses(addresses, sizes, keys.len(), true, unchecked)?;
        self.get_ranges_into(py, keys, offsets, memory, deadline, codes, r#loop)
    }

    #[pyo3(signature = (keys, *, deadline = None, codes = false, r#loop = None))]
    fn exist_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        self.each(py, keys, codes, r#loop, move |client, keys| async move { client.exist_many(&keys, deadline).await })
    }

    #[pyo3(signature = (keys, *, deadline = None, codes = false, r#loop = None))]
    fn size_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        self.each(py, keys, codes, r#loop, move |client, keys| async move {
            let stats = client.stat_many(&keys, deadline).await;
            stats.into_iter().map(|stat| stat.and_then(results::size_of)).collect::<Vec<_>>()
        })
    }

    #[pyo3(signature = (keys, *, deadline = None, r#loop = None))]
    fn stat_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        self.each(py, keys, false, r#loop, move |client, keys| async move { client.stat_many(&keys, deadline).await })
    }

    #[pyo3(signature = (prefix = None, regex = String::new(), *, data_type = None, limit = 0, after = None, deadline = None,
        r#loop = None))]
    fn list(
        &self,
        py: Python<'_>,
        prefix: Option<&Bound<'_, PyAny>>,
        regex: String,
        data_type: Option<&Bound<'_, PyAny>>,
        limit: u32,
        after: Option<Vec<u8>>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let matching = Matching { prefix: prefix.map_or(Ok(Bytes::new()), args::key)?, regex };
        let filter = ListFilter { matching, data_type: data_type.map(args::data_type).transpose()? };
        let deadline = args::deadline(deadline)?;
        let work = move |client: RustClient| async move {
            client.list_matching(&filter, limit, &after.unwrap_or_default(), deadline).await
        };
        self.one(py, r#loop, work, results::page)
    }

    #[pyo3(signature = (keys, *, force = false, deadline = None, codes = false, r#loop = None))]
    fn remove_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        force: bool,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        self.each(py, keys, codes, r#loop, move |client, keys| async move {
            client.remove_many(&keys, mode(force), deadline).await
        })
    }

    #[pyo3(signature = (prefix = None, regex = String::new(), *, force = false, after = None, deadline = None, r#loop = None))]
    fn remove_matching(
        &self,
        py: Python<'_>,
        prefix: Option<&Bound<'_, PyAny>>,
        regex: String,
        force: bool,
        after: Option<Vec<u8>>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let matching = Matching { prefix: prefix.map_or(Ok(Bytes::new()), args::key)?, regex };
        let (deadline, after) = (args::deadline(deadline)?, after.map(Bytes::from));
        let work = move |client: RustClient| async move {
            client.remove_matching(&matching, mode(force), after, deadline).await
        };
        self.one(py, r#loop, work, results::removed)
    }

    #[pyo3(signature = (keys, *, on = true, ttl = None, deadline = None, codes = false, r#loop = None))]
    fn pin_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        on: bool,
        ttl: Option<f64>,
        deadline: Option<f64>,
        codes: bool,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let ttl = ttl.map(|ttl| args::duration(ttl, "ttl")).transpose()?;
        let pin = if on { SoftPin::Enable(ttl) } else { SoftPin::Disable };
        let deadline = args::deadline(deadline)?;
        let work =
            move |client: RustClient, keys: Arc<Vec<Bytes>>| async move { client.pin_many(&keys, pin, deadline).await };
        self.each(py, keys, codes, r#loop, work)
    }

    #[pyo3(signature = (keys, segment = String::new(), *, deadline = None, r#loop = None))]
    fn clear_replicas(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        segment: String,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        self.each(py, keys, false, r#loop, move |client, keys| async move {
            client.clear_replicas(&keys, &segment, deadline).await
        })
    }

    #[pyo3(signature = (key, targets, *, deadline = None, r#loop = None))]
    fn create_copy_task(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        targets: Vec<String>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let request = CreateTaskRequest {
            kind: TaskKind::Copy as i32,
            key: args::key(key)?,
            target_segments: targets,
            ..CreateTaskRequest::default()
        };
        self.create_task(py, request, deadline, r#loop)
    }

    #[pyo3(signature = (key, source, target, *, deadline = None, r#loop = None))]
    fn create_move_task(
        &self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        source: String,
        target: String,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let request = CreateTaskRequest {
            kind: TaskKind::Move as i32,
            key: args::key(key)?,
            source_segments: vec![source],
            target_segments: vec![target],
            ..CreateTaskRequest::default()
        };
        self.create_task(py, request, deadline, r#loop)
    }

    #[pyo3(signature = (segments, targets = Vec::new(), *, unmount = false, concurrency = 0, deadline = None, r#loop = None))]
    fn create_drain_task(
        &self,
        py: Python<'_>,
        segments: Vec<String>,
        targets: Vec<String>,
        unmount: bool,
        concurrency: u32,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let request = CreateTaskRequest {
            kind: TaskKind::Drain as i32,
            source_segments: segments,
            target_segments: targets,
            unmount,
            concurrency,
            ..CreateTaskRequest::default()
        };
        self.create_task(py, request, deadline, r#loop)
    }

    #[pyo3(signature = (task_id, *, deadline = None, r#loop = None))]
    fn query_task(
        &self,
        py: Python<'_>,
        task_id: u64,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = self.until(deadline)?;
        let work = move |client| async move { admin::query_task(&client, task_id, deadline).await };
        self.one(py, r#loop, work, results::task)
    }

    #[pyo3(signature = (task_id, *, deadline = None, r#loop = None))]
    fn cancel_task(
        &self,
        py: Python<'_>,
        task_id: u64,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = self.until(deadline)?;
        let work = move |client| async move { admin::cancel_task(&client, task_id, deadline).await };
        self.one(py, r#loop, work, |py, ()| Ok(py.None()))
    }

    #[pyo3(signature = (*, deadline = None, r#loop = None))]
    fn segments(&self, py: Python<'_>, deadline: Option<f64>, r#loop: Option<&Bound<'_, PyAny>>) -> PyResult<Object> {
        let deadline = self.until(deadline)?;
        let work = move |client| async move { admin::status(&client, deadline).await };
        self.one(py, r#loop, work, results::segments)
    }

    #[pyo3(signature = (*, deadline = None, r#loop = None))]
    fn ping(&self, py: Python<'_>, deadline: Option<f64>, r#loop: Option<&Bound<'_, PyAny>>) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        let work = move |client| async move { admin::ping(&client, deadline).await };
        self.one(py, r#loop, work, |py, took| took.as_secs_f64().shown(py))
    }

    fn leader(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.client(py)?.leader().map(|leader| leader.to_string()))
    }

    fn masters(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.client(py)?.members().iter().map(ToString::to_string).collect())
    }

    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = PyDict::new(py);
        for (name, count) in self.client(py)?.metrics().entries() {
            counters.set_item(name, count)?;
        }
        Ok(counters)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { "closed" } else { "open" };
        format!("Client({state}, tenant={:?})", self.tenant)
    }
}

fn mode(force: bool) -> RemoveMode {
    if force { RemoveMode::Force } else { RemoveMode::RespectLease }
}
