//! Replicated log over openraft: RocksDB log store, gRPC network, leadership, snapshots.

pub mod codec;
pub mod log;
pub mod types;
