//! `tidepool rm KEY...`.

use serde_json::json;
use tidepool_client::RemoveMode;

use super::{Context, report};
use crate::args::RmArgs;
use crate::exit::Exit;
use crate::output::{self, Format};

/// Removes objects; every key has its own outcome.
pub async fn run(context: &Context, args: &RmArgs) -> anyhow::Result<Exit> {
    let client = context.client().await?;
    let mode = if args.force { RemoveMode::Force } else { RemoveMode::RespectLease };
    let results = client.remove_many(&args.keys, mode, Some(context.deadline())).await;
    if context.format == Format::Json {
        let items: Vec<_> = args
            .keys
            .iter()
            .zip(&results)
            .map(|(key, result)| json!({"key": key, "removed": result.is_ok(), "error": result.as_ref().err().map(|e| e.code().name())}))
            .collect();
        output::print_json(&json!(items))?;
    }
    for (key, result) in args.keys.iter().zip(&results) {
        if let Err(error) = result {
            report("rm", key, error);
        }
    }
    Ok(Exit::of_batch(results.iter().map(|result| result.as_ref().err())))
}
