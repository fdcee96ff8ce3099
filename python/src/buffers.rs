//! Memory that a call was given as objects or as addresses, in the forms that the client takes.
//!
//! Objects are held until nothing of the client refers to their memory any more; giving one back needs the GIL, so the last part to
//! go hands them to the thread that has it.
// Raw memory.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};
use tidepool_client::{Error, ErrorCode, LocalMut};
use tidepool_transport::Owner;

use crate::buffer_api::Exported;
use crate::process::{Errand, Process};
use crate::{dlpack, registry};

/// A range of memory.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub(crate) address: usize,
    pub(crate) len: usize,
}

impl Span {
    /// The address after its last byte. Ranges of memory do not wrap: `registry` checked it, or an object exports it.
    fn end(&self) -> usize {
        self.address + self.len
    }
}

/// What keeps the memory of a call.
#[derive(Default)]
pub(crate) struct Held {
    buffers: Vec<Exported>,
    objects: Vec<Py<PyAny>>,
}

impl Held {
    /// The memory of an object; it stays until this is released.
    pub(crate) fn take(&mut self, object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Span> {
        if let (false, Ok(bytes)) = (writable, object.cast_exact::<PyBytes>()) {
            let span = Span { address: bytes.as_bytes().as_ptr() as usize, len: bytes.as_bytes().len() };
            self.objects.push(object.clone().unbind());
            return Ok(span);
        }
        if Exported::is_offered_by(object) {
            let exported = Exported::take(object, writable)?;
            let span = Span { address: exported.address() as usize, len: exported.len() };
            self.buffers.push(exported);
            return Ok(span);
        }
        if dlpack::is_offered_by(object) {
            let found = dlpack::find(object)?;
            self.objects.push(found.capsule);
            return Ok(Span { address: found.address as usize, len: found.len });
        }
        let kind = object.get_type().name()?.to_string();
        Err(PyTypeError::new_err(format!(
            "{kind} is neither a bytes-like object nor a tensor on the CPU (DLPack){}",
            if object.is_instance_of::<PyString>() { "; encode it: text.encode()" } else { "" }
        )))
    }

    /// Gives everything back.
    pub(crate) fn release(self, py: Python<'_>) {
        self.buffers.into_iter().for_each(|buffer| buffer.release(py));
        drop(self.objects);
    }
}

/// How long a call that ended waits for the last of its memory, beyond its deadline.
const SETTLE_WITHIN: Duration = Duration::from_secs(1);
const SETTLE_LOOK_EVERY: Duration = Duration::from_micros(200);

/// Memory of a call, shared by all its parts.
pub(crate) struct Loan {
    held: Option<Held>,
    process: &'static Process,
}

impl Loan {
    pub(crate) fn new(held: Held, process: &'static Process) -> Arc<Loan> {
        Arc::new(Loan { held: Some(held), process })
    }

    /// Waits until nothing refers to the memory any more; a verification that nobody waits for stops at its next step. Bounded: what
    /// comes later finds objects still held, but addresses not.
    pub(crate) fn settle(self: &Arc<Loan>) {
        let until = Instant::now() + SETTLE_WITHIN;
        while Arc::strong_count(self) > 1 && Instant::now() < until {
            std::thread::sleep(SETTLE_LOOK_EVERY);
        }
    }

    /// Gives everything back at once if no part is left, as is so when a call has ended.
    pub(crate) fn end(mut self: Arc<Loan>, py: Python<'_>) {
        if let Some(loan) = Arc::get_mut(&mut self)
            && let Some(held) = loan.held.take()
        {
            held.release(py);
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            if held.buffers.is_empty() && held.objects.is_empty() {
                return;
            }
            self.process.send(Errand::Release(held));
        }
    }
}

struct Part {
    span: Span,
    _loan: Arc<Loan>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        if self.span.len == 0 {
            return &[];
        }
        // SAFETY: mapped while the loan is held. The bytes may change under a Python program that writes to a buffer it is putting; what
        // was sent then does not verify at the datanode, and is refused (W3).
        unsafe { std::slice::from_raw_parts(self.span.address as *const u8, self.span.len) }
    }
}

/// Memory to put from.
pub(crate) fn to_bytes(span: Span, loan: &Arc<Loan>) -> Bytes {
    Bytes::from_owner(Part { span, _loan: loan.clone() })
}

/// Memory to get into.
pub(crate) fn to_local(span: Span, loan: &Arc<Loan>) -> LocalMut {
    // SAFETY: mapped and writable while the loan is held, for one item at a time: `waves` keeps those that name
    // the same memory apart, and callers keep from memory that a call fills.
    unsafe { LocalMut::from_raw(span.address as *mut u8, span.len, Owner::shared(loan.clone())) }
}

/// The spans of one item: a buffer, or a list or tuple of them.
pub(crate) fn spans_of(item: &Bound<'_, PyAny>, writable: bool, held: &mut Held) -> PyResult<Vec<Span>> {
    if let Ok(parts) = item.cast::<PyList>() {
        return parts.iter().map(|part| held.take(&part, writable)).collect();
    }
    if let Ok(parts) = item.cast::<PyTuple>() {
        return parts.iter().map(|part| held.take(&part, writable)).collect();
    }
    Ok(vec![held.take(item, writable)?])
}

/// The spans of one item given by addresses, checked: Err is the item's own failure.
pub(crate) fn spans_at(
    addresses: &[usize],
    sizes: &[usize],
    writable: bool,
    unchecked: bool,
) -> Result<Vec<Span>, Error> {
    if addresses.len() != sizes.len() {
        let what = format!("{} addresses, but {} sizes", addresses.len(), sizes.len());
        return Err(Error::new(ErrorCode::InvalidParams, what));
    }
    let span = |(&address, &len): (&usize, &usize)| {
        registry::check(address, len, writable, unchecked)?;
        Ok(Span { address, len })
    };
    addresses.iter().zip(sizes).map(span).collect()
}

/// In which wave each item is filled, so that no wave fills the same memory twice: engines name one scratch page for several keys. An item
/// that names memory twice itself is refused.
pub(crate) fn waves(items: &mut [Result<Vec<Span>, Error>]) -> Vec<usize> {
    let mut all: Vec<(usize, usize)> =
        items.iter().flatten().flatten().filter(|span| span.len > 0).map(|span| (span.address, span.end())).collect();
    all.sort_unstable();
    if all.windows(2).all(|pair| pair[0].1 <= pair[1].0) {
        return vec![0; items.len()];
    }
    let mut taken: Vec<BTreeMap<usize, usize>> = Vec::new();
    items.iter_mut().map(|item| place(item, &mut taken)).collect()
}

/// Finds the first wave in which an item's memory is free, and takes it there.
fn place(item: &mut Result<Vec<Span>, Error>, taken: &mut Vec<BTreeMap<usize, usize>>) -> usize {
    let mut own = BTreeMap::new();
    for span in item.iter().flatten().filter(|span| span.len > 0) {
        if !is_free(&own, span) {
            let what = "two parts of it go to the same memory; each needs its own";
            *item = Err(Error::new(ErrorCode::InvalidParams, what));
            return 0;
        }
        own.insert(span.address, span.end());
    }
    let spans = || item.iter().flatten().filter(|span| span.len > 0);
    let wave = taken.iter().position(|taken| spans().all(|span| is_free(taken, span))).unwrap_or(taken.len());
    if wave == taken.len() {
        taken.push(BTreeMap::new());
    }
    taken[wave].append(&mut own);
    wave
}

fn is_free(taken: &BTreeMap<usize, usize>, span: &Span) -> bool {
    taken.range(..span.end()).next_back().is_none_or(|(_, &end)| end <= span.address)
}
