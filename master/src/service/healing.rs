//! Healing: objects with fewer replicas than are wanted get more, a few bytes at a time. It evicts nothing: copies that
//! were lost are made where there is free space, copies that were never made only where more than the reserve is free.

use std::sync::Arc;

use smallvec::SmallVec;
use tidepool_proto::object::extent_bytes;
use tidepool_proto::{Error, ObjectId};

use super::copying::start;
use super::core::Service;
use super::options::RESERVE_PERCENT_MAX;
use super::tasks::INTERVAL;
use super::tenure::Tenure;
use crate::directory::{Contact, CopyStart, SegmentView, TaskId};

/// Copies that are under way at once and are part of no task.
pub const COPIES_WITHOUT_TASK_MAX: usize = 64;
/// Objects looked at in one round.
const LOOKED_AT_MAX: usize = 1_024;
/// Rounds for which healing rests after a copy was refused.
const REST_ROUNDS: usize = 10;

/// One round.
pub async fn heal(service: &Arc<Service>, tenure: &Tenure) -> Result<(), Error> {
    if tenure.healing_rests() {
        return Ok(());
    }
    let open = service.directory().copies_of_task(TaskId(0)).len();
    let room = COPIES_WITHOUT_TASK_MAX.saturating_sub(open);
    let page = service.directory().degraded(tenure.heal_cursor(), if room == 0 { 0 } else { LOOKED_AT_MAX });
    if page.is_empty() {
        tenure.set_heal_cursor(None);
        return Ok(());
    }
    let pool = Pool::of(service);
    let mut budget = service.options().heal_bytes_per_second * INTERVAL.as_millis() as u64 / 1_000;
    let (mut copies, mut planned) = (Vec::new(), 0);
    let mut cursor = if page.len() < LOOKED_AT_MAX { None } else { page.last().copied() };
    for object in page {
        if copies.len() == room || budget == 0 {
            cursor = copies.last().map(|copy: &CopyStart| copy.object);
            break;
        }
        if let Some((copy, bytes)) = missing(service, &pool, object, planned) {
            budget = budget.saturating_sub(bytes);
            planned += bytes;
            copies.push(copy);
        }
    }
    tenure.set_heal_cursor(cursor);
    for (copy, outcome) in copies.iter().zip(start(service, tenure, &copies).await?) {
        if let Err(error) = outcome {
            // Likely the same for the next ones: the log is spared for a while, then the others are tried.
            tracing::debug!(object = %copy.object, %error, "a copy that is missing is not made yet");
            tenure.rest_healing(REST_ROUNDS);
        }
    }
    Ok(())
}

/// What there is room in.
struct Pool {
    /// Segments that take replicas.
    segments: Vec<SegmentView>,
    /// Bytes free beyond what is kept ahead of puts.
    spare: u64,
}

impl Pool {
    fn of(service: &Service) -> Pool {
        let counts = service.directory().counts();
        let mut segments = service.directory().segments();
        segments.retain(|s| s.contact == Contact::Heard && !s.draining);
        Pool { segments, spare: counts.free_bytes.saturating_sub(counts.capacity_bytes / 100 * RESERVE_PERCENT_MAX) }
    }
}

/// The copy that an object lacks, and its bytes, if it can be made now.
fn missing(service: &Service, pool: &Pool, object: ObjectId, planned: u64) -> Option<(CopyStart, u64)> {
    let (bytes, wanted, is_lost) = service.directory().with_object_id(object, |view| {
        let view = view.filter(|view| view.is_readable())?;
        let bytes = extent_bytes(view.length);
        let held = |segment: &SegmentView| view.replicas.iter().any(|r| r.segment == segment.segment);
        let has_place = pool.segments.iter().any(|segment| segment.largest_free >= bytes && !held(segment));
        has_place.then_some((bytes, view.wanted, view.replicas.len() < view.made))
    })?;
    if !is_lost && planned + bytes > pool.spare || service.directory().copies_of(object) > 0 {
        return None;
    }
    let copy = CopyStart { object, instead_of: None, targets: SmallVec::new(), task: TaskId(0), up_to: wanted as u8 };
    Some((copy, bytes))
}
