//! Recency hints: what the leader's clients asked for, told to the standbys outside the log (M8), so that a new leader
//! evicts as well as the old one. Nothing depends on them: what does not arrive is forgotten.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tidepool_proto::v1::admin_service_client::AdminServiceClient;
use tidepool_proto::{Address, Error, v1};
use tidepool_raft::rt;
use tonic::transport::Endpoint;

use super::core::Service;
use super::evictor::Requests;
use super::tenure::Tenure;
use crate::directory::TenantId;

/// How often the leader tells.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// How long a standby may take to answer.
const ANSWER_WAIT: Duration = Duration::from_millis(500);
/// Key hashes of one message.
const KEYS_PER_MESSAGE: usize = 1 << 16;
/// Hints that one message may carry.
const HINTS_PER_MESSAGE_MAX: usize = 1 << 16;

/// A connection to another master.
#[cfg(not(feature = "sim"))]
pub type PeerChannel = tonic::transport::Channel;
/// A connection to another master, real or simulated.
#[cfg(feature = "sim")]
pub use super::sim::PeerChannel;

/// Connections to the standbys, made when they are first needed.
#[derive(Default)]
pub struct Standbys {
    channels: Mutex<HashMap<Address, PeerChannel>>,
}

impl Standbys {
    /// To one of them; connects when it is used.
    pub fn channel(&self, address: &Address) -> Option<PeerChannel> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(address) {
            return Some(channel.clone());
        }
        #[cfg(feature = "sim")]
        if let Some(channel) = super::sim::dial(address) {
            return Some(channel);
        }
        let endpoint = Endpoint::from_shared(format!("http://{address}")).ok()?;
        let channel = endpoint.connect_timeout(ANSWER_WAIT).tcp_nodelay(true).connect_lazy();
        #[cfg(feature = "sim")]
        let channel = PeerChannel::Tcp(channel);
        channels.insert(address.clone(), channel.clone());
        Some(channel)
    }
}

/// One round: what was asked for since the last one goes to every standby.
pub async fn share(service: &Arc<Service>, tenure: &Tenure) -> Result<(), Error> {
    let hints = service.evictor().take_hints();
    if hints.is_empty() {
        return Ok(());
    }
    let messages = Arc::new(messages(service, tenure.term, &hints));
    for member in service.node().status().members {
        if member.member.node_id == service.options().node_id {
            continue;
        }
        let Some(channel) = service.standbys().channel(&member.member.address) else { continue };
        let messages = messages.clone();
        rt::spawn(async move {
            let mut client = AdminServiceClient::new(channel);
            for message in messages.iter() {
                let sent = rt::timeout(ANSWER_WAIT, client.share_recency(message.clone())).await;
                if !matches!(sent, Ok(Ok(_))) {
                    return;
                }
            }
        });
    }
    Ok(())
}

fn messages(service: &Service, term: u64, hints: &Requests) -> Vec<v1::ShareRecencyRequest> {
    let identity = Some(service.identity());
    let mut messages: Vec<v1::ShareRecencyRequest> = Vec::new();
    let mut room = 0;
    for (tenant, keys) in hints.iter() {
        if keys.len() > room || messages.is_empty() {
            messages.push(v1::ShareRecencyRequest { identity: identity.clone(), term, hints: Vec::new() });
            room = KEYS_PER_MESSAGE;
        }
        room = room.saturating_sub(keys.len().max(1));
        let hint = v1::RecencyHint { tenant: tenant.0.into(), key_hashes: keys.to_vec() };
        messages.last_mut().expect("just pushed").hints.push(hint);
    }
    messages
}

/// A leader's hints, taken by a standby that knows no later term.
pub fn take(service: &Service, request: v1::ShareRecencyRequest) -> Result<(), Error> {
    service.check_identity(request.identity.as_ref())?;
    if request.term < service.term() || service.tenure().is_ok() {
        return Err(service.not_leader());
    }
    for hint in request.hints.into_iter().take(HINTS_PER_MESSAGE_MAX) {
        if let Ok(tenant) = u16::try_from(hint.tenant) {
            service.evictor().requested(TenantId(tenant), &hint.key_hashes);
        }
    }
    Ok(())
}
