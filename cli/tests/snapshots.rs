//! Published snapshots, by the real binary: taken on demand, at the stop and in turns; looked at without a master; a process
//! killed at any moment leaves what was published, and the next one goes on; a full disk and a real S3 server.

mod binary;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use binary::{Role, code, expect, run, text, tidepool, wait_for};
use serde_json::Value;

/// Rounds of killing a process.
const ROUNDS: u64 = 20;

/// A quorum of one that publishes.
struct Pool {
    role: Role,
    rpc: String,
}

fn start(directory: &Path, url: &str, more: &[&str]) -> Pool {
    start_at("127.0.0.1:0", directory, url, more)
}

/// At an address: one that is started again is known by it.
fn start_at(listen: &str, directory: &Path, url: &str, more: &[&str]) -> Pool {
    let data = directory.join("master");
    let fixed = ["master", "--listen", listen, "--http-port", "0", "--data-dir", data.to_str().unwrap()];
    let mut role = Role::start(directory, "master", &[&fixed[..], &["--snapshot-url", url], more].concat());
    let rpc = role.address("rpc");
    wait_for("a leader", || (code(&run(&["status", "--masters", &rpc])) == 0).then_some(()));
    Pool { role, rpc }
}

impl Pool {
    /// Something new in the directory.
    fn change(&self, name: &str) {
        expect(&["tenant", "set", name, "--masters", &self.rpc]);
    }
    fn take(&self) -> std::process::Output {
        run(&["snapshot", "take", "-o", "json", "--masters", &self.rpc])
    }
    fn taken(&self) -> Value {
        let output = self.take();
        assert_eq!(code(&output), 0, "{}{}", text(&output.stderr), self.role.log());
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

fn url_of(path: &Path) -> String {
    format!("file://{}", path.display())
}

fn listed(url: &str) -> Vec<Value> {
    let shown: Value = serde_json::from_str(&expect(&["snapshot", "list", "-o", "json", "--from", url])).unwrap();
    shown["snapshots"].as_array().unwrap().clone()
}

fn whole(url: &str) -> Vec<u64> {
    let whole = |snapshot: &&Value| snapshot["state"] == "whole";
    listed(url).iter().filter(whole).map(|snapshot| snapshot["index"].as_u64().unwrap()).collect()
}

#[test]
fn snapshots_are_taken_listed_shown_and_verified() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("published");
    let url = url_of(&place);
    let mut pool = start(directory.path(), &url, &["--snapshot-interval", "0s"]);
    let missing = run(&["snapshot", "show", "--from", &url_of(&directory.path().join("nothing"))]);
    assert_eq!(code(&missing), 7, "{}", text(&missing.stderr));

    pool.change("first");
    let first = pool.taken();
    assert_eq!(first["published"], true);
    let indexes: Vec<u64> = (0..3)
        .map(|number| {
            pool.change(&format!("t{number}"));
            pool.taken()["index"].as_u64().unwrap()
        })
        .collect();
    // Two are kept; the newest first.
    assert_eq!(whole(&url), [indexes[2], indexes[1]]);
    let shown: Value = serde_json::from_str(&expect(&["snapshot", "show", "-o", "json", "--from", &url])).unwrap();
    assert_eq!((shown["index"].as_u64(), shown["tenants"].as_u64()), (Some(indexes[2]), Some(5)));
    let path = shown["path"].as_str().unwrap().to_owned();
    assert!(expect(&["snapshot", "show", &path, "--from", &url]).contains("5 tenants"));
    expect(&["snapshot", "verify", "--from", &url]);
    let status: Value = serde_json::from_str(&expect(&["status", "-o", "json", "--masters", &pool.rpc])).unwrap();
    assert_eq!(status["masters"][0]["snapshot"]["published_index"].as_u64(), Some(indexes[2]));

    let http = pool.role.address("http");
    let figure = |name: &str| -> f64 {
        let (_, metrics) = binary::http(&http, "GET", "/metrics", "");
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    // Gauges are refreshed twice a second.
    wait_for("the gauge", || (figure("tidepool_master_snapshot_published_index") as u64 == indexes[2]).then_some(()));
    assert!(figure("tidepool_raft_apply_held_seconds_count{step=\"freeze\"}") >= 4.0);
    assert!(figure("tidepool_raft_apply_held_seconds_count{step=\"entry\"}") >= 4.0);
    assert_eq!(figure("tidepool_master_snapshot_seconds_count{phase=\"upload\"}"), 4.0);

    // Damage is named, by part; the code says whether anything is left.
    let segments = place.join(&path).join("segments");
    let bytes = std::fs::read(&segments).unwrap();
    std::fs::write(&segments, [&bytes[..bytes.len() - 1], b"?"].concat()).unwrap();
    let damaged = run(&["snapshot", "verify", "--from", &url]);
    assert_eq!(code(&damaged), 6, "{}", text(&damaged.stderr));
    assert!(text(&damaged.stdout).contains("segments: its checksum is wrong"), "{}", text(&damaged.stdout));
    assert_eq!(code(&run(&["snapshot", "verify", &path, "--from", &url])), 7);
    std::fs::write(&segments, bytes).unwrap();

    // A stop publishes what is new; with nothing new it does not.
    pool.change("last");
    let log_before = whole(&url);
    assert_eq!(pool.role.terminate(), 0);
    let after = whole(&url);
    assert!(after[0] > log_before[0], "{after:?} {log_before:?}");
}

/// Standbys take turns by themselves, each below its own name; the leader leaves it to them.
#[test]
fn standbys_publish_in_turns_and_the_leader_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let url = url_of(&directory.path().join("published"));
    let ports: Vec<u16> = {
        let bind = |_| std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listeners: Vec<_> = (0..3).map(bind).collect();
        listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
    };
    let members: Vec<String> = ports.iter().zip(1..).map(|(port, id)| format!("{id}=127.0.0.1:{port}")).collect();
    let members = members.join(",");
    let roles: Vec<Role> = (1..=3)
        .map(|id| {
            let (id, name) = (id.to_string(), format!("m{id}"));
            let data = directory.path().join(&name);
            let fixed = ["master", "--node-id", &id, "--members", &members, "--http-port", "0", "--data-dir"];
            // Agreed well within a turn.
            let often = ["--checkpoint-interval", "200ms"];
            let own = [data.to_str().unwrap(), "--snapshot-url", &url, "--snapshot-interval", "3s"];
            Role::start(directory.path(), &name, &[&fixed[..], &own, &often].concat())
        })
        .collect();
    let masters: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let masters = masters.join(",");
    let leader = wait_for("a leader", || {
        let shown: Value =
            serde_json::from_slice(&run(&["status", "-o", "json", "--masters", &masters]).stdout).ok()?;
        shown["leader_node_id"].as_u64()
    });
    let mut number = 0;
    let publishers = wait_for("both standbys have published twice", || {
        number += 1;
        run(&["tenant", "set", &format!("t{}", number % 7), "--bytes", &format!("{number}MiB"), "--masters", &masters]);
        let found = listed(&url);
        let mut by_node = std::collections::BTreeMap::<u64, u64>::new();
        for snapshot in found.iter().filter(|snapshot| snapshot["state"] == "whole") {
            *by_node.entry(snapshot["node_id"].as_u64().unwrap()).or_default() += 1;
        }
        (by_node.values().filter(|&&kept| kept >= 2).count() >= 2).then_some(by_node)
    });
    let shown: Value = serde_json::from_str(&expect(&["status", "-o", "json", "--masters", &masters])).unwrap();
    if shown["leader_node_id"].as_u64() == Some(leader) && shown["term"].as_u64() == Some(1) {
        assert!(!publishers.contains_key(&leader), "{publishers:?}, led by {leader}");
    }
    expect(&["snapshot", "verify", "--from", &url]);
    drop(roles);
}

/// A process killed at a random moment of writing or sending: what was published stays whole, what is half there is never
/// taken for whole, and the next process publishes.
#[test]
fn a_killed_process_leaves_what_was_published_and_the_next_one_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("published");
    let url = url_of(&place);
    // Slowed down, so that the kill falls into the sending too.
    let slow = ["--snapshot-interval", "0s", "--snapshot-bytes-per-s", "1KiB"];
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("127.0.0.1:{port}");
    let (mut newest, mut cut) = (0, 0);
    for round in 0..ROUNDS {
        let pool = start_at(&listen, directory.path(), &url, &slow);
        pool.change(&format!("round-{round}"));
        let mut taking = tidepool();
        taking.args(["snapshot", "take", "--masters", &pool.rpc]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut taking = taking.spawn().unwrap();
        // Any moment, from at once to after the end; the delay is the test's random number, nothing waits for it.
        let moment = Duration::from_millis(round * 7919 % 1_500);
        let began = Instant::now();
        while began.elapsed() < moment && taking.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        cut += u64::from(taking.try_wait().unwrap().is_none());
        drop(pool.role);
        taking.wait().unwrap();
        let found = whole(&url);
        let best = found.first().copied().unwrap_or(0);
        assert!(best >= newest, "round {round}: {best} after {newest}");
        newest = best;
        if !found.is_empty() {
            expect(&["snapshot", "verify", "--from", &url]);
        }
    }
    assert!(cut > 0, "no round was cut short");
    let pool = start_at(&listen, directory.path(), &url, &["--snapshot-interval", "0s"]);
    pool.change("after");
    assert!(pool.taken()["index"].as_u64().unwrap() > newest);
    expect(&["snapshot", "verify", "--from", &url]);
    let node = listed(&url)[0]["path"].as_str().unwrap().rsplit_once('/').unwrap().0.to_owned();
    let names: Vec<String> = std::fs::read_dir(place.join(node))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.len() <= 3 && !names.iter().any(|name| name.starts_with('.')), "{names:?}");
}

/// A mounted tmpfs, taken away at the end.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// None where mounting is not allowed.
    fn mount(path: &Path, size: &str) -> Option<SmallDisk> {
        std::fs::create_dir_all(path).unwrap();
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(path).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| SmallDisk(path.to_owned()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_is_named_and_the_last_snapshot_stays() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("published");
    let Some(_disk) = SmallDisk::mount(&place, "256k") else {
        eprintln!("skipped: this environment does not allow to mount a tmpfs");
        return;
    };
    let url = url_of(&place);
    let pool = start(directory.path(), &url, &["--snapshot-interval", "0s", "--snapshot-on-shutdown=false"]);
    pool.change("first");
    let first = pool.taken()["index"].as_u64().unwrap();
    let filler = place.join("filler");
    let full = std::fs::write(&filler, vec![1; 1 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    pool.change("second");
    let failed = pool.take();
    assert_eq!(code(&failed), 5, "{}", text(&failed.stderr));
    assert!(text(&failed.stderr).contains("local image is untouched"), "{}", text(&failed.stderr));
    assert_eq!(whole(&url), [first]);
    std::fs::remove_file(filler).unwrap();
    assert!(pool.taken()["index"].as_u64().unwrap() > first);
    expect(&["snapshot", "verify", "--from", &url]);
}

/// A real S3 server, started here.
struct S3Server {
    process: std::process::Child,
    endpoint: String,
}

impl Drop for S3Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

const CREDENTIALS: [(&str, &str); 2] = [("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")];

/// None where scripts/setup was told to leave it out.
fn s3_server(directory: &Path) -> Option<S3Server> {
    let binary = Path::new(env!("CARGO_BIN_EXE_tidepool"));
    let target = binary.ancestors().nth(2).expect("the target directory");
    let server = target.join("tools/moto/bin/moto_server");
    if !server.exists() {
        assert!(std::env::var_os("TIDEPOOL_REQUIRE_S3").is_none(), "{} is missing", server.display());
        eprintln!("skipped: no {}; scripts/setup makes it", server.display());
        return None;
    }
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let log = std::fs::File::create(directory.join("s3.log")).unwrap();
    let mut command = Command::new(server);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).stdout(Stdio::null()).stderr(log);
    let server = S3Server { process: command.spawn().unwrap(), endpoint: format!("http://127.0.0.1:{port}") };
    wait_for("the S3 server", || std::net::TcpStream::connect(("127.0.0.1", port)).ok());
    let (status, _) = binary::http(&format!("127.0.0.1:{port}"), "PUT", "/bucket", "");
    assert_eq!(status, 200);
    Some(server)
}

#[test]
fn snapshots_go_to_a_real_s3_server_and_come_back() {
    let directory = tempfile::tempdir().unwrap();
    let Some(server) = s3_server(directory.path()) else { return };
    let url = format!("s3://bucket/deep/er?endpoint={}", server.endpoint);
    let with = |arguments: &[&str]| {
        let output = tidepool().args(arguments).envs(CREDENTIALS).output().unwrap();
        assert_eq!(code(&output), 0, "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let unsigned = run(&["snapshot", "list", "--from", &url]);
    assert!(text(&unsigned.stderr).contains("AWS_ACCESS_KEY_ID"), "{}", text(&unsigned.stderr));
    let data = directory.path().join("master");
    let fixed = ["master", "--listen", "127.0.0.1:0", "--http-port", "0", "--data-dir", data.to_str().unwrap()];
    let own = ["--snapshot-url", &url, "--snapshot-interval", "0s"];
    let mut role = Role::start_with(directory.path(), "master", &[&fixed[..], &own].concat(), &CREDENTIALS);
    let pool = Pool { rpc: role.address("rpc"), role };
    wait_for("a leader", || (code(&run(&["status", "--masters", &pool.rpc])) == 0).then_some(()));
    let taken: Vec<u64> = (0..3)
        .map(|number| {
            pool.change(&format!("t{number}"));
            pool.taken()["index"].as_u64().unwrap()
        })
        .collect();
    let list = || -> Vec<Value> {
        let shown: Value = serde_json::from_str(&with(&["snapshot", "list", "-o", "json", "--from", &url])).unwrap();
        shown["snapshots"].as_array().unwrap().clone()
    };
    let indexes: Vec<u64> = list().iter().map(|snapshot| snapshot["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [taken[2], taken[1]]);
    with(&["snapshot", "verify", "--from", &url]);
    assert!(with(&["snapshot", "show", "--from", &url]).contains("4 tenants"));
    // One cluster's directory is a place to read from too.
    let cluster = list()[0]["path"].as_str().unwrap().split('/').next().unwrap().to_owned();
    let below = format!("s3://bucket/deep/er/{cluster}?endpoint={}", server.endpoint);
    with(&["snapshot", "verify", "--from", &below]);
    // The server goes away: named, and the master goes on.
    drop(server);
    pool.change("after");
    let failed = run(&["snapshot", "take", "--masters", &pool.rpc, "--deadline", "2m"]);
    assert_eq!(code(&failed), 5, "{}", text(&failed.stderr));
    pool.change("and on");
}
