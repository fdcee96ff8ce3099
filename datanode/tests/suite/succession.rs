//! A cluster that goes on in another one whose directory knows this process.

use tidepool_proto::v1;

use super::world::{World, pattern};

const BYTES: u64 = 100_000;

/// Incarnations are log indexes: a life of another branch may have the number of this one, and only the history in which it was registered
/// tells them apart. What is stored stays for the same life, and goes for any other. Fails when the answer's history is not read, and when
/// it is not compared (each tried).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_stored_stays_only_for_a_life_of_the_same_history() {
    for is_same in [true, false] {
        let world = World::start(1).await;
        let place = world.place(BYTES);
        world.put(&place, &pattern(BYTES, 1)).await.unwrap();
        let incarnation = world.datanode.incarnation().unwrap();
        let (_, before) = world.quorum.go_on();
        world.quorum.state.lock().registered_in = if is_same { before.0 } else { before.0 ^ 6 };
        assert_eq!(world.serving().await, incarnation.0);
        assert!(world.get(&place, BYTES).await.is_err(), "an address of the history before was served");
        let again = world.place(BYTES).with(|c| c.offset = place.capability.offset);
        let bytes = world.read(&again, 0, again.capability.length).await.unwrap();
        assert_eq!(bytes.iter().any(|&byte| byte != 0), is_same, "kept where it had to go, or gone");
        let counted = |what| world.metric("tidepool_datanode_successions_total", what);
        assert_eq!((counted("kept"), counted("dropped")), if is_same { (1.0, 0.0) } else { (0.0, 1.0) });
    }
}

/// What is copied in the present history has the header of the one in which it was put, as the leader names it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_the_history_before_is_copied() {
    let world = World::start(1).await;
    let place = world.place(BYTES);
    world.put(&place, &pattern(BYTES, 1)).await.unwrap();
    let (_, before) = world.quorum.go_on();
    world.quorum.state.lock().registered_in = before.0;
    world.serving().await;
    let of_it = |c: &mut tidepool_proto::capability::Capability| c.object = place.capability.object;
    let source = world.place(BYTES).with(of_it).with(|c| {
        (c.offset, c.replica) = (place.capability.offset, place.capability.replica);
    });
    let copy_for = |history| {
        let target = world.place(BYTES).with(of_it);
        let order = v1::CopyOrder {
            object_id: place.capability.object.0,
            source: Some(source.read_access().replica),
            source_address: world.peer().to_string(),
            target: Some(target.write_access(target.capability.length).replica),
            length: BYTES,
            remaining_ms: 20_000,
            history,
            ..Default::default()
        };
        world.quorum.state.lock().copies.push(order);
        target
    };
    for (told, is_right) in [(0, false), (before.0, true)] {
        let target = copy_for(told);
        let replica = target.capability.replica.0;
        let reported = |s: &mut super::fake_master::State| s.copied.iter().find(|r| r.replica_id == replica).cloned();
        let report = world.quorum.until("the copy to be reported", reported).await;
        let is_stored = report.outcome() == v1::ReplicaOutcome::Stored;
        assert_eq!(is_stored, is_right, "told {told}: {}", report.message);
        if is_right {
            let whole = async |place| world.read(place, 0, target.capability.length).await.unwrap();
            assert!(whole(&target).await == whole(&source).await);
        }
    }
}
