//! Running the built binary: one command to its end, or a role in the background.
#![allow(dead_code)] // each test binary uses its own part

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take on a slow, shared machine.
pub const WITHIN: Duration = Duration::from_secs(60);

/// The binary, with nothing of the test's own environment that it would read.
pub fn tidepool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidepool"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("TIDEPOOL_") || text.starts_with("MOONCAKE_") {
            command.env_remove(&name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Runs to the end.
pub fn run(arguments: &[&str]) -> Output {
    tidepool().args(arguments).output().expect("the binary runs")
}

/// Exit code.
pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {}", text(&output.stderr)))
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs to the end and must succeed.
pub fn expect(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert_eq!(code(&output), 0, "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Waits for `look` to find something.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + WITHIN;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < give_up, "{what}: not within {WITHIN:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A role in the background; killed when dropped.
pub struct Role {
    child: Child,
    port_file: PathBuf,
    log: PathBuf,
}

impl Role {
    /// Starts `tidepool ARGUMENTS --port-file ...` with its log in `directory`.
    pub fn start(directory: &Path, name: &str, arguments: &[&str]) -> Role {
        Role::start_with(directory, name, arguments, &[])
    }

    /// As [`Role::start`], with more environment.
    pub fn start_with(directory: &Path, name: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Role {
        let port_file = directory.join(format!("{name}.ports"));
        let log = directory.join(format!("{name}.log"));
        let file = std::fs::File::create(&log).expect("log file");
        let mut command = tidepool();
        command.env("TMPDIR", directory.join("tmp")).envs(environment.iter().copied());
        command.args(arguments).arg("--port-file").arg(&port_file).stdout(Stdio::null()).stderr(file);
        Role { child: command.spawn().expect("the role starts"), port_file, log }
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its port file, once it is up.
    pub fn ports(&mut self) -> serde_json::Value {
        let port_file = self.port_file.clone();
        wait_for("port file", || {
            if let Some(status) = self.child.try_wait().expect("child") {
                panic!("the role ended ({status}):\n{}", self.log());
            }
            std::fs::read(&port_file).ok().map(|bytes| serde_json::from_slice(&bytes).expect("the port file is whole"))
        })
    }

    /// One of its addresses.
    pub fn address(&mut self, which: &str) -> String {
        self.ports()[which].as_str().expect("an address").to_owned()
    }

    /// SIGTERM, and its exit code.
    pub fn terminate(mut self) -> i32 {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
        let status = wait_for("end after SIGTERM", || self.child.try_wait().expect("child"));
        status.code().unwrap_or(-1)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        if self.child.kill().is_ok() {
            let _ = self.child.wait();
        }
    }
}

/// A plain HTTP request: status and body.
pub fn http(address: &str, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("the HTTP port answers");
    stream.set_read_timeout(Some(WITHIN)).expect("timeout");
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).expect("request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answer");
    let status =
        answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_else(|| panic!("no status in {answer}"));
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
    (status, body)
}
