//! `tidepool tenant set|list|drop`.

use serde_json::json;
use tidepool_proto::v1::{DropTenantRequest, ListTenantsRequest, SetTenantRequest, TenantStatus};

use super::Context;
use crate::admin::{self, from_call};
use crate::args::{TenantArgs, TenantCommand};
use crate::config::value::{parse_size, show_size};
use crate::exit::Exit;
use crate::output::{self, Format, Table};

/// Asks the leader.
pub async fn run(context: &Context, args: &TenantArgs) -> anyhow::Result<Exit> {
    let within = context.deadline();
    let mut leader = admin::connect_leader(&context.config.addresses("masters"), within).await?;
    let error = match &args.command {
        TenantCommand::Set { name, bytes, objects, refuse } => {
            let request = SetTenantRequest {
                name: name.clone(),
                quota_bytes: parse_size(bytes).map_err(anyhow::Error::msg)?,
                quota_objects: *objects,
                refuse_over_quota: *refuse,
            };
            leader.set_tenant(request).await?.into_inner().error
        }
        TenantCommand::Drop { name } => {
            leader.drop_tenant(DropTenantRequest { name: name.clone() }).await?.into_inner().error
        }
        TenantCommand::List => {
            let answer = leader.list_tenants(ListTenantsRequest {}).await?.into_inner();
            if answer.error.is_none() {
                show(context.format, &answer.tenants)?;
            }
            answer.error
        }
    };
    match error {
        Some(error) => Err(from_call(&error).into()),
        None => Ok(Exit::Success),
    }
}

fn show(format: Format, tenants: &[TenantStatus]) -> anyhow::Result<()> {
    if format == Format::Json {
        let item = |t: &TenantStatus| {
            json!({
                "name": t.name, "bytes": t.bytes, "objects": t.objects, "quota_bytes": t.quota_bytes,
                "quota_objects": t.quota_objects, "refuse_over_quota": t.refuse_over_quota,
            })
        };
        return output::print_json(&json!(tenants.iter().map(item).collect::<Vec<_>>()));
    }
    let limit = |value: u64, shown: String| if value == 0 { "-".to_owned() } else { shown };
    let mut table = Table::new(&["tenant", "bytes", "of", "objects", "of", "over quota"]);
    for t in tenants {
        table.row([
            t.name.clone(),
            show_size(t.bytes),
            limit(t.quota_bytes, show_size(t.quota_bytes)),
            t.objects.to_string(),
            limit(t.quota_objects, t.quota_objects.to_string()),
            if t.refuse_over_quota { "refuse".to_owned() } else { "evict own".to_owned() },
        ]);
    }
    output::print(table.render(0).as_bytes())
}
