//! Measurements: memory an object, time an op, pause of a freeze. Ignored by default; run one alone with
//! `cargo nextest run --release -p tidepool-master --run-ignored only --no-capture measure`.

use super::world::HISTORY;
use crate::directory::{
    Directory, Entry, FEATURE_LEVEL, Op, Outcome, PutEnd, PutStart, ReplicaEnd, ReplicaMode, ReplicaStatus, SessionId,
    TenantId,
};
use tidepool_proto::{LogTime, ReplicaId};

const OBJECTS: u64 = 1 << 20;
const OPS: usize = 512;

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

fn cpu_us() -> u64 {
    // utime + stime of this thread, in ticks of 10 ms; measured over seconds.
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let after = stat.rsplit_once(')').unwrap().1;
    let fields: Vec<&str> = after.split_whitespace().collect();
    (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10_000
}

fn apply(directory: &Directory, index: &mut u64, ops: Vec<Op<'_>>) -> Vec<Outcome> {
    *index += 1;
    directory.apply_entry(*index, 1, &Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(*index), ops })
}

fn prepare(directory: &Directory, index: &mut u64, segments: u8, bytes: u64) -> SessionId {
    for i in 0..segments {
        let host = format!("host-{i}");
        let register =
            Op::RegisterNode { node_uuid: [i; 16], process_uuid: [i; 16], address: "10.0.0.1:9", host_id: &host };
        let Outcome::Registered { node, incarnation } = apply(directory, index, vec![register])[0] else { panic!() };
        apply(directory, index, vec![Op::MountSegment { node, incarnation, name: "dram", bytes }]);
    }
    let open = Op::OpenSession { client_uuid: [1; 16], host_id: "" };
    let Outcome::Opened { session, .. } = apply(directory, index, vec![open])[0] else { panic!() };
    session
}

fn start(session: SessionId, key: &str, number: u64, length: u64) -> Op<'_> {
    let mut token = [0; 16];
    token[..8].copy_from_slice(&number.to_le_bytes());
    Op::PutStart(PutStart {
        tenant: TenantId::DEFAULT,
        session,
        key: key.as_bytes(),
        length,
        token,
        replica_num: 1,
        mode: ReplicaMode::BestEffort,
        excluded: Default::default(),
        victims: Vec::new(),
    })
}

fn put_all(directory: &Directory, index: &mut u64, session: SessionId, from: u64, objects: u64, length: u64) {
    for first in (from..from + objects).step_by(OPS) {
        let keys: Vec<String> = (first..first + OPS as u64).map(|n| format!("{n:064x}")).collect();
        let starts = keys.iter().zip(first..).map(|(key, n)| start(session, key, n, length)).collect();
        let ends = apply(directory, index, starts).into_iter().map(|outcome| match outcome {
            Outcome::Granted(grant) => Op::PutEnd(PutEnd {
                session,
                object: grant.object,
                replicas: grant
                    .replicas
                    .iter()
                    .map(|r| ReplicaStatus { replica: ReplicaId(r.replica.0), end: ReplicaEnd::Stored })
                    .collect(),
            }),
            other => panic!("{other:?}"),
        });
        let ends = ends.collect();
        assert!(apply(directory, index, ends).iter().all(|o| *o == Outcome::Ended { copies: 1 }));
    }
}

#[test]
#[ignore = "measures; run alone"]
fn measure_bytes_an_object_and_us_an_op() {
    let directory = Directory::new(HISTORY);
    let mut index = 0;
    let session = prepare(&directory, &mut index, 8, 1 << 40);
    put_all(&directory, &mut index, session, 0, OPS as u64, 1 << 16);
    let (before, cpu) = (resident_bytes(), cpu_us());
    put_all(&directory, &mut index, session, OPS as u64, OBJECTS, 1 << 16);
    let (bytes, cpu) = (resident_bytes() - before, cpu_us() - cpu);
    println!("{} bytes an object of a 64-byte key, {OBJECTS} objects", bytes / OBJECTS);
    println!("{:.2} us a PutStart + PutEnd, building the ops included", cpu as f64 / OBJECTS as f64);
    let cpu = cpu_us();
    let mut hits = 0u64;
    let keys: Vec<String> = (0..OBJECTS).step_by(2).map(|n| format!("{n:064x}")).collect();
    let start = cpu_us();
    directory.with_objects(TenantId::DEFAULT, keys.iter().map(|k| k.as_bytes()), |_, o| {
        hits += u64::from(o.is_some_and(|o| o.is_readable()));
    });
    println!(
        "{:.2} us a lookup ({hits} hits; {} us of making keys)",
        (cpu_us() - start) as f64 / hits as f64,
        start - cpu
    );
    let cpu = cpu_us();
    let frozen = directory.freeze();
    println!("{} ms a freeze of {} MiB", (cpu_us() - cpu) / 1000, frozen.len_bytes() >> 20);
    let mut bytes = Vec::new();
    frozen.write_to(&mut bytes).unwrap();
    let restored = Directory::new(HISTORY);
    let cpu = cpu_us();
    restored.restore(&mut &bytes[..]).unwrap();
    println!("{} ms a restore", (cpu_us() - cpu) / 1000);
    assert_eq!(restored.digest(), directory.digest());
}
