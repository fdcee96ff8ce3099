//! A client process: finds the leader, repeats what was not answered under the same token or number, moves bytes from and
//! to datanodes and verifies all it reads. It keeps the rules that the client library keeps, and logs what it saw.
//!
//! Here: how a master is asked. What is asked is in `putting`, `reading` and `removing`.

mod putting;
mod reading;
mod removing;

use std::sync::Arc;
use std::time::Duration;

use tidepool_master::FailoverReclaim;
use tidepool_proto::clock::BootInstant;
use tidepool_proto::v1::client_request::Body as Ask;
use tidepool_proto::v1::client_response::Body as Answer;
use tidepool_proto::v1::client_service_client::ClientServiceClient;
use tidepool_proto::{Error, ErrorCode, PROTOCOL_VERSION, v1};
use tidepool_raft::rt;
use tidepool_raft::sim::SplitMix;
use tidepool_raft::sim::surroundings::{SimMachine, spawn_on};
use tokio::sync::oneshot;

use crate::history::History;
use crate::keys::{Keys, tenant};
use crate::net::{Channel, Net};

/// How long one attempt may take before another master is asked.
const ATTEMPT: Duration = Duration::from_millis(250);
/// How long a call may take in all.
pub const CALL: Duration = Duration::from_millis(2_500);
/// How long bytes may take.
const TRANSFER: Duration = Duration::from_millis(800);
/// Bytes of one chunk on the wire.
const CHUNK: usize = 2_048;
/// Pause before a retry.
const PAUSE: Duration = Duration::from_millis(15);

/// One client process.
pub struct Client {
    /// Its machine, and its number in the history.
    pub machine: Arc<SimMachine>,
    net: Net,
    history: History,
    masters: Vec<String>,
    leader: usize,
    uuid: [u8; 16],
    session: u64,
    sequence: u64,
    identity: Option<v1::Identity>,
    /// The clusters and histories that it was in, the present one first.
    lineage: Vec<v1::Ancestor>,
    /// Connections of before a restore are gone; a new one begins with a hello.
    epoch: u64,
    random: SplitMix,
    stalls: u64,
    /// Removals whose first attempt is overtaken, in a thousand.
    overtaken: u64,
    /// How long the first attempt of the next call stays under way before it reaches anybody.
    first_is_late: Duration,
    replicas_max: u32,
    object_bytes_max: u64,
    /// What is special about which key.
    keys: Keys,
    /// Whose keys the present call is about.
    tenant: &'static str,
    /// Whether a reader may blame bytes that do not verify on a flipped bit.
    pub bits_flip: bool,
    /// Whether its clock goes as all others do; otherwise its leases may end before it knows.
    clocks_agree: bool,
    /// Whether a new leader may break leases of the one before.
    leases_may_break: bool,
    /// Whether it stays with a master that does not answer, until that one refuses.
    pub stays: bool,
}

/// A call that failed, and whether it may take effect all the same.
struct Failed {
    error: Error,
    is_open: bool,
}

impl Client {
    /// A process that knows these masters.
    pub fn new(
        machine: Arc<SimMachine>,
        net: Net,
        history: History,
        masters: Vec<String>,
        params: &crate::params::Params,
    ) -> Client {
        let mut random = SplitMix::new(params.seed ^ machine.id << 32);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&random.number().to_le_bytes());
        uuid[8..].copy_from_slice(&machine.id.to_le_bytes());
        Client {
            machine,
            net,
            history,
            leader: random.below(masters.len() as u64) as usize,
            masters,
            uuid,
            session: 0,
            sequence: 1,
            identity: None,
            lineage: Vec::new(),
            epoch: 0,
            random,
            stalls: params.stalls,
            overtaken: params.overtaken,
            first_is_late: Duration::ZERO,
            replicas_max: params.replicas_max,
            object_bytes_max: params.object_bytes_max,
            keys: params.special,
            tenant: "",
            bits_flip: false,
            clocks_agree: params.clocks_agree(),
            leases_may_break: params.reclaim == FailoverReclaim::Allow,
            stays: false,
        }
    }

    /// From here on its transfers do not stall, and nothing it sends overtakes itself.
    pub fn calm(&mut self) {
        (self.stalls, self.overtaken) = (0, 0);
    }

    fn channel(&self, address: &str) -> Channel {
        Channel { net: self.net.clone(), from: self.machine.id, address: address.to_owned() }
    }

    /// One attempt, which is under way for `late` and longer. What was sent arrives, also when nobody waits any more.
    async fn attempt(
        &self,
        request: v1::ClientRequest,
        late: Duration,
    ) -> Option<Result<v1::ClientResponse, tonic::Status>> {
        let channel = self.channel(&self.masters[self.leader]);
        let epoch = self.net.epoch();
        let (done, answer) = oneshot::channel();
        spawn_on(&self.machine, async move {
            if !late.is_zero() {
                rt::sleep(late).await;
            }
            // It was sent on a connection to masters that are gone: nothing brings it to those that came after them.
            if channel.net.epoch() != epoch {
                return;
            }
            // Nobody may wait for it any more.
            let _late = done.send(ClientServiceClient::new(channel).call(request).await.map(|r| r.into_inner()));
        });
        rt::timeout(ATTEMPT, answer).await.ok()?.ok()
    }

    /// Asks until somebody who leads answers.
    async fn ask(&mut self, body: Ask, deadline: BootInstant) -> Result<Answer, Failed> {
        let mut is_open = false;
        let mut late = std::mem::take(&mut self.first_is_late);
        loop {
            let is_hello = matches!(body, Ask::Hello(_));
            if self.epoch != self.net.epoch() && !is_hello {
                let before = self.history_number();
                let epoch = self.net.epoch();
                if Box::pin(self.hello(deadline)).await {
                    self.epoch = epoch;
                }
                // What names ids or numbers of one history means something else in another one, if it is another one.
                if self.history_number() != before && !matches!(body, Ask::Exist(_) | Ask::Locate(_) | Ask::List(_)) {
                    let error = Error::new(ErrorCode::WrongCluster, "the cluster goes on in another history");
                    return Err(Failed { error, is_open: true });
                }
            }
            let left = deadline - BootInstant::now();
            if left.is_zero() {
                let error = Error::new(ErrorCode::DeadlineExceeded, "nobody answered in time");
                return Err(Failed { error, is_open });
            }
            let request = v1::ClientRequest {
                id: self.random.number(),
                remaining_ms: left.as_millis().max(1) as u32,
                tenant: self.tenant.to_owned(),
                body: Some(body.clone()),
            };
            let error = match self.attempt(request, std::mem::take(&mut late)).await {
                Some(Ok(response)) => match (response.body, response.error) {
                    (Some(answer), None) => return Ok(answer),
                    (_, error) => error.map_or_else(|| Error::new(ErrorCode::Internal, "no answer"), Error::from),
                },
                // It may be there, and its answer lost.
                unanswered @ (Some(Err(_)) | None) => {
                    is_open = true;
                    if unanswered.is_some() || !self.stays {
                        self.leader = (self.leader + 1) % self.masters.len();
                    }
                    rt::sleep(PAUSE).await;
                    continue;
                }
            };
            match error.code() {
                ErrorCode::NotLeader => {
                    let hint = error.leader().and_then(|hint| self.masters.iter().position(|m| *m == hint.address));
                    self.leader = hint.unwrap_or((self.leader + 1) % self.masters.len());
                    // A leader that was deposed answers so to what it had proposed.
                    is_open = true;
                }
                ErrorCode::Unavailable | ErrorCode::ResourceExhausted => is_open = true,
                ErrorCode::DeadlineExceeded => is_open = true,
                _ => return Err(Failed { error, is_open }),
            }
            rt::sleep(PAUSE).await;
        }
    }

    /// Says hello until somebody who leads answers.
    pub async fn hello(&mut self, deadline: BootInstant) -> bool {
        let hello = v1::HelloRequest {
            identity: Some(v1::Identity { protocol_version: PROTOCOL_VERSION, ..Default::default() }),
            client_uuid: self.uuid.to_vec().into(),
            host_id: format!("client-{}", self.machine.id),
            lineage: self.lineage.clone(),
        };
        match self.ask(Ask::Hello(hello), deadline).await {
            Ok(Answer::Hello(answer)) => {
                self.session = answer.session_id;
                if let Some(identity) = &answer.identity {
                    let (cluster_uuid, history) = (identity.cluster_uuid.clone(), identity.history);
                    let now = v1::Ancestor { cluster_uuid, history };
                    if self.lineage.first() != Some(&now) {
                        self.lineage.insert(0, now);
                    }
                }
                self.identity = answer.identity;
                true
            }
            _ => false,
        }
    }

    /// The number of the history that it knows; 0: none.
    fn history_number(&self) -> u64 {
        self.identity.as_ref().map_or(0, |identity| identity.history)
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    /// A call about a key begins.
    fn about(&mut self, key: u64) {
        self.tenant = tenant(self.keys, key);
    }
}
