//! RPO, counted and not assumed: reads back what clients were acknowledged and compares content hashes.
//!
//! A lost object is an acknowledged put that cannot be read afterwards with the bytes that were put, while every
//! datanode lives. While the pool overflows, eviction takes old objects by right; then the count covers the objects
//! acknowledged within the last quarter of the pool's capacity in bytes, counted back from the end of the load (that
//! covers what was acknowledged before, during and after the failover, and is far from what eviction may take), and
//! every master's state digest must agree. Older objects that are gone are reported as evicted, not as lost, but one
//! that comes back with other bytes is always a loss.

use std::time::{Duration, Instant};

use anyhow::Result;
use tidepool_client::{Client, ErrorCode, RemoveMode};

use crate::cluster::POLL_EVERY;
use crate::content::content_hash;
use crate::record::CallRecord;

/// Keys read by one call.
const BATCH_KEYS: usize = 64;
/// Bytes read by one call, about.
const BATCH_BYTES: u64 = 32 << 20;
/// Deadline of one call.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// How long an object may stay unreadable for a reason that a retry can mend (a suspect node, a moved leader).
const RETRY_WITHIN: Duration = Duration::from_secs(20);

/// An object that must be readable.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Key.
    pub key: String,
    /// Content hash.
    pub hash: String,
    /// Payload bytes.
    pub bytes: u64,
}

impl From<&CallRecord> for Expected {
    fn from(record: &CallRecord) -> Expected {
        Expected { key: record.key.clone(), hash: record.hash.clone(), bytes: record.bytes }
    }
}

/// What an audit found.
#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// Objects looked at.
    pub checked: u64,
    /// Readable with the right bytes.
    pub intact: u64,
    /// Reported absent, or unreadable for longer than a retry may take.
    pub absent: Vec<String>,
    /// Readable with other bytes.
    pub wrong: Vec<String>,
}

impl Audit {
    /// Objects that were not intact.
    pub fn lost(&self) -> u64 {
        self.checked - self.intact
    }
}

/// Splits acknowledged puts (oldest first) into those that eviction may have taken and those within the last
/// `recent_bytes`.
pub fn split_recent<'a>(puts: &'a [&'a CallRecord], recent_bytes: u64) -> (&'a [&'a CallRecord], &'a [&'a CallRecord]) {
    let mut bytes = 0;
    let mut at = puts.len();
    while at > 0 && bytes + puts[at - 1].bytes <= recent_bytes {
        at -= 1;
        bytes += puts[at].bytes;
    }
    puts.split_at(at)
}

/// Batches of objects that one call reads.
fn batches(objects: &[Expected]) -> Vec<&[Expected]> {
    let mut batches = Vec::new();
    let (mut from, mut bytes) = (0, 0);
    for (at, object) in objects.iter().enumerate() {
        if at > from && (at - from == BATCH_KEYS || bytes + object.bytes > BATCH_BYTES) {
            batches.push(&objects[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += object.bytes;
    }
    batches.extend((from < objects.len()).then(|| &objects[from..]));
    batches
}

/// Reads every object and compares. What fails for another reason than being absent is read again until it is read, or
/// until a retry can no longer be expected to mend it.
pub async fn read_back(client: &Client, objects: &[Expected]) -> Result<Audit> {
    let mut audit = Audit { checked: objects.len() as u64, ..Audit::default() };
    let give_up = Instant::now() + RETRY_WITHIN;
    let mut open = objects.to_vec();
    loop {
        let mut again = Vec::new();
        for batch in batches(&open) {
            let keys: Vec<&str> = batch.iter().map(|o| o.key.as_str()).collect();
            for (object, result) in batch.iter().zip(client.get_many(&keys, Some(CALL_WITHIN)).await) {
                match result {
                    Ok(value) => audit.judge(object, &value),
                    Err(error) if error.code() == ErrorCode::ObjectNotFound => audit.absent.push(object.key.clone()),
                    Err(_) if Instant::now() < give_up => again.push(object.clone()),
                    Err(error) => audit.absent.push(format!("{} ({error})", object.key)),
                }
            }
        }
        if again.is_empty() {
            return Ok(audit);
        }
        open = again;
        tokio::time::sleep(POLL_EVERY).await;
    }
}

impl Audit {
    fn judge(&mut self, object: &Expected, value: &[u8]) {
        if value.len() as u64 == object.bytes && content_hash(value) == object.hash {
            self.intact += 1;
        } else {
            self.wrong.push(object.key.clone());
        }
    }
}

/// Removes objects, leases or not; what is gone already is fine, and so is a put that nobody will end: it was never acknowledged,
/// and is discarded by itself.
pub async fn remove_all(client: &Client, keys: &[impl AsRef<[u8]>]) -> Result<()> {
    for batch in keys.chunks(512) {
        for result in client.remove_many(batch, RemoveMode::Force, Some(CALL_WITHIN)).await {
            match result {
                Ok(()) => {}
                Err(error) if matches!(error.code(), ErrorCode::ObjectNotFound | ErrorCode::NotReady) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Call, CallOutcome};

    fn put(key: &str, bytes: u64) -> CallRecord {
        CallRecord {
            call: Call::Put,
            key: key.into(),
            hash: String::new(),
            bytes,
            intended_ns: 0,
            sent_ns: 0,
            done_ns: 0,
            outcome: CallOutcome::Ok,
            copies: 1,
            error: String::new(),
        }
    }

    #[test]
    fn recent_objects_are_the_last_that_fit_the_bytes() {
        let records = [put("a", 10), put("b", 10), put("c", 5)];
        let puts: Vec<&CallRecord> = records.iter().collect();
        let names = |part: &[&CallRecord]| part.iter().map(|r| r.key.clone()).collect::<Vec<_>>();
        let (old, recent) = split_recent(&puts, 15);
        assert_eq!((names(old), names(recent)), (vec!["a".into()], vec!["b".into(), "c".into()]));
        assert_eq!(split_recent(&puts, 4).1.len(), 0);
        assert_eq!(split_recent(&puts, u64::MAX).1.len(), 3);
    }

    #[test]
    fn batches_hold_every_object_once_and_stay_small() {
        let objects: Vec<Expected> = (0..200)
            .map(|i| Expected {
                key: i.to_string(),
                hash: String::new(),
                bytes: if i == 7 { BATCH_BYTES * 2 } else { 1 },
            })
            .collect();
        let batches = batches(&objects);
        assert_eq!(batches.iter().map(|b| b.len()).sum::<usize>(), 200);
        assert!(batches.iter().all(|b| !b.is_empty() && b.len() <= BATCH_KEYS));
        assert!(super::batches(&[]).is_empty());
    }

    #[test]
    fn an_object_with_other_bytes_or_another_length_is_not_intact() {
        let object = Expected { key: "k".into(), hash: content_hash(b"abc"), bytes: 3 };
        let mut audit = Audit { checked: 3, ..Audit::default() };
        audit.judge(&object, b"abc");
        audit.judge(&object, b"abd");
        audit.judge(&object, b"ab");
        assert_eq!((audit.intact, audit.lost(), audit.wrong.len()), (1, 2, 2));
    }
}
