//! The connection for small transfers, which lives in the runtime of its callers.
#![allow(unsafe_code)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::{Served, options_with_near};
use tidepool_proto::ErrorCode;
use tidepool_transport::Engine;
use tidepool_transport::conformance::{TestMemory, patient, read_item, skewed, taken};
use tidepool_transport::tcp::TcpEngine;
use tokio::runtime::{Builder, Runtime};

/// A server in a runtime of its own, and an engine.
struct Pair {
    memory: Arc<TestMemory>,
    served: Served,
    engine: TcpEngine,
    _serving: Runtime,
}

impl Pair {
    fn start() -> Pair {
        let serving = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let memory = TestMemory::new(2 << 20);
        let served = serving.block_on(Served::start(memory.clone()));
        Pair { memory, served, engine: TcpEngine::new(options_with_near()), _serving: serving }
    }

    async fn read(&self, length: usize) -> Result<(), ErrorCode> {
        let (buffer, part) = skewed(length, 0);
        let items = vec![read_item(&self.memory, 1, 0, vec![part])];
        let result = self.engine.read(&self.served.address, items, patient()).await.remove(0);
        drop(taken(buffer));
        result.map_err(|error| error.code())
    }

    fn open(&self) -> u64 {
        self.engine.stats().connections_open
    }

    /// Reads a little until there are so many connections.
    async fn read_until_open(&self, wanted: u64) {
        let limit = Instant::now() + Duration::from_secs(30);
        while self.open() != wanted {
            assert!(Instant::now() < limit, "{} connections are open where {wanted} should be", self.open());
            self.read(100).await.unwrap();
        }
        self.read(100).await.unwrap();
    }
}

fn callers() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Tried without an end when the tasks of a connection are gone: the first one counts as open for ever.
#[test]
fn it_ends_with_its_runtime_and_costs_the_peer_nothing() {
    let pair = Pair::start();
    for round in 0..3 {
        let runtime = callers();
        runtime.block_on(pair.read_until_open(2));
        drop(runtime);
        assert_eq!(pair.open(), 1, "round {round}: what is left is the stripe");
    }
    callers().block_on(pair.read(100)).unwrap();
    assert_eq!(pair.engine.stats().connections_failed, 0);
}

/// Fails by the deadline when a call uses what only another runtime drives, which nobody does here.
#[test]
fn nobody_waits_for_a_runtime_that_is_not_driven() {
    let pair = Pair::start();
    let (first, second) = (callers(), callers());
    first.block_on(pair.read_until_open(2));
    second.block_on(async {
        for _ in 0..100 {
            pair.read(100).await.unwrap();
        }
        pair.read(2 << 20).await.unwrap();
    });
    first.block_on(pair.read(100)).unwrap();
}

/// Fails when one that ended stays in the place of the next.
#[test]
fn after_its_end_there_is_another_one() {
    let pair = Pair::start();
    let runtime = callers();
    runtime.block_on(async {
        for _ in 0..3 {
            pair.read_until_open(2).await;
            pair.served.server.close_all();
            let limit = Instant::now() + Duration::from_secs(30);
            // The stripe may be dialled again after its pause.
            while pair.open() > 0 || pair.read(100).await.is_err() {
                assert!(Instant::now() < limit, "{} connections are open", pair.open());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        pair.read_until_open(2).await;
    });
}
