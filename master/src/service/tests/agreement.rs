//! M3 in a quorum of three: what is planted in one of them, or in all, and what becomes of it. And M1: an op that stops a
//! master is left out by it.

use std::path::PathBuf;

use tidepool_proto::ErrorCode;
use tidepool_proto::v1::admin_service_server::AdminService;
use tidepool_raft::{PayloadHash, StoppedAt};

use super::*;
use crate::directory::{Directory, Op, Outcome};
use crate::service::Stopped;
use crate::service::machine::AppliedEntry;

/// Log on disk: two snapshots' worth of 8 MiB, what a third brings until it is agreed, and RocksDB's own files.
const LOG_BYTES_MAX: u64 = 96 << 20;

struct Trio {
    options: Vec<MasterOptions>,
    rigs: Vec<Rig>,
    _dir: tempfile::TempDir,
}

pub(super) fn options(dir: &std::path::Path, size: u64, adjust: impl Fn(&mut MasterOptions)) -> Vec<MasterOptions> {
    // Held until all are drawn, so that no port comes twice.
    let listeners: Vec<_> =
        (0..size).map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let address = |at: usize| {
        let port = listeners[at].local_addr().expect("its address").port();
        format!("127.0.0.1:{port}").parse::<Address>().expect("an address")
    };
    let members: Vec<Member> =
        (0..size).map(|at| Member { node_id: NodeId(at + 1), address: address(at as usize) }).collect();
    let of = |member: &Member| {
        let (id, at) = (member.node_id, member.address.clone());
        let mut options = MasterOptions::new(id, dir.join(id.to_string()), at.clone(), at, members.clone());
        options.checkpoint_interval = Duration::from_millis(200);
        options.audit_interval = Duration::ZERO;
        options.node_suspect_timeout = Duration::from_secs(60);
        adjust(&mut options);
        options
    };
    members.iter().map(of).collect()
}

/// Starts one; its port and its log may still be held by an earlier life.
pub(super) async fn start(options: &MasterOptions) -> Rig {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    loop {
        match Master::start(options.clone(), LogFilter::fixed()).await {
            Ok(master) => return Rig::of(master, None),
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "it does not start: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

impl Trio {
    /// Three masters, a datanode and some objects.
    async fn start(adjust: impl Fn(&mut MasterOptions)) -> Trio {
        let memory = std::path::Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let dir = dir.expect("a temporary directory");
        let options = options(dir.path(), 3, adjust);
        let rigs = futures::future::join_all(options.iter().map(start)).await;
        let trio = Trio { options, rigs, _dir: dir };
        let leader = &trio.rigs[trio.leader().await];
        leader.datanode(1, 1 << 24).await;
        let session = leader.hello(1).await;
        for i in 0..30 {
            leader.put(session, &format!("k{i}"), "").await;
        }
        trio.agree().await;
        trio
    }

    async fn leader(&self) -> usize {
        let leads = |rig: &Rig| rig.service.tenure().is_ok() && rig.service.is_confirmed();
        until("somebody leads", || async { self.rigs.iter().any(leads) }).await;
        self.rigs.iter().position(leads).unwrap_or(0)
    }

    /// All have one digest at one checkpoint that is taken now.
    async fn agree(&self) {
        until("all have one digest", || async {
            let taken = self.digest(self.leader().await, 0).await;
            let Some((index, digest)) = taken else { return false };
            for at in 0..self.rigs.len() {
                if self.digest(at, index).await != Some((index, digest.clone())) {
                    return false;
                }
            }
            true
        })
        .await;
    }

    async fn digest(&self, at: usize, index: u64) -> Option<(u64, bytes::Bytes)> {
        let request = v1::StateDigestRequest { at_least_index: index, remaining_ms: 2_000 };
        let answer = self.rigs[at].admin.state_digest(Request::new(request)).await.ok()?.into_inner();
        answer.error.is_none().then_some((answer.applied_index, answer.digest))
    }

    fn verdicts(&self, at: usize, verdict: &str) -> u64 {
        self.rigs[at].service.metrics().state_comparisons.with_label_values(&[verdict]).get()
    }
}

async fn one_differs(in_leader: bool, plant: fn(&Directory), compact: bool) {
    let mut trio = Trio::start(|options| {
        options.audit_interval = Duration::from_millis(5);
    })
    .await;
    let leader = trio.leader().await;
    let victim = if in_leader { leader } else { (leader + 1) % 3 };
    let term = trio.rigs[leader].service.term();
    plant(trio.rigs[victim].service.directory());
    if compact {
        // Its snapshot must come to nothing.
        let node = trio.rigs[victim].service.node().clone();
        tokio::spawn(async move { node.compact().await });
    }
    let stopped = trio.rigs[victim].master.stopped();
    let stopped = tokio::time::timeout(Duration::from_secs(30), stopped).await.expect("it does not notice");
    assert!(matches!(stopped, Stopped::Diverged(_)), "{stopped:?}");
    trio.rigs[victim].master.shutdown().await;
    // What the binary does. The others go on meanwhile.
    trio.rigs[victim] = start(&trio.options[victim]).await;
    let now = trio.leader().await;
    assert!(!in_leader || trio.rigs[now].service.term() > term, "the one that differed led on");
    let session = trio.rigs[now].hello(2).await;
    trio.rigs[now].put(session, "afterwards", "").await;
    trio.agree().await;
    for (at, rig) in trio.rigs.iter().enumerate() {
        rig.service.directory().check_invariants().unwrap_or_else(|why| panic!("master {}: {why}", at + 1));
        assert_eq!(rig.service.directory().counts().objects, 31);
    }
    until("it agrees again", || async { trio.verdicts(victim, "agreed") > 0 }).await;
    let others = (0..3).filter(|at| *at != victim);
    assert!(others.into_iter().all(|at| trio.verdicts(at, "differs") == 0), "another started over");
    for rig in trio.rigs {
        rig.master.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_whose_digest_differs_starts_over() {
    one_differs(false, |directory| directory.spoil_the_digest(0), false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_digest_differs_hands_over_and_starts_over() {
    one_differs(true, |directory| directory.spoil_the_digest(0), false).await;
}

/// The digests are equal: only the master's own auditor can tell.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_record_flipped_hands_over_and_starts_over() {
    one_differs(true, Directory::flip_a_record, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_whose_record_flipped_completes_no_snapshot_and_starts_over() {
    one_differs(false, Directory::flip_a_record, true).await;
}

/// No two have one state: nothing is written, reads go on, nobody starts over; and it goes on when two agree again.
/// Tried with a halt that refuses nothing: fails.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_nothing_is_written() {
    let trio = Trio::start(|_| {}).await;
    let leader = trio.leader().await;
    let session = trio.rigs[leader].hello(3).await;
    for by in [1, 2] {
        trio.rigs[(leader + by) % 3].service.directory().spoil_the_digest(by as u64);
    }
    until("all say so", || async { (0..3).all(|at| trio.rigs[at].service.metrics().state_split.get() == 1) }).await;
    let leader = trio.leader().await;
    let item = requests::item("k", 1_000, [1; 16], "");
    let request = v1::PutStartRequest { session_id: session, items: vec![item], ..Default::default() };
    let refused = trio.rigs[leader].ask("", 5_000, Ask::PutStart(request)).await;
    let code = match &refused {
        Err(error) => Some(error.code()),
        Ok(Answer::PutStart(answer)) => answer.grants[0].error.clone().map(|error| Error::from(error).code()),
        Ok(_) => None,
    };
    assert_eq!(code, Some(ErrorCode::StateDiverged), "{refused:?}");
    let ready = trio.rigs[leader].master.readiness();
    assert!(!ready.ready && ready.reason.contains("no majority"), "{}", ready.reason);
    let exists = v1::ExistRequest { keys: requests::keys(&["k1"]), ..Default::default() };
    assert!(trio.rigs[leader].ask("", 5_000, Ask::Exist(exists)).await.is_ok(), "reads go on");
    assert!((0..3).all(|at| trio.verdicts(at, "differs") == 0));
    for rig in trio.rigs {
        rig.master.shutdown().await;
    }
}

/// One is away and the other two differ: it could decide, and is waited for; then nothing is written, until it is back.
/// Tried without the verdict that is disputed: fails.
#[tokio::test(flavor = "multi_thread")]
async fn two_that_differ_while_the_third_is_away_stop_writing_until_it_is_back() {
    let mut trio = Trio::start(|_| {}).await;
    // All of them: within one process a connection outlives the master that it leads to.
    for rig in &trio.rigs {
        rig.master.shutdown().await;
    }
    let two = futures::future::join_all(trio.options[..2].iter().map(start)).await;
    two.into_iter().enumerate().for_each(|(at, rig)| trio.rigs[at] = rig);
    let leader = trio.leader().await;
    let (away, differs) = (2, 1 - leader);
    trio.rigs[differs].service.directory().spoil_the_digest(1);
    until("it is said", || async { trio.verdicts(leader, "disputed") > 0 }).await;
    until("nothing is written", || async { trio.rigs[leader].service.halt().reason().is_some() }).await;
    assert_eq!(trio.rigs[leader].service.metrics().state_split.get(), 1);
    assert!((0..3).all(|at| trio.verdicts(at, "differs") == 0), "nobody can know who is right");
    trio.rigs[away] = start(&trio.options[away]).await;
    let stopped = trio.rigs[differs].master.stopped();
    let stopped = tokio::time::timeout(Duration::from_secs(60), stopped).await.expect("it is not judged");
    assert!(matches!(stopped, Stopped::Diverged(_)), "{stopped:?}");
    until("it is written again", || async { trio.rigs[trio.leader().await].service.halt().reason().is_none() }).await;
    for rig in trio.rigs {
        rig.master.shutdown().await;
    }
}

/// A leader that does not judge itself logs checkpoints all the same: the others' snapshots need them.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_compares_nothing_does_not_keep_the_others_from_it() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut all = options(dir.path(), 3, |_| {});
    all[0].checkpoint_interval = Duration::ZERO;
    let rigs = futures::future::join_all(all.iter().map(start)).await;
    let trio = Trio { options: all, rigs, _dir: dir };
    until("the first leads", || async {
        let leader = trio.leader().await;
        leader == 0 || trio.rigs[leader].master.transfer_leader(Some(NodeId(1))).await.is_ok()
    })
    .await;
    let before = [trio.verdicts(1, "agreed"), trio.verdicts(2, "agreed")];
    until("the others agree", || async {
        trio.verdicts(1, "agreed") > before[0] && trio.verdicts(2, "agreed") > before[1]
    })
    .await;
    assert!(trio.verdicts(0, "agreed") == 0, "it compares nothing");
    for rig in trio.rigs {
        rig.master.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_of_one_agrees_with_itself_until_its_auditor_does_not() {
    let rig = Rig::start(|options| {
        options.checkpoint_interval = Duration::from_millis(50);
        options.audit_interval = Duration::from_millis(2);
    })
    .await;
    rig.datanode(1, 1 << 24).await;
    let session = rig.hello(1).await;
    rig.put(session, "k", "").await;
    let agreed = || rig.service.metrics().state_comparisons.with_label_values(&["agreed"]).get();
    until("it agrees with itself", || async { agreed() > 0 }).await;
    rig.service.directory().flip_a_record();
    let stopped =
        tokio::time::timeout(Duration::from_secs(30), rig.master.stopped()).await.expect("it does not notice");
    assert!(matches!(&stopped, Stopped::Diverged(why) if why.contains("auditor")), "{stopped:?}");
    rig.master.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_op_that_stops_a_master_is_left_out() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = options(dir.path(), 1, |_| {}).remove(0);
    let rig = start(&options).await;
    until("it leads", || async { rig.service.tenure().is_ok() }).await;
    rig.hello(1).await;
    let tenure = rig.service.tenure().expect("it leads");
    let ops = [Op::Audit, Op::DropTenant { name: "stops every master" }, Op::Audit];
    assert!(tenure.proposer.propose(&ops, None).await.is_err());
    let stopped = rig.master.stopped().await;
    let home: PathBuf = options.data_dir.clone();
    let at = StoppedAt::read(&home).expect("readable").expect("written down");
    assert!(at.message.contains("planted") && at.message.contains("drop_tenant"), "{at:?}");
    let command = format!("--skip {} --hash {}", at.place, at.hash);
    assert!(matches!(&stopped, Stopped::Fatal(why) if why.contains(&command)), "{stopped:?}");
    drop(tenure);
    rig.master.shutdown().await;

    // It would stop there again; with another hash, or at another op, nothing is recorded.
    if let Ok(again) = Master::start(options.clone(), LogFilter::fixed()).await {
        let stopped = tokio::time::timeout(Duration::from_secs(20), again.stopped()).await;
        assert!(matches!(stopped, Ok(Stopped::Fatal(_))), "it goes on over an op that stopped it");
        again.shutdown().await;
    }
    until("its log is closed", || async {
        !matches!(tidepool_raft::skip(&home, at.place, None), Err(error) if error.0.code() == ErrorCode::StorageFailed)
    })
    .await;
    let other = tidepool_raft::OpPlace { ordinal: at.place.ordinal + 1, ..at.place };
    assert!(tidepool_raft::skip(&home, other, Some(at.hash)).is_err());
    assert!(tidepool_raft::skip(&home, at.place, Some(PayloadHash::of(b"another"))).is_err());
    assert_eq!(tidepool_raft::skip(&home, at.place, None).map_err(|e| e.0), Ok(at.hash));
    assert_eq!(tidepool_raft::skip(&home, at.place, Some(at.hash)).map_err(|e| e.0), Ok(at.hash));

    let rig = start(&options).await;
    until("it leads", || async { rig.service.tenure().is_ok() }).await;
    rig.hello(2).await;
    let of_entry = |(index, ..): &&AppliedEntry| *index == at.place.index;
    let (_, _, outcomes) = rig.service.machine().history().iter().find(of_entry).expect("applied").clone();
    let refused = |outcome: &Outcome| matches!(outcome, Outcome::Refused(why) if why.message().contains("left out"));
    let seen: Vec<bool> = outcomes.iter().map(refused).collect();
    assert_eq!(seen, (0..seen.len()).map(|o| o as u32 == at.place.ordinal).collect::<Vec<_>>());
    rig.service.directory().check_invariants().expect("sound");
    rig.master.shutdown().await;
}

/// Bytes of the files below a directory.
fn bytes_on_disk(dir: &std::path::Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.metadata().map_or(0, |m| if m.is_dir() { bytes_on_disk(&entry.path()) } else { m.len() }))
        .sum()
}

/// User report 7: log entries were never cleaned up. 300 000 put/remove cycles while a standby is down: what lies on the leader's
/// disk is bounded by snapshots and kept entries, and the standby comes back by snapshot, with the same state.
#[tokio::test(flavor = "multi_thread")]
async fn case_007_the_log_is_bounded_and_a_standby_that_was_down_comes_back_by_snapshot() {
    const CYCLES: usize = 300_000;
    const BATCH: usize = 1_000;
    const ROUNDS_MAX: usize = 20 * CYCLES / BATCH;
    let mut trio = Trio::start(|options| {
        options.snapshot_log_bytes = 8 << 20;
        options.keep_log_entries = 100;
    })
    .await;
    let leader = trio.leader().await;
    let down = (leader + 1) % 3;
    trio.rigs[down].master.shutdown().await;
    let rig = &trio.rigs[leader];
    let session = rig.hello(9).await;
    let mut most = 0;
    for round in 0.. {
        // The log goes behind the older of two snapshots that the masters agreed on, and checkpoints come by the clock.
        if round >= CYCLES / BATCH && rig.service.node().status().purged_index > 0 {
            break;
        }
        assert!(round < ROUNDS_MAX, "nothing was dropped from the log");
        let names: Vec<String> = (0..BATCH).map(|i| format!("cycle/{round}/{i}")).collect();
        let items = names.iter().map(|name| requests::item(name, 100, rand::random(), "")).collect();
        let request = v1::PutStartRequest { session_id: session, items, ..Default::default() };
        let Ok(Answer::PutStart(started)) = rig.ask("", 60_000, Ask::PutStart(request)).await else {
            panic!("not started")
        };
        let ended = names.iter().zip(&started.grants);
        let items = ended.map(|(name, grant)| requests::ending(&rig.service, name, grant, v1::ReplicaOutcome::Stored));
        let request = v1::PutEndRequest { session_id: session, items: items.collect() };
        let Ok(Answer::PutEnd(ended)) = rig.ask("", 60_000, Ask::PutEnd(request)).await else { panic!("not ended") };
        assert!(ended.results.iter().all(|result| result.error.is_none()), "{:?}", ended.results[0]);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let remove = v1::RemoveRequest {
            keys: requests::keys(&names),
            mode: v1::RemoveMode::Force as i32,
            session_id: session,
            sequence: (round * BATCH) as u64 + 1,
            floor: (round * BATCH) as u64 + 1,
        };
        let Ok(Answer::Remove(removed)) = rig.ask("", 60_000, Ask::Remove(remove)).await else { panic!("not removed") };
        assert!(removed.errors.is_empty(), "{:?}", removed.errors[0]);
        most = most.max(bytes_on_disk(&trio.options[leader].data_dir.join("log")));
    }
    let status = rig.service.node().status();
    println!("{} entries: the log had {most} bytes at most", status.last_log_index);
    assert!(most < LOG_BYTES_MAX, "the log had {most} bytes");
    let before = status.purged_index;

    trio.rigs[down] = start(&trio.options[down]).await;
    trio.agree().await;
    let back = trio.rigs[down].service.node().status();
    assert!(back.snapshot_index >= before, "it came back without a snapshot");
    for rig in trio.rigs {
        rig.service.directory().check_invariants().expect("sound");
        rig.master.shutdown().await;
    }
}
