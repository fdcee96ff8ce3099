//! A real S3 server for process tests: over plain HTTP or TLS, and one that takes requests and never answers.

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tidepool_chaos_tests::ports;

use super::{binary, wait_for};

/// A real S3 server with one bucket; ends with this value.
pub struct S3Server {
    process: Child,
    endpoint: SocketAddr,
    /// Of a server that speaks TLS: the certificate that it shows, which nobody signed but itself.
    pub certificate: Option<PathBuf>,
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        if self.process.kill().is_ok() {
            self.process.wait().ok();
        }
    }
}

impl S3Server {
    /// None where scripts/setup was told to leave it out.
    pub async fn start(directory: &Path) -> Option<S3Server> {
        S3Server::start_with(directory, None).await
    }

    /// The same over TLS; None also where there is no `openssl` to make a certificate.
    pub async fn start_tls(directory: &Path) -> Option<S3Server> {
        let paths = ["certificate.pem", "key.pem"].map(|name| directory.join(name));
        let mut command = Command::new("openssl");
        command.args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ]);
        command.args(["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]);
        command
            .args(["-addext", "basicConstraints=critical,CA:FALSE", "-out"])
            .arg(&paths[0])
            .arg("-keyout")
            .arg(&paths[1]);
        match command.stderr(Stdio::null()).status() {
            Ok(status) => assert!(status.success(), "openssl made no certificate"),
            Err(error) => {
                eprintln!("skipped: openssl: {error}");
                return None;
            }
        }
        S3Server::start_with(directory, Some(paths)).await
    }

    async fn start_with(directory: &Path, tls: Option<[PathBuf; 2]>) -> Option<S3Server> {
        let test = std::env::current_exe().expect("this test has an executable");
        let tools = test.ancestors().nth(3).expect("target/PROFILE/deps/TEST").join("tools/moto/bin");
        let server = tools.join("moto_server");
        if !server.exists() {
            assert!(std::env::var_os("TIDEPOOL_REQUIRE_S3").is_none(), "{} is missing", server.display());
            eprintln!("skipped: no {}; scripts/setup makes it", server.display());
            return None;
        }
        let endpoint = SocketAddr::from(([127, 0, 0, 1], ports::reserve(1).expect("a port")[0]));
        let log = std::fs::File::create(directory.join("s3.log")).expect("log file");
        let mut command = Command::new(server);
        command.args(["-H", "127.0.0.1", "-p", &endpoint.port().to_string()]).stdout(Stdio::null()).stderr(log);
        if let Some([certificate, key]) = &tls {
            command.arg("-c").arg(certificate).arg("-k").arg(key);
        }
        let certificate = tls.map(|[certificate, _]| certificate);
        let server = S3Server { process: command.spawn().expect("the S3 server starts"), endpoint, certificate };
        wait_for("the bucket", async || match &server.certificate {
            Some(_) => put_bucket_over_tls(&tools.join("python3"), endpoint),
            None => put_bucket(endpoint),
        })
        .await;
        Some(server)
    }

    /// From here on it takes connections and requests, and says nothing.
    pub fn hang(&self) {
        let pid = Pid::from_child(&self.process);
        kill_process(pid, Signal::STOP).expect("it runs");
    }

    /// Where masters publish to.
    pub fn url(&self) -> String {
        match self.certificate {
            Some(_) => url(self.endpoint).replace("http:", "https:"),
            None => url(self.endpoint),
        }
    }
}

/// By the interpreter that the server runs in: the tests speak no TLS of their own.
fn put_bucket_over_tls(python: &Path, endpoint: SocketAddr) -> Option<()> {
    let script = format!(
        "import http.client, ssl\n\
         c = http.client.HTTPSConnection('{endpoint}', context=ssl._create_unverified_context(), timeout=5)\n\
         c.request('PUT', '/bucket')\n\
         assert c.getresponse().status == 200\n"
    );
    let mut command = Command::new(python);
    command.args(["-c", &script]).stderr(Stdio::null()).status().ok()?.success().then_some(())
}

fn put_bucket(endpoint: SocketAddr) -> Option<()> {
    use std::io::Write;
    let mut stream = TcpStream::connect(endpoint).ok()?;
    let request = format!("PUT /bucket HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split(' ').nth(1).filter(|status| *status == "200").map(drop)
}

/// A place below the bucket of a server.
pub fn url(endpoint: SocketAddr) -> String {
    format!("s3://bucket/deep/er?endpoint=http://{endpoint}")
}

/// The tidepool binary with credentials of an object store in its environment.
pub fn binary_with_credentials(directory: &Path) -> PathBuf {
    binary_with(directory, "tidepool-with-credentials", "")
}

/// The same, which also trusts this certificate.
pub fn binary_that_trusts(directory: &Path, certificate: &Path) -> PathBuf {
    binary_with(directory, "tidepool-that-trusts", &format!("SSL_CERT_FILE='{}'", certificate.display()))
}

fn binary_with(directory: &Path, name: &str, variables: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = directory.join(name);
    let text = format!(
        "#!/bin/sh\nexport AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test {variables}\nexec '{}' \"$@\"\n",
        binary().display()
    );
    std::fs::write(&path, text).expect("a script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("it may be executed");
    path
}
