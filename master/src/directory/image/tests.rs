//! What an image's checks are for: content that is wrong behind checksums that are right.

use super::frame::{Frame, HEADER_BYTES, Kind, LEVEL_BYTES, MAGIC, encode_level};
use super::manifest::{Manifest, PartSum};
use super::*;
use crate::directory::tests::replay::{busy, bytes_of};
use crate::directory::tests::world::HISTORY;

const HEAD_BYTES: usize = MAGIC.len() + LEVEL_BYTES;

fn head() -> Vec<u8> {
    [&MAGIC[..], &encode_level(FORMAT_VERSION, crate::directory::FEATURE_LEVEL_FIRST)].concat()
}

fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut rest = &bytes[HEAD_BYTES..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        frames.push(Frame::read(&mut rest).unwrap());
    }
    frames
}

/// What an image holds, whatever the compressor made of it: its head, and each part's kind, shard and rows.
pub(in crate::directory) fn content(bytes: &[u8]) -> (Vec<u8>, Vec<(String, Vec<u8>)>) {
    let all = frames(bytes);
    let raw = |frame: &Frame| match frame.header.kind {
        Kind::Shard => frame.raw().unwrap(),
        // It tells the lengths of the compressed parts.
        Kind::Manifest => Vec::new(),
        _ => frame.stored.clone(),
    };
    (bytes[..HEAD_BYTES].to_vec(), all.iter().map(|frame| (frame.header.name(), raw(frame))).collect())
}

/// Puts frames together again, with a manifest that agrees with them.
fn joined(frames: &[Frame], change: impl FnOnce(&mut Manifest)) -> Vec<u8> {
    let last = frames.last().unwrap();
    let mut manifest: Manifest = std::str::from_utf8(&last.stored).unwrap().parse().unwrap();
    let mut metadata = PartSum::default();
    for frame in frames {
        match frame.header.kind {
            Kind::Segments => manifest.segments = frame.part(),
            Kind::Tasks => manifest.task_manager = frame.part(),
            Kind::Shard => {
                metadata.add(&frame.encoded_header());
                metadata.add(&frame.stored);
                metadata.rows(frame.header.rows.into());
            }
            Kind::Manifest => {}
        }
    }
    manifest.metadata = metadata.part();
    change(&mut manifest);
    let mut bytes = head();
    frames[..frames.len() - 1].iter().for_each(|frame| frame.write(&mut bytes).unwrap());
    Frame::plain(Kind::Manifest, 0, manifest.to_string().into_bytes()).write(&mut bytes).unwrap();
    bytes
}

fn restore(bytes: &[u8]) -> Result<Directory, RestoreError> {
    let directory = Directory::new(HISTORY);
    directory.restore(&mut &bytes[..]).map(|_| directory)
}

/// With correct checksums over wrong content (a bug, not a bad disk) the digest still tells.
#[test]
fn an_image_whose_digest_does_not_come_out_is_refused() {
    let bytes = bytes_of(busy().directory.freeze());
    assert_eq!(joined(&frames(&bytes), |_| {}), bytes);
    let error = restore(&joined(&frames(&bytes), |manifest| manifest.digest ^= 1)).unwrap_err();
    assert!(matches!(error, RestoreError::Digest { .. }), "{error}");
    let mut fewer = frames(&bytes);
    let at = fewer.iter().position(|frame| frame.header.kind == Kind::Shard).unwrap();
    fewer.remove(at);
    restore(&joined(&fewer, |_| {})).unwrap_err();
}

#[test]
fn newer_formats_and_feature_levels_are_refused_by_name() {
    let bytes = bytes_of(busy().directory.freeze());
    let level = crate::directory::FEATURE_LEVEL;
    for (head, what) in [
        (encode_level(FORMAT_VERSION + 1, level), "format 2"),
        (encode_level(FORMAT_VERSION, level + 1), "feature level"),
    ] {
        let mut newer = bytes.clone();
        newer[MAGIC.len()..HEAD_BYTES].copy_from_slice(&head);
        // Whatever follows: a newer binary's rows may not be readable.
        newer.truncate(HEAD_BYTES + 1);
        let error = restore(&newer).unwrap_err();
        assert!(matches!(&error, RestoreError::Version(why) if why.contains(what)), "{error}");
    }
    let other = joined(&frames(&bytes), |manifest| manifest.feature_level += 1);
    assert!(matches!(restore(&other), Err(RestoreError::Damaged(_))));
}

/// One id in two shards, in one group too: refused before anything is built from it.
#[test]
fn an_id_that_comes_twice_is_refused() {
    let mut world = busy();
    let session = world.session(8);
    for i in 0..8 {
        world.put_in(session, "twice", &format!("t{i}"), 100);
    }
    let bytes = bytes_of(world.directory.freeze());
    let id_of = |frame: &Frame| -> Option<(usize, u64)> {
        let raw = frame.raw().unwrap();
        let rows: Vec<super::rows::ObjectRow<'_>> = rmp_serde::from_slice(&raw).unwrap();
        rows.iter().position(|row| row.group.0 == b"twice").filter(|_| rows.len() == 1).map(|at| (at, rows[at].object))
    };
    let all = frames(&bytes);
    let alone: Vec<usize> =
        (0..all.len()).filter(|&at| all[at].header.kind == Kind::Shard && id_of(&all[at]).is_some()).collect();
    let [first, second] = [alone[0], alone[1]];
    let mut frames = frames(&bytes);
    let raw = frames[second].raw().unwrap();
    let mut rows: Vec<super::rows::ObjectRow<'_>> = rmp_serde::from_slice(&raw).unwrap();
    rows[0].object = id_of(&all[first]).unwrap().1;
    let header = frames[second].header;
    frames[second] = Frame::shard(header.shard, 1, &rmp_serde::to_vec(&rows).unwrap()).unwrap();
    let error = restore(&joined(&frames, |_| {})).unwrap_err();
    assert!(matches!(&error, RestoreError::Inconsistent(why) if why.contains("twice")), "{error}");
}

/// Parts in another order, twice, or missing; a manifest of another image.
#[test]
fn frames_that_are_swapped_repeated_or_missing_are_refused() {
    let bytes = bytes_of(busy().directory.freeze());
    let count = frames(&bytes).len();
    for at in 0..count {
        let mut frames = frames(&bytes);
        let frame = frames.remove(at);
        let mut missing = head();
        frames.iter().for_each(|frame| frame.write(&mut missing).unwrap());
        restore(&missing).unwrap_err();
        let mut moved = head();
        frame.write(&mut moved).unwrap();
        frames.iter().for_each(|frame| frame.write(&mut moved).unwrap());
        assert!(restore(&moved).is_err() || at == 0, "frame {at} first");
        let mut twice = bytes.clone();
        frame.write(&mut twice).unwrap();
        restore(&twice).unwrap_err();
    }
}

/// Garbage behind correct checksums: an error, never a panic.
#[test]
fn mutated_rows_behind_correct_checksums_never_panic() {
    let bytes = bytes_of(busy().directory.freeze());
    let count = frames(&bytes).len();
    for place in 0..count - 1 {
        let frame = frames(&bytes).swap_remove(place);
        let raw = if frame.header.kind == Kind::Shard { frame.raw().unwrap() } else { frame.stored };
        for at in 0..raw.len() {
            for change in [1u8, 0x80, 0xff] {
                let mut bad = raw.clone();
                bad[at] ^= change;
                let mut frames = frames(&bytes);
                let header = frames[place].header;
                frames[place] = match header.kind {
                    Kind::Shard => Frame::shard(header.shard, header.rows, &bad).unwrap(),
                    kind => Frame::plain(kind, header.rows, bad),
                };
                // The applied position is not covered by the digest, so a few changes do pass.
                if let Ok(directory) = restore(&joined(&frames, |_| {})) {
                    directory.check_invariants().unwrap();
                }
            }
        }
    }
}

/// A header that promises more than there is costs no memory and ends with an error.
#[test]
fn absurd_lengths_are_refused() {
    let bytes = bytes_of(busy().directory.freeze());
    for (at, length) in [(7, u64::MAX), (15, u64::MAX), (15, 15 << 30), (7, 15 << 30)] {
        let mut bad = bytes.clone();
        let at = HEAD_BYTES + at;
        bad[at..at + 8].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(restore(&bad), Err(RestoreError::Damaged(_))));
    }
    assert!(HEAD_BYTES + HEADER_BYTES < bytes.len());
}

/// What changed in memory behind the digest's back is noticed while it is written, whichever way the objects are encoded.
/// Tried without comparing what was written with the digest: fails.
#[test]
fn an_image_of_records_that_are_not_the_digests_is_never_completed() {
    type Plant = (&'static str, fn(&Directory));
    let plants: [Plant; 6] = [
        ("objects", Directory::flip_a_record),
        ("nodes, segments", |directory| directory.spoil_the_digest(0)),
        ("sessions", |directory| {
            let mut core = directory.core.write();
            core.sessions.by_id.values_mut().next().expect("a session").floor ^= 1;
        }),
        ("lost members", |directory| {
            let mut core = directory.core.write();
            let lost = core.groups.by_name.values_mut().find_map(|group| group.lost.pop_first());
            assert!(lost.is_some(), "no group has lost a member");
        }),
        ("nodes, segments, tenants, tasks", |directory| {
            directory.core.write().tasks.by_id.values_mut().next().expect("a task").done ^= 1;
        }),
        ("nodes, segments, tenants, tasks and copies", |directory| {
            directory.core.write().copies.by_replica.values_mut().next().expect("a copy").offset ^= 1;
        }),
    ];
    for (part, plant) in plants {
        let directory = restore(&bytes_of(busy().directory.freeze())).unwrap();
        plant(&directory);
        // The second one is encoded at once, since the first holds the undo lists.
        let both = [directory.freeze(), directory.freeze()];
        for frozen in both {
            let mut bytes = Vec::new();
            let error = frozen.write_to(&mut bytes).unwrap_err();
            let why = tidepool_raft::Unsound::cause(&error).unwrap_or_else(|| panic!("{part}: {error}"));
            assert!(why.0.starts_with(part), "{part}: {why}");
            assert!(restore(&bytes).is_err());
        }
    }
}
