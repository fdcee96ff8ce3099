//! Before a restore: whether another member of the list is of a cluster that exists. If one is, what it holds is newer than any
//! snapshot, and a second cluster beside it would acknowledge writes that the first knows nothing of.

use std::time::Duration;

use tidepool_proto::v1::raft_service_client::RaftServiceClient;
use tidepool_proto::{ClusterId, Error, NodeId, PROTOCOL_VERSION, v1};
use tidepool_raft::Member;
use tidepool_raft::rt;
use tonic::transport::Endpoint;

use super::{RestoreFailed, refuse};

/// How long one answer is waited for.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// How long those that do not answer are asked again: masters of hosts that start together come up one after the other.
const ASK_FOR: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// Refuses to restore while another member holds the data of a cluster. Those that do not answer within [`ASK_FOR`] count as lost.
pub async fn check_others(own: NodeId, members: &[Member]) -> Result<(), RestoreFailed> {
    let began = rt::now();
    let others = members.iter().filter(|member| member.node_id != own);
    let asking = others.map(|member| async move {
        loop {
            match ask(own, member).await {
                Ok(answer) => return check(own, member, &answer),
                Err(why) if rt::since(began) >= ASK_FOR => {
                    tracing::warn!(node = %member.node_id, address = %member.address, why, "does not answer; it counts as lost");
                    return Ok(());
                }
                Err(_) => rt::sleep(ASK_AGAIN).await,
            }
        }
    });
    futures::future::try_join_all(asking).await?;
    Ok(())
}

async fn ask(own: NodeId, member: &Member) -> Result<v1::HandshakeResponse, String> {
    let asking = async {
        let endpoint = Endpoint::from_shared(member.address.to_uri()).map_err(|error| error.to_string())?;
        let channel = endpoint.connect().await.map_err(|error| error.to_string())?;
        let identity = v1::Identity {
            node_id: own.0,
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        };
        let request =
            v1::HandshakeRequest { identity: Some(identity), target_node_id: member.node_id.0, ..Default::default() };
        let answer = RaftServiceClient::new(channel).handshake(request).await;
        answer.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned())
    };
    let late = |_| Err(format!("no answer within {ANSWER_MAX:?}"));
    rt::timeout(ANSWER_MAX, asking).await.unwrap_or_else(late)
}

/// Whatever cluster it is: a member that holds data can neither be overruled nor be taken into the restored one.
fn check(own: NodeId, member: &Member, answer: &v1::HandshakeResponse) -> Result<(), Error> {
    if !answer.initialized {
        return Ok(());
    }
    let cluster = answer.identity.as_ref().and_then(|identity| <[u8; 16]>::try_from(&identity.cluster_uuid[..]).ok());
    let cluster = cluster.map_or_else(|| "a cluster".to_owned(), |id| format!("cluster {}", ClusterId(id)));
    let (id, address) = (member.node_id, &member.address);
    Err(refuse(format!(
        "nothing is restored: node {id} at {address} holds the data of {cluster}, which is newer than any snapshot. If only node \
         {own} lost its data, have it replaced: start it under a new node id with --join and run `tidepool member replace`. If a majority is \
         lost for ever, go on from node {id} with `tidepool member recover`. To give up what it holds, stop it and empty its data directory"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tried without looking at what the other says: fails.
    #[test]
    fn a_member_that_holds_data_forbids_a_restore() {
        let member = Member { node_id: NodeId(3), address: "h3:50051".parse().unwrap() };
        let answer = |initialized| v1::HandshakeResponse {
            identity: Some(v1::Identity { cluster_uuid: vec![7; 16].into(), node_id: 3, ..Default::default() }),
            initialized,
            ..Default::default()
        };
        check(NodeId(1), &member, &answer(false)).unwrap();
        let message = check(NodeId(1), &member, &answer(true)).unwrap_err().to_string();
        assert!(message.contains("node 3 at h3:50051") && message.contains("member replace"), "{message}");
    }

    #[tokio::test]
    async fn members_that_nobody_finds_are_lost() {
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let members = [Member { node_id: NodeId(2), address: nobody.to_string().parse().unwrap() }];
        check_others(NodeId(1), &members).await.unwrap();
        check_others(NodeId(2), &members).await.unwrap();
    }
}
