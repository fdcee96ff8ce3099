//! Garbage by the million: where a protocol goes on after a bad frame, thousands share a connection, and each is
//! answered before it counts; where it ends the connection, a connection is one frame.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use prost::Message;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use tidepool_proto::v1;
use tidepool_transport::tcp::{MAGIC, wire};
use tidepool_transport::{ReadAccess, WriteAccess};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Frames sent together, then their answers are read: below what any server takes at once.
const TOGETHER: usize = 64;
/// Times that on one connection.
const TURNS: usize = 16;
/// Connections that end at their first frame, to one that does not.
const BREAKING: usize = 10;
/// How long an answer to garbage may take on a slow, shared machine.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// Senders beside each other on one port: most of a sender's time goes into waiting for delayed acknowledgements.
const SENDERS: usize = 16;

/// What is behind a port.
#[derive(Clone)]
pub enum Port {
    /// gRPC with these services' methods.
    Rpc(&'static [&'static str]),
    /// gRPC, and the data plane of a cluster.
    Data(&'static [&'static str], v1::Identity),
    /// HTTP/1.1.
    Http,
}

pub const MASTER_METHODS: &[&str] = &[
    "/tidepool.v1.ClientService/Call",
    "/tidepool.v1.ClientService/Session",
    "/tidepool.v1.NodeService/Register",
    "/tidepool.v1.NodeService/Mount",
    "/tidepool.v1.NodeService/Unmount",
    "/tidepool.v1.NodeService/Heartbeat",
    "/tidepool.v1.RaftService/Handshake",
    "/tidepool.v1.RaftService/Prepare",
    "/tidepool.v1.RaftService/Append",
    "/tidepool.v1.RaftService/Beat",
    "/tidepool.v1.RaftService/Vote",
    "/tidepool.v1.RaftService/PreVote",
    "/tidepool.v1.RaftService/TransferLeader",
    "/tidepool.v1.RaftService/Snapshot",
    "/tidepool.v1.No/Such",
];
pub const DATANODE_METHODS: &[&str] = &["/tidepool.v1.DatanodeService/Describe", "/tidepool.v1.No/Such"];

/// Sends `frames` of noise to one port, and answers how many of them went over shared connections.
pub async fn babble(address: SocketAddr, port: Port, frames: usize, seed: u64) -> usize {
    let senders = (0..SENDERS).map(|number| {
        let (port, share) = (port.clone(), frames.div_ceil(SENDERS));
        tokio::spawn(async move {
            let mut sender = Sender { address, random: StdRng::seed_from_u64(seed << 8 | number as u64) };
            let (mut sent, mut shared) = (0, 0);
            while sent < share {
                let answered = match (&port, sender.random.random_range(0..2)) {
                    (Port::Http, _) => sender.http_requests().await,
                    (Port::Data(_, identity), 0) => sender.data_requests(identity).await,
                    (Port::Rpc(_), 0) => sender.unknown_http2_frames().await,
                    (Port::Rpc(methods) | Port::Data(methods, _), _) => sender.calls(methods).await,
                };
                shared += answered;
                sent += answered + BREAKING;
                sender.break_connections().await;
            }
            shared
        })
    });
    let mut shared = 0;
    for sender in futures::future::join_all(senders).await {
        shared += sender.unwrap();
    }
    shared
}

/// What a connection may begin with that goes nowhere.
fn openings() -> Vec<Vec<u8>> {
    let http2 = PREFACE.to_vec();
    let mut http2_bomb = http2.clone();
    http2_bomb.extend([0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01]); // DATA frame of 16 MiB
    let mut grpc_bomb = http2.clone();
    grpc_bomb.extend(frame(SETTINGS, 0, 0, &[])); // then a message of 4 GiB
    grpc_bomb.extend([0, 0, 5, 0, 1, 0, 0, 0, 1, 0, 0xff, 0xff, 0xff, 0xff]);
    let mut plane_bomb = MAGIC.to_vec();
    plane_bomb.extend([0xff; 60]);
    let mut plane_zero = MAGIC.to_vec();
    plane_zero.extend([0; 60]);
    vec![
        Vec::new(),
        http2,
        http2_bomb,
        grpc_bomb,
        plane_bomb,
        plane_zero,
        b"GET / HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n\r\n".to_vec(),
        b"POST /api/v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n".to_vec(),
        b"\x16\x03\x01\xff\xff\x01\x00\xff\xfc\x03\x03".to_vec(), // TLS
        b"cos\nsystem\n(S'true'\ntR.".to_vec(),                   // a pickle
    ]
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// The first type that HTTP/2 does not know, and an endpoint must ignore (RFC 9113, 4.1).
const UNKNOWN: u8 = 0x20;
const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Headers of a call (HPACK without compression: indexed and literal fields, RFC 7541, 6).
fn call_headers(method: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    let content_type = [&[0x0f, 0x10], &text("application/grpc")[..]].concat();
    let te = [&[0x00], &text("te")[..], &text("trailers")].concat();
    [&[0x83, 0x86, 0x04], &text(method)[..], &[0x01], &text("noise"), &content_type, &te].concat()
}

/// How a connection begins: no settings, and room for a gigabyte of answers.
fn greeting() -> Vec<u8> {
    let room = frame(WINDOW_UPDATE, 0, 0, &(1u32 << 30).to_be_bytes());
    [PREFACE, &frame(SETTINGS, 0, 0, &[]), &room].concat()
}

/// One frame's type, flags and stream; none once the other side ended.
async fn next_frame(stream: &mut (impl AsyncReadExt + Unpin)) -> Option<(u8, u8, u32)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.ok()?;
    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
    stream.read_exact(&mut payload).await.ok()?;
    let id = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    (head[3] != GOAWAY).then_some((head[3], head[4], id))
}

async fn answered<T>(what: &str, answers: impl Future<Output = T>) -> T {
    tokio::time::timeout(ANSWER_WITHIN, answers).await.unwrap_or_else(|_| panic!("{what} hang"))
}

struct Sender {
    address: SocketAddr,
    random: StdRng,
}

impl Sender {
    async fn connect(&self) -> TcpStream {
        let address = self.address;
        let stream = TcpStream::connect(address).await.unwrap_or_else(|error| panic!("{address} is gone: {error}"));
        stream.set_nodelay(true).unwrap();
        stream
    }

    fn noise(&mut self, lengths: std::ops::Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; self.random.random_range(lengths)];
        self.random.fill_bytes(&mut bytes);
        bytes
    }

    /// Noise after an opening, on some connections at once. The other side may close at any byte: that is a right answer.
    async fn break_connections(&mut self) {
        let openings = openings();
        let noises: Vec<Vec<u8>> = (0..BREAKING)
            .map(|_| {
                let mut bytes = openings[self.random.random_range(0..openings.len())].clone();
                if self.random.random_ratio(1, 4) {
                    bytes.extend(u32::MAX.to_le_bytes());
                }
                bytes.extend(self.noise(1..256));
                bytes
            })
            .collect();
        futures::future::join_all(noises.iter().map(|bytes| self.break_a_connection(bytes))).await;
    }

    async fn break_a_connection(&self, bytes: &[u8]) {
        let mut stream = self.connect().await;
        // No port of this side is held by a connection that is over: ten thousand of them would use them up.
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        if stream.write_all(bytes).await.is_err() || stream.shutdown().await.is_err() {
            return;
        }
        // Until the other side closes, or for as long as it may take to think about it.
        let mut answer = [0; 4096];
        while let Ok(Ok(1..)) = tokio::time::timeout(Duration::from_millis(20), stream.read(&mut answer)).await {}
    }

    /// Frames of types that HTTP/2 does not know, with any flags, stream and payload: ignored, and the connection goes on.
    async fn unknown_http2_frames(&mut self) -> usize {
        let mut stream = self.connect().await;
        let mut bytes = greeting();
        for _ in 0..TOGETHER * TURNS {
            let (kind, flags, id) =
                (self.random.random_range(UNKNOWN..=0xff), self.random.random(), self.random.random());
            let noise = self.noise(0..256);
            bytes.extend(frame(kind, flags, id, &noise));
        }
        bytes.extend(frame(PING, 0, 0, &[7; 8]));
        answered("HTTP/2 frames", async {
            stream.write_all(&bytes).await.expect("frames of unknown types end no connection");
            loop {
                let (kind, flags, _) =
                    next_frame(&mut stream).await.expect("frames of unknown types end no connection");
                if kind == PING && flags & ACK != 0 {
                    return TOGETHER * TURNS;
                }
            }
        })
        .await
    }

    /// Calls of real methods whose messages are noise, or claim to be gigabytes long.
    async fn calls(&mut self, methods: &[&str]) -> usize {
        let mut stream = self.connect().await;
        let mut opening = greeting();
        let mut done = 0;
        for turn in 0..TURNS {
            let mut bytes = std::mem::take(&mut opening);
            let first = (turn * TOGETHER * 2) as u32;
            for number in 0..TOGETHER {
                let id = ((turn * TOGETHER + number) * 2 + 1) as u32;
                let method = methods[self.random.random_range(0..methods.len())];
                bytes.extend(frame(HEADERS, END_HEADERS, id, &call_headers(method)));
                let mut message = self.noise(0..200);
                if method.ends_with("/Session") {
                    // A session is answered at its end only: with a message that cannot be read, it has one.
                    message.insert(0, 0x07);
                }
                let length = if self.random.random_ratio(1, 8) { u32::MAX } else { message.len() as u32 };
                let prefixed = [&[0], &length.to_be_bytes()[..], &message].concat();
                bytes.extend(frame(DATA, END_STREAM, id, &prefixed));
            }
            let answers = answered("calls", async {
                if stream.write_all(&bytes).await.is_err() {
                    return 0;
                }
                let mut ended = HashSet::new();
                while ended.len() < TOGETHER {
                    match next_frame(&mut stream).await {
                        Some((HEADERS | DATA, flags, id)) if flags & END_STREAM != 0 => drop(ended.insert(id)),
                        Some((RST_STREAM, _, id)) if id > first => drop(ended.insert(id)),
                        Some(_) => {}
                        None => break,
                    }
                }
                ended.len()
            })
            .await;
            done += answers;
            if answers < TOGETHER {
                break;
            }
        }
        done
    }

    /// Well-formed data-plane requests with forged contents, after a right greeting: refused one by one.
    async fn data_requests(&mut self, identity: &v1::Identity) -> usize {
        let mut stream = self.connect().await;
        let hello = v1::DataHello { identity: Some(identity.clone()) }.encode_to_vec();
        let hello = [&MAGIC[..], &(hello.len() as u32).to_le_bytes(), &hello].concat();
        stream.write_all(&hello).await.unwrap();
        let mut head = [0; 8];
        stream.read_exact(&mut head).await.unwrap();
        let mut welcome = vec![0; u32::from_le_bytes(head[4..].try_into().unwrap()) as usize];
        stream.read_exact(&mut welcome).await.unwrap();
        assert_eq!(v1::DataWelcome::decode(&welcome[..]).unwrap().error, None);
        let mut done = 0;
        for _ in 0..TURNS {
            let mut bytes = Vec::new();
            for id in 0..TOGETHER {
                self.forge(id as u64, &mut bytes);
            }
            answered("data-plane requests", async {
                stream.write_all(&bytes).await.expect("a forged request ends no connection");
                for _ in 0..TOGETHER {
                    let mut head = [0; wire::HEADER_BYTES];
                    stream.read_exact(&mut head).await.expect("a forged request ends no connection");
                    let answer = wire::Answer::decode(&head).expect("an answer");
                    assert_eq!(answer.payload_bytes, 0, "a forged request was answered with payload");
                    let mut body = vec![0; answer.body_bytes];
                    stream.read_exact(&mut body).await.unwrap();
                    assert!(!body.is_empty(), "a forged request was not refused");
                }
            })
            .await;
            done += TOGETHER;
        }
        done
    }

    fn forge(&mut self, id: u64, out: &mut Vec<u8>) {
        let random = &mut self.random;
        let mac = random.random::<[u8; 16]>().to_vec().into();
        let replica = v1::Replica {
            replica_id: random.random(),
            // Half of them name places that exist.
            segment_id: if random.random() { random.random_range(0..8) } else { random.random() },
            incarnation: random.random(),
            node_id: if random.random() { random.random_range(0..4) } else { random.random() },
            offset: random.random(),
            length: random.random(),
            kind: 0,
            expires_log_time_ms: random.random(),
            mac,
        };
        let (object_id, length) = (random.random(), random.random_range(1..256));
        let write = random.random_ratio(1, 4);
        let kind = if write { wire::Kind::Write } else { wire::Kind::Read };
        let payload_bytes = if write { length } else { 0 };
        let record_bytes = wire::RECORD_BYTES;
        wire::Request { kind, items: 1, record_bytes, remaining_ms: 10_000, id, payload_bytes }.encode(out);
        if write {
            wire::put_write(out, &WriteAccess { object_id, replica, length });
            let from = out.len();
            out.resize(from + length as usize, 0);
            self.random.fill_bytes(&mut out[from..]);
        } else {
            let offset = self.random.random();
            wire::put_read(out, &ReadAccess { object_id, replica, offset, length });
        }
    }

    /// HTTP/1.1 requests, one after the other, for things that do not exist by methods that do not, with noise as body.
    async fn http_requests(&mut self) -> usize {
        const HEX: &[u8] = b"0123456789abcdef";
        let mut stream = self.connect().await;
        let mut done = 0;
        for _ in 0..TURNS {
            let mut bytes = Vec::new();
            for _ in 0..TOGETHER {
                let method: String =
                    (0..self.random.random_range(3..9)).map(|_| self.random.random_range('A'..='Z')).collect();
                let path = self.noise(1..64);
                let path: String = path.iter().map(|byte| HEX[usize::from(byte & 15)] as char).collect();
                let body = self.noise(0..128);
                bytes.extend(
                    format!("{method} /noise/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len())
                        .bytes(),
                );
                bytes.extend(body);
            }
            let answers = answered("HTTP requests", async {
                if stream.write_all(&bytes).await.is_err() {
                    return 0;
                }
                count_answers(&mut stream).await
            })
            .await;
            done += answers;
            if answers < TOGETHER {
                break;
            }
        }
        done
    }
}

/// Reads until `TOGETHER` answers began and the last one is whole, or the other side closed.
async fn count_answers(stream: &mut TcpStream) -> usize {
    const START: &[u8] = b"HTTP/1.1 ";
    let mut text = Vec::new();
    loop {
        let answers = text.windows(START.len()).filter(|at| *at == START).count();
        let last_is_whole = text
            .windows(4)
            .rposition(|at| at == b"\r\n\r\n")
            .is_some_and(|end| text.windows(START.len()).rposition(|at| at == START).is_some_and(|start| start < end));
        if answers == TOGETHER && last_is_whole {
            return answers;
        }
        let mut more = [0; 16 << 10];
        match stream.read(&mut more).await {
            Ok(read @ 1..) => text.extend_from_slice(&more[..read]),
            _ => return answers,
        }
    }
}
