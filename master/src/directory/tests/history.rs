//! A directory that goes on in another cluster: what stays, what ends, whose history is whose.

use super::replay::{busy, bytes_of, restored};
use super::world::World;
use crate::directory::limits::ANCESTORS_MAX;
use crate::directory::{Contact, Op, Outcome};
use tidepool_proto::{ClusterId, ErrorCode, History};

fn begin(number: u8) -> Op<'static> {
    Op::BeginHistory { before: (ClusterId([number; 16]), History(number.into())) }
}

/// Tried with datanodes listed that were not heard yet: fails.
#[test]
fn what_is_complete_stays_and_what_was_under_way_ends() {
    let mut world = busy();
    let before = world.directory.counts();
    let complete: Vec<_> = world.directory.all_readable();
    assert_eq!(world.one(begin(1)), Outcome::Done);
    let after = world.directory.counts();
    assert_eq!((after.processing, world.directory.copies(None, 9).len()), (0, 0), "{after:?}");
    assert_eq!(before.objects - before.processing, after.objects);
    assert_eq!(world.directory.all_readable(), complete);
    assert!(world.directory.nodes().iter().all(|node| node.contact == Contact::Suspect));
    let node = &world.directory.nodes()[0];
    let heard = Op::SetContact { node: node.node, incarnation: node.incarnation, contact: Contact::Heard };
    assert_eq!(world.one(heard), Outcome::Done, "its life goes on");
    world.audit();
}

/// Ids are told apart by where the histories met, also after a snapshot.
#[test]
fn every_id_belongs_to_the_history_it_was_made_in() {
    let (mut world, _, session) = World::with_nodes(2, 1 << 16);
    let mut made = Vec::new();
    for number in 1..=3u8 {
        made.push((world.put(session, &format!("k{number}"), 100).object, Some(History(number.into()))));
        world.one(begin(number));
        for node in world.directory.nodes() {
            let heard = Op::SetContact { node: node.node, incarnation: node.incarnation, contact: Contact::Heard };
            world.one(heard);
        }
    }
    made.push((world.put(session, "k4", 100).object, None));
    let again = restored(world.directory.freeze());
    assert_eq!(again.digest(), world.directory.digest());
    assert_eq!(bytes_of(again.freeze()), bytes_of(world.directory.freeze()));
    for directory in [&world.directory, &again] {
        for (object, history) in &made {
            assert_eq!(directory.ancestors().history_of(object.op()), *history, "{object}");
        }
    }
}

#[test]
fn one_too_many_is_refused_and_changes_nothing() {
    let mut world = busy();
    world.refused(Op::BeginHistory { before: (ClusterId([1; 16]), History(0)) }, ErrorCode::InvalidParams);
    world.refused(Op::BeginHistory { before: (ClusterId([0; 16]), History(1)) }, ErrorCode::InvalidParams);
    for number in 0..ANCESTORS_MAX {
        world.one(begin(1 + number as u8));
    }
    let why = world.refused(begin(99), ErrorCode::ResourceExhausted);
    assert!(why.contains("64 histories"), "{why}");
}
