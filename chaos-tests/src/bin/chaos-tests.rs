//! `chaos-tests`: a pool in a laboratory to look at, what killed laboratories left, the fault matrix, and the soak.
//!
//! The `tidepool` binary is the one beside this one, or `TIDEPOOL_BINARY`.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions, Ground};
use tidepool_chaos_tests::lab::{Lab, Network, cleanup};
use tidepool_chaos_tests::matrix;
use tidepool_chaos_tests::soak::{self, SoakOptions};
use tidepool_chaos_tests::worker::{self, WorkerArgs};

/// Process chaos.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run a pool in namespaces of its own until Ctrl-C, and say how to reach and break it
    Cluster {
        /// Give every master a file system of so many MiB
        #[arg(long)]
        disk_mib: Option<u64>,
    },
    /// Remove what laboratories of processes that are gone have left
    Cleanup,
    /// Print the page of the fault matrix, from the runs of `cargo nextest run --test matrix`
    Matrix {
        /// Where the runs are
        #[arg(long)]
        runs: Option<PathBuf>,
    },
    /// Mix all faults for a while, and judge
    Soak(SoakOptions),
    /// Run seeds of the simulation: `sim --seeds 1..501`, and whatever else `tidepool-sim` takes
    Sim {
        /// Arguments of `tidepool-sim`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    #[command(hide = true)]
    LoadWorker(WorkerArgs),
}

fn binary() -> Result<PathBuf> {
    match std::env::var("TIDEPOOL_BINARY") {
        Ok(path) => Ok(path.into()),
        Err(_) => sibling("tidepool", "tidepool-cli"),
    }
}

fn sibling(name: &str, package: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("this binary's own path")?;
    let path = own.with_file_name(name);
    anyhow::ensure!(path.exists(), "{} is missing; build it: cargo build --release -p {package}", path.display());
    Ok(path)
}

fn simulate(arguments: Vec<String>) -> Result<()> {
    let program = sibling("tidepool-sim", "tidepool-sim")?;
    Err(Command::new(&program).args(arguments).exec()).with_context(|| format!("executing {}", program.display()))
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Task::Cluster { disk_mib } => show_cluster(disk_mib),
        Task::Cleanup => cleanup::run().map(|removed| {
            removed.iter().for_each(|path| println!("removed {}", path.display()));
            eprintln!("{} removed", removed.len());
        }),
        Task::Matrix { runs } => print_matrix(runs),
        Task::Soak(options) => run_soak(options),
        Task::Sim { arguments } => simulate(arguments),
        Task::LoadWorker(arguments) => worker::run(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print_matrix(runs: Option<PathBuf>) -> Result<()> {
    let runs = match runs {
        Some(runs) => runs,
        None => matrix::directory()?,
    };
    print!("{}", matrix::page(&runs)?);
    Ok(())
}

fn run_soak(options: SoakOptions) -> Result<()> {
    let findings = soak::run(options, &binary()?)??;
    println!("{} puts acknowledged, {} lost; everything held", findings.acknowledged, findings.lost);
    Ok(())
}

fn show_cluster(disk_mib: Option<u64>) -> Result<()> {
    let binary = binary()?;
    Lab::run(async move |lab| {
        let mut options = ClusterOptions::new(&binary, &lab.directory().join("pool"));
        options.disk_bytes = disk_mib.map(|mib| mib << 20);
        options.ground = Ground::Lab(lab.clone());
        let cluster = Cluster::start(options).await?;
        let namespaces = matches!(lab.network(), Network::Namespaces(_));
        if namespaces {
            println!("in namespaces of process {}; enter them: nsenter -m -n -t {}", std::process::id(), inside());
        }
        println!("  tidepool --masters {} status", cluster.masters_text());
        for role in cluster.masters.iter().chain(&cluster.datanodes) {
            println!(
                "  {}: process {}, {}, data {}, log {}",
                role.name(),
                role.id().unwrap_or_default(),
                role.rpc,
                role.data_dir.display(),
                role.log().display()
            );
        }
        if namespaces {
            println!(
                "  cut a link: ip link set master-1 down; a pair: nft add element bridge tidepool cut '{{ master-1 . master-2 }}'"
            );
        }
        tokio::signal::ctrl_c().await.context("waiting for Ctrl-C")
    })?
}

/// A thread that is in the laboratory.
fn inside() -> String {
    let own = std::fs::read_link("/proc/thread-self").ok();
    own.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned())).unwrap_or_default()
}
