//! The checksum tables of a put's values, computed ahead of their grants.
//!
//! One thread works through the values in order while PutStart is under way and while earlier values are on the wire, so
//! that the wire seldom waits for checksums. It stops when nobody waits any more.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tidepool_proto::{Error, ErrorCode};
use tokio::sync::watch;

use crate::deadline::Deadline;
use crate::put::Pending;
use crate::stepped::{self, Waiter, Wanted};

/// From this much payload on checksums are computed off the async threads.
const AHEAD_BYTES: u64 = 1 << 20;

/// Whether the values of a whole call are checksummed ahead. Decided once: a call that travels in several requests treats all of its
/// values alike, however few bytes one request has.
pub(crate) fn are_worth_a_thread(bytes: impl Iterator<Item = u64>) -> bool {
    bytes.fold(0, u64::saturating_add) >= AHEAD_BYTES
}

/// Shared: an item that is tried again has its table.
type Table = Result<Bytes, Error>;

/// Tables under way, by place in the batch.
pub(crate) struct Tables {
    tables: Arc<Mutex<Vec<Option<Table>>>>,
    done: watch::Receiver<usize>,
    _waiter: Waiter,
}

impl Tables {
    /// Starts on these values.
    pub(crate) fn start(pending: &mut [Pending], deadline: Deadline) -> Tables {
        let (wanted, waiter) = Wanted::until(deadline, "checksumming the value");
        pending.iter_mut().enumerate().for_each(|(place, p)| p.table = place);
        let values: Vec<_> = pending.iter().map(|p| p.item.value.clone()).collect();
        let tables: Arc<Mutex<Vec<Option<Table>>>> = Arc::new(Mutex::new(values.iter().map(|_| None).collect()));
        let (progress, done) = watch::channel(0);
        let filled = tables.clone();
        tokio::task::spawn_blocking(move || {
            for (place, value) in values.into_iter().enumerate() {
                let parts: Vec<&[u8]> = value.iter().map(AsRef::as_ref).collect();
                let table = stepped::table(&parts, &wanted).map(Bytes::from);
                filled.lock()[place] = Some(table);
                progress.send_replace(place + 1);
            }
        });
        Tables { tables, done, _waiter: waiter }
    }

    /// The table of the value at this place, after room for the header.
    pub(crate) async fn of(&self, place: usize) -> Table {
        let mut done = self.done.clone();
        // An error is the end of the thread: what it has done is there, the rest will never be.
        let _ = done.wait_for(|&done| done > place).await;
        self.tables.lock().get(place).cloned().flatten().unwrap_or_else(|| {
            Err(Error::new(ErrorCode::Internal, "the thread that checksums values ended before this one"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidepool_proto::{History, ObjectId, object};

    use super::*;
    use crate::put::PutItem;

    fn pending(sizes: &[usize]) -> Vec<Pending> {
        let item = |size: usize| PutItem::new("k", vec![size as u8; size]);
        sizes.iter().enumerate().map(|(at, &size)| Pending::new(at, item(size), "t".into())).collect()
    }

    #[tokio::test]
    async fn every_value_has_the_table_of_its_own_bytes_in_any_order() {
        let deadline = Deadline::after(Duration::from_secs(60));
        let mut pending = pending(&[70_000, 1, 3 << 20, 65_536]);
        let tables = Tables::start(&mut pending, deadline);
        for place in [2, 0, 3, 1, 2] {
            let (length, value) = (pending[place].length, &pending[place].item.value[0]);
            let table = tables.of(pending[place].table).await.unwrap();
            let prefix = stepped::with_header(&table, History(1), ObjectId(2), [3; 16], length);
            assert_eq!(prefix, object::build_prefix(History(1), ObjectId(2), [3; 16], &[value]));
        }
    }

    #[test]
    fn only_small_calls_start_no_thread() {
        assert!(!are_worth_a_thread([4_096, 4_096].into_iter()));
        assert!(are_worth_a_thread(std::iter::repeat_n(4_096, 600)), "also when a request has fewer bytes");
        assert!(are_worth_a_thread([u64::MAX, 1].into_iter()));
    }

    #[tokio::test]
    async fn past_the_deadline_each_value_has_its_error() {
        let tables = Tables::start(&mut pending(&[2 << 20, 10]), Deadline::after(Duration::ZERO));
        for place in 0..2 {
            assert_eq!(tables.of(place).await.unwrap_err().code(), ErrorCode::DeadlineExceeded);
        }
    }
}
