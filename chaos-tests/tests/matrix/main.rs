//! The fault matrix with real processes: one test a fault, named after its row. Every fault proves that it happened, a load of separate
//! processes goes on from beginning to end, and what was found is kept for the table (`chaos-tests matrix`).

#[path = "../rig/mod.rs"]
mod rig;

mod contest;
mod datanodes;
mod disks;
mod hosts;
mod members;
mod network;
mod processes;
mod soak;

use std::time::Duration;

use anyhow::Result;
use tidepool_chaos_tests::cluster::ClusterOptions;
use tidepool_chaos_tests::lab::Lab;
use tidepool_chaos_tests::matrix;
use tidepool_chaos_tests::trial::Findings;

/// How often a fault is repeated: `TIDEPOOL_MATRIX_ROUNDS` (scripts/test --full sets it), else `few`.
fn rounds(few: u32) -> u32 {
    std::env::var("TIDEPOOL_MATRIX_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(few)
}

/// Whether this is the long run, which tries what takes long or is likely to be slow on a busy host.
fn is_full() -> bool {
    std::env::var_os("TIDEPOOL_MATRIX_ROUNDS").is_some()
}

/// Service is to be back within a second of the loss of a leader. So many times that is no judgement of this host's speed.
const BACK_WITHIN: Duration = Duration::from_secs(10);

/// Election timeouts that a busy host does not exceed by itself: for rows where no election may happen.
fn calm(pool: &mut ClusterOptions) {
    pool.election = "wan".into();
}

/// Runs a row that needs links or disks of its own; where there can be none, the row says so.
fn in_lab<F>(id: &str, scenario: impl FnOnce(Lab) -> F + Send + 'static)
where
    F: Future<Output = Result<Findings>>,
{
    match Lab::run(scenario) {
        Ok(outcome) => keep(id, outcome),
        Err(refused) => {
            eprintln!("skipped: {refused}");
            matrix::record_not_here(id, &refused.0).unwrap();
        }
    }
}

/// Runs a row on loopback.
fn on_loopback(id: &str, scenario: impl Future<Output = Result<Findings>>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    keep(id, runtime.block_on(scenario));
}

fn keep(id: &str, outcome: Result<Findings>) {
    match outcome {
        Ok(findings) => matrix::record(id, &findings).unwrap(),
        Err(error) => {
            matrix::record_broken(id).unwrap();
            panic!("{id}: {error:#}")
        }
    }
}
