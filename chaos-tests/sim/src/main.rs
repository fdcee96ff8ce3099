//! Runs seeds of the simulation: `tidepool-sim --seeds 1..501`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Parser;
use parking_lot::Mutex;
use tidepool_proto::plant::Plant;
use tidepool_sim::run::{Asked, Failure, run};

/// Runs masters, datanodes and clients on simulated machines, one seed after the other, and judges what clients saw.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Seeds, the last one excluded.
    #[arg(long, value_parser = seeds, default_value = "1..101")]
    seeds: Range<u64>,
    /// Threads; each runs seeds of its own.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Leave a guard out, to see that it would be noticed.
    #[arg(long, value_parser = guard)]
    plant: Option<Plant>,
    /// The circumstances in which a guard is left out, with the guard in place: it must pass.
    #[arg(long, value_parser = guard)]
    provoke: Option<Plant>,
    /// Nothing goes wrong.
    #[arg(long)]
    calm: bool,
    /// Clocks differ by far more than 5 %.
    #[arg(long)]
    wild_clocks: bool,
    /// Run each seed twice and compare.
    #[arg(long)]
    twice: bool,
    /// Print what happened in a seed that failed, or in the only one.
    #[arg(long)]
    trace: bool,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let wrong = || format!("'{text}' is not FIRST..END");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    Ok(first.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?)
}

fn guard(text: &str) -> Result<Plant, String> {
    let found = Plant::ALL.iter().find(|plant| format!("{plant:?}") == text);
    found.copied().ok_or_else(|| format!("no guard '{text}'; there are {:?}", Plant::ALL))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let wild_clocks = arguments.wild_clocks;
    let asked = Asked {
        calm: arguments.calm,
        wild_clocks,
        trace: arguments.trace,
        planted: arguments.plant,
        provoked: arguments.provoke,
    };
    let (next, outlived) = (AtomicU64::new(arguments.seeds.start), AtomicU64::new(0));
    let (failures, done) = (Mutex::new(Vec::<Box<Failure>>::new()), Mutex::new((0u64, 0u64, 0u64, 0u64)));
    let rates = Mutex::new((Vec::<(f64, u64)>::new(), BTreeMap::<String, u64>::new()));
    let work = || loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= arguments.seeds.end {
            return;
        }
        let result = run(seed, asked);
        if arguments.twice
            && let (Ok(first), Ok(second)) = (&result, &run(seed, asked))
            && first != second
        {
            println!("seed {seed}: two runs differ: {first:?} and {second:?}");
        }
        match result {
            Ok(report) => {
                outlived.fetch_add(report.outlived, Ordering::Relaxed);
                let mut done = done.lock();
                *done = (done.0 + 1, done.1 + report.calls, done.2 + report.undecided, done.3 ^ report.hash);
                let rates = &mut *rates.lock();
                rates.0.push((report.calls_in_faults as f64 * 1e3 / report.clients_ms as f64, seed));
                report.struck.iter().for_each(|(fault, times)| *rates.1.entry(fault.clone()).or_default() += times);
                if arguments.seeds.end - arguments.seeds.start == 1 {
                    println!("{report:#?}");
                }
            }
            Err(failure) => {
                println!("{failure}");
                if arguments.trace {
                    failure.lines.iter().for_each(|line| println!("{line}"));
                }
                failures.lock().push(failure);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..arguments.threads.max(1) {
            scope.spawn(work);
        }
    });
    let (passed, calls, undecided, hash) = *done.lock();
    let failed = failures.lock().len();
    let outlived = outlived.into_inner();
    println!(
        "{passed} seeds passed, {failed} failed; {calls} calls, {undecided} keys undecided, {outlived} leases outlived; hash {hash:016x}"
    );
    let (mut rates, struck) = rates.into_inner();
    rates.sort_by(|a, b| a.0.total_cmp(&b.0));
    let share = |thousandths: usize| rates.get(rates.len() * thousandths / 1_000).map_or(0.0, |(rate, _)| *rate);
    let least: Vec<u64> = rates.iter().take(5).map(|(_, seed)| *seed).collect();
    println!(
        "calls a client and second during faults: least {:.2} (seeds {least:?}), of a hundredth {:.2}, of a tenth {:.2}, median {:.2}; faults {struck:?}",
        share(0),
        share(10),
        share(100),
        share(500)
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
