//! What a drill prints: one line a round, then the summary.

use serde_json::json;

use super::KillLeaderOptions;
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

pub(super) fn print_round(number: u32, round: &Round, format: Format) {
    let outage = &round.outage;
    let shown = |ms: Option<f64>| ms.map_or("never".to_owned(), |ms| format!("{ms:.1}"));
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "round": number, "killed": round.killed, "successor": round.successor,
                "fill_percent": (round.fill_percent * 10.0).round() / 10.0,
                "rto_write_ms": outage.rto_write_ms, "rto_read_ms": outage.rto_read_ms,
                "worst_client_gap_ms": outage.worst_client_gap_ms, "longest_call_ms": outage.longest_call_ms,
                "calls": outage.calls, "puts_ok": outage.puts_ok, "gets_ok": outage.gets_ok, "failed": outage.failed,
                "missed": outage.missed, "corrupt": outage.corrupt,
                "acknowledged": round.acknowledged, "audited": round.audit.checked, "rpo_lost": round.rpo_lost(),
                "evicted": round.evicted, "state_hash_equal": round.state_hash_equal,
                "applied_index": round.applied_index, "load1": load1(),
            })
        ),
        Format::Table => {
            if number == 1 {
                println!(
                    "round  killed    fill %  rto write ms  rto read ms  worst gap ms  longest call ms  acked  lost  hashes"
                );
            }
            println!(
                "{number:>5}  {:<8}  {:>6.1}  {:>12}  {:>11}  {:>12.1}  {:>15.1}  {:>5}  {:>4}  {}",
                round.killed,
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

pub(super) fn summarise(options: &KillLeaderOptions, rounds: &[Round], filler_lost: u64, format: Format) -> Verdict {
    let spread = |pick: fn(&Round) -> Option<f64>| Spread::of(&rounds.iter().filter_map(pick).collect::<Vec<f64>>());
    let most = |pick: fn(&Round) -> f64| rounds.iter().map(pick).fold(0.0, f64::max);
    let write = spread(|r| r.outage.rto_write_ms);
    let read = spread(|r| r.outage.rto_read_ms);
    let lost = rounds.iter().map(Round::rpo_lost).sum::<u64>() + filler_lost;
    let gap = most(|r| r.outage.worst_client_gap_ms);
    let longest = most(|r| r.outage.longest_call_ms);
    let equal = rounds.iter().all(|r| r.state_hash_equal);
    let held = lost == 0 && rounds.iter().all(Round::held);
    match format {
        Format::Json => println!(
            "{}",
            json!({
                "rounds": rounds.len(), "rpo_lost": lost, "rto_write_ms": write, "rto_read_ms": read,
                "worst_client_gap_ms": gap, "longest_call_ms": longest, "state_hash_equal": equal,
                "fault": options.live.fault.name(), "fill": options.fill().name(),
                "election": options.spawn.then_some(&options.election),
                "acknowledged": rounds.iter().map(|r| r.acknowledged).sum::<u64>(),
                "missed": rounds.iter().map(|r| r.outage.missed).sum::<u64>(),
                "corrupt": rounds.iter().map(|r| r.outage.corrupt).sum::<u64>(),
                "failed_calls": rounds.iter().map(|r| r.outage.failed).sum::<u64>(),
                "held": held, "load1": load1(),
            })
        ),
        Format::Table => {
            let row = |name: &str, s: Spread| {
                println!("{name:<14} min {:.1}  p50 {:.1}  p99 {:.1}  max {:.1} ms", s.min, s.p50, s.p99, s.max);
            };
            println!();
            row("rto write", write);
            row("rto read", read);
            println!("worst gap of one client {gap:.1} ms, longest call {longest:.1} ms");
            println!(
                "{lost} acknowledged puts lost, states {}, everything held: {}",
                if equal { "equal" } else { "DIFFER" },
                if held { "yes" } else { "NO" }
            );
        }
    }
    Verdict::of(held)
}
