//! What is asked of the leader once a life: Register, Mount, and Unmount at its end.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::capability::Secret;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::{
    Address, ClusterId, Error, ErrorCode, History, Incarnation, LogTime, NodeId, PROTOCOL_VERSION, SegmentId, v1,
};

use parking_lot::Mutex;

use crate::identity::IdentityStore;
use crate::life::Registration;
use crate::log_clock::LogClock;
use crate::masters::{Masters, status_error};
use crate::segment::Segment;
use crate::succession::{Legacy, Lineage, Succeeded, Successor};

/// Heartbeat interval when the leader names none.
const HEARTBEAT_INTERVAL_DEFAULT: Duration = Duration::from_millis(100);

/// The registration that begins a life. `legacy`: what the life before left, when its cluster goes on in another one.
pub(crate) fn request(
    store: &IdentityStore,
    advertise: &Address,
    host_id: &str,
    legacy: Option<&Legacy>,
) -> v1::RegisterRequest {
    let cluster = legacy.map(|legacy| legacy.successor.cluster).or(store.cluster());
    // One a life, so that a forgotten node never gets its old incarnation back.
    let process_uuid = legacy.and_then(Legacy::process_uuid).unwrap_or_else(rand::random::<[u8; 16]>);
    v1::RegisterRequest {
        // It claims nothing of a history: it asks for one.
        identity: Some(wire_identity(cluster, History(0), NodeId(0))),
        node_uuid: bytes::Bytes::copy_from_slice(&store.node_uuid()),
        address: advertise.to_string(),
        host_id: host_id.to_owned(),
        process_uuid: bytes::Bytes::copy_from_slice(&process_uuid),
    }
}

/// Why nobody registered this node.
pub(crate) enum NotRegistered {
    /// The search is over.
    Refused(Error),
    /// Nobody of its cluster answers, but a leader of the one that goes on from it.
    Succeeded(Succeeded),
}

/// Registers with whichever master leads.
pub(crate) async fn register(
    masters: &Masters,
    request: &v1::RegisterRequest,
    before: &Lineage,
) -> Result<(Address, Registration, LogClock), NotRegistered> {
    let asked = request.identity.as_ref().and_then(|own| <[u8; 16]>::try_from(&own.cluster_uuid[..]).ok());
    let asked = asked.map(ClusterId);
    let successor = Mutex::new(None);
    let ask = masters.ask(None, |mut client| {
        let request = request.clone();
        let successor = &successor;
        async move {
            let response = client.register(request).await.map_err(status_error)?.into_inner();
            let Some(error) = response.error.clone().map(Error::from) else { return parse_registration(&response) };
            let (Some(own), Some(theirs)) = (asked, &response.identity) else { return Err(error) };
            if theirs.cluster_uuid.is_empty() {
                let what = format!("it belongs to no cluster yet: {}", error.message());
                return Err(Error::new(ErrorCode::Unavailable, what));
            }
            if theirs.cluster_uuid[..] == own.0 {
                return Err(error);
            }
            // A master says WRONG_CLUSTER in office only; one that is not decides nothing.
            if error.code() != ErrorCode::WrongCluster {
                return Err(Error::new(ErrorCode::Unavailable, format!("of another cluster: {}", error.message())));
            }
            if let Some(found) = Successor::of_cluster(own, theirs).or_else(|| Successor::of(before, theirs)) {
                *successor.lock() = Some(Succeeded { successor: found, error: error.clone() });
            }
            Err(error)
        }
    });
    match ask.await {
        Ok((leader, (registration, clock))) => {
            let process_uuid = request.process_uuid[..].try_into().unwrap_or_default();
            let lineage = before.and_now(registration.cluster, registration.history);
            Ok((leader, Registration { process_uuid, lineage, ..registration }, clock))
        }
        Err(error) => Err(match successor.into_inner() {
            Some(succeeded) if error.code() == ErrorCode::WrongCluster => NotRegistered::Succeeded(succeeded),
            _ => NotRegistered::Refused(error),
        }),
    }
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

fn parse_registration(response: &v1::RegisterResponse) -> Result<(Registration, LogClock), Error> {
    let bad = |what: &str| Error::new(ErrorCode::Internal, format!("the leader's answer to Register has {what}"));
    let identity = response.identity.as_ref().ok_or_else(|| bad("no identity"))?;
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
        registered_in: History(match response.registered_history {
            0 => identity.history,
            earlier => earlier,
        }),
        process_uuid: [0; 16],
        lineage: Lineage::default(),
    };
    Ok((registration, LogClock::new(LogTime(response.log_time_ms), BootInstant::now())))
}
