//! Tickets step by step, with a fence at every possible moment. The suite beside drives the same through sockets.
#![allow(unsafe_code)]

use std::collections::HashMap;

use tidepool_proto::capability::Secret;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::object::{build_prefix, key_hash, stored_bytes};
use tidepool_proto::{ClusterId, History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId, v1};

use super::*;
use crate::life::Registration;
use crate::log_clock::LogClock;
use crate::options::HugePages;
use crate::writes::{WriteLimits, WriteTable};

const PAYLOAD: usize = 300_000;

fn served() -> (Payload, Arc<Life>) {
    served_with(Arc::new(Segment::create("s", 8 << 20, HugePages::Off).unwrap()))
}

fn served_with(segment: Arc<Segment>) -> (Payload, Arc<Life>) {
    let payload = Payload::new(Arc::new(Metrics::new().unwrap()));
    let registration = Registration {
        cluster: ClusterId([1; 16]),
        history: History(2),
        node: NodeId(3),
        incarnation: Incarnation(4),
        secret: Secret([5; 32]),
        heartbeat_interval: Duration::from_millis(20),
        registered_in: History(2),
        process_uuid: [0; 16],
        lineage: Default::default(),
    };
    let clock = LogClock::new(LogTime(1_000), BootInstant::now());
    let writes = Arc::new(WriteTable::new(WriteLimits::default(), clock));
    let life = Arc::new(Life::new(registration, HashMap::from([(SegmentId(6), segment)]), writes));
    assert!(payload.replace(Some(life.clone())).is_none());
    (payload, life)
}

fn grant(replica: u64) -> Capability {
    Capability {
        verb: Verb::Write,
        object: ObjectId(7),
        replica: ReplicaId(replica),
        segment: SegmentId(6),
        incarnation: Incarnation(4),
        node: NodeId(3),
        offset: 128,
        length: stored_bytes(PAYLOAD as u64),
        expires: LogTime(60_000),
    }
}

fn access(life: &Life, grant: &Capability) -> WriteAccess {
    let replica = grant.to_replica(&life.registration().secret, life.registration().history);
    WriteAccess { object_id: grant.object.0, replica, length: grant.length }
}

fn bytes() -> Vec<u8> {
    bytes_of(History(2))
}

fn bytes_of(history: History) -> Vec<u8> {
    let payload: Vec<u8> = (0..PAYLOAD).map(|i| (i % 251) as u8).collect();
    let mut bytes = build_prefix(history, ObjectId(7), key_hash("", b"k"), &[&payload]);
    bytes.extend_from_slice(&payload);
    bytes
}

/// Copies one chunk as an engine would.
fn receive(ticket: &mut Box<dyn WriteTicket>, bytes: &[u8], range: std::ops::Range<usize>) -> Result<(), Error> {
    let memory = ticket.enter()?;
    assert_eq!(memory.len(), bytes.len());
    // SAFETY: between enter and leave the ticket's extent is this caller's to write; the range lies inside.
    unsafe { std::ptr::copy(bytes[range.clone()].as_ptr(), memory.as_ptr().add(range.start), range.len()) };
    ticket.leave(range.end as u64);
    Ok(())
}

#[test]
fn whole_put_is_verified_as_it_arrives_and_proven() {
    let (payload, life) = served();
    let (grant, bytes) = (grant(1), bytes());
    let mut ticket = payload.begin_write(&access(&life, &grant)).unwrap();
    for start in (0..bytes.len()).step_by(70_001) {
        receive(&mut ticket, &bytes, start..(start + 70_001).min(bytes.len())).unwrap();
    }
    let reply = ticket.finish(true);
    assert_eq!((reply.outcome, reply.error), (WriteOutcome::Stored, None));
    assert_eq!(reply.proof, life.sign(&Capability { verb: Verb::Stored, ..grant }));
    assert_eq!(life.writes().figures().open, 0);
}

/// What was put in a history before has its header, and is copied and verified by that one; by no other, and not by the present one.
/// Fails when the copy, or the verification, goes by the present history (each tried).
#[test]
fn a_copy_is_held_against_the_history_of_its_object() {
    let (payload, life) = served();
    let (metrics, bytes) = (Metrics::new().unwrap(), bytes_of(History(1)));
    for (replica, told, is_right) in [(1, 0, false), (2, 3, false), (3, 1, true)] {
        let grant = grant(replica);
        let mut ticket = payload.begin_write_of(&access(&life, &grant), told).unwrap();
        let received = receive(&mut ticket, &bytes, 0..bytes.len());
        let reply = ticket.finish(received.is_ok());
        assert_eq!(reply.outcome == WriteOutcome::Stored, is_right, "told {told}: {:?}", reply.error);
        let Capability { object, replica, segment, offset, length, .. } = grant;
        let (object_id, replica_id, segment_id) = (object.0, replica.0, segment.0);
        let question = v1::VerifyReplica { object_id, replica_id, segment_id, offset, length, history: told };
        let verdict = crate::inspection::inspect(&life, &metrics, &question).unwrap();
        assert_eq!(verdict.intact, is_right, "told {told}: {}", verdict.message);
    }
}

/// W5 [plant: acknowledge Fence without aborting]: after the acknowledgement not one byte may arrive, at whatever chunk the fence
/// comes. Fails when `OpenWrite::enter` ignores the fence (tried), and when `fence` acknowledges an entered write (tried).
#[test]
fn a_fence_at_any_chunk_aborts_before_it_is_acknowledged() {
    let bytes = bytes();
    let chunks: Vec<_> = (0..bytes.len()).step_by(50_000).map(|s| s..(s + 50_000).min(bytes.len())).collect();
    for fenced_at in 0..=chunks.len() {
        let (payload, life) = served();
        let grant = grant(1);
        let mut ticket = payload.begin_write(&access(&life, &grant)).unwrap();
        for (i, chunk) in chunks.iter().enumerate() {
            if i == fenced_at {
                life.writes().fence(&[grant.replica], LogTime(1_000));
                assert_eq!(life.writes().take_acknowledgements(1, 9), [1]);
            }
            let received = receive(&mut ticket, &bytes, chunk.clone());
            assert_eq!(received.is_err(), i >= fenced_at, "chunk {i} of a put fenced at {fenced_at}");
        }
        if fenced_at == chunks.len() {
            life.writes().fence(&[grant.replica], LogTime(1_000));
        }
        let reply = ticket.finish(fenced_at == chunks.len());
        assert_eq!(reply.outcome, WriteOutcome::Aborted, "fenced at {fenced_at}");
        assert_eq!(reply.error.unwrap().code(), ErrorCode::GrantLost);
        assert_eq!(reply.proof, life.sign(&Capability { verb: Verb::Aborted, ..grant }));
    }
}

#[test]
fn a_fence_inside_a_chunk_waits_for_its_end() {
    let (payload, life) = served();
    let (grant, bytes) = (grant(1), bytes());
    let mut ticket = payload.begin_write(&access(&life, &grant)).unwrap();
    ticket.enter().unwrap();
    life.writes().fence(&[grant.replica], LogTime(1_000));
    assert!(life.writes().take_acknowledgements(1, 9).is_empty(), "acknowledged while the engine writes");
    ticket.leave(0);
    assert_eq!(life.writes().take_acknowledgements(2, 9), [1]);
    assert!(receive(&mut ticket, &bytes, 0..100).is_err());
    assert_eq!(ticket.finish(false).outcome, WriteOutcome::Aborted);
}

#[test]
fn a_dropped_ticket_is_an_aborted_write() {
    let (payload, life) = served();
    let grant = grant(1);
    let ticket = payload.begin_write(&access(&life, &grant)).unwrap();
    let busy = payload.begin_write(&access(&life, &grant)).err().unwrap();
    assert_eq!(busy.code(), ErrorCode::PutInProgress);
    drop(ticket);
    assert_eq!(life.writes().figures().open, 0);
    let again = payload.begin_write(&access(&life, &grant)).unwrap();
    assert_eq!(again.finish(true).outcome, WriteOutcome::Aborted, "an aborted grant is over");
}

/// ONE-WRITER at the seam: the second of two overlapping grants is refused, loudly.
#[test]
fn overlapping_grants_are_an_internal_error() {
    let (payload, life) = served();
    let _first = payload.begin_write(&access(&life, &grant(1))).unwrap();
    let second = payload.begin_write(&access(&life, &grant(2))).err().unwrap();
    assert_eq!(second.code(), ErrorCode::Internal);
    assert!(second.message().contains("overlaps"), "{second}");
}

#[test]
fn the_end_of_a_life_stops_its_writes() {
    let (payload, life) = served();
    let (grant, bytes) = (grant(1), bytes());
    let mut ticket = payload.begin_write(&access(&life, &grant)).unwrap();
    receive(&mut ticket, &bytes, 0..1000).unwrap();
    payload.replace(None);
    assert_eq!(receive(&mut ticket, &bytes, 1000..2000).unwrap_err().code(), ErrorCode::Fenced);
    assert_eq!(ticket.finish(false).outcome, WriteOutcome::Aborted);
    assert_eq!(payload.begin_write(&access(&life, &grant)).err().unwrap().code(), ErrorCode::Unavailable);
}

/// What changed after it was verified is not seen again here, so nothing may change it: the extent is this ticket's alone. What was
/// overwritten before its block was complete is caught.
#[test]
fn a_corrupt_block_ends_the_put_at_its_chunk() {
    let (payload, life) = served();
    let (grant, mut bytes) = (grant(1), bytes());
    bytes[70_000] ^= 1;
    let mut ticket = payload.begin_write(&access(&life, &grant)).unwrap();
    receive(&mut ticket, &bytes, 0..200_000).unwrap();
    assert_eq!(receive(&mut ticket, &bytes, 200_000..200_001).unwrap_err().code(), ErrorCode::ChecksumMismatch);
    let reply = ticket.finish(false);
    assert_eq!((reply.outcome, reply.error.unwrap().code()), (WriteOutcome::Aborted, ErrorCode::ChecksumMismatch));
}

/// Not a test: prints what arrival verification costs, in steps of a chunk as the tcp engine makes them. Run with `--run-ignored only
/// --no-capture`.
#[test]
#[ignore = "a measurement"]
fn measure_verification_on_arrival() {
    for payload_bytes in [4 << 10, 64 << 10, 1 << 20, 16 << 20] {
        let segment = Arc::new(Segment::create("s", 64 << 20, HugePages::Off).unwrap());
        let rounds = ((256usize << 20) / payload_bytes).min(2_000);
        let payload: Vec<u8> = (0..payload_bytes).map(|i| (i % 251) as u8).collect();
        let mut bytes = build_prefix(History(2), ObjectId(7), key_hash("", b"k"), &[&payload]);
        bytes.extend_from_slice(&payload);
        let (served, life) = served_with(segment);
        let (mut copying, mut whole) = (Duration::ZERO, Duration::ZERO);
        for round in 0..rounds {
            let grant = Capability { length: bytes.len() as u64, ..grant(round as u64 + 1) };
            let access = access(&life, &grant);
            let started = Instant::now();
            let mut ticket = served.begin_write(&access).unwrap();
            for start in (0..bytes.len()).step_by(256 << 10) {
                let chunk = start..(start + (256 << 10)).min(bytes.len());
                let memory = ticket.enter().unwrap();
                let copied = Instant::now();
                // SAFETY: as in `receive`.
                unsafe { std::ptr::copy(bytes[chunk.clone()].as_ptr(), memory.as_ptr().add(chunk.start), chunk.len()) };
                copying += copied.elapsed();
                ticket.leave(chunk.end as u64);
            }
            assert_eq!(ticket.finish(true).outcome, WriteOutcome::Stored);
            whole += started.elapsed();
        }
        let per_put = |d: Duration| d.as_secs_f64() * 1e6 / rounds as f64;
        let checks = whole - copying;
        let rate = (rounds * payload_bytes) as f64 / checks.as_secs_f64() / 1e9;
        println!(
            "{payload_bytes:>9} bytes: copy {:8.2} us, checks and verification {:8.2} us a put ({rate:.1} GB/s)",
            per_put(copying),
            per_put(checks)
        );
    }
}
