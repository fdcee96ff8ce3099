//! Traces of requests, and their replay: how much of each prompt's prefix was still cached.
//!
//! `reader` reads the format of the FAST '25 traces, `replay` drives a cache with one and counts, `ceiling` is what no
//! policy can beat by much. A `replay::Cache` is anything that serves requests: a policy alone, or (`store`) a running pool.

pub mod ceiling;
pub mod reader;
pub mod replay;
pub mod store;

use std::path::{Path, PathBuf};

use tidepool_chaos_tests::bench::figure::{Figure, Printer};
use tidepool_master::eviction::{NAMES, by_name};

use crate::exit::Failed;
use replay::PolicyCache;
use store::StoreCache;

/// Options of `tidepool bench trace`.
#[derive(clap::Args, Clone, Debug)]
pub struct TraceOptions {
    /// Trace: one JSON object a line with timestamp, input_length, output_length, hash_ids
    pub file: PathBuf,
    /// Blocks that fit the cache
    #[arg(long, value_name = "N", required = true, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    pub capacity: Vec<u64>,
    /// Eviction policies [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub policy: Vec<String>,
    /// Replay against a pool that is started for it, instead of the policy alone
    #[arg(long)]
    pub store: bool,
    /// Bytes of a block in the pool
    #[arg(long, value_name = "BYTES", default_value_t = 4096, requires = "store", value_parser = clap::value_parser!(u64).range(1..))]
    pub block_bytes: u64,
}

/// Replays a trace against each policy, at each capacity; one line each.
pub async fn run(options: &TraceOptions, binary: &Path, printer: &mut Printer) -> anyhow::Result<()> {
    let names: Vec<&str> = match &options.policy[..] {
        [] => NAMES.to_vec(),
        named => named.iter().map(String::as_str).collect(),
    };
    if let Some(unknown) = names.iter().find(|name| by_name(name).is_none()) {
        return Err(Failed::usage(format!("no eviction policy '{unknown}'; there are {}", NAMES.join(", "))));
    }
    let trace = reader::read(&options.file)?;
    for &capacity in &options.capacity {
        let ceiling = ceiling::farthest_next_use(&trace, capacity).usable_hit_ratio();
        for &name in &names {
            let (what, tally, counted) = if options.store {
                let mut cache = StoreCache::start(binary, name, capacity, options.block_bytes).await?;
                let tally = replay::replay(&trace, &mut cache);
                ("store_usable_hit_ratio", tally, ("failed_puts", cache.failed()))
            } else {
                let mut cache = PolicyCache::new(by_name(name).expect("checked above"), capacity);
                let tally = replay::replay(&trace, &mut cache);
                ("usable_hit_ratio", tally, ("evicted", cache.evicted()))
            };
            printer.print(&Figure {
                suite: "trace",
                case: format!("{what}/{name}/{capacity}"),
                runs: vec![tally.usable_hit_ratio()],
                unit: "ratio",
                ceiling: vec![ceiling],
                extra: vec![
                    ("block_hit_ratio", ratio_value(tally.block_hit_ratio())),
                    (counted.0, counted.1.into()),
                    ("blocks", tally.blocks.into()),
                ],
            });
        }
    }
    Ok(())
}

fn ratio_value(ratio: f64) -> serde_json::Value {
    ((ratio * 1e4).round() / 1e4).into()
}
