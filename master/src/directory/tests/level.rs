//! The feature level (M6): what it changes, and that nothing changes before it is raised.

use super::replay::{busy, busy_at, bytes_of, replay};
use super::world::{HISTORY, World};
use crate::directory::{
    DecodeError, Directory, Entry, EntryBuilder, FEATURE_LEVEL, FEATURE_LEVEL_FIRST, Op, Outcome, admit_image,
};
use tidepool_proto::{ErrorCode, LogTime};

#[test]
fn a_raise_is_part_of_the_state_and_is_never_taken_back() {
    let mut world = busy();
    assert_eq!(world.directory.feature_level(), FEATURE_LEVEL_FIRST);
    let before = world.directory.digest();
    assert_eq!(world.one(Op::RaiseFeatureLevel { level: FEATURE_LEVEL }), Outcome::Done);
    assert_eq!(world.directory.feature_level(), FEATURE_LEVEL);
    assert_ne!(world.directory.digest(), before);
    for level in [FEATURE_LEVEL_FIRST, FEATURE_LEVEL, FEATURE_LEVEL + 1, u16::MAX] {
        let op = Op::RaiseFeatureLevel { level };
        // Above this binary's it could not even be decoded; apply refuses it all the same.
        let entry = Entry { feature_level: FEATURE_LEVEL, log_time: LogTime(world.time_ms), ops: vec![op] };
        let index = world.log.len() as u64 + 1;
        let outcome = world.directory.apply_entry(index, 1, &entry).pop().unwrap();
        assert!(matches!(outcome, Outcome::Refused(error) if error.code() == ErrorCode::InvalidParams), "{level}");
        world.log.push((index, entry.encode().unwrap()));
    }
    assert_eq!(replay(&world.log).digest(), world.directory.digest());
}

/// An image has the level of the state it holds, not of the binary; a restored state has it again.
#[test]
fn an_image_is_written_at_the_level_of_its_state() {
    for level in [FEATURE_LEVEL_FIRST, FEATURE_LEVEL] {
        let world = busy_at(level);
        let bytes = bytes_of(world.directory.freeze());
        assert_eq!(admit_image(&mut &bytes[..]).unwrap(), level);
        let restored = Directory::new(HISTORY);
        restored.restore(&mut &bytes[..]).unwrap();
        assert_eq!((restored.feature_level(), restored.digest()), (level, world.directory.digest()));
        restored.check_invariants().unwrap();
    }
}

/// What a member is asked before it acknowledges an entry: its head, whatever follows.
#[test]
fn an_entry_above_this_binary_is_not_admitted() {
    for (level, wanted) in
        [(1, Ok(())), (FEATURE_LEVEL, Ok(())), (FEATURE_LEVEL + 1, Err(DecodeError::FeatureLevel(FEATURE_LEVEL + 1)))]
    {
        let mut bytes = EntryBuilder::new(level).finish(LogTime(1)).to_vec();
        bytes.extend_from_slice(b"ops of a form that only a newer binary knows");
        assert_eq!(Entry::admit(&bytes), wanted);
    }
    Entry::admit(&[]).unwrap_err();
}

/// A raise is stamped with the level that it raises to, so that a binary that does not know it stops before it.
#[test]
fn a_raise_is_stamped_with_its_own_level() {
    let mut world = World::new();
    world.one(Op::RaiseFeatureLevel { level: FEATURE_LEVEL });
    assert_eq!(Entry::decode(&world.log[0].1).unwrap().feature_level, FEATURE_LEVEL);
}
