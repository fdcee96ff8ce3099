//! Checks of a healthy path: right bytes in the right place, results with the right items.

use tidepool_proto::ErrorCode;

use super::{ABORTED, Factory, STORED, TestMemory, patient, pattern, read_item, skewed, taken, write_item};
use crate::access::ReadAccess;
use crate::engine::{ReadItem, WriteItem};
use crate::local::{Buffer, LocalRef};
use crate::memory::WriteOutcome;

/// Writes and reads back `lengths`, each at an odd address in the extent and in local memory, in one batch each way.
async fn round_trip(factory: &impl Factory, lengths: &[usize]) {
    let place = |length: usize| (length as u64 + 67) & !1;
    let total: u64 = lengths.iter().map(|&n| place(n)).sum();
    let memory = TestMemory::new(total as usize + 1);
    let pair = factory.pair(memory.clone()).await;
    let mut at = 1;
    let offset_of = |&n: &usize| {
        at += place(n);
        at - place(n)
    };
    let offsets: Vec<u64> = lengths.iter().map(offset_of).collect();
    let writes = lengths.iter().enumerate().map(|(i, &length)| {
        let bytes = bytes::Bytes::from(pattern(i as u64, length + i % 7));
        write_item(&memory, i as u64 + 1, offsets[i], vec![LocalRef::from(bytes.slice(i % 7..))])
    });
    let writes = writes.collect();
    for (i, result) in pair.engine.write(&pair.peer, writes, patient()).await.into_iter().enumerate() {
        let reply = result.unwrap_or_else(|error| panic!("write of {} bytes: {error}", lengths[i]));
        assert_eq!((reply.outcome, reply.proof), (WriteOutcome::Stored, STORED));
        let expected = &pattern(i as u64, lengths[i] + i % 7)[i % 7..];
        assert!(memory.copy(offsets[i], lengths[i] as u64) == expected, "write of {} bytes", lengths[i]);
        assert_eq!(memory.copy(offsets[i] + lengths[i] as u64, 1), [0], "a byte behind a write of {}", lengths[i]);
    }
    let mut buffers = Vec::new();
    let reads = lengths.iter().enumerate().map(|(i, &length)| {
        let (buffer, part) = skewed(length, i % 5);
        buffers.push(buffer);
        read_item(&memory, i as u64 + 1, offsets[i], vec![part])
    });
    let reads = reads.collect();
    let results = pair.engine.read(&pair.peer, reads, patient()).await;
    for (i, (result, buffer)) in results.into_iter().zip(buffers).enumerate() {
        result.unwrap_or_else(|error| panic!("read of {} bytes: {error}", lengths[i]));
        let expected = &pattern(i as u64, lengths[i] + i % 7)[i % 7..];
        assert!(taken(buffer)[i % 5..] == *expected, "read of {} bytes", lengths[i]);
    }
    assert_eq!(memory.tickets(), (lengths.len() as u64, 0, 0));
}

/// User report 53: transfers of some sizes came out wrong.
pub async fn case_053_all_sizes_are_byte_exact(factory: &impl Factory) {
    let lengths: Vec<usize> = (0..=4097).collect();
    round_trip(factory, &lengths).await;
}

/// User report 53: 2^n - 1, 2^n and 2^n + 1 up to 64 MiB.
pub async fn case_053_sizes_around_powers_of_two_are_byte_exact(factory: &impl Factory) {
    for power in [13, 14, 15, 16, 17, 18, 19, 20, 21, 23, 24] {
        round_trip(factory, &[(1 << power) - 1, 1 << power, (1 << power) + 1]).await;
    }
    for length in [(64 << 20) - 1, 64 << 20, (64 << 20) + 1] {
        round_trip(factory, &[length]).await;
    }
}

/// User report 112: the same key twice in one batch left the first buffer unwritten.
pub async fn case_112_duplicate_items_each_get_their_own_bytes(factory: &impl Factory) {
    for length in [4096usize, 1 << 20] {
        let memory = TestMemory::new(length);
        memory.fill(0, &pattern(1, length));
        let pair = factory.pair(memory.clone()).await;
        let (buffers, parts): (Vec<_>, Vec<_>) = (0..5).map(|_| skewed(length, 1)).unzip();
        let reads = parts.into_iter().map(|part| read_item(&memory, 1, 0, vec![part])).collect();
        for result in pair.engine.read(&pair.peer, reads, patient()).await {
            result.unwrap();
        }
        for buffer in buffers {
            assert!(taken(buffer)[1..] == pattern(1, length));
        }
    }
}

/// A batch in which every kind of item occurs: each gets its own result, and the good ones their bytes.
pub async fn mixed_failures_stay_with_their_items(factory: &impl Factory) {
    const LENGTH: usize = 100_000;
    let memory = TestMemory::new(16 * LENGTH);
    (0..16).for_each(|i| memory.fill(i * LENGTH as u64, &pattern(i, LENGTH)));
    let pair = factory.pair(memory.clone()).await;
    let expected = |i: usize| match i % 4 {
        0 => None,
        1 => Some(ErrorCode::CapabilityRefused),
        2 => Some(ErrorCode::Fenced),
        _ => Some(ErrorCode::OutOfBounds),
    };
    let spoil = |i: usize, replica: &mut tidepool_proto::v1::Replica| match i % 4 {
        1 => replica.mac = bytes::Bytes::from_static(b"forged"),
        2 => replica.incarnation += 1,
        3 => replica.offset = u64::MAX - 5,
        _ => {}
    };
    let (buffers, parts): (Vec<_>, Vec<_>) = (0..16).map(|_| skewed(LENGTH, 3)).unzip();
    let mut reads: Vec<ReadItem> = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        let mut item = read_item(&memory, i as u64, (i * LENGTH) as u64, vec![part]);
        spoil(i, &mut item.access.replica);
        reads.push(item);
    }
    let results = pair.engine.read(&pair.peer, reads, patient()).await;
    for (i, (result, buffer)) in results.into_iter().zip(buffers).enumerate() {
        assert_eq!(result.err().map(|error| error.code()), expected(i), "read {i}");
        let bytes = taken(buffer);
        match expected(i) {
            None => assert!(bytes[3..] == pattern(i as u64, LENGTH), "read {i}"),
            Some(_) => assert!(bytes.iter().all(|&b| b == 0), "read {i} failed and wrote"),
        }
    }
    let mut writes: Vec<WriteItem> = Vec::new();
    for i in 0..16 {
        let mut item = write_item(&memory, i as u64, (i * LENGTH) as u64, vec![pattern(100 + i as u64, LENGTH).into()]);
        spoil(i, &mut item.access.replica);
        writes.push(item);
    }
    for (i, result) in pair.engine.write(&pair.peer, writes, patient()).await.into_iter().enumerate() {
        assert_eq!(result.err().map(|error| (error.error.code(), error.aborted)), expected(i).map(|code| (code, None)));
        let stored = if expected(i).is_none() { 100 + i as u64 } else { i as u64 };
        assert!(memory.copy((i * LENGTH) as u64, LENGTH as u64) == pattern(stored, LENGTH), "write {i}");
    }
}

/// One item over many slices, some empty, some tiny: more than one system call takes.
pub async fn scattered_slices_fill_in_order(factory: &impl Factory) {
    let lengths: Vec<usize> = (0..3000).map(|i| (i * 37) % 101).chain([300_000, 0, 1]).collect();
    let total: usize = lengths.iter().sum();
    let memory = TestMemory::new(total);
    let pair = factory.pair(memory.clone()).await;
    let source = bytes::Bytes::from(pattern(5, total));
    let mut at = 0;
    let from = lengths.iter().map(|&n| {
        at += n;
        LocalRef::from(source.slice(at - n..at))
    });
    let writes = vec![write_item(&memory, 1, 0, from.collect())];
    pair.engine.write(&pair.peer, writes, patient()).await.remove(0).unwrap();
    assert!(memory.copy(0, total as u64) == source);
    let (buffer, parts) = Buffer::lend(vec![0; total], &lengths).unwrap();
    pair.engine.read(&pair.peer, vec![read_item(&memory, 1, 0, parts)], patient()).await.remove(0).unwrap();
    assert!(taken(buffer) == source);
}

/// Ranges inside an extent, the empty one and the one that leaves it.
pub async fn ranges_of_an_extent_are_read(factory: &impl Factory) {
    let length = 3 << 20;
    let memory = TestMemory::new(length + 64);
    memory.fill(64, &pattern(9, length));
    let pair = factory.pair(memory.clone()).await;
    for (offset, part) in [(0, 1), (1, 70_000), (65_535, 2 << 20), (length - 1, 1), (length, 0), (length - 1, 2)] {
        let (buffer, into) = skewed(part, 0);
        let access = ReadAccess {
            object_id: 1,
            replica: memory.replica(1, 64, length as u64),
            offset: offset as u64,
            length: part as u64,
        };
        let read = vec![ReadItem { access, into: vec![into] }];
        let result = pair.engine.read(&pair.peer, read, patient()).await.remove(0);
        if offset + part <= length {
            result.unwrap();
            assert!(taken(buffer) == pattern(9, length)[offset..offset + part], "{part} bytes at {offset}");
        } else {
            assert_eq!(result.unwrap_err().code(), ErrorCode::OutOfBounds);
        }
    }
}

/// Many callers at once, reads and writes of all sizes: nobody gets another's bytes.
pub async fn many_batches_at_once_keep_apart(factory: &impl Factory) {
    const CALLERS: u64 = 24;
    const ROOM: u64 = 3 << 20;
    let memory = TestMemory::new((CALLERS * ROOM) as usize);
    let pair = factory.pair(memory.clone()).await;
    let tasks = (0..CALLERS).map(|caller| {
        let (engine, peer, memory) = (pair.engine.clone(), pair.peer.clone(), memory.clone());
        tokio::spawn(async move {
            for round in 0..6u64 {
                let lengths = (0..20u64).map(|i| match (caller + round + i) % 10 {
                    0 => 1_000_000,
                    n => (n * n * n * 17) as usize,
                });
                let lengths: Vec<usize> = lengths.collect();
                let mut at = caller * ROOM;
                let mut offsets = Vec::new();
                let mut writes = Vec::new();
                for (i, &length) in lengths.iter().enumerate() {
                    let seed = caller << 32 | round << 16 | i as u64;
                    offsets.push(at);
                    writes.push(write_item(&memory, seed, at, vec![pattern(seed, length).into()]));
                    at += length as u64;
                }
                for result in engine.write(&peer, writes, patient()).await {
                    result.unwrap();
                }
                let (buffers, parts): (Vec<_>, Vec<_>) = lengths.iter().map(|&n| skewed(n, 0)).unzip();
                let item = |(i, part)| read_item(&memory, 0, offsets[i], vec![part]);
                let reads = parts.into_iter().enumerate().map(item).collect();
                for result in engine.read(&peer, reads, patient()).await {
                    result.unwrap();
                }
                for (i, buffer) in buffers.into_iter().enumerate() {
                    let seed = caller << 32 | round << 16 | i as u64;
                    assert!(taken(buffer) == pattern(seed, lengths[i]), "caller {caller} round {round} item {i}");
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

/// More items than one frame takes, and no items at all.
pub async fn oversized_batches_are_split(factory: &impl Factory) {
    const ITEMS: usize = 5000;
    let memory = TestMemory::new(ITEMS * 8);
    let pair = factory.pair(memory.clone()).await;
    assert!(pair.engine.read(&pair.peer, Vec::new(), patient()).await.is_empty());
    assert!(pair.engine.write(&pair.peer, Vec::new(), patient()).await.is_empty());
    let writes = (0..ITEMS).map(|i| write_item(&memory, 1, i as u64 * 8, vec![pattern(i as u64, 8).into()])).collect();
    let results = pair.engine.write(&pair.peer, writes, patient()).await;
    assert!(results.len() == ITEMS && results.iter().all(Result::is_ok));
    let (buffer, parts) = Buffer::lend(vec![0; ITEMS * 8], &[8; ITEMS]).unwrap();
    let reads = parts.into_iter().enumerate().map(|(i, part)| read_item(&memory, 1, i as u64 * 8, vec![part]));
    let results = pair.engine.read(&pair.peer, reads.collect(), patient()).await;
    assert!(results.len() == ITEMS && results.iter().all(Result::is_ok));
    assert!(taken(buffer).chunks(8).enumerate().all(|(i, bytes)| bytes == pattern(i as u64, 8)));
}

/// Items whose lengths do not fit are refused; a fenced put ends clean.
pub async fn bad_items_are_refused_before_they_travel(factory: &impl Factory) {
    let memory = TestMemory::new(4096);
    let pair = factory.pair(memory.clone()).await;
    let (short, into) = skewed(10, 0);
    let mut item = read_item(&memory, 1, 0, vec![into]);
    item.access.length = 11;
    let (other, into) = skewed(10, 0);
    let mut beyond = read_item(&memory, 1, 0, vec![into]);
    beyond.access.offset = u64::MAX - 3;
    let (good, into) = skewed(10, 0);
    let items = vec![item, beyond, read_item(&memory, 1, 0, vec![into])];
    let results = pair.engine.read(&pair.peer, items, patient()).await;
    let codes: Vec<_> = results.iter().map(|result| result.as_ref().err().map(|error| error.code())).collect();
    assert_eq!(codes, [Some(ErrorCode::InvalidParams), Some(ErrorCode::InvalidParams), None]);
    drop((taken(short), taken(other), taken(good)));
    let mut item = write_item(&memory, 1, 0, vec![LocalRef::from_static(b"0123456789")]);
    item.access.length = 9;
    memory.fence_at(2, 0);
    let fenced = write_item(&memory, 2, 0, vec![LocalRef::from_static(b"0123456789")]);
    let results = pair.engine.write(&pair.peer, vec![item, fenced], patient()).await;
    let ends: Vec<_> = results.into_iter().map(|r| r.map_err(|e| (e.error.code(), e.aborted)).unwrap_err()).collect();
    assert_eq!(ends, [(ErrorCode::InvalidParams, None), (ErrorCode::Fenced, Some(ABORTED))]);
    assert_eq!(memory.tickets(), (1, 1, 0));
}
