//! Errors as Python sees them: `TidepoolError`, raised, and `ItemError`, the result of one item of a batch.

use bytes::Bytes;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyType};
use tidepool_client::{Error, ErrorCode};

pyo3::create_exception!(tidepool, TidepoolError, PyException, "What the cluster, or the way to it, answered.");

/// Classes by code, as the package defines them.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

/// Names the class that is raised for each code; others raise `TidepoolError` itself.
#[pyfunction]
pub(crate) fn set_error_classes(py: Python<'_>, classes: Bound<'_, PyDict>) {
    let kept = CLASSES.get_or_init(py, || classes.clone().unbind());
    // Set once, by the package's own import.
    let _ = kept;
}

/// An exception for an error, with its facts as attributes.
pub(crate) fn raise(py: Python<'_>, error: &Error, key: Option<&[u8]>) -> PyErr {
    exception(py, error, key).map_or_else(|failed| failed, PyErr::from_value)
}

fn exception<'py>(py: Python<'py>, error: &Error, key: Option<&[u8]>) -> PyResult<Bound<'py, PyAny>> {
    let code = error.code();
    let class = match CLASSES.get(py) {
        Some(classes) => classes.bind(py).get_item(code as u32)?,
        None => None,
    };
    let class = class.unwrap_or_else(|| py.get_type::<TidepoolError>().into_any());
    let exception = class.call1((error.to_string(),))?;
    exception.setattr("code", code as u32)?;
    exception.setattr("name", code.name())?;
    exception.setattr("mooncake", code.mooncake())?;
    exception.setattr("message", error.message())?;
    exception.setattr("key", key.map(|key| PyBytes::new(py, key)))?;
    exception.setattr("node", node_of(error))?;
    exception.setattr("retryable", code.is_retryable())?;
    exception.setattr("retry_after", f64::from(error.retry_after_ms()) / 1000.0)?;
    Ok(exception)
}

/// The node that an error is about.
fn node_of(error: &Error) -> Option<String> {
    error.node().map(str::to_owned).or_else(|| error.leader().map(|leader| leader.address.clone()))
}

/// Why one item of a batch failed. Falsy.
#[pyclass(frozen, module = "tidepool._native")]
pub(crate) struct ItemError {
    error: Error,
    key: Option<Bytes>,
}

impl ItemError {
    pub(crate) fn new(error: Error, key: Option<Bytes>) -> ItemError {
        ItemError { error, key }
    }
}

#[pymethods]
impl ItemError {
    #[getter]
    fn code(&self) -> u32 {
        self.error.code() as u32
    }
    #[getter]
    fn name(&self) -> &'static str {
        self.error.code().name()
    }
    #[getter]
    fn mooncake(&self) -> i32 {
        self.error.code().mooncake()
    }
    #[getter]
    fn message(&self) -> &str {
        self.error.message()
    }
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.key.as_ref().map(|key| PyBytes::new(py, key))
    }
    #[getter]
    fn node(&self) -> Option<String> {
        node_of(&self.error)
    }
    #[getter]
    fn retryable(&self) -> bool {
        self.error.code().is_retryable()
    }
    #[getter]
    fn retry_after(&self) -> f64 {
        f64::from(self.error.retry_after_ms()) / 1000.0
    }
    /// The same as an exception, to raise.
    fn exception(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        exception(py, &self.error, self.key.as_deref()).map(Bound::unbind)
    }
    fn __bool__(&self) -> bool {
        false
    }
    fn __repr__(&self) -> String {
        format!("ItemError({})", self.error)
    }
}

/// Defaults of the exception's attributes, so that one made by hand has them too.
pub(crate) fn add_defaults(class: &Bound<'_, PyType>) -> PyResult<()> {
    let internal = ErrorCode::Internal;
    class.setattr("code", internal as u32)?;
    class.setattr("name", internal.name())?;
    class.setattr("mooncake", internal.mooncake())?;
    class.setattr("message", "")?;
    class.setattr("key", class.py().None())?;
    class.setattr("node", class.py().None())?;
    class.setattr("retryable", false)?;
    class.setattr("retry_after", 0.0)
}
