//! `tidepool put KEY [FILE]`.

use std::io::Read;
use std::path::Path;

use anyhow::Context as _;
use bytes::Bytes;
use serde_json::json;
use tidepool_client::{PutOptions, ReplicaMode};
use tidepool_proto::{Error, ErrorCode};

use super::{Context, failed};
use crate::args::PutArgs;
use crate::config::value::show_size;
use crate::exit::Exit;
use crate::output::{self, Format};

/// Stores one object. A key that exists is exit code 4 and changes nothing.
pub async fn run(context: &Context, args: &PutArgs) -> anyhow::Result<Exit> {
    let value = read(args.file.as_deref())?;
    let length = value.len() as u64;
    let client = context.client().await?;
    let mode = if args.strict { ReplicaMode::Strict } else { ReplicaMode::BestEffort };
    let options = PutOptions { replica_num: args.replica_num, mode, deadline: Some(context.deadline()) };
    let outcome = match client.put(args.key.clone(), value, options).await {
        Ok(outcome) if outcome.already_existed => {
            let text = "an object has this key already and stays as it is; remove it first to replace it";
            return Err(failed("put", &args.key, &Error::new(ErrorCode::ObjectAlreadyExists, text)));
        }
        Ok(outcome) => outcome,
        Err(error) => return Err(failed("put", &args.key, &error)),
    };
    match context.format {
        Format::Json => output::print_json(&json!({
            "key": args.key, "bytes": length, "copies": outcome.copies, "wanted_copies": args.replica_num,
            "object_id": outcome.object_id,
        }))?,
        Format::Table => {
            eprintln!("put '{}': {}, {} of {} copies", args.key, show_size(length), outcome.copies, args.replica_num);
        }
    }
    Ok(Exit::Success)
}

fn read(file: Option<&Path>) -> anyhow::Result<Bytes> {
    match file {
        Some(path) if path != Path::new("-") => {
            std::fs::read(path).map(Bytes::from).with_context(|| format!("cannot read {}", path.display()))
        }
        _ => {
            let mut bytes = Vec::new();
            std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
            Ok(Bytes::from(bytes))
        }
    }
}
