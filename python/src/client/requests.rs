//! What the calls of a client share: the settings it is made of, whether it may be used, the memory it was given, and the few shapes
//! that a call has.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use pyo3::prelude::*;
use tidepool_client::{Client as RustClient, ClientOptions, Error, ErrorCode, PutOptions};
use tidepool_proto::v1::CreateTaskRequest;
use tokio::sync::watch;

use super::Client;
use crate::buffers::{Held, Loan, spans_at, spans_of};
use crate::calls::Call;
use crate::moves::Spans;
use crate::process::Process;
use crate::results::{self, Shown};
use crate::{admin, args, errors, host, moves};

type Object = Py<PyAny>;

/// What is open, until `close`.
pub(super) struct Open {
    pub(super) client: RustClient,
    pub(super) closed: watch::Sender<bool>,
}

/// What a client is made of.
pub(super) struct Settings {
    pub(super) options: ClientOptions,
    deadline: f64,
}

impl Settings {
    pub(super) fn new(
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

    pub(super) fn client(self, process: &'static Process, client: RustClient) -> Client {
        Client {
            process,
            open: Mutex::new(Some(Open { client, closed: watch::channel(false).0 })),
            tenant: self.options.tenant,
            host_id: self.options.host_id,
            deadline: self.deadline,
        }
    }
}

/// The memory of each item of a call, and what Python keeps for it until the call ends.
pub(super) struct Memory {
    spans: Spans,
    held: Held,
}

impl Memory {
    /// Of objects; on an error what was taken is given back.
    pub(super) fn of_objects(
        py: Python<'_>,
        given: &Bound<'_, PyAny>,
        what: &str,
        keys: usize,
        writable: bool,
    ) -> PyResult<Memory> {
        let mut held = Held::default();
        let taken = args::items(given, what, |item| spans_of(&item, writable, &mut held).map(Ok));
        let taken = taken.and_then(|taken| args::same_length(what, taken.len(), keys).map(|()| taken));
        match taken {
            Ok(spans) => Ok(Memory { spans, held }),
            Err(error) => {
                held.release(py);
                Err(error)
            }
        }
    }

    /// At addresses, which nothing here keeps valid.
    pub(super) fn at_addresses(
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        keys: usize,
        writable: bool,
        unchecked: bool,
    ) -> PyResult<Memory> {
        let addresses = args::numbers(addresses, "addresses", keys)?;
        let sizes = args::numbers(sizes, "sizes", keys)?;
        let spans = addresses.iter().zip(&sizes);
        let spans = spans.map(|(addresses, sizes)| spans_at(addresses, sizes, writable, unchecked)).collect();
        Ok(Memory { spans, held: Held::default() })
    }
}

/// A call of nothing that is open yet.
pub(super) fn unbound(process: &'static Process) -> Call {
    Call { process, closed: watch::channel(false).1, loan: None }
}

impl Client {
    /// The client, if it is open and of this process.
    pub(super) fn client(&self, py: Python<'_>) -> PyResult<RustClient> {
        self.begin(py).map(|(client, _)| client)
    }

    pub(super) fn begin(&self, py: Python<'_>) -> PyResult<(RustClient, Call)> {
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

    /// A call about keys, with a result each.
    pub(super) fn each<T: Shown + Send + 'static, F: Future<Output = Vec<Result<T, Error>>> + Send + 'static>(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        codes: bool,
        asyncio: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(RustClient, Arc<Vec<Bytes>>) -> F,
    ) -> PyResult<Object> {
        let keys = Arc::new(args::keys(keys)?);
        let (client, call) = self.begin(py)?;
        let work = work(client, keys.clone());
        call.run(py, asyncio, work, move |py, results| results::list(py, &keys, results, codes))
    }

    /// A call with one outcome, whose error is raised.
    pub(super) fn one<T: Send + 'static, F: Future<Output = Result<T, Error>> + Send + 'static>(
        &self,
        py: Python<'_>,
        asyncio: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce(RustClient) -> F,
        show: impl FnOnce(Python<'_>, T) -> PyResult<Object> + Send + 'static,
    ) -> PyResult<Object> {
        let (client, call) = self.begin(py)?;
        call.run(py, asyncio, work(client), |py, outcome| results::raised(py, outcome, |value| show(py, value)))
    }

    /// Puts what lies in memory.
    pub(super) fn put(
        &self,
        py: Python<'_>,
        keys: Vec<Bytes>,
        memory: Memory,
        groups: Option<Vec<Bytes>>,
        options: PutOptions,
        codes: bool,
        asyncio: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let (client, call, loan) = self.begin_with(py, memory.held)?;
        let (items, refused) = moves::put_items(&keys, memory.spans, groups, &loan);
        drop(loan);
        let work = moves::put(client, items, refused, options);
        call.run(py, asyncio, work, move |py, results| results::list(py, &keys, results, codes))
    }

    /// Fills memory with objects.
    pub(super) fn get_into(
        &self,
        py: Python<'_>,
        keys: Vec<Bytes>,
        memory: Memory,
        deadline: Duration,
        codes: bool,
        asyncio: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let (client, call, loan) = self.begin_with(py, memory.held)?;
        let items = moves::get_items(&keys, memory.spans, &loan);
        drop(loan);
        let work = moves::get_into(client, items, deadline);
        call.run(py, asyncio, work, move |py, results| results::list(py, &keys, results, codes))
    }

    /// Fills memory with parts of objects.
    pub(super) fn get_ranges_into(
        &self,
        py: Python<'_>,
        keys: Vec<Bytes>,
        offsets: Vec<u64>,
        memory: Memory,
        deadline: Duration,
        codes: bool,
        asyncio: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let (client, call, loan) = self.begin_with(py, memory.held)?;
        let items = moves::range_items(&keys, offsets, memory.spans, &loan);
        drop(loan);
        let work = moves::get_ranges_into(client, items, deadline);
        call.run(py, asyncio, work, move |py, results| results::list(py, &keys, results, codes))
    }

    pub(super) fn create_task(
        &self,
        py: Python<'_>,
        request: CreateTaskRequest,
        deadline: Option<f64>,
        asyncio: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Object> {
        let deadline = self.until(deadline)?;
        let request = CreateTaskRequest { tenant: self.tenant.clone(), ..request };
        let work = move |client| async move { admin::create_task(&client, request, deadline).await };
        self.one(py, asyncio, work, |py, task_id: u64| task_id.shown(py))
    }

    /// How long a call may take: what it says, or this client's default.
    pub(super) fn limit(&self, deadline: Option<f64>) -> PyResult<Duration> {
        args::duration(deadline.unwrap_or(self.deadline), "the deadline")
    }

    /// The end of such a call.
    pub(super) fn until(&self, deadline: Option<f64>) -> PyResult<tokio::time::Instant> {
        Ok(tokio::time::Instant::now() + self.limit(deadline)?)
    }
}
