//! How often a directory may go on in another cluster. It is counted before anything changes: a master whose log says one history
//! too many would stop for good when it applies that.

use std::io;

use bytes::Bytes;
use tidepool_proto::{Error, ErrorCode, History};
use tidepool_raft::LastOne;

use super::begin_history;
use crate::directory::limits::ANCESTORS_MAX;
use crate::directory::{Directory, Entry, Op};

/// The payload with which a stopped master's log goes on in a new cluster, if it may once more. Reads its newest snapshot.
pub fn go_on(found: &LastOne) -> Result<Bytes, Error> {
    let damaged = |what: String| Error::new(ErrorCode::StorageCorrupt, format!("nothing was changed: {what}"));
    let mut known = 0;
    if let Some(snapshot) = found.snapshot() {
        let directory = Directory::new(History(0));
        let loaded = directory.restore(&mut snapshot.reader());
        loaded.map_err(|error| damaged(format!("{}: {error}", snapshot.path().display())))?;
        known = directory.ancestors().iter().len();
    }
    let counted = found.payloads_since(&mut |index, payload| {
        let entry = Entry::decode(payload).map_err(|error| io::Error::other(format!("entry {index}: {error}")))?;
        known += entry.ops.iter().filter(|op| matches!(op, Op::BeginHistory { .. })).count();
        Ok(())
    });
    counted.map_err(|error| damaged(error.to_string()))?;
    check(known)?;
    begin_history(found.facts.cluster)
}

/// Whether one more history may begin after so many.
pub(super) fn check(known: usize) -> Result<(), Error> {
    if known < ANCESTORS_MAX {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::ResourceExhausted,
        format!(
            "nothing was changed: this directory went on in another cluster {known} times, the limit is {ANCESTORS_MAX}; begin an empty \
             cluster instead, in an empty data directory and with --accept-data-loss"
        ),
    ))
}
