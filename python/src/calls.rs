//! One call: waited for in this thread, or handed to an asyncio loop.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::asyncio::InvalidStateError;
use pyo3::prelude::*;
use tidepool_client::{Error, ErrorCode};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::buffers::Loan;
use crate::errors;
use crate::process::{Errand, Process};

/// How often a waiting thread looks whether Python has a signal to handle.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// What a call has besides its work.
pub(crate) struct Call {
    pub(crate) process: &'static Process,
    /// True once its client is closed.
    pub(crate) closed: watch::Receiver<bool>,
    /// Memory that it uses.
    pub(crate) loan: Option<Arc<Loan>>,
}

fn closed_meanwhile() -> Error {
    Error::new(ErrorCode::Unavailable, "the store was closed while the call was under way; its outcome is unknown")
}

/// Resolves when the client is closed; a client that is only forgotten lets its calls end.
async fn until_closed(closed: &mut watch::Receiver<bool>) {
    if closed.wait_for(|closed| *closed).await.is_err() {
        std::future::pending::<()>().await;
    }
}

impl Call {
    /// Runs `work` and makes its output a Python object by `finish`.
    pub(crate) fn run<T: Send + 'static>(
        self,
        py: Python<'_>,
        asyncio: Option<&Bound<'_, PyAny>>,
        work: impl Future<Output = T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Py<PyAny>> {
        let mut closed = self.closed;
        let work = async move {
            tokio::select! {
                biased;
                output = work => Ok(output),
                () = until_closed(&mut closed) => Err(closed_meanwhile()),
            }
        };
        let finish = |py: Python<'_>, output: Result<T, Error>| match output {
            Ok(output) => finish(py, output),
            Err(error) => Err(errors::raise(py, &error, None)),
        };
        match asyncio {
            None => wait(py, self.process, self.loan, work, finish),
            Some(asyncio) => hand_over(py, self.process, asyncio, self.loan, work, finish),
        }
    }
}

fn wait<T: Send>(
    py: Python<'_>,
    process: &'static Process,
    loan: Option<Arc<Loan>>,
    work: impl Future<Output = T> + Send,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    // On the heap: it is dropped here, before its memory is given back, when a signal ends the call.
    let mut work = Box::pin(work);
    let output = loop {
        if let Some(output) = py.detach(|| process.block_on(work.as_mut(), SIGNALS_EVERY)) {
            break Ok(output);
        }
        if let Err(interrupted) = py.check_signals() {
            break Err(interrupted);
        }
    };
    py.detach(|| {
        // What was begun is undone by tasks that the drop starts.
        let _entered = process.handle().enter();
        drop(work);
        if let Some(loan) = &loan {
            loan.settle();
        }
    });
    let result = output.and_then(|output| finish(py, output));
    if let Some(loan) = loan {
        loan.end(py);
    }
    result
}

/// Resolves a future however the task ends: with its output, or, when it panicked, with an error.
struct Promise {
    process: &'static Process,
    to: Option<(Py<PyAny>, Py<PyAny>)>,
}

impl Promise {
    fn keep(mut self, make: impl FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send + 'static) {
        if let Some((asyncio, future)) = self.to.take() {
            self.process.send(Errand::Deliver(Box::new(move |py| resolve(py, &asyncio, &future, make(py)))));
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some((asyncio, future)) = self.to.take() {
            let lost = |py: Python<'_>| {
                let error = Error::new(ErrorCode::Internal, "the call ended without a result; this is a bug");
                Err(errors::raise(py, &error, None))
            };
            self.process.send(Errand::Deliver(Box::new(move |py| resolve(py, &asyncio, &future, lost(py)))));
        }
    }
}

fn hand_over<T: Send + 'static>(
    py: Python<'_>,
    process: &'static Process,
    asyncio: &Bound<'_, PyAny>,
    loan: Option<Arc<Loan>>,
    work: impl Future<Output = T> + Send + 'static,
    finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> PyResult<Py<PyAny>> {
    let future = asyncio.call_method0("create_future")?;
    let promise = Promise { process, to: Some((asyncio.clone().unbind(), future.clone().unbind())) };
    let under_way = process.hand_over();
    let task = process.handle().spawn(async move {
        let _under_way = under_way;
        let output = work.await;
        promise.keep(move |py| {
            let result = finish(py, output);
            if let Some(loan) = loan {
                loan.end(py);
            }
            result
        });
    });
    future.call_method1("add_done_callback", (Bound::new(py, AbortWhenCancelled(task.abort_handle()))?,))?;
    Ok(future.unbind())
}

/// Puts a result into its future, in the loop's own thread.
fn resolve(py: Python<'_>, asyncio: &Py<PyAny>, future: &Py<PyAny>, result: PyResult<Py<PyAny>>) {
    let (value, error) = match result {
        Ok(value) => (value, py.None()),
        Err(error) => (py.None(), error.into_value(py).into_any()),
    };
    let resolver = wrap_pyfunction!(set_future, py);
    // Fails when the loop is closed: then nobody waits.
    if let Ok(resolver) = resolver {
        let _ = asyncio.call_method1(py, "call_soon_threadsafe", (resolver, future, value, error));
    }
}

/// Runs in the loop; a future that was cancelled meanwhile stays so.
#[pyfunction]
fn set_future(future: &Bound<'_, PyAny>, value: Bound<'_, PyAny>, error: Bound<'_, PyAny>) -> PyResult<()> {
    let set = match error.is_none() {
        true => future.call_method1("set_result", (value,)),
        false => future.call_method1("set_exception", (error,)),
    };
    match set {
        Err(done) if done.is_instance_of::<InvalidStateError>(future.py()) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Drops the work of a future that was cancelled.
#[pyclass(frozen)]
struct AbortWhenCancelled(AbortHandle);

#[pymethods]
impl AbortWhenCancelled {
    fn __call__(&self, future: &Bound<'_, PyAny>) -> PyResult<()> {
        if future.call_method0("cancelled")?.is_truthy()? {
            self.0.abort();
        }
        Ok(())
    }
}
