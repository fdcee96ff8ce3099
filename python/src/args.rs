//! Arguments of calls: keys, options, deadlines, lists of numbers.

use std::time::Duration;

use bytes::Bytes;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyString, PyTuple};
use tidepool_client::{DataType, PutOptions as Options, ReplicaMode, SoftPin};

/// Longest deadline, so that the clock cannot overflow: 30 days.
const DEADLINE_SECONDS_MAX: f64 = 30.0 * 86_400.0;

/// Names of data types, by number.
pub(crate) const DATA_TYPES: [&str; 10] = [
    "unknown",
    "kvcache",
    "tensor",
    "weight",
    "sample",
    "activation",
    "gradient",
    "optimizer_state",
    "metadata",
    "general",
];

/// Name of a data type; a newer peer's reads as unknown.
pub(crate) fn data_type_name(data_type: DataType) -> &'static str {
    DATA_TYPES.get(data_type as usize).copied().unwrap_or("unknown")
}

/// A data type from its name or number.
pub(crate) fn data_type(given: &Bound<'_, PyAny>) -> PyResult<DataType> {
    let number = match given.cast::<PyString>() {
        Ok(name) => {
            let name = name.to_cow()?;
            DATA_TYPES.iter().position(|known| *known == name).map(|position| position as i32)
        }
        Err(_) => Some(given.extract::<i32>()?),
    };
    number
        .and_then(|number| DataType::try_from(number).ok())
        .ok_or_else(|| PyValueError::new_err(format!("data type {given} is unknown; known: {}", DATA_TYPES.join(", "))))
}

/// A deadline in seconds.
pub(crate) fn duration(seconds: f64, what: &str) -> PyResult<Duration> {
    if !(0.0..=DEADLINE_SECONDS_MAX).contains(&seconds) {
        return Err(PyValueError::new_err(format!("{what} is {seconds} s; it is 0 to {DEADLINE_SECONDS_MAX} s")));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// As [`duration`], or none.
pub(crate) fn deadline(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| duration(seconds, "the deadline")).transpose()
}

/// One key: text in UTF-8, or bytes.
pub(crate) fn key(given: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if let Ok(text) = given.cast::<PyString>() {
        return Ok(Bytes::copy_from_slice(text.to_cow()?.as_bytes()));
    }
    if let Ok(bytes) = given.cast::<PyBytes>() {
        return Ok(Bytes::copy_from_slice(bytes.as_bytes()));
    }
    Err(PyTypeError::new_err(format!("a key is str or bytes, not {}", given.get_type().name()?)))
}

/// Keys of a batch.
pub(crate) fn keys(given: &Bound<'_, PyAny>) -> PyResult<Vec<Bytes>> {
    items(given, "keys", |item| key(&item))
}

/// Each item of a list, a tuple or something else to iterate over. Text and bytes are no lists of keys.
pub(crate) fn items<'py, T>(
    given: &Bound<'py, PyAny>,
    what: &str,
    one: impl FnMut(Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    if let Ok(list) = given.cast::<PyList>() {
        return list.iter().map(one).collect();
    }
    if let Ok(tuple) = given.cast::<PyTuple>() {
        return tuple.iter().map(one).collect();
    }
    if given.is_instance_of::<PyString>() || given.is_instance_of::<PyBytes>() || given.is_instance_of::<PyByteArray>()
    {
        return Err(PyTypeError::new_err(format!("{what} is a list, not {}", given.get_type().name()?)));
    }
    let mut one = one;
    given.try_iter()?.map(|item| one(item?)).collect()
}

/// Refuses lists of unequal length.
pub(crate) fn same_length(what: &str, len: usize, keys: usize) -> PyResult<()> {
    if len == keys {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{len} {what} for {keys} keys")))
}

/// Groups of a batch: none, or a name a key.
pub(crate) fn groups(given: Option<&Bound<'_, PyAny>>, keys: usize) -> PyResult<Option<Vec<Bytes>>> {
    let Some(given) = given else { return Ok(None) };
    let groups = items(given, "groups", |item| if item.is_none() { Ok(Bytes::new()) } else { key(&item) })?;
    same_length("groups", groups.len(), keys)?;
    Ok(Some(groups))
}

/// Numbers a key: one, or a list of them.
pub(crate) fn numbers(given: &Bound<'_, PyAny>, what: &str, keys: usize) -> PyResult<Vec<Vec<usize>>> {
    let one = |item: Bound<'_, PyAny>| {
        if item.is_instance_of::<PyList>() || item.is_instance_of::<PyTuple>() {
            return items(&item, what, |number| number.extract::<usize>());
        }
        Ok(vec![item.extract::<usize>()?])
    };
    let numbers = items(given, what, one)?;
    same_length(what, numbers.len(), keys)?;
    Ok(numbers)
}

/// How objects are stored.
#[pyclass(frozen, module = "tidepool._native")]
pub(crate) struct PutOptions {
    pub(crate) options: Options,
}

#[pymethods]
impl PutOptions {
    #[new]
    #[pyo3(signature = (*, replicas = 1, strict = false, upsert = false, data_type = None, soft_pin = None, soft_pin_ttl = None,
        hard_pin = false, preferred_segments = None, prefer_own_host = false, independent = true))]
    fn new(
        replicas: u32,
        strict: bool,
        upsert: bool,
        data_type: Option<&Bound<'_, PyAny>>,
        soft_pin: Option<&str>,
        soft_pin_ttl: Option<f64>,
        hard_pin: bool,
        preferred_segments: Option<Vec<String>>,
        prefer_own_host: bool,
        independent: bool,
    ) -> PyResult<PutOptions> {
        let ttl = soft_pin_ttl.map(|ttl| duration(ttl, "soft_pin_ttl")).transpose()?;
        let soft_pin = match soft_pin.unwrap_or("preserve") {
            "preserve" => SoftPin::Preserve,
            "enable" => SoftPin::Enable(ttl),
            "disable" => SoftPin::Disable,
            other => {
                return Err(PyValueError::new_err(format!("soft_pin is preserve, enable or disable, not '{other}'")));
            }
        };
        if ttl.is_some() && !matches!(soft_pin, SoftPin::Enable(_)) {
            return Err(PyValueError::new_err("soft_pin_ttl without soft_pin=\"enable\""));
        }
        Ok(PutOptions {
            options: Options {
                replica_num: replicas,
                mode: if strict { ReplicaMode::Strict } else { ReplicaMode::BestEffort },
                deadline: None,
                data_type: data_type.map_or(Ok(DataType::Unknown), self::data_type)?,
                soft_pin,
                hard_pin,
                preferred_segments: preferred_segments.unwrap_or_default(),
                prefer_own_host,
                replace: upsert,
                independent,
            },
        })
    }

    /// Whether it replaces what is there.
    #[getter]
    fn upsert(&self) -> bool {
        self.options.replace
    }

    fn __repr__(&self) -> String {
        format!("PutOptions({:?})", self.options)
    }
}
