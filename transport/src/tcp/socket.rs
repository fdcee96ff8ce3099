//! Scatter and gather over a non-blocking socket: the only system calls that touch lent memory.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Most ranges one system call takes (IOV_MAX).
pub const RANGES_MAX: usize = 1024;

/// A sequence of memory ranges, consumed from the front. It keeps nothing alive: it must be used only while whatever
/// lent the ranges is held.
#[derive(Default)]
pub struct Ranges {
    vectors: Vec<libc::iovec>,
    next: usize,
    bytes: u64,
}

// SAFETY: addresses only; each use is an unsafe call that obliges the user to hold the memory.
unsafe impl Send for Ranges {}
// SAFETY: as above.
unsafe impl Sync for Ranges {}

impl Ranges {
    /// Adds a range behind the others.
    pub fn push(&mut self, ptr: *const u8, len: usize) {
        if len > 0 {
            self.vectors.push(libc::iovec { iov_base: ptr as *mut libc::c_void, iov_len: len });
            self.bytes += len as u64;
        }
    }
    /// Bytes left.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.vectors.clear();
        self.next = 0;
        self.bytes = 0;
    }
    /// Drops `n` bytes from the front.
    pub fn advance(&mut self, n: usize) {
        self.bytes -= n as u64;
        let mut n = n;
        while n > 0 {
            let vector = &mut self.vectors[self.next];
            if n < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(n);
                vector.iov_len -= n;
                return;
            }
            n -= vector.iov_len;
            self.next += 1;
        }
    }
    /// Appends to `window` the front ranges, up to `limit` bytes and [`RANGES_MAX`] ranges in all.
    fn window(&self, window: &mut Vec<libc::iovec>, limit: usize) {
        let mut left = limit;
        for vector in &self.vectors[self.next..] {
            if left == 0 || window.len() == RANGES_MAX {
                return;
            }
            let len = vector.iov_len.min(left);
            window.push(libc::iovec { iov_base: vector.iov_base, iov_len: len });
            left -= len;
        }
    }
}

/// Reused list of ranges for one call.
#[derive(Default)]
pub struct Window(Vec<libc::iovec>);
// SAFETY: it is cleared before each use and read only within one call; nothing is dereferenced in between.
unsafe impl Send for Window {}

/// Receives what is there into the front of `ranges` (at most `limit` bytes) and advances them. `Ok(0)` is the end
/// of the stream; `WouldBlock` means wait.
///
/// # Safety
/// The ranges must be mapped, writable, and untouched by others during the call.
pub unsafe fn receive(stream: &TcpStream, ranges: &mut Ranges, limit: usize, window: &mut Window) -> io::Result<usize> {
    window.0.clear();
    ranges.window(&mut window.0, limit);
    let n = stream.try_io(Interest::READABLE, || {
        // SAFETY: window holds prefixes of `ranges`, which the caller vouches for; the count is at most IOV_MAX.
        retried(|| unsafe { libc::readv(stream.as_raw_fd(), window.0.as_ptr(), window.0.len() as libc::c_int) })
    })?;
    ranges.advance(n);
    Ok(n)
}

/// Sends the front of `first`, then of `second`, at most `limit` bytes; returns how many, advancing neither.
///
/// # Safety
/// The ranges must be mapped and readable during the call.
pub unsafe fn send(
    stream: &TcpStream,
    first: &Ranges,
    second: &Ranges,
    limit: usize,
    window: &mut Window,
) -> io::Result<usize> {
    window.0.clear();
    first.window(&mut window.0, limit);
    if first.bytes() < limit as u64 {
        second.window(&mut window.0, limit - first.bytes() as usize);
    }
    stream.try_io(Interest::WRITABLE, || {
        // SAFETY: an all-zero msghdr is valid; the fields set below describe live memory.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = window.0.as_mut_ptr();
        message.msg_iovlen = window.0.len() as _;
        // SAFETY: window holds prefixes of the ranges, which the caller vouches for.
        retried(|| unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
    })
}

/// An interrupted call is made again: reporting it as `WouldBlock` would wait for readiness that is there already.
fn retried(mut call: impl FnMut() -> libc::ssize_t) -> io::Result<usize> {
    loop {
        let returned = call();
        if returned >= 0 {
            return Ok(returned as usize);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Sends all of `bytes`; fails with `TimedOut` when nothing moved for `stall`.
pub async fn send_bytes(stream: &TcpStream, bytes: &[u8], stall: Duration) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        wait(stream, Interest::WRITABLE, stall).await?;
        match stream.try_write(&bytes[at..]) {
            Ok(n) => at += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills all of `bytes`; fails with `TimedOut` when nothing arrived for `stall`, `UnexpectedEof` at an early end.
pub async fn receive_bytes(stream: &TcpStream, bytes: &mut [u8], stall: Duration) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        match stream.try_read(&mut bytes[at..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => at += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(stream, Interest::READABLE, stall).await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the socket may be ready, at most `stall`. Spends the task's cooperative budget, so that a connection
/// that is always ready does not keep its runtime thread.
pub async fn wait(stream: &TcpStream, interest: Interest, stall: Duration) -> io::Result<()> {
    wait_until(stream, interest, Instant::now() + stall).await
}

/// As [`wait`], to a fixed moment.
pub async fn wait_until(stream: &TcpStream, interest: Interest, until: Instant) -> io::Result<()> {
    tokio::task::coop::consume_budget().await;
    match tokio::time::timeout_at(until, stream.ready(interest)).await {
        Ok(ready) => ready.map(|_| ()),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// No Nagle, keepalive, a bound on unacknowledged bytes, and buffer sizes if set.
pub fn configure(
    stream: &TcpStream,
    keepalive_idle: Duration,
    unacknowledged: Duration,
    buffer_bytes: Option<usize>,
) -> io::Result<()> {
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let probes =
        socket2::TcpKeepalive::new().with_time(keepalive_idle).with_interval(Duration::from_secs(2)).with_retries(3);
    socket.set_tcp_keepalive(&probes)?;
    socket.set_tcp_user_timeout(Some(unacknowledged))?;
    if let Some(bytes) = buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_consumed_from_the_front() {
        let bytes = [0u8; 100];
        let mut ranges = Ranges::default();
        ranges.push(bytes.as_ptr(), 10);
        ranges.push(bytes.as_ptr(), 0);
        ranges.push(bytes[10..].as_ptr(), 90);
        ranges.advance(3);
        let mut window = Vec::new();
        ranges.window(&mut window, 50);
        assert_eq!(window.iter().map(|v| v.iov_len).collect::<Vec<_>>(), [7, 43]);
        assert_eq!(window[0].iov_base as usize, bytes.as_ptr() as usize + 3);
        ranges.advance(10);
        assert_eq!(ranges.bytes(), 87);
        window.clear();
        ranges.window(&mut window, 1000);
        assert_eq!(window.iter().map(|v| v.iov_len).collect::<Vec<_>>(), [87]);
        ranges.advance(87);
        assert_eq!(ranges.bytes(), 0);
    }
}
