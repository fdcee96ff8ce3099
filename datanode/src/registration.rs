//! What is asked of the leader once a life: Register, Mount, and Unmount at its end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::capability::Secret;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{
    Address, ClusterId, Error, ErrorCode, History, Incarnation, LogTime, NodeId, PROTOCOL_VERSION, SegmentId, v1,
};

use crate::identity::IdentityStore;
use crate::life::Registration;
use crate::log_clock::LogClock;
use crate::masters::{Masters, status_error};
use crate::segment::Segment;

/// Heartbeat interval when the leader names none.
const HEARTBEAT_INTERVAL_DEFAULT: Duration = Duration::from_millis(100);

/// The registration that begins a life.
pub(crate) fn request(store: &IdentityStore, advertise: &Address, host_id: &str) -> v1::RegisterRequest {
    v1::RegisterRequest {
        // It claims nothing of a history: it asks for one.
        identity: Some(wire_identity(store.cluster(), History(0), NodeId(0))),
        node_uuid: bytes::Bytes::copy_from_slice(&store.node_uuid()),
        address: advertise.to_string(),
        host_id: host_id.to_owned(),
        // The retry token of this registration: one a life, so that a forgotten node never gets its old incarnation back.
        process_uuid: bytes::Bytes::copy_from_slice(&rand::random::<[u8; 16]>()),
    }
}

/// Registers with whichever master leads.
pub(crate) async fn register(
    masters: &Masters,
    request: &v1::RegisterRequest,
) -> Result<(Address, Registration, LogClock), Error> {
    let ask = masters.ask(None, |mut client| {
        let request = request.clone();
        async move {
            let response = client.register(request).await.map_err(status_error)?.into_inner();
            match response.error {
                Some(error) => Err(Error::from(error)),
                None => parse_registration(response),
            }
        }
    });
    let (leader, (registration, clock)) = ask.await?;
    Ok((leader, registration, clock))
}

/// Mounts all segments under a registration. Segments are named, so repeats are harmless.
pub(crate) async fn mount(
    masters: &Masters,
    leader: &Address,
    registration: &Registration,
    segments: &[Arc<Segment>],
) -> Result<HashMap<SegmentId, Arc<Segment>>, Error> {
    let named = segments.iter().map(|s| v1::MountSegment { name: s.name().to_owned(), bytes: s.bytes() });
    let request = v1::MountRequest {
        node_id: registration.node.0,
        incarnation: registration.incarnation.0,
        segments: named.collect(),
        identity: Some(identity_of(registration)),
    };
    let ask = masters.ask(Some(leader), |mut client| {
        let request = request.clone();
        async move {
            let response = client.mount(request).await.map_err(status_error)?.into_inner();
            // What may succeed later is asked again; what is final for this life, but not for the search, is handed through.
            let later = |error: &Error| error.code().is_retryable() && !is_forgotten(error);
            let failures = response.segments.iter().filter_map(|segment| segment.error.clone()).map(Error::from);
            match response.error.map(Error::from).or_else(|| failures.into_iter().find(later)) {
                // A stranger in the list says WRONG_CLUSTER: the search goes on, and ends when nobody else is left.
                Some(error) if error.code() == ErrorCode::WrongCluster => Err(error),
                Some(error) if is_forgotten(&error) => Ok(Err(error)),
                Some(error) => Err(error),
                None => Ok(Ok(response.segments)),
            }
        }
    });
    parse_mounts(ask.await?.1?, segments)
}

fn parse_mounts(
    answers: Vec<v1::MountedSegment>,
    segments: &[Arc<Segment>],
) -> Result<HashMap<SegmentId, Arc<Segment>>, Error> {
    if answers.len() != segments.len() {
        let what = format!("the leader answered for {} of {} segments", answers.len(), segments.len());
        return Err(Error::new(ErrorCode::Internal, what));
    }
    let mut mounted = HashMap::new();
    for (answer, segment) in answers.into_iter().zip(segments) {
        if let Some(error) = answer.error.map(Error::from) {
            return Err(Error::new(error.code(), format!("segment '{}': {}", segment.name(), error.message())));
        }
        mounted.insert(SegmentId(answer.segment_id), segment.clone());
    }
    if mounted.len() != segments.len() || mounted.contains_key(&SegmentId(0)) {
        return Err(Error::new(ErrorCode::Internal, "the leader gave two segments one id, or none"));
    }
    Ok(mounted)
}

/// Tells the leader that this node leaves. Being forgotten already is as good.
pub(crate) async fn unmount_all(
    masters: &Masters,
    leader: Option<&Address>,
    registration: &Registration,
) -> Result<Address, Error> {
    let request = v1::UnmountRequest {
        node_id: registration.node.0,
        incarnation: registration.incarnation.0,
        segment_ids: Vec::new(),
        identity: Some(identity_of(registration)),
    };
    let ask = masters.ask(leader, |mut client| {
        let request = request.clone();
        async move {
            let response = client.unmount(request).await.map_err(status_error)?.into_inner();
            match response.error.map(Error::from) {
                Some(error) if !is_forgotten(&error) => Err(error),
                _ => Ok(()),
            }
        }
    });
    Ok(ask.await?.0)
}

/// The cluster and history that the registration's ids belong to.
fn identity_of(registration: &Registration) -> v1::Identity {
    wire_identity(Some(registration.cluster), registration.history, registration.node)
}

/// As said to masters and clients.
pub(crate) fn wire_identity(cluster: Option<ClusterId>, history: History, node: NodeId) -> v1::Identity {
    v1::Identity {
        cluster_uuid: cluster.map_or_else(Default::default, |cluster| bytes::Bytes::copy_from_slice(&cluster.0)),
        history: history.0,
        node_id: node.0,
        protocol_version: PROTOCOL_VERSION,
        build: env!("CARGO_PKG_VERSION").to_owned(),
        ancestors: Vec::new(),
    }
}

/// Errors that mean "register again", here and in heartbeats.
pub(crate) fn is_forgotten(error: &Error) -> bool {
    matches!(error.code(), ErrorCode::NodeUnknown | ErrorCode::WrongCluster)
}

fn parse_registration(response: v1::RegisterResponse) -> Result<(Registration, LogClock), Error> {
    let bad = |what: &str| Error::new(ErrorCode::Internal, format!("the leader's answer to Register has {what}"));
    let identity = response.identity.ok_or_else(|| bad("no identity"))?;
    let cluster = <[u8; 16]>::try_from(&identity.cluster_uuid[..]).map_err(|_| bad("no cluster uuid"))?;
    let secret = <[u8; 32]>::try_from(&response.cluster_secret[..]).map_err(|_| bad("no secret of 32 bytes"))?;
    if identity.history == 0 || response.node_id == 0 || response.incarnation == 0 {
        return Err(bad("no history, node id or incarnation"));
    }
    let heartbeat_interval = match response.heartbeat_interval_ms {
        0 => HEARTBEAT_INTERVAL_DEFAULT,
        ms => Duration::from_millis(ms.into()),
    };
    let registration = Registration {
        cluster: ClusterId(cluster),
        history: History(identity.history),
        node: NodeId(response.node_id),
        incarnation: Incarnation(response.incarnation),
        secret: Secret(secret),
        heartbeat_interval,
    };
    Ok((registration, LogClock::new(LogTime(response.log_time_ms), BootInstant::now())))
}
