//! The ceiling: blocking std sockets, a thread a connection, one contiguous buffer, no framing to speak of.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread::JoinHandle;

use super::Direction;

/// Opens a connection's conversation: direction, bytes an item, items.
const HELLO_BYTES: usize = 17;

/// Serves raw connections, each on a thread, until the process ends.
pub(super) fn serve(listener: TcpListener) {
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                // The client ends a case by closing its connections.
                let _closed = serve_connection(stream);
            });
        }
    });
}

fn serve_connection(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut hello = [0u8; HELLO_BYTES];
    stream.read_exact(&mut hello)?;
    let word = |at: usize| u64::from_le_bytes(hello[at..at + 8].try_into().expect("8 bytes")) as usize;
    let mut buffer = vec![1u8; word(1) * word(9)];
    let mut token = [0u8; 8];
    loop {
        if hello[0] == 0 {
            stream.read_exact(&mut token)?;
            stream.write_all(&buffer)?;
        } else {
            stream.read_exact(&mut buffer)?;
            stream.write_all(&token)?;
        }
    }
}

/// A client of the same shape as an engine's batch: its items are spread over the connections, a batch ends when all
/// are done.
pub(super) struct Client {
    lanes: Vec<Lane>,
}

struct Lane {
    go: mpsc::Sender<()>,
    done: mpsc::Receiver<io::Result<()>>,
    thread: JoinHandle<()>,
}

impl Client {
    pub(super) fn start(
        server: SocketAddr,
        direction: Direction,
        bytes: usize,
        items: usize,
        connections: usize,
    ) -> io::Result<Client> {
        let mut lanes = Vec::new();
        for _ in 0..connections {
            let mut stream = TcpStream::connect(server)?;
            stream.set_nodelay(true)?;
            let items = items / connections;
            let mut hello = vec![(direction == Direction::Write) as u8];
            hello.extend_from_slice(&(bytes as u64).to_le_bytes());
            hello.extend_from_slice(&(items as u64).to_le_bytes());
            stream.write_all(&hello)?;
            let (go, start) = mpsc::channel::<()>();
            let (end, done) = mpsc::channel();
            let thread = std::thread::spawn(move || {
                let mut buffer = vec![1u8; bytes * items];
                while start.recv().is_ok() {
                    if end.send(exchange(&mut stream, direction, &mut buffer)).is_err() {
                        return;
                    }
                }
            });
            lanes.push(Lane { go, done, thread });
        }
        Ok(Client { lanes })
    }

    pub(super) fn batch(&mut self) -> io::Result<()> {
        let gone = || io::Error::other("a raw connection's thread ended");
        for lane in &self.lanes {
            lane.go.send(()).map_err(|_| gone())?;
        }
        for lane in &self.lanes {
            lane.done.recv().map_err(|_| gone())??;
        }
        Ok(())
    }

    pub(super) fn stop(self) {
        for Lane { go, done, thread } in self.lanes {
            drop((go, done));
            // A panic of the thread was printed by it.
            let _panicked = thread.join();
        }
    }
}

fn exchange(stream: &mut TcpStream, direction: Direction, buffer: &mut [u8]) -> io::Result<()> {
    let mut token = [0u8; 8];
    match direction {
        Direction::Read => {
            stream.write_all(&token)?;
            stream.read_exact(buffer)
        }
        Direction::Write => {
            stream.write_all(buffer)?;
            stream.read_exact(&mut token)
        }
    }
}
