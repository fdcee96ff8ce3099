//! Tests of the directory as a whole.

mod bad_ops;
mod copies;
mod decode;
mod eviction;
mod extra;
mod generator;
mod groups;
mod listing;
mod measure;
mod model;
mod pins;
mod placement;
mod put;
mod random;
mod replay;
mod replicated;
mod sessions;
mod tasks;
mod tenants;
mod upsert;
mod world;
