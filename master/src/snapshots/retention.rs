//! Removes what a node has published and need not keep. Only its own, only what is named and made as it makes it.

use tidepool_proto::{ClusterId, NodeId};

use super::catalogue::{Catalogue, Rejected};
use super::layout::{FILES, Place};
use super::store::StoreError;

/// Fewest snapshots that a node keeps: one may turn out to be damaged.
pub const RETAIN_MIN: usize = 2;

/// What was removed.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Whole snapshots above the number that is kept.
    pub surplus: Vec<Place>,
    /// Directories that an interrupted run left, older than the newest whole snapshot.
    pub unfinished: Vec<Place>,
}

/// Keeps the newest `retain` whole snapshots of a node. What is damaged, or holds a file that is not a snapshot's, counts for
/// nothing and stays.
pub fn prune(catalogue: &Catalogue, cluster: ClusterId, node: NodeId, retain: usize) -> Result<Removed, StoreError> {
    let store = catalogue.store();
    let (mut whole, mut removed) = (0, Removed::default());
    for candidate in catalogue.candidates_of(cluster, node)? {
        let place = candidate.place;
        let directory = place.directory();
        match catalogue.image(&candidate) {
            Ok(_) if whole < retain.max(RETAIN_MIN) => {
                whole += 1;
                continue;
            }
            Ok(_) => removed.surplus.push(place),
            Err(Rejected::Incomplete(_)) if whole > 0 => {
                let names = store.list(&directory)?;
                if names.is_empty() || names.iter().any(|name| !FILES.contains(&name.as_str())) {
                    continue;
                }
                removed.unfinished.push(place);
            }
            Err(Rejected::Unreadable(error)) => return Err(error),
            Err(_) => continue,
        }
        // The descriptor first: from then on it is no snapshot. A second line: readers want every file to be there.
        let files: Vec<&str> = FILES.into_iter().rev().collect();
        store.remove(&directory, &files)?;
    }
    Ok(removed)
}
