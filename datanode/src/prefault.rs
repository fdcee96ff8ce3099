//! Background prefaulting: takes the pages of every segment while the datanode serves already.

use std::sync::Arc;

use crate::metrics::Metrics;
use crate::segment::Segment;

/// Pages are taken in steps of this, so that a released segment stops its thread soon.
const STEP_BYTES: u64 = 32 << 20;
/// Threads that prefault at once; more only fight over the kernel's page allocator.
const THREADS_MAX: usize = 4;

/// Starts threads that go through the segments; they end by themselves, early when the segments are released.
pub(crate) fn start(segments: &[Arc<Segment>], metrics: &Arc<Metrics>) -> std::io::Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX).min(segments.len());
    for thread in 0..threads {
        let mine: Vec<Arc<Segment>> = segments.iter().skip(thread).step_by(threads).cloned().collect();
        let metrics = metrics.clone();
        std::thread::Builder::new().name(format!("prefault-{thread}")).spawn(move || {
            for segment in mine {
                prefault(&segment, &metrics);
            }
        })?;
    }
    Ok(())
}

fn prefault(segment: &Segment, metrics: &Metrics) {
    let mut offset = 0;
    while offset < segment.bytes() {
        match segment.prefault(offset, STEP_BYTES) {
            Ok(true) => offset += STEP_BYTES,
            Ok(false) => return,
            Err(error) => {
                tracing::warn!(
                    segment = segment.name(),
                    prefaulted_bytes = segment.prefaulted_bytes(),
                    %error,
                    "prefaulting stopped; the other pages are taken when they are first written"
                );
                return;
            }
        }
        metrics.prefaulted(segment.name(), segment.prefaulted_bytes());
    }
    tracing::info!(segment = segment.name(), bytes = segment.bytes(), "prefaulted");
}
