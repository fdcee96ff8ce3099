//! Kinds of blocks: what is learned is learned per class.

/// Number of classes.
pub(super) const CLASSES: usize = 21;
/// The class of blocks that came when the block before them was gone: worth less than nothing.
pub(super) const UNREACHABLE: u8 = 20;
/// Bits of a tag: the class.
pub(super) const CLASS: u8 = 0x1f;
/// Steps of both counts in a class: 1, 2, 3, more.
pub(super) const STEPS: u8 = 4;
/// First class of the last blocks of prompts.
const LAST: u8 = STEPS * STEPS;

const _: () = assert!(UNREACHABLE == LAST + STEPS && CLASSES == UNREACHABLE as usize + 1 && CLASSES <= CLASS as usize);

/// How often, less one, a request that ended in or went through a block of this class had continued its chain.
pub(super) fn turn_of(class: u8) -> u8 {
    class % STEPS
}

/// Class of a block that a request used, from the class it had, if it was known.
pub(super) fn class_used(before: Option<u8>, turn: u8, is_last: bool) -> u8 {
    match before {
        None if is_last => LAST + turn,
        None => turn,
        Some(class) if class >= LAST => STEPS + turn,
        Some(class) => (class / STEPS + 1).min(STEPS - 1) * STEPS + turn,
    }
}
