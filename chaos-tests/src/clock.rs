//! CLOCK_MONOTONIC as a number: one clock for every process of this host, so that a fault's instant in the harness
//! and a call's instant in a load process can be subtracted.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of CLOCK_MONOTONIC.
pub fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds as milliseconds, rounded to a hundredth.
pub fn ns_to_ms(ns: u64) -> f64 {
    (ns as f64 / 10_000.0).round() / 100.0
}

/// The load average of the last minute, as every figure carries it.
pub fn load1() -> f64 {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split_whitespace().next().and_then(|word| word.parse().ok()))
        .unwrap_or(0.0)
}
