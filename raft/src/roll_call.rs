//! Asks every other member of a list who it is (I4).

use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use tidepool_proto::{NodeId, v1};

use crate::host::Host;
use crate::identity::IdentityStore;
use crate::network::{LinkError, Network};
use crate::options::Member;

/// How long one member is waited for.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The highest feature level that a member's binary knows (M6); those that do not say so know the first.
pub(crate) fn announced(answer: &v1::HandshakeResponse) -> u16 {
    u16::try_from(answer.feature_level).unwrap_or(u16::MAX).max(1)
}

/// All at once; each answers within [`ANSWER_LIMIT`] or counts as unreachable.
pub(crate) async fn roll_call<'m, C: Host, N: Network>(
    network: &N,
    identity: &IdentityStore,
    own: NodeId,
    members: &'m [Member],
) -> Vec<(&'m Member, Result<v1::HandshakeResponse, LinkError>)> {
    let others = members.iter().filter(|member| member.node_id != own);
    let asking =
        others.map(|member| async move { (member, ask::<C, N>(network, identity, member, ANSWER_LIMIT).await) });
    futures::future::join_all(asking).await
}

/// Asks one member who it is.
pub(crate) async fn ask<C: Host, N: Network>(
    network: &N,
    identity: &IdentityStore,
    member: &Member,
    limit: Duration,
) -> Result<v1::HandshakeResponse, LinkError> {
    let request = v1::HandshakeRequest {
        identity: Some(identity.to_wire()),
        target_node_id: member.node_id.0,
        store_uuid: identity.store_uuid(),
    };
    let address = member.address.to_string();
    let asking = network.handshake(&address, request, limit);
    // The network keeps the limit itself; this is the belt to its braces.
    C::AsyncRuntime::timeout(limit * 2, asking).await.unwrap_or(Err(LinkError::Timeout(limit)))
}
