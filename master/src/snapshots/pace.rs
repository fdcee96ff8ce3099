//! How fast an image may be read for publishing, until when, and whether it goes on at all.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tidepool_raft::rt;

/// Bytes handed on at once; small enough that a stop or the limit is noticed soon.
const STEP_BYTES: usize = 1 << 20;
/// Pieces into which a second's bytes are divided at least.
const STEPS_PER_SECOND: u64 = 16;
/// Longest sleep before a stop is looked for again.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Rules for reading an image while it is published.
#[derive(Clone, Debug)]
pub struct Pace {
    bytes_per_second: u64,
    deadline: Instant,
    is_stopped: Arc<AtomicBool>,
}

impl Pace {
    /// At most so many bytes a second (0: no limit) until `deadline`, unless `is_stopped` says no.
    pub fn new(bytes_per_second: u64, deadline: Instant, is_stopped: Arc<AtomicBool>) -> Pace {
        Pace { bytes_per_second, deadline, is_stopped }
    }

    /// Not slowed down, but stopped.
    pub(super) fn without_limit(&self, input: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
        Box::new(Paced { input, pace: Pace { bytes_per_second: 0, ..self.clone() }, began: rt::now(), read: 0 })
    }

    /// Slowed down and stopped.
    pub(super) fn limited(&self, input: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
        Box::new(Paced { input, pace: self.clone(), began: rt::now(), read: 0 })
    }

    fn check(&self) -> io::Result<()> {
        // Not `Interrupted`: readers try again after that.
        if self.is_stopped.load(Ordering::Relaxed) {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "this master is stopping"));
        }
        if rt::now() >= self.deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "publishing took longer than it may in all"));
        }
        Ok(())
    }
}

struct Paced {
    input: Box<dyn Read + Send>,
    pace: Pace,
    began: Instant,
    read: u64,
}

impl Read for Paced {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.pace.check()?;
        if self.pace.bytes_per_second > 0 {
            let due = Duration::from_secs_f64(self.read as f64 / self.pace.bytes_per_second as f64);
            while let Some(left) = due.checked_sub(rt::since(self.began)).filter(|left| !left.is_zero()) {
                std::thread::sleep(left.min(SLEEP_MAX));
                self.pace.check()?;
            }
        }
        let step = match self.pace.bytes_per_second {
            0 => STEP_BYTES,
            rate => STEP_BYTES.min(usize::try_from(rate / STEPS_PER_SECOND).unwrap_or(STEP_BYTES).max(1)),
        };
        let step = out.len().min(step);
        let read = self.input.read(&mut out[..step])?;
        self.read += read as u64;
        Ok(read)
    }
}
