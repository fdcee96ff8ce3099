//! The caller's memory, in forms that an engine may hold while the caller does something else.
//!
//! - [`Buffer`]: owned bytes that are lent out in parts and taken back whole; safe, nothing to promise.
//! - [`lend`]: borrowed slices for the length of a closure; safe, since it returns only when every part is dropped.
//! - [`LocalMut::from_raw`], [`LocalRef::from_raw`]: memory that something else keeps alive (a Python buffer, a
//!   mapped region); the caller promises what the type cannot show.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

/// Keeps memory alive. Cheap to clone; the memory may go when the last clone is dropped.
#[derive(Clone)]
pub struct Owner(#[allow(dead_code)] Option<Arc<dyn Send + Sync>>);

impl Owner {
    /// Holds `value` until the last clone is dropped.
    pub fn new<T: Send + Sync + 'static>(value: T) -> Owner {
        Owner(Some(Arc::new(value)))
    }
    /// Holds a clone of `shared`.
    pub fn shared<T: Send + Sync + 'static>(shared: Arc<T>) -> Owner {
        Owner(Some(shared))
    }
    /// Nothing: for memory that lives as long as the process.
    pub fn process() -> Owner {
        Owner(None)
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Owner(..)" } else { "Owner(process)" })
    }
}

/// Writable bytes, exclusively lent to whoever holds this.
pub struct LocalMut {
    ptr: *mut u8,
    len: usize,
    owner: Owner,
}

// SAFETY: exclusive access to the bytes moves with the value (contract of `from_raw`).
unsafe impl Send for LocalMut {}
// SAFETY: a shared LocalMut gives no access to the bytes except as a raw pointer.
unsafe impl Sync for LocalMut {}

impl LocalMut {
    /// Lends `len` bytes at `ptr`, kept alive by `owner`.
    ///
    /// # Safety
    /// While this lives the bytes must stay mapped and writable, and nobody else may read or write them.
    pub unsafe fn from_raw(ptr: *mut u8, len: usize, owner: Owner) -> LocalMut {
        LocalMut { ptr, len, owner }
    }
    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Two loans of the parts before and after `at` (clamped to the length).
    pub fn split_at(self, at: usize) -> (LocalMut, LocalMut) {
        let at = at.min(self.len);
        let tail = LocalMut { ptr: self.ptr.wrapping_add(at), len: self.len - at, owner: self.owner.clone() };
        (LocalMut { ptr: self.ptr, len: at, owner: self.owner }, tail)
    }
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped and exclusive while self lives (contract of `from_raw`); borrowed from self.
        unsafe { slice_of(self.ptr, self.len) }
    }
    /// The bytes, for engines that copy.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: mapped, writable and exclusive while self lives; borrowed mutably from self.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl fmt::Debug for LocalMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalMut({} bytes)", self.len)
    }
}

/// Readable bytes that do not change while this lives.
#[derive(Clone)]
pub struct LocalRef {
    ptr: *const u8,
    len: usize,
    owner: Owner,
}

// SAFETY: the bytes are only read, from any thread (contract of `from_raw`).
unsafe impl Send for LocalRef {}
// SAFETY: as above.
unsafe impl Sync for LocalRef {}

impl LocalRef {
    /// Lends `len` bytes at `ptr`, kept alive by `owner`.
    ///
    /// # Safety
    /// While this lives the bytes must stay mapped and readable. They should not change: a put whose source changed
    /// is refused by the datanode's verification (W3), and no reference to them is formed by engines.
    pub unsafe fn from_raw(ptr: *const u8, len: usize, owner: Owner) -> LocalRef {
        LocalRef { ptr, len, owner }
    }
    /// Bytes that live as long as the process.
    pub fn from_static(bytes: &'static [u8]) -> LocalRef {
        LocalRef { ptr: bytes.as_ptr(), len: bytes.len(), owner: Owner::process() }
    }
    /// First byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// A part of it.
    pub fn slice(&self, range: Range<usize>) -> LocalRef {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of {} bytes", self.len);
        LocalRef { ptr: self.ptr.wrapping_add(range.start), len: range.len(), owner: self.owner.clone() }
    }
}

impl From<Bytes> for LocalRef {
    fn from(bytes: Bytes) -> LocalRef {
        LocalRef { ptr: bytes.as_ptr(), len: bytes.len(), owner: Owner::new(bytes) }
    }
}

impl From<Vec<u8>> for LocalRef {
    fn from(bytes: Vec<u8>) -> LocalRef {
        Bytes::from(bytes).into()
    }
}

impl fmt::Debug for LocalRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalRef({} bytes)", self.len)
    }
}

/// Owned bytes to read into: lend them out in parts, and take them back when every part was dropped.
pub struct Buffer {
    bytes: Arc<Cells>,
}

struct Cells(UnsafeCell<Vec<u8>>);
// SAFETY: the bytes are reached only through LocalMut parts, which are disjoint, or through the Vec once the last
// part is gone (`take` needs the only Arc).
unsafe impl Sync for Cells {}

impl Buffer {
    /// Lends out the first `lengths[0]` bytes of `bytes`, the next `lengths[1]`, and so on.
    /// Fails, giving the bytes back, when the lengths add up to more than there is.
    pub fn lend(bytes: Vec<u8>, lengths: &[usize]) -> Result<(Buffer, Vec<LocalMut>), Vec<u8>> {
        let total = lengths.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        if total.is_none_or(|total| total > bytes.len()) {
            return Err(bytes);
        }
        let cells = Arc::new(Cells(UnsafeCell::new(bytes)));
        // SAFETY: no part exists yet, so this is the only access to the Vec.
        let mut at = unsafe { (*cells.0.get()).as_mut_ptr() };
        let parts = lengths.iter().map(|&len| {
            // SAFETY: the parts are disjoint ranges of the Vec's allocation, which neither moves nor goes while the
            // owner (a clone of the Arc) lives, and which nobody else can reach meanwhile.
            let part = unsafe { LocalMut::from_raw(at, len, Owner::shared(cells.clone())) };
            at = at.wrapping_add(len);
            part
        });
        let parts = parts.collect();
        Ok((Buffer { bytes: cells }, parts))
    }

    /// A zeroed buffer lent out as one part.
    pub fn zeroed(len: usize) -> (Buffer, LocalMut) {
        let (buffer, mut parts) = Buffer::lend(vec![0; len], &[len]).expect("one part as long as the buffer");
        (buffer, parts.pop().expect("one part"))
    }

    /// The bytes, when every part was dropped; else the buffer again.
    pub fn take(self) -> Result<Vec<u8>, Buffer> {
        match Arc::try_unwrap(self.bytes) {
            Ok(cells) => Ok(cells.0.into_inner()),
            Err(bytes) => Err(Buffer { bytes }),
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Buffer(..)")
    }
}

/// Lends borrowed memory for the length of a closure. Returns, or unwinds, only when every part made from the
/// [`Lender`] was dropped; engines drop all parts before their call returns, so that is at once. Blocks the thread:
/// call it where blocking is allowed.
pub fn lend<'scope, R>(body: impl FnOnce(&Lender<'scope>) -> R) -> R {
    struct WaitOnDrop(Arc<Loans>);
    impl Drop for WaitOnDrop {
        fn drop(&mut self) {
            let mut open = self.0.open.lock();
            while *open > 0 {
                self.0.none_left.wait(&mut open);
            }
        }
    }
    let lender = Lender { loans: Arc::new(Loans::default()), _scope: std::marker::PhantomData };
    let _wait = WaitOnDrop(lender.loans.clone());
    body(&lender)
}

/// Makes loans of memory that is borrowed for `'scope`. See [`lend`].
pub struct Lender<'scope> {
    loans: Arc<Loans>,
    _scope: std::marker::PhantomData<&'scope mut &'scope ()>,
}

#[derive(Default)]
struct Loans {
    open: Mutex<usize>,
    none_left: Condvar,
}

struct Loan(Arc<Loans>);
impl Drop for Loan {
    fn drop(&mut self) {
        let mut open = self.0.open.lock();
        *open -= 1;
        if *open == 0 {
            self.0.none_left.notify_all();
        }
    }
}

impl<'scope> Lender<'scope> {
    fn loan(&self) -> Owner {
        *self.loans.open.lock() += 1;
        Owner::new(Loan(self.loans.clone()))
    }
    /// Lends a mutable slice.
    pub fn lend_mut(&self, bytes: &'scope mut [u8]) -> LocalMut {
        // SAFETY: the slice is borrowed exclusively for 'scope, and `lend` does not return before the loan is
        // dropped; 'scope outlives the call of `lend`.
        unsafe { LocalMut::from_raw(bytes.as_mut_ptr(), bytes.len(), self.loan()) }
    }
    /// Lends a slice.
    pub fn lend_ref(&self, bytes: &'scope [u8]) -> LocalRef {
        // SAFETY: the slice is borrowed for 'scope, and `lend` does not return before the loan is dropped.
        unsafe { LocalRef::from_raw(bytes.as_ptr(), bytes.len(), self.loan()) }
    }
}

/// SAFETY: caller vouches that the bytes are mapped and unchanging for `'a`.
unsafe fn slice_of<'a>(ptr: *const u8, len: usize) -> &'a [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: forwarded to the caller.
    unsafe { std::slice::from_raw_parts(ptr, len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_the_bytes_come_back() {
        let (buffer, mut parts) = Buffer::lend(vec![0; 10], &[3, 0, 7]).unwrap();
        for (i, part) in parts.iter_mut().enumerate() {
            part.as_mut_slice().fill(i as u8 + 1);
        }
        let buffer = buffer.take().unwrap_err();
        let (a, b) = parts.pop().unwrap().split_at(2);
        assert_eq!((a.len(), b.as_slice()), (2, &[3u8; 5][..]));
        drop((parts, a, b));
        assert_eq!(buffer.take().unwrap(), [1, 1, 1, 3, 3, 3, 3, 3, 3, 3]);
    }

    #[test]
    fn lending_more_than_there_is_fails() {
        assert_eq!(Buffer::lend(vec![7; 4], &[3, 2]).unwrap_err(), [7; 4]);
        assert!(Buffer::lend(vec![7; 4], &[usize::MAX, 2]).is_err());
    }

    /// Fails (use after scope, seen by the assertion) if `lend` does not wait for its loans.
    #[test]
    fn a_scope_ends_only_after_its_loans() {
        let mut bytes = vec![0u8; 1 << 16];
        let writer = lend(|lender| {
            let mut part = lender.lend_mut(&mut bytes);
            std::thread::spawn(move || {
                for _ in 0..64 {
                    part.as_mut_slice().iter_mut().for_each(|b| *b += 1);
                    std::thread::yield_now();
                }
            })
        });
        assert!(bytes.iter().all(|&b| b == 64), "the scope ended under a live loan");
        writer.join().unwrap();
    }
}
