//! Tests of the directory as a whole.

mod bad_ops;
mod copies;
mod decode;
mod eviction;
mod generator;
mod groups;
mod listing;
mod measure;
mod model;
mod pins;
mod placement;
mod put;
mod random;
pub(super) mod replay;
mod replicated;
mod sessions;
mod tasks;
mod tenants;
mod upsert;
pub(super) mod world;
