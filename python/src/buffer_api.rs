//! The buffer protocol of CPython. Its structure and functions are the same in every Python 3, but part of the limited API only
//! from 3.11, so that pyo3 does not offer them to a module for 3.9: they are declared here.
// Foreign functions and raw memory.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// `Py_buffer`.
#[repr(C)]
pub(crate) struct RawBuffer {
    pub(crate) buf: *mut c_void,
    pub(crate) obj: *mut ffi::PyObject,
    pub(crate) len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// Asks for plain bytes in C order.
const SIMPLE: c_int = 0;
/// Asks for memory that may be written.
pub(crate) const WRITABLE: c_int = 1;

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
    pub(crate) fn PyBuffer_FillInfo(
        view: *mut RawBuffer,
        object: *mut ffi::PyObject,
        buf: *mut c_void,
        len: ffi::Py_ssize_t,
        readonly: c_int,
        flags: c_int,
    ) -> c_int;
}

/// A buffer that an object exports to us: it neither moves nor goes until this is released.
pub(crate) struct Exported(Box<RawBuffer>);

// SAFETY: the structure is only looked at, and given back under the GIL (`release`); the memory's own rules are those of the transport.
unsafe impl Send for Exported {}
// SAFETY: as above.
unsafe impl Sync for Exported {}

impl Exported {
    /// Whether the object speaks the protocol.
    pub(crate) fn is_offered_by(object: &Bound<'_, PyAny>) -> bool {
        // SAFETY: a live object, under the GIL.
        unsafe { PyObject_CheckBuffer(object.as_ptr()) == 1 }
    }

    /// Takes the object's buffer; BufferError when it is not contiguous, or not writable as asked.
    pub(crate) fn take(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Exported> {
        // SAFETY: all-zero is a valid value of every field.
        let mut raw: Box<RawBuffer> = Box::new(unsafe { std::mem::zeroed() });
        let flags = if writable { WRITABLE } else { SIMPLE };
        // SAFETY: a live object and a structure of the right shape, under the GIL.
        let got = unsafe { PyObject_GetBuffer(object.as_ptr(), &mut *raw, flags) };
        if got != 0 {
            let error = PyErr::fetch(object.py());
            // numpy says ValueError for what others say BufferError.
            return Err(if error.is_instance_of::<PyBufferError>(object.py()) {
                error
            } else {
                PyBufferError::new_err(error.value(object.py()).to_string())
            });
        }
        Ok(Exported(raw))
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.0.buf.cast()
    }

    pub(crate) fn len(&self) -> usize {
        usize::try_from(self.0.len).unwrap_or(0)
    }

    /// Gives it back.
    pub(crate) fn release(mut self, _py: Python<'_>) {
        // SAFETY: filled by PyObject_GetBuffer, released once, under the GIL.
        unsafe { PyBuffer_Release(&mut *self.0) };
    }
}
