//! `tidepool pin KEY...`.

use serde_json::json;
use tidepool_client::SoftPin;

use super::{Context, report};
use crate::args::PinArgs;
use crate::config::value::parse_duration;
use crate::exit::Exit;
use crate::output::{self, Format};

/// Sets or ends soft pins; every key has its own outcome.
pub async fn run(context: &Context, args: &PinArgs) -> anyhow::Result<Exit> {
    let pin = match (&args.ttl, args.off) {
        (_, true) => SoftPin::Disable,
        (Some(ttl), _) => SoftPin::Enable(Some(parse_duration(ttl).map_err(anyhow::Error::msg)?)),
        (None, false) => SoftPin::Enable(None),
    };
    let client = context.client().await?;
    let results = client.pin_many(&args.keys, pin, Some(context.deadline())).await;
    if context.format == Format::Json {
        let item = |(key, result): (&String, &Result<(), tidepool_proto::Error>)| json!({"key": key, "done": result.is_ok(), "error": result.as_ref().err().map(|e| e.code().name())});
        output::print_json(&json!(args.keys.iter().zip(&results).map(item).collect::<Vec<_>>()))?;
    }
    for (key, result) in args.keys.iter().zip(&results) {
        if let Err(error) = result {
            report("pin", key, error);
        }
    }
    Ok(Exit::of_batch(results.iter().map(|result| result.as_ref().err())))
}
