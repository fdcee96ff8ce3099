//! What one entry did to one key without a call: told from the key's state before and after, and from the entry's ops.

use tidepool_master::directory::Op;

use super::State;
use crate::history::{Event, object_of};
use crate::keys::key_name;

/// Whether copies go with their datanode.
pub(super) fn loses_copies(op: &Op<'_>) -> bool {
    matches!(op, Op::RegisterNode { .. } | Op::DropNode { .. } | Op::UnmountSegment { .. } | Op::DropReplica { .. })
}

/// Whether an object may be evicted by this entry.
pub(super) fn is_victim(object: u64, ops: &[Op<'_>]) -> bool {
    ops.iter().any(|op| match op {
        Op::PutStart(put) => put.victims.iter().any(|victim| victim.0 == object),
        Op::Retire { objects, .. } => objects.iter().any(|victim| victim.0 == object),
        _ => false,
    })
}

/// Whether an entry did what it may have done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Is {
    Sure,
    Possible,
}

/// What no client caused: everything but the ends of puts and the removals of this very entry.
pub(super) fn events(key: u64, was: State, is: State, ops: &[Op<'_>]) -> Vec<(Event, Is)> {
    let removed = |value: u64| {
        let object = object_of(value);
        ops.iter().any(|op| match op {
            Op::Remove(remove) => remove.key == key_name(key).as_slice(),
            Op::RemoveObjects { objects, .. } => objects.iter().any(|o| o.0 == object),
            _ => false,
        })
    };
    let ended = |value: u64| ops.iter().any(|op| matches!(op, Op::PutEnd(end) if end.object.0 == object_of(value)));
    let mut events = Vec::new();
    match (was, is) {
        (Some((a, visible)), Some((b, now_visible))) if a == b => match (visible, now_visible) {
            (true, false) => events.push((Event::Hidden(a), Is::Sure)),
            (false, true) => events.push((Event::Shown(a), Is::Sure)),
            _ => {}
        },
        (Some((a, _)), Some((b, visible))) => {
            if !ended(b) {
                events.push((Event::Dropped(a), Is::Sure));
            }
            if !visible {
                events.push((Event::Hidden(b), Is::Sure));
            }
        }
        (Some((a, _)), None) if !removed(a) => events.push((Event::Dropped(a), Is::Sure)),
        // Which of the two it was, the order of this entry's ops says: whoever removed is told.
        (Some((a, _)), None) if is_victim(object_of(a), ops) || ops.iter().any(loses_copies) => {
            events.push((Event::Dropped(a), Is::Possible));
        }
        (None, Some((b, false))) => events.push((Event::Hidden(b), Is::Sure)),
        _ => {}
    }
    events
}

#[cfg(test)]
mod tests {
    use tidepool_master::directory::{Remove, RetireMode, SessionId, TenantId, Turn};
    use tidepool_proto::ObjectId;

    use super::*;

    /// A removal of a key and the loss of its copies in one entry: either may have come first.
    #[test]
    fn a_loss_and_a_removal_in_one_entry_may_be_either() {
        let removal = Op::Remove(Remove {
            tenant: TenantId::DEFAULT,
            session: SessionId(1),
            turn: Turn { sequence: 1, floor: 1 },
            key: b"key-0",
            expected: Some(ObjectId(7)),
            mode: RetireMode::RetireOnly,
        });
        let life = Op::RegisterNode { node_uuid: [0; 16], process_uuid: [0; 16], address: "a:1", host_id: "" };
        let happens = |ops: &[Op<'_>]| events(0, Some((7, true)), None, ops);
        assert_eq!(happens(&[life.clone(), removal.clone()]), [(Event::Dropped(7), Is::Possible)]);
        assert_eq!(happens(std::slice::from_ref(&removal)), []);
        assert_eq!(happens(&[life]), [(Event::Dropped(7), Is::Sure)]);
    }
}
