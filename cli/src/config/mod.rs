//! Configuration: one table of settings (`setting`), values as people write them (`value`), and the layers that
//! give each its value: defaults, TOML file, environment, flags (`layers`).

pub mod flags;
pub mod layers;
pub mod setting;
pub mod value;

pub use layers::{Config, Layers, Origin};
pub use setting::{Section, Setting};
