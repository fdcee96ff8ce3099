//! Measurements: memory an object, time an op, pause of a freeze. Ignored by default; run one alone with
//! `cargo nextest run --release -p tidepool-master --run-ignored only --no-capture measure`.

use super::world::{HISTORY, plain_put};
use crate::directory::{Directory, Entry, FEATURE_LEVEL, Op, Outcome, ReplicaEnd, SessionId, TenantId};
use tidepool_proto::{LogTime, ObjectId};

const OBJECTS: u64 = 1 << 20;
const OPS: usize = 512;
const LENGTH: u64 = 1 << 16;

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Nanoseconds this thread ran.
fn cpu_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split_whitespace().next().unwrap().parse().unwrap()
}

/// What is measured here is time itself; the directory reads none.
#[allow(clippy::disallowed_methods, clippy::disallowed_types)]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
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

fn start(session: SessionId, key: &str, number: u64) -> Op<'_> {
    let mut token = [0; 16];
    token[..8].copy_from_slice(&number.to_le_bytes());
    Op::PutStart(plain_put(session, key, LENGTH, token))
}

/// Puts objects in entries of 512 ops; with `victims`, each in the place of the oldest. Answers the ns spent in apply.
fn put_all(
    directory: &Directory,
    index: &mut u64,
    session: SessionId,
    numbers: std::ops::Range<u64>,
    evict: bool,
) -> u64 {
    let mut spent = 0;
    let mut timed = |ops: Vec<Op<'_>>, index: &mut u64| {
        *index += 1;
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(*index), ops };
        let before = cpu_ns();
        let outcomes = directory.apply_entry(*index, 1, &entry);
        spent += cpu_ns() - before;
        outcomes
    };
    for first in numbers.step_by(OPS) {
        let keys: Vec<String> = (first..first + OPS as u64).map(|n| format!("{n:064x}")).collect();
        let mut starts: Vec<Op<'_>> = keys.iter().zip(first..).map(|(key, n)| start(session, key, n)).collect();
        if evict {
            let oldest: Vec<ObjectId> = directory.core.read().index.keys().take(OPS).copied().collect();
            for (op, victim) in starts.iter_mut().zip(oldest) {
                let Op::PutStart(put) = op else { unreachable!() };
                put.victims.push(victim);
            }
        }
        let ends = timed(starts, index).into_iter().map(|outcome| match outcome {
            Outcome::Granted(grant) => {
                assert_eq!(grant.evicted.len(), usize::from(evict));
                Op::PutEnd(super::world::end(session, &grant, ReplicaEnd::Stored))
            }
            other => panic!("{other:?}"),
        });
        let ends = ends.collect();
        assert!(timed(ends, index).iter().all(|o| *o == Outcome::Ended { copies: 1, replaced: None }));
    }
    spent
}

#[test]
#[ignore = "measures; run alone"]
fn measure_bytes_an_object_and_us_an_op() {
    let directory = Directory::new(HISTORY);
    let mut index = 0;
    let extent = tidepool_proto::object::extent_bytes(LENGTH);
    let session = prepare(&directory, &mut index, 8, (OBJECTS + OPS as u64) * extent / 8);
    put_all(&directory, &mut index, session, 0..OPS as u64, false);
    let before = resident_bytes();
    let growing = put_all(&directory, &mut index, session, OPS as u64..OPS as u64 + OBJECTS, false);
    println!("{} bytes an object of a 64-byte key, {OBJECTS} objects", (resident_bytes() - before) / OBJECTS);
    println!("{:.2} us of apply a PutStart + PutEnd while growing", growing as f64 / OBJECTS as f64 / 1e3);
    let fresh = 2 * OBJECTS..3 * OBJECTS;
    let full = put_all(&directory, &mut index, session, fresh, true);
    println!("{:.2} us of apply a PutStart with its victim + PutEnd, pool full", full as f64 / OBJECTS as f64 / 1e3);
    println!("{} bytes an object after that", (resident_bytes() - before) / OBJECTS);
    directory.check_invariants().unwrap();
    let mut hits = 0u64;
    let keys: Vec<String> = (2 * OBJECTS..3 * OBJECTS).step_by(7).map(|n| format!("{n:064x}")).collect();
    let start = cpu_ns();
    directory.with_objects(TenantId::DEFAULT, keys.iter().map(|k| k.as_bytes()), |_, o| {
        hits += u64::from(o.is_some_and(|o| o.is_readable()));
    });
    println!("{:.2} us a lookup ({hits} hits)", (cpu_ns() - start) as f64 / hits as f64 / 1e3);
    let (start, frozen) = (clock(), directory.freeze());
    println!("{} us a freeze", start.elapsed().as_micros());
    let (mut bytes, start) = (Vec::new(), cpu_ns());
    frozen.write_to(&mut bytes).unwrap();
    println!("{} ms to write its {} MiB beside apply", (cpu_ns() - start) / 1_000_000, bytes.len() >> 20);
    let restored = Directory::new(HISTORY);
    let start = clock();
    restored.restore(&mut &bytes[..]).unwrap();
    println!("{} ms a restore, all threads", start.elapsed().as_millis());
    assert_eq!(restored.digest(), directory.digest());
}

/// What a step of the auditor holds apply up for, with 10^6 objects of which some are in groups.
#[test]
#[ignore = "measures; run alone"]
fn measure_a_step_of_the_auditor() {
    let directory = Directory::new(HISTORY);
    let mut index = 0;
    let extent = tidepool_proto::object::extent_bytes(LENGTH);
    let session = prepare(&directory, &mut index, 8, (OBJECTS + OPS as u64) * extent / 8);
    put_all(&directory, &mut index, session, 0..OBJECTS, false);
    for pass in 1..=3 {
        let mut steps = Vec::new();
        while directory.audit_progress().passes < pass {
            let began = clock();
            apply(&directory, &mut index, vec![Op::Audit]);
            steps.push(began.elapsed().as_micros());
        }
        steps.sort_unstable();
        let at = |percent| steps[(steps.len() - 1) * percent / 100];
        println!("{} steps a pass; us a step: median {}, p99 {}, longest {}", steps.len(), at(50), at(99), at(100));
    }
    assert_eq!(directory.take_violations(), []);
}
