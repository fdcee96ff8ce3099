//! Which memory calls may use by address, and whether it is there.
//!
//! An address from Python proves nothing, so a range must have been registered, and must still be mapped when a call begins.
//! Registering looks into the process's own map for memory that may be read and written: a GPU's addresses are reserved there
//! without either right, if at all.
// Raw memory.
#![allow(unsafe_code)]

use std::collections::BTreeMap;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tidepool_client::{Error, ErrorCode};

const PAGE_BYTES: usize = 4096;

/// Ranges by first address.
struct Ranges {
    /// Bytes, and times that it was registered.
    registered: BTreeMap<usize, (usize, usize)>,
    /// Bytes of each `Memory`, which needs no registration, and ends by itself.
    memories: BTreeMap<usize, usize>,
}

/// Only used under the GIL, so that a fork never finds it locked.
static RANGES: Mutex<Ranges> = Mutex::new(Ranges { registered: BTreeMap::new(), memories: BTreeMap::new() });

/// A `Memory` was made.
pub(crate) fn note_memory(address: usize, len: usize) {
    RANGES.lock().memories.insert(address, len);
}

/// A `Memory` is gone.
pub(crate) fn forget_memory(address: usize) {
    RANGES.lock().memories.remove(&address);
}

/// Lets calls use addresses in this range.
#[pyfunction]
pub(crate) fn register(address: usize, size: usize) -> PyResult<()> {
    let end = address.checked_add(size).filter(|_| address != 0 && size != 0);
    let Some(end) = end else {
        return Err(PyValueError::new_err(format!("{size} bytes at {address:#x} are no range of memory")));
    };
    if let Err(gap) = has_rights(address, end, "rw") {
        return Err(PyValueError::new_err(format!(
            "{size} bytes at {address:#x}: {gap:#x} is not memory that this process may read and write (freed memory, a GPU's pointer?)"
        )));
    }
    let mut ranges = RANGES.lock();
    let (len, count) = ranges.registered.entry(address).or_insert((size, 0));
    if *len != size {
        let what = format!("{address:#x} is registered with {len} bytes; unregister it first");
        return Err(PyValueError::new_err(what));
    }
    *count += 1;
    Ok(())
}

/// Takes back one `register` of the range that starts there.
#[pyfunction]
pub(crate) fn unregister(address: usize) -> PyResult<()> {
    let mut ranges = RANGES.lock();
    let Some((_, count)) = ranges.registered.get_mut(&address) else {
        return Err(PyValueError::new_err(format!("nothing is registered at {address:#x}")));
    };
    *count -= 1;
    if *count == 0 {
        ranges.registered.remove(&address);
    }
    Ok(())
}

/// The registered ranges, and those of every `Memory`: address and size.
#[pyfunction]
pub(crate) fn registered() -> Vec<(usize, usize)> {
    let ranges = RANGES.lock();
    let registered = ranges.registered.iter().map(|(&address, &(len, _))| (address, len));
    registered.chain(ranges.memories.iter().map(|(&address, &len)| (address, len))).collect()
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
    let refused = |error: Error| PyValueError::new_err(error.message().to_owned());
    for ((&target, &source), &size) in targets.iter().zip(&sources).zip(&sizes) {
        check(target, size, true, unchecked).and_then(|()| check(source, size, false, unchecked)).map_err(refused)?;
    }
    py.detach(|| {
        for ((&target, &source), &size) in targets.iter().zip(&sources).zip(&sizes) {
            // SAFETY: both ranges were found mapped, and the caller keeps them so (the function's contract); they may overlap.
            unsafe { std::ptr::copy(source as *const u8, target as *mut u8, size) };
        }
    });
    Ok(())
}

/// Whether a call may read, or write, `size` bytes at `address`.
pub(crate) fn check(address: usize, size: usize, writable: bool, unchecked: bool) -> Result<(), Error> {
    if size == 0 {
        return Ok(());
    }
    let refused = |why: &str| Err(Error::new(ErrorCode::InvalidParams, format!("{size} bytes at {address:#x} {why}")));
    let Some(end) = address.checked_add(size).filter(|_| address != 0) else {
        return refused("are no range of memory");
    };
    let is_known = is_registered(address, end);
    if !unchecked && !is_known {
        return refused("are not within one registered range; register the buffer first");
    }
    if !is_mapped(address, end) {
        return refused("are not mapped in this process any more; the buffer was freed");
    }
    // The rights of a registered range were looked at when it was registered.
    if !is_known && !is_usable(address, end, writable) {
        return refused("are not memory that this process may use so (read-only, or a GPU's pointer?)");
    }
    Ok(())
}

fn is_registered(address: usize, end: usize) -> bool {
    let ranges = RANGES.lock();
    let memory = ranges.memories.range(..=address).next_back();
    if memory.is_some_and(|(&start, &len)| end <= start + len) {
        return true;
    }
    let covers = |(&start, &(len, _)): (&usize, &(usize, usize))| end <= start + len;
    let registered = &ranges.registered;
    // Ranges rarely overlap: the nearest one below is nearly always the one.
    registered.range(..=address).next_back().is_some_and(covers) || registered.range(..=address).any(covers)
}

/// The kernel walks its list of mappings, not the pages: some hundred nanoseconds.
fn is_mapped(address: usize, end: usize) -> bool {
    let first = address - address % PAGE_BYTES;
    // SAFETY: MS_ASYNC only checks that the range is mapped; it touches no byte.
    unsafe { libc::msync(first as *mut libc::c_void, end - first, libc::MS_ASYNC) == 0 }
}

/// Has the kernel touch the pages, as the call is going to: it refuses where that would be a fault. Before Linux 5.14 it cannot, and
/// the map is read.
fn is_usable(address: usize, end: usize, writable: bool) -> bool {
    let first = address - address % PAGE_BYTES;
    let advice = if writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    // SAFETY: populating makes pages present; it changes none of their bytes.
    let outcome = unsafe { libc::madvise(first as *mut libc::c_void, end - first, advice) };
    if outcome == 0 {
        return true;
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EINVAL) => has_rights(address, end, if writable { "rw" } else { "r" }).is_ok(),
        _ => false,
    }
}

/// Err is the first address that is not mapped with these rights. The map is in order of addresses.
fn has_rights(address: usize, end: usize, wanted: &str) -> Result<(), usize> {
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
        if start > reached || !rights.starts_with(wanted) {
            break;
        }
        reached = stop;
        if reached >= end {
            return Ok(());
        }
    }
    Err(reached)
}
