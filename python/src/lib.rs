//! `tidepool._native`: the Rust client, and a datanode to lend memory with, for Python.
//!
//! What is where: [`client`] has every call, [`calls`] waits for them (or hands them to asyncio), [`process`] keeps the runtime and
//! survives a fork; [`buffers`], [`dlpack`] and [`registry`] turn objects and addresses into memory that may be touched, [`memory`]
//! exports memory to Python; [`moves`] and [`results`] are the two ends of a put or get; [`node`] lends memory.
//! The interface, documented, is `tidepool/_native.pyi`.
//!
//! Architecture invariants: no thread of the runtime ever waits for the GIL; memory that a call was given is held until nothing of
//! the client refers to it; nothing that a fork inherited is used or freed.

mod admin;
mod args;
mod buffer_api;
mod buffers;
mod calls;
mod client;
mod dlpack;
mod driver;
mod errors;
mod host;
mod memory;
mod moves;
mod node;
mod process;
mod registry;
mod results;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};
use tidepool_client::ErrorCode;
use tidepool_proto::{PROTOCOL_VERSION, keys, object};

/// (address, bytes) of a buffer object or CPU tensor.
#[pyfunction]
#[pyo3(signature = (buffer, writable = false))]
fn buffer_address(buffer: &Bound<'_, PyAny>, writable: bool) -> PyResult<(usize, usize)> {
    let mut held = buffers::Held::default();
    let span = held.take(buffer, writable);
    held.release(buffer.py());
    span.map(|span| (span.address, span.len))
}

/// Before the interpreter goes: no thread may want it afterwards.
#[pyfunction]
fn stop_at_exit(py: Python<'_>) {
    node::leave_all(py);
    if let Some(process) = process::Process::existing() {
        process.stop(py);
    }
}

/// The native module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    let codes = PyList::empty(py);
    for code in ErrorCode::ALL {
        codes.append((*code as u32, code.name(), code.mooncake(), PyBool::new(py, code.is_retryable())))?;
    }
    module.add("ERROR_CODES", codes)?;
    module.add("DATA_TYPES", args::DATA_TYPES.to_vec())?;
    module.add("OBJECT_BYTES_MAX", object::OBJECT_BYTES_MAX)?;
    module.add("KEY_BYTES_MAX", keys::KEY_BYTES_MAX)?;
    module.add("PROTOCOL_VERSION", PROTOCOL_VERSION)?;

    let error = py.get_type::<errors::TidepoolError>();
    errors::add_defaults(&error)?;
    module.add("TidepoolError", error)?;
    module.add("Value", memory::value_type(py)?)?;
    module.add("Memory", memory::memory_type(py)?)?;
    module.add_class::<errors::ItemError>()?;
    module.add_class::<results::PutResult>()?;
    module.add_class::<args::PutOptions>()?;
    module.add_class::<client::Client>()?;
    module.add_class::<node::LocalNode>()?;
    module.add_function(wrap_pyfunction!(errors::set_error_classes, module)?)?;
    module.add_function(wrap_pyfunction!(registry::register, module)?)?;
    module.add_function(wrap_pyfunction!(registry::unregister, module)?)?;
    module.add_function(wrap_pyfunction!(registry::registered, module)?)?;
    module.add_function(wrap_pyfunction!(registry::copy_memory, module)?)?;
    module.add_function(wrap_pyfunction!(buffer_address, module)?)?;
    let stop = wrap_pyfunction!(stop_at_exit, module)?;
    py.import("atexit")?.call_method1("register", (stop,))?;
    Ok(())
}
