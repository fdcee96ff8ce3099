//! Who is there: compared first on every connection, by both ends (I1, I3).

use std::io;
use std::time::Duration;

use prost::Message;
use tidepool_proto::{ClusterId, Error, ErrorCode, History, Incarnation, NodeId, PROTOCOL_VERSION, v1};
use tokio::net::TcpStream;

use super::MAGIC;
use super::options::DataIdentity;
use super::socket::{receive_bytes, send_bytes};

/// Largest handshake message.
const MESSAGE_BYTES_MAX: usize = 4096;

/// Client side: says who we are, checks who answers.
pub(super) async fn dial(stream: &TcpStream, us: DataIdentity, stall: Duration) -> Result<DataIdentity, Error> {
    let hello = v1::DataHello { identity: Some(us.to_wire()) };
    send(stream, &hello, stall).await.map_err(|e| failed("sending the handshake", e))?;
    let welcome: v1::DataWelcome = receive(stream, stall).await?;
    if let Some(error) = welcome.error {
        return Err(error.into());
    }
    compare(us, welcome.identity.as_ref(), welcome.incarnation)
}

/// Server side: reads who dials, answers, and refuses strangers. `admit` may refuse for other reasons.
pub(super) async fn accept(
    stream: &TcpStream,
    us: DataIdentity,
    admit: Result<(), Error>,
    stall: Duration,
) -> Result<(), Error> {
    let hello: Result<v1::DataHello, Error> = receive(stream, stall).await;
    let admitted = hello.and_then(|hello| {
        admit?;
        if us.cluster == ClusterId::default() || us.history == History::default() {
            return Err(Error::new(ErrorCode::Unavailable, "this datanode has not registered yet").retry_after(200));
        }
        compare(us, hello.identity.as_ref(), 0)
    });
    let welcome = v1::DataWelcome {
        error: admitted.as_ref().err().map(|error| error.clone().into()),
        identity: Some(us.to_wire()),
        incarnation: us.incarnation.0,
    };
    let sent = send(stream, &welcome, stall).await.map_err(|e| failed("answering the handshake", e));
    admitted?;
    sent
}

fn compare(us: DataIdentity, them: Option<&v1::Identity>, incarnation: u64) -> Result<DataIdentity, Error> {
    let wrong = |what: String| Err(Error::new(ErrorCode::WrongCluster, what));
    let Some(them) = them else {
        return wrong("the peer did not say who it is".into());
    };
    if them.protocol_version.abs_diff(PROTOCOL_VERSION) > 1 {
        return wrong(format!(
            "the peer ({}) speaks protocol {}, this binary {PROTOCOL_VERSION}; upgrade the older one",
            them.build, them.protocol_version
        ));
    }
    let Ok(cluster) = <[u8; 16]>::try_from(&them.cluster_uuid[..]) else {
        return wrong(format!("the peer named a cluster of {} bytes, not 16", them.cluster_uuid.len()));
    };
    let them = DataIdentity {
        cluster: ClusterId(cluster),
        history: History(them.history),
        node: NodeId(them.node_id),
        incarnation: Incarnation(incarnation),
    };
    if them.cluster != us.cluster {
        return wrong(format!("the peer belongs to cluster {}, this process to {}", them.cluster, us.cluster));
    }
    if them.history != us.history {
        return wrong(format!("the peer lives in history {:x}, this process in {:x}", them.history.0, us.history.0));
    }
    Ok(them)
}

async fn send(stream: &TcpStream, message: &impl Message, stall: Duration) -> io::Result<()> {
    let mut out = Vec::with_capacity(8 + message.encoded_len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&(message.encoded_len() as u32).to_le_bytes());
    out.extend_from_slice(&message.encode_to_vec());
    send_bytes(stream, &out, stall).await
}

async fn receive<M: Message + Default>(stream: &TcpStream, stall: Duration) -> Result<M, Error> {
    let bad = |what: String| Error::new(ErrorCode::BadFrame, what);
    let mut head = [0u8; 8];
    receive_bytes(stream, &mut head, stall).await.map_err(|e| failed("reading the handshake", e))?;
    if head[..4] != MAGIC {
        return Err(bad(format!("the connection starts with {:02x?}, not the data plane's magic", &head[..4])));
    }
    let length = u32::from_le_bytes(head[4..].try_into().expect("4 bytes")) as usize;
    if length > MESSAGE_BYTES_MAX {
        return Err(bad(format!("handshake of {length} bytes; {MESSAGE_BYTES_MAX} are taken")));
    }
    let mut message = vec![0u8; length];
    receive_bytes(stream, &mut message, stall).await.map_err(|e| failed("reading the handshake", e))?;
    M::decode(&message[..]).map_err(|e| bad(format!("handshake does not decode: {e}")))
}

fn failed(doing: &str, error: io::Error) -> Error {
    Error::new(ErrorCode::TransferFailed, format!("{doing}: {error}"))
}
