//! `tidepool transfer-leader [--to NODE_ID]`.

use serde_json::json;
use tidepool_proto::{Error, ErrorCode};

use super::Context;
use crate::admin;
use crate::args::TransferArgs;
use crate::exit::Exit;
use crate::output::{self, Format};

/// Hands leadership over in order; the old leader keeps leading when no standby can take it.
pub async fn run(context: &Context, args: &TransferArgs) -> anyhow::Result<Exit> {
    let within = context.deadline();
    let answers = admin::status_of_all(&context.config.addresses("masters"), within).await;
    let Some((address, _)) = admin::leader(&answers) else {
        let text = "no master of the quorum says that it leads; see: tidepool status";
        return Err(Error::new(ErrorCode::Unavailable, text).into());
    };
    let done = admin::transfer_leader(address, args.to.unwrap_or(0), within).await?;
    match context.format {
        Format::Json => {
            output::print_json(&json!({"leader_node_id": done.leader_node_id, "elapsed_ms": done.elapsed_ms}))?
        }
        Format::Table => {
            output::print(format!("master {} leads after {} ms\n", done.leader_node_id, done.elapsed_ms).as_bytes())?
        }
    }
    Ok(Exit::Success)
}
