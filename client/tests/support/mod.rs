//! A cluster in the test process: masters that answer the real protocol over real sockets, and a payload engine whose
//! nodes can be made to misbehave.
#![allow(dead_code, unreachable_pub)]

pub mod directory;
pub mod engine;
pub mod master;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tidepool_client::{Client, ClientOptions, EngineFactory, PutItem};
use tidepool_proto::Address;

use directory::Directory;
use engine::{FakeEngine, FakeNodes};
use master::FakeMaster;

pub struct FakeCluster {
    pub directory: Arc<Directory>,
    pub nodes: Arc<FakeNodes>,
    pub masters: Vec<FakeMaster>,
}

impl FakeCluster {
    /// Masters, of which number 0 leads in term 1, and data nodes 1, 2, ...
    pub fn start(masters: usize, nodes: usize) -> FakeCluster {
        let nodes = Arc::new(FakeNodes::new(nodes));
        let directory = Arc::new(Directory::new(nodes.addresses()));
        let masters = (0..masters).map(|i| FakeMaster::start(i, directory.clone())).collect();
        FakeCluster { directory, nodes, masters }
    }

    pub fn addresses(&self) -> Vec<Address> {
        self.masters.iter().map(|m| m.address.clone()).collect()
    }

    pub fn options(&self) -> ClientOptions {
        let nodes = self.nodes.clone();
        ClientOptions {
            deadline: Duration::from_secs(10),
            connect_deadline: Duration::from_secs(10),
            engine: EngineFactory::new(move |_| Arc::new(FakeEngine { nodes: nodes.clone() })),
            ..ClientOptions::new(self.addresses())
        }
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.options()).await.unwrap()
    }
}

pub fn payload(seed: u64, length: usize) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let byte = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(byte).collect()
}

pub fn item(key: &str, value: &Bytes) -> PutItem {
    PutItem::new(Bytes::copy_from_slice(key.as_bytes()), value.clone())
}

/// Waits for a condition; the test fails when it does not come true.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come true");
}
