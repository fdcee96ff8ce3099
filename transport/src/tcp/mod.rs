//! The tcp engine: long-lived striped connections, vectored I/O straight between socket and final memory.
//!
//! ```text
//! TcpEngine -> Peer (one an address) -> Connection (one a stripe, and a near one) ... socket ... TcpServer -> Memory
//! ```
//! A batch of few bytes travels over the near connection, which lives in its caller's runtime ([`peer`]); any other over the stripes.
//! A batch is split over the stripes into request frames ([`wire`]). Frames are pipelined: a connection's writer task
//! sends them one behind the other, its reader task takes the answers, which come in the same order, and scatters
//! payload into the callers' slices. Payload is never staged on either side.
//!
//! Memory is lent to an exchange ([`exchange`]) and every system call that touches it runs under that exchange's
//! lock: taking the loan back at a deadline waits for at most one non-blocking call, and what still arrives is thrown
//! away. That is how R4 holds without dropping the connection.

mod connection;
mod dialer;
mod engine;
mod exchange;
mod frames;
mod handshake;
mod io_threads;
mod options;
mod peer;
mod server;
mod server_read;
mod server_write;
mod socket;
pub mod wire;

pub use engine::TcpEngine;
pub use options::{DataIdentity, TcpOptions, TcpServerOptions};
pub use server::TcpServer;

/// First bytes of a data-plane connection, in both directions; the datanode peeks them on its one port.
pub const MAGIC: [u8; 4] = *b"TPDP";
