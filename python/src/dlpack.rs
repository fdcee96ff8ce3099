//! Tensors by DLPack: where a tensor on the CPU lies, without a copy and without knowing whose tensor it is.
// Foreign structures and raw memory.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use tidepool_client::{Error, ErrorCode};

use crate::errors;

/// `DLTensor`, the part of `DLManagedTensor` that is read. The layout is DLPack's ABI version 0, which every producer speaks when
/// no other version is asked for.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

const CPU: i32 = 1;
const CAPSULE: &std::ffi::CStr = c"dltensor";

/// Address and bytes of a tensor. It stays where it is while the capsule lives.
pub(crate) struct Found {
    pub(crate) address: *mut u8,
    pub(crate) len: usize,
    pub(crate) capsule: Py<PyAny>,
}

/// Whether the object is a tensor for DLPack.
pub(crate) fn is_offered_by(object: &Bound<'_, PyAny>) -> bool {
    object.hasattr("__dlpack__").unwrap_or(false)
}

/// Finds a tensor's memory. NOT_SUPPORTED when it lies on a GPU; BufferError when it is not contiguous.
pub(crate) fn find(object: &Bound<'_, PyAny>) -> PyResult<Found> {
    let (device, _): (i32, i64) = object.call_method0("__dlpack_device__")?.extract()?;
    if device != CPU {
        let what = format!(
            "the tensor lies on a device of DLPack type {device}, not on the CPU; copy it to host memory first (tensor.cpu())"
        );
        return Err(errors::raise(object.py(), &Error::new(ErrorCode::NotSupported, what), None));
    }
    let capsule = object.call_method0("__dlpack__")?;
    // SAFETY: PyCapsule_GetPointer checks the type and the name, and sets an exception otherwise.
    let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), CAPSULE.as_ptr()) }.cast::<Tensor>();
    if tensor.is_null() {
        return Err(PyErr::fetch(object.py()));
    }
    // SAFETY: the capsule's name promises a DLManagedTensor, whose first field is the DLTensor; it lives as long as the capsule.
    let tensor = unsafe { &*tensor };
    if tensor.device_type != CPU {
        return Err(PyBufferError::new_err("the tensor's capsule names another device than the tensor"));
    }
    let elements = contiguous_elements(tensor)?;
    let bits = u64::from(tensor.bits) * u64::from(tensor.lanes.max(1));
    let len = elements.checked_mul(bits.div_ceil(8)).and_then(|len| usize::try_from(len).ok());
    let Some(len) = len else { return Err(PyBufferError::new_err("the tensor is larger than memory")) };
    let address = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
    Ok(Found { address, len, capsule: capsule.unbind() })
}

fn contiguous_elements(tensor: &Tensor) -> PyResult<u64> {
    let ndim = usize::try_from(tensor.ndim).unwrap_or(0);
    let mut elements: u64 = 1;
    let mut strided = false;
    for axis in (0..ndim).rev() {
        // SAFETY: `shape` has `ndim` entries, and so has `strides` unless it is null (DLPack).
        let (extent, stride) = unsafe {
            let stride = if tensor.strides.is_null() { elements as i64 } else { *tensor.strides.add(axis) };
            (*tensor.shape.add(axis), stride)
        };
        strided |= extent > 1 && stride != elements as i64;
        let extent = u64::try_from(extent).map_err(|_| PyBufferError::new_err("the tensor has a negative extent"))?;
        elements =
            elements.checked_mul(extent).ok_or_else(|| PyBufferError::new_err("the tensor is larger than memory"))?;
    }
    // An empty tensor has no bytes to be out of order.
    if strided && elements > 0 {
        return Err(PyBufferError::new_err("the tensor is not contiguous; pass tensor.contiguous()"));
    }
    Ok(elements)
}

const _: () = assert!(std::mem::size_of::<Tensor>() == 48 && std::mem::size_of::<c_int>() == 4);
