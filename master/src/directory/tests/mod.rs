//! Tests of the directory as a whole.

mod audit;
mod bad_ops;
mod copies;
mod corpus;
mod decode;
mod eviction;
mod extra;
mod generator;
mod groups;
mod history;
mod level;
mod limits;
mod listing;
mod measure;
pub(crate) mod model;
mod pins;
mod placement;
mod put;
mod random;
mod readers;
pub(crate) mod replay;
mod replicated;
mod sessions;
mod tasks;
mod tenants;
mod upsert;
pub(crate) mod world;
