//! The checked-in corpus: what each feature level wrote, which every later binary must read and judge alike (M6).
//!
//! `master/tests/corpus/level-N/` holds `entries.bin` (index u64, length u32, bytes; little endian), `digests.txt` (the
//! digest after each entry) and `image.bin` (the state after the last). Made once, with the release that brings the level, by
//! `cargo nextest run --release -p tidepool-master --run-ignored only write_the_corpus_of_this_level`, and never again.

use super::replay::{busy_at, bytes_of};
use super::world::{HISTORY, World, end, plain_put, register, remove};
use crate::directory::image::tests::content;
use crate::directory::{
    ClearReplicas, Config, Contact, CopyStart, Directory, Entry, EntryBuilder, FEATURE_LEVEL, FEATURE_LEVEL_FIRST, Op,
    Outcome, PutStart, Quota, ReplicaEnd, RetireMode, TenantId, Turn,
};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use tidepool_proto::capability::Secret;
use tidepool_proto::{LogTime, ObjectId};

fn directory_of(level: u16) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/corpus/level-{level}"))
}

/// A log in which every op of the level takes effect at least once.
fn every_op(level: u16) -> World {
    let mut world = busy_at(level);
    let (node, incarnation, segment) = world.add_node(50, "h50", 1 << 16);
    let other = world.add_node(51, "h51", 1 << 16);
    let session = world.session(50);
    let gone = world.session(51);
    expect(&mut world, Op::ExpireSessions { sessions: vec![gone] }, |o| matches!(o, Outcome::Expired { sessions: 1 }));
    world.tenant("leaves", Quota::default());
    expect(&mut world, Op::DropTenant { name: "leaves" }, |o| *o == Outcome::Done);
    let config = Config { objects_max: 1 << 20, secret: Secret([7; 32]), ..Config::default() };
    expect(&mut world, Op::SetConfig(config), |o| *o == Outcome::Done);
    let config = Config { lease_ttl_max_ms: 9_000, granted_bytes_min: 1 << 22, hard_pinned_percent_max: 50, ..config };
    expect(&mut world, Op::SetConfig(config), |o| *o == Outcome::Done);

    // Eviction in two steps and in one; a removal that frees its space at once.
    let evicted = world.put(session, "evicted", 300);
    let retire = Op::Retire { objects: vec![evicted.object], mode: RetireMode::RetireOnly };
    expect(&mut world, retire, |o| matches!(o, Outcome::Retired { objects } if objects.len() == 1));
    let reclaim = Op::Reclaim { replicas: evicted.replicas.iter().map(|r| r.replica).collect() };
    expect(&mut world, reclaim, |o| matches!(o, Outcome::Reclaimed { replicas: 1, .. }));
    let at_once = world.put(session, "at once", 300);
    let retire = Op::Retire { objects: vec![at_once.object], mode: RetireMode::RetireAndReclaim };
    expect(&mut world, retire, |o| matches!(o, Outcome::Retired { objects } if objects.len() == 1));
    world.put(session, "removed", 300);
    expect(&mut world, Op::Remove(remove(session, 1, 0, "removed")), |o| matches!(o, Outcome::Removal(_)));

    // A put that nobody ends, and one whose space waits for a fence.
    let abandoned = world.start(session, "abandoned", 300);
    world.time_ms += config.put_start_discard_timeout_ms + 1;
    let discard = Op::Discard { objects: vec![abandoned.object] };
    expect(&mut world, discard, |o| matches!(o, Outcome::Discarded { objects } if objects.len() == 1));
    let put = PutStart { preferred: [segment].into_iter().collect(), ..plain_put(session, "fenced", 300, [99; 16]) };
    let fenced = world.granted(put);
    world.one(Op::PutRevoke(end(session, &fenced, ReplicaEnd::Unknown)));
    let replicas = fenced.replicas.iter().map(|r| r.replica).collect();
    let acknowledged = Op::FenceAcknowledged { node, incarnation, replicas };
    expect(&mut world, acknowledged, |o| matches!(o, Outcome::Reclaimed { replicas: 1, .. }));

    // Replicas that are dropped, extra, and cleared.
    let two = world.start_copies(session, "two of them", 2);
    world.ended(session, &two);
    let up_to = CopyStart {
        object: two.object,
        instead_of: None,
        targets: Default::default(),
        task: Default::default(),
        up_to: 3,
    };
    let Outcome::CopyGranted(third) = world.one(Op::CopyStart(up_to)) else { panic!("no room for a third") };
    world.end_copy(third.replica, ReplicaEnd::Stored);
    let extra = Op::DropExtra { object: two.object, replica: third.replica };
    expect(&mut world, extra, |o| matches!(o, Outcome::ReplicaDropped { object_gone: false }));
    let corrupt = Op::DropReplica { object: two.object, replica: two.replicas[0].replica };
    expect(&mut world, corrupt, |o| matches!(o, Outcome::ReplicaDropped { object_gone: false }));
    let clear = ClearReplicas {
        session,
        turn: Turn { sequence: 2, floor: 1 },
        object: two.object,
        replicas: [two.replicas[1].replica].into_iter().collect(),
    };
    expect(&mut world, Op::ClearReplicas(clear), |o| matches!(o, Outcome::Cleared { cleared: true }));

    let once = world.put(session, "once", 300);
    old_copy_start(&mut world, once.object);
    // A segment and a node that leave.
    let unmount = Op::UnmountSegment { node, incarnation, segment };
    expect(&mut world, unmount, |o| matches!(o, Outcome::Dropped { .. }));
    let drop = Op::DropNode { node: other.0, incarnation: other.1 };
    expect(&mut world, drop, |o| matches!(o, Outcome::Dropped { .. }));
    world.suspect(node, incarnation, Contact::Suspect);
    world.suspect(node, incarnation, Contact::Heard);
    expect(&mut world, Op::Audit, |o| *o == Outcome::Done);
    // Several ops in an entry, a refused one among them, and an entry of none.
    let twice =
        [register(60, 60, "h60"), Op::Discard { objects: vec![ObjectId(1)] }, Op::DropTenant { name: "nobody" }];
    assert!(matches!(world.apply(&twice)[2], Outcome::Refused(_)));
    world.apply(&[]);
    world.put_in(session, "g9", "last", 64);
    world
}

fn expect(world: &mut World, op: Op<'_>, right: impl Fn(&Outcome) -> bool) {
    let text = format!("{op:?}");
    let outcome = world.one(op);
    assert!(right(&outcome), "{text}: {outcome:?}");
}

/// COPY_START as it was written first, without the number of replicas.
fn old_copy_start(world: &mut World, object: ObjectId) {
    let copy = CopyStart { object, instead_of: None, targets: Default::default(), task: Default::default(), up_to: 0 };
    let mut builder = EntryBuilder::new(world.directory.feature_level());
    builder.push(&Op::CopyStart(copy)).unwrap();
    let mut bytes = builder.finish(LogTime(world.time_ms)).to_vec();
    let tag = crate::directory::codec::HEADER_BYTES;
    assert_eq!((bytes[tag], bytes.pop()), (34, Some(0)));
    bytes[tag] = 23;
    let index = world.log.len() as u64 + 1;
    let outcomes = world.directory.apply_entry(index, 1, &Entry::decode(&bytes).unwrap());
    assert!(matches!(outcomes[..], [Outcome::CopyGranted(_)]), "{outcomes:?}");
    world.log.push((index, bytes.into()));
}

fn read(level: u16) -> (Vec<(u64, Bytes)>, Vec<u128>, Vec<u8>) {
    let from = directory_of(level);
    let read = |name: &str| fs::read(from.join(name)).unwrap_or_else(|e| panic!("{}/{name}: {e}", from.display()));
    let mut rest = Bytes::from(read("entries.bin"));
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let index = u64::from_le_bytes(rest.split_to(8)[..].try_into().unwrap());
        let length = u32::from_le_bytes(rest.split_to(4)[..].try_into().unwrap());
        entries.push((index, rest.split_to(length as usize)));
    }
    let digests = String::from_utf8(read("digests.txt")).unwrap();
    let digests = digests.lines().map(|line| u128::from_str_radix(line, 16).unwrap()).collect();
    (entries, digests, read("image.bin"))
}

/// Every entry that a level ever wrote means today what it meant then, and so does the image: it loads, and is written again
/// as it was.
fn replay_level(level: u16) {
    let (entries, digests, image) = read(level);
    assert_eq!(entries.len(), digests.len());
    let directory = Directory::new(HISTORY);
    for ((index, bytes), digest) in entries.iter().zip(&digests) {
        directory.apply_entry(*index, 1, &Entry::decode(bytes).unwrap());
        assert_eq!(directory.digest(), *digest, "level {level}: entry {index} has another effect than it had");
    }
    directory.check_invariants().unwrap();
    assert!(content(&bytes_of(directory.freeze())) == content(&image), "level {level}: the image is written otherwise");

    let restored = Directory::new(HISTORY);
    restored.restore(&mut &image[..]).unwrap();
    restored.check_invariants().unwrap();
    assert_eq!(restored.digest(), directory.digest());
    assert!(
        content(&bytes_of(restored.freeze())) == content(&image),
        "level {level}: a restored image is written otherwise"
    );
    assert!(restored.tenant("t").is_some_and(|tenant| tenant != TenantId::DEFAULT));
}

/// A record of the digest, a row of the image or the effect of an op does not change once its level was released. The present
/// level is written down with the release; until then it may still change.
#[test]
fn what_every_released_level_wrote_is_read_and_judged_as_then() {
    for level in FEATURE_LEVEL_FIRST..=FEATURE_LEVEL {
        if level < FEATURE_LEVEL || directory_of(level).exists() {
            replay_level(level);
        }
    }
    let (entries, ..) = read(FEATURE_LEVEL_FIRST);
    let names = entries
        .iter()
        .flat_map(|(_, bytes)| Entry::decode(bytes).unwrap().ops.iter().map(Op::name).collect::<Vec<_>>());
    assert_eq!(names.collect::<BTreeSet<_>>().len(), 29, "the ops of level 1");
}

#[test]
#[ignore = "writes the corpus of this binary's feature level, once"]
fn write_the_corpus_of_this_level() {
    let to = directory_of(FEATURE_LEVEL);
    assert!(!to.exists(), "{} exists: what a level wrote does not change", to.display());
    let world = every_op(FEATURE_LEVEL);
    let (mut entries, mut digests) = (Vec::new(), String::new());
    let replayed = Directory::new(HISTORY);
    for (index, bytes) in &world.log {
        entries.extend_from_slice(&index.to_le_bytes());
        entries.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
        entries.extend_from_slice(bytes);
        replayed.apply_entry(*index, 1, &Entry::decode(bytes).unwrap());
        writeln!(digests, "{:032x}", replayed.digest()).unwrap();
    }
    fs::create_dir_all(&to).unwrap();
    fs::write(to.join("entries.bin"), entries).unwrap();
    fs::write(to.join("digests.txt"), digests).unwrap();
    fs::write(to.join("image.bin"), bytes_of(world.directory.freeze())).unwrap();
}
