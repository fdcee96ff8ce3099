//! How often a directory may go on in another cluster. It is counted before anything changes: a master whose log says one history
//! too many would stop for good when it applies that.

use bytes::Bytes;
use tidepool_proto::{Error, ErrorCode, History};
use tidepool_raft::LastOne;
use tidepool_raft::log::Disk;

use super::begin_history;
use crate::directory::limits::ANCESTORS_MAX;
use crate::directory::{DecodeError, Directory, Entry, Op, RestoreError};

/// The payload with which a stopped master's log goes on in a new cluster, if it may once more. Reads the newest snapshot that
/// loads, as a start does.
pub fn go_on<D: Disk>(found: &LastOne<D>) -> Result<Bytes, Error> {
    let refused = |error: Error| Error::new(error.code(), format!("nothing was changed: {}", error.message()));
    let damaged = |what: String| refused(Error::new(ErrorCode::StorageCorrupt, what));
    let payload = begin_history(found.facts.cluster)?;
    if found.goes_on_with(&payload).map_err(|error| damaged(error.to_string()))? {
        return Ok(payload);
    }
    let (mut known, mut base, mut failure) = (0, None, None);
    for snapshot in found.snapshots() {
        let directory = Directory::new(History(0));
        match directory.restore(&mut snapshot.reader()) {
            Ok(_manifest) => {
                (known, base) = (directory.ancestors().iter().len(), Some(snapshot));
                break;
            }
            Err(error) => {
                let code = match error {
                    RestoreError::Version(_) => ErrorCode::FeatureLevel,
                    _ => ErrorCode::StorageCorrupt,
                };
                failure.get_or_insert(Error::new(code, format!("{}: {error}", snapshot.path().display())));
            }
        }
    }
    if let (None, Some(failure)) = (base, failure) {
        return Err(refused(failure));
    }
    let mut unreadable = None;
    let counted = found.payloads_since(base, &mut |index, payload| {
        match Entry::decode(payload) {
            Ok(entry) => known += entry.ops.iter().filter(|op| matches!(op, Op::BeginHistory { .. })).count(),
            Err(error) => {
                let code = match error {
                    DecodeError::FeatureLevel(_) => ErrorCode::FeatureLevel,
                    _ => ErrorCode::StorageCorrupt,
                };
                unreadable.get_or_insert(Error::new(code, format!("entry {index}: {error}")));
            }
        }
        Ok(())
    });
    counted.map_err(|error| damaged(error.to_string()))?;
    if let Some(unreadable) = unreadable {
        return Err(refused(unreadable));
    }
    check(known)?;
    Ok(payload)
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
