//! `tidepool bench`: figures of a pool of real processes, beside a ceiling measured in the same run.

pub mod directory;
pub mod figure;
mod overflow;
pub mod pressure;
pub mod put_get;
pub mod raw_socket;
mod scrape;

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::byte_size::ByteSize;
use crate::cluster::{Cluster, ClusterOptions};
use crate::output::{Format, WorkDir};
use figure::Printer;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Suite {
    /// Payload throughput of batched puts and gets over TCP, against a raw socket.
    PutGet,
    /// The master: replicated puts a second, CPU of exist, memory per object.
    Directory,
    /// Puts into a full pool: how many succeed, and how slow the slowest are.
    Pressure,
}

/// Options of `tidepool bench SUITE`.
#[derive(Clone, Debug, clap::Args)]
pub struct BenchOptions {
    /// What to measure
    #[arg(value_enum)]
    pub suite: Suite,
    /// Measured runs of each case
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    pub case: String,
    /// Objects for the memory figure of the directory suite and for the overflow of the pressure suite
    #[arg(long, default_value_t = 1_000_000)]
    pub objects: u64,
    /// DRAM of each of the two datanodes
    #[arg(long, default_value = "1GiB")]
    pub segment: ByteSize,
    /// Data directories and logs go here; without it a temporary directory is used and removed
    #[arg(long)]
    pub work_dir: Option<PathBuf>,
}

/// Runs a suite against a pool of its own; one line a case.
pub async fn run(options: &BenchOptions, binary: &Path, format: Format) -> Result<()> {
    let work_dir = WorkDir::open(options.work_dir.as_deref(), "bench")?;
    if options.suite == Suite::Pressure {
        return pressure::run(options, binary, work_dir.path(), &mut Printer::new(format)).await;
    }
    let mut cluster_options = ClusterOptions::new(binary, &work_dir.path().join("pool"));
    cluster_options.segment_bytes = options.segment.0;
    // An election in the middle of a run would be measured as throughput.
    cluster_options.election = "default".into();
    let mut cluster = Cluster::start(cluster_options).await?;
    let mut printer = Printer::new(format);
    match options.suite {
        Suite::PutGet => put_get::run(options, binary, &mut cluster, work_dir.path(), &mut printer).await,
        Suite::Directory => directory::run(options, &mut cluster, work_dir.path(), &mut printer).await,
        Suite::Pressure => unreachable!("it starts its own pools"),
    }
}
