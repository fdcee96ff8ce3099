//! The report of a drill as one HTML page that needs nothing else: the figures, and a picture of every round.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::report::Summary;
use super::{DrillFault, DrillOptions};
use crate::clock::load1;
use crate::failover::Round;
use crate::plot;

/// Rounds that are drawn: the ones with the longest outages.
const PICTURES_MAX: usize = 30;

const STYLE: &str = "body{font:15px system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .8em;border-bottom:1px solid #8884;text-align:right}\
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}text{font-size:10px;fill:#777}line.grid{stroke:#8883}\
line.fault{stroke:#c00;stroke-width:2}line.write{stroke:#06c;stroke-dasharray:4}line.read{stroke:#080;stroke-dasharray:4}\
circle.put{fill:#06c8}circle.get{fill:#0808}circle.bad{fill:#c00}.no{color:#c00;font-weight:bold}\
@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}}";

/// Writes it.
pub(super) fn write(
    path: &Path,
    fault: DrillFault,
    options: &DrillOptions,
    rounds: &[Round],
    filler_lost: u64,
) -> Result<()> {
    let page = page(fault, options, rounds, filler_lost)?;
    std::fs::write(path, page).with_context(|| format!("report {}", path.display()))
}

fn page(fault: DrillFault, options: &DrillOptions, rounds: &[Round], filler_lost: u64) -> Result<String> {
    let sum = Summary::of(rounds, filler_lost);
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>tidepool drill {0}</title><style>{STYLE}</style><h1>tidepool drill {0}</h1>",
        fault.name()
    );
    let verdict = if sum.held { "everything held" } else { "<span class=\"no\">NOT EVERYTHING HELD</span>" };
    write!(
        out,
        "<p>{} rounds, {} writers and {} readers at {} calls a second each, fill {}, load average {:.1}: {verdict}. {} acknowledged \
         puts lost, states of the masters {}.</p><table><tr><th>milliseconds<th>min<th>p50<th>p99<th>max</tr>",
        rounds.len(),
        options.writers,
        options.readers,
        options.rate,
        options.fill().name(),
        load1(),
        sum.lost,
        if sum.equal { "equal" } else { "<span class=\"no\">different</span>" },
    )?;
    for (name, s) in sum.rows() {
        let Some(s) = s else { continue };
        write!(out, "<tr><td>{name}<td>{:.1}<td>{:.1}<td>{:.1}<td>{:.1}</tr>", s.min, s.p50, s.p99, s.max)?;
    }
    out.push_str("</table>");
    for line in sum.beside() {
        write!(out, "<p>{line}.</p>")?;
    }
    out.push_str(
        "<p>Each point is a call: when the schedule wanted it sent, from the fault on, and how long it took from that \
         instant (blue: puts, green: gets, red: failed). The red line is the fault; the dashed ones the first successes of a put and a \
         get that were sent after it.</p>",
    );
    let mut order: Vec<usize> = (0..rounds.len()).collect();
    let outage = |at: usize| rounds[at].outage.rto_write_ms.unwrap_or(f64::INFINITY);
    order.sort_by(|&a, &b| outage(b).total_cmp(&outage(a)));
    for at in order.into_iter().take(PICTURES_MAX) {
        let round = &rounds[at];
        let picture = plot::svg(&round.points, round.outage.rto_write_ms, round.outage.rto_read_ms);
        let shown = |ms: Option<f64>| ms.map_or("never".to_owned(), |ms| format!("{ms:.1} ms"));
        write!(
            out,
            "<h2>Round {}: {} struck, then {} led</h2><p>writes back after {}, reads after {}; {} calls failed, {} of {} \
             acknowledged puts lost</p>{picture}",
            at + 1,
            round.struck,
            round.successor,
            shown(round.outage.rto_write_ms),
            shown(round.outage.rto_read_ms),
            round.outage.failed,
            round.rpo_lost(),
            round.acknowledged,
        )?;
    }
    out.push_str("</html>\n");
    Ok(out)
}
