//! The tcp engine over links that delay, stop and break, and what its connections cost.
#![allow(unsafe_code)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::proxy::Proxy;
use support::{Served, identity, options};
use tidepool_proto::{Address, ErrorCode};
use tidepool_transport::conformance::{TestMemory, eventually, patient, pattern, read_item, skewed, taken, write_item};
use tidepool_transport::tcp::{TcpEngine, TcpOptions, TcpServerOptions};
use tidepool_transport::{Buffer, Engine, LocalMut, Owner};
use tokio::net::TcpListener;

async fn read_some(engine: &TcpEngine, peer: &Address, memory: &TestMemory, length: usize) -> Result<(), ErrorCode> {
    let (buffer, part) = skewed(length, 0);
    let result = engine.read(peer, vec![read_item(memory, 1, 0, vec![part])], patient()).await.remove(0);
    drop(taken(buffer));
    result.map_err(|error| error.code())
}

fn sockets(port: u16, state: &str) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let ours = |line: &&str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, remote) = (fields.next().unwrap(), fields.next().unwrap());
        let port = format!(":{port:04X}");
        (local.ends_with(&port) || remote.ends_with(&port)) && fields.next() == Some(state)
    };
    table.lines().skip(1).filter(ours).count()
}

/// User report 77: 10 000 gets, ten at a time. Both ends are in this table, so two connections are four entries. Fails
/// if calls dial for themselves.
#[tokio::test(flavor = "multi_thread")]
async fn case_077_gets_share_a_few_long_lived_connections() {
    let memory = TestMemory::new(2 << 20);
    let served = Served::start(memory.clone()).await;
    let port = served.socket.port();
    // The system may have given out a port again whose connections of before are still remembered.
    let remembered = sockets(port, "06");
    let engine = Arc::new(TcpEngine::new(options()));
    read_some(&engine, &served.address, &memory, 2 << 20).await.unwrap();
    let getters = (0..10).map(|_| {
        let (engine, memory, address) = (engine.clone(), memory.clone(), served.address.clone());
        tokio::spawn(async move {
            for i in 0..1000 {
                let length = if i % 100 == 0 { 2 << 20 } else { 100 };
                read_some(&engine, &address, &memory, length).await.unwrap();
            }
        })
    });
    for getter in getters.collect::<Vec<_>>() {
        getter.await.unwrap();
    }
    let (established, time_wait) = (sockets(port, "01"), sockets(port, "06"));
    assert!(established <= 4, "{established} sockets established");
    assert!(time_wait <= remembered, "{time_wait} sockets in TIME_WAIT, {remembered} of before");
    assert_eq!(engine.stats().connections_opened, 2);
}

/// A dropped engine leaves nothing behind: its connections end, and its threads.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_engine_ends_its_connections_and_threads() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("tp-data")).count()
    };
    let memory = TestMemory::new(2 << 20);
    let served = Served::start(memory.clone()).await;
    let engine = TcpEngine::new(options());
    read_some(&engine, &served.address, &memory, 2 << 20).await.unwrap();
    assert_eq!(served.server.connections(), 2);
    let before = threads();
    assert!(before > 0);
    drop(engine);
    eventually("the connections to end", || served.server.connections() == 0).await;
    eventually("the threads to end", || threads() < before).await;
}

/// User report 79: throughput must not fall with the round trip. Shown by structure: while not one answer gets
/// through, all requests reach the server. Fails if a connection waits for an answer before its next request.
#[tokio::test(flavor = "multi_thread")]
async fn case_079_requests_do_not_wait_for_answers() {
    const BATCHES: usize = 64;
    const LENGTH: usize = 1000;
    let memory = TestMemory::new(2 * BATCHES * LENGTH);
    (0..BATCHES).for_each(|i| memory.fill((i * LENGTH) as u64, &pattern(i as u64, LENGTH)));
    let served = Served::start(memory.clone()).await;
    let proxy = Proxy::start(served.socket, Duration::from_millis(5)).await;
    let engine = Arc::new(TcpEngine::new(TcpOptions { stripes: 1, ..options() }));
    read_some(&engine, &proxy.address, &memory, 10).await.unwrap();
    let before = served.server.stats();
    proxy.pause_after(0);
    let calls = (0..2 * BATCHES).map(|i| {
        let (engine, memory, peer) = (engine.clone(), memory.clone(), proxy.address.clone());
        tokio::spawn(async move {
            if i < BATCHES {
                let (buffer, part) = skewed(LENGTH, 0);
                let items = vec![read_item(&memory, 1, (i * LENGTH) as u64, vec![part])];
                engine.read(&peer, items, patient()).await.remove(0).unwrap();
                assert!(taken(buffer) == pattern(i as u64, LENGTH));
            } else {
                let items = vec![write_item(&memory, 1, (i * LENGTH) as u64, vec![pattern(i as u64, LENGTH).into()])];
                engine.write(&peer, items, patient()).await.remove(0).unwrap();
            }
        })
    });
    let calls: Vec<_> = calls.collect();
    eventually("all requests to be served while no answer arrives", || {
        let now = served.server.stats();
        (now.reads - before.reads, now.writes - before.writes) == (BATCHES as u64, BATCHES as u64)
    })
    .await;
    assert!(calls.iter().all(|call| !call.is_finished()));
    proxy.pause_after(u64::MAX);
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(proxy.accepted(), 1);
    for i in BATCHES..2 * BATCHES {
        assert!(memory.copy((i * LENGTH) as u64, LENGTH as u64) == pattern(i as u64, LENGTH));
    }
}

/// A link with a delay and large items on all stripes: right bytes.
#[tokio::test(flavor = "multi_thread")]
async fn large_items_over_a_slow_link_are_byte_exact() {
    const LENGTH: usize = 1 << 20;
    let memory = TestMemory::new(16 * LENGTH);
    let served = Served::start(memory.clone()).await;
    let proxy = Proxy::start(served.socket, Duration::from_millis(3)).await;
    let engine = TcpEngine::new(options());
    let items = (0..16).map(|i| write_item(&memory, 1, i * LENGTH as u64, vec![pattern(i, LENGTH).into()])).collect();
    for result in engine.write(&proxy.address, items, patient()).await {
        result.unwrap();
    }
    let (buffer, parts) = Buffer::lend(vec![0; 16 * LENGTH], &[LENGTH; 16]).unwrap();
    let item = |(i, part)| read_item(&memory, 1, (i * LENGTH) as u64, vec![part]);
    let items = parts.into_iter().enumerate().map(item).collect();
    for result in engine.read(&proxy.address, items, patient()).await {
        result.unwrap();
    }
    assert!(taken(buffer).chunks(LENGTH).enumerate().all(|(i, bytes)| bytes == pattern(i as u64, LENGTH)));
    assert_eq!(proxy.accepted(), 2);
}

/// R4: the deadline passes in the middle of an item's payload. What was complete is delivered, the rest fails, not a
/// byte comes later, and the connection goes on. Fails if `settle` leaves the ranges in place.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_in_the_middle_of_payload_frees_the_memory_and_keeps_the_connection() {
    const LENGTH: usize = 100_000;
    let memory = TestMemory::new(3 * LENGTH);
    memory.fill(0, &vec![5; 3 * LENGTH]);
    let served = Served::start(memory.clone()).await;
    let proxy = Proxy::start(served.socket, Duration::ZERO).await;
    let patience = Duration::from_secs(60);
    let engine = TcpEngine::new(TcpOptions { stripes: 1, stall_timeout: patience, ..options() });
    read_some(&engine, &proxy.address, &memory, 10).await.unwrap();
    let mut backing = vec![0u8; 3 * LENGTH];
    let base = backing.as_mut_ptr();
    let part = |i: usize| {
        // SAFETY: disjoint parts of `backing`, which outlives the call and is not touched before it returned.
        unsafe { LocalMut::from_raw(base.wrapping_add(i * LENGTH), LENGTH, Owner::process()) }
    };
    proxy.pause_after(LENGTH as u64 + 50_000);
    let items = (0..3).map(|i| read_item(&memory, 1, (i * LENGTH) as u64, vec![part(i)])).collect();
    let results = engine.read(&proxy.address, items, Instant::now() + Duration::from_millis(500)).await;
    let codes: Vec<_> = results.into_iter().map(|result| result.err().map(|error| error.code())).collect();
    let late = Some(ErrorCode::DeadlineExceeded);
    assert_eq!(codes, [None, late, late]);
    assert!(backing[..LENGTH].iter().all(|&b| b == 5));
    assert!(backing[2 * LENGTH..].iter().all(|&b| b == 0), "the pause held nothing back");
    backing.fill(9);
    proxy.pause_after(u64::MAX);
    read_some(&engine, &proxy.address, &memory, LENGTH).await.unwrap();
    assert!(backing.iter().all(|&b| b == 9), "payload was written into memory that was given back");
    assert_eq!((proxy.accepted(), engine.stats().bytes_discarded > 0), (1, true));
}

/// A put that is given up half sent is completed with padding, so that what is behind it on the connection survives;
/// one with much left to send costs its connection. Either way the source is free when the call returns.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_given_up_half_sent_frees_its_source() {
    for (length, dials) in [(3 << 20, 1), (32 << 20, 2)] {
        let memory = TestMemory::new(length);
        let small = Some(64 << 10);
        let limits = TcpServerOptions { socket_buffer_bytes: small, ..TcpServerOptions::new(identity(1)) };
        let served = Served::with(limits, memory.clone()).await;
        let patience = Duration::from_secs(60);
        let engine = TcpEngine::new(TcpOptions {
            stripes: 1,
            socket_buffer_bytes: small,
            stall_timeout: patience,
            backoff_min: Duration::from_millis(1),
            ..options()
        });
        read_some(&engine, &served.address, &memory, 10).await.unwrap();
        memory.set_stuck(true);
        let source = bytes::Bytes::from(vec![3u8; length]);
        let items = vec![write_item(&memory, 1, 0, vec![source.clone().into()])];
        let end = engine.write(&served.address, items, Instant::now() + Duration::from_millis(300)).await.remove(0);
        let end = end.unwrap_err();
        assert_eq!((end.error.code(), end.is_clean()), (ErrorCode::DeadlineExceeded, false), "{end}");
        assert!(source.is_unique(), "the engine kept a source after the call returned");
        memory.set_stuck(false);
        let limit = patient();
        while let Err(code) = read_some(&engine, &served.address, &memory, 10).await {
            assert!(dials > 1 && Instant::now() < limit, "the connection was lost: {code:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        eventually("the ticket's end", || memory.tickets().2 == 0).await;
        assert_eq!(engine.stats().connections_opened, dials, "{length} bytes");
    }
}

/// A put that is given up with much to go costs its connection, and nobody else anything: what was sent before it is
/// still answered, what was queued behind it ends with a code that blames neither node nor connection, and the next
/// dial is not held back as after a failure. Seen to fail with TRANSFER_FAIL for what was queued behind while the
/// connection was closed at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_given_up_half_sent_costs_no_other_request_its_node() {
    const LENGTH: usize = 32 << 20;
    let memory = TestMemory::new(LENGTH);
    let small = Some(64 << 10);
    let limits = TcpServerOptions { socket_buffer_bytes: small, ..TcpServerOptions::new(identity(1)) };
    let served = Served::with(limits, memory.clone()).await;
    let minute = Duration::from_secs(60);
    let engine = Arc::new(TcpEngine::new(TcpOptions {
        stripes: 1,
        socket_buffer_bytes: small,
        stall_timeout: minute,
        backoff_min: minute,
        backoff_max: minute,
        ..options()
    }));
    read_some(&engine, &served.address, &memory, 10).await.unwrap();
    memory.set_stuck(true);
    let read = || {
        let (engine, memory, address) = (engine.clone(), memory.clone(), served.address.clone());
        tokio::spawn(async move { read_some(&engine, &address, &memory, 10).await })
    };
    let ahead = read();
    eventually("the first read to be at the server", || memory.waiting() == 1).await;
    let put = tokio::spawn({
        let (engine, address) = (engine.clone(), served.address.clone());
        let items = vec![write_item(&memory, 1, 0, vec![vec![3u8; LENGTH].into()])];
        async move { engine.write(&address, items, Instant::now() + Duration::from_millis(300)).await.remove(0) }
    });
    eventually("a part of the put to be sent", || engine.stats().bytes_out > 0).await;
    let behind = read();
    assert_eq!(put.await.unwrap().unwrap_err().error.code(), ErrorCode::DeadlineExceeded);
    memory.set_stuck(false);
    assert_eq!(behind.await.unwrap(), Err(ErrorCode::ResourceExhausted));
    ahead.await.unwrap().unwrap();
    eventually("the connection's end", || engine.stats().connections_open == 0).await;
    read_some(&engine, &served.address, &memory, 10).await.unwrap();
    assert_eq!(engine.stats().connections_opened, 2);
}

/// A peer that takes one connection and refuses a second is asked for the second as rarely as a dead peer is dialled.
/// Seen to fail with one failed dial a batch while only the first stripe's dials were admitted by a dialer.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_second_stripe_is_not_dialled_by_every_batch() {
    let memory = TestMemory::new(2 << 20);
    let limits = TcpServerOptions { connections_max: 1, ..TcpServerOptions::new(identity(1)) };
    let served = Served::with(limits, memory.clone()).await;
    let engine = TcpEngine::new(options());
    for _ in 0..200 {
        read_some(&engine, &served.address, &memory, 2 << 20).await.unwrap();
    }
    let failed = engine.stats().connections_failed;
    assert!((1..=10).contains(&failed), "{failed} dials for a second stripe");
}

/// A peer that never answers is given up some time after a deadline passed in vain; without that every later call
/// would queue behind it.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_connection_is_given_up() {
    let memory = TestMemory::new(1000);
    let served = Served::start(memory.clone()).await;
    let proxy = Proxy::start(served.socket, Duration::ZERO).await;
    let engine = TcpEngine::new(TcpOptions { stall_timeout: Duration::from_millis(50), ..options() });
    read_some(&engine, &proxy.address, &memory, 10).await.unwrap();
    proxy.pause_after(0);
    let (buffer, part) = skewed(10, 0);
    let deadline = Instant::now() + Duration::from_millis(50);
    let result = engine.read(&proxy.address, vec![read_item(&memory, 1, 0, vec![part])], deadline).await.remove(0);
    assert_eq!(result.unwrap_err().code(), ErrorCode::DeadlineExceeded);
    drop(taken(buffer));
    eventually("the connection to be given up", || engine.stats().connections_open == 0).await;
}

/// User report 86: a peer that accepts and resets, and one that accepts and says nothing. Neither is dialled by every
/// call, and another peer does not notice. Fails without the dialer (one dial a call).
#[tokio::test(flavor = "multi_thread")]
async fn case_086_bad_peers_are_dialled_rarely_and_others_not_disturbed() {
    let memory = TestMemory::new(1000);
    let served = Served::start(memory.clone()).await;
    let engine = Arc::new(TcpEngine::new(TcpOptions { connect_timeout: Duration::from_millis(250), ..options() }));
    read_some(&engine, &served.address, &memory, 100).await.unwrap();
    for resets in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bad: Address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let (count, mut counted) = tokio::sync::watch::channel(0);
        tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                count.send_modify(|n| *n += 1);
                if !resets {
                    kept.push(stream);
                }
            }
        });
        for _ in 0..500 {
            let code = read_some(&engine, &bad, &memory, 100).await.unwrap_err();
            assert_eq!(code, ErrorCode::TransferFailed);
            read_some(&engine, &served.address, &memory, 100).await.unwrap();
        }
        let dials = *counted.borrow_and_update();
        assert!((1..=10).contains(&dials), "{dials} dials (resets: {resets})");
    }
    assert_eq!(engine.stats().connections_open, 1);
}

/// User report 40: values above 2 GiB came back truncated. Needs 5 GiB of memory: `--run-ignored`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 5 GiB of memory"]
async fn case_040_a_value_above_two_gib_is_whole() {
    const LENGTH: usize = (2 << 30) + 1;
    let marks = [0, (1 << 30) - 7, (2 << 30) - 40, LENGTH - 14];
    let memory = TestMemory::new(LENGTH);
    let served = Served::start(memory.clone()).await;
    let engine = TcpEngine::new(options());
    let mut source = vec![0u8; LENGTH];
    for (i, &at) in marks.iter().enumerate() {
        source[at..at + 14].copy_from_slice(&pattern(i as u64, 14));
    }
    let items = vec![write_item(&memory, 1, 0, vec![source.into()])];
    engine.write(&served.address, items, patient()).await.remove(0).unwrap();
    let (buffer, part) = skewed(LENGTH, 0);
    engine.read(&served.address, vec![read_item(&memory, 1, 0, vec![part])], patient()).await.remove(0).unwrap();
    let bytes = taken(buffer);
    for (i, &at) in marks.iter().enumerate() {
        assert_eq!(bytes[at..at + 14], pattern(i as u64, 14), "at {at}");
    }
}
