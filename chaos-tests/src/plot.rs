//! Calls around a fault as a picture: when each was to be sent, how long it took and how it ended. Self-contained SVG.

use std::fmt::Write as _;

use crate::clock::ns_to_ms;
use crate::process::Fault;
use crate::record::{Call, CallOutcome, CallRecord};

/// Calls that one picture shows. Slow and failed ones are all shown, up to this; of the rest every so-many-th.
const POINTS_MAX: usize = 1_500;
/// A call that took longer is shown whatever happens.
const SLOW_MS: f64 = 20.0;
/// How much of the time before and after the fault is shown.
const BEFORE_MS: f64 = 500.0;
const AFTER_MS: f64 = 3_000.0;
/// Size of the picture.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 220.0;
const MARGIN: f64 = 44.0;

/// One call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// When it was to be sent, from the fault on.
    pub at_ms: f64,
    /// How long it took.
    pub took_ms: f64,
    /// Whether it was a put.
    pub put: bool,
    /// Whether it succeeded.
    pub ok: bool,
}

/// The calls around a fault, thinned.
pub fn points(logs: &[Vec<CallRecord>], fault: Fault) -> Vec<Point> {
    let mut all: Vec<Point> = logs
        .iter()
        .flatten()
        .filter(|call| call.call != Call::Bulk)
        .map(|call| Point {
            at_ms: (call.intended_ns as f64 - fault.at_ns as f64) / 1e6,
            took_ms: ns_to_ms(call.latency_ns()),
            put: call.call == Call::Put,
            ok: call.outcome == CallOutcome::Ok,
        })
        .filter(|point| (-BEFORE_MS..AFTER_MS).contains(&point.at_ms))
        .collect();
    all.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
    let telling = |point: &Point| !point.ok || point.took_ms > SLOW_MS;
    let plain = all.iter().filter(|point| !telling(point)).count();
    let room = POINTS_MAX.saturating_sub(all.len() - plain);
    let every = if room == 0 { usize::MAX } else { plain.div_ceil(room).max(1) };
    let mut passed = 0;
    all.retain(|point| {
        passed += usize::from(!telling(point));
        telling(point) || passed % every == 0
    });
    all.truncate(POINTS_MAX);
    all
}

/// The picture: time across, latency up (logarithmic), the fault and the two recoveries as lines.
pub fn svg(points: &[Point], rto_write_ms: Option<f64>, rto_read_ms: Option<f64>) -> String {
    let end = points.iter().map(|point| point.at_ms).fold(BEFORE_MS, f64::max).min(AFTER_MS);
    let x = |ms: f64| MARGIN + (ms + BEFORE_MS) / (end + BEFORE_MS) * (WIDTH - 2.0 * MARGIN);
    // 0.1 ms at the bottom, 10 s at the top.
    let y = |ms: f64| HEIGHT - MARGIN - (ms.clamp(0.1, 10_000.0).log10() + 1.0) / 5.0 * (HEIGHT - 1.5 * MARGIN);
    let mut out = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"calls around the fault\">");
    let mut line = |class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)| {
        // Writing to a String cannot fail.
        let _ = write!(out, "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>");
    };
    for decade in [0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0] {
        line("grid", (MARGIN, y(decade)), (WIDTH - MARGIN, y(decade)));
    }
    let ends = [("fault", Some(0.0)), ("write", rto_write_ms), ("read", rto_read_ms)];
    for (class, at) in ends {
        if let Some(at) = at {
            line(class, (x(at.min(end)), y(10_000.0)), (x(at.min(end)), y(0.1)));
        }
    }
    for decade in [1.0, 10.0, 100.0, 1_000.0] {
        let _ = write!(out, "<text x=\"4\" y=\"{:.1}\">{decade} ms</text>", y(decade) + 4.0);
    }
    let mut at = -BEFORE_MS;
    while at <= end {
        let _ = write!(out, "<text x=\"{:.1}\" y=\"{:.1}\">{at}</text>", x(at), HEIGHT - MARGIN / 2.0);
        at += 500.0;
    }
    for point in points {
        let class = match (point.ok, point.put) {
            (false, _) => "bad",
            (true, true) => "put",
            (true, false) => "get",
        };
        let _ = write!(
            out,
            "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"1.8\"/>",
            x(point.at_ms),
            y(point.took_ms)
        );
    }
    out.push_str("</svg>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(at_ms: u64, took_ms: u64, outcome: CallOutcome) -> CallRecord {
        CallRecord {
            call: Call::Put,
            key: String::new(),
            hash: String::new(),
            bytes: 0,
            intended_ns: at_ms * 1_000_000,
            sent_ns: at_ms * 1_000_000,
            done_ns: (at_ms + took_ms) * 1_000_000,
            outcome,
            copies: 0,
            error: String::new(),
        }
    }

    #[test]
    fn what_tells_something_is_shown_and_the_rest_is_thinned() {
        let fault = Fault { at_ns: 1_000_000_000, certain_ns: 1_000_000_000 };
        let mut log: Vec<CallRecord> = (0..9_000).map(|n| call(600 + n % 2_000, 1, CallOutcome::Ok)).collect();
        log.push(call(1_010, 700, CallOutcome::Ok));
        log.push(call(1_020, 1, CallOutcome::Unknown));
        log.push(call(90_000, 1, CallOutcome::Ok)); // long after
        let shown = points(&[log], fault);
        assert!(shown.len() <= POINTS_MAX && shown.len() > POINTS_MAX / 2, "{}", shown.len());
        assert!(shown.iter().any(|point| point.took_ms == 700.0) && shown.iter().any(|point| !point.ok));
        let picture = svg(&shown, Some(120.0), None);
        assert!(picture.starts_with("<svg") && picture.ends_with("</svg>") && picture.contains("class=\"bad\""));
        assert!(svg(&[], None, None).ends_with("</svg>"));
    }
}
