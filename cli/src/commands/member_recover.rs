//! `tidepool member recover`: offline, on the data directory of a stopped master. Says what is known, and only with
//! --accept-data-loss makes that master a quorum of one; with --skip has an op left out that stops every master; with
//! --start-over has its state built anew from what a majority vouched for.

use std::path::Path;

use serde_json::json;
use tidepool_master::restore::go_on;
use tidepool_raft::{ClusterIdentity, Facts, LastOne, OpPlace, PayloadHash, StoppedAt};

use super::Context;
use crate::exit::{Exit, Failed};
use crate::output::{self, Format};

/// Looks, tells, and changes the directory if that was asked for.
pub fn run(context: &Context, accept_data_loss: bool, data_dir: Option<&Path>) -> anyhow::Result<Exit> {
    let configured = context.config.path("master.data_dir");
    let directory = data_dir.unwrap_or(&configured);
    let found = LastOne::open(directory).map_err(|error| error.0)?;
    let facts = found.facts.clone();
    if !accept_data_loss {
        output::print(describe(&facts).as_bytes())?;
        return Err(Failed::usage("nothing was changed; to go on with this node alone, add --accept-data-loss"));
    }
    let payload = go_on(&found)?;
    let now = found.go_on_alone(payload).map_err(|error| error.0)?;
    match context.format {
        Format::Json => output::print_json(&as_json(&facts, &now))?,
        Format::Table => {
            output::print(describe(&facts).as_bytes())?;
            output::print(next_steps(&facts, &now).as_bytes())?;
        }
    }
    Ok(Exit::Success)
}

/// Has an op left out from the next start on, if its hash is the one given; without a hash only tells it.
pub fn skip(
    context: &Context,
    place: OpPlace,
    hash: Option<PayloadHash>,
    data_dir: Option<&Path>,
) -> anyhow::Result<Exit> {
    let configured = context.config.path("master.data_dir");
    let directory = data_dir.unwrap_or(&configured);
    let found = tidepool_raft::skip(directory, place, hash).map_err(|error| error.0)?;
    let stopped = StoppedAt::read(directory)?.filter(|stopped| stopped.place == place);
    let why = stopped.map_or_else(|| "this master did not stop there (yet)".to_owned(), |stopped| stopped.message);
    if hash.is_none() {
        output::print(format!("entry {} has hash {found}; {why}\n", place.index).as_bytes())?;
        return Err(Failed::usage(format!("nothing was changed; to leave out op {place}, add --hash {found}")));
    }
    match context.format {
        Format::Json => output::print_json(&json!({ "op": place.to_string(), "hash": found.to_string(), "message": why }))?,
        Format::Table => output::print(
            format!(
                "op {place} of entry {found} is left out by this master from now on: {why}\n\
                 next: the same command on the other masters, at least a majority; then start them. One that does not leave it out\n\
                 stops there again, or, if it had applied it, starts over from what the majority agrees on\n"
            )
            .as_bytes(),
        )?,
    }
    Ok(Exit::Success)
}

/// Has the next start begin with the last agreed snapshot and apply the log again.
pub fn start_over(context: &Context, data_dir: Option<&Path>) -> anyhow::Result<Exit> {
    let configured = context.config.path("master.data_dir");
    let directory = data_dir.unwrap_or(&configured);
    tidepool_raft::start_over(directory).map_err(|error| error.0)?;
    let shown = directory.display();
    match context.format {
        Format::Json => output::print_json(&json!({ "data_dir": shown.to_string(), "starts_over": true }))?,
        Format::Table => output::print(
            format!(
                "noted in {shown}/DIVERGED: the master starts over from the last snapshot that a majority vouched for\n\
                 next: start it, and see in `tidepool status` and in its log whether the masters agree\n"
            )
            .as_bytes(),
        )?,
    }
    Ok(Exit::Success)
}

fn describe(facts: &Facts) -> String {
    let others: Vec<String> = facts.others.iter().map(|m| format!("node {} at {}", m.node_id, m.address)).collect();
    format!(
        "node {} at {}, {}\n\
         others: {}\n\
         log: last entry {} of term {}; known to be committed up to {}; newest snapshot up to {}\n\
         may be missing: whatever the others acknowledged after entry {}; this node cannot know how much that is\n\
         may be kept: {}\n",
        facts.node_id,
        facts.address,
        facts.cluster,
        if others.is_empty() { "none".to_owned() } else { others.join(", ") },
        facts.last_index,
        facts.last_term,
        facts.committed_index,
        facts.snapshot_index,
        facts.last_index,
        match facts.committed_index {
            committed if committed < facts.last_index => {
                format!("entries {} to {}, which may never have been acknowledged", committed + 1, facts.last_index)
            }
            _ => "nothing that was never acknowledged".to_owned(),
        },
    )
}

fn next_steps(facts: &Facts, now: &ClusterIdentity) -> String {
    let (id, address) = (facts.node_id, &facts.address);
    format!(
        "done: node {id} is a quorum of one, {now}\n\
         next: never start the other masters again with their data directories; start this one with --members {id}={address}; \
         datanodes and clients follow by themselves, with what they hold; take in new masters under new ids (tidepool member add)\n"
    )
}

fn as_json(facts: &Facts, now: &ClusterIdentity) -> serde_json::Value {
    json!({
        "node_id": facts.node_id.0, "address": facts.address,
        "cluster_before": facts.cluster.cluster.to_string(), "history_before": format!("{:016x}", facts.cluster.history.0),
        "cluster": now.cluster.to_string(), "history": format!("{:016x}", now.history.0),
        "others": facts.others.iter().map(|m| json!({"node_id": m.node_id.0, "address": m.address.to_string()})).collect::<Vec<_>>(),
        "last_index": facts.last_index, "last_term": facts.last_term, "committed_index": facts.committed_index,
        "snapshot_index": facts.snapshot_index,
    })
}
