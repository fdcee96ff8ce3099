//! `tidepool hot`: the objects that are read most.

use serde_json::json;
use tidepool_proto::v1::{HotObject, ListHotObjectsRequest};

use super::Context;
use crate::admin::{self, from_call};
use crate::args::HotArgs;
use crate::config::value::show_size;
use crate::exit::Exit;
use crate::output::{self, Format, Table, show_key};

/// Asks the leader.
pub async fn run(context: &Context, args: &HotArgs) -> anyhow::Result<Exit> {
    let within = context.deadline();
    let mut leader = admin::connect_leader(&context.config.addresses("masters"), within).await?;
    let answer = leader.list_hot_objects(ListHotObjectsRequest { limit: args.limit }).await?.into_inner();
    if let Some(error) = answer.error {
        return Err(from_call(&error).into());
    }
    show(context.format, &answer.mode, &answer.objects)?;
    Ok(Exit::Success)
}

fn show(format: Format, mode: &str, objects: &[HotObject]) -> anyhow::Result<()> {
    if format == Format::Json {
        let item = |o: &HotObject| {
            json!({
                "tenant": o.tenant, "key": show_key(&o.key), "object_id": o.object_id, "bytes": o.length,
                "reads": o.reads, "replicas": o.replicas, "wanted": o.wanted,
            })
        };
        let objects: Vec<_> = objects.iter().map(item).collect();
        return output::print_json(&json!({"mode": mode, "objects": objects}));
    }
    let mut table = Table::new(&["key", "tenant", "bytes", "reads", "replicas", "wanted"]);
    for o in objects {
        table.row([
            show_key(&o.key),
            o.tenant.clone(),
            show_size(o.length),
            o.reads.to_string(),
            o.replicas.to_string(),
            o.wanted.to_string(),
        ]);
    }
    output::print(table.render(0).as_bytes())
}
