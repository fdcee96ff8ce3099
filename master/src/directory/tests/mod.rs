//! Tests of the directory as a whole.

mod bad_ops;
mod decode;
mod eviction;
mod listing;
mod measure;
mod model;
mod put;
mod random;
mod replay;
mod replicated;
mod sessions;
mod world;
