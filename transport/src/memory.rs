//! The server's side of the seam: a datanode implements [`Memory`], engines call it.
#![allow(unsafe_code)]

use std::fmt;

use bytes::Bytes;
use tidepool_proto::Error;

use crate::access::{ReadAccess, WriteAccess};
use crate::local::Owner;

/// The datanode's signature under what became of a put (`capability::Verb::Stored` or `Aborted`).
pub type Proof = [u8; 16];

/// Registered memory, and who may touch it. Methods are called on the engine's I/O tasks: they must not block.
pub trait Memory: Send + Sync + 'static {
    /// May this read happen? MAC, bounds and incarnation are checked here. The bytes stay mapped while the guard
    /// lives, and the guard must be exactly `request.length` bytes long.
    fn read(&self, request: &ReadAccess) -> Result<ReadGuard, Error>;

    /// Opens an extent for its one writer. MAC, bounds and incarnation are checked here.
    fn begin_write(&self, request: &WriteAccess) -> Result<Box<dyn WriteTicket>, Error>;
}

/// One put that is arriving. The engine calls `enter`, receives what is there without waiting, calls `leave`, and so
/// on; at the end `finish`, exactly once, also when the connection died. A ticket is dropped unfinished only if the
/// process's runtime is torn down: implementors treat that as `finish(false)`.
pub trait WriteTicket: Send {
    /// Asked before every received chunk (at most 256 KiB): the whole extent, or an error once the put is fenced,
    /// after which nothing is written any more (W5). A fence that finds the ticket entered must wait for `leave`
    /// before it is acknowledged: that takes one memory copy, never a wait for the network.
    fn enter(&mut self) -> Result<RawSlice, Error>;

    /// The chunk is in; `received` counts the bytes from the extent's start that have arrived so far. Whole checksum
    /// blocks may be verified here while they are in the cache.
    fn leave(&mut self, received: u64);

    /// The end. With `received` all bytes are in the extent: verify them, answer `Stored` or `Aborted` with a proof.
    /// Without, nothing more will be written: answer `Aborted`.
    fn finish(self: Box<Self>, received: bool) -> WriteReply;
}

impl dyn WriteTicket + '_ {
    /// Writes one chunk from memory: what an engine does with one from a socket. Chunks come in order from the start.
    pub fn fill(&mut self, offset: u64, chunk: &[u8]) -> Result<(), Error> {
        let slice = self.enter()?;
        let fits =
            usize::try_from(offset).ok().filter(|at| at.checked_add(chunk.len()).is_some_and(|end| end <= slice.len()));
        match fits {
            // SAFETY: between `enter` and `leave` the slice is mapped and nobody else writes it; the range lies in it.
            Some(at) => unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), slice.as_ptr().add(at), chunk.len()) },
            None => {
                self.leave(offset);
                let (bytes, len) = (chunk.len(), slice.len());
                let message = format!("{bytes} bytes at {offset} do not lie within an extent of {len}");
                return Err(Error::new(tidepool_proto::ErrorCode::OutOfBounds, message));
            }
        }
        self.leave(offset + chunk.len() as u64);
        Ok(())
    }
}

/// What became of a put at the datanode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteOutcome {
    /// Verified and kept.
    Stored,
    /// Not kept, and nothing more will be written to the extent.
    Aborted,
}

/// The datanode's answer to a put.
#[derive(Clone, PartialEq, Debug)]
pub struct WriteReply {
    /// Stored or aborted.
    pub outcome: WriteOutcome,
    /// Why it was aborted.
    pub error: Option<Error>,
    /// The signed outcome, for `PutEnd`.
    pub proof: Proof,
}

/// A range of writable memory without a lifetime. Whoever builds one vouches for it.
#[derive(Clone, Copy)]
pub struct RawSlice {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a RawSlice is an address; the contract of `RawSlice::new` covers every use of it, from any thread.
unsafe impl Send for RawSlice {}
// SAFETY: as above.
unsafe impl Sync for RawSlice {}

impl RawSlice {
    /// Names `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must be mapped and writable for as long as whatever hands this slice out lives (for
    /// [`WriteTicket::enter`]: the ticket), and nobody may hold a Rust reference to them while they are written.
    pub unsafe fn new(ptr: *mut u8, len: usize) -> RawSlice {
        RawSlice { ptr, len }
    }
    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Whether it names no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for RawSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RawSlice({:p}, {})", self.ptr, self.len)
    }
}

/// Bytes that stay mapped while this lives. The engine reads them only through raw pointers: they may be rewritten
/// under a reader that outlived its lease, who then finds a checksum mismatch (L4).
pub struct ReadGuard {
    ptr: *const u8,
    len: usize,
    _owner: Owner,
}

// SAFETY: the pointer is only read, and `ReadGuard::new` obliges the owner to keep it mapped from any thread.
unsafe impl Send for ReadGuard {}
// SAFETY: as above.
unsafe impl Sync for ReadGuard {}

impl ReadGuard {
    /// Names `len` bytes at `ptr`, kept mapped by `owner`.
    ///
    /// # Safety
    /// The bytes must stay mapped and readable while `owner` lives.
    pub unsafe fn new(ptr: *const u8, len: usize, owner: Owner) -> ReadGuard {
        ReadGuard { ptr, len, _owner: owner }
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
}

impl From<Bytes> for ReadGuard {
    fn from(bytes: Bytes) -> ReadGuard {
        let (ptr, len) = (bytes.as_ptr(), bytes.len());
        // SAFETY: `Bytes` keeps its bytes in place and alive; it is moved into the owner.
        unsafe { ReadGuard::new(ptr, len, Owner::new(bytes)) }
    }
}

impl fmt::Debug for ReadGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadGuard({:p}, {})", self.ptr, self.len)
    }
}
