//! The deterministic simulation: masters (the real consensus and service), datanodes (the real memory, grants and
//! fences) and clients in one process and one thread, on virtual time. One seed decides everything: two runs of a seed do the
//! same, which their trace hashes say.
//!
//! A run (`run`) has phases: faults (`nemesis`) under load, healing, a deadline for everything to work again, then the judgement:
//! `checker` looks at what each client saw, `audit` at what is left. `provoke` makes it likely that a guard which is left out is missed.
//!
//! Start with `run`; `net` says what the wires do, `observe` what is known of the replicated state. What is absent: sockets,
//! threads and real time. Who looks for those finds them in the process tests of `chaos-tests`.

pub mod audit;
pub mod client;
pub mod datanode;
pub mod history;
pub mod keys;
pub mod nemesis;
pub mod net;
pub mod observe;
pub mod params;
pub mod provoke;
pub mod quorum;
pub mod run;
pub mod trace;

pub use tidepool_checker as checker;
