//! `tidepool snapshot take|list|verify|show`. `take` asks a master; the others read a location and need none.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use tidepool_master::directory::image::parts::PARTS;
use tidepool_master::snapshots::{Candidate, Catalogue, Location, PublishedImage, Rejected};
use tidepool_proto::v1::{StatusResponse, TakeSnapshotRequest, TakeSnapshotResponse};
use tidepool_proto::{Address, Error, ErrorCode};

use super::Context;
use crate::admin::{self, Answer};
use crate::args::{SnapshotCommand, SnapshotFrom};
use crate::config::Origin;
use crate::config::value::{show_duration, show_size};
use crate::exit::{Exit, Failed};
use crate::output::{self, Format, Table, count, hex};

/// How long `take` waits when no deadline was given: an image of a large directory takes minutes.
const TAKE_WAIT: Duration = Duration::from_secs(600);

/// Runs one.
pub async fn run(context: &Context, command: &SnapshotCommand) -> anyhow::Result<Exit> {
    let (from, work): (&SnapshotFrom, fn(&Reading) -> anyhow::Result<Exit>) = match command {
        SnapshotCommand::Take { node } => return take(context, *node).await,
        SnapshotCommand::List { from } => (from, list),
        SnapshotCommand::Verify { from } => (from, verify),
        SnapshotCommand::Show { from } => (from, show),
    };
    let url = match &from.from {
        Some(url) => url.clone(),
        None => context.config.text("master.snapshot_url").to_owned(),
    };
    if url.is_empty() {
        return Err(Failed::usage("say where the snapshots are: --from URL, or the setting master.snapshot_url"));
    }
    let location: Location = url.parse().map_err(Failed::usage)?;
    let (only, format) = (from.snapshot.clone(), context.format);
    // An S3 store runs its own requests and must not be called from an async thread.
    tokio::task::spawn_blocking(move || {
        let catalogue = Catalogue::open(&location)?;
        let mut candidates = catalogue.candidates()?;
        if let Some(only) = &only {
            candidates.retain(|candidate| {
                candidate.place.name() == *only || candidate.place.directory() == only.trim_end_matches('/')
            });
        }
        let found = candidates.into_iter().map(|candidate| (candidate, catalogue.image(&candidate))).collect();
        work(&Reading { url: location.to_string(), found, format })
    })
    .await?
}

/// What lies at a location.
struct Reading {
    url: String,
    found: Vec<(Candidate, Result<PublishedImage, Rejected>)>,
    format: Format,
}

impl Reading {
    fn nothing(&self) -> anyhow::Error {
        let message = format!("nothing that could be restored lies at {}", self.url);
        anyhow::Error::new(Failed { exit: Exit::Corrupt, message })
    }

    /// One object or one table.
    fn print(&self, header: &[&'static str], rows: Vec<(Vec<String>, Value)>) -> anyhow::Result<()> {
        match self.format {
            Format::Json => {
                let snapshots: Vec<Value> = rows.into_iter().map(|(_, value)| value).collect();
                output::print_json(&json!({"from": self.url, "snapshots": snapshots}))?;
            }
            Format::Table => {
                let mut table = Table::new(header);
                rows.into_iter().for_each(|(cells, _)| table.row(cells));
                output::print(table.render(0).as_bytes())?;
            }
        }
        Ok(())
    }
}

async fn take(context: &Context, node: Option<u64>) -> anyhow::Result<Exit> {
    let answers = admin::status_of_all(&context.config.addresses("masters"), context.deadline()).await;
    let address = choose(&answers, node)?;
    let within = match context.config.value("deadline").origin {
        Origin::Default => TAKE_WAIT,
        _ => context.deadline(),
    };
    let mut client = admin::connect(&address, within).await?;
    let remaining_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
    let call = client.take_snapshot(TakeSnapshotRequest { remaining_ms });
    let taken: TakeSnapshotResponse = match tokio::time::timeout(within, call).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => {
            return Err(Error::new(ErrorCode::Unavailable, format!("master {address}: {}", status.message())).into());
        }
        Err(_) => {
            let why = format!("no answer from {address} within {within:?}; it goes on: see tidepool status");
            return Err(Error::new(ErrorCode::DeadlineExceeded, why).into());
        }
    };
    if let Some(error) = &taken.error {
        return Err(admin::from_call(error).into());
    }
    let seconds = taken.elapsed_ms as f64 / 1e3;
    match context.format {
        Format::Json => output::print_json(&json!({
            "index": taken.index, "term": taken.term, "bytes": taken.bytes, "seconds": seconds,
            "location": taken.location, "published": taken.published,
        }))?,
        Format::Table => {
            let size = show_size(taken.bytes);
            let end = if taken.published {
                ""
            } else {
                "\nnot published: set master.snapshot_url to keep snapshots elsewhere"
            };
            let text = format!("entry {}: {size} in {seconds:.2} s, {}{end}\n", taken.index, taken.location);
            output::print(text.as_bytes())?;
        }
    }
    Ok(Exit::Success)
}

/// The master that is to take it: the one that was named, else a standby, else the leader.
fn choose(answers: &[Answer], node: Option<u64>) -> anyhow::Result<Address> {
    let up = || answers.iter().filter_map(|answer| Some((&answer.address, answer.status.as_ref().ok()?)));
    if let Some(node) = node {
        let named = up().find(|(_, status)| admin::own_node_id(status) == node);
        let why = format!("master {node} does not answer; see: tidepool status");
        return Ok(named.ok_or_else(|| Error::new(ErrorCode::Unavailable, why))?.0.clone());
    }
    let is_standby = |status: &StatusResponse| status.role == "standby" && status.promotable;
    let standby = up().filter(|(_, status)| is_standby(status)).max_by_key(|(_, status)| status.applied_index);
    match standby.or_else(|| admin::leader(answers)) {
        Some((address, _)) => Ok(address.clone()),
        None => Err(Error::new(ErrorCode::Unavailable, "no master can take a snapshot; see: tidepool status").into()),
    }
}

fn age(created: SystemTime) -> String {
    let age = created.elapsed().unwrap_or_default();
    show_duration(Duration::from_secs(age.as_secs())) + " ago"
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn named(candidate: &Candidate) -> Value {
    let place = candidate.place;
    json!({
        "path": place.directory(), "cluster": place.cluster.to_string(), "node_id": place.node.0, "index": place.index, "term": place.term,
    })
}

fn list(reading: &Reading) -> anyhow::Result<Exit> {
    let rows = reading.found.iter().map(|(candidate, opened)| {
        let place = candidate.place;
        let mut value = named(candidate);
        let mut cells = vec![place.cluster.to_string(), place.node.to_string(), place.name()];
        match opened {
            Ok(image) => {
                value["bytes"] = image.bytes().into();
                value["objects"] = image.manifest.metadata.rows.into();
                value["created_unix_s"] = seconds(image.descriptor.created).into();
                value["state"] = "whole".into();
                cells.extend([
                    image.manifest.metadata.rows.to_string(),
                    show_size(image.bytes()),
                    age(image.descriptor.created),
                    "whole".to_owned(),
                ]);
            }
            Err(why) => {
                value["state"] = why.reason().into();
                value["why"] = why.to_string().into();
                cells.extend(["-".to_owned(), "-".to_owned(), "-".to_owned(), format!("{}: {why}", why.reason())]);
            }
        }
        (cells, value)
    });
    let header = ["cluster", "node", "snapshot", "objects", "bytes", "created", "state"];
    reading.print(&header, rows.collect())?;
    Ok(Exit::Success)
}

/// Reads everything. The code says whether anything could be restored.
fn verify(reading: &Reading) -> anyhow::Result<Exit> {
    let (mut rows, mut good, mut bad) = (Vec::new(), 0, 0);
    for (candidate, opened) in &reading.found {
        let mut value = named(candidate);
        let mut cells = vec![candidate.place.directory()];
        match opened {
            Ok(image) => {
                let mut is_whole = true;
                for (number, name) in PARTS.into_iter().enumerate() {
                    let state = image.verify_part(number).map_or_else(|why| why.to_string(), |()| "ok".to_owned());
                    is_whole &= state == "ok";
                    value[name] = state.clone().into();
                    cells.push(state);
                }
                let state = match image.load() {
                    Ok(_) => "ok".to_owned(),
                    Err(_) if !is_whole => "not restorable".to_owned(),
                    Err(why) => why.to_string(),
                };
                is_whole &= state == "ok";
                (good, bad) = (good + u64::from(is_whole), bad + u64::from(!is_whole));
                value["state"] = state.clone().into();
                cells.push(state);
            }
            Err(why) => {
                bad += u64::from(!matches!(why, Rejected::Incomplete(_)));
                value["state"] = why.to_string().into();
                cells.extend(["-".to_owned(), "-".to_owned(), "-".to_owned(), why.to_string()]);
            }
        }
        rows.push((cells, value));
    }
    reading.print(&["snapshot", PARTS[0], PARTS[1], PARTS[2], "restores"], rows)?;
    match (good, bad) {
        (0, _) => Err(reading.nothing()),
        (_, 0) => Ok(Exit::Success),
        (_, _) => Ok(Exit::Partial),
    }
}

/// The newest that opens, and what is in it.
fn show(reading: &Reading) -> anyhow::Result<Exit> {
    let skipped: Vec<_> = reading.found.iter().take_while(|(_, opened)| opened.is_err()).collect();
    for (candidate, why) in &skipped {
        if let Err(why) = why {
            eprintln!("passed over {}: {why}", candidate.place);
        }
    }
    let found = reading.found.iter().find_map(|(candidate, opened)| Some((candidate, opened.as_ref().ok()?)));
    let (candidate, image) = found.ok_or_else(|| reading.nothing())?;
    let loaded = image.load().map_err(|why| {
        anyhow::Error::new(Failed {
            exit: Exit::Corrupt,
            message: format!("{}: {why}; see: tidepool snapshot verify", image.location()),
        })
    })?;
    let (counts, tenants) = (loaded.counts(), loaded.tenants().len());
    let descriptor = &image.descriptor;
    match reading.format {
        Format::Json => {
            let mut value = named(candidate);
            value["location"] = image.location().into();
            value["history"] = format!("{:016x}", descriptor.history.0).into();
            value["feature_level"] = descriptor.feature_level.into();
            value["members"] =
                descriptor.members.iter().map(|m| json!({"node_id": m.node.0, "address": m.address})).collect();
            value["build"] = descriptor.build.clone().into();
            value["created_unix_s"] = seconds(descriptor.created).into();
            value["bytes"] = image.bytes().into();
            value["state_digest"] = hex(&image.manifest.digest.to_be_bytes()).into();
            value["objects"] = counts.objects.into();
            value["unfinished_puts"] = counts.processing.into();
            value["object_bytes"] = counts.complete_bytes.into();
            value["segments"] = counts.segments.into();
            value["capacity_bytes"] = counts.capacity_bytes.into();
            value["datanodes"] = counts.nodes.into();
            value["tenants"] = tenants.into();
            output::print_json(&value)?;
        }
        Format::Table => {
            let members: Vec<String> = descriptor.members.iter().map(|m| format!("{}={}", m.node, m.address)).collect();
            let text = format!(
                "{}\n\
                 cluster {}  history {:016x}  feature level {}\n\
                 entry {} of term {}, published by master {} ({}), {}\n\
                 quorum: {}\n\
                 {}, {} of them unfinished; {} in {}, {} in all; {}, {}\n\
                 {} to read, state digest {:032x}\n",
                image.location(),
                descriptor.cluster,
                descriptor.history.0,
                descriptor.feature_level,
                descriptor.index,
                descriptor.term,
                descriptor.node,
                descriptor.build,
                age(descriptor.created),
                members.join(", "),
                count(counts.objects, "object"),
                counts.processing,
                show_size(counts.complete_bytes),
                count(counts.segments, "segment"),
                show_size(counts.capacity_bytes),
                count(counts.nodes, "datanode"),
                count(tenants as u64, "tenant"),
                show_size(image.bytes()),
                image.manifest.digest,
            );
            output::print(text.as_bytes())?;
        }
    }
    Ok(Exit::Success)
}
