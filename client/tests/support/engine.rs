//! Payload nodes in memory, each with a mood.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tidepool_proto::{Address, Error, ErrorCode, object};
use tidepool_transport::{Engine, ReadItem, StatsSnapshot, WriteError, WriteItem, WriteOutcome, WriteReply};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mood {
    Serve,
    /// As before, but probes are refused: the client does not find it well by itself.
    DeafToProbes,
    /// Connections are refused.
    Refuse,
    /// Nothing ever comes back.
    BlackHole,
    /// One bit of each read is flipped.
    Corrupt,
    /// Reads give another object's bytes, well-formed.
    Foreign,
    /// Reads and writes take so long.
    Slow(Duration),
    /// Writes are aborted by a fence.
    Fence,
    /// So many requests are refused with RESOURCE_EXHAUSTED.
    Busy(u32),
    /// Requests wait, counted in `held`, until the mood changes.
    Hold,
}

pub struct FakeNodes {
    nodes: Mutex<HashMap<Address, FakeNode>>,
}

pub struct FakeNode {
    pub mood: Mood,
    /// Replica id -> stored form.
    pub extents: HashMap<u64, Vec<u8>>,
    pub reads: u64,
    pub writes: u64,
    pub held: u64,
}

pub fn address_of(node: u64) -> Address {
    Address::new(&format!("node-{node}"), 50052).unwrap()
}

impl FakeNodes {
    pub fn new(count: usize) -> FakeNodes {
        let node = || FakeNode { mood: Mood::Serve, extents: HashMap::new(), reads: 0, writes: 0, held: 0 };
        FakeNodes { nodes: Mutex::new((1..=count as u64).map(|n| (address_of(n), node())).collect()) }
    }
    pub fn addresses(&self) -> Vec<(u64, Address)> {
        (1..=self.nodes.lock().unwrap().len() as u64).map(|n| (n, address_of(n))).collect()
    }
    pub fn with<R>(&self, node: u64, f: impl FnOnce(&mut FakeNode) -> R) -> R {
        f(self.nodes.lock().unwrap().get_mut(&address_of(node)).unwrap())
    }
    pub fn mood(&self, node: u64, mood: Mood) {
        self.with(node, |n| n.mood = mood);
    }
    fn mood_at(&self, address: &Address) -> Mood {
        self.nodes.lock().unwrap().get(address).map_or(Mood::Refuse, |n| n.mood)
    }
}

pub struct FakeEngine {
    pub nodes: std::sync::Arc<FakeNodes>,
}

impl FakeEngine {
    /// What keeps the node from answering, after it kept it.
    async fn obstacle(&self, peer: &Address, deadline: Instant) -> Option<Error> {
        match self.nodes.mood_at(peer) {
            Mood::Refuse => Some(Error::new(ErrorCode::Unavailable, "connection refused")),
            Mood::BlackHole => {
                tokio::time::sleep_until(deadline.into()).await;
                Some(Error::new(ErrorCode::DeadlineExceeded, "no answer"))
            }
            Mood::Slow(delay) => {
                let until = (Instant::now() + delay).min(deadline);
                tokio::time::sleep_until(until.into()).await;
                (until == deadline).then(|| Error::new(ErrorCode::DeadlineExceeded, "no answer"))
            }
            Mood::Busy(left) => {
                let next = if left > 1 { Mood::Busy(left - 1) } else { Mood::Serve };
                self.nodes.nodes.lock().unwrap().get_mut(peer).unwrap().mood = next;
                Some(Error::new(ErrorCode::ResourceExhausted, "told to be busy"))
            }
            Mood::Hold => {
                self.nodes.nodes.lock().unwrap().get_mut(peer).unwrap().held += 1;
                while self.nodes.mood_at(peer) == Mood::Hold && Instant::now() < deadline {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                (Instant::now() >= deadline).then(|| Error::new(ErrorCode::DeadlineExceeded, "no answer"))
            }
            _ => None,
        }
    }
}

impl Engine for FakeEngine {
    fn read<'a>(
        &'a self,
        peer: &'a Address,
        items: Vec<ReadItem>,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<(), Error>>> {
        Box::pin(async move {
            if let Some(error) = self.obstacle(peer, deadline).await {
                return items.iter().map(|_| Err(error.clone())).collect();
            }
            let mut nodes = self.nodes.nodes.lock().unwrap();
            let node = nodes.get_mut(peer).unwrap();
            let read = |mut item: ReadItem| {
                node.reads += 1;
                let Some(stored) = node.extents.get(&item.access.replica.replica_id) else {
                    let code = match node.mood {
                        Mood::DeafToProbes => ErrorCode::Unavailable,
                        _ => ErrorCode::CapabilityRefused,
                    };
                    return Err(Error::new(code, "no such replica"));
                };
                let mut stored = stored.clone();
                match node.mood {
                    Mood::Corrupt => {
                        let last = stored.len() - 1;
                        stored[last] ^= 1;
                    }
                    Mood::Foreign => {
                        let header = object::Header::decode(&stored).unwrap();
                        let other = vec![0xaa; header.length as usize];
                        let hash = object::key_hash("", b"another");
                        stored = object::build_prefix(header.history, header.object, hash, &[&other]);
                        stored.extend_from_slice(&other);
                    }
                    _ => {}
                }
                if (stored.len() as u64) < item.access.offset + item.access.length {
                    return Err(Error::new(ErrorCode::OutOfBounds, "beyond what is stored"));
                }
                let mut at = item.access.offset as usize;
                for part in &mut item.into {
                    let len = part.len();
                    part.as_mut_slice().copy_from_slice(&stored[at..at + len]);
                    at += len;
                }
                Ok(())
            };
            items.into_iter().map(read).collect()
        })
    }

    fn write<'a>(
        &'a self,
        peer: &'a Address,
        items: Vec<WriteItem>,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<WriteReply, WriteError>>> {
        Box::pin(async move {
            if let Some(error) = self.obstacle(peer, deadline).await {
                return items.iter().map(|_| Err(WriteError::unclean(error.clone()))).collect();
            }
            let mut nodes = self.nodes.nodes.lock().unwrap();
            let node = nodes.get_mut(peer).unwrap();
            let write = |item: WriteItem| {
                node.writes += 1;
                let abort =
                    |error: Error| WriteReply { outcome: WriteOutcome::Aborted, error: Some(error), proof: [2; 16] };
                if node.mood == Mood::Fence {
                    return Ok(abort(Error::new(ErrorCode::Fenced, "fenced")));
                }
                let mut stored = Vec::new();
                for part in &item.from {
                    stored.extend_from_slice(&bytes_of(part));
                }
                assert_eq!(stored.len() as u64, item.access.length);
                let checked = object::Header::decode(&stored).and_then(|header| {
                    let at = object::prefix_bytes(header.length) as usize;
                    object::verify_prefix(&stored[..at])?;
                    object::verify_parts(&stored[..at], &[&stored[at..]])
                });
                if let Err(error) = checked {
                    return Ok(abort(error));
                }
                node.extents.insert(item.access.replica.replica_id, stored);
                Ok(WriteReply { outcome: WriteOutcome::Stored, error: None, proof: [1; 16] })
            };
            items.into_iter().map(write).collect()
        })
    }

    fn name(&self) -> &'static str {
        "fake"
    }

    fn stats(&self) -> StatsSnapshot {
        StatsSnapshot::default()
    }
}

#[allow(unsafe_code)]
fn bytes_of(part: &tidepool_transport::LocalRef) -> Vec<u8> {
    // SAFETY: a LocalRef names mapped, readable bytes while it lives.
    unsafe { std::slice::from_raw_parts(part.as_ptr(), part.len()) }.to_vec()
}
