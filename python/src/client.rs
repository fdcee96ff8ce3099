//! `Client`: every call that Python can make of the cluster. Each takes its arguments apart, says what to do, and how to show the
//! outcome; `calls` waits.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tidepool_client::{
    Client as RustClient, ClientOptions, Error, ErrorCode, GetRange, ListFilter, Matching, RemoveMode, SoftPin,
};
use tidepool_proto::v1::{CreateTaskRequest, TaskKind};
use tokio::sync::watch;

use crate::args::{self, PutOptions};
use crate::buffers::{Held, Loan, spans_at, spans_of};
use crate::calls::Call;
use crate::moves::Spans;
use crate::process::Process;
use crate::results::{self, Shown};
use crate::{admin, errors, host, moves};

type Object = Py<PyAny>;

/// What is open, until `close`.
struct Open {
    client: RustClient,
    closed: watch::Sender<bool>,
}

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

struct Settings {
    options: ClientOptions,
    deadline: f64,
}

impl Settings {
    fn new(
        masters: &str,
        tenant: String,
        host_id: String,
        deadline: f64,
        connect_deadline: f64,
        py: Python<'_>,
    ) -> PyResult<Settings> {
        let masters = ClientOptions::parse_masters(masters).map_err(|error| errors::raise(py, &error, None))?;
        let mut options = ClientOptions::new(masters);
        options.tenant = tenant;
        options.host_id = if host_id.is_empty() { host::name() } else { host_id };
        options.deadline = args::duration(deadline, "the deadline")?;
        options.connect_deadline = args::duration(connect_deadline, "connect_deadline")?;
        Ok(Settings { options, deadline })
    }

    fn client(self, process: &'static Process, client: RustClient) -> Client {
        Client {
            process,
            open: Mutex::new(Some(Open { client, closed: watch::channel(false).0 })),
            tenant: self.options.tenant,
            host_id: self.options.host_id,
            deadline: self.deadline,
        }
    }
}

/// A call of nothing that is open yet.
fn unbound(process: &'static Process) -> Call {
    Call { process, closed: watch::channel(false).1, loan: None }
}

impl Client {
    /// The client, if it is open and of this process.
    fn client(&self, py: Python<'_>) -> PyResult<RustClient> {
        self.begin(py).map(|(client, _)| client)
    }

    fn begin(&self, py: Python<'_>) -> PyResult<(RustClient, Call)> {
        let refuse = |what: String| Err(errors::raise(py, &Error::new(ErrorCode::Unavailable, what), None));
        if !self.process.is_here() {
            return refuse(format!(
                "this store was connected in process {}; a fork cannot go on with it: connect again in process {}",
                self.process.pid(),
                std::process::id()
            ));
        }
        let open = self.open.lock().as_ref().map(|open| (open.client.clone(), open.closed.subscribe()));
        // An exception is made without the lock: Python may run other threads, or this store's own methods, meanwhile.
        match open {
            Some((client, closed)) => Ok((client, Call { process: self.process, closed, loan: None })),
            None => refuse("the store is closed; connect again".to_owned()),
        }
    }

    /// As `begin`, for a call that uses memory.
    fn begin_with(&self, py: Python<'_>, held: Held) -> PyResult<(RustClient, Call, Arc<Loan>)> {
        match self.begin(py) {
            Ok((client, call)) => {
                let loan = Loan::new(held, self.process);
                Ok((client, Call { loan: Some(loan.clone()), ..call }, loan))
            }
            Err(error) => {
                held.release(py);
                Err(error)
            }
        }
    }

    /// The spans of each item given as objects; on an error what was taken is given back.
    fn objects(
        py: Python<'_>,
        given: &Bound<'_, PyAny>,
        what: &str,
        keys: usize,
        writable: bool,
    ) -> PyResult<(Spans, Held)> {
        let mut held = Held::default();
        let taken = args::items(given, what, |item| spans_of(&item, writable, &mut held).map(Ok));
        let taken = taken.and_then(|taken| args::same_length(what, taken.len(), keys).map(|()| taken));
        match taken {
            Ok(taken) => Ok((taken, held)),
            Err(error) => {
                held.release(py);
                Err(error)
            }
        }
    }

    /// The spans of each item given as addresses.
    fn addresses(
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        keys: usize,
        writable: bool,
        unchecked: bool,
    ) -> PyResult<Spans> {
        let addresses = args::numbers(addresses, "addresses", keys)?;
        let sizes = args::numbers(sizes, "sizes", keys)?;
        Ok(addresses
            .iter()
            .zip(&sizes)
            .map(|(addresses, sizes)| spans_at(addresses, sizes, writable, unchecked))
            .collect())
    }
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
        let (spans, held) = Client::objects(py, values, "values", keys.len(), false)?;
        let (client, call, loan) = self.begin_with(py, held)?;
        let (items, refused) = moves::put_items(&keys, spans, groups, &loan);
        drop(loan);
        let work = moves::put(client, items, refused, options);
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let spans = Client::addresses(addresses, sizes, keys.len(), false, unchecked)?;
        let (client, call, loan) = self.begin_with(py, Held::default())?;
        let (items, refused) = moves::put_items(&keys, spans, groups, &loan);
        drop(loan);
        let work = moves::put(client, items, refused, options);
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
    }

    #[pyo3(signature = (keys, *, deadline = None, r#loop = None))]
    fn get_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.get_many(&asked, deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, false))
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
        let (spans, held) = Client::objects(py, buffers, "buffers", keys.len(), true)?;
        let (client, call, loan) = self.begin_with(py, held)?;
        let items = moves::get_items(&keys, spans, &loan);
        drop(loan);
        let work = moves::get_into(client, items, deadline);
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let spans = Client::addresses(addresses, sizes, keys.len(), true, unchecked)?;
        let (client, call, loan) = self.begin_with(py, Held::default())?;
        let items = moves::get_items(&keys, spans, &loan);
        drop(loan);
        let work = moves::get_into(client, items, deadline);
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let (spans, held) = Client::objects(py, buffers, "buffers", keys.len(), true)?;
        let (client, call, loan) = self.begin_with(py, held)?;
        let items = moves::range_items(&keys, offsets, spans, &loan);
        drop(loan);
        let work = moves::get_ranges_into(client, items, deadline);
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let spans = Client::addresses(addresses, sizes, keys.len(), true, unchecked)?;
        let (client, call, loan) = self.begin_with(py, Held::default())?;
        let items = moves::range_items(&keys, offsets, spans, &loan);
        drop(loan);
        let work = moves::get_ranges_into(client, items, deadline);
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.exist_many(&asked, deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move {
            let stats = client.stat_many(&asked, deadline).await;
            stats.into_iter().map(|stat| stat.and_then(results::size_of)).collect::<Vec<_>>()
        };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
    }

    #[pyo3(signature = (keys, *, deadline = None, r#loop = None))]
    fn stat_many(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        r#loop: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.stat_many(&asked, deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, false))
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
        let (client, call) = self.begin(py)?;
        let work = async move { client.list_matching(&filter, limit, &after.unwrap_or_default(), deadline).await };
        call.run(py, r#loop, work, |py, outcome| results::raised(py, outcome, |page| results::page(py, page)))
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
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.remove_many(&asked, mode(force), deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let work =
            async move { client.remove_matching(&matching, mode(force), after.map(Bytes::from), deadline).await };
        call.run(py, r#loop, work, |py, outcome| results::raised(py, outcome, |removed| results::removed(py, removed)))
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
        let keys = Arc::new(args::keys(keys)?);
        let ttl = ttl.map(|ttl| args::duration(ttl, "ttl")).transpose()?;
        let pin = if on { SoftPin::Enable(ttl) } else { SoftPin::Disable };
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.pin_many(&asked, pin, deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, codes))
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
        let keys = Arc::new(args::keys(keys)?);
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let asked = keys.clone();
        let work = async move { client.clear_replicas(&asked, &segment, deadline).await };
        call.run(py, r#loop, work, move |py, results| results::list(py, &keys, results, false))
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
        let (client, call) = self.begin(py)?;
        let work = async move { admin::query_task(&client, task_id, deadline).await };
        call.run(py, r#loop, work, |py, outcome| results::raised(py, outcome, |task| results::task(py, task)))
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
        let (client, call) = self.begin(py)?;
        let work = async move { admin::cancel_task(&client, task_id, deadline).await };
        call.run(py, r#loop, work, |py, outcome| results::raised(py, outcome, |()| Ok(py.None())))
    }

    #[pyo3(signature = (*, deadline = None, r#loop = None))]
    fn segments(&self, py: Python<'_>, deadline: Option<f64>, r#loop: Option<&Bound<'_, PyAny>>) -> PyResult<Object> {
        let deadline = self.until(deadline)?;
        let (client, call) = self.begin(py)?;
        let work = async move { admin::status(&client, deadline).await };
        call.run(py, r#loop, work, |py, outcome| results::raised(py, outcome, |status| results::segments(py, status)))
    }

    #[pyo3(signature = (*, deadline = None, r#loop = None))]
    fn ping(&self, py: Python<'_>, deadline: Option<f64>, r#loop: Option<&Bound<'_, PyAny>>) -> PyResult<Object> {
        let deadline = args::deadline(deadline)?;
        let (client, call) = self.begin(py)?;
        let work = async move { admin::ping(&client, deadline).await };
        call.run(py, r#loop, work, |py, outcome| results::raised(py, outcome, |took| took.as_secs_f64().shown(py)))
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

impl Client {
    fn create_task(
        &self,
        py: Python<'_>,
        request: CreateTaskRequest,
        deadline: Option<f64>,
        asyncio: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = self.until(deadline)?;
        let request = CreateTaskRequest { tenant: self.tenant.clone(), ..request };
        let (client, call) = self.begin(py)?;
        let work = async move { admin::create_task(&client, request, deadline).await };
        call.run(py, asyncio, work, |py, outcome| results::raised(py, outcome, |task_id: u64| task_id.shown(py)))
    }

    /// How long a call may take: what it says, or this client's default.
    fn limit(&self, deadline: Option<f64>) -> PyResult<Duration> {
        args::duration(deadline.unwrap_or(self.deadline), "the deadline")
    }

    /// The end of such a call.
    fn until(&self, deadline: Option<f64>) -> PyResult<tokio::time::Instant> {
        Ok(tokio::time::Instant::now() + self.limit(deadline)?)
    }
}

fn mode(force: bool) -> RemoveMode {
    if force { RemoveMode::Force } else { RemoveMode::RespectLease }
}
