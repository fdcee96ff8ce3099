//! The cluster's feature level (M6): which level every member's binary knows, and raising the cluster's to it.
//!
//! Nobody raises it but an operator, once every member runs the newer binary; and the first leader of a new cluster, whose
//! directory is empty. It is never lowered: from then on binaries that do not know it refuse to take part.

use std::time::Duration;

use tidepool_proto::{Error, ErrorCode, v1};
use tidepool_raft::Member;
use tidepool_raft::rt;

use super::core::{Service, unexpected};
use super::proposer::Proposer;
use super::refusal;
use crate::directory::{FEATURE_LEVEL, Op, Outcome};

/// How long a new cluster's first leader waits for what the others know; without it the cluster begins at the first level.
const BIRTH_WAIT: Duration = Duration::from_secs(2);

/// A member, and the highest level that its binary knows; none: it does not answer.
type Known = (Member, Option<u16>);

/// Shows who knows what, and raises the level if that was asked.
pub async fn answer(service: &Service, request: &v1::FeatureLevelRequest) -> v1::FeatureLevelResponse {
    let (members, result) = match request.raise {
        true => raise(service, request.to).await,
        false => show(service).await,
    };
    let members = members.into_iter().map(|(member, level)| v1::MemberLevel {
        node_id: member.node_id.0,
        address: member.address.to_string(),
        feature_level_max: level.unwrap_or(0).into(),
    });
    v1::FeatureLevelResponse {
        error: result.err().map(Into::into),
        feature_level: service.directory().feature_level().into(),
        members: members.collect(),
    }
}

async fn show(service: &Service) -> (Vec<Known>, Result<(), Error>) {
    match service.barrier().await {
        Ok(_) => (service.node().member_levels().await, Ok(())),
        Err(error) => (Vec::new(), Err(error)),
    }
}

/// While it goes on no member can come or go, so that all of those who will read the raise were asked.
async fn raise(service: &Service, to: u32) -> (Vec<Known>, Result<(), Error>) {
    let act = async {
        let tenure = match service.barrier().await {
            Ok(tenure) => tenure,
            Err(error) => return (Vec::new(), Err(error)),
        };
        let members = service.node().member_levels().await;
        let result = match target(service.directory().feature_level(), to, &members) {
            Ok(Some(level)) => propose(&tenure.proposer, level).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        (members, result)
    };
    match service.node().with_members_fixed("the feature level is being raised", act).await {
        Ok(answer) => answer,
        Err(error) => (Vec::new(), Err(refusal::membership(error))),
    }
}

/// A new cluster begins at the highest level that all its members know: there is nothing yet that an older binary could want
/// to read.
pub async fn raise_at_birth(service: &Service, proposer: &Proposer) {
    let members = rt::timeout(BIRTH_WAIT, service.node().member_levels()).await.unwrap_or_default();
    let raised = match target(service.directory().feature_level(), 0, &members) {
        Ok(Some(level)) if !members.is_empty() => propose(proposer, level).await,
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = raised {
        tracing::warn!(%error, "the new cluster begins at the first feature level; raise it with tidepool feature-level raise");
    }
}

/// The level to raise to, if it is not there yet. 0 asks for the highest that all know.
fn target(present: u16, to: u32, members: &[Known]) -> Result<Option<u16>, Error> {
    let name = |(member, _): &&Known| format!("node {} at {}", member.node_id, member.address);
    let silent: Vec<String> = members.iter().filter(|(_, level)| level.is_none()).map(|known| name(&known)).collect();
    if !silent.is_empty() {
        return Err(Error::new(
            ErrorCode::Unavailable,
            format!(
                "{} does not answer, so it is not known which feature level its binary has: start it, or remove it from the quorum",
                silent.join(", ")
            ),
        ));
    }
    let lowest = members.iter().filter_map(|(_, level)| *level).min().unwrap_or(present);
    let wanted = if to == 0 { u32::from(lowest.max(present)) } else { to };
    if wanted < u32::from(present) {
        return Err(Error::new(
            ErrorCode::InvalidParams,
            format!("the cluster is at feature level {present}; it is never lowered to {wanted}"),
        ));
    }
    if wanted == u32::from(present) {
        return Ok(None);
    }
    let lacking = |(_, level): &&Known| level.is_some_and(|level| u32::from(level) < wanted);
    let older: Vec<String> = members.iter().filter(lacking).map(|known| name(&known)).collect();
    match u16::try_from(wanted) {
        Ok(level) if older.is_empty() && level <= FEATURE_LEVEL => Ok(Some(level)),
        _ => Err(Error::new(
            ErrorCode::FeatureLevel,
            format!(
                "feature level {wanted} is not known by {}: upgrade them first; all members know {lowest}",
                if older.is_empty() { "this binary".to_owned() } else { older.join(", ") }
            ),
        )),
    }
}

async fn propose(proposer: &Proposer, level: u16) -> Result<(), Error> {
    match proposer.commit(Op::RaiseFeatureLevel { level }).await? {
        Outcome::Done => {
            tracing::info!(level, "the feature level was raised");
            Ok(())
        }
        Outcome::Refused(error) => Err(error),
        other => Err(unexpected("raise_feature_level", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_proto::{Address, NodeId};

    fn known(levels: &[Option<u16>]) -> Vec<Known> {
        let member = |id| Member { node_id: NodeId(id), address: Address::new("h", id as u16).unwrap() };
        levels.iter().zip(1..).map(|(level, id)| (member(id), *level)).collect()
    }

    #[test]
    fn the_level_rises_only_to_what_every_member_answered_that_it_knows() {
        let all = known(&[Some(2), Some(2), Some(2)]);
        assert_eq!(target(1, 0, &all), Ok(Some(2)));
        assert_eq!(target(1, 2, &all), Ok(Some(2)));
        assert_eq!(target(2, 2, &all), Ok(None));
        assert_eq!(target(2, 0, &all), Ok(None));
        assert_eq!(target(2, 1, &all).unwrap_err().code(), ErrorCode::InvalidParams);
        assert_eq!(target(1, 3, &all).unwrap_err().code(), ErrorCode::FeatureLevel);
        let error = target(1, 2, &known(&[Some(2), None, Some(2)])).unwrap_err();
        assert!(error.code() == ErrorCode::Unavailable && error.message().contains("node 2"), "{error}");
        let mixed = known(&[Some(2), Some(2), Some(1)]);
        let error = target(1, 2, &mixed).unwrap_err();
        assert!(error.code() == ErrorCode::FeatureLevel && error.message().contains("node 3"), "{error}");
        assert_eq!(target(1, 0, &mixed), Ok(None), "the highest that all know is the present one");
    }
}
