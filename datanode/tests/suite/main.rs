//! A datanode against masters made for the test and the real tcp engine.

mod fake_master;
mod membership;
mod payload;
mod port;
mod stalled_sender;
mod succession;
mod world;
