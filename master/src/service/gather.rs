//! After a restore: the masters that were listed are taken into the quorum, one after the other, as they come up.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::NodeId;
use tidepool_raft::rt;
use tidepool_raft::{Member, MemberChange, MembershipError, Role};

use super::core::Service;

/// How long one of them may take to catch up before the next one is tried.
const CHANGE_WAIT: Duration = Duration::from_secs(30);
/// Pause between two rounds, while somebody is missing.
const PAUSE: Duration = Duration::from_millis(500);
/// Rounds between two lines in the log about who is missing.
const ROUNDS_PER_LINE: u32 = 20;

/// Those of the list that belong to the quorum no more, or not yet.
pub fn missing(service: &Service) -> Vec<Member> {
    // One that was added but does not vote yet is missing too: the change goes on where it was cut short.
    let present = service.node().status().members;
    let is_there = |listed: &Member| present.iter().any(|m| m.voter && m.member.node_id == listed.node_id);
    service.options().gather.iter().filter(|listed| !is_there(listed)).cloned().collect()
}

/// Whoever leads takes in who is missing, until all are there. One that left the quorum since stays out.
pub async fn follow(service: Arc<Service>) {
    if service.options().gather.is_empty() {
        return;
    }
    let mut left: BTreeSet<NodeId> = BTreeSet::new();
    for round in 0u32.. {
        if service.node().status().fatal.is_some() {
            return;
        }
        if service.node().watch_leadership().borrow().role == Role::Leader {
            let missing: Vec<Member> =
                missing(&service).into_iter().filter(|member| !left.contains(&member.node_id)).collect();
            if missing.is_empty() {
                return;
            }
            for member in missing {
                let (node, address) = (member.node_id, member.address.clone());
                let change = MemberChange { add: Some(member), remove: None };
                match service.node().change_members(change, CHANGE_WAIT).await.result {
                    Ok(()) => tracing::info!(%node, %address, "taken into the restored cluster"),
                    Err(MembershipError::IdUsed(why)) => {
                        tracing::warn!(%node, %why, "it left the quorum and is not taken in again");
                        left.insert(node);
                    }
                    Err(error) if round % ROUNDS_PER_LINE == 0 => {
                        tracing::warn!(%node, %address, %error, "waiting for a listed master to be taken in");
                    }
                    Err(_) => {}
                }
            }
        }
        rt::sleep(PAUSE).await;
    }
}
