//! Python objects that export memory: `Value` (bytes that were received, read-only) and `Memory` (page-aligned, writable).
//!
//! Types of their own rather than pyo3's: a class for Python 3.9 that exports a buffer must fill the slots itself (see `buffer_api`).
// Foreign functions and raw memory.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr;

use bytes::Bytes;
use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::buffer_api::{PyBuffer_FillInfo, RawBuffer};
use crate::registry;

/// What keeps the memory of an object.
enum Keeper {
    Received(#[allow(dead_code)] Bytes),
    Mapped,
    Freed,
}

#[repr(C)]
struct Object {
    head: ffi::PyObject,
    address: *mut u8,
    len: usize,
    /// Buffers of it that somebody holds.
    exports: usize,
    keeper: *mut Keeper,
}

static VALUE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static MEMORY: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// The class `Value`.
pub(crate) fn value_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let make = || {
        let mut slots = common_slots(
            c"The bytes of one object, as they arrived. Exports a read-only buffer: memoryview(value) copies nothing.",
        );
        slots.push(slot(ffi::Py_bf_getbuffer, value_get_buffer as *mut c_void));
        slots.push(slot(ffi::Py_tp_new, value_new as *mut c_void));
        slots.push(slot(ffi::Py_tp_getset, ptr::addr_of!(VALUE_GETTERS).cast_mut().cast()));
        slots.push(slot(ffi::Py_tp_methods, ptr::addr_of!(VALUE_METHODS).cast_mut().cast()));
        new_type(py, c"tidepool._native.Value", slots)
    };
    Ok(VALUE.get_or_try_init(py, make)?.bind(py))
}

/// The class `Memory`.
pub(crate) fn memory_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let make = || {
        let mut slots = common_slots(
            c"Memory(size)\n--\n\nPage-aligned, zeroed host memory. Exports a writable buffer; its addresses count as registered.",
        );
        slots.push(slot(ffi::Py_bf_getbuffer, memory_get_buffer as *mut c_void));
        slots.push(slot(ffi::Py_tp_new, memory_new as *mut c_void));
        slots.push(slot(ffi::Py_tp_getset, ptr::addr_of!(MEMORY_GETTERS).cast_mut().cast()));
        slots.push(slot(ffi::Py_tp_methods, ptr::addr_of!(MEMORY_METHODS).cast_mut().cast()));
        new_type(py, c"tidepool._native.Memory", slots)
    };
    Ok(MEMORY.get_or_try_init(py, make)?.bind(py))
}

/// Received bytes as a Python object.
pub(crate) fn value(py: Python<'_>, bytes: Bytes) -> PyResult<Py<PyAny>> {
    let (address, len) = (bytes.as_ptr().cast_mut(), bytes.len());
    new_object(value_type(py)?, address, len, Keeper::Received(bytes))
}

fn new_object(class: &Bound<'_, PyType>, address: *mut u8, len: usize, keeper: Keeper) -> PyResult<Py<PyAny>> {
    let py = class.py();
    // SAFETY: a heap type of our own whose instances are `Object`s; the memory comes zeroed, and every field is set.
    unsafe {
        let raw = ffi::PyType_GenericAlloc(class.as_type_ptr(), 0);
        if raw.is_null() {
            return Err(PyErr::fetch(py));
        }
        let object = raw.cast::<Object>();
        (*object).address = address;
        (*object).len = len;
        (*object).keeper = Box::into_raw(Box::new(keeper));
        Ok(Bound::from_owned_ptr(py, raw).unbind())
    }
}

fn slot(slot: c_int, pfunc: *mut c_void) -> ffi::PyType_Slot {
    ffi::PyType_Slot { slot, pfunc }
}

fn common_slots(doc: &'static std::ffi::CStr) -> Vec<ffi::PyType_Slot> {
    vec![
        slot(ffi::Py_tp_doc, doc.as_ptr().cast_mut().cast()),
        slot(ffi::Py_tp_dealloc, dealloc as *mut c_void),
        slot(ffi::Py_sq_length, length as *mut c_void),
        slot(ffi::Py_bf_releasebuffer, release_buffer as *mut c_void),
    ]
}

fn new_type(py: Python<'_>, name: &'static std::ffi::CStr, mut slots: Vec<ffi::PyType_Slot>) -> PyResult<Py<PyType>> {
    slots.push(ffi::PyType_Slot::default());
    let mut spec = ffi::PyType_Spec {
        name: name.as_ptr(),
        basicsize: std::mem::size_of::<Object>() as c_int,
        itemsize: 0,
        flags: ffi::Py_TPFLAGS_DEFAULT as std::ffi::c_uint,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: the specification is complete, ends with an empty slot, and names functions of the right shapes.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpec(&mut spec)) }?
        .cast_into::<PyType>()
        .map_err(Into::into)
        .map(Bound::unbind)
}

struct Table<T, const N: usize>([T; N]);
// SAFETY: tables of constants, which the interpreter reads under the GIL.
unsafe impl<T, const N: usize> Sync for Table<T, N> {}

const fn getter(name: &'static std::ffi::CStr, get: ffi::getter, doc: &'static std::ffi::CStr) -> ffi::PyGetSetDef {
    ffi::PyGetSetDef { name: name.as_ptr(), get: Some(get), set: None, doc: doc.as_ptr(), closure: ptr::null_mut() }
}

const NO_GETTER: ffi::PyGetSetDef =
    ffi::PyGetSetDef { name: ptr::null(), get: None, set: None, doc: ptr::null(), closure: ptr::null_mut() };

const fn method(
    name: &'static std::ffi::CStr,
    call: ffi::PyCFunction,
    doc: &'static std::ffi::CStr,
) -> ffi::PyMethodDef {
    ffi::PyMethodDef {
        ml_name: name.as_ptr(),
        ml_meth: ffi::PyMethodDefPointer { PyCFunction: call },
        ml_flags: ffi::METH_NOARGS,
        ml_doc: doc.as_ptr(),
    }
}

static VALUE_GETTERS: Table<ffi::PyGetSetDef, 2> =
    Table([getter(c"address", get_address, c"Address of the first byte."), NO_GETTER]);

static VALUE_METHODS: Table<ffi::PyMethodDef, 3> = Table([
    method(c"ptr", call_address, c"ptr()\n--\n\nAddress of the first byte."),
    method(c"size", call_size, c"size()\n--\n\nBytes."),
    ffi::PyMethodDef::zeroed(),
]);

static MEMORY_GETTERS: Table<ffi::PyGetSetDef, 3> = Table([
    getter(c"address", get_address, c"Address of the first byte."),
    getter(c"size", get_size, c"Bytes."),
    NO_GETTER,
]);

static MEMORY_METHODS: Table<ffi::PyMethodDef, 2> = Table([
    method(c"free", memory_free, c"free()\n--\n\nGives the memory back now. BufferError while a buffer of it is held."),
    ffi::PyMethodDef::zeroed(),
]);

// The functions below are called by the interpreter, under the GIL, with a live object of one of the two types.

unsafe extern "C" fn dealloc(raw: *mut ffi::PyObject) {
    // SAFETY: called once, for the last reference; the type's reference is the one that its instances hold (heap types).
    unsafe {
        let object = raw.cast::<Object>();
        let class = ffi::Py_TYPE(raw);
        discard(object);
        if !(*object).keeper.is_null() {
            drop(Box::from_raw((*object).keeper));
        }
        ffi::PyObject_Free(raw.cast());
        ffi::Py_DECREF(class.cast());
    }
}

/// Gives mapped memory back. Nobody may hold a buffer of it.
unsafe fn discard(object: *mut Object) {
    // SAFETY: mapped by `memory_new` with this address and length, and unmapped once: the keeper says so afterwards.
    unsafe {
        if (*object).keeper.is_null() {
            return;
        }
        if let Keeper::Mapped = *(*object).keeper {
            *(*object).keeper = Keeper::Freed;
            registry::forget_memory((*object).address as usize);
            libc::munmap((*object).address.cast(), (*object).len);
        }
    }
}

unsafe extern "C" fn length(raw: *mut ffi::PyObject) -> ffi::Py_ssize_t {
    // SAFETY: see above; an allocation is at most isize::MAX bytes long.
    unsafe { (*raw.cast::<Object>()).len as ffi::Py_ssize_t }
}

unsafe extern "C" fn get_address(raw: *mut ffi::PyObject, _: *mut c_void) -> *mut ffi::PyObject {
    // SAFETY: see above.
    unsafe { ffi::PyLong_FromSize_t((*raw.cast::<Object>()).address as usize) }
}

unsafe extern "C" fn get_size(raw: *mut ffi::PyObject, _: *mut c_void) -> *mut ffi::PyObject {
    // SAFETY: see above.
    unsafe { ffi::PyLong_FromSize_t((*raw.cast::<Object>()).len) }
}

unsafe extern "C" fn call_address(raw: *mut ffi::PyObject, _: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: see above.
    unsafe { get_address(raw, ptr::null_mut()) }
}

unsafe extern "C" fn call_size(raw: *mut ffi::PyObject, _: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: see above.
    unsafe { get_size(raw, ptr::null_mut()) }
}

unsafe extern "C" fn value_get_buffer(raw: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int {
    // SAFETY: see above; the view takes a reference to the object, so the memory outlives it.
    unsafe { get_buffer(raw, view, flags, 1) }
}

unsafe extern "C" fn memory_get_buffer(raw: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int {
    // SAFETY: as above.
    unsafe { get_buffer(raw, view, flags, 0) }
}

unsafe fn get_buffer(raw: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int, readonly: c_int) -> c_int {
    // SAFETY: as above.
    unsafe {
        let object = raw.cast::<Object>();
        if let Keeper::Freed = *(*object).keeper {
            (*view).obj = ptr::null_mut();
            ffi::PyErr_SetString(ffi::PyExc_BufferError, c"this memory was freed".as_ptr());
            return -1;
        }
        let (address, len) = ((*object).address.cast(), (*object).len as ffi::Py_ssize_t);
        let filled = PyBuffer_FillInfo(view, raw, address, len, readonly, flags);
        if filled == 0 {
            (*object).exports += 1;
        }
        filled
    }
}

unsafe extern "C" fn release_buffer(raw: *mut ffi::PyObject, _view: *mut RawBuffer) {
    // SAFETY: as above; called once for each buffer that was given.
    unsafe {
        (*raw.cast::<Object>()).exports -= 1;
    }
}

unsafe extern "C" fn value_new(
    _class: *mut ffi::PyTypeObject,
    _args: *mut ffi::PyObject,
    _kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    // SAFETY: under the GIL.
    unsafe {
        ffi::PyErr_SetString(ffi::PyExc_TypeError, c"a Value comes from a get; it cannot be made".as_ptr());
    }
    ptr::null_mut()
}

unsafe extern "C" fn memory_new(
    class: *mut ffi::PyTypeObject,
    args: *mut ffi::PyObject,
    kwargs: *mut ffi::PyObject,
) -> *mut ffi::PyObject {
    Python::attach(|py| {
        // SAFETY: the interpreter passes a type, a tuple and a dict or null.
        let (class, args, kwargs) = unsafe {
            (
                Bound::from_borrowed_ptr(py, class.cast()).cast_into_unchecked::<PyType>(),
                Bound::from_borrowed_ptr(py, args),
                Bound::from_borrowed_ptr_or_opt(py, kwargs),
            )
        };
        match make_memory(&class, &args, kwargs.as_ref()) {
            Ok(memory) => memory.into_ptr(),
            Err(error) => {
                error.restore(py);
                ptr::null_mut()
            }
        }
    })
}

fn make_memory(
    class: &Bound<'_, PyType>,
    args: &Bound<'_, PyAny>,
    kwargs: Option<&Bound<'_, PyAny>>,
) -> PyResult<Py<PyAny>> {
    let given = match (args.len()?, kwargs.map_or(Ok(0), |kwargs| kwargs.len())?) {
        (1, 0) => args.get_item(0)?,
        (0, 1) => kwargs.expect("has an item").get_item("size").map_err(|_| PyTypeError::new_err("Memory(size)"))?,
        _ => return Err(PyTypeError::new_err("Memory(size) takes one argument")),
    };
    let size: usize = given.extract()?;
    if size == 0 || size > isize::MAX as usize {
        return Err(PyValueError::new_err(format!("a memory of {size} bytes; it has at least 1")));
    }
    // SAFETY: a new private mapping that nobody else knows.
    let address = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(PyMemoryError::new_err(format!("no {size} bytes: {}", std::io::Error::last_os_error())));
    }
    registry::note_memory(address as usize, size);
    new_object(class, address.cast(), size, Keeper::Mapped).inspect_err(|_| {
        registry::forget_memory(address as usize);
        // SAFETY: mapped above and given to nobody.
        unsafe { libc::munmap(address, size) };
    })
}

unsafe extern "C" fn memory_free(raw: *mut ffi::PyObject, _: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: see above; with no buffer out nobody reaches the memory through this object.
    unsafe {
        let object = raw.cast::<Object>();
        if (*object).exports > 0 {
            let text = c"a memoryview of this memory is held, or a call uses it; release it first";
            ffi::PyErr_SetString(ffi::PyExc_BufferError, text.as_ptr());
            return ptr::null_mut();
        }
        discard(object);
        ffi::Py_INCREF(ffi::Py_None());
        ffi::Py_None()
    }
}
