//! A real store as the cache: one master and one datanode whose memory holds so many blocks, and a client. A block that
//! can be read was there.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use tempfile::TempDir;
use tidepool_chaos_tests::cluster::{Cluster, ClusterOptions};
use tidepool_client::{Client, ClientOptions, DataType, PutItem, PutOptions};
use tidepool_proto::object::extent_bytes;
use tokio::runtime::Handle;

use super::replay::Cache;

/// Time one request's call may take.
const CALL_WITHIN: Duration = Duration::from_secs(30);
/// Segments are whole pages.
const PAGE_BYTES: u64 = 4096;

/// A running pool that serves a trace.
pub struct StoreCache {
    runtime: Handle,
    client: Client,
    value: Bytes,
    failed: u64,
    // After the client: it still talks to them when it goes.
    _cluster: Cluster,
    _directory: TempDir,
}

impl StoreCache {
    /// Starts a pool for `capacity` blocks of so many bytes.
    pub async fn start(binary: &Path, policy: &str, capacity: u64, block_bytes: u64) -> anyhow::Result<StoreCache> {
        let directory = tempfile::tempdir()?;
        let mut options = ClusterOptions::new(binary, &directory.path().join("pool"));
        (options.masters, options.datanodes) = (1, 1);
        options.segment_bytes = (capacity * extent_bytes(block_bytes)).next_multiple_of(PAGE_BYTES);
        options.master_arguments = vec!["--eviction-policy".to_owned(), policy.to_owned()];
        let cluster = Cluster::start(options).await?;
        let client =
            Client::connect(ClientOptions::new(ClientOptions::parse_masters(&cluster.masters_text())?)).await?;
        let value = Bytes::from(vec![0x5a; usize::try_from(block_bytes)?]);
        Ok(StoreCache {
            runtime: Handle::current(),
            client,
            value,
            failed: 0,
            _cluster: cluster,
            _directory: directory,
        })
    }

    /// Puts that did not succeed.
    pub fn failed(&self) -> u64 {
        self.failed
    }

    async fn ask(&mut self, blocks: &[u64]) -> Vec<bool> {
        let keys: Vec<String> = blocks.iter().map(|block| format!("block/{block:016x}")).collect();
        let got = self.client.get_many(&keys, Some(CALL_WITHIN)).await;
        let was_there: Vec<bool> = got.iter().map(Result::is_ok).collect();
        let missing = keys.into_iter().zip(&was_there).filter(|(_, was_there)| !**was_there);
        let items: Vec<PutItem> = missing.map(|(key, _)| PutItem::new(key, self.value.clone())).collect();
        let options = PutOptions {
            deadline: Some(CALL_WITHIN),
            data_type: DataType::Kvcache,
            independent: true,
            ..PutOptions::default()
        };
        if !items.is_empty() {
            let put = self.client.put_many(items, options).await;
            self.failed += put.iter().filter(|result| result.is_err()).count() as u64;
        }
        was_there
    }
}

impl Cache for StoreCache {
    fn serve(&mut self, blocks: &[u64]) -> Vec<bool> {
        let runtime = self.runtime.clone();
        tokio::task::block_in_place(|| runtime.block_on(self.ask(blocks)))
    }
}
