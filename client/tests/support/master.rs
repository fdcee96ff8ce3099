//! A master's client port. It runs in a runtime of its own, so that killing it closes its sockets at once.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::{Stream, StreamExt};
use tidepool_proto::v1;
use tidepool_proto::v1::client_service_server::{ClientService, ClientServiceServer};
use tidepool_proto::{Address, Error, ErrorCode};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

use super::directory::Directory;

pub struct FakeMaster {
    pub number: usize,
    pub address: Address,
    pub frozen: Arc<AtomicBool>,
    directory: Arc<Directory>,
    runtime: Option<tokio::runtime::Runtime>,
}

struct Service {
    number: usize,
    directory: Arc<Directory>,
    frozen: Arc<AtomicBool>,
}

type Answers = Pin<Box<dyn Stream<Item = Result<v1::ClientResponse, Status>> + Send>>;

#[tonic::async_trait]
impl ClientService for Service {
    type SessionStream = Answers;

    async fn session(&self, request: Request<Streaming<v1::ClientRequest>>) -> Result<Response<Answers>, Status> {
        let (number, directory, frozen) = (self.number, self.directory.clone(), self.frozen.clone());
        let answers = request.into_inner().filter_map(move |request| {
            let (directory, frozen) = (directory.clone(), frozen.clone());
            async move {
                match request {
                    Ok(_) if frozen.load(Ordering::Relaxed) => None,
                    Ok(request) => directory.answer(number, request).map(Ok),
                    Err(status) => Some(Err(status)),
                }
            }
        });
        Ok(Response::new(Box::pin(answers)))
    }

    async fn call(&self, request: Request<v1::ClientRequest>) -> Result<Response<v1::ClientResponse>, Status> {
        let request = request.into_inner();
        let id = request.id;
        let none = || v1::ClientResponse {
            id,
            error: Some(Error::new(ErrorCode::Unavailable, "no answer").into()),
            ..Default::default()
        };
        Ok(Response::new(self.directory.answer(self.number, request).unwrap_or_else(none)))
    }
}

impl FakeMaster {
    pub fn start(number: usize, directory: Arc<Directory>) -> FakeMaster {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::new("127.0.0.1", listener.local_addr().unwrap().port()).unwrap();
        let mut master =
            FakeMaster { number, address, frozen: Arc::new(AtomicBool::new(false)), directory, runtime: None };
        master.serve(listener);
        master.directory.with(|s| s.addresses.insert(number, master.address.to_string()));
        master
    }

    fn serve(&mut self, listener: std::net::TcpListener) {
        listener.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let service = Service { number: self.number, directory: self.directory.clone(), frozen: self.frozen.clone() };
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let service = ClientServiceServer::new(service);
            let server = tonic::transport::Server::builder().tcp_nodelay(true).add_service(service);
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        self.runtime = Some(runtime);
    }

    /// Takes requests, answers none.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// As SIGKILL: sockets close at once.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// Comes back on its old port.
    pub fn restart(&mut self) {
        let port = self.address.port();
        let listener = (0..200)
            .find_map(|_| {
                std::net::TcpListener::bind(("127.0.0.1", port))
                    .inspect_err(|_| std::thread::sleep(std::time::Duration::from_millis(10)))
                    .ok()
            })
            .expect("the old port is free again");
        self.serve(listener);
    }
}

impl Drop for FakeMaster {
    fn drop(&mut self) {
        self.kill();
    }
}
