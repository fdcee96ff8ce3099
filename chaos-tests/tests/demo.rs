//! The demo and the drill in small, as a stranger runs them: through the binary.

mod rig;

use std::process::Command;

use serde_json::Value;
use tidepool_chaos_tests::lab::Lab;

fn last_line(arguments: &[&str]) -> (Value, String) {
    let output = Command::new(rig::binary()).args(arguments).output().expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?} ended with {}\n{text}\n{errors}", output.status);
    let line = text.lines().last().unwrap_or_else(|| panic!("{arguments:?} printed nothing\n{errors}"));
    (serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")), text)
}

/// The files are whatever lies beside the binary and on the machine. Exit code 0 says that everything held.
#[test]
fn a_small_demo_holds_and_reports_every_field() {
    let (line, _) = last_line(&["demo", "--objects", "60", "--bytes", "40MiB", "--json"]);
    for field in [
        "objects",
        "bytes",
        "rpo_lost",
        "rto_write_max_ms",
        "rto_read_max_ms",
        "longest_call_ms",
        "put_gb_s",
        "get_gb_s",
        "ops_per_entry",
        "state_hash_equal",
    ] {
        assert!(line.get(field).is_some_and(|value| !value.is_null()), "{field} is missing: {line}");
    }
    assert!(line["objects"].as_u64() >= Some(60) && line["bytes"].as_u64() >= Some(40 << 20), "{line}");
    assert_eq!((&line["rpo_lost"], &line["state_hash_equal"]), (&Value::from(0), &Value::from(true)));
}

/// Two kills of the leader in a pool that overflows.
#[test]
fn a_short_drill_holds_and_reports_every_field() {
    let arguments = ["drill", "kill-leader", "--spawn", "--rounds", "2", "--fill", "95", "-o", "json"];
    let (line, text) = last_line(&arguments);
    assert_eq!(text.lines().count(), 3, "a line a round and the summary:\n{text}");
    for field in ["rounds", "rpo_lost", "rto_write_ms", "rto_read_ms", "worst_client_gap_ms", "longest_call_ms"] {
        assert!(line.get(field).is_some_and(|value| !value.is_null()), "{field} is missing: {line}");
    }
    for figure in ["min", "p50", "p99", "max"] {
        assert!(line["rto_write_ms"][figure].as_f64() > Some(0.0), "{line}");
    }
    assert_eq!((&line["rounds"], &line["rpo_lost"]), (&Value::from(2), &Value::from(0)));
    assert_eq!(line["state_hash_equal"], Value::from(true));
}

/// One round of every other drill that makes a pool of its own.
#[test]
fn every_drill_holds_and_writes_its_report() {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report.html");
    let path = report.to_str().unwrap();
    for drill in [
        "pause-leader",
        "isolate-leader",
        "transfer",
        "kill-standby",
        "kill-datanode",
        "power-cut",
        "full-restart",
        "restore",
    ] {
        if drill == "power-cut" && Lab::in_namespaces(async |_| Ok(())).is_err() {
            eprintln!("{drill} skipped: no laboratory here");
            continue;
        }
        let (line, _) = last_line(&["drill", drill, "--spawn", "--rounds", "1", "--report", path, "-o", "json"]);
        assert_eq!((&line["held"], &line["rpo_lost"]), (&Value::from(true), &Value::from(0)), "{drill}: {line}");
        let html = std::fs::read_to_string(&report).unwrap();
        assert!(html.contains(drill) && html.contains("<svg") && !html.contains("http://"), "{drill}: {html:.200}");
        std::fs::remove_file(&report).unwrap();
    }
}
