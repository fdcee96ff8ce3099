//! What a change of the members takes, judged on one view of the quorum. Whatever is refused is refused here, before
//! anything is done; what was done by an earlier, interrupted call is not done again.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use tidepool_proto::NodeId;

use super::{MemberChange, MembershipError};
use crate::options::Member;
use crate::retired::Retired;
use crate::types;

/// Members, learners included, that a quorum may have: as many as clients and datanodes keep addresses of, with room for
/// those that are on their way out.
pub(super) const MEMBERS_MAX: usize = 24;

/// The quorum as its leader sees it.
#[derive(Clone, Debug)]
pub(super) struct Roll {
    pub(super) own: u64,
    pub(super) voters: BTreeSet<u64>,
    pub(super) members: BTreeMap<u64, types::Member>,
    pub(super) retired: Retired,
    /// Who answered lately, the leader included.
    pub(super) heard: BTreeSet<u64>,
}

/// One step of a change, in the order of the plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// A fresh master takes over the cluster's identity.
    Invite(Member),
    /// It follows without a vote.
    Follow(Member),
    /// It holds the log.
    CatchUp(Member),
    /// Who votes changes: both at once if both are named.
    Vote { joins: Option<Member>, leaves: Option<NodeId> },
    /// A learner leaves.
    Forget(NodeId),
    /// The leader is to leave: another leads first (M7), and carries on.
    HandOver(NodeId),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Invite(m) => write!(f, "node {} at {} takes over the identity of this cluster", m.node_id, m.address),
            Step::Follow(m) => write!(f, "node {} follows as a learner", m.node_id),
            Step::CatchUp(m) => write!(f, "node {} catches up with the log", m.node_id),
            Step::Vote { joins: Some(m), leaves: None } => write!(f, "node {} votes", m.node_id),
            Step::Vote { joins: Some(m), leaves: Some(id) } => {
                write!(f, "node {} votes in place of node {id}", m.node_id)
            }
            Step::Vote { joins: None, leaves: Some(id) } => write!(f, "node {id} leaves the quorum"),
            Step::Vote { joins: None, leaves: None } => write!(f, "a change that was left half done is completed"),
            Step::Forget(id) => write!(f, "node {id}, a learner, leaves"),
            Step::HandOver(id) => write!(f, "node {id} hands leadership to another voter"),
        }
    }
}

fn invalid<T>(message: String) -> Result<T, MembershipError> {
    Err(MembershipError::Invalid(message))
}

/// The steps from here to what is asked; none if it is so already.
pub(super) fn plan(roll: &Roll, change: &MemberChange) -> Result<Vec<Step>, MembershipError> {
    let (steps, joins) = match &change.add {
        Some(new) => plan_add(roll, new, change.remove)?,
        None => (Vec::new(), None),
    };
    let mut steps = steps;
    let Some(old) = change.remove else {
        if let Some(new) = joins {
            check_quorum(roll, Some(&new), None)?;
            steps.push(Step::Vote { joins: Some(new), leaves: None });
        }
        return Ok(steps);
    };
    let leaves = Some(old).filter(|id| roll.voters.contains(&id.0));
    if !roll.members.contains_key(&old.0) && !roll.retired.contains(old.0) {
        return invalid(format!("node {old} is no member; `tidepool member list` shows who is"));
    }
    check_quorum(roll, joins.as_ref(), leaves)?;
    match leaves {
        Some(id) if id.0 == roll.own => {
            steps.extend(joins.map(|new| Step::Vote { joins: Some(new), leaves: None }));
            steps.push(Step::HandOver(id));
            steps.push(Step::Vote { joins: None, leaves });
        }
        _ if joins.is_some() || leaves.is_some() => steps.push(Step::Vote { joins, leaves }),
        _ => {}
    }
    if leaves.is_none() && roll.members.contains_key(&old.0) {
        steps.push(Step::Forget(old));
    }
    Ok(steps)
}

/// The steps until a new member can be given a vote, and whether it lacks one.
fn plan_add(roll: &Roll, new: &Member, old: Option<NodeId>) -> Result<(Vec<Step>, Option<Member>), MembershipError> {
    let (id, address) = (new.node_id, new.address.to_string());
    if id.0 == 0 {
        return invalid("node id 0 names nobody; ids are numbered from 1".to_owned());
    }
    if old == Some(id) {
        return invalid(format!("node {id} cannot replace itself; a new data directory needs a new id"));
    }
    if let Some(known) = roll.members.get(&id.0) {
        if known.address != address {
            return invalid(format!(
                "node {id} is a member at {}, not at {address}; a master that moved is replaced by one under a new id",
                known.address
            ));
        }
        let votes = roll.voters.contains(&id.0);
        if votes && old.is_none() && !roll.heard.contains(&id.0) {
            return Err(MembershipError::Unreachable(format!(
                "node {id} is a voter already, and does not answer: if it lost its data, it comes back only under a new id \
                 (tidepool member replace {id} NEW-ID@{address})"
            )));
        }
        return Ok(if votes { (vec![], None) } else { (vec![Step::CatchUp(new.clone())], Some(new.clone())) });
    }
    if roll.retired.contains(id.0) {
        return Err(MembershipError::IdUsed(format!(
            "node {id} was a member before, and ids are never used again: start the new master with an empty data directory \
             under an id above {}",
            highest_used(roll)
        )));
    }
    let taken =
        roll.members.iter().find(|(other, member)| member.address == address && old.map(|o| o.0) != Some(**other));
    if let Some((other, _)) = taken {
        return invalid(format!("{address} is the address of node {other}"));
    }
    let many_hosts =
        roll.members.values().any(|m| m.address.parse::<tidepool_proto::Address>().is_ok_and(|a| !a.is_loopback()));
    new.address
        .check_advertisable(many_hosts, "its --listen or --advertise")
        .map_err(|error| MembershipError::Invalid(error.message().to_owned()))?;
    if roll.members.len() >= MEMBERS_MAX {
        return invalid(format!("the quorum has {MEMBERS_MAX} members, which is the limit"));
    }
    let steps = vec![Step::Invite(new.clone()), Step::Follow(new.clone()), Step::CatchUp(new.clone())];
    Ok((steps, Some(new.clone())))
}

fn highest_used(roll: &Roll) -> u64 {
    let (upto, ids) = roll.retired.parts();
    let left = ids.last().copied().unwrap_or(upto);
    roll.members.keys().last().copied().unwrap_or(0).max(left)
}

/// Refuses a change after which the voters that answer would be no majority. A new one will answer: it must catch up first.
fn check_quorum(roll: &Roll, joins: Option<&Member>, leaves: Option<NodeId>) -> Result<(), MembershipError> {
    if joins.is_none() && leaves.is_none() {
        return Ok(());
    }
    let mut voters = roll.voters.clone();
    voters.extend(joins.map(|new| new.node_id.0));
    if let Some(id) = leaves {
        voters.remove(&id.0);
    }
    if voters.is_empty() {
        return invalid("it is the last voter: a quorum needs one".to_owned());
    }
    let joining = joins.map(|new| new.node_id.0);
    let silent: Vec<u64> =
        voters.iter().copied().filter(|id| !roll.heard.contains(id) && joining != Some(*id)).collect();
    if (voters.len() - silent.len()) * 2 > voters.len() {
        return Ok(());
    }
    Err(MembershipError::AtRisk(format!(
        "{} would vote, of which {} did not answer lately: no majority would be left; nothing was changed",
        names(voters.iter().copied()),
        names(silent.into_iter())
    )))
}

fn names(ids: impl Iterator<Item = u64>) -> String {
    let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
    match &ids[..] {
        [one] => format!("node {one}"),
        many => format!("nodes {}", many.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Voters, of whom some are silent, and who left before.
    fn roll(own: u64, voters: &[u64], silent: &[u64], retired: &[u64]) -> Roll {
        let retired = Retired::from_parts(0, retired.iter().copied().collect());
        let member = |id: u64| types::Member::new(&at(id).address, retired.clone());
        Roll {
            own,
            voters: voters.iter().copied().collect(),
            members: voters.iter().map(|id| (*id, member(*id))).collect(),
            heard: voters.iter().copied().filter(|id| !silent.contains(id)).collect(),
            retired,
        }
    }

    fn at(id: u64) -> Member {
        Member { node_id: NodeId(id), address: format!("10.0.0.{id}:1").parse().unwrap() }
    }

    fn add(id: u64) -> MemberChange {
        MemberChange { add: Some(at(id)), remove: None }
    }
    fn remove(id: u64) -> MemberChange {
        MemberChange { add: None, remove: Some(NodeId(id)) }
    }
    fn replace(old: u64, new: u64) -> MemberChange {
        MemberChange { add: Some(at(new)), remove: Some(NodeId(old)) }
    }
    fn taken_in(id: u64) -> Vec<Step> {
        vec![Step::Invite(at(id)), Step::Follow(at(id)), Step::CatchUp(at(id))]
    }
    fn vote(joins: Option<u64>, leaves: Option<u64>) -> Step {
        Step::Vote { joins: joins.map(at), leaves: leaves.map(NodeId) }
    }

    #[test]
    fn a_new_member_follows_and_catches_up_before_it_votes() {
        let steps = plan(&roll(1, &[1], &[], &[]), &add(2)).unwrap();
        assert_eq!(steps, [taken_in(2), vec![vote(Some(2), None)]].concat());
        let steps = plan(&roll(1, &[1, 2, 3], &[2], &[]), &replace(2, 4)).unwrap();
        assert_eq!(steps, [taken_in(4), vec![vote(Some(4), Some(2))]].concat());
    }

    #[test]
    fn what_is_done_already_is_not_done_again() {
        assert_eq!(plan(&roll(1, &[1, 2], &[], &[]), &add(2)).unwrap(), []);
        assert_eq!(plan(&roll(1, &[1, 2], &[], &[3]), &remove(3)).unwrap(), []);
        assert_eq!(plan(&roll(1, &[1, 4], &[], &[2]), &replace(2, 4)).unwrap(), []);
        let mut half = roll(1, &[1, 2, 3], &[], &[]);
        half.members.insert(4, types::Member::new(&at(4).address, Retired::default()));
        assert_eq!(plan(&half, &add(4)).unwrap(), [Step::CatchUp(at(4)), vote(Some(4), None)]);
        assert_eq!(plan(&half, &remove(4)).unwrap(), [Step::Forget(NodeId(4))]);
        assert_eq!(plan(&half, &replace(3, 4)).unwrap(), [Step::CatchUp(at(4)), vote(Some(4), Some(3))]);
        half.voters.insert(4);
        assert_eq!(plan(&half, &replace(3, 4)).unwrap(), [vote(None, Some(3))]);
    }

    #[test]
    fn a_leader_that_leaves_hands_over_before_it_goes() {
        let steps = plan(&roll(1, &[1, 2, 3], &[], &[]), &remove(1)).unwrap();
        assert_eq!(steps, [Step::HandOver(NodeId(1)), vote(None, Some(1))]);
        let steps = plan(&roll(1, &[1], &[], &[]), &replace(1, 2)).unwrap();
        assert_eq!(
            steps,
            [taken_in(2), vec![vote(Some(2), None), Step::HandOver(NodeId(1)), vote(None, Some(1))]].concat()
        );
    }

    #[test]
    fn an_id_that_was_used_is_never_taken_again() {
        for change in [add(2), replace(3, 2)] {
            let error = plan(&roll(1, &[1, 3], &[], &[2]), &change).unwrap_err();
            assert!(matches!(&error, MembershipError::IdUsed(why) if why.contains("above 3")), "{error}");
        }
        let error = plan(&roll(1, &[1, 3], &[], &[9]), &add(9)).unwrap_err();
        assert!(matches!(&error, MembershipError::IdUsed(why) if why.contains("above 9")), "{error}");
    }

    #[test]
    fn a_change_that_would_lose_the_quorum_is_refused() {
        for (roll, change) in [
            (roll(1, &[1, 2, 3], &[3], &[]), remove(2)),
            (roll(1, &[1, 2, 3, 4], &[3, 4], &[]), remove(2)),
            (roll(1, &[1, 2, 3, 4], &[2, 3, 4], &[]), replace(2, 5)),
            (roll(1, &[1, 2, 3], &[2, 3], &[]), add(4)),
            (roll(1, &[1, 2], &[2], &[]), remove(1)),
        ] {
            let error = plan(&roll, &change).unwrap_err();
            assert!(matches!(&error, MembershipError::AtRisk(why) if why.contains("did not answer")), "{error}");
        }
        // The dead one itself may always go, while the rest are a majority.
        assert_eq!(plan(&roll(1, &[1, 2, 3], &[3], &[]), &remove(3)).unwrap(), [vote(None, Some(3))]);
        assert_eq!(plan(&roll(1, &[1, 2], &[2], &[]), &remove(2)).unwrap(), [vote(None, Some(2))]);
        let error = plan(&roll(1, &[1], &[], &[]), &remove(1)).unwrap_err();
        assert!(matches!(error, MembershipError::Invalid(_)), "{error}");
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_facts() {
        let three = roll(1, &[1, 2, 3], &[3], &[]);
        let moved = Member { address: at(9).address, ..at(2) };
        let taken = Member { address: at(2).address, ..at(4) };
        let unspecified = Member { node_id: NodeId(4), address: "0.0.0.0:1".parse().unwrap() };
        let loopback = Member { node_id: NodeId(4), address: "127.0.0.1:1".parse().unwrap() };
        for (change, says) in [
            (remove(7), "no member"),
            (replace(7, 4), "no member"),
            (replace(4, 4), "itself"),
            (MemberChange { add: Some(moved), remove: None }, "10.0.0.2:1"),
            (MemberChange { add: Some(taken.clone()), remove: None }, "node 2"),
            (MemberChange { add: Some(unspecified), remove: None }, "unspecified"),
            (MemberChange { add: Some(loopback), remove: None }, "loopback"),
            (MemberChange { add: Some(Member { node_id: NodeId(0), ..at(4) }), remove: None }, "node id 0"),
        ] {
            let error = plan(&three, &change).unwrap_err();
            assert!(matches!(error, MembershipError::Invalid(_)), "{error}");
            assert!(error.to_string().contains(says), "'{error}' does not say '{says}'");
        }
        let error = plan(&three, &add(3)).unwrap_err();
        assert!(matches!(&error, MembershipError::Unreachable(why) if why.contains("lost its data")), "{error}");
        // In place of the one that had the address it is welcome.
        plan(&three, &MemberChange { add: Some(taken), remove: Some(NodeId(2)) }).unwrap();
    }
}
