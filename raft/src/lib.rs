//! Replicated log over openraft: RocksDB log store, gRPC network, leadership, snapshots.
