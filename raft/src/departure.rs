//! Notices that this member left the quorum. Whoever is removed while it is away, or in the last step of its removal, is
//! sent nothing more: it would stand by for ever. So a member that hears no leader asks the others; one of its own
//! cluster that has applied the removal says so, and that ends this one.

use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use tidepool_proto::v1;

use crate::host::Host;
use crate::identity::{IdentityStore, wire_cluster};
use crate::inbound::Inbound;
use crate::machine::StateMachine;
use crate::network::Network;
use crate::options::Member;
use crate::roll_call::roll_call;

/// How often it is looked whether a leader was heard since.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Returns, with an explanation, once this member is known to have left. `others` names the members as far as known here;
/// `leads` whether this one leads.
pub(crate) async fn notice<C, M, N>(
    identity: &IdentityStore,
    network: &N,
    inbound: &Inbound<C, M>,
    others: impl Fn() -> Vec<Member>,
    leads: impl Fn() -> bool,
) -> String
where
    C: Host<Outcome = M::Outcome>,
    M: StateMachine,
    N: Network,
{
    let mut heard = inbound.beats();
    loop {
        C::AsyncRuntime::sleep(LOOK_EVERY).await;
        let beats = inbound.beats();
        let silent = heard == beats && !leads();
        heard = beats;
        let record = identity.record();
        let (true, Some(cluster)) = (silent, record.cluster) else { continue };
        let others = others();
        for (member, answer) in roll_call::<C, N>(network, identity, record.node_id, &others).await {
            let Ok(answer) = answer else { continue };
            if answer.caller_removed && answer.identity.as_ref().and_then(wire_cluster) == Some(cluster) {
                return explain(record.node_id, member, &answer);
            }
        }
    }
}

fn explain(own: tidepool_proto::NodeId, told_by: &Member, answer: &v1::HandshakeResponse) -> String {
    let cluster = answer.identity.as_ref().and_then(wire_cluster).unwrap_or_default();
    format!(
        "node {own} left the quorum of {cluster}, says node {} at {}: it takes part in nothing more. Its id is used up; to \
         serve on this host again, start with an empty data directory, --join and a new node id",
        told_by.node_id, told_by.address
    )
}
