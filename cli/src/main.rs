//! The one `tidepool` binary: roles (`dev`, `master`, `datanode`), objects (`put`, `get`, ...), looking (`status`,
//! `stat`, `doctor`, ...), breaking and measuring (`drill`, `bench`).
//!
//! Start with `args` for the command line, `config` for where values come from, `commands` for what each does.
//! This crate holds no logic of the store: it starts parts, asks them and prints.

mod admin;
mod anew;
mod args;
mod commands;
mod config;
mod exit;
mod http;
mod logging;
mod output;
mod panic;
mod port_file;
mod process;
mod signals;
mod snapshot_bench;
mod trace;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::args::{Cli, Command, ConfigCommand};
use crate::commands::Context;
use crate::config::{Config, Layers};
use crate::exit::{Exit, Failed};
use crate::logging::LogControl;

/// How long tasks that are left may delay the end of the process.
const RUNTIME_STOP: Duration = Duration::from_secs(2);
/// What a role logs unless told otherwise: openraft's own account of every vote is for its developers.
const ROLE_FILTER: &str = "info,openraft=warn";

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match &cli.command {
        // Before any thread exists: it may execute another program in place.
        Command::LoadWorker(worker) => tidepool_chaos_tests::worker::run(worker).map(|()| Exit::Success),
        _ => start(cli),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            let (exit, message) = exit::classify(&error);
            eprintln!("error: {message}");
            exit.into()
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<Exit> {
    let config = resolve(&cli).map_err(|error| Failed::usage(format!("{error:#}")))?;
    for warning in config.warnings() {
        eprintln!("warning: {warning}");
    }
    let role = match &cli.command {
        Command::Dev(_) => Some("dev".to_owned()),
        Command::Master(_) => Some(format!("master-{}", config.integer("master.node_id"))),
        Command::Datanode(_) => Some(format!("datanode@{}", config.text("datanode.listen"))),
        _ => None,
    };
    let filter = match (config.text("log_filter"), &role) {
        ("", Some(_)) => ROLE_FILTER,
        ("", None) => "warn",
        (filter, _) => filter,
    };
    let log = logging::start(filter, config.text("log_format"), role.as_deref().unwrap_or(""))?;
    if role.is_some() {
        panic::abort_on_panic();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| anyhow::anyhow!("cannot start the runtime: {error}"))?;
    let mut temporary = None;
    let result = runtime.block_on(run(cli, config, log, &mut temporary));
    // Only when nothing runs any more can a temporary data directory go.
    runtime.shutdown_timeout(RUNTIME_STOP);
    if let Some(Err(error)) = temporary.map(tempfile::TempDir::close) {
        eprintln!("warning: the temporary directory was not removed: {error}");
    }
    result
}

fn resolve(cli: &Cli) -> anyhow::Result<Config> {
    let mut flags = cli.shared.0.0.clone();
    match &cli.command {
        Command::Master(args) => flags.extend(args.flags.0.0.clone()),
        Command::Datanode(args) => flags.extend(args.flags.0.0.clone()),
        _ => {}
    }
    let text = |name: std::ffi::OsString| name.into_string().ok();
    let environment = std::env::vars_os().filter_map(|(name, value)| Some((text(name)?, text(value)?))).collect();
    Layers { file: cli.config.clone(), environment, flags }.resolve()
}

async fn run(
    cli: Cli,
    config: Config,
    log: LogControl,
    temporary: &mut Option<tempfile::TempDir>,
) -> anyhow::Result<Exit> {
    let context = Context { config, format: cli.output };
    match cli.command {
        Command::Dev(args) => commands::dev::run(&args, log, temporary).await,
        Command::Master(args) => commands::master::run(&context.config, &args.role, log).await,
        Command::Datanode(args) => commands::datanode::run(&context.config, &args.role, log).await,
        Command::Put(args) => commands::put::run(&context, &args).await,
        Command::Get(args) => commands::get::run(&context, &args).await,
        Command::Rm(args) => commands::rm::run(&context, &args).await,
        Command::Ls(args) => commands::ls::run(&context, &args).await,
        Command::Stat(args) => commands::stat::run(&context, &args).await,
        Command::Status => commands::status::run(&context).await,
        Command::Pin(args) => commands::pin::run(&context, &args).await,
        Command::Hot(args) => commands::hot::run(&context, &args).await,
        Command::Task(args) => commands::task::run(&context, &args).await,
        Command::Tenant(args) => commands::tenant::run(&context, &args).await,
        Command::FeatureLevel(args) => commands::feature_level::run(&context, &args).await,
        Command::Member(args) => commands::member::run(&context, &args).await,
        Command::Snapshot(args) => commands::snapshot::run(&context, &args.command).await,
        Command::Plan(args) => commands::plan::run(&context, &args),
        Command::TransferLeader(args) => commands::transfer_leader::run(&context, &args).await,
        Command::Doctor(args) => commands::doctor::run(&context, &args).await,
        Command::Config(args) => match args.command {
            ConfigCommand::Show => commands::config::show(&context),
            ConfigCommand::Reference => commands::config::reference(),
        },
        Command::Completion { shell } => commands::completion::run(shell),
        Command::Explain { code } => commands::explain::run(&code),
        Command::Bench(args) => commands::drill::bench(&context, &args).await,
        Command::Drill(args) => commands::drill::run(&context, &args.command).await,
        Command::Demo(options) => commands::drill::demo(&options).await,
        Command::LoadWorker(_) => unreachable!("handled before the runtime"),
    }
}
