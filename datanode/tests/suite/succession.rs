//! A cluster that goes on in another one whose directory knows this process.

use super::world::{World, pattern};

const BYTES: u64 = 100_000;

/// Incarnations are log indexes: a life of another branch may have the number of this one, and only the history in which it was registered
/// tells them apart. What is stored stays for the same life, and goes for any other.
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
