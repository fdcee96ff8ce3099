//! The judge of answers that must fit together, tried on what real processes logged: right as it is, and wrong with one answer slipped in.

use std::path::Path;

use tidepool_chaos_tests::contest::{Asked, Contest, ContestOptions, ContestRecord, Ended, Terms, judge, logs_in};
use tidepool_chaos_tests::record::{RecordWriter, read_all};

use crate::rig::{binary, pool, wait_for};

/// Calls that are logged before the contest ends.
const CALLS: usize = 400;

fn logged(directory: &Path) -> Vec<ContestRecord> {
    let logs = logs_in(directory).unwrap_or_default();
    logs.iter().flat_map(|log| read_all::<ContestRecord>(log).unwrap_or_default()).collect()
}

/// A read of a value that was replaced before it began: it began when the call that replaced it had ended.
fn stale_read(records: &[ContestRecord]) -> ContestRecord {
    let wrote =
        |record: &&ContestRecord| record.ended == Ended::Ok && matches!(record.asked, Asked::Put | Asked::Replace);
    let replaced = records.iter().filter(wrote).filter(|record| record.asked == Asked::Replace);
    let mut pair = replaced.filter_map(|replaced| {
        let earlier = records.iter().filter(wrote).find(|e| e.key == replaced.key && e.done_ns < replaced.sent_ns);
        Some((earlier?, replaced))
    });
    let (earlier, replaced) = pair.next_back().expect("a value that was replaced");
    ContestRecord {
        asked: Asked::Get,
        value: earlier.value,
        copies: 0,
        intended_ns: replaced.done_ns + 1,
        sent_ns: replaced.done_ns + 1,
        done_ns: replaced.done_ns + 2,
        ..replaced.clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_read_slipped_into_the_log_is_found() {
    let pool = pool(|_| {}).await;
    let directory = pool.directory.path().join("contest");
    let contest = Contest::start(&ContestOptions {
        binary: binary(),
        directory: directory.clone(),
        masters: pool.cluster.masters_text(),
        tenant: String::new(),
        prefix: "contest".into(),
        processes: 3,
        replica_num: 1,
        pinned: false,
        seed: 3,
    })
    .unwrap();
    wait_for("calls to be logged", async || (logged(&directory).len() >= CALLS).then_some(())).await;
    let mut records = contest.end(&pool.client).await.unwrap();
    let terms = Terms { copies: 1, ..Terms::default() };
    let verdict = judge(&records, &terms);
    println!("{} calls on {} keys, {} of unknown end", verdict.definite, verdict.keys, verdict.unknown);
    verdict.expect_decided().unwrap();
    assert!(verdict.is_linearizable(), "{}", verdict.violation);
    for asked in [Asked::Put, Asked::Replace, Asked::Get, Asked::Exist, Asked::Remove] {
        assert!(records.iter().any(|r| r.asked == asked && r.ended == Ended::Ok), "no {asked:?} did what was asked");
    }
    assert!(records.iter().any(|r| r.asked == Asked::Remove && r.ended == Ended::Absent), "removals do not meet");

    let closing = records.split_off(logged(&directory).len());
    let stale = stale_read(&records);
    RecordWriter::create(&logs_in(&directory).unwrap()[0]).unwrap().append(&stale).unwrap();
    let mut with_stale = logged(&directory);
    with_stale.extend(closing);
    let violation = judge(&with_stale, &terms).violation;
    assert!(violation.contains(&stale.key) && violation.contains(&format!("Got({})", stale.value)), "{violation}");
}
