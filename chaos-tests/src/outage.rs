//! What clients felt: recovery times and gaps computed from their own call logs around one fault.
//!
//! RTO(write) is the end of the first successful put that was *started* after the fault, minus the fault's instant
//! (CLOCK_MONOTONIC right before kill(2)); RTO(read) likewise with gets. "Started after" means: sent after the victim
//! was seen dead, so that an answer it gave while dying does not count as recovery. The worst gap is the longest time
//! that any single client went without a success; a call's length is counted from when the schedule wanted it sent.

use serde::Serialize;

use crate::clock::ns_to_ms;
use crate::process::Fault;
use crate::record::{Call, CallOutcome, CallRecord};

/// One fault as its clients saw it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outage {
    /// First success of a put started after the fault; none if there was none.
    pub rto_write_ms: Option<f64>,
    /// First right answer to a get started after the fault.
    pub rto_read_ms: Option<f64>,
    /// Longest time between two successes of one client.
    pub worst_client_gap_ms: f64,
    /// The same of every client, in their order.
    pub client_gaps_ms: Vec<f64>,
    /// When the first put started after the fault was acknowledged (CLOCK_MONOTONIC).
    #[serde(skip)]
    pub written_ns: Option<u64>,
    /// When the last client had a success of a call started after the fault.
    #[serde(skip)]
    pub all_back_ns: Option<u64>,
    /// Longest call.
    pub longest_call_ms: f64,
    /// Calls in the window.
    pub calls: u64,
    /// Acknowledged puts in the window.
    pub puts_ok: u64,
    /// Right gets in the window.
    pub gets_ok: u64,
    /// Calls that were refused or had no definite answer.
    pub failed: u64,
    /// Gets and exists that reported an acknowledged, recent key absent.
    pub missed: u64,
    /// Gets that returned other bytes.
    pub corrupt: u64,
    /// Acknowledged bytes of the bulk writer; its calls count in no figure above but `calls`, `failed` and `corrupt`.
    pub bulk_bytes: u64,
    /// Its longest call, counted from when its schedule wanted it sent.
    pub bulk_longest_call_ms: f64,
}

impl Outage {
    fn count_bulk(&mut self, record: &CallRecord) {
        self.bulk_longest_call_ms = self.bulk_longest_call_ms.max(ns_to_ms(record.latency_ns()));
        match record.outcome {
            CallOutcome::Ok => self.bulk_bytes += record.bytes,
            _ => self.failed += 1,
        }
    }
}

/// Measures one fault over the logs of its clients, one list a client in its order of appending.
pub fn measure(clients: &[Vec<CallRecord>], fault: Fault) -> Outage {
    let mut outage = Outage::default();
    let mut first = [None::<u64>; 2];
    for records in clients {
        let mut successes: Vec<u64> = Vec::new();
        let mut back: Option<u64> = None;
        for record in records {
            outage.calls += 1;
            if record.call == Call::Bulk {
                outage.count_bulk(record);
                continue;
            }
            outage.longest_call_ms = outage.longest_call_ms.max(ns_to_ms(record.latency_ns()));
            match record.outcome {
                CallOutcome::Ok => {
                    successes.push(record.done_ns);
                    if record.sent_ns >= fault.certain_ns {
                        back = Some(back.map_or(record.done_ns, |first| first.min(record.done_ns)));
                    }
                    let side = match record.call {
                        Call::Put => Some(0),
                        Call::Get => Some(1),
                        Call::Bulk | Call::Exist => None,
                    };
                    let Some(side) = side else { continue };
                    *(if side == 0 { &mut outage.puts_ok } else { &mut outage.gets_ok }) += 1;
                    if record.sent_ns >= fault.certain_ns {
                        first[side] = Some(first[side].map_or(record.done_ns, |f| f.min(record.done_ns)));
                    }
                }
                CallOutcome::Miss => outage.missed += 1,
                CallOutcome::Corrupt => outage.corrupt += 1,
                CallOutcome::Fail | CallOutcome::Unknown => outage.failed += 1,
            }
        }
        if records.iter().all(|record| record.call == Call::Bulk) && !records.is_empty() {
            continue;
        }
        successes.sort_unstable();
        let gap = successes.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        outage.client_gaps_ms.push(ns_to_ms(gap));
        outage.worst_client_gap_ms = outage.worst_client_gap_ms.max(ns_to_ms(gap));
        outage.all_back_ns = outage.all_back_ns.max(back);
    }
    let since = |at: Option<u64>| at.map(|at| ns_to_ms(at - fault.at_ns));
    outage.written_ns = first[0];
    outage.rto_write_ms = since(first[0]);
    outage.rto_read_ms = since(first[1]);
    outage
}

/// The 99th percentile of how long calls took that the schedule wanted sent from `from_ns` on and before `until_ns`; none: there were none.
/// The bulk writer's are left out.
pub fn p99_ms(clients: &[Vec<CallRecord>], from_ns: u64, until_ns: u64) -> Option<f64> {
    let calls = clients.iter().flatten().filter(|record| record.call != Call::Bulk);
    let within = calls.filter(|record| (from_ns..until_ns).contains(&record.intended_ns));
    let took: Vec<f64> = within.map(|record| ns_to_ms(record.latency_ns())).collect();
    (!took.is_empty()).then(|| Spread::of(&took).p99)
}

/// Least, middle, 99th percentile and most of some figures.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Spread {
    /// Least.
    pub min: f64,
    /// Median (nearest rank).
    pub p50: f64,
    /// 99th percentile (nearest rank; of fewer than 100 figures the most).
    pub p99: f64,
    /// Most.
    pub max: f64,
}

impl Spread {
    /// Of these figures; all zero when there are none.
    pub fn of(figures: &[f64]) -> Spread {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let rank = |q: f64| {
            let at = (q * sorted.len() as f64).ceil() as usize;
            sorted.get(at.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(0.0)
        };
        Spread { min: rank(0.0), p50: rank(0.5), p99: rank(0.99), max: rank(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn call(call: Call, sent_ms: u64, done_ms: u64, outcome: CallOutcome) -> CallRecord {
        CallRecord {
            call,
            key: "k".into(),
            hash: String::new(),
            bytes: 1,
            intended_ns: sent_ms * MS,
            sent_ns: sent_ms * MS,
            done_ns: done_ms * MS,
            outcome,
            copies: 0,
            error: String::new(),
        }
    }

    #[test]
    fn recovery_counts_only_calls_started_after_the_fault_was_certain() {
        let fault = Fault { at_ns: 100 * MS, certain_ns: 102 * MS };
        let writer = vec![
            call(Call::Put, 90, 91, CallOutcome::Ok),
            call(Call::Put, 99, 400, CallOutcome::Ok), // started before: proves nothing about recovery
            call(Call::Put, 101, 101, CallOutcome::Ok), // answered by the dying process
            call(Call::Put, 110, 600, CallOutcome::Unknown),
            call(Call::Put, 120, 450, CallOutcome::Ok),
            call(Call::Put, 130, 440, CallOutcome::Ok),
        ];
        let reader = vec![call(Call::Get, 95, 96, CallOutcome::Ok), call(Call::Get, 140, 300, CallOutcome::Ok)];
        let outage = measure(&[writer, reader], fault);
        assert_eq!(outage.rto_write_ms, Some(340.0));
        assert_eq!(outage.rto_read_ms, Some(200.0));
        assert_eq!(outage.longest_call_ms, 490.0);
        assert_eq!(outage.worst_client_gap_ms, 299.0, "the writer's gap is 101..400 and the reader's 96..300");
        assert_eq!((outage.puts_ok, outage.gets_ok, outage.failed), (5, 2, 1));
    }

    #[test]
    fn the_bulk_writer_is_counted_by_itself() {
        let fault = Fault { at_ns: 100 * MS, certain_ns: 100 * MS };
        let writer = vec![call(Call::Put, 110, 300, CallOutcome::Ok), call(Call::Put, 120, 310, CallOutcome::Ok)];
        let bulk = vec![call(Call::Bulk, 110, 120, CallOutcome::Ok), call(Call::Bulk, 130, 5000, CallOutcome::Unknown)];
        let outage = measure(&[writer, bulk], fault);
        assert_eq!((outage.rto_write_ms, outage.longest_call_ms), (Some(200.0), 190.0));
        assert_eq!((outage.client_gaps_ms.len(), outage.all_back_ns), (1, Some(300 * MS)));
        assert_eq!((outage.bulk_bytes, outage.bulk_longest_call_ms, outage.failed), (1, 4870.0, 1));
    }

    #[test]
    fn a_fault_that_was_never_recovered_from_has_no_recovery_time() {
        let fault = Fault { at_ns: 100 * MS, certain_ns: 100 * MS };
        let outage = measure(&[vec![call(Call::Put, 110, 5000, CallOutcome::Unknown)]], fault);
        assert_eq!((outage.rto_write_ms, outage.rto_read_ms), (None, None));
    }

    #[test]
    fn spread_uses_nearest_ranks() {
        let figures: Vec<f64> = (1..=20).map(f64::from).rev().collect();
        let spread = Spread::of(&figures);
        assert_eq!((spread.min, spread.p50, spread.p99, spread.max), (1.0, 10.0, 20.0, 20.0));
        let hundred: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(Spread::of(&hundred).p99, 198.0);
        assert_eq!(Spread::of(&[]).max, 0.0);
    }
}
