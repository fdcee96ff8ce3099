//! Checks of a path in trouble: deadlines, dropped calls, fences and dead peers.

use std::time::{Duration, Instant};

use tidepool_proto::ErrorCode;

use super::{ABORTED, Factory, TestMemory, patient, pattern, read_item, skewed, taken, write_item};
use crate::local::Owner;

/// Waits for a condition that another task brings about; the limit only turns a hang into a failure.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < limit, "{what} did not come about");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// User report 85: a peer that is alive but stuck. The call returns with its deadline, its memory is free, and not a
/// byte is written there when the peer wakes up. Fails if `settle` leaves the ranges in place.
pub async fn case_085_a_stuck_peer_costs_the_deadline_and_not_a_byte_more(factory: &impl Factory) {
    const LENGTH: usize = 200_000;
    let memory = TestMemory::new(4 * LENGTH);
    memory.fill(0, &vec![7; 4 * LENGTH]);
    let pair = factory.pair(memory.clone()).await;
    memory.set_stuck(true);
    let mut backing = vec![0u8; LENGTH];
    let first = backing.as_mut_ptr();
    // SAFETY: `backing` outlives the call, and is not touched before it returned.
    #[allow(unsafe_code)]
    let part = unsafe { crate::local::LocalMut::from_raw(first, LENGTH, Owner::process()) };
    let deadline = Instant::now() + Duration::from_millis(200);
    let reads = vec![read_item(&memory, 1, 0, vec![part])];
    let result = pair.engine.read(&pair.peer, reads, deadline).await.remove(0);
    assert_eq!(result.unwrap_err().code(), ErrorCode::DeadlineExceeded);
    let writes = vec![write_item(&memory, 2, LENGTH as u64, vec![vec![9u8; LENGTH].into()])];
    let deadline = Instant::now() + Duration::from_millis(200);
    let end = pair.engine.write(&pair.peer, writes, deadline).await.remove(0).unwrap_err();
    assert_eq!((end.error.code(), end.is_clean()), (ErrorCode::DeadlineExceeded, false));
    memory.set_stuck(false);
    // Once a later read is answered, everything before it was.
    let (buffer, part) = skewed(LENGTH, 0);
    let reads = vec![read_item(&memory, 3, 2 * LENGTH as u64, vec![part])];
    pair.engine.read(&pair.peer, reads, patient()).await.remove(0).unwrap();
    assert!(taken(buffer) == vec![7; LENGTH]);
    assert!(backing.iter().all(|&b| b == 0), "a late answer was written into memory that was given back");
}

/// Dropping a call's future is as good as its deadline: the memory is free at once, and the path goes on.
pub async fn a_dropped_call_gives_its_memory_back(factory: &impl Factory) {
    const LENGTH: usize = 3 << 20;
    let memory = TestMemory::new(LENGTH);
    memory.fill(0, &pattern(1, LENGTH));
    let pair = factory.pair(memory.clone()).await;
    for after_ms in [0, 1, 2, 5] {
        memory.set_stuck(after_ms % 2 == 1);
        let (buffer, part) = skewed(LENGTH, 0);
        let call = pair.engine.read(&pair.peer, vec![read_item(&memory, 1, 0, vec![part])], patient());
        // Either outcome will do: what counts is that the loan is back.
        let _ended = tokio::time::timeout(Duration::from_millis(after_ms), call).await;
        drop(taken(buffer));
        let source = bytes::Bytes::from(pattern(1, LENGTH));
        let writes = vec![write_item(&memory, 1, 0, vec![source.clone().into()])];
        let call = pair.engine.write(&pair.peer, writes, patient());
        let _ended = tokio::time::timeout(Duration::from_millis(after_ms), call).await;
        assert!(source.is_unique(), "the engine kept a source after the call was dropped (R4)");
        memory.set_stuck(false);
        let (buffer, part) = skewed(1000, 0);
        // A connection lost to the dropped call may need a second dial; the path itself must come back.
        let limit = patient();
        let mut reads = vec![read_item(&memory, 1, 0, vec![part])];
        let mut buffer = buffer;
        while pair.engine.read(&pair.peer, std::mem::take(&mut reads), patient()).await.remove(0).is_err() {
            assert!(Instant::now() < limit, "the path did not come back");
            drop(taken(buffer));
            let (again, part) = skewed(1000, 0);
            (buffer, reads) = (again, vec![read_item(&memory, 1, 0, vec![part])]);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        eventually("every ticket's end", || memory.tickets().2 == 0).await;
        drop(taken(buffer));
    }
}

/// W5: a fence during a put. Nothing is written behind the chunk that was under way, the item ends clean as aborted,
/// its neighbours are stored. Fails if the engine does not ask before each chunk (the extent fills up).
pub async fn a_fence_stops_a_put_at_the_next_chunk(factory: &impl Factory) {
    const LENGTH: u64 = 4 << 20;
    const FENCE: u64 = 1 << 20;
    let memory = TestMemory::new(3 * LENGTH as usize);
    let pair = factory.pair(memory.clone()).await;
    memory.fence_at(2, FENCE);
    let writes = (0..3).map(|i| write_item(&memory, i + 1, i * LENGTH, vec![vec![0xaa; LENGTH as usize].into()]));
    let results = pair.engine.write(&pair.peer, writes.collect(), patient()).await;
    let ends: Vec<_> = results.into_iter().map(|r| r.map(|_| ()).map_err(|e| (e.error.code(), e.aborted))).collect();
    assert_eq!(ends, [Ok(()), Err((ErrorCode::Fenced, Some(ABORTED))), Ok(())]);
    let extent = memory.copy(LENGTH, LENGTH);
    let written = extent.iter().take_while(|&&b| b == 0xaa).count() as u64;
    assert!((FENCE..=FENCE + (256 << 10)).contains(&written), "{written} bytes were written");
    assert!(extent[written as usize..].iter().all(|&b| b == 0), "bytes were written after the fence");
    assert!(memory.copy(0, LENGTH).iter().chain(&memory.copy(2 * LENGTH, LENGTH)).all(|&b| b == 0xaa));
    assert_eq!(memory.tickets(), (3, 1, 0));
}

/// A peer that dies in the middle: the items fail well before their deadline, unclean, and the server side finishes
/// every ticket it had opened.
pub async fn a_killed_peer_fails_its_items_and_finishes_its_tickets(factory: &impl Factory) {
    const LENGTH: usize = 64 << 20;
    let memory = TestMemory::new(2 * LENGTH);
    let pair = factory.pair(memory.clone()).await;
    let (engine, peer) = (pair.engine.clone(), pair.peer.clone());
    let (buffer, part) = skewed(1000, 0);
    engine.read(&peer, vec![read_item(&memory, 1, 0, vec![part])], patient()).await.remove(0).unwrap();
    drop(buffer);
    let source = bytes::Bytes::from(vec![1u8; LENGTH]);
    let writes = vec![write_item(&memory, 2, LENGTH as u64, vec![source.clone().into()])];
    let write = tokio::spawn({
        let (engine, peer) = (engine.clone(), peer.clone());
        async move { engine.write(&peer, writes, patient()).await.remove(0) }
    });
    let (mut open, mut ended) = (false, false);
    eventually("the put's ticket", || {
        let (finished, _, now_open) = memory.tickets();
        (open, ended) = (now_open > 0, finished > 0);
        open || ended
    })
    .await;
    pair.server.kill();
    let result = tokio::time::timeout(Duration::from_secs(60), write).await.expect("long before the deadline").unwrap();
    match result {
        Err(end) => {
            assert!(!end.is_clean(), "{end}");
            assert_eq!(end.error.code(), ErrorCode::TransferFailed, "{end}");
        }
        // The put may have won the race.
        Ok(_) => assert_eq!(memory.tickets().1, 0),
    }
    eventually("every ticket's end", || memory.tickets().2 == 0).await;
    assert!(source.is_unique(), "the engine kept a source after the call returned");
    let (buffer, part) = skewed(1000, 0);
    let deadline = Instant::now() + Duration::from_secs(5);
    let result = engine.read(&peer, vec![read_item(&memory, 1, 0, vec![part])], deadline).await.remove(0);
    assert_ne!(result.unwrap_err().code(), ErrorCode::DeadlineExceeded, "a dead peer is known to be dead");
    drop(taken(buffer));
}
