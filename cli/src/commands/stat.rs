//! `tidepool stat KEY... [--where]`: looks without touching. `--where` answers in two levels: what the directory
//! knows of the object, then each copy with its node, segment and place.

use serde_json::{Value, json};
use tidepool_client::ObjectStat;
use tidepool_proto::{ObjectId, ReplicaId, SegmentId, v1};

use super::{Context, report};
use crate::args::StatArgs;
use crate::config::value::{show_duration, show_size};
use crate::exit::Exit;
use crate::output::{self, Format, Table, count, show_key, show_type};

/// Shows objects; every key has its own outcome.
pub async fn run(context: &Context, args: &StatArgs) -> anyhow::Result<Exit> {
    let client = context.client().await?;
    let results = client.stat_many(&args.keys, Some(context.deadline())).await;
    let found =
        || args.keys.iter().zip(&results).filter_map(|(key, result)| result.as_ref().ok().map(|stat| (key, stat)));
    match context.format {
        Format::Json => {
            output::print_json(&Value::from(found().map(|(key, stat)| as_json(key, stat)).collect::<Vec<_>>()))?
        }
        Format::Table if args.where_ => {
            let text: String = found().map(|(key, stat)| in_two_levels(key, stat)).collect();
            output::print(text.as_bytes())?;
        }
        Format::Table => output::print(overview(found()).as_bytes())?,
    }
    for (key, result) in args.keys.iter().zip(&results) {
        if let Err(error) = result {
            report("stat", key, error);
        }
    }
    Ok(Exit::of_batch(results.iter().map(|result| result.as_ref().err())))
}

fn milliseconds(ms: u64) -> String {
    show_duration(std::time::Duration::from_millis(ms))
}

fn overview<'a>(found: impl Iterator<Item = (&'a String, &'a ObjectStat)>) -> String {
    let mut table = Table::new(&["key", "size", "state", "copies", "leases", "age"]);
    for (key, stat) in found {
        let copies = stat.replicas.iter().filter(|replica| replica.replica.listed).count();
        table.row([
            key.clone(),
            show_size(stat.length),
            stat.state.clone(),
            copies.to_string(),
            stat.leases.to_string(),
            milliseconds(stat.age_ms),
        ]);
    }
    if table.is_empty() { String::new() } else { table.render(0) }
}

/// The two levels.
fn in_two_levels(key: &str, stat: &ObjectStat) -> String {
    let lease = match stat.leases {
        0 => "no lease".to_owned(),
        leases => format!(
            "{}, the last ends in {}",
            count(leases.into(), "lease"),
            milliseconds(stat.lease_remaining_ms.into())
        ),
    };
    let mut text = format!(
        "{key}\n  directory  object {}, {}, {}, age {}, {lease}\n",
        ObjectId(stat.object_id),
        stat.state,
        show_size(stat.length),
        milliseconds(stat.age_ms),
    );
    let pin = match (stat.hard_pinned, stat.soft_pin_remaining_ms) {
        (true, _) => "hard-pinned".to_owned(),
        (false, 0) => "not pinned".to_owned(),
        (false, left) => format!("soft-pinned for {}", milliseconds(left)),
    };
    let group =
        if stat.group.is_empty() { "no group".to_owned() } else { format!("group '{}'", show_key(&stat.group)) };
    text.push_str(&format!("  kept       {pin}, {group}, type {}\n", show_type(stat.data_type)));
    if stat.replicas.is_empty() {
        text.push_str("  copies     none\n");
    }
    for copy in &stat.replicas {
        let at = &copy.replica;
        let address = if copy.address.is_empty() { "address unknown" } else { &copy.address };
        let host = if copy.host_id.is_empty() { String::new() } else { format!(" on host {}", copy.host_id) };
        let note = if at.listed { "" } else { ", not listed: its node is suspect" };
        text.push_str(&format!(
            "  copy       {} {}: node {} at {address}{host}, segment {} ({}), bytes {}..{}{note}\n",
            ReplicaId(at.replica_id),
            kind(at.kind),
            at.node_id,
            at.segment_name,
            SegmentId(at.segment_id),
            at.offset,
            at.offset.saturating_add(at.length),
        ));
    }
    text
}

fn kind(kind: i32) -> &'static str {
    match v1::ReplicaKind::try_from(kind) {
        Ok(v1::ReplicaKind::Memory) => "MEMORY",
        Ok(v1::ReplicaKind::LocalDisk) => "LOCAL_DISK",
        _ => "UNKNOWN",
    }
}

fn as_json(key: &str, stat: &ObjectStat) -> Value {
    let copies: Vec<Value> = stat
        .replicas
        .iter()
        .map(|copy| {
            let at = &copy.replica;
            json!({
                "replica_id": at.replica_id, "kind": kind(at.kind), "node_id": at.node_id, "address": copy.address,
                "host_id": copy.host_id, "segment_id": at.segment_id, "segment_name": at.segment_name,
                "offset": at.offset, "length": at.length, "listed": at.listed,
            })
        })
        .collect();
    json!({
        "key": key, "object_id": stat.object_id, "bytes": stat.length, "state": stat.state, "leases": stat.leases,
        "lease_remaining_ms": stat.lease_remaining_ms, "age_ms": stat.age_ms, "copies": copies,
        "type": show_type(stat.data_type), "hard_pinned": stat.hard_pinned,
        "soft_pin_remaining_ms": stat.soft_pin_remaining_ms, "group": show_key(&stat.group),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use tidepool_client::{DataType, ReplicaStat};

    #[test]
    fn the_two_levels_name_directory_and_every_copy() {
        let replica = v1::ReplicaStat {
            replica_id: 5 << 14 | 1,
            segment_id: 3 << 14,
            segment_name: "dram-0".into(),
            node_id: 7,
            offset: 64,
            length: 128,
            kind: v1::ReplicaKind::Memory as i32,
            listed: false,
        };
        let stat = ObjectStat {
            object_id: 5 << 14,
            length: 10,
            state: "COMPLETE".into(),
            replicas: vec![ReplicaStat { replica, address: "h1:50052".into(), host_id: "rack1".into() }],
            leases: 1,
            lease_remaining_ms: 1500,
            age_ms: 20_000,
            data_type: DataType::Kvcache,
            hard_pinned: false,
            soft_pin_remaining_ms: 0,
            group: Bytes::new(),
        };
        let text = in_two_levels("k", &stat);
        for part in
            ["directory  object 5.0.0", "COMPLETE", "1 lease,", "h1:50052 on host rack1", "bytes 64..192", "suspect"]
        {
            assert!(text.contains(part), "{part} not in\n{text}");
        }
        assert_eq!(as_json("k", &stat)["copies"][0]["segment_name"], "dram-0");
    }
}
