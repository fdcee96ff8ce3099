//! Settings and named limits of the tcp engine, and the identity that both ends compare.

use std::time::Duration;

use tidepool_proto::{ClusterId, History, Incarnation, NodeId, PROTOCOL_VERSION, v1};

/// Items one request frame may carry; larger batches travel as several frames.
pub const FRAME_ITEMS_MAX: usize = 1024;
/// Payload after which a frame takes no further item. A frame of one item may be as large as the item.
pub const FRAME_BYTES_TARGET: u64 = 8 << 20;
/// Largest item: an object of the largest size in its stored form.
pub const ITEM_BYTES_MAX: u64 =
    tidepool_proto::object::OBJECT_BYTES_MAX + (tidepool_proto::object::OBJECT_BYTES_MAX >> 12);
/// Most bytes one system call moves into an extent between `enter` and `leave` (W5).
pub const CHUNK_BYTES_MAX: usize = 256 << 10;
/// Most bytes one system call moves elsewhere; bounds how long a call keeps an exchange locked.
pub const CALL_BYTES_MAX: usize = 1 << 20;
/// A cancelled put whose frame has at most this much to go is padded; beyond it the connection is left.
pub const PADDING_BYTES_MAX: u64 = 4 << 20;

/// Who one end of a data connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DataIdentity {
    /// Cluster.
    pub cluster: ClusterId,
    /// Life of the directory.
    pub history: History,
    /// Datanode; 0 for a client.
    pub node: NodeId,
    /// Life of the datanode process; 0 for a client.
    pub incarnation: Incarnation,
}

impl DataIdentity {
    pub(crate) fn to_wire(self) -> v1::Identity {
        v1::Identity {
            cluster_uuid: bytes::Bytes::copy_from_slice(&self.cluster.0),
            history: self.history.0,
            node_id: self.node.0,
            protocol_version: PROTOCOL_VERSION,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            ancestors: Vec::new(),
        }
    }
}

/// Settings of the client side.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// Who dials; the node is 0.
    pub identity: DataIdentity,
    /// Connections to one peer.
    pub stripes: usize,
    /// Threads that drive the connections.
    pub io_threads: usize,
    /// Bytes from which a batch is spread over the stripes.
    pub stripe_bytes_min: u64,
    /// Batches of at most so many bytes travel over a connection that lives in their caller's runtime, where nothing else is under
    /// way on it; 0: there is no such connection.
    pub near_bytes_max: u64,
    /// Longest dial, handshake included.
    pub connect_timeout: Duration,
    /// Frames in flight on one connection; further ones wait inside their deadline.
    pub in_flight_frames_max: usize,
    /// Peers remembered; beyond it those without a connection are forgotten.
    pub peers_max: usize,
    /// How long an answer may be overdue with nothing arriving before the connection is given up.
    pub stall_timeout: Duration,
    /// How long unacknowledged bytes may stay in flight (TCP_USER_TIMEOUT).
    pub unacknowledged_timeout: Duration,
    /// Idle time before keepalive probes start.
    pub keepalive_idle: Duration,
    /// First pause after a failed dial; doubles up to `backoff_max`, with jitter.
    pub backoff_min: Duration,
    /// Longest pause between dials.
    pub backoff_max: Duration,
    /// SO_SNDBUF and SO_RCVBUF; None leaves the kernel's autotuning on, which is better on every path we know.
    pub socket_buffer_bytes: Option<usize>,
}

impl TcpOptions {
    /// Defaults for a client of this cluster.
    pub fn new(identity: DataIdentity) -> TcpOptions {
        TcpOptions {
            identity,
            stripes: 2,
            io_threads: super::io_threads::default_count(),
            stripe_bytes_min: 1 << 20,
            near_bytes_max: 256 << 10,
            connect_timeout: Duration::from_millis(250),
            in_flight_frames_max: 128,
            peers_max: 4096,
            stall_timeout: Duration::from_secs(2),
            unacknowledged_timeout: Duration::from_secs(10),
            keepalive_idle: Duration::from_secs(10),
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            socket_buffer_bytes: None,
        }
    }
}

/// Settings of the server side.
#[derive(Clone, Debug)]
pub struct TcpServerOptions {
    /// Who serves. Zero cluster or history: nobody is let in yet.
    pub identity: DataIdentity,
    /// Threads that drive the connections.
    pub io_threads: usize,
    /// Connections served at once; further ones are refused in the handshake.
    pub connections_max: usize,
    /// Longest handshake.
    pub handshake_timeout: Duration,
    /// How long a frame may make no progress, in either direction, before the connection is dropped.
    pub stall_timeout: Duration,
    /// As in [`TcpOptions`].
    pub unacknowledged_timeout: Duration,
    /// As in [`TcpOptions`].
    pub keepalive_idle: Duration,
    /// As in [`TcpOptions`].
    pub socket_buffer_bytes: Option<usize>,
}

impl TcpServerOptions {
    /// Defaults for a datanode.
    pub fn new(identity: DataIdentity) -> TcpServerOptions {
        TcpServerOptions {
            identity,
            io_threads: super::io_threads::default_count(),
            connections_max: 4096,
            handshake_timeout: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(10),
            unacknowledged_timeout: Duration::from_secs(10),
            keepalive_idle: Duration::from_secs(10),
            socket_buffer_bytes: None,
        }
    }
}
