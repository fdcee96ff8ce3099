//! What most tests start from: a quorum, a registered datanode, and a client that signs its own grants.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidepool_datanode::{Datanode, DatanodeOptions, MasterTiming, Prefault};
use tidepool_proto::capability::{Capability, Secret, Verb};
use tidepool_proto::object::{self, build_prefix, extent_bytes, key_hash, stored_bytes};
use tidepool_proto::{Address, Error, History, Incarnation, LogTime, NodeId, ObjectId, ReplicaId, SegmentId};
use tidepool_transport::tcp::{DataIdentity, TcpEngine, TcpOptions};
use tidepool_transport::{Buffer, Engine, ReadAccess, ReadItem, WriteAccess, WriteError, WriteItem, WriteReply};

use crate::fake_master::{FakeMaster, Quorum};

pub const SEGMENT_BYTES: u64 = 64 << 20;

pub fn options(dir: &std::path::Path, masters: Vec<Address>) -> DatanodeOptions {
    DatanodeOptions {
        prefault: Prefault::Lazy,
        timing: MasterTiming { dial_timeout: Duration::from_millis(300), ..MasterTiming::default() },
        ..DatanodeOptions::new(dir, "127.0.0.1:0".parse().unwrap(), masters, vec![SEGMENT_BYTES])
    }
}

pub struct World {
    pub quorum: Quorum,
    pub masters: Vec<FakeMaster>,
    pub datanode: Datanode,
    pub engine: TcpEngine,
    pub dir: tempfile::TempDir,
    next: AtomicU64,
}

/// One placed object: what a test needs to put and get it.
#[derive(Clone, Copy)]
pub struct Place {
    pub capability: Capability,
    pub secret: [u8; 32],
    pub history: History,
}

impl World {
    pub async fn start(masters: usize) -> World {
        let quorum = Quorum::new();
        let mut running = Vec::new();
        for index in 0..masters {
            running.push(quorum.start(index).await);
        }
        let dir = tempfile::tempdir().unwrap();
        let addresses = running.iter().map(|m| m.address.clone()).collect();
        let datanode = Datanode::start(options(dir.path(), addresses)).await.unwrap();
        let identity = DataIdentity::default();
        let world = World {
            quorum,
            masters: running,
            datanode,
            engine: TcpEngine::new(TcpOptions::new(identity)),
            dir,
            next: AtomicU64::new(1),
        };
        world.serving().await;
        world
    }

    /// Waits until the datanode beats, and lets the client know whom it talks to.
    pub async fn serving(&self) -> u64 {
        let incarnation = self
            .quorum
            .until("a beat of the newest incarnation", |state| {
                let newest = state.nodes.values().map(|node| node.1).max()?;
                state.beats.last().filter(|(_, beat)| beat.incarnation == newest).map(|_| newest)
            })
            .await;
        let state = self.quorum.state.lock();
        self.engine.set_identity(DataIdentity {
            cluster: state.cluster,
            history: state.history,
            ..DataIdentity::default()
        });
        incarnation
    }

    /// A fresh extent for `payload_bytes`; extents never overlap unless a test says so.
    pub fn place(&self, payload_bytes: u64) -> Place {
        let state = self.quorum.state.lock();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (node, incarnation) = state.nodes.values().map(|n| (n.0, n.1)).next().unwrap();
        let segment = state.segments[&(incarnation, "dram-0".to_owned())].0;
        let offset = id * (1 << 20).max(extent_bytes(payload_bytes)) % (SEGMENT_BYTES / 2);
        let capability = Capability {
            verb: Verb::Write,
            object: ObjectId(id * 16),
            replica: ReplicaId(id * 16 + 1),
            segment: SegmentId(segment),
            incarnation: Incarnation(incarnation),
            node: NodeId(node),
            offset: offset / 64 * 64,
            length: stored_bytes(payload_bytes),
            expires: LogTime(state.log_time_ms + 30_000),
        };
        Place { capability, secret: state.secret.0, history: state.history }
    }

    pub fn peer(&self) -> &Address {
        self.datanode.address()
    }

    /// Sends stored bytes under a grant.
    pub async fn write(&self, place: &Place, bytes: Vec<u8>) -> Result<WriteReply, WriteError> {
        let access = place.write_access(bytes.len() as u64);
        let item = WriteItem { access, from: vec![bytes.into()] };
        self.engine.write(self.peer(), vec![item], deadline()).await.pop().unwrap()
    }

    pub async fn put(&self, place: &Place, payload: &[u8]) -> Result<WriteReply, WriteError> {
        self.write(place, place.stored(payload)).await
    }

    /// Reads a range of the extent.
    pub async fn read(&self, place: &Place, offset: u64, length: u64) -> Result<Vec<u8>, Error> {
        let (buffer, part) = Buffer::zeroed(length as usize);
        let access = ReadAccess { offset, length, ..place.read_access() };
        let item = ReadItem { access, into: vec![part] };
        self.engine.read(self.peer(), vec![item], deadline()).await.pop().unwrap()?;
        Ok(buffer.take().unwrap())
    }

    /// Reads the whole and verifies it as a client does.
    pub async fn get(&self, place: &Place, payload_bytes: u64) -> Result<Vec<u8>, Error> {
        let whole = self.read(place, 0, place.capability.length).await?;
        let (prefix, payload) = whole.split_at(object::prefix_bytes(payload_bytes) as usize);
        let header = object::verify_prefix(prefix)?;
        header.expect(place.history, place.capability.object, &key_hash("", b"k"), payload_bytes)?;
        object::verify_blocks(prefix, 0, payload)?;
        Ok(payload.to_vec())
    }

    /// Sum of a metric over its labels that contain `label`.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let families = self.datanode.metrics().gather();
        let family = families.iter().find(|f| f.name() == name).unwrap_or_else(|| panic!("no metric {name}"));
        let matching =
            family.get_metric().iter().filter(|m| label.is_empty() || m.get_label().iter().any(|l| l.value() == label));
        matching.map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
    }
}

pub fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

pub fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed * 77) >> 7) as u8).collect()
}

impl Place {
    pub fn stored(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = build_prefix(self.history, self.capability.object, key_hash("", b"k"), &[payload]);
        bytes.extend_from_slice(payload);
        bytes
    }

    fn replica(&self, verb: Verb) -> tidepool_proto::v1::Replica {
        Capability { verb, ..self.capability }.to_replica(&Secret(self.secret), self.history)
    }

    pub fn write_access(&self, length: u64) -> WriteAccess {
        WriteAccess { object_id: self.capability.object.0, replica: self.replica(Verb::Write), length }
    }

    pub fn read_access(&self) -> ReadAccess {
        let length = self.capability.length;
        ReadAccess { object_id: self.capability.object.0, replica: self.replica(Verb::Read), offset: 0, length }
    }

    /// The same with other facts, signed as a master would.
    pub fn with(&self, change: impl FnOnce(&mut Capability)) -> Place {
        let mut place = *self;
        change(&mut place.capability);
        place
    }

    pub fn proof(&self, verb: Verb) -> [u8; 16] {
        Capability { verb, ..self.capability }.sign(&Secret(self.secret), self.history)
    }
}
