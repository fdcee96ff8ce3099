//! A pool in one process (`tidepool dev`), seen through the command line and over HTTP.

mod binary;

use std::collections::BTreeSet;
use std::io::Write;
use std::process::Stdio;

use binary::{Role, code, expect, http, run, text, tidepool, wait_for};

fn dev(directory: &std::path::Path) -> (Role, String, String) {
    std::fs::create_dir(directory.join("tmp")).unwrap();
    let mut role = Role::start(directory, "dev", &["dev", "--free-ports", "--dram", "64MiB"]);
    let (rpc, http_address) = (role.address("rpc"), role.address("http"));
    wait_for("a datanode with its memory", || {
        let shown = run(&["status", "-o", "json", "--masters", &rpc]);
        let status: serde_json::Value = serde_json::from_slice(&shown.stdout).ok()?;
        status["segments"].as_array().is_some_and(|segments| !segments.is_empty()).then_some(())
    });
    (role, rpc, http_address)
}

#[test]
fn objects_go_in_and_out_and_every_outcome_has_its_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let (role, rpc, _) = dev(directory.path());
    let temporary = directory.path().join("tmp");
    let file = directory.path().join("value");
    let value: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(&file, &value).unwrap();
    let masters = ["--masters", &rpc];
    let with = |arguments: &[&str]| run(&[arguments, &masters].concat());
    let file = file.to_str().unwrap();

    assert_eq!(code(&with(&["put", "a/1", file])), 0);
    let got = with(&["get", "a/1"]);
    assert_eq!(code(&got), 0, "{}", text(&got.stderr));
    assert!(got.stdout == value, "the bytes that were put");
    let out = directory.path().join("out");
    assert_eq!(code(&with(&["get", "a/1", "-O", out.to_str().unwrap()])), 0);
    assert!(std::fs::read(&out).unwrap() == value);

    // User report 41: a put on an existing key says so, and changes nothing.
    let mut child =
        tidepool().args(["put", "a/1"]).args(masters).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"other bytes").unwrap();
    let again = child.wait_with_output().unwrap();
    assert_eq!(code(&again), 4, "{}", text(&again.stderr));
    assert!(text(&again.stderr).contains("TP0021"));
    assert!(with(&["get", "a/1"]).stdout == value);

    let part = with(&["get", "a/1", "--offset", "1", "--length", "5"]);
    assert!(part.stdout == value[1..6]);
    let beyond = with(&["get", "a/1", "--length", "1000000000"]);
    assert_ne!(code(&beyond), 0);
    assert!(String::from_utf8_lossy(&beyond.stderr).contains("no part of it"));
    let missing = with(&["get", "nothing"]);
    assert_eq!(code(&missing), 3);
    assert!(text(&missing.stderr).contains("TP0020") && missing.stdout.is_empty());
    assert_eq!(code(&with(&["put", "", file])), 2, "an empty key");

    assert_eq!(code(&with(&["put", "a/2", file])), 0);
    assert_eq!(text(&with(&["ls", "a/"]).stdout), "a/1\na/2\n");
    assert_eq!(text(&with(&["ls", "b"]).stdout), "");
    let listed: serde_json::Value =
        serde_json::from_slice(&with(&["ls", "-o", "json", "--limit", "1"]).stdout).unwrap();
    assert_eq!((listed["objects"].as_array().map(Vec::len), listed["more"].as_bool()), (Some(1), Some(true)));

    let place = with(&["stat", "--where", "a/2"]);
    let place = text(&place.stdout);
    assert!(place.contains("directory  object") && place.contains("copy ") && place.contains("segment"), "{place}");
    let stat: serde_json::Value = serde_json::from_slice(&with(&["stat", "a/2", "-o", "json"]).stdout).unwrap();
    assert_eq!(stat[0]["bytes"], value.len());
    assert_eq!(code(&with(&["stat", "a/2", "nothing"])), 6, "partial");

    assert_eq!(code(&with(&["rm", "--force", "a/1", "a/2"])), 0);
    assert_eq!(code(&with(&["rm", "a/1"])), 3);
    assert_eq!(role.terminate(), 0, "SIGTERM stops in order");
    let left: Vec<_> = std::fs::read_dir(&temporary).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "nothing temporary is left: {left:?}");
}

#[test]
fn status_shows_the_pool_and_ends_with_one_step() {
    let directory = tempfile::tempdir().unwrap();
    let (_role, rpc, _) = dev(directory.path());
    let screen = expect(&["status", "--masters", &rpc]);
    assert!(screen.contains("leader") && screen.contains("64MiB"), "{screen}");
    assert!(screen.lines().last().unwrap().starts_with("next step: "), "{screen}");
    let refused = run(&["transfer-leader", "--masters", &rpc]);
    assert_ne!(code(&refused), 0, "a quorum of one has nobody to hand over to");
}

#[test]
fn every_role_answers_over_http_and_its_log_level_changes() {
    let directory = tempfile::tempdir().unwrap();
    let (role, rpc, address) = dev(directory.path());
    assert_eq!(http(&address, "GET", "/livez", "").0, 200);
    let (ready, body) =
        wait_for("readiness", || Some(http(&address, "GET", "/readyz?verbose", "")).filter(|(code, _)| *code == 200));
    let report: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((ready, report["role"].as_str()), (200, Some("leader")));
    assert_eq!(report["behind"], 0);
    let (_, segments) = http(&address, "GET", "/get_all_segments", "");
    assert_eq!(segments.lines().count(), 1, "{segments}");
    assert_eq!(http(&address, "GET", "/no/such/route", "").0, 404);

    assert!(http(&address, "GET", "/api/v1/log-level", "").1.contains("info"));
    assert_eq!(http(&address, "POST", "/api/v1/log-level", "warn,tidepool_master=debug").0, 200);
    assert!(http(&address, "GET", "/api/v1/log-level", "").1.contains("tidepool_master=debug"));
    let (status, why) = http(&address, "POST", "/api/v1/log-level", "a=b=c");
    assert!(status == 400 && why.contains("target=level"), "{why}");
    assert_eq!(code(&run(&["status", "--masters", &rpc])), 0);
    assert!(role.log().contains("node=dev"), "every line names the node:\n{}", role.log());
}

#[test]
fn a_drain_job_is_asked_for_looked_at_and_cancelled_over_http() {
    let directory = tempfile::tempdir().unwrap();
    let (_role, rpc, address) = dev(directory.path());
    let file = directory.path().join("value");
    std::fs::write(&file, "bytes").unwrap();
    let put = |key| code(&run(&["put", key, file.to_str().unwrap(), "--masters", &rpc, "--deadline", "2s"]));
    assert_eq!(put("a"), 0);
    let (_, segment) = http(&address, "GET", "/get_all_segments", "");
    let body = format!(r#"{{"segments": ["{}"], "target_segments": [], "max_concurrency": 4}}"#, segment.trim());
    let (status, created) = http(&address, "POST", "/api/v1/drain_jobs", &body);
    let created: serde_json::Value = serde_json::from_str(&created).unwrap();
    assert_eq!((status, created["status"].as_str()), (200, Some("CREATED")), "{created}");
    let id = created["job_id"].as_str().unwrap();
    let query = || -> serde_json::Value {
        let (status, job) = http(&address, "GET", &format!("/api/v1/drain_jobs/query?job_id={id}"), "");
        assert_eq!(status, 200, "{job}");
        serde_json::from_str(&job).unwrap()
    };
    // There is no other segment: the object has nowhere to go.
    let job = query();
    assert_eq!((job["status_name"].as_str(), job["left_units"].as_u64()), (Some("RUNNING"), Some(1)), "{job}");
    assert_eq!(job["segments"][0], segment.trim());
    let (status, cancelled) = http(&address, "POST", &format!("/api/v1/drain_jobs/cancel?job_id={id}"), "");
    let cancelled: serde_json::Value = serde_json::from_str(&cancelled).unwrap();
    assert_eq!((status, cancelled["status"].as_str()), (200, Some("CANCELED")), "{cancelled}");
    let job = query();
    assert_eq!((job["status_name"].as_str(), job["status"].as_u64()), (Some("CANCELED"), Some(5)), "{job}");
    assert_eq!(put("b"), 0);
    let hot = run(&["hot", "--masters", &rpc]);
    assert!(code(&hot) == 1 && text(&hot.stderr).contains("dynamic_replication"), "{}", text(&hot.stderr));
}

/// User report 109, the HTTP part: garbage and absurd requests leave the process alive and serving.
#[test]
fn case_109_garbage_on_the_http_port_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (_role, _, address) = dev(directory.path());
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..200 {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let mut bytes: Vec<u8> = Vec::new();
        if round % 4 == 0 {
            bytes.extend_from_slice(b"POST /api/v1/log-level HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n");
        }
        for _ in 0..64 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.extend_from_slice(&seed.to_le_bytes());
        }
        // The server may have closed already.
        let _ = stream.write_all(&bytes);
    }
    let large = "x".repeat(1 << 20);
    let mut stream = std::net::TcpStream::connect(&address).unwrap();
    let head = format!("POST /api/v1/log-level HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", large.len());
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(large.as_bytes()));
    assert_eq!(http(&address, "GET", "/livez", "").0, 200);
    assert!(http(&address, "GET", "/api/v1/log-level", "").1.contains("info"));
}

/// Series of a scrape, without labels and histogram suffixes.
fn series(scrape: &str) -> BTreeSet<String> {
    let name = |line: &str| line.strip_prefix("# TYPE ").and_then(|rest| rest.split(' ').next()).map(str::to_owned);
    scrape.lines().filter_map(name).collect()
}

fn metrics_in_the_book() -> BTreeSet<String> {
    let page = include_str!("../../docs/operate/observe.md");
    let row = |line: &str| {
        line.strip_prefix("| `tidepool_")
            .and_then(|rest| rest.split(['`', '{']).next())
            .map(|name| format!("tidepool_{name}"))
    };
    page.lines().filter_map(row).collect()
}

/// User report 103: a dashboard named metrics that do not exist. User report 104: hits and misses were not on /metrics.
/// Fails when a metric is renamed, removed or added without the book.
#[test]
fn case_103_case_104_the_book_and_the_scrape_name_the_same_series() {
    let directory = tempfile::tempdir().unwrap();
    let (mut role, rpc, address) = dev(directory.path());
    let datanode_http = role.ports()["datanode_http"].as_str().expect("dev names its second HTTP port").to_owned();
    let masters = ["--masters", &rpc];
    for arguments in
        [vec!["put", "k", "/etc/hostname"], vec!["get", "k"], vec!["get", "missing"], vec!["rm", "--force", "k"]]
    {
        run(&[&arguments[..], &masters].concat());
    }
    let documented = metrics_in_the_book();
    let mut served = BTreeSet::new();
    let mut scrapes = String::new();
    for address in [&address, &datanode_http] {
        let (code, scrape) = http(address, "GET", "/metrics", "");
        assert_eq!(code, 200);
        served.extend(series(&scrape));
        scrapes.push_str(&scrape);
    }
    let undocumented: Vec<_> = served.difference(&documented).collect();
    assert!(undocumented.is_empty(), "not in docs/operate/observe.md: {undocumented:?}");
    // A labelled metric has no series before its first event; then the code must at least name it.
    let sources = sources();
    let unknown: Vec<_> =
        documented.difference(&served).filter(|name| !sources.iter().any(|text| names(text, name))).collect();
    assert!(unknown.is_empty(), "docs/operate/observe.md names metrics that do not exist: {unknown:?}");
    assert!(
        scrapes.lines().any(|line| line.starts_with("tidepool_master_lookups_total{") && line.contains("miss")),
        "misses are counted"
    );
}

/// The whole name, or the name after the crate's prefix, as a literal.
fn names(source: &str, metric: &str) -> bool {
    let short = metric.trim_start_matches("tidepool_").split_once('_').map_or("", |(_, rest)| rest);
    source.contains(&format!("\"{metric}\"")) || source.contains(&format!("\"{short}\""))
}

fn sources() -> Vec<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let files = [
        "master/src/service/metrics.rs",
        "raft/src/metrics.rs",
        "raft/src/log/metrics.rs",
        "datanode/src/metrics.rs",
        "cli/src/process.rs",
    ];
    files
        .iter()
        .map(|file| std::fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}")))
        .collect()
}
