//! From an address as written to sockets: names are resolved anew at every dial, so that a master that came back
//! under another IP is found without a restart (user report 15).

use std::fmt;
use std::io;
use std::net::SocketAddr;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tidepool_proto::Address;
use tokio::net::TcpStream;

/// Socket addresses tried for one name.
const ADDRESSES_PER_NAME_MAX: usize = 16;

/// Turns an address into socket addresses.
pub trait Resolve: Send + Sync + fmt::Debug + 'static {
    /// All socket addresses of a name; called once per dial, never cached here.
    fn resolve(&self, address: &Address) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>>;
}

/// The host's resolver.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, address: &Address) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let (host, port) = (address.host().to_owned(), address.port());
        Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
    }
}

/// Connects to whichever address of the name answers first.
pub(crate) async fn connect(resolver: &dyn Resolve, address: &Address) -> io::Result<TcpStream> {
    let mut addresses = resolver.resolve(address).await?;
    addresses.truncate(ADDRESSES_PER_NAME_MAX);
    let mut dials: FuturesUnordered<_> = addresses.into_iter().map(TcpStream::connect).collect();
    let mut failure = io::Error::new(io::ErrorKind::NotFound, format!("{address} resolves to no address"));
    while let Some(result) = dials.next().await {
        match result {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}
