//! `tidepool status`: the quorum, the nodes and the capacity in one screen, and the one next step.

use serde_json::{Value, json};
use tidepool_proto::v1::{SnapshotStatus, StatusResponse};
use tidepool_proto::{ClusterId, SegmentId};

use super::Context;
use crate::admin::{self, Answer};
use crate::config::value::{show_duration, show_size};
use crate::exit::Exit;
use crate::output::{self, Format, Table, count, hex};

/// Asks every master about itself. Exit code 5 when nobody leads.
pub async fn run(context: &Context) -> anyhow::Result<Exit> {
    let masters = context.config.addresses("masters");
    let answers = admin::status_of_all(&masters, context.deadline()).await;
    let leader = admin::leader(&answers).map(|(_, status)| status);
    let step = next_step(&answers, leader);
    match context.format {
        Format::Json => output::print_json(&as_json(&answers, leader, &step))?,
        Format::Table => output::print(screen(&answers, leader, &step).as_bytes())?,
    }
    Ok(if leader.is_some() { Exit::Success } else { Exit::TryLater })
}

fn cluster_name(status: &StatusResponse) -> String {
    let uuid = status.identity.as_ref().and_then(|identity| <[u8; 16]>::try_from(&identity.cluster_uuid[..]).ok());
    uuid.map_or_else(|| "not formed".to_owned(), |uuid| ClusterId(uuid).to_string())
}

/// Most useful single thing to do now.
pub fn next_step(answers: &[Answer], leader: Option<&StatusResponse>) -> String {
    let silent: Vec<&Answer> = answers.iter().filter(|answer| answer.status.is_err()).collect();
    let Some(leader) = leader else {
        return match (answers.len() - silent.len(), answers.len()) {
            (0, _) => format!(
                "no master answers: start them (tidepool master), or name the right ones with --masters; asked {}",
                answers.iter().map(|answer| answer.address.to_string()).collect::<Vec<_>>().join(", ")
            ),
            (up, all) if up * 2 > all => {
                "no leader yet: an election takes about a second; run tidepool status again".to_owned()
            }
            (up, all) => format!(
                "no quorum: {up} of {all} masters answer and {} are needed; start {}",
                all / 2 + 1,
                silent.iter().map(|answer| answer.address.to_string()).collect::<Vec<_>>().join(", ")
            ),
        };
    };
    let answers_of = |id: u64| answers.iter().any(|a| a.status.as_ref().is_ok_and(|s| admin::own_node_id(s) == id));
    let whole = !leader.members.is_empty() && leader.members.iter().all(|member| answers_of(member.node_id));
    if let Some(one) = silent.first().filter(|_| whole) {
        return format!(
            "all {} members are up; {} is none of them: take it out of `masters`",
            leader.members.len(),
            one.address
        );
    }
    if let Some(one) = silent.first() {
        let up = answers.len() - silent.len();
        return format!(
            "restart the master at {}: {up} of {} are up, losing another may stop the quorum",
            one.address,
            answers.len()
        );
    }
    if let Some(step) =
        raise_step(answers, leader).filter(|_| matches!(leader.next_step.as_str(), "" | "nothing to do"))
    {
        return step;
    }
    if !leader.next_step.is_empty() {
        return leader.next_step.clone();
    }
    if leader.nodes.is_empty() {
        return "no datanode has joined: run tidepool datanode --masters ... --dram 64GiB on each host that lends memory".to_owned();
    }
    if let Some(node) = leader.nodes.iter().find(|node| node.suspect) {
        let silent_for = show_duration(std::time::Duration::from_millis(node.last_heard_ms));
        return format!("look at datanode {} at {}: suspect, not heard for {silent_for}", node.node_id, node.address);
    }
    if leader.members.len() == 1 {
        return "nothing to do; this quorum of one does not survive the loss of its master".to_owned();
    }
    "nothing to do".to_owned()
}

/// Every master runs a binary that knows a higher feature level than the cluster is at.
fn raise_step(answers: &[Answer], leader: &StatusResponse) -> Option<String> {
    let level_of = |id: u64| {
        let own = answers.iter().filter_map(|answer| answer.status.as_ref().ok());
        own.filter(|status| admin::own_node_id(status) == id).map(|status| status.feature_level_max.max(1)).next()
    };
    let known: Option<Vec<u32>> = leader.members.iter().map(|member| level_of(member.node_id)).collect();
    let (lowest, present) = (known?.into_iter().min()?, leader.feature_level.max(1));
    (lowest > present).then(|| {
        format!(
            "all masters know feature level {lowest}, the cluster is at {present}: once you are sure not to go back to the \
             release before, run tidepool feature-level raise"
        )
    })
}

fn screen(answers: &[Answer], leader: Option<&StatusResponse>, step: &str) -> String {
    let mut text = String::new();
    if let Some(any) = leader.or_else(|| answers.iter().find_map(|answer| answer.status.as_ref().ok())) {
        let history = any.identity.as_ref().map_or(0, |identity| identity.history);
        text.push_str(&format!("cluster {}  history {history:016x}  term {}\n\n", cluster_name(any), any.term));
    }
    text.push_str(&masters_table(answers, leader).render(0));
    if let Some(leader) = leader {
        if !leader.nodes.is_empty() {
            text.push('\n');
            text.push_str(&nodes_table(leader).render(0));
        }
        let capacity: u64 = leader.segments.iter().map(|segment| segment.capacity_bytes).sum();
        let free: u64 = leader.segments.iter().map(|segment| segment.free_bytes).sum();
        let per_entry = leader.ops_applied as f64 / leader.entries_applied.max(1) as f64;
        text.push_str(&format!(
            "\n{}, {}; {} of {} used; {}, {}; {per_entry:.1} ops an entry\n",
            count(leader.objects, "object"),
            show_size(leader.object_bytes),
            show_size(capacity - free.min(capacity)),
            show_size(capacity),
            count(leader.leases, "lease"),
            count(leader.grants_open, "open grant"),
        ));
    }
    text.push_str(&format!("\nnext step: {step}\n"));
    text
}

fn masters_table(answers: &[Answer], leader: Option<&StatusResponse>) -> Table {
    let mut table = Table::new(&[
        "master",
        "address",
        "role",
        "term",
        "applied",
        "behind",
        "lag",
        "promotable",
        "heard",
        "snapshot",
    ]);
    for answer in answers {
        match &answer.status {
            Ok(status) => {
                let id = admin::own_node_id(status);
                let last = leader.map_or(status.leader_last_log_index, |leader| leader.last_log_index);
                let member = leader.and_then(|leader| leader.members.iter().find(|member| member.node_id == id));
                let heard = match member {
                    Some(member) if status.role != "leader" => {
                        show_duration(std::time::Duration::from_millis(member.last_heard_ms)) + " ago"
                    }
                    _ => "-".to_owned(),
                };
                table.row([
                    id.to_string(),
                    answer.address.to_string(),
                    status.role.clone(),
                    status.term.to_string(),
                    status.applied_index.to_string(),
                    last.saturating_sub(status.applied_index).to_string(),
                    status.lag_ms.map_or("?".to_owned(), |ms| format!("{ms} ms")),
                    promotable(status),
                    heard,
                    status.snapshot.as_ref().map_or_else(|| "-".to_owned(), published),
                ]);
            }
            Err(_) => {
                let cells = ["?", &answer.address.to_string(), "unreachable", "-", "-", "-", "-", "-", "-", "-"];
                table.row(cells.map(str::to_owned));
            }
        }
    }
    table
}

fn promotable(status: &StatusResponse) -> String {
    match (status.promotable, status.not_promotable_because.as_str()) {
        (true, _) => "yes".to_owned(),
        (false, "") => "no".to_owned(),
        (false, why) => format!("no: {why}"),
    }
}

/// What a master published last, and how long ago.
fn published(snapshot: &SnapshotStatus) -> String {
    let age = || show_duration(std::time::Duration::from_secs(snapshot.age_ms / 1000));
    let what = match (snapshot.url.as_str(), snapshot.published_index) {
        ("", _) => return "-".to_owned(),
        (_, 0) => "none yet".to_owned(),
        (_, index) => format!("{index}, {} ago", age()),
    };
    if snapshot.last_error.is_empty() { what } else { format!("{what}; failing") }
}

fn nodes_table(leader: &StatusResponse) -> Table {
    let mut table =
        Table::new(&["datanode", "address", "host", "state", "segment", "used", "capacity", "largest free"]);
    for node in &leader.nodes {
        let state = if node.suspect { "suspect" } else { "listed" };
        let front = [node.node_id.to_string(), node.address.clone(), node.host_id.clone(), state.to_owned()];
        let own: Vec<_> = leader.segments.iter().filter(|segment| segment.node_id == node.node_id).collect();
        if own.is_empty() {
            table.row(front.clone().into_iter().chain(["none", "-", "-", "-"].map(str::to_owned)));
        }
        for segment in own {
            table.row(front.clone().into_iter().chain([
                if segment.state == "MOUNTED" {
                    segment.name.clone()
                } else {
                    format!("{} {}", segment.name, segment.state)
                },
                show_size(segment.capacity_bytes.saturating_sub(segment.free_bytes)),
                show_size(segment.capacity_bytes),
                show_size(segment.largest_free_extent_bytes),
            ]));
        }
    }
    table
}

fn as_json(answers: &[Answer], leader: Option<&StatusResponse>, step: &str) -> Value {
    let masters: Vec<Value> = answers
        .iter()
        .map(|answer| match &answer.status {
            Ok(status) => json!({
                "node_id": admin::own_node_id(status), "address": answer.address.to_string(), "reachable": true,
                "role": status.role, "term": status.term, "last_log_index": status.last_log_index,
                "committed_index": status.committed_index, "applied_index": status.applied_index,
                "purged_index": status.purged_index, "snapshot_index": status.snapshot_index,
                "state_digest": hex(&status.state_digest), "promotable": status.promotable,
                "not_promotable_because": status.not_promotable_because, "lag_ms": status.lag_ms,
                "leader_index": status.leader_last_log_index, "objects": status.objects,
                "snapshot_age_ms": status.snapshot_age_ms, "feature_level": status.feature_level,
                "feature_level_max": status.feature_level_max,
                "snapshot": status.snapshot.as_ref().map(|snapshot| json!({
                    "url": snapshot.url, "published_index": snapshot.published_index, "age_ms": snapshot.age_ms,
                    "bytes": snapshot.bytes, "location": snapshot.location, "last_error": snapshot.last_error,
                })),
            }),
            Err(error) => json!({
                "address": answer.address.to_string(), "reachable": false, "error": error.message(),
            }),
        })
        .collect();
    let mut all = json!({"masters": masters, "next_step": step});
    if let Some(leader) = leader {
        all["cluster"] = json!(cluster_name(leader));
        all["history"] = json!(format!("{:016x}", leader.identity.as_ref().map_or(0, |identity| identity.history)));
        all["term"] = json!(leader.term);
        all["leader_node_id"] = json!(admin::own_node_id(leader));
        all["objects"] = json!(leader.objects);
        all["object_bytes"] = json!(leader.object_bytes);
        all["leases"] = json!(leader.leases);
        all["grants_open"] = json!(leader.grants_open);
        all["ops_applied"] = json!(leader.ops_applied);
        all["entries_applied"] = json!(leader.entries_applied);
        all["nodes"] = leader
            .nodes
            .iter()
            .map(|node| {
                json!({
                    "node_id": node.node_id, "address": node.address, "host_id": node.host_id, "incarnation": node.incarnation,
                    "suspect": node.suspect, "last_heard_ms": node.last_heard_ms,
                })
            })
            .collect();
        all["segments"] = leader
            .segments
            .iter()
            .map(|segment| {
                json!({
                    "segment_id": SegmentId(segment.segment_id).to_string(), "name": segment.name, "node_id": segment.node_id,
                    "state": segment.state, "capacity_bytes": segment.capacity_bytes, "free_bytes": segment.free_bytes,
                    "processing_bytes": segment.processing_bytes, "complete_bytes": segment.complete_bytes,
                    "retired_bytes": segment.retired_bytes, "largest_free_extent_bytes": segment.largest_free_extent_bytes,
                })
            })
            .collect();
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_proto::v1::{Identity, MemberStatus, NodeStatus};
    use tidepool_proto::{Address, Error, ErrorCode};

    fn master(id: u64, role: &str) -> Answer {
        let status = StatusResponse {
            identity: Some(Identity { node_id: id, ..Identity::default() }),
            role: role.into(),
            members: (1..=3).map(|node_id| MemberStatus { node_id, ..MemberStatus::default() }).collect(),
            ..StatusResponse::default()
        };
        Answer { address: Address::new("h", id as u16).unwrap(), status: Ok(status) }
    }

    fn silent(port: u16) -> Answer {
        Answer { address: Address::new("h", port).unwrap(), status: Err(Error::new(ErrorCode::Unavailable, "refused")) }
    }

    fn step(answers: &[Answer]) -> String {
        next_step(answers, admin::leader(answers).map(|(_, status)| status))
    }

    #[test]
    fn there_is_always_one_next_step_and_it_fits() {
        assert!(step(&[silent(1), silent(2)]).contains("no master answers"));
        assert!(step(&[master(1, "standby"), silent(2), silent(3)]).contains("2 are needed; start h:2, h:3"));
        assert!(step(&[master(1, "candidate"), master(2, "standby"), silent(3)]).contains("no leader yet"));
        assert!(step(&[master(1, "leader"), master(2, "standby"), silent(3)]).contains("restart the master at h:3"));
        let replaced = [master(1, "leader"), master(2, "standby"), master(3, "standby"), silent(9)];
        assert!(step(&replaced).contains("h:9 is none of them"), "{}", step(&replaced));
        let mut answers = [master(1, "leader"), master(2, "standby"), master(3, "standby")];
        assert!(step(&answers).contains("no datanode has joined"));
        let node = NodeStatus {
            node_id: 9,
            address: "d:1".into(),
            suspect: true,
            last_heard_ms: 3000,
            ..NodeStatus::default()
        };
        answers[0].status.as_mut().unwrap().nodes.push(node);
        assert!(step(&answers).contains("datanode 9 at d:1"));
        answers[0].status.as_mut().unwrap().nodes[0].suspect = false;
        assert_eq!(step(&answers), "nothing to do");
        for (answer, level) in answers.iter_mut().zip([2, 2, 1]) {
            answer.status.as_mut().unwrap().feature_level_max = level;
        }
        assert_eq!(step(&answers), "nothing to do", "one master is older");
        answers[2].status.as_mut().unwrap().feature_level_max = 2;
        assert!(step(&answers).contains("feature-level raise"), "{}", step(&answers));
        answers[0].status.as_mut().unwrap().feature_level = 2;
        assert_eq!(step(&answers), "nothing to do");
        answers[1].status.as_mut().unwrap().not_promotable_because = "it is a learner".into();
        let text = screen(&answers, admin::leader(&answers).map(|(_, status)| status), "x");
        assert!(text.contains("next step: x") && text.contains("d:1") && text.contains("leader"), "{text}");
        assert!(text.contains("no: it is a learner"), "{text}");
    }
}
