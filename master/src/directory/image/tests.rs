//! What an image's checks are for: content that is wrong behind checksums that are right.

use super::frame::{Frame, HEADER_BYTES, Kind, MAGIC};
use super::manifest::{Manifest, PartSum};
use super::*;
use crate::directory::tests::replay::{busy, bytes_of};
use crate::directory::tests::world::HISTORY;

fn frames(bytes: &[u8]) -> Vec<Frame> {
    let mut rest = &bytes[MAGIC.len()..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        frames.push(Frame::read(&mut rest).unwrap());
    }
    frames
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
    let mut bytes = MAGIC.to_vec();
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
    let bytes = bytes_of(&busy().directory.freeze());
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
    let frames = frames(&bytes_of(&busy().directory.freeze()));
    for (bytes, what) in [
        (joined(&frames, |manifest| manifest.format += 1), "format 2"),
        (joined(&frames, |manifest| manifest.feature_level += 1), "feature level"),
    ] {
        let error = restore(&bytes).unwrap_err();
        assert!(matches!(&error, RestoreError::Version(why) if why.contains(what)), "{error}");
    }
}

/// Parts in another order, twice, or missing; a manifest of another image.
#[test]
fn frames_that_are_swapped_repeated_or_missing_are_refused() {
    let bytes = bytes_of(&busy().directory.freeze());
    let count = frames(&bytes).len();
    for at in 0..count {
        let mut frames = frames(&bytes);
        let frame = frames.remove(at);
        let mut missing = MAGIC.to_vec();
        frames.iter().for_each(|frame| frame.write(&mut missing).unwrap());
        restore(&missing).unwrap_err();
        let mut moved = MAGIC.to_vec();
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
    let bytes = bytes_of(&busy().directory.freeze());
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
    let bytes = bytes_of(&busy().directory.freeze());
    for (at, length) in [(7, u64::MAX), (15, u64::MAX), (15, 15 << 30), (7, 15 << 30)] {
        let mut bad = bytes.clone();
        let at = MAGIC.len() + at;
        bad[at..at + 8].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(restore(&bad), Err(RestoreError::Damaged(_))));
    }
    assert!(MAGIC.len() + HEADER_BYTES < bytes.len());
}
