//! `tidepool put KEY [FILE]`.

use std::io::Read;
use std::path::Path;

use anyhow::Context as _;
use bytes::Bytes;
use serde_json::json;
use tidepool_client::{DataType, PutItem, PutOptions, ReplicaMode, SoftPin};
use tidepool_proto::{Error, ErrorCode};

use super::{Context, failed};
use crate::args::{DataTypeArg, PutArgs};
use crate::config::value::{parse_duration, show_size};
use crate::exit::Exit;
use crate::output::{self, Format};

/// Stores one object. A key that exists is exit code 4 and changes nothing.
pub async fn run(context: &Context, args: &PutArgs) -> anyhow::Result<Exit> {
    let value = read(args.file.as_deref())?;
    let length = value.len() as u64;
    let client = context.client().await?;
    let mode = if args.strict { ReplicaMode::Strict } else { ReplicaMode::BestEffort };
    let options = PutOptions {
        replica_num: args.replica_num,
        mode,
        deadline: Some(context.deadline()),
        data_type: args.data_type.into(),
        soft_pin: soft_pin(args)?,
        hard_pin: args.hard_pin,
        preferred_segments: args.segments.clone(),
        replace: args.replace,
        ..PutOptions::default()
    };
    let group = Bytes::from(args.group.clone());
    let item = PutItem { key: args.key.clone().into(), value: vec![value], group };
    let outcome = client.put_many(vec![item], options).await.remove(0);
    let outcome = match outcome {
        Ok(outcome) if outcome.already_existed => {
            let text = "an object has this key already and stays as it is; --replace replaces it";
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

fn soft_pin(args: &PutArgs) -> anyhow::Result<SoftPin> {
    Ok(match args.soft_pin.as_deref() {
        None => SoftPin::Preserve,
        Some("") => SoftPin::Enable(None),
        Some(ttl) => SoftPin::Enable(Some(parse_duration(ttl).map_err(anyhow::Error::msg)?)),
    })
}

impl From<DataTypeArg> for DataType {
    fn from(arg: DataTypeArg) -> DataType {
        match arg {
            DataTypeArg::Unknown => DataType::Unknown,
            DataTypeArg::Kvcache => DataType::Kvcache,
            DataTypeArg::Tensor => DataType::Tensor,
            DataTypeArg::Weight => DataType::Weight,
            DataTypeArg::Sample => DataType::Sample,
            DataTypeArg::Activation => DataType::Activation,
            DataTypeArg::Gradient => DataType::Gradient,
            DataTypeArg::OptimizerState => DataType::OptimizerState,
            DataTypeArg::Metadata => DataType::Metadata,
            DataTypeArg::General => DataType::General,
        }
    }
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
