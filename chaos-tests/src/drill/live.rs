//! A quorum that serves others, as a drill sees it: only through its network.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use tidepool_proto::Address;
use tidepool_proto::v1::StatusResponse;

use super::options::{DrillFault, LiveOptions};
use super::strike::Strike;
use crate::admin;
use crate::cluster::POLL_EVERY;
use crate::digests::{self, DigestComparison};
use crate::failover::{CATCH_UP_WITHIN, DIGEST_WITHIN, Quorum, RECOVER_WITHIN, Struck};

/// Keys of every drill on a live quorum start with it.
pub(super) const PREFIX: &str = "tidepool-drill/";
/// How long a killed master may take to be started again and hold everything.
const RETURN_WITHIN: Duration = Duration::from_secs(600);

/// A voter.
#[derive(Clone, Debug)]
pub(super) struct LiveMember {
    node_id: u64,
    pub(super) address: Address,
}

impl fmt::Display for LiveMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "master {} at {}", self.node_id, self.address)
    }
}

impl LiveMember {
    /// Puts this member's facts into a command or a path. None of them can hold anything that a shell would act on.
    pub(super) fn fill_in(&self, template: &str) -> String {
        template
            .replace("{host}", self.address.host())
            .replace("{address}", &self.address.to_string())
            .replace("{node_id}", &self.node_id.to_string())
    }
}

/// Its voters, and how its leader is made to go.
pub(super) struct LiveQuorum {
    members: Vec<LiveMember>,
    pub(super) strike: Strike,
}

impl LiveQuorum {
    /// Learns the voters from whichever master answers. A quorum that could not lose its leader is refused.
    pub(super) async fn find(masters: &[Address], fault: DrillFault, options: &LiveOptions) -> Result<LiveQuorum> {
        let strike = Strike::of(fault, options)?;
        let mut problem = anyhow!("no master is named; set --masters HOST[:PORT],...");
        let mut members = Vec::new();
        for master in masters {
            match admin::status(master).await {
                Ok(status) => members.extend(voters(&status)?),
                Err(error) => problem = error,
            }
            if !members.is_empty() {
                break;
            }
        }
        match members.len() {
            0 => Err(problem.context("no master told the members of the quorum")),
            1 | 2 => bail!("a quorum of {} cannot lose its leader; three masters can", members.len()),
            _ => Ok(LiveQuorum { members, strike }),
        }
    }

    /// All voters, as `--masters` takes them.
    pub(super) fn addresses(&self) -> Vec<String> {
        self.members.iter().map(|member| member.address.to_string()).collect()
    }

    pub(super) async fn describe_leader(&self) -> Result<String> {
        let (at, status) = self.leader(RECOVER_WITHIN).await?;
        Ok(format!("{} in term {}", self.members[at], status.term))
    }

    async fn leader(&self, within: Duration) -> Result<(usize, StatusResponse)> {
        let give_up = Instant::now() + within;
        loop {
            let statuses = self.statuses().await;
            let leaders = statuses.into_iter().enumerate().filter_map(|(at, status)| Some((at, status.ok()?)));
            let newest = leaders.filter(|(_, status)| status.role == "leader").max_by_key(|(_, status)| status.term);
            match newest {
                Some(found) => return Ok(found),
                None if Instant::now() > give_up => bail!("no master of the quorum leads after {within:?}"),
                None => tokio::time::sleep(POLL_EVERY).await,
            }
        }
    }

    async fn statuses(&self) -> Vec<Result<StatusResponse>> {
        futures::future::join_all(self.members.iter().map(|member| admin::status(&member.address))).await
    }

    /// Waits until every voter leads or stands by without lack: then the leader may go, and the quorum stays.
    async fn wait_for_standbys(&self, within: Duration) -> Result<()> {
        let give_up = Instant::now() + within;
        loop {
            let mut missing = None;
            for (at, status) in self.statuses().await.into_iter().enumerate() {
                let member = &self.members[at];
                match status {
                    Ok(status) if status.role == "standby" && status.promotable && status.leader.is_some() => {}
                    Ok(status) if status.role == "leader" => {}
                    Ok(status) => missing = Some(format!("{member} is {} and cannot lead now", status.role)),
                    Err(error) => missing = Some(format!("{member} does not answer: {error:#}")),
                }
            }
            match missing {
                None => return Ok(()),
                Some(missing) if Instant::now() > give_up => {
                    bail!("the quorum is not whole after {within:?}: {missing}")
                }
                Some(_) => tokio::time::sleep(POLL_EVERY).await,
            }
        }
    }
}

fn voters(status: &StatusResponse) -> Result<Vec<LiveMember>> {
    let voters = status.members.iter().filter(|member| member.voter);
    voters
        .map(|member| {
            let address = member.address.parse().with_context(|| format!("address of master {}", member.node_id))?;
            Ok(LiveMember { node_id: member.node_id, address })
        })
        .collect()
}

impl Quorum for LiveQuorum {
    fn masters(&self) -> Vec<String> {
        self.addresses()
    }

    async fn leader_status(&mut self) -> Result<StatusResponse> {
        Ok(self.leader(RECOVER_WITHIN).await?.1)
    }

    async fn strike(&mut self, phase: Duration) -> Result<Struck> {
        // With another one away, the leader's loss would cost the quorum: that is no drill.
        self.wait_for_standbys(CATCH_UP_WITHIN).await?;
        let (at, status) = self.leader(RECOVER_WITHIN).await?;
        tokio::time::sleep(phase).await;
        let member = &self.members[at];
        let fault = self.strike.end(member, status.term).await?;
        Ok(Struck { at: Some(at), name: format!("master-{}", member.node_id), fault, saved_until_ns: None })
    }

    async fn leader_name(&mut self) -> Result<String> {
        let (at, _) = self.leader(RECOVER_WITHIN).await?;
        Ok(format!("master-{}", self.members[at].node_id))
    }

    async fn bring_back(&mut self, struck: &Struck) -> Result<()> {
        let member = struck.at.and_then(|at| self.members.get(at)).context("no master of this quorum was struck")?;
        self.strike.start_again(member).await?;
        let goal = self.leader(RECOVER_WITHIN).await?.1.committed_index;
        let give_up = Instant::now() + RETURN_WITHIN;
        loop {
            let seen = match admin::status(&member.address).await {
                Ok(status) if status.applied_index >= goal && matches!(&*status.role, "leader" | "standby") => {
                    return Ok(());
                }
                Ok(status) => format!("is {} and has applied {} of {goal}", status.role, status.applied_index),
                Err(error) => format!("{error:#}"),
            };
            if Instant::now() > give_up {
                bail!("{member} did not come back within {RETURN_WITHIN:?}: {seen}");
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }

    async fn settle(&mut self) -> Result<()> {
        self.wait_for_standbys(CATCH_UP_WITHIN).await
    }

    async fn compare_digests(&mut self) -> Result<DigestComparison> {
        digests::compare(&self.addresses(), DIGEST_WITHIN).await
    }
}
