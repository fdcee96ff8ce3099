//! `tidepool drill`, `tidepool bench` and the demo: wired to the library that runs this binary as separate processes.

use anyhow::Context as _;
use tidepool_chaos_tests::bench::figure::Printer;
use tidepool_chaos_tests::demo::DemoOptions;
use tidepool_chaos_tests::drill;
use tidepool_chaos_tests::output::{Format as ReportFormat, Verdict};

use super::Context;
use crate::args::{BenchArgs, BenchCommand, DrillCommand};
use crate::exit::{Exit, Failed};
use crate::output::Format;

fn binary() -> anyhow::Result<std::path::PathBuf> {
    std::env::current_exe().context("cannot find this binary's own path")
}

fn report_format(format: Format) -> ReportFormat {
    match format {
        Format::Table => ReportFormat::Table,
        Format::Json => ReportFormat::Json,
    }
}

fn exit(verdict: Verdict) -> Exit {
    match verdict {
        Verdict::Held => Exit::Success,
        Verdict::Broken => Exit::Failure,
    }
}

/// Breaks something; exit code 1 when something that had to hold did not.
pub async fn run(context: &Context, command: &DrillCommand) -> anyhow::Result<Exit> {
    let (fault, options) = command.parts();
    let target = drill::Target {
        masters: context.config.addresses("masters"),
        tenant: context.config.text("tenant").to_owned(),
    };
    if !options.spawn && !options.live.yes {
        return Err(Failed::usage(drill::plan(fault, options, &target).await?));
    }
    let verdict = drill::run(fault, options, &target, &binary()?, report_format(context.format)).await?;
    Ok(exit(verdict))
}

/// Measures.
pub async fn bench(context: &Context, args: &BenchArgs) -> anyhow::Result<Exit> {
    let format = report_format(context.format);
    match (&args.command, &args.pool) {
        (Some(BenchCommand::Trace(options)), _) => {
            crate::trace::run(options, &binary()?, &mut Printer::new(format)).await?;
        }
        (Some(BenchCommand::Snapshot(options)), _) => {
            crate::snapshot_bench::run(options, &mut Printer::new(format)).await?;
        }
        (None, Some(options)) => tidepool_chaos_tests::bench::run(options, &binary()?, format).await?,
        (None, None) => return Err(Failed::usage("name a suite; see: tidepool bench --help")),
    }
    Ok(Exit::Success)
}

/// The demo.
pub async fn demo(options: &DemoOptions) -> anyhow::Result<Exit> {
    Ok(exit(tidepool_chaos_tests::demo::run(options, &binary()?).await?))
}
