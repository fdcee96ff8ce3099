//! The drill on a quorum that serves others: only through its network and what the operator gave it.

mod rig;

use std::process::{Output, Stdio};
use std::time::Duration;

use rig::{Pool, WITHIN, expect_all, keys, pool, put_all, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tidepool_chaos_tests::cluster::{Cluster, POLL_EVERY};

const OBJECT_BYTES: usize = 10_000;
/// Longest run of one drill here.
const DRILL_WITHIN: Duration = Duration::from_secs(240);

/// `tidepool drill` on the pool, as an operator runs it; meanwhile a supervisor starts what died.
async fn drill(pool: &mut Pool, fault: &str, arguments: &[&str]) -> Output {
    let mut command = tokio::process::Command::new(rig::binary());
    command.args(["drill", fault, "-o", "json", "--rounds", "2", "--writers", "2", "--readers", "2"]);
    command.args(["--masters", &pool.cluster.masters_text()]).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let running = tokio::time::timeout(DRILL_WITHIN, command.output());
    let directory = pool.directory.path().to_owned();
    let supervisor = supervise(&mut pool.cluster, &directory);
    tokio::select! {
        output = running => output.expect("the drill ends").unwrap(),
        () = supervisor => unreachable!("a supervisor never ends"),
    }
}

/// Starts masters that died and keeps their process id files, as an init system does.
async fn supervise(cluster: &mut Cluster, directory: &std::path::Path) {
    loop {
        for (at, master) in cluster.masters.iter_mut().enumerate() {
            if !master.is_running().unwrap() {
                master.start().unwrap();
            }
            let file = directory.join(format!("{}.pid", at + 1));
            // Renamed into place: whoever reads it meanwhile finds a number, not a file that was just emptied.
            let new = file.with_extension("new");
            std::fs::write(&new, master.id().unwrap().to_string()).unwrap();
            std::fs::rename(&new, &file).unwrap();
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

fn last_line(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the drill failed ({}):\n{text}\n{errors}", output.status);
    serde_json::from_str(text.lines().last().expect("a last line")).expect("JSON")
}

/// What an operator reads from the last line, whatever ended the leader.
fn judge(summary: &Value, fault: &str) {
    println!("{summary}");
    assert_eq!(summary["rounds"], 2, "{summary}");
    assert_eq!(summary["rpo_lost"], 0, "{summary}");
    assert_eq!(summary["state_hash_equal"], true, "{summary}");
    assert_eq!(summary["held"], true, "{summary}");
    assert_eq!(summary["fault"], fault, "{summary}");
    for side in ["rto_write_ms", "rto_read_ms"] {
        for rank in ["p50", "p99", "max"] {
            assert!(summary[side][rank].as_f64().is_some_and(|ms| ms > 0.0), "{side} {rank}: {summary}");
        }
    }
    for figure in ["worst_client_gap_ms", "longest_call_ms"] {
        assert!(summary[figure].as_f64().is_some_and(|ms| ms > 0.0), "{figure}: {summary}");
    }
    assert!(summary["acknowledged"].as_u64().is_some_and(|puts| puts > 100), "{summary}");
}

/// Others' objects as they were, and not one key of the drill's left.
async fn expect_untouched(pool: &Pool, others: &[String]) {
    expect_all(&pool.client, others, OBJECT_BYTES).await;
    let page = pool.client.list(b"", 1000, b"", Some(WITHIN)).await.unwrap();
    let left: Vec<String> = page.objects.iter().map(|object| String::from_utf8_lossy(&object.key).into()).collect();
    assert!(left.iter().all(|key| key.starts_with("others/")), "left in the pool: {left:?}");
    assert_eq!(left.len(), others.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_quorum_is_drilled_by_killing_its_leader() {
    let mut pool = pool(|_| {}).await;
    let others = keys("others", 50);
    put_all(&pool.client, &others, OBJECT_BYTES, 1).await;
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();
    let processes = |pool: &Pool| pool.cluster.masters.iter().map(|master| master.id()).collect::<Vec<_>>();
    let running = processes(&pool);

    // Without --yes it says what it would do, and does nothing.
    let kill = format!("kill -9 $(cat {}/{{node_id}}.pid)", pool.directory.path().display());
    let refused = drill(&mut pool, "kill-leader", &["--kill-command", &kill]).await;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    for words in ["2 times", "tidepool-drill/", "kill -9", "--yes", "127.0.0.1"] {
        assert!(text.contains(words), "'{text}' does not say '{words}'");
    }
    // On a busy host an election may happen by itself; nobody was killed, and nothing was written.
    assert_eq!(processes(&pool), running, "a refused drill killed somebody");
    expect_untouched(&pool, &others).await;

    let summary = last_line(&drill(&mut pool, "kill-leader", &["--yes", "--kill-command", &kill]).await);
    judge(&summary, "kill-leader");
    let after = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert!(after.term >= before.term + 2, "two leaders died in two rounds");
    expect_untouched(&pool, &others).await;

    let file = format!("{}/{{node_id}}.pid", pool.directory.path().display());
    judge(
        &last_line(&drill(&mut pool, "kill-leader", &["--yes", "--pid-file", &file, "--fill", "half"]).await),
        "kill-leader",
    );
    expect_untouched(&pool, &others).await;

    // Stopped and woken: the same process leads or follows afterwards.
    judge(&last_line(&drill(&mut pool, "pause-leader", &["--yes", "--pid-file", &file]).await), "pause-leader");
    expect_untouched(&pool, &others).await;

    // What takes more than one leader from others is not done to them.
    let refused = drill(&mut pool, "full-restart", &["--yes"]).await;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("--spawn"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_live_quorum_is_drilled_by_handing_over() {
    let mut pool = pool(|_| {}).await;
    let others = keys("others", 20);
    put_all(&pool.client, &others, OBJECT_BYTES, 1).await;
    let before = pool.cluster.leader_status(WITHIN).await.unwrap();
    judge(&last_line(&drill(&mut pool, "transfer", &["--yes"]).await), "transfer");
    let after = pool.cluster.leader_status(WITHIN).await.unwrap();
    assert!(after.term > before.term, "leadership moved");
    expect_untouched(&pool, &others).await;
}

/// Ctrl-C in the middle of a round: the drill still removes its keys.
#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_drill_removes_its_keys() {
    let pool = pool(|_| {}).await;
    let others = keys("others", 20);
    put_all(&pool.client, &others, OBJECT_BYTES, 1).await;
    let mut command = tokio::process::Command::new(rig::binary());
    command.args(["drill", "transfer", "--yes", "--rounds", "1000"]);
    command.args(["--masters", &pool.cluster.masters_text()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let mut drill = command.spawn().unwrap();
    wait_for("objects of the drill", async || {
        let page = pool.client.list(b"tidepool-drill/", 1000, b"", Some(WITHIN)).await.ok()?;
        (page.objects.len() > 50).then_some(())
    })
    .await;
    let pid = Pid::from_raw(drill.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let status = tokio::time::timeout(WITHIN, drill.wait()).await.expect("an interrupted drill ends").unwrap();
    assert_eq!(status.code(), Some(1), "{status}");
    expect_untouched(&pool, &others).await;
}
