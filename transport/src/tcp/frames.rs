//! Cuts a batch into frames: spread over the stripes by bytes, each frame within its limits, large reads split.

use super::options::{FRAME_BYTES_TARGET, FRAME_ITEMS_MAX};
use crate::engine::{ReadItem, WriteItem};
use crate::local::LocalMut;

/// A read is not split into parts smaller than this.
const SPLIT_BYTES_MIN: u64 = 512 << 10;
/// Parts of a split read start on multiples of this.
const SPLIT_BYTES_ALIGN: u64 = 64 << 10;

/// Something with a payload length that may be cut in two.
pub(super) trait Piece: Sized {
    /// Payload bytes.
    fn length(&self) -> u64;
    /// Cuts it, unless it must stay whole.
    fn cut(self, at: u64) -> Result<(Self, Self), Self>;
}

/// Items of one frame, and which item of the batch each belongs to.
pub(super) struct Frame<T> {
    /// Stripe to send it on.
    pub(super) stripe: usize,
    /// Items, or parts of items.
    pub(super) items: Vec<T>,
    /// Index in the batch, for each of `items`.
    pub(super) indices: Vec<usize>,
}

impl Piece for ReadItem {
    fn length(&self) -> u64 {
        self.access.length
    }
    fn cut(mut self, at: u64) -> Result<(ReadItem, ReadItem), ReadItem> {
        let mut tail = self.access.clone();
        tail.offset += at;
        tail.length -= at;
        self.access.length = at;
        let (mut front, mut back) = (Vec::with_capacity(self.into.len()), Vec::new());
        let mut left = at as usize;
        for part in self.into {
            let (head, rest) = part.split_at(left);
            left -= head.len();
            front.extend(Some(head).filter(|part: &LocalMut| !part.is_empty()));
            back.extend(Some(rest).filter(|part| !part.is_empty()));
        }
        Ok((ReadItem { access: self.access, into: front }, ReadItem { access: tail, into: back }))
    }
}

impl Piece for WriteItem {
    fn length(&self) -> u64 {
        self.access.length
    }
    fn cut(self, _at: u64) -> Result<(WriteItem, WriteItem), WriteItem> {
        // An extent has one writer, so one connection.
        Err(self)
    }
}

/// Cuts `items` into frames over `stripes` stripes. Frames of the stripes alternate, so that sending them in order
/// keeps all stripes busy.
pub(super) fn cut<T: Piece>(items: Vec<(usize, T)>, stripes: usize) -> Vec<Frame<T>> {
    let total: u64 = items.iter().map(|(_, item)| item.length()).sum();
    let share = total.div_ceil(stripes as u64).max(1);
    let mut lanes: Vec<Lane<T>> = (0..stripes).map(|_| Lane { frames: Vec::new(), bytes: 0, open_bytes: 0 }).collect();
    let mut lane = 0;
    for (index, mut item) in items {
        while lane + 1 < stripes {
            let room = share.saturating_sub(lanes[lane].bytes);
            if item.length() <= room {
                break;
            }
            let at = room / SPLIT_BYTES_ALIGN * SPLIT_BYTES_ALIGN;
            let worth = at >= SPLIT_BYTES_MIN && item.length() - at >= SPLIT_BYTES_MIN;
            match if worth { item.cut(at) } else { Err(item) } {
                Ok((front, back)) => {
                    lanes[lane].push(lane, index, front);
                    item = back;
                    lane += 1;
                }
                Err(whole) => {
                    item = whole;
                    // It goes to the emptier side of the boundary.
                    if item.length() > 2 * room {
                        lane += 1;
                        if lanes[lane].bytes > 0 {
                            continue;
                        }
                    }
                    break;
                }
            }
        }
        lanes[lane].push(lane, index, item);
    }
    let mut lanes: Vec<_> = lanes.into_iter().map(|lane| lane.frames.into_iter()).collect();
    let mut frames = Vec::new();
    loop {
        let before = frames.len();
        frames.extend(lanes.iter_mut().filter_map(Iterator::next));
        if frames.len() == before {
            return frames;
        }
    }
}

struct Lane<T> {
    frames: Vec<Frame<T>>,
    bytes: u64,
    open_bytes: u64,
}

impl<T: Piece> Lane<T> {
    fn push(&mut self, stripe: usize, index: usize, item: T) {
        let length = item.length();
        let full = self.frames.last().is_none_or(|frame| {
            frame.items.len() == FRAME_ITEMS_MAX || self.open_bytes.saturating_add(length) > FRAME_BYTES_TARGET
        });
        if full {
            self.frames.push(Frame { stripe, items: Vec::new(), indices: Vec::new() });
            self.open_bytes = 0;
        }
        let frame = self.frames.last_mut().expect("pushed above");
        frame.items.push(item);
        frame.indices.push(index);
        self.open_bytes += length;
        self.bytes += length;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::access::ReadAccess;
    use crate::local::Buffer;

    fn item(length: u64) -> (Buffer, ReadItem) {
        let half = length as usize / 3;
        let (buffer, into) = Buffer::lend(vec![0; length as usize], &[half, length as usize - half]).unwrap();
        (buffer, ReadItem { access: ReadAccess { offset: 100, length, ..Default::default() }, into })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn frames_hold_every_byte_once_and_keep_their_limits(
            lengths in prop::collection::vec(prop_oneof![0u64..5000, 0u64..(3 << 20)], 1..40),
            stripes in 1usize..5,
        ) {
            let items: Vec<_> = lengths.iter().map(|&n| item(n).1).enumerate().collect();
            let frames = cut(items, stripes);
            let mut ranges = vec![Vec::new(); lengths.len()];
            for frame in &frames {
                let bytes: u64 = frame.items.iter().map(Piece::length).sum();
                prop_assert!(frame.items.len() == 1 || bytes <= FRAME_BYTES_TARGET);
                prop_assert!(frame.stripe < stripes && !frame.items.is_empty() && frame.items.len() <= FRAME_ITEMS_MAX);
                for (item, &index) in frame.items.iter().zip(&frame.indices) {
                    prop_assert_eq!(item.into.iter().map(|part| part.len() as u64).sum::<u64>(), item.access.length);
                    ranges[index].push((item.access.offset, item.access.length));
                }
            }
            for (ranges, &length) in ranges.iter_mut().zip(&lengths) {
                ranges.sort();
                let mut at = 100;
                for &mut (offset, part) in ranges {
                    prop_assert_eq!(offset, at);
                    at += part;
                }
                prop_assert_eq!(at, 100 + length);
            }
        }
    }

    #[test]
    fn a_large_batch_is_spread_evenly_and_one_large_read_is_split() {
        for lengths in [vec![16u64 << 20; 8], vec![16 << 20], vec![1 << 20; 64], vec![64 << 10; 128]] {
            let items: Vec<_> = lengths.iter().map(|&n| item(n).1).enumerate().collect();
            let mut bytes = [0u64; 2];
            cut(items, 2).iter().for_each(|f| bytes[f.stripe] += f.items.iter().map(Piece::length).sum::<u64>());
            assert_eq!(bytes[0], bytes[1], "{lengths:?}");
        }
    }
}
