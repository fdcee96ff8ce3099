//! The judgement of a contest: its records become calls as the judge knows them, and what it finds becomes words.
//!
//! The simulation tells the judge from the log what went without a call (evictions, datanodes that became suspect). Nobody reads the log here,
//! so what may have happened is stated beforehand ([`Terms`]): an eviction is then an event that may take effect at any time or never, and
//! what found nothing while a datanode was away says nothing. Where neither may happen every answer counts.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use serde::Serialize;
use tidepool_checker::{Call, Event, LOG, judge_all};

use super::record::{Asked, ContestRecord, Ended};
use crate::clock::ns_to_ms;

/// Fewest calls with a definite end: fewer would show nothing.
const DEFINITE_MIN: u64 = 30;

/// What may happen to an object without a call.
#[derive(Clone, Debug, Default)]
pub struct Terms {
    /// The pool overflows: any object may be evicted.
    pub evicts: bool,
    /// Copies that were asked for; an object that was stored with fewer goes with the datanode that has it.
    pub copies: u32,
    /// Times (CLOCK_MONOTONIC) in which datanodes were away, until clients had found them again: what is there may be missed.
    pub hidden: Vec<(u64, u64)>,
}

/// What the judge found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verdict {
    /// Calls with a definite end.
    pub definite: u64,
    /// Calls of unknown end.
    pub unknown: u64,
    /// Keys.
    pub keys: u64,
    /// Keys that the judge gave up on: it found neither an order nor that there is none.
    pub undecided: u64,
    /// Why there is no order of the calls in which every answer is right; empty: there is one.
    pub violation: String,
}

impl Verdict {
    /// Whether there is an order of the calls on each key in which every answer is right.
    pub fn is_linearizable(&self) -> bool {
        self.violation.is_empty() && self.undecided == 0
    }

    /// Fails when the contest showed nothing: next to no call ended, or the judge gave up.
    pub fn expect_decided(&self) -> Result<()> {
        ensure!(
            self.definite >= DEFINITE_MIN,
            "only {} calls of the contest ended; {DEFINITE_MIN} are the least that shows anything",
            self.definite
        );
        ensure!(self.undecided == 0, "the judge gave up on {} of {} keys of the contest", self.undecided, self.keys);
        Ok(())
    }
}

/// Judges all keys.
pub fn judge(records: &[ContestRecord], terms: &Terms) -> Verdict {
    let mut numbers: HashMap<&str, u64> = HashMap::new();
    let mut names: Vec<&str> = Vec::new();
    let mut calls = Vec::new();
    let mut verdict = Verdict::default();
    for record in records {
        let key = *numbers.entry(&record.key).or_insert_with(|| {
            names.push(&record.key);
            names.len() as u64 - 1
        });
        if record.ended == Ended::Corrupt {
            verdict.violation = format!("bytes that nobody put: {}", said(record));
        }
        let Some(event) = event_of(record, terms) else { continue };
        let is_known = record.ended != Ended::Unknown;
        *(if is_known { &mut verdict.definite } else { &mut verdict.unknown }) += 1;
        let client = u64::from(record.process) + 1;
        let returned = is_known.then_some(record.done_ns);
        calls.push(Call { client, key, invoked: record.sent_ns, returned, event });
        if let Event::Put(value) | Event::Upsert(value) = event
            && (terms.evicts || terms.copies > 1 && record.copies < terms.copies)
        {
            let event = Event::Dropped(value);
            calls.push(Call { client: LOG, key, invoked: record.sent_ns, returned: None, event });
        }
    }
    verdict.keys = names.len() as u64;
    if verdict.violation.is_empty() {
        let (violated, undecided) = judge_all(&calls);
        verdict.undecided = undecided;
        verdict.violation = violated.map_or_else(String::new, |(key, calls)| describe(names[key as usize], &calls));
    }
    verdict
}

/// What a call did, if it says anything.
fn event_of(record: &ContestRecord, terms: &Terms) -> Option<Event> {
    let while_hidden = || terms.hidden.iter().any(|&(from, until)| record.sent_ns <= until && record.done_ns >= from);
    Some(match (record.asked, record.ended) {
        (_, Ended::Fail | Ended::Corrupt) => return None,
        (Asked::Put, Ended::Ok | Ended::Unknown) => Event::Put(record.value),
        (Asked::Put, Ended::Present) => Event::PutRefused,
        (Asked::Replace, Ended::Ok | Ended::Unknown) => Event::Upsert(record.value),
        (Asked::Get, Ended::Ok) => Event::Got(record.value),
        (Asked::Exist, Ended::Ok) => Event::Exists,
        (Asked::Get, Ended::Absent) if !while_hidden() => Event::Missed,
        (Asked::Exist, Ended::Absent) if !record.doubts && !while_hidden() => Event::Missed,
        (Asked::Remove, Ended::Ok | Ended::Unknown) => Event::Removed,
        (Asked::Remove, Ended::Absent) => Event::NothingToRemove,
        _ => return None,
    })
}

fn said(record: &ContestRecord) -> String {
    format!("process {} {:?} {} {:?} {}", record.process, record.asked, record.key, record.ended, record.error)
}

/// The calls that no order fits, in the order of their begin, counted from the first.
fn describe(key: &str, calls: &[Call]) -> String {
    let mut calls = calls.to_vec();
    calls.sort_by_key(|call| call.invoked);
    let since = calls.first().map_or(0, |call| call.invoked);
    let ms = |at: u64| ns_to_ms(at.saturating_sub(since));
    let mut text = format!("no order of these calls of {key} makes every answer right (milliseconds):");
    for call in calls {
        let who = if call.client == 0 { "pool".to_owned() } else { format!("process {}", call.client - 1) };
        let until = call.returned.map_or("never known".to_owned(), |at| format!("{}", ms(at)));
        text.push_str(&format!("\n  {who}: {:?}, from {} to {until}", call.event, ms(call.invoked)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(asked: Asked, ended: Ended, value: u64, at: (u64, u64)) -> ContestRecord {
        ContestRecord {
            process: 1,
            asked,
            key: "k".into(),
            value,
            copies: 1,
            intended_ns: at.0,
            sent_ns: at.0,
            done_ns: at.1,
            ended,
            doubts: false,
            error: String::new(),
        }
    }

    /// Enough answers that are right, all before `from`.
    fn history(from: u64, more: &[ContestRecord]) -> Vec<ContestRecord> {
        let mut all = vec![record(Asked::Put, Ended::Ok, 1, (0, 1))];
        all.extend((2..from).map(|at| record(Asked::Get, Ended::Ok, 1, (at * 10, at * 10 + 1))));
        all.extend_from_slice(more);
        all
    }

    fn is_right(more: &[ContestRecord], terms: &Terms) -> bool {
        judge(&history(50, more), terms).is_linearizable()
    }

    #[test]
    fn a_stale_read_and_a_lost_write_are_found_and_told() {
        let terms = Terms { copies: 1, ..Terms::default() };
        let replaced = record(Asked::Replace, Ended::Ok, 2, (1000, 1010));
        let stale = record(Asked::Get, Ended::Ok, 1, (1020, 1030));
        assert!(is_right(std::slice::from_ref(&replaced), &terms));
        let verdict = judge(&history(50, &[replaced.clone(), stale]), &terms);
        assert!(verdict.violation.contains("k ") && verdict.violation.contains("Got(1)"), "{}", verdict.violation);
        let lost = record(Asked::Get, Ended::Absent, 0, (1020, 1030));
        assert!(!is_right(&[replaced.clone(), lost], &terms));
        let twice =
            [record(Asked::Remove, Ended::Ok, 0, (1000, 1010)), record(Asked::Remove, Ended::Ok, 0, (1020, 1030))];
        assert!(!is_right(&twice, &terms));
        let invented = record(Asked::Get, Ended::Corrupt, 0, (1000, 1010));
        assert!(!is_right(&[invented], &terms));
    }

    #[test]
    fn what_may_happen_without_a_call_explains_what_is_missed() {
        let missed = [record(Asked::Get, Ended::Absent, 0, (1000, 1010))];
        let strict = Terms { copies: 1, ..Terms::default() };
        assert!(!is_right(&missed, &strict));
        assert!(is_right(&missed, &Terms { evicts: true, ..strict.clone() }));
        assert!(is_right(&missed, &Terms { copies: 2, ..strict.clone() }), "one copy went with its datanode");
        assert!(is_right(&missed, &Terms { hidden: vec![(900, 1005)], ..strict.clone() }));
        assert!(!is_right(&missed, &Terms { hidden: vec![(900, 990)], ..strict.clone() }));
        // What was evicted does not come back.
        let back = record(Asked::Get, Ended::Ok, 1, (1020, 1030));
        assert!(!is_right(&[missed[0].clone(), back], &Terms { evicts: true, ..strict }));
    }

    #[test]
    fn refusals_and_unknown_ends_are_taken_for_what_they_say() {
        let strict = Terms { copies: 1, ..Terms::default() };
        // A removal that was refused for a lease removes nothing, one that nobody answered may.
        let refused = record(Asked::Remove, Ended::Fail, 0, (1000, 1010));
        let unknown = record(Asked::Remove, Ended::Unknown, 0, (1000, 1010));
        let missed = record(Asked::Get, Ended::Absent, 0, (1020, 1030));
        assert!(!is_right(&[refused, missed.clone()], &strict));
        assert!(is_right(&[unknown.clone(), missed], &strict));
        assert!(is_right(&[unknown, record(Asked::Get, Ended::Ok, 1, (1020, 1030))], &strict));
        let doubted = ContestRecord { doubts: true, ..record(Asked::Exist, Ended::Absent, 0, (1020, 1030)) };
        assert!(is_right(std::slice::from_ref(&doubted), &strict));
        assert!(!is_right(&[ContestRecord { doubts: false, ..doubted }], &strict));
    }

    #[test]
    fn a_handful_of_calls_is_no_judgement() {
        assert!(judge(&history(10, &[]), &Terms::default()).expect_decided().is_err());
        assert!(judge(&history(50, &[]), &Terms::default()).expect_decided().is_ok());
    }
}
