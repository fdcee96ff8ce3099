//! A leader that is told to stop, and a handover whose target dies: real processes, real signals, clients that do not notice.

mod rig;

use std::time::Duration;

use rig::{WITHIN, goes_on, load, not_one_failed, pool};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::clock::{monotonic_ns, ns_to_ms};
use tidepool_chaos_tests::outage::Spread;
use tidepool_chaos_tests::record::{Call, CallOutcome, CallRecord};

/// Calls a second of each client: a pause is measured with the gaps between their puts, which must be short beside it.
const RATE_PER_S: f64 = 400.0;
/// Leaders stopped one after the other.
const STOPS: usize = 10;
/// Handovers to a target that dies.
const DYING_TARGETS: u32 = 6;
/// By how much later than the one before each of them dies.
const LATER: Duration = Duration::from_millis(4);
/// When something began, and when what came next did: a pause in between is its own.
type Span = (u64, u64);

/// The longest time without an acknowledged put of any writer in this span.
fn write_gap_ms(logs: &[Vec<CallRecord>], (at_ns, until_ns): Span) -> f64 {
    let puts = logs.iter().flatten().filter(|call| call.call == Call::Put && call.outcome == CallOutcome::Ok);
    let mut done: Vec<u64> = puts.map(|call| call.done_ns).collect();
    done.sort_unstable();
    let within = done.windows(2).filter(|pair| pair[1] > at_ns && pair[0] < until_ns);
    ns_to_ms(within.map(|pair| pair[1] - pair[0].max(at_ns)).max().unwrap_or(0))
}

fn print_gaps(what: &str, logs: &[Vec<CallRecord>], spans: &[Span]) {
    let gaps: Vec<f64> = spans.iter().map(|&span| write_gap_ms(logs, span)).collect();
    let spread = Spread::of(&gaps);
    println!("write gap over {} {what}: p50 {:.1} ms, max {:.1} ms", gaps.len(), spread.p50, spread.max);
}

/// The pause of a stop has a floor, which is printed too: that of a handover after which the old leader stays.
#[tokio::test(flavor = "multi_thread")]
async fn ten_handovers_cost_no_call() {
    let mut pool = pool(|_| {}).await;
    let fleet = load(&pool, RATE_PER_S);
    goes_on(&fleet).await;
    let mut handovers = Vec::new();
    for _ in 0..STOPS {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let began = monotonic_ns();
        admin::transfer_leader(pool.cluster.masters[leader].rpc, 0).await.unwrap();
        goes_on(&fleet).await;
        handovers.push((began, monotonic_ns()));
    }
    let logs = not_one_failed(fleet, 500).await;
    print_gaps("handovers", &logs, &handovers);
}

/// SIGTERM to the leader: it hands over, and ends with 0; clients lose no call, and are told who leads. Writers that put now and then see a
/// gap without any stop too: what it is at this rate is printed beside.
#[tokio::test(flavor = "multi_thread")]
async fn ten_leaders_stopped_in_order_cost_no_call() {
    let mut pool = pool(|_| {}).await;
    let fleet = load(&pool, RATE_PER_S);
    goes_on(&fleet).await;
    let (mut stops, mut calm) = (Vec::new(), Vec::new());
    for _ in 0..STOPS {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let began = monotonic_ns();
        goes_on(&fleet).await;
        calm.push((began, monotonic_ns()));
        let began = pool.cluster.masters[leader].stop(WITHIN).await.unwrap();
        goes_on(&fleet).await;
        // Before the next start, which takes processor time of its own.
        stops.push((began, monotonic_ns()));
        let log = std::fs::read_to_string(pool.cluster.masters[leader].log()).unwrap();
        assert!(log.contains("handed leadership over"), "master {} ended without a handover", leader + 1);
        pool.cluster.masters[leader].start().unwrap();
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        pool.cluster.wait_caught_up(leader, WITHIN).await.unwrap();
    }
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    let logs = not_one_failed(fleet, 1_000).await;
    print_gaps("spans without a stop", &logs, &calm);
    print_gaps("stops of the leader", &logs, &stops);
}

/// The target of a handover is killed in the same moment: the handover is refused, or an election decides as after a kill of
/// the leader. Either way a leader serves, and no call fails. The figures are printed beside those of plain kills.
#[tokio::test(flavor = "multi_thread")]
async fn a_handover_to_a_target_that_dies_costs_no_call() {
    let mut pool = pool(|_| {}).await;
    let fleet = load(&pool, RATE_PER_S);
    goes_on(&fleet).await;
    let (mut handovers, mut kills) = (Vec::new(), Vec::new());
    for round in 0..DYING_TARGETS {
        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let target = (0..3).find(|&at| at != leader).unwrap();
        let address = pool.cluster.masters[leader].rpc;
        let began = monotonic_ns();
        let asked = tokio::spawn(async move { admin::transfer_leader(address, target as u64 + 1).await });
        // Each time a little later: before it is asked, while it catches up, when it was just told to take over.
        tokio::time::sleep(LATER * round).await;
        pool.cluster.masters[target].kill().unwrap();
        let answer = asked.await.unwrap();
        println!(
            "handover to a dying master: {}",
            answer.map_or_else(|e| format!("{e:#}"), |done| format!("{done:?}"))
        );
        goes_on(&fleet).await;
        handovers.push((began, monotonic_ns()));
        pool.cluster.masters[target].start().unwrap();
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        pool.cluster.wait_caught_up(target, WITHIN).await.unwrap();

        let leader = pool.cluster.leader(WITHIN).await.unwrap();
        let began = pool.cluster.masters[leader].kill().unwrap().at_ns;
        goes_on(&fleet).await;
        kills.push((began, monotonic_ns()));
        pool.cluster.masters[leader].start().unwrap();
        pool.cluster.wait_serving(WITHIN).await.unwrap();
        pool.cluster.wait_caught_up(leader, WITHIN).await.unwrap();
    }
    assert!(pool.cluster.compare_digests(WITHIN).await.unwrap().is_equal());
    let logs = not_one_failed(fleet, 1_000).await;
    print_gaps("handovers to a dying target", &logs, &handovers);
    print_gaps("kills of the leader", &logs, &kills);
}
