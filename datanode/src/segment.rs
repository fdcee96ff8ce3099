//! One segment: a contiguous DRAM region in a sealed memfd, mapped shared for as long as anything refers to it.
//!
//! The only file of this crate with `unsafe`. Everything else sees bounds-checked ranges.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::RwLock;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use tidepool_proto::object::EXTENT_ALIGN;
use tidepool_transport::{Owner, RawSlice, ReadGuard};

use crate::options::HugePages;
use crate::writes::Claim;

/// Smallest segment worth mounting.
pub const SEGMENT_BYTES_MIN: u64 = 64 << 10;
/// Largest single segment; more DRAM is lent as more segments.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 40;
/// Longest name of a segment.
pub const SEGMENT_NAME_BYTES_MAX: usize = 64;

const PAGE_BYTES: u64 = 4 << 10;
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Why a segment could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The size is outside the limits.
    #[error(
        "segment '{name}' of {bytes} bytes: a segment has {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX} bytes; lend more DRAM as more segments"
    )]
    Size {
        /// Segment.
        name: String,
        /// Asked for.
        bytes: u64,
    },
    /// The name is empty, too long or unprintable.
    #[error("segment name '{name}': 1 to {SEGMENT_NAME_BYTES_MAX} letters, digits, '-', '_', '.', ':', '[' or ']'")]
    Name {
        /// The name.
        name: String,
    },
    /// The kernel refused.
    #[error(
        "segment '{name}' of {bytes} bytes: {step}: {source}; lend less DRAM or raise the memory limit of this process"
    )]
    Kernel {
        /// Segment.
        name: String,
        /// Asked for.
        bytes: u64,
        /// Which call.
        step: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}

/// A mapped region. Its memory is written by this process alone (W1).
pub struct Segment {
    name: String,
    bytes: u64,
    mapped_bytes: u64,
    base: NonNull<u8>,
    file: OwnedFd,
    hugepages: bool,
    prefaulted_bytes: AtomicU64,
    /// Whether the pages were given back. Whoever forms a reference to the bytes holds it shared meanwhile: holes are punched only
    /// once no such reference is left and none can be formed.
    released: RwLock<bool>,
}

// SAFETY: the mapping belongs to this value alone until drop, and `base` never changes. Concurrent access to the bytes behind it is
// ordered by `writes::WriteTable`, which hands any range to one writer at a time.
unsafe impl Send for Segment {}
// SAFETY: as above; every method takes `&self` and the counters are atomic.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates and maps a region. Pages are taken lazily, see [`Segment::prefault`]. With `HugePages::Try` a host without free
    /// huge pages gets plain ones; [`Segment::hugepages`] says which it is.
    pub fn create(name: &str, bytes: u64, huge: HugePages) -> Result<Segment, SegmentError> {
        let printable = |b: u8| b.is_ascii_alphanumeric() || b"-_.:[]".contains(&b);
        if name.is_empty() || name.len() > SEGMENT_NAME_BYTES_MAX || !name.bytes().all(printable) {
            return Err(SegmentError::Name { name: name.chars().take(SEGMENT_NAME_BYTES_MAX).collect() });
        }
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&bytes) {
            return Err(SegmentError::Size { name: name.to_owned(), bytes });
        }
        let bytes = bytes - bytes % EXTENT_ALIGN;
        match huge {
            HugePages::Off => Segment::map(name, bytes, false),
            HugePages::Try => Segment::map(name, bytes, true).or_else(|error| {
                tracing::debug!(segment = name, %error, "no huge pages");
                Segment::map(name, bytes, false)
            }),
        }
    }

    fn map(name: &str, bytes: u64, hugepages: bool) -> Result<Segment, SegmentError> {
        let failed = |step: &'static str| {
            let name = name.to_owned();
            move |errno: rustix::io::Errno| SegmentError::Kernel { name, bytes, step, source: errno.into() }
        };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut page_bytes = PAGE_BYTES;
        if hugepages {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            page_bytes = HUGE_PAGE_BYTES;
        }
        let mapped_bytes = bytes.next_multiple_of(page_bytes);
        let file = rustix::fs::memfd_create(format!("tidepool-{name}"), flags).map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&file, mapped_bytes).map_err(failed("ftruncate"))?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("sealing"))?;
        // SAFETY: a fresh mapping at an address of the kernel's choosing aliases nothing. The file is sealed against shrinking, so
        // no access inside `mapped_bytes` can run past its end.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped_bytes as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }
        .map_err(failed("mmap"))?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap without a fixed address never maps address zero");
        let segment = Segment {
            name: name.to_owned(),
            bytes,
            mapped_bytes,
            base,
            file,
            hugepages,
            prefaulted_bytes: AtomicU64::new(0),
            released: RwLock::new(false),
        };
        // Payload never goes into core dumps. Advice only: a kernel that knows it not is no reason to fail.
        segment.advise(Advice::LinuxDontDump);
        if !hugepages {
            segment.advise(Advice::LinuxHugepage);
        }
        Ok(segment)
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: the range is this value's own mapping; neither advice changes what the memory holds.
        let advised = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.mapped_bytes as usize, advice) };
        if let Err(error) = advised {
            tracing::debug!(segment = self.name, ?advice, %error, "advice not taken");
        }
    }

    /// Name, unique within the node.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Bytes that may be allocated.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Whether it lies on huge pages of the hugetlb pool.
    pub fn hugepages(&self) -> bool {
        self.hugepages
    }
    /// Bytes whose pages are known to be in place.
    pub fn prefaulted_bytes(&self) -> u64 {
        self.prefaulted_bytes.load(Ordering::Relaxed).min(self.bytes)
    }
    /// The memfd, for mapping by others on this host. Handed to nobody yet: before it is, it needs F_SEAL_FUTURE_WRITE (W1), which
    /// also forbids punching holes, so that [`Segment::release`] has to give pages back in another way.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Address of a range, or None when it does not lie inside. The memory stays mapped while this value lives.
    pub fn address(&self, offset: u64, length: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(length)?;
        // SAFETY: offset is within the mapping, as just checked (`bytes <= mapped_bytes`).
        (end <= self.bytes).then(|| unsafe { self.base.add(offset as usize) })
    }

    /// A range for an engine to send. None when it does not lie inside.
    pub(crate) fn read_guard(self: &Arc<Self>, offset: u64, length: u64) -> Option<ReadGuard> {
        let start = self.address(offset, length)?;
        // SAFETY: the owner is a reference to this segment, which stays mapped while it lives.
        Some(unsafe { ReadGuard::new(start.as_ptr(), length as usize, Owner::shared(self.clone())) })
    }

    /// A claimed range for an engine to fill. None when it does not lie inside. The caller keeps a reference to this segment while
    /// the slice is in use, and its claim keeps every other writer and every verification away.
    pub(crate) fn writable(&self, claim: &Claim) -> Option<RawSlice> {
        let start = self.address(claim.offset(), claim.length())?;
        // SAFETY: mapped and writable while the caller's reference lives; references to the bytes are formed in `look` only, under
        // the same claim, between two steps of the writer.
        Some(unsafe { RawSlice::new(start.as_ptr(), claim.length() as usize) })
    }

    /// Runs `look` over a range that nobody writes. Proof of that is the holder's claim on the range in the write table: an open
    /// write of its own, or a verification hold. None outside of the segment, and of a released one. Never waits.
    pub(crate) fn look<R>(&self, claim: &Claim, length: u64, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        if length > claim.length() {
            return None;
        }
        let start = self.address(claim.offset(), length)?;
        // Refused only while `release` is about to set it.
        let released = self.released.try_read()?;
        if *released {
            return None;
        }
        // SAFETY: the range is mapped and initialised (memfd pages start as zeros). The claim keeps every other writer of this
        // process away, its own writer is the caller, no other process has a writable mapping (W1), and no hole is punched while
        // `released` is held.
        Some(look(unsafe { std::slice::from_raw_parts(start.as_ptr(), length as usize) }))
    }

    /// Takes the next pages at `offset`, at most `length` bytes, without changing what they hold. False when the segment was
    /// released meanwhile.
    pub fn prefault(&self, offset: u64, length: u64) -> std::io::Result<bool> {
        let length = length.min(self.mapped_bytes.saturating_sub(offset));
        // Held while pages are taken, so that none are taken after `release` gave them back.
        let released = self.released.read();
        if *released || length == 0 {
            return Ok(false);
        }
        // SAFETY: within the mapping; populating takes pages and page-table entries and writes no byte.
        let populated = unsafe {
            let start = self.base.as_ptr().add(offset as usize);
            rustix::mm::madvise(start.cast(), length as usize, Advice::LinuxPopulateWrite)
        };
        match populated {
            Ok(()) => {}
            // Before Linux 5.14: allocation in the file takes the pages too, only the page-table entries come later.
            Err(rustix::io::Errno::INVAL) => {
                rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, length)?;
            }
            Err(errno) => return Err(errno.into()),
        }
        self.prefaulted_bytes.fetch_max(offset + length, Ordering::Relaxed);
        Ok(true)
    }

    /// Gives the pages back to the kernel at once: the content is gone, the mapping stays until the last holder lets go. Used when
    /// an incarnation ends, so that the next one's segments need no second share of memory. Waits for looks in progress. Engines that
    /// still send from here through raw pointers find zeros, which their readers refuse.
    pub fn release(&self) {
        *self.released.write() = true;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file, flags, 0, self.mapped_bytes) {
            tracing::warn!(segment = self.name, %error, "pages are returned only when the last connection closes");
        }
        self.prefaulted_bytes.store(0, Ordering::Relaxed);
    }
}

/// The bytes behind a guard, for a simulation, in which nobody writes meanwhile.
#[cfg(feature = "sim")]
pub(crate) fn copy_out(guard: &ReadGuard) -> Vec<u8> {
    // SAFETY: the guard keeps the bytes mapped, and a simulation runs on one thread: nothing writes them during the copy.
    unsafe { std::slice::from_raw_parts(guard.as_ptr(), guard.len()) }.to_vec()
}

#[cfg(any(test, feature = "sim"))]
impl Segment {
    /// Flips one bit, as a bad chip would. For simulations and tests, in which nobody else touches the memory meanwhile.
    pub(crate) fn flip_bit(&self, bit: u64) {
        if let Some(at) = self.address(bit / 8, 1) {
            // SAFETY: one mapped byte, touched by this thread alone.
            unsafe { *at.as_ptr() ^= 1 << (bit % 8) };
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; every pointer handed out is guarded by a reference to this value, so none is
        // left.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes as usize) } {
            tracing::error!(segment = self.name, %error, "munmap failed");
        }
    }
}

impl std::fmt::Debug for Segment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Segment({} {} bytes)", self.name, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use tidepool_proto::clock::BootInstant;
    use tidepool_proto::{LogTime, SegmentId};

    use super::*;
    use crate::log_clock::LogClock;
    use crate::writes::{WriteLimits, WriteTable};

    #[test]
    fn ranges_outside_have_no_address() {
        let segment = Segment::create("s", 1 << 20, HugePages::Off).unwrap();
        assert!(segment.address(0, 1 << 20).is_some());
        assert!(segment.address(1 << 20, 0).is_some());
        for (offset, length) in [(0, (1 << 20) + 1), (1 << 20, 1), (u64::MAX, 1), (1, u64::MAX), (1 << 19, 1 << 20)] {
            assert!(segment.address(offset, length).is_none(), "{offset} {length}");
        }
    }

    #[test]
    fn names_and_sizes_have_limits() {
        assert_eq!(Segment::create("[::1]:12345", 1 << 20, HugePages::Off).unwrap().name(), "[::1]:12345");
        for name in ["", "a b", "a/b", &"x".repeat(65)] {
            assert!(matches!(Segment::create(name, 1 << 20, HugePages::Off), Err(SegmentError::Name { .. })), "{name}");
        }
        for bytes in [0, SEGMENT_BYTES_MIN - 1, SEGMENT_BYTES_MAX + 1, u64::MAX] {
            let error = Segment::create("s", bytes, HugePages::Off).unwrap_err();
            assert!(matches!(error, SegmentError::Size { .. }), "{error}");
        }
    }

    /// User report 58: lengths that are no multiple of a page are fine.
    #[test]
    fn case_058_any_length_is_mapped() {
        for bytes in [SEGMENT_BYTES_MIN + 1, (1 << 20) + 4097, (2 << 20) - 1] {
            let segment = Segment::create("odd", bytes, HugePages::Try).unwrap();
            assert_eq!(segment.bytes(), bytes - bytes % EXTENT_ALIGN);
        }
    }

    #[test]
    fn prefault_takes_pages_and_keeps_bytes() {
        let segment = Segment::create("s", 4 << 20, HugePages::Off).unwrap();
        let at = segment.address(1 << 20, 1).unwrap();
        // SAFETY: inside the mapping, and this test is its only user.
        unsafe { at.write(7) };
        assert!(segment.prefault(0, 2 << 20).unwrap());
        assert_eq!(segment.prefaulted_bytes(), 2 << 20);
        // SAFETY: as above.
        assert_eq!(unsafe { at.read() }, 7);
        assert!(!segment.prefault(4 << 20, 1).unwrap(), "past the end there is nothing to take");
    }

    #[test]
    fn release_gives_pages_back_and_stops_prefaulting() {
        let segment = Segment::create("s", 4 << 20, HugePages::Off).unwrap();
        segment.prefault(0, 4 << 20).unwrap();
        let blocks = || rustix::fs::fstat(segment.file()).unwrap().st_blocks;
        assert!(blocks() > 0);
        segment.release();
        assert_eq!(blocks(), 0);
        assert!(!segment.prefault(0, 4 << 20).unwrap());
        assert_eq!((blocks(), segment.prefaulted_bytes()), (0, 0));
    }

    /// References to the bytes exist only inside `look`: holes are punched before or after, never meanwhile. Seen to fail without the
    /// lock: the bytes turned to zeros under the slice.
    #[test]
    fn no_hole_is_punched_under_a_look() {
        let segment = Arc::new(Segment::create("s", 1 << 20, HugePages::Off).unwrap());
        let clock = LogClock::new(LogTime(1), BootInstant::now());
        let table = Arc::new(WriteTable::new(WriteLimits::default(), clock));
        let hold = table.hold_for_verification(SegmentId(1), 0, 4096).unwrap();
        // SAFETY: inside the mapping, and this test is its only user.
        unsafe { segment.address(0, 1).unwrap().write(7) };
        let releasing = segment
            .look(hold.claim(), 4096, |bytes| {
                let releasing = std::thread::spawn({
                    let segment = segment.clone();
                    move || segment.release()
                });
                std::thread::sleep(std::time::Duration::from_millis(50));
                // SAFETY: `bytes` is a valid reference; volatile, so that the compiler reads again.
                assert_eq!(unsafe { std::ptr::from_ref(&bytes[0]).read_volatile() }, 7);
                releasing
            })
            .unwrap();
        releasing.join().unwrap();
        assert!(segment.look(hold.claim(), 4096, |_| ()).is_none(), "a released segment has nothing to look at");
    }

    #[test]
    fn the_file_can_neither_shrink_nor_grow() {
        let segment = Segment::create("s", 1 << 20, HugePages::Off).unwrap();
        assert!(rustix::fs::ftruncate(segment.file(), 4096).is_err());
        assert!(rustix::fs::ftruncate(segment.file(), 4 << 20).is_err());
    }
}
