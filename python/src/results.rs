//! Outcomes of calls as Python objects.

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use tidepool_client::{Error, ErrorCode, ListPage, ObjectStat, PutOutcome, Removed};
use tidepool_proto::SegmentId;
use tidepool_proto::v1::{ReplicaKind, StatusResponse, TaskKind, TaskStatus};

use crate::args::data_type_name;
use crate::errors::{self, ItemError};
use crate::memory;

type Object = Py<PyAny>;

/// Results that have a number: what a call returns with `codes`.
pub(crate) trait Shown: Sized {
    /// As a value.
    fn shown(self, py: Python<'_>) -> PyResult<Object>;
    /// As a number.
    fn code(&self) -> i64;
}

impl Shown for u64 {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        Ok(self.into_pyobject(py)?.into_any().unbind())
    }
    fn code(&self) -> i64 {
        i64::try_from(*self).unwrap_or(i64::MAX)
    }
}

impl Shown for f64 {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        Ok(self.into_pyobject(py)?.into_any().unbind())
    }
    fn code(&self) -> i64 {
        *self as i64
    }
}

impl Shown for bool {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        Ok(self.into_pyobject(py)?.to_owned().into_any().unbind())
    }
    fn code(&self) -> i64 {
        i64::from(*self)
    }
}

impl Shown for () {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        Ok(py.None())
    }
    fn code(&self) -> i64 {
        0
    }
}

impl Shown for Bytes {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        memory::value(py, self)
    }
    fn code(&self) -> i64 {
        self.len() as i64
    }
}

impl Shown for PutOutcome {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        Ok(Py::new(py, PutResult(self))?.into_any())
    }
    fn code(&self) -> i64 {
        0
    }
}

impl Shown for ObjectStat {
    fn shown(self, py: Python<'_>) -> PyResult<Object> {
        stat(py, self)
    }
    fn code(&self) -> i64 {
        self.length.code()
    }
}

/// A put that succeeded. Truthy; as a number 0.
#[pyclass(frozen, module = "tidepool._native")]
pub(crate) struct PutResult(PutOutcome);

#[pymethods]
impl PutResult {
    #[getter]
    fn copies(&self) -> u32 {
        self.0.copies
    }
    #[getter]
    fn existed(&self) -> bool {
        self.0.already_existed
    }
    #[getter]
    fn object_id(&self) -> u64 {
        self.0.object_id
    }
    fn __int__(&self) -> i64 {
        0
    }
    fn __bool__(&self) -> bool {
        true
    }
    fn __repr__(&self) -> String {
        let PutOutcome { copies, already_existed, object_id } = self.0;
        let existed = if already_existed { "True" } else { "False" };
        format!("PutResult(copies={copies}, existed={existed}, object_id={object_id})")
    }
}

/// One object an item: a value, or why there is none.
pub(crate) fn list<T: Shown>(
    py: Python<'_>,
    keys: &[Bytes],
    results: Vec<Result<T, Error>>,
    codes: bool,
) -> PyResult<Object> {
    if codes {
        let code = |result: &Result<T, Error>| match result {
            Ok(value) => value.code(),
            Err(error) => i64::from(error.code().mooncake()),
        };
        return Ok(PyList::new(py, results.iter().map(code))?.into_any().unbind());
    }
    list_or(py, keys, results, None, |py, value| value.shown(py))
}

/// As [`list`], with one object for every item that failed.
pub(crate) fn list_or<T>(
    py: Python<'_>,
    keys: &[Bytes],
    results: Vec<Result<T, Error>>,
    missing: Option<&Object>,
    show: impl Fn(Python<'_>, T) -> PyResult<Object>,
) -> PyResult<Object> {
    let one = |(result, key): (Result<T, Error>, &Bytes)| match (result, missing) {
        (Ok(value), _) => show(py, value),
        (Err(_), Some(missing)) => Ok(missing.clone_ref(py)),
        (Err(error), None) => Ok(Py::new(py, ItemError::new(error, Some(key.clone())))?.into_any()),
    };
    let objects = results.into_iter().zip(keys).map(one).collect::<PyResult<Vec<Object>>>()?;
    Ok(PyList::new(py, objects)?.into_any().unbind())
}

/// What one call came to; its error is raised.
pub(crate) fn raised<T>(
    py: Python<'_>,
    outcome: Result<T, Error>,
    show: impl FnOnce(T) -> PyResult<Object>,
) -> PyResult<Object> {
    show(outcome.map_err(|error| errors::raise(py, &error, None))?)
}

/// Payload bytes of a complete object.
pub(crate) fn size_of(stat: ObjectStat) -> Result<u64, Error> {
    match stat.state.as_str() {
        "COMPLETE" => Ok(stat.length),
        state => {
            let what = format!("the object is {state}: its put has not ended; ask again when it has");
            Err(Error::new(ErrorCode::NotReady, what))
        }
    }
}

fn stat(py: Python<'_>, stat: ObjectStat) -> PyResult<Object> {
    let shown = PyDict::new(py);
    shown.set_item("object_id", stat.object_id)?;
    shown.set_item("length", stat.length)?;
    shown.set_item("state", stat.state)?;
    let replicas = PyList::empty(py);
    for copy in stat.replicas {
        let replica = PyDict::new(py);
        replica.set_item("replica_id", copy.replica.replica_id)?;
        replica.set_item("segment_id", copy.replica.segment_id)?;
        let kind = match copy.replica.kind() {
            ReplicaKind::LocalDisk => "local_disk",
            _ => "memory",
        };
        replica.set_item("kind", kind)?;
        replica.set_item("segment", copy.replica.segment_name)?;
        replica.set_item("node_id", copy.replica.node_id)?;
        replica.set_item("endpoint", copy.address)?;
        replica.set_item("host_id", copy.host_id)?;
        replica.set_item("offset", copy.replica.offset)?;
        replica.set_item("length", copy.replica.length)?;
        replica.set_item("listed", copy.replica.listed)?;
        replicas.append(replica)?;
    }
    shown.set_item("replicas", replicas)?;
    shown.set_item("leases", stat.leases)?;
    shown.set_item("lease_remaining", seconds(u64::from(stat.lease_remaining_ms)))?;
    shown.set_item("age", seconds(stat.age_ms))?;
    shown.set_item("data_type", data_type_name(stat.data_type))?;
    shown.set_item("hard_pinned", stat.hard_pinned)?;
    shown.set_item("soft_pin_remaining", seconds(stat.soft_pin_remaining_ms))?;
    shown.set_item("group", PyBytes::new(py, &stat.group))?;
    Ok(shown.into_any().unbind())
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

/// One page of a listing.
pub(crate) fn page(py: Python<'_>, page: ListPage) -> PyResult<Object> {
    let objects = PyList::empty(py);
    for object in page.objects {
        let shown = PyDict::new(py);
        shown.set_item("key", PyBytes::new(py, &object.key))?;
        shown.set_item("object_id", object.object_id)?;
        shown.set_item("length", object.length)?;
        shown.set_item("replicas", object.replicas)?;
        shown.set_item("data_type", data_type_name(object.data_type))?;
        shown.set_item("hard_pinned", object.hard_pinned)?;
        objects.append(shown)?;
    }
    let shown = PyDict::new(py);
    shown.set_item("objects", objects)?;
    shown.set_item("more", page.more)?;
    shown.set_item("next", PyBytes::new(py, &page.next))?;
    Ok(shown.into_any().unbind())
}

/// What a removal by match did.
pub(crate) fn removed(py: Python<'_>, removed: Removed) -> PyResult<Object> {
    let shown = PyDict::new(py);
    shown.set_item("removed", removed.removed)?;
    shown.set_item("leased", removed.leased)?;
    shown.set_item("unfinished", removed.unfinished)?;
    let left = removed.left_keys.iter().map(|key| PyBytes::new(py, key));
    shown.set_item("left_keys", PyList::new(py, left)?)?;
    shown.set_item("next", removed.next.as_ref().map(|next| PyBytes::new(py, next)))?;
    Ok(shown.into_any().unbind())
}

/// A task of the masters.
pub(crate) fn task(py: Python<'_>, task: TaskStatus) -> PyResult<Object> {
    let kind = match task.kind() {
        TaskKind::Unspecified => "unknown",
        TaskKind::Copy => "copy",
        TaskKind::Move => "move",
        TaskKind::Drain => "drain",
    };
    let shown = PyDict::new(py);
    shown.set_item("task_id", task.task_id)?;
    shown.set_item("kind", kind)?;
    shown.set_item("state", task.state)?;
    shown.set_item("moved", task.moved)?;
    shown.set_item("failed", task.failed)?;
    shown.set_item("left", task.left)?;
    shown.set_item("message", task.message)?;
    shown.set_item("age", seconds(task.age_ms))?;
    shown.set_item("source_segments", task.source_segments)?;
    Ok(shown.into_any().unbind())
}

/// Segments of the cluster, with where they are.
pub(crate) fn segments(py: Python<'_>, status: StatusResponse) -> PyResult<Object> {
    let segments = PyList::empty(py);
    for segment in status.segments {
        let node = status.nodes.iter().find(|node| node.node_id == segment.node_id);
        let shown = PyDict::new(py);
        shown.set_item("segment_id", SegmentId(segment.segment_id).0)?;
        shown.set_item("name", segment.name)?;
        shown.set_item("node_id", segment.node_id)?;
        shown.set_item("endpoint", node.map_or("", |node| node.address.as_str()))?;
        shown.set_item("host_id", node.map_or("", |node| node.host_id.as_str()))?;
        shown.set_item("capacity", segment.capacity_bytes)?;
        shown.set_item("free", segment.free_bytes)?;
        shown.set_item("state", segment.state)?;
        segments.append(shown)?;
    }
    Ok(segments.into_any().unbind())
}
