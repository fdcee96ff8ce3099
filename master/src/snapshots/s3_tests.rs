//! An S3 store that stalls, fails or lies: bounded attempts, a named reason, and no snapshot that looks whole.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::location::Bucket;
use super::s3::{Limits, S3Store};
use super::store::{NewFile, Store};

/// What the store does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// Answers 500 to every write.
    Fails,
    /// Takes a write and never answers.
    Stalls,
    /// Keeps less than it was given.
    Truncates,
    /// Gives less than it was asked for.
    GivesLess,
    /// Says another length than it gives.
    LiesAboutLength,
}

/// A store of one bucket in memory: put, head, get and delete of whole names, nothing more.
struct Fake {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    fault: Mutex<Fault>,
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    writes: AtomicUsize,
    is_over: AtomicBool,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        // Wakes the listener; it is gone if this fails.
        let _ = TcpStream::connect(&self.address);
    }
}

impl Fake {
    fn start() -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            fault: Mutex::new(Fault::None),
            objects: Mutex::default(),
            writes: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        });
        let own = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if own.is_over.load(Ordering::SeqCst) {
                    return;
                }
                let (own, stream) = (own.clone(), stream.unwrap());
                // Ends with the connection, whatever the reason.
                std::thread::spawn(move || drop(serve(&own, stream)));
            }
        });
        Fake { address, shared }
    }

    fn store(&self) -> S3Store {
        let bucket = Bucket {
            name: "bucket".into(),
            prefix: "a/b".into(),
            endpoint: Some(format!("http://{}", self.address)),
            region: None,
        };
        let request = Duration::from_millis(500);
        let limits = Limits { request, retries: 2, retry: Duration::from_secs(3), is_unsigned: true };
        S3Store::with_limits(&bucket, "s3://bucket/a/b", limits).unwrap()
    }

    fn has(&self, fault: Fault) {
        *self.shared.fault.lock() = fault;
    }

    fn names(&self) -> Vec<String> {
        self.shared.objects.lock().keys().map(|key| key.rsplit('/').next().unwrap().to_owned()).collect()
    }
}

fn serve(shared: &Shared, mut stream: TcpStream) -> io::Result<()> {
    let mut input = BufReader::new(stream.try_clone()?);
    loop {
        let mut first = String::new();
        if input.read_line(&mut first)? == 0 {
            return Ok(());
        }
        let (mut length, mut range) = (0, None);
        loop {
            let mut line = String::new();
            input.read_line(&mut line)?;
            let line = line.trim().to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            length = line.strip_prefix("content-length: ").map_or(length, |value| value.parse().unwrap());
            range = line.strip_prefix("range: bytes=").map(str::to_owned).or(range);
        }
        let mut body = vec![0; length];
        input.read_exact(&mut body)?;
        let words: Vec<&str> = first.split(' ').collect();
        let answer = answer(shared, words[0], words[1], body, range.as_deref());
        match answer {
            Some(answer) => stream.write_all(&answer)?,
            None => loop {
                // Until the client gives up.
                if shared.is_over.load(Ordering::SeqCst) || input.fill_buf().map_or(true, <[u8]>::is_empty) {
                    return Ok(());
                }
            },
        }
    }
}

fn answer(shared: &Shared, method: &str, path: &str, mut body: Vec<u8>, range: Option<&str>) -> Option<Vec<u8>> {
    let fault = *shared.fault.lock();
    let mut objects = shared.objects.lock();
    let plain = |status: &str| format!("HTTP/1.1 {status}\r\nETag: \"x\"\r\nContent-Length: 0\r\n\r\n").into_bytes();
    let found = |status: &str, more: &str, length: usize, body: &[u8]| {
        let modified = "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT";
        let head = format!("HTTP/1.1 {status}\r\nETag: \"x\"\r\n{modified}\r\n{more}Content-Length: {length}\r\n\r\n");
        [head.as_bytes(), body].concat()
    };
    match method {
        "PUT" => {
            shared.writes.fetch_add(1, Ordering::SeqCst);
            match fault {
                Fault::Fails => return Some(plain("500 Internal Server Error")),
                Fault::Stalls => return None,
                Fault::Truncates => drop(body.pop()),
                _ => {}
            }
            objects.insert(path.to_owned(), body);
            Some(plain("200 OK"))
        }
        "DELETE" => {
            objects.remove(path);
            Some(plain("204 No Content"))
        }
        _ => {
            let Some(bytes) = objects.get(path) else { return Some(plain("404 Not Found")) };
            let lie = usize::from(fault == Fault::LiesAboutLength);
            if method == "HEAD" {
                return Some(found("200 OK", "", bytes.len() + lie, b""));
            }
            let (from, to) = range.unwrap().split_once('-').unwrap();
            let (from, to) = (from.parse::<usize>().unwrap(), to.parse::<usize>().unwrap().min(bytes.len() - 1));
            let mut part = &bytes[from..=to];
            if fault == Fault::GivesLess {
                part = &part[..part.len() - 1];
            }
            let more = format!("Content-Range: bytes {from}-{}/{}\r\n", from + part.len() - 1, bytes.len());
            Some(found("206 Partial Content", &more, part.len(), part))
        }
    }
}

fn files(bytes: &[u8]) -> Vec<NewFile<'_>> {
    ["one", "two", "last"]
        .into_iter()
        .map(|name| {
            let open = move || Ok(Box::new(io::Cursor::new(bytes.to_vec())) as Box<dyn Read + Send>);
            NewFile { name, bytes: bytes.len() as u64, open: Box::new(open) }
        })
        .collect()
}

fn read(store: &S3Store, key: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    store.read(key).map_err(|error| error.source)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[test]
fn a_store_that_works_gives_back_what_it_took() {
    let fake = Fake::start();
    let store = fake.store();
    let bytes = vec![7; 100_000];
    store.write_directory("d", &files(&bytes)).unwrap();
    assert_eq!(read(&store, "d/two").unwrap(), bytes);
    assert_eq!(store.length("d/last").unwrap(), Some(100_000));
    assert_eq!(store.length("d/none").unwrap(), None);
    store.remove("d", &["last", "one", "two", "none"]).unwrap();
    assert_eq!(fake.names(), [""; 0]);
}

/// Tried without asking for the length after each write: fails.
#[test]
fn a_store_that_stalls_fails_or_loses_bytes_is_named_and_holds_nothing_whole() {
    for (fault, reason) in [(Fault::Fails, "io"), (Fault::Stalls, "timeout"), (Fault::Truncates, "damaged")] {
        let fake = Fake::start();
        let store = fake.store();
        fake.has(fault);
        let error = store.write_directory("d", &files(b"bytes")).unwrap_err();
        assert_eq!(error.reason(), reason, "{fault:?}: {error}");
        assert!(error.to_string().contains("s3://bucket/a/b/d/one"), "{error}");
        // Bounded: once for a store that said yes, else as often as is allowed.
        let attempts = if fault == Fault::Truncates { 1 } else { 3 };
        assert_eq!(fake.shared.writes.load(Ordering::SeqCst), attempts, "{fault:?}");
        assert!(!fake.names().contains(&"last".to_owned()));
        // An older whole state goes before anything new is written, and comes back whole when the store works again.
        fake.has(Fault::None);
        store.write_directory("d", &files(b"bytes")).unwrap();
        fake.has(fault);
        store.write_directory("d", &files(b"other")).unwrap_err();
        assert!(!fake.names().contains(&"last".to_owned()), "{fault:?}");
    }
}

#[test]
fn a_store_that_gives_other_lengths_than_it_says_is_an_error_not_short_bytes() {
    for fault in [Fault::GivesLess, Fault::LiesAboutLength] {
        let fake = Fake::start();
        let store = fake.store();
        store.write_directory("d", &files(b"bytes")).unwrap();
        fake.has(fault);
        read(&store, "d/one").unwrap_err();
    }
    let fake = Fake::start();
    fake.has(Fault::LiesAboutLength);
    let error = fake.store().write_directory("d", &files(b"bytes")).unwrap_err();
    assert!(error.to_string().contains("Some(6)"), "{error}");
}

#[test]
fn nobody_is_there() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let fake = Fake::start();
    let dead = Fake { address, shared: fake.shared.clone() };
    dead.store().list("d").unwrap_err();
}
