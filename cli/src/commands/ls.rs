//! `tidepool ls [PREFIX]`.

use std::time::Instant;

use bytes::Bytes;
use serde_json::json;
use tidepool_client::{ListFilter, Matching};

use super::Context;
use crate::args::LsArgs;
use crate::config::value::show_size;
use crate::exit::Exit;
use crate::output::{self, Format, Table, show_key, show_type};

/// Most objects asked for at a time.
const PAGE: u64 = 1000;

/// Lists keys, sorted. The directory pages in the order of its own index, so that with more keys than the limit the
/// ones shown are some of them, the same ones each time.
pub async fn run(context: &Context, args: &LsArgs) -> anyhow::Result<Exit> {
    let client = context.client().await?;
    let until = Instant::now() + context.deadline();
    let filter = ListFilter {
        matching: Matching { prefix: args.prefix.clone().into(), regex: args.regex.clone() },
        data_type: args.data_type.map(Into::into),
    };
    let mut objects = Vec::new();
    let mut after = Bytes::new();
    let mut more = true;
    while more && (objects.len() as u64) < args.limit {
        let limit = PAGE.min(args.limit - objects.len() as u64) as u32;
        let left = until.saturating_duration_since(Instant::now());
        let page = client.list_matching(&filter, limit, &after, Some(left)).await?;
        // A page may be empty and yet not the last: the directory looks at a bounded number of keys for each.
        more = page.more;
        after = page.next;
        objects.extend(page.objects);
    }
    objects.sort_by(|one, other| one.key.cmp(&other.key));
    match context.format {
        Format::Json => {
            let items: Vec<_> = objects
                .iter()
                .map(|o| {
                    json!({
                        "key": show_key(&o.key), "bytes": o.length, "copies": o.replicas, "object_id": o.object_id,
                        "type": show_type(o.data_type), "hard_pinned": o.hard_pinned,
                    })
                })
                .collect();
            output::print_json(&json!({"objects": items, "more": more}))?;
        }
        Format::Table if args.long => {
            let mut table = Table::new(&["size", "copies", "type", "pin", "key"]);
            for o in &objects {
                let pin = if o.hard_pinned { "hard" } else { "-" };
                let (copies, kind) = (o.replicas.to_string(), show_type(o.data_type).to_owned());
                table.row([show_size(o.length), copies, kind, pin.to_owned(), show_key(&o.key)]);
            }
            output::print(table.render(0).as_bytes())?;
        }
        Format::Table => {
            let text: String = objects.iter().map(|object| show_key(&object.key) + "\n").collect();
            output::print(text.as_bytes())?;
        }
    }
    if more && context.format == Format::Table {
        eprintln!("there are more; raise --limit, or name a longer prefix");
    }
    Ok(Exit::Success)
}
