//! Members of production in one process: tokio, gRPC over loopback, RocksDB in temporary directories.
#![cfg(feature = "rocksdb")]

mod figures;
mod ledger;
mod life;
mod members;
mod membership;
mod restore;
mod strangers;
