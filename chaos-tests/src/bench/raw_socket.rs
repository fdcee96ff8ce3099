//! The ceiling: what plain blocking sockets between two processes do with batches of the same shape. One stream, vectored
//! writes straight from memory, reads straight into memory, one request and one answer a batch, no checks of any kind;
//! or, to show what verification costs, with the checksums that Tidepool computes: both ends of a put, the near end of a
//! get, each block while it is in the processor's cache.

use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tidepool_proto::object::{BLOCK_BYTES, checksum};

use crate::ports;
use crate::process::{Input, Launch, Lifetime, Process};
use crate::worker::WorkerSpec;

/// Memory each side cycles through, so that neither works out of the processor's cache alone.
pub const MEMORY_BYTES: usize = 256 << 20;
/// Slices one vectored write may carry (IOV_MAX).
const SLICES_MAX: usize = 1024;
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
const REQUEST_BYTES: usize = 24;
const GET: u8 = 1;
const PUT: u8 = 2;

/// The far end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RawServerSpec {
    /// Port of 127.0.0.1 to listen on.
    pub port: u16,
}

/// Whether blocks are checksummed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checks {
    /// Bytes only.
    None,
    /// As Tidepool does.
    Blocks,
}

struct Request {
    verb: u8,
    checks: Checks,
    count: usize,
    bytes: usize,
}

impl Request {
    fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[0] = self.verb;
        out[1] = u8::from(self.checks == Checks::Blocks);
        out[8..16].copy_from_slice(&(self.count as u64).to_le_bytes());
        out[16..24].copy_from_slice(&(self.bytes as u64).to_le_bytes());
        out
    }
    fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Request> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
        let checks = if bytes[1] == 0 { Checks::None } else { Checks::Blocks };
        let request = Request { verb: bytes[0], checks, count: word(8), bytes: word(16) };
        if request.count.checked_mul(request.bytes).is_none_or(|total| total > MEMORY_BYTES) {
            bail!("a batch of {} x {} bytes is over {MEMORY_BYTES}", request.count, request.bytes);
        }
        Ok(request)
    }
}

/// Memory that is used from front to back, again and again.
struct Ring {
    memory: Vec<u8>,
    at: usize,
}

impl Ring {
    fn new() -> Ring {
        // Written once, so that no page is missing later.
        Ring { memory: vec![7; MEMORY_BYTES], at: 0 }
    }
    fn next(&mut self, bytes: usize) -> &mut [u8] {
        if self.at + bytes > self.memory.len() {
            self.at = 0;
        }
        let from = self.at;
        self.at += bytes.next_multiple_of(64);
        &mut self.memory[from..from + bytes]
    }
}

/// Serves one connection until it closes.
pub fn serve(spec: &RawServerSpec) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", spec.port)).context("raw-socket ceiling")?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut ring = Ring::new();
    let mut request = [0; REQUEST_BYTES];
    loop {
        match stream.read_exact(&mut request) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let request = Request::decode(&request)?;
        let memory = ring.next(request.count * request.bytes);
        if request.verb == GET {
            write_items(&mut stream, &[], memory, request.bytes)?;
        } else {
            read_items(&mut stream, memory, request.bytes, request.checks)?;
            stream.write_all(&[1])?;
        }
    }
}

/// Writes a head and then every item with as few calls as there can be.
fn write_items(stream: &mut TcpStream, head: &[u8], memory: &[u8], item_bytes: usize) -> Result<()> {
    let mut slices: Vec<IoSlice> = Vec::with_capacity(1 + memory.len() / item_bytes.max(1));
    slices.extend((!head.is_empty()).then(|| IoSlice::new(head)));
    slices.extend(memory.chunks(item_bytes).map(IoSlice::new));
    let mut rest = &mut slices[..];
    while !rest.is_empty() {
        let count = rest.len().min(SLICES_MAX);
        let written = stream.write_vectored(&rest[..count])?;
        if written == 0 {
            bail!("the peer closed");
        }
        IoSlice::advance_slices(&mut rest, written);
    }
    Ok(())
}

/// Reads every item by blocks, which stay in the processor's cache, and checksums them if wanted.
fn read_items(stream: &mut TcpStream, memory: &mut [u8], item_bytes: usize, checks: Checks) -> Result<()> {
    for block in memory.chunks_mut(item_bytes).flat_map(|item| item.chunks_mut(BLOCK_BYTES as usize)) {
        stream.read_exact(block)?;
        if checks == Checks::Blocks {
            std::hint::black_box(checksum(block));
        }
    }
    Ok(())
}

/// The near end and its server process.
pub struct RawPair {
    stream: TcpStream,
    ring: Ring,
    _server: Process,
}

impl RawPair {
    /// Starts the server and connects.
    pub fn start(binary: &Path, directory: &Path) -> Result<RawPair> {
        let port = ports::reserve(1)?[0];
        let launch = Launch {
            name: "raw-socket".into(),
            binary: binary.to_owned(),
            arguments: vec![
                "load-worker".into(),
                serde_json::to_string(&WorkerSpec::RawServer(RawServerSpec { port }))?,
            ],
            environment: Vec::new(),
            namespace: None,
            log: directory.join("raw-socket.log"),
        };
        let mut server = Process::spawn(&launch, Lifetime::WithOwner, Input::Null)?;
        let give_up = Instant::now() + CONNECT_WITHIN;
        let stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > give_up => {
                    return Err(error).context("connecting to the raw-socket server");
                }
                Err(_) => {
                    server.expect_running()?;
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        };
        stream.set_nodelay(true)?;
        Ok(RawPair { stream, ring: Ring::new(), _server: server })
    }

    /// Time of `batches` gets of `count` items of `bytes`.
    pub fn get(&mut self, count: usize, bytes: usize, batches: usize, checks: Checks) -> Result<Duration> {
        let began = Instant::now();
        for _ in 0..batches {
            self.stream.write_all(&Request { verb: GET, checks, count, bytes }.encode())?;
            read_items(&mut self.stream, self.ring.next(count * bytes), bytes, checks)?;
        }
        Ok(began.elapsed())
    }

    /// Time of `batches` puts of `count` items of `bytes`.
    pub fn put(&mut self, count: usize, bytes: usize, batches: usize, checks: Checks) -> Result<Duration> {
        let began = Instant::now();
        for _ in 0..batches {
            let request = Request { verb: PUT, checks, count, bytes }.encode();
            let memory = self.ring.next(count * bytes);
            match checks {
                Checks::None => write_items(&mut self.stream, &request, memory, bytes)?,
                Checks::Blocks => {
                    self.stream.write_all(&request)?;
                    for item in memory.chunks(bytes) {
                        // The table travels before its item, so an item is checksummed whole before it is sent.
                        item.chunks(BLOCK_BYTES as usize).for_each(|block| _ = std::hint::black_box(checksum(block)));
                        write_items(&mut self.stream, &[], item, bytes)?;
                    }
                }
            }
            let mut answer = [0];
            self.stream.read_exact(&mut answer)?;
        }
        Ok(began.elapsed())
    }
}
