//! What a drill prints: one line a round, then the summary.

use serde_json::json;

use super::{DrillFault, DrillOptions};
use crate::audit::Audit;
use crate::clock::load1;
use crate::failover::Round;
use crate::outage::Spread;
use crate::output::{Format, Verdict};

pub(super) fn report_losses(what: &str, audit: &Audit) {
    for (how, keys) in [("absent", &audit.absent), ("with other bytes", &audit.wrong)] {
        if !keys.is_empty() {
            eprintln!("LOST: {} {what} are {how}: {:?}", keys.len(), &keys[..keys.len().min(5)]);
        }
    }
}

/// What makes no order of calls right, in full: it is what a person looks for.
pub(super) fn report_contest(round: &Round) {
    if let Some(violation) = round.contest.as_ref().map(|contest| &contest.violation).filter(|text| !text.is_empty()) {
        eprintln!("NOT LINEARIZABLE: {violation}");
    }
}

pub(super) fn print_round(number: u32, round: &Round, format: Format) {
    let outage = &round.outage;
    let shown = |ms: Option<f64>| ms.map_or("never".to_owned(), |ms| format!("{ms:.1}"));
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "round": number, "struck": round.struck, "successor": round.successor,
                "fill_percent": (round.fill_percent * 10.0).round() / 10.0,
                "rto_write_ms": outage.rto_write_ms, "rto_read_ms": outage.rto_read_ms,
                "worst_client_gap_ms": outage.worst_client_gap_ms, "longest_call_ms": outage.longest_call_ms,
                "client_gaps_ms": outage.client_gaps_ms, "breakdown_ms": round.breakdown, "unsaved": round.unsaved, "thin": round.thin,
                "calls": outage.calls, "puts_ok": outage.puts_ok, "gets_ok": outage.gets_ok, "failed": outage.failed,
                "missed": outage.missed, "corrupt": outage.corrupt,
                "acknowledged": round.acknowledged, "audited": round.audit.checked, "rpo_lost": round.rpo_lost(),
                "evicted": round.evicted, "state_hash_equal": round.state_hash_equal,
                "applied_index": round.applied_index, "contest": round.contest,
                "bulk_bytes": outage.bulk_bytes, "bulk_longest_call_ms": outage.bulk_longest_call_ms, "load1": load1(),
            })
        ),
        Format::Table => {
            if number == 1 {
                println!(
                    "round  struck      fill %  rto write ms  rto read ms  worst gap ms  longest call ms  acked  lost  hashes"
                );
            }
            println!(
                "{number:>5}  {:<10}  {:>6.1}  {:>12}  {:>11}  {:>12.1}  {:>15.1}  {:>5}  {:>4}  {}",
                round.struck,
                round.fill_percent,
                shown(outage.rto_write_ms),
                shown(outage.rto_read_ms),
                outage.worst_client_gap_ms,
                outage.longest_call_ms,
                round.acknowledged,
                round.rpo_lost(),
                if round.state_hash_equal { "equal" } else { "DIFFER" },
            );
        }
    }
}

pub(super) fn summarise(
    fault: DrillFault,
    options: &DrillOptions,
    rounds: &[Round],
    filler_lost: u64,
    format: Format,
) -> Verdict {
    let sum = Summary::of(rounds, filler_lost);
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "rounds": rounds.len(), "n": rounds.len(), "rpo_lost": sum.lost,
                "rto_write_ms": sum.write, "rto_read_ms": sum.read,
                "worst_client_gap_ms": sum.gap.max, "longest_call_ms": sum.call.max,
                "client_gap_ms": sum.gap, "call_ms": sum.call,
                "breakdown_ms": {
                    "detect": sum.detect, "elect": sum.elect, "commit": sum.commit, "reroute": sum.reroute,
                },
                "state_hash_equal": sum.equal,
                "fault": fault.name(), "fill": options.fill().name(),
                "election": options.spawn.then_some(&options.election),
                "acknowledged": rounds.iter().map(|r| r.acknowledged).sum::<u64>(),
                "unsaved": rounds.iter().map(|r| r.unsaved).sum::<u64>(),
                "thin": rounds.iter().map(|r| r.thin).sum::<u64>(),
                "missed": rounds.iter().map(|r| r.outage.missed).sum::<u64>(),
                "corrupt": rounds.iter().map(|r| r.outage.corrupt).sum::<u64>(),
                "failed_calls": rounds.iter().map(|r| r.outage.failed).sum::<u64>(),
                "contested": sum.contested, "linearizable": sum.linearizable,
                "bulk_bytes": sum.bulk_bytes, "bulk_longest_call_ms": sum.bulk_longest_call_ms,
                "held": sum.held, "load1": load1(),
            })
        ),
        Format::Table => {
            println!();
            for (name, spread) in sum.rows() {
                let Some(spread) = spread else { continue };
                println!(
                    "{name:<22} min {:>8.1}  p50 {:>8.1}  p99 {:>8.1}  max {:>8.1} ms",
                    spread.min, spread.p50, spread.p99, spread.max
                );
            }
            let unsaved: u64 = rounds.iter().map(|r| r.unsaved).sum();
            if unsaved > 0 {
                println!("{unsaved} acknowledged puts were newer than the snapshot that was restored");
            }
            for line in sum.beside() {
                println!("{line}");
            }
            println!(
                "{} acknowledged puts lost, states {}, everything held: {}",
                sum.lost,
                if sum.equal { "equal" } else { "DIFFER" },
                if sum.held { "yes" } else { "NO" }
            );
        }
    }
    Verdict::of(sum.held)
}

/// Figures of all rounds.
pub(super) struct Summary {
    pub(super) lost: u64,
    pub(super) equal: bool,
    pub(super) held: bool,
    /// Calls on contended keys.
    contested: u64,
    linearizable: bool,
    bulk_bytes: u64,
    bulk_longest_call_ms: f64,
    write: Spread,
    read: Spread,
    gap: Spread,
    call: Spread,
    // None where no leader was lost.
    detect: Option<Spread>,
    elect: Option<Spread>,
    commit: Option<Spread>,
    reroute: Option<Spread>,
}

impl Summary {
    pub(super) fn of(rounds: &[Round], filler_lost: u64) -> Summary {
        let spread =
            |pick: fn(&Round) -> Option<f64>| Spread::of(&rounds.iter().filter_map(pick).collect::<Vec<f64>>());
        let part =
            |pick: fn(&Round) -> Option<f64>| rounds.iter().any(|round| pick(round).is_some()).then(|| spread(pick));
        let lost = rounds.iter().map(Round::rpo_lost).sum::<u64>() + filler_lost;
        let gaps: Vec<f64> = rounds.iter().flat_map(|round| round.outage.client_gaps_ms.clone()).collect();
        Summary {
            lost,
            equal: rounds.iter().all(|r| r.state_hash_equal),
            held: lost == 0 && rounds.iter().all(Round::held),
            contested: rounds.iter().filter_map(|r| Some(r.contest.as_ref()?.definite)).sum(),
            linearizable: rounds.iter().all(|r| r.contest.as_ref().is_none_or(|contest| contest.is_linearizable())),
            bulk_bytes: rounds.iter().map(|r| r.outage.bulk_bytes).sum(),
            bulk_longest_call_ms: rounds.iter().map(|r| r.outage.bulk_longest_call_ms).fold(0.0, f64::max),
            write: spread(|r| r.outage.rto_write_ms),
            read: spread(|r| r.outage.rto_read_ms),
            gap: Spread::of(&gaps),
            call: spread(|r| Some(r.outage.longest_call_ms)),
            detect: part(|r| r.breakdown.detect_ms),
            elect: part(|r| r.breakdown.elect_ms),
            commit: part(|r| r.breakdown.commit_ms),
            reroute: part(|r| r.breakdown.reroute_ms),
        }
    }

    /// What was done beside the load, in words.
    pub(super) fn beside(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.contested > 0 {
            let fit = if self.linearizable { "fit together" } else { "DO NOT FIT TOGETHER" };
            lines.push(format!("{} calls on shared keys, whose answers {fit}", self.contested));
        }
        if self.bulk_bytes > 0 {
            let (mb, longest) = (self.bulk_bytes as f64 / 1e6, self.bulk_longest_call_ms);
            lines.push(format!("{mb:.0} MB written in bulk beside it, the longest call took {longest:.1} ms"));
        }
        lines
    }

    /// Named, as a table shows them.
    pub(super) fn rows(&self) -> [(&'static str, Option<Spread>); 8] {
        [
            ("rto write", Some(self.write)),
            ("rto read", Some(self.read)),
            ("worst gap of a client", Some(self.gap)),
            ("longest call", Some(self.call)),
            ("  until it is missed", self.detect),
            ("  until another leads", self.elect),
            ("  until a put is acked", self.commit),
            ("  until all are served", self.reroute),
        ]
    }
}
