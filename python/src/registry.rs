//! Which memory calls may use by address, and whether it is there.
//!
//! An address from Python proves nothing, so a range must have been registered, and must still be mapped when a call begins.
//! Registering looks into the process's own map for memory that may be read and written: a GPU's addresses are reserved there
//! without either right, if at all.
// Raw memory.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write as _;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tidepool_client::{Error, ErrorCode};

const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy)]
struct Range {
    len: usize,
    /// Times it was registered; 0 for a `Memory`, which ends by itself.
    count: usize,
}

/// By first address. Only used under the GIL, so that a fork never finds it locked.
static RANGES: Mutex<BTreeMap<usize, Range>> = Mutex::new(BTreeMap::new());

/// A `Memory` was made.
pub(crate) fn note_memory(address: usize, len: usize) {
    RANGES.lock().insert(address, Range { len, count: 0 });
}

/// A `Memory` is gone, and with it what was registered at its address.
pub(crate) fn forget_memory(address: usize) {
    RANGES.lock().remove(&address);
}

/// Lets calls use addresses in this range.
#[pyfunction]
pub(crate) fn register(address: usize, size: usize) -> PyResult<()> {
    let end = address.checked_add(size).filter(|_| address != 0 && size != 0);
    let Some(end) = end else {
        return Err(PyValueError::new_err(format!("{size} bytes at {address:#x} are no range of memory")));
    };
    if let Err(gap) = readable_and_writable(address, end) {
        return Err(PyValueError::new_err(format!(
            "{size} bytes at {address:#x}: {gap:#x} is not memory that this process may read and write (freed memory, a GPU's pointer?)"
        )));
    }
    let mut ranges = RANGES.lock();
    match ranges.get_mut(&address) {
        Some(range) if range.len == size => range.count += 1,
        Some(range) if range.count == 0 => {
            return Err(PyValueError::new_err(format!("{address:#x} begins a Memory of {} bytes", range.len)));
        }
        Some(range) => {
            return Err(PyValueError::new_err(format!(
                "{address:#x} is registered with {} bytes; unregister it first",
                range.len
            )));
        }
        None => {
            ranges.insert(address, Range { len: size, count: 1 });
        }
    }
    Ok(())
}

/// Takes back one `register` of the range that starts there.
#[pyfunction]
pub(crate) fn unregister(address: usize) -> PyResult<()> {
    let mut ranges = RANGES.lock();
    match ranges.get_mut(&address) {
        Some(range) if range.count > 1 => range.count -= 1,
        Some(range) if range.count == 1 => {
            ranges.remove(&address);
        }
        _ => return Err(PyValueError::new_err(format!("nothing is registered at {address:#x}"))),
    }
    Ok(())
}

/// The registered ranges: address and size.
#[pyfunction]
pub(crate) fn registered() -> Vec<(usize, usize)> {
    RANGES.lock().iter().map(|(&address, range)| (address, range.len)).collect()
}

/// Copies memory to memory without the GIL.
#[pyfunction]
#[pyo3(signature = (targets, sources, sizes, *, unchecked = false))]
pub(crate) fn copy_memory(
    py: Python<'_>,
    targets: Vec<usize>,
    sources: Vec<usize>,
    sizes: Vec<usize>,
    unchecked: bool,
) -> PyResult<()> {
    if targets.len() != sizes.len() || sources.len() != sizes.len() {
        return Err(PyValueError::new_err(format!(
            "{} targets, {} sources, {} sizes",
            targets.len(),
            sources.len(),
            sizes.len()
        )));
    }
    for (&address, &size) in targets.iter().chain(&sources).zip(sizes.iter().chain(&sizes)) {
        check(address, size, unchecked).map_err(|error| PyValueError::new_err(error.message().to_owned()))?;
    }
    py.detach(|| {
        for ((&target, &source), &size) in targets.iter().zip(&sources).zip(&sizes) {
            // SAFETY: both ranges were found mapped, and the caller keeps them so (the function's contract); they may overlap.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, size) };
        }
    });
    Ok(())
}

/// Whether a call may use `size` bytes at `address`.
pub(crate) fn check(address: usize, size: usize, unchecked: bool) -> Result<(), Error> {
    if size == 0 {
        return Ok(());
    }
    let refused = |why: &str| {
        let mut what = format!("{size} bytes at {address:#x} ");
        // Writing to a String cannot fail.
        let _ = what.write_str(why);
        Err(Error::new(ErrorCode::InvalidParams, what))
    };
    let Some(end) = address.checked_add(size).filter(|_| address != 0) else {
        return refused("are no range of memory");
    };
    if !unchecked && !is_registered(address, end) {
        return refused("are not within one registered range; register the buffer first");
    }
    if !is_mapped(address, end) {
        return refused("are not mapped in this process any more; the buffer was freed");
    }
    Ok(())
}

fn is_registered(address: usize, end: usize) -> bool {
    let ranges = RANGES.lock();
    let covers = |(&start, range): (&usize, &Range)| start <= address && end <= start + range.len;
    // Ranges rarely overlap: the nearest one below is nearly always the one.
    ranges.range(..=address).next_back().is_some_and(covers) || ranges.range(..=address).any(covers)
}

/// The kernel walks its list of mappings, not the pages: some hundred nanoseconds.
fn is_mapped(address: usize, end: usize) -> bool {
    let first = address - address % PAGE_BYTES;
    // SAFETY: MS_ASYNC only checks that the range is mapped; it touches no byte.
    unsafe { libc::msync(first as *mut libc::c_void, end - first, libc::MS_ASYNC) == 0 }
}

/// Err is the first address that is not mapped readable and writable. The map is in order of addresses.
fn readable_and_writable(address: usize, end: usize) -> Result<(), usize> {
    let Ok(map) = std::fs::read_to_string("/proc/self/maps") else {
        // Without /proc the kernel is asked, which knows no rights.
        return if is_mapped(address, end) { Ok(()) } else { Err(address) };
    };
    let mut reached = address;
    for line in map.lines() {
        let Some((range, rights)) = line.split_once(' ') else { continue };
        let Some((start, stop)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(stop)) = (usize::from_str_radix(start, 16), usize::from_str_radix(stop, 16)) else {
            continue;
        };
        if stop <= reached {
            continue;
        }
        if start > reached || !rights.starts_with("rw") {
            break;
        }
        reached = stop;
        if reached >= end {
            return Ok(());
        }
    }
    Err(reached)
}
