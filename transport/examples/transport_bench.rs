//! Runs the transport benchmark: `transport_bench [FILTER] [RUNS] [STRIPES]`. JSON lines go to stdout.

use tidepool_transport::bench;

fn main() -> std::io::Result<()> {
    let mut options = bench::Options::default();
    let mut arguments = std::env::args().skip(1);
    options.filter = arguments.next().unwrap_or_default();
    if let Some(runs) = arguments.next().and_then(|text| text.parse().ok()) {
        options.runs = runs;
    }
    if let Some(stripes) = arguments.next().and_then(|text| text.parse().ok()) {
        options.stripes = stripes;
    }
    bench::run(&options, |line| println!("{line}"))
}
