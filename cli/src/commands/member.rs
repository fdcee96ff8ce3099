//! `tidepool member list|add|remove|replace`: who belongs to the quorum. The leader carries a change out; a leader that is
//! to leave hands over first, and the next one is asked to go on.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidepool_proto::v1::{ChangeMembersRequest, ChangeMembersResponse, MemberStatus, StatusResponse};
use tidepool_proto::{Address, Error, ErrorCode};

use super::{Context, member_recover};
use crate::admin::{self, Answer, from_call};
use crate::args::{MemberArgs, MemberCommand, NewMember};
use crate::config::layers::Origin;
use crate::config::value::show_duration;
use crate::exit::Exit;
use crate::output::{self, Format, Table};

/// Deadline of a change that names none: a new master may have to take in a snapshot.
const CHANGE_WITHIN: Duration = Duration::from_secs(60);
/// Pause before the next leader is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Longest search for the leader at once.
const SEARCH_MAX: Duration = Duration::from_secs(3);
/// The leader ends a call this much earlier than the command, so that its answer arrives.
const ANSWER_MARGIN: Duration = Duration::from_millis(250);

/// Looks, or asks the leader.
pub async fn run(context: &Context, args: &MemberArgs) -> anyhow::Result<Exit> {
    let (add, remove, dry_run) = match &args.command {
        MemberCommand::List => return list(context).await,
        MemberCommand::Recover { skip: Some(place), hash, data_dir, .. } => {
            return member_recover::skip(context, *place, *hash, data_dir.as_deref());
        }
        MemberCommand::Recover { start_over: true, data_dir, .. } => {
            return member_recover::start_over(context, data_dir.as_deref());
        }
        MemberCommand::Recover { accept_data_loss, data_dir, .. } => {
            return member_recover::run(context, *accept_data_loss, data_dir.as_deref());
        }
        MemberCommand::Add { member, dry_run } => (Some(member), None, *dry_run),
        MemberCommand::Remove { id, dry_run } => (None, Some(*id), *dry_run),
        MemberCommand::Replace { old, new, dry_run } => (Some(new), Some(*old), *dry_run),
    };
    let (add_node_id, add_address) = add.map_or((0, String::new()), |m: &NewMember| (m.node_id, m.address.to_string()));
    let request = ChangeMembersRequest {
        add_node_id,
        add_address,
        remove_node_id: remove.unwrap_or(0),
        remaining_ms: 0,
        dry_run,
    };
    change(context, request).await
}

async fn change(context: &Context, request: ChangeMembersRequest) -> anyhow::Result<Exit> {
    let within = match context.config.value("deadline").origin {
        Origin::Default => CHANGE_WITHIN,
        _ => context.deadline(),
    };
    let deadline = Instant::now() + within;
    let mut masters = context.config.addresses("masters");
    let mut done = Vec::new();
    loop {
        let answer = ask(&masters, &request, deadline).await;
        let error = match answer {
            Ok(answer) => {
                for step in answer.steps {
                    if !done.contains(&step) {
                        done.push(step);
                    }
                }
                for member in &answer.members {
                    learn(&mut masters, &member.address);
                }
                match answer.error {
                    None => {
                        show(context.format, request.dry_run, &done, &answer.members)?;
                        return Ok(Exit::Success);
                    }
                    Some(error) => from_call(&error),
                }
            }
            Err(error) => error,
        };
        // What may pass is a change of leaders; a new master that does not answer is told at once.
        let passes = error.code() == ErrorCode::NotLeader || error.retry_after_ms() > 0;
        if !passes || Instant::now() + LOOK_AGAIN > deadline {
            for step in &done {
                eprintln!("done: {step}");
            }
            return Err(error.into());
        }
        if let Some(hint) = error.leader() {
            learn(&mut masters, &hint.address);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

fn learn(masters: &mut Vec<Address>, text: &str) {
    if let Ok(address) = text.parse::<Address>()
        && !masters.contains(&address)
    {
        masters.push(address);
    }
}

/// One call to whoever leads now.
async fn ask(
    masters: &[Address],
    request: &ChangeMembersRequest,
    deadline: Instant,
) -> Result<ChangeMembersResponse, Error> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let answers = admin::status_of_all(masters, left().min(SEARCH_MAX)).await;
    let Some((address, _)) = admin::leader(&answers) else {
        let text = "no master of the quorum says that it leads; see: tidepool status";
        return Err(Error::new(ErrorCode::Unavailable, text).retry_after(1));
    };
    let mut leader = admin::connect(address, left()).await.map_err(|error| error.retry_after(1))?;
    let remaining = left().saturating_sub(ANSWER_MARGIN).max(Duration::from_millis(100));
    let request = ChangeMembersRequest { remaining_ms: remaining.as_millis() as u32, ..request.clone() };
    match leader.change_members(request).await {
        Ok(answer) => Ok(answer.into_inner()),
        Err(status) => Err(Error::new(
            ErrorCode::Unavailable,
            format!(
                "the leader at {address} gave no answer: {}; how far it came: tidepool member list",
                status.message()
            ),
        )
        .retry_after(1)),
    }
}

fn show(format: Format, dry_run: bool, steps: &[String], members: &[MemberStatus]) -> anyhow::Result<()> {
    if format == Format::Json {
        let members: Vec<Value> =
            members.iter().map(|m| json!({"node_id": m.node_id, "address": m.address, "voter": m.voter})).collect();
        return output::print_json(&json!({"dry_run": dry_run, "steps": steps, "members": members}));
    }
    let mut text = String::new();
    for step in steps {
        text.push_str(if dry_run { "would: " } else { "done: " });
        text.push_str(step);
        text.push('\n');
    }
    if steps.is_empty() {
        text.push_str("nothing to do: the quorum is so already\n");
    }
    output::print(text.as_bytes())
}

async fn list(context: &Context) -> anyhow::Result<Exit> {
    let answers = admin::status_of_all(&context.config.addresses("masters"), context.deadline()).await;
    let Some((_, leader)) = admin::leader(&answers) else {
        let text = "no master of the quorum says that it leads, and only the leader knows how far each member is; see: tidepool status";
        return Err(Error::new(ErrorCode::Unavailable, text).into());
    };
    match context.format {
        Format::Json => output::print_json(&json!(rows(leader, &answers).iter().map(as_json).collect::<Vec<_>>()))?,
        Format::Table => {
            let mut table = Table::new(&["node", "address", "role", "matched", "lag", "heard", "answers"]);
            for row in rows(leader, &answers) {
                table.row([
                    row.member.node_id.to_string(),
                    row.member.address.clone(),
                    row.role.to_owned(),
                    row.member.matched_index.to_string(),
                    row.lag.to_string(),
                    match row.role {
                        "leader" => "-".to_owned(),
                        _ => show_duration(Duration::from_millis(row.member.last_heard_ms)) + " ago",
                    },
                    if row.answers { "yes" } else { "no" }.to_owned(),
                ]);
            }
            output::print(table.render(0).as_bytes())?;
        }
    }
    Ok(Exit::Success)
}

struct Row<'a> {
    member: &'a MemberStatus,
    role: &'static str,
    lag: u64,
    /// Whether it answered this command.
    answers: bool,
}

fn rows<'a>(leader: &'a StatusResponse, answers: &[Answer]) -> Vec<Row<'a>> {
    let own = admin::own_node_id(leader);
    let row = |member: &'a MemberStatus| Row {
        member,
        role: match member.voter {
            _ if member.node_id == own => "leader",
            true => "voter",
            false => "learner",
        },
        lag: leader.last_log_index.saturating_sub(member.matched_index),
        answers: answers.iter().any(|a| a.status.as_ref().is_ok_and(|s| admin::own_node_id(s) == member.node_id)),
    };
    leader.members.iter().map(row).collect()
}

fn as_json(row: &Row<'_>) -> Value {
    json!({
        "node_id": row.member.node_id, "address": row.member.address, "role": row.role,
        "matched_index": row.member.matched_index, "lag": row.lag, "last_heard_ms": row.member.last_heard_ms,
        "answers": row.answers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_proto::v1::Identity;

    #[test]
    fn the_list_says_who_leads_votes_and_only_follows() {
        let member =
            |node_id, voter, matched_index| MemberStatus { node_id, voter, matched_index, ..Default::default() };
        let leader = StatusResponse {
            identity: Some(Identity { node_id: 2, ..Identity::default() }),
            role: "leader".into(),
            last_log_index: 100,
            members: vec![member(1, true, 90), member(2, true, 100), member(4, false, 0)],
            ..StatusResponse::default()
        };
        let answer = |status| Answer { address: Address::new("h", 1).unwrap(), status };
        let answers = [answer(Ok(leader.clone())), answer(Err(Error::new(ErrorCode::Unavailable, "x")))];
        let rows = rows(&leader, &answers);
        let seen: Vec<_> = rows.iter().map(|r| (r.member.node_id, r.role, r.lag, r.answers)).collect();
        assert_eq!(seen, [(1, "voter", 10, false), (2, "leader", 0, true), (4, "learner", 100, false)]);
    }
}
