//! `tidepool feature-level show|raise`: what the quorum's log may hold, which its members' binaries know, and raising it once
//! all of them were upgraded.

use serde_json::json;
use tidepool_proto::v1::{FeatureLevelRequest, FeatureLevelResponse};

use super::Context;
use crate::admin::{self, from_call};
use crate::args::{FeatureLevelArgs, FeatureLevelCommand};
use crate::exit::Exit;
use crate::output::{self, Format, Table};

/// Asks the leader.
pub async fn run(context: &Context, args: &FeatureLevelArgs) -> anyhow::Result<Exit> {
    let request = match args.command {
        FeatureLevelCommand::Show => FeatureLevelRequest { raise: false, to: 0 },
        FeatureLevelCommand::Raise { to } => FeatureLevelRequest { raise: true, to: to.unwrap_or(0) },
    };
    let mut leader = admin::connect_leader(&context.config.addresses("masters"), context.deadline()).await?;
    let answer = leader.feature_level(request).await?.into_inner();
    if let Some(error) = &answer.error {
        return Err(from_call(error).into());
    }
    show(context.format, &answer)?;
    Ok(Exit::Success)
}

fn show(format: Format, answer: &FeatureLevelResponse) -> anyhow::Result<()> {
    match format {
        Format::Json => {
            let members = answer.members.iter().map(|member| {
                json!({"node_id": member.node_id, "address": member.address, "feature_level_max": known(member.feature_level_max)})
            });
            output::print_json(
                &json!({"feature_level": answer.feature_level, "members": members.collect::<Vec<_>>()}),
            )?;
        }
        Format::Table => {
            let mut table = Table::new(&["master", "address", "knows up to"]);
            for member in &answer.members {
                let level = known(member.feature_level_max).map_or("no answer".to_owned(), |level| level.to_string());
                table.row([member.node_id.to_string(), member.address.clone(), level]);
            }
            let text = format!("the cluster is at feature level {}\n\n{}", answer.feature_level, table.render(0));
            output::print(text.as_bytes())?;
        }
    }
    Ok(())
}

fn known(level: u32) -> Option<u32> {
    (level != 0).then_some(level)
}
