//! Whether a member that holds data is among its own (I4). A data directory moved under another cluster's member list
//! would stand by for ever, heard by nobody. So the members it was started with are asked who they are: once a majority
//! of them answers with its own cluster, it is where it belongs; once a majority answers with one other cluster, it
//! ends. Less than a majority, a wiped member or a stranger on a member's address, ends nothing.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use tidepool_proto::{ClusterId, NodeId};

use crate::host::Host;
use crate::identity::{IdentityStore, wire_cluster};
use crate::network::Network;
use crate::options::{Member, Options};
use crate::roll_call::roll_call;

/// Pause between two rounds of questions, while neither majority is there.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// What a round of answers says.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Verdict {
    /// A majority belongs to this member's cluster.
    AtHome,
    /// A majority belongs to this other cluster: these members.
    Elsewhere(ClusterId, Vec<Member>),
    /// Neither.
    Unknown,
}

/// Judges answers. `own` is this member's cluster; `listed` are the members it was started with, itself perhaps among
/// them; `answers` are the clusters that others of them told.
fn judge(own: ClusterId, own_id: NodeId, listed: &[Member], answers: &[(Member, ClusterId)]) -> Verdict {
    let majority = listed.len() / 2 + 1;
    let itself = listed.iter().filter(|member| member.node_id == own_id).count();
    let mut clusters: BTreeMap<ClusterId, Vec<Member>> = BTreeMap::new();
    for (member, cluster) in answers {
        clusters.entry(*cluster).or_default().push(member.clone());
    }
    let friends = clusters.remove(&own).map_or(0, |members| members.len());
    if friends + itself >= majority {
        return Verdict::AtHome;
    }
    let strangers = clusters.into_iter().find(|(_, members)| members.len() >= majority);
    strangers.map_or(Verdict::Unknown, |(cluster, members)| Verdict::Elsewhere(cluster, members))
}

/// One start of a member that holds data.
pub(crate) struct Belonging<C, N> {
    identity: Arc<IdentityStore>,
    network: N,
    node_id: NodeId,
    members: Vec<Member>,
    data_dir: PathBuf,
    config: PhantomData<fn() -> C>,
}

impl<C: Host, N: Network> Belonging<C, N> {
    pub(crate) fn new(identity: Arc<IdentityStore>, network: N, options: &Options) -> Self {
        Belonging {
            identity,
            network,
            node_id: options.node_id,
            members: options.members.clone(),
            data_dir: options.data_dir.clone(),
            config: PhantomData,
        }
    }

    /// Returns once this member is known to be where it belongs; why it must end, if it is known to be elsewhere.
    pub(crate) async fn settle(&self) -> Result<(), String> {
        let own = self.identity.cluster().cluster;
        if self.members.is_empty() {
            // It was started to join, and let nobody in before a leader took it in.
            return Ok(());
        }
        loop {
            match judge(own, self.node_id, &self.members, &self.ask().await) {
                Verdict::AtHome => return Ok(()),
                Verdict::Elsewhere(other, members) => return Err(self.explain(own, other, &members)),
                Verdict::Unknown => C::AsyncRuntime::sleep(ASK_EVERY).await,
            }
        }
    }

    /// The clusters of the other members that answer, hold data and are who the list says.
    async fn ask(&self) -> Vec<(Member, ClusterId)> {
        let answers = roll_call::<C, N>(&self.network, &self.identity, self.node_id, &self.members).await;
        answers
            .into_iter()
            .filter_map(|(member, answer)| {
                // The error of one that belongs elsewhere is what is looked for: only who it is counts.
                let answer = answer.ok().filter(|answer| answer.initialized)?;
                let peer = answer.identity.filter(|peer| peer.node_id == member.node_id.0)?;
                Some((member.clone(), wire_cluster(&peer)?.cluster))
            })
            .collect()
    }

    fn explain(&self, own: ClusterId, other: ClusterId, members: &[Member]) -> String {
        let named: Vec<String> = members.iter().map(|m| format!("node {} at {}", m.node_id, m.address)).collect();
        format!(
            "the data directory {} belongs to cluster {own}, but {} of the {} members in the member list belong to cluster \
             {other} ({}): start node {} with the data directory of its own cluster, or correct the member list",
            self.data_dir.display(),
            members.len(),
            self.members.len(),
            named.join(", "),
            self.node_id
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: ClusterId = ClusterId([1; 16]);
    const OTHER: ClusterId = ClusterId([2; 16]);
    const THIRD: ClusterId = ClusterId([3; 16]);

    fn member(id: u64) -> Member {
        Member { node_id: NodeId(id), address: format!("10.0.0.{id}:1").parse().unwrap() }
    }

    /// What member 1 concludes when the others answered so.
    fn conclude(size: u64, answers: &[(u64, ClusterId)]) -> Verdict {
        let listed: Vec<Member> = (1..=size).map(member).collect();
        let answers: Vec<(Member, ClusterId)> = answers.iter().map(|(id, cluster)| (member(*id), *cluster)).collect();
        judge(OWN, NodeId(1), &listed, &answers)
    }

    #[test]
    fn only_a_majority_of_one_other_cluster_ends_a_member() {
        assert_eq!(conclude(1, &[]), Verdict::AtHome);
        assert_eq!(conclude(3, &[]), Verdict::Unknown);
        assert_eq!(conclude(3, &[(2, OWN)]), Verdict::AtHome);
        assert_eq!(conclude(3, &[(2, OTHER)]), Verdict::Unknown, "one stranger");
        assert_eq!(conclude(3, &[(2, OTHER), (3, OWN)]), Verdict::AtHome);
        assert_eq!(conclude(3, &[(2, OTHER), (3, THIRD)]), Verdict::Unknown, "two strangers to each other");
        assert_eq!(conclude(3, &[(2, OTHER), (3, OTHER)]), Verdict::Elsewhere(OTHER, vec![member(2), member(3)]));
        assert_eq!(conclude(5, &[(2, OTHER), (3, OTHER)]), Verdict::Unknown);
        assert_eq!(conclude(5, &[(2, OTHER), (3, OTHER), (4, OWN), (5, OWN)]), Verdict::AtHome);
        assert!(matches!(conclude(5, &[(2, OTHER), (3, OTHER), (4, OTHER), (5, OWN)]), Verdict::Elsewhere(OTHER, _)));
        assert_eq!(conclude(2, &[(2, OTHER)]), Verdict::Unknown, "one of two is no majority");
    }

    /// A learner is not listed: it has no say of its own.
    #[test]
    fn a_learner_counts_only_the_listed() {
        let listed: Vec<Member> = (1..=3).map(member).collect();
        let answers = |clusters: &[(u64, ClusterId)]| {
            clusters.iter().map(|(id, cluster)| (member(*id), *cluster)).collect::<Vec<_>>()
        };
        assert_eq!(judge(OWN, NodeId(4), &listed, &answers(&[(1, OWN)])), Verdict::Unknown);
        assert_eq!(judge(OWN, NodeId(4), &listed, &answers(&[(1, OWN), (2, OWN)])), Verdict::AtHome);
    }
}
