//! Snapshots in an S3-compatible store, by the crate `object_store`.
//!
//! There are no directories: a snapshot is there when its last file is. Every request has a time limit and a bounded
//! number of attempts, and nothing is taken or given in pieces larger than one chunk, so that memory is bounded.

use std::fmt;
use std::io::{self, Read};
use std::sync::{Arc, Once};
use std::time::Duration;

use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig,
};
use tokio::runtime::Runtime;

use super::location::Bucket;
use super::store::{NAMES_MAX, NewFile, Store, StoreError};

/// Bytes of one request, up or down. S3 takes 10 000 parts of an object, so this allows for 80 GB a file.
const CHUNK_BYTES: usize = 8 << 20;
/// How long one attempt of a request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);
/// How long a connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Attempts after the first, and how long all of them may take.
const RETRIES: usize = 4;
const RETRY_LIMIT: Duration = Duration::from_secs(60);
const DEFAULT_REGION: &str = "us-east-1";
/// Says that the store asks for no signature.
const UNSIGNED: &str = "AWS_SKIP_SIGNATURE";
/// One of these says where the credentials come from.
const CREDENTIALS: [&str; 5] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    UNSIGNED,
];

/// Runs the requests of one store. Apart from the callers, which are no async tasks.
struct Engine {
    client: AmazonS3,
    /// Taken only by the drop.
    runtime: Option<Runtime>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits for nothing, so that it may be dropped anywhere.
            runtime.shutdown_background();
        }
    }
}

/// A bucket of snapshots.
#[derive(Clone)]
pub(super) struct S3Store {
    engine: Arc<Engine>,
    prefix: String,
    url: String,
}

impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3Store({})", self.url)
    }
}

/// Limits of requests; shorter in tests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) request: Duration,
    pub(super) retries: usize,
    pub(super) retry: Duration,
    /// Requests without a signature: only for a store that asks for none.
    pub(super) is_unsigned: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { request: REQUEST_LIMIT, retries: RETRIES, retry: RETRY_LIMIT, is_unsigned: false }
    }
}

impl S3Store {
    pub(super) fn new(bucket: &Bucket, url: &str) -> Result<S3Store, StoreError> {
        S3Store::with_limits(bucket, url, Limits::default())
    }

    pub(super) fn with_limits(bucket: &Bucket, url: &str, limits: Limits) -> Result<S3Store, StoreError> {
        static TLS: Once = Once::new();
        // An error means that the process has one already: as good.
        TLS.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
        let is_plain = bucket.endpoint.as_deref().is_some_and(|endpoint| endpoint.starts_with("http:"));
        let client = ClientOptions::new()
            .with_timeout(limits.request)
            .with_connect_timeout(CONNECT_LIMIT.min(limits.request))
            .with_allow_http(is_plain);
        let backoff = BackoffConfig { max_backoff: limits.retry / 4, ..BackoffConfig::default() };
        let retry = RetryConfig { backoff, max_retries: limits.retries, retry_timeout: limits.retry };
        let is_set = |name: &str| std::env::var_os(name).is_some();
        if bucket.endpoint.is_some() && !limits.is_unsigned && !CREDENTIALS.iter().any(|name| is_set(name)) {
            // Else the crate looks for those of a machine at AWS, which is not where the store is.
            let why = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
            return Err(StoreError::new(url, io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        let mut builder = AmazonS3Builder::from_env()
            // One at a time, which every store understands; few are removed at once.
            .with_disable_bulk_delete(true)
            .with_skip_signature(limits.is_unsigned || is_set(UNSIGNED))
            .with_client_options(client)
            .with_retry(retry)
            .with_bucket_name(&bucket.name);
        if let Some(endpoint) = &bucket.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        match &bucket.region {
            Some(region) => builder = builder.with_region(region),
            None if !is_set("AWS_REGION") && !is_set("AWS_DEFAULT_REGION") => {
                builder = builder.with_region(DEFAULT_REGION);
            }
            None => {}
        }
        let client = builder.build().map_err(|error| StoreError::new(url, as_io(error)))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("tidepool-s3")
            .enable_all()
            .build()
            .map_err(|error| StoreError::new(url, error))?;
        let engine = Arc::new(Engine { client, runtime: Some(runtime) });
        Ok(S3Store { engine, prefix: bucket.prefix.clone(), url: url.to_owned() })
    }

    fn path(&self, key: &str) -> Path {
        let names = [self.prefix.as_str(), key].into_iter().flat_map(|part| part.split('/'));
        Path::from_iter(names.filter(|name| !name.is_empty()))
    }

    /// Runs one call to its end.
    fn wait<T>(&self, key: &str, call: impl Future<Output = object_store::Result<T>>) -> Result<T, StoreError> {
        self.engine.wait(call).map_err(|error| StoreError::new(self.show(key), error))
    }

    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<(), StoreError> {
        let path = self.path(key);
        self.wait(key, self.engine.client.put(&path, PutPayload::from(bytes))).map(drop)
    }

    /// In one request what fits into one, else in pieces that appear together.
    fn put_file(&self, key: &str, file: &NewFile<'_>) -> Result<(), StoreError> {
        let failed = |error| StoreError::new(self.show(key), error);
        let mut input = (file.open)().map_err(failed)?;
        let first = read_chunk(&mut *input).map_err(failed)?;
        if first.len() < CHUNK_BYTES {
            check_length(first.len() as u64, file.bytes).map_err(failed)?;
            return self.put(key, first);
        }
        let path = self.path(key);
        let mut upload = self.wait(key, self.engine.client.put_multipart(&path))?;
        let sent = self.put_pieces(key, file, first, &mut *input, &mut *upload);
        if sent.is_err() {
            // Nothing of it can be seen; what this cannot remove, the bucket's rule for incomplete uploads does.
            let _ = self.wait(key, upload.abort());
        }
        sent
    }

    fn put_pieces(
        &self,
        key: &str,
        file: &NewFile<'_>,
        first: Vec<u8>,
        input: &mut dyn Read,
        upload: &mut dyn MultipartUpload,
    ) -> Result<(), StoreError> {
        let failed = |error| StoreError::new(self.show(key), error);
        let (mut chunk, mut sent) = (first, 0);
        while !chunk.is_empty() {
            sent += chunk.len() as u64;
            self.wait(key, upload.put_part(PutPayload::from(chunk)))?;
            chunk = read_chunk(input).map_err(failed)?;
        }
        check_length(sent, file.bytes).map_err(failed)?;
        self.wait(key, upload.complete()).map(drop)
    }
}

impl Engine {
    fn wait<T>(&self, call: impl Future<Output = object_store::Result<T>>) -> io::Result<T> {
        let runtime = self.runtime.as_ref().ok_or_else(|| io::Error::other("the store is closed"))?;
        runtime.block_on(call).map_err(as_io)
    }
}

fn check_length(read: u64, announced: u64) -> io::Result<()> {
    match read == announced {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{read} bytes were read where {announced} were announced"),
        )),
    }
}

/// The next chunk: full, but for the last.
fn read_chunk(input: &mut dyn Read) -> io::Result<Vec<u8>> {
    let mut chunk = Vec::new();
    input.take(CHUNK_BYTES as u64).read_to_end(&mut chunk)?;
    Ok(chunk)
}

/// Keeps the kind of a failure, so that it can be named.
fn as_io(error: Error) -> io::Error {
    let kind = match &error {
        Error::NotFound { .. } => io::ErrorKind::NotFound,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => io::ErrorKind::PermissionDenied,
        _ if is_timeout(&error) => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

fn is_timeout(error: &Error) -> bool {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(this) = cause {
        let text = this.to_string();
        if text.contains("timed out") || text.contains("deadline has elapsed") {
            return true;
        }
        cause = this.source();
    }
    false
}

/// Reads an object chunk by chunk, each in a request of its own.
struct ObjectReader {
    store: S3Store,
    path: Path,
    length: u64,
    at: u64,
    chunk: Bytes,
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.chunk.is_empty() && self.at < self.length {
            let end = self.length.min(self.at + CHUNK_BYTES as u64);
            let engine = &self.store.engine;
            let chunk = engine.wait(engine.client.get_range(&self.path, self.at..end))?;
            if chunk.len() as u64 != end - self.at {
                let why = format!("{} bytes came where {} were asked for", chunk.len(), end - self.at);
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
            self.at = end;
            self.chunk = chunk;
        }
        let read = out.len().min(self.chunk.len());
        out[..read].copy_from_slice(&self.chunk.split_to(read));
        Ok(read)
    }
}

impl Store for S3Store {
    fn list(&self, directory: &str) -> Result<Vec<String>, StoreError> {
        let path = self.path(directory);
        let listed = self.wait(directory, self.engine.client.list_with_delimiter(Some(&path)))?;
        let files = listed.objects.iter().map(|object| &object.location);
        let names = listed.common_prefixes.iter().chain(files).filter_map(|path| path.filename());
        let mut names: Vec<String> = names.map(str::to_owned).collect();
        if names.len() > NAMES_MAX {
            let why = io::Error::other(format!("it has more than {NAMES_MAX} names"));
            return Err(StoreError::new(self.show(directory), why));
        }
        names.sort();
        Ok(names)
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StoreError> {
        match self.wait(key, self.engine.client.head(&self.path(key))) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(error) if error.source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(&self, key: &str) -> Result<Box<dyn Read + Send>, StoreError> {
        let path = self.path(key);
        let length = self.wait(key, self.engine.client.head(&path))?.size;
        Ok(Box::new(ObjectReader { store: self.clone(), path, length, at: 0, chunk: Bytes::new() }))
    }

    fn write_directory(&self, directory: &str, files: &[NewFile<'_>]) -> Result<(), StoreError> {
        // What makes an older state of it whole goes first.
        if let Some(last) = files.last() {
            self.remove(directory, &[last.name])?;
        }
        for file in files {
            let key = format!("{directory}/{}", file.name);
            self.put_file(&key, file)?;
            // A store that says yes and keeps something else is found out before the next file is written.
            let kept = self.length(&key)?;
            if kept != Some(file.bytes) {
                let why = format!("the store holds {kept:?} bytes of it after {} were written", file.bytes);
                return Err(StoreError::new(self.show(&key), io::Error::new(io::ErrorKind::InvalidData, why)));
            }
        }
        Ok(())
    }

    fn write(&self, key: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.put(key, bytes.to_vec())
    }

    fn remove(&self, directory: &str, names: &[&str]) -> Result<(), StoreError> {
        for name in names {
            let key = format!("{directory}/{name}");
            match self.wait(&key, self.engine.client.delete(&self.path(&key))) {
                Err(error) if error.source.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn remove_unfinished(&self, _parent: &str) -> Result<(), StoreError> {
        Ok(())
    }

    fn show(&self, key: &str) -> String {
        let (place, parameters) = self.url.split_once('?').unwrap_or((&self.url, ""));
        match parameters {
            "" => format!("{place}/{key}"),
            parameters => format!("{place}/{key}?{parameters}"),
        }
    }
}
