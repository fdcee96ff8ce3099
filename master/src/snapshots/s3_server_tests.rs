//! Against a real S3 server: a file of several pieces that is cut short is not there, and nothing of it is left.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::location::Bucket;
use super::s3::{Limits, S3Store};
use super::store::{NewFile, Store};

/// What the server may take to start on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of one piece, as the store cuts them.
const PIECE: usize = 8 << 20;

struct Server {
    process: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// None where scripts/setup was told to leave it out.
    fn start() -> Option<Server> {
        let test = std::env::current_exe().unwrap();
        let binary = test.ancestors().nth(3).unwrap().join("tools/moto/bin/moto_server");
        if !binary.exists() {
            assert!(std::env::var_os("TIDEPOOL_REQUIRE_S3").is_none(), "{} is missing", binary.display());
            eprintln!("skipped: no {}; scripts/setup makes it", binary.display());
            return None;
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = Command::new(binary);
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Server { process: command.spawn().unwrap(), address: format!("127.0.0.1:{port}") };
        let give_up = Instant::now() + START_LIMIT;
        while !server.request("PUT", "/bucket").is_ok_and(|answer| answer.contains(" 200 ")) {
            assert!(Instant::now() < give_up, "no S3 server within {START_LIMIT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(server)
    }

    fn request(&self, method: &str, path: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect(&self.address)?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            self.address
        );
        stream.write_all(head.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    fn store(&self) -> S3Store {
        let bucket = Bucket {
            name: "bucket".into(),
            prefix: "a/b".into(),
            endpoint: Some(format!("http://{}", self.address)),
            region: None,
        };
        S3Store::with_limits(&bucket, "s3://bucket/a/b", Limits { is_unsigned: true, ..Limits::default() }).unwrap()
    }
}

/// No two pieces are alike.
fn bytes_of(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 7 + at / PIECE * 31) as u8).collect()
}

fn file<'a>(name: &'static str, bytes: &'a [u8], announced: u64) -> NewFile<'a> {
    let open = move || Ok(Box::new(io::Cursor::new(bytes.to_vec())) as Box<dyn Read + Send>);
    NewFile { name, bytes: announced, open: Box::new(open) }
}

/// Ends badly after its bytes.
struct Breaks(io::Cursor<Vec<u8>>);

impl Read for Breaks {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self.0.read(out)? {
            0 => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "stopped")),
            read => Ok(read),
        }
    }
}

/// Pieces that were taken already go with the upload.
#[test]
fn an_upload_that_is_cut_short_leaves_nothing() {
    let Some(server) = Server::start() else { return };
    let store = server.store();
    let bytes = bytes_of(PIECE + 100);
    let breaks = || {
        let open = || Ok(Box::new(Breaks(io::Cursor::new(bytes.clone()))) as Box<dyn Read + Send>);
        NewFile { name: "one", bytes: 2 * PIECE as u64, open: Box::new(open) }
    };
    for (broken, reason) in [
        (breaks(), "stopped"),
        (file("one", &bytes, bytes.len() as u64 + 1), "damaged"),
        (file("one", &bytes, bytes.len() as u64 - 1), "damaged"),
    ] {
        let error = store.write_directory("d", &[broken, file("last", b"x", 1)]).unwrap_err();
        assert_eq!(error.reason(), reason, "{error}");
        assert_eq!(store.list("d").unwrap(), [""; 0]);
        let uploads = server.request("GET", "/bucket?uploads").unwrap();
        assert!(uploads.contains("ListMultipartUploadsResult") && !uploads.contains("<UploadId>"), "{uploads}");
    }
}
