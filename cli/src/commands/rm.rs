//! `tidepool rm KEY...`, and `--prefix`, `--regex`, `--all`.

use serde_json::json;
use tidepool_client::{Client, Matching, RemoveMode};

use super::{Context, report};
use crate::args::RmArgs;
use crate::exit::Exit;
use crate::output::{self, Format, show_key};

/// Removes objects; every key has its own outcome.
pub async fn run(context: &Context, args: &RmArgs) -> anyhow::Result<Exit> {
    let client = context.client().await?;
    let mode = if args.force { RemoveMode::Force } else { RemoveMode::RespectLease };
    if args.keys.is_empty() {
        return matching(context, &client, args, mode).await;
    }
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

/// Removes what matches; what is left is counted and the first of it named.
async fn matching(context: &Context, client: &Client, args: &RmArgs, mode: RemoveMode) -> anyhow::Result<Exit> {
    let matching = Matching {
        prefix: args.prefix.clone().unwrap_or_default().into(),
        regex: args.regex.clone().unwrap_or_default(),
    };
    let done = client.remove_matching(&matching, mode, None, Some(context.deadline())).await?;
    match context.format {
        Format::Json => output::print_json(&json!({
            "removed": done.removed, "leased": done.leased, "unfinished": done.unfinished,
            "left_keys": done.left_keys.iter().map(|key| show_key(key)).collect::<Vec<_>>(),
            "complete": done.next.is_none(),
        }))?,
        Format::Table => eprintln!(
            "removed {} objects; left {} that are leased and {} that are being put",
            done.removed, done.leased, done.unfinished
        ),
    }
    if done.next.is_some() {
        eprintln!("the deadline passed before the end; run it again, or raise --deadline");
    }
    let left = done.leased + done.unfinished > 0 || done.next.is_some();
    Ok(if left { Exit::Partial } else { Exit::Success })
}
