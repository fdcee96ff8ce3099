//! Finding the leader among the masters: every member is asked at the same time, each at its own pace, so that a black-holed address
//! costs nothing but its own attempts.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use tidepool_proto::v1::node_service_client::NodeServiceClient;
use tidepool_proto::{Address, Error, ErrorCode};
use tonic::transport::{Channel, Endpoint};

use crate::options::MasterTiming;

/// Members asked in one search: those configured, and those that leader hints add.
pub(crate) const MEMBERS_MAX: usize = 32;
/// Members kept of those that the leader tells.
const LEARNED_MAX: usize = 32;
/// Longest pause before a member that answered NOT_LEADER is asked again: elections take less.
const NOT_LEADER_PAUSE_MAX: Duration = Duration::from_millis(250);
/// A unary call to a master that is reachable; the leader commits it within this or not soon.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// How long nobody of the known cluster has said anything before silent members count as strangers: longer than a moment in which one
/// cannot be reached.
const KNOWN_SILENCE_MIN: Duration = Duration::from_secs(3);
/// How often a search that goes on says so.
const TELL_EVERY: Duration = Duration::from_secs(5);

pub(crate) type Client = NodeServiceClient<Channel>;

/// The quorum's members.
#[derive(Clone, Debug)]
pub(crate) struct Masters {
    members: Vec<Address>,
    /// The quorum as its leader last told: those that were configured may all have been replaced since.
    learned: Arc<Mutex<Vec<Address>>>,
    timing: MasterTiming,
}

/// One member during a search.
struct Member {
    address: Address,
    client: Option<Client>,
    pause: Duration,
}

impl Masters {
    pub(crate) fn new(members: Vec<Address>, timing: MasterTiming) -> Masters {
        Masters { members, learned: Arc::default(), timing }
    }

    /// Takes in who belongs to the quorum.
    pub(crate) fn learn(&self, told: &[String]) {
        let mut learned = self.learned.lock();
        if !told.is_empty() && learned.iter().map(Address::to_string).ne(told.iter().cloned()) {
            *learned = told.iter().filter_map(|address| address.parse().ok()).take(LEARNED_MAX).collect();
            tracing::info!(masters = told.join(","), "the quorum's members");
        }
    }

    /// Asks all members, `first` foremost, until one gives an answer, following leader hints. Returns an error only if it is final:
    /// FENCED or INVALID_PARAMS from any, or WRONG_CLUSTER from every member that says anything while
    /// no other was heard for [`KNOWN_SILENCE_MIN`]. Otherwise it goes on for ever: the caller bounds it.
    pub(crate) async fn ask<T, F>(
        &self,
        first: Option<&Address>,
        call: impl Fn(Client) -> F,
    ) -> Result<(Address, T), Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let call = &call;
        let mut attempts: FuturesUnordered<_> = FuturesUnordered::new();
        let (started, mut told) = (Instant::now(), 0);
        let mut silent_since = started;
        // What each member said last: None is still to answer.
        let mut said: BTreeMap<Address, Option<ErrorCode>> = BTreeMap::new();
        let learned = self.learned.lock().clone();
        for address in first.into_iter().chain(&self.members).chain(&learned) {
            if said.insert(address.clone(), None).is_none() {
                attempts.push(self.attempt(self.member(address.clone()), Duration::ZERO, call));
            }
        }
        loop {
            let Some((mut member, result)) = attempts.next().await else {
                return Err(Error::new(ErrorCode::InvalidParams, "no master is configured"));
            };
            let error = match result {
                Ok(answer) => return Ok((member.address, answer)),
                Err(error) => error,
            };
            tracing::debug!(master = %member.address, %error, "master gave no answer");
            said.insert(member.address.clone(), Some(error.code()));
            if error.code() != ErrorCode::WrongCluster && !is_silence(error.code()) {
                silent_since = Instant::now();
            }
            let is_final = match error.code() {
                ErrorCode::Fenced | ErrorCode::InvalidParams => true,
                ErrorCode::WrongCluster => all_are_strangers(&said, silent_since.elapsed()),
                _ => false,
            };
            if is_final {
                return Err(Error::new(error.code(), format!("master {}: {}", member.address, error.message())));
            }
            let periods = started.elapsed().as_secs() / TELL_EVERY.as_secs();
            if periods > told {
                told = periods;
                tracing::warn!(
                    seconds = started.elapsed().as_secs(),
                    last_master = %member.address,
                    last_error = %error,
                    "no master answers as the leader; trying on"
                );
            }
            let hint = error.leader().and_then(|hint| hint.address.parse::<Address>().ok());
            if let Some(hint) = hint.filter(|hint| !said.contains_key(hint) && said.len() < MEMBERS_MAX) {
                said.insert(hint.clone(), None);
                attempts.push(self.attempt(self.member(hint), Duration::ZERO, call));
            }
            let longest =
                if error.code() == ErrorCode::NotLeader { NOT_LEADER_PAUSE_MAX } else { self.timing.retry_max };
            let pause = member.pause.min(longest);
            member.pause = (member.pause * 2).min(self.timing.retry_max);
            attempts.push(self.attempt(member, jittered(pause), call));
        }
    }

    fn member(&self, address: Address) -> Member {
        Member { address, client: None, pause: self.timing.retry_min }
    }

    /// One try at one member, which keeps its connection for the next.
    async fn attempt<T, F>(
        &self,
        mut member: Member,
        pause: Duration,
        call: &impl Fn(Client) -> F,
    ) -> (Member, Result<T, Error>)
    where
        F: Future<Output = Result<T, Error>>,
    {
        tokio::time::sleep(pause).await;
        let result = self.call_member(&mut member, call).await;
        // A broken or silent connection is dialled afresh: the name may mean another host by now.
        if result
            .as_ref()
            .err()
            .is_some_and(|e| matches!(e.code(), ErrorCode::Unavailable | ErrorCode::DeadlineExceeded))
        {
            member.client = None;
        }
        (member, result)
    }

    async fn call_member<T, F>(&self, member: &mut Member, call: &impl Fn(Client) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let client = match &member.client {
            Some(client) => client.clone(),
            None => dial(&member.address, self.timing.dial_timeout).await?,
        };
        member.client = Some(client.clone());
        tokio::time::timeout(CALL_TIMEOUT, call(client)).await.unwrap_or_else(|_| {
            let ms = CALL_TIMEOUT.as_millis();
            Err(Error::new(ErrorCode::DeadlineExceeded, format!("master {} did not answer in {ms} ms", member.address)))
        })
    }
}

/// Whether nobody is left who could be of the known cluster. One that cannot be reached now may be, unless all have been silent for
/// this long.
fn all_are_strangers(said: &BTreeMap<Address, Option<ErrorCode>>, silent: Duration) -> bool {
    let is_long = silent >= KNOWN_SILENCE_MIN;
    let is_stranger = |code: ErrorCode| code == ErrorCode::WrongCluster || is_long && is_silence(code);
    said.values().all(|said| said.is_some_and(is_stranger))
}

fn is_silence(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::Unavailable | ErrorCode::DeadlineExceeded)
}

/// Up to a quarter more or less, so that datanodes do not return in step.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.75..1.25))
}

fn dial(address: &Address, timeout: Duration) -> BoxFuture<'_, Result<Client, Error>> {
    Box::pin(async move {
        let failed = |what: String| Error::new(ErrorCode::Unavailable, format!("master {address}: {what}"));
        let endpoint = Endpoint::from_shared(address.to_uri())
            .map_err(|e| failed(e.to_string()))?
            .connect_timeout(timeout)
            .tcp_nodelay(true)
            .user_agent("tidepool-datanode")
            .map_err(|e| failed(e.to_string()))?;
        match tokio::time::timeout(timeout, endpoint.connect()).await {
            Ok(Ok(channel)) => Ok(NodeServiceClient::new(channel)),
            Ok(Err(error)) => Err(failed(format!("cannot connect: {}", root_cause(&error)))),
            Err(_) => Err(failed(format!("no connection within {} ms", timeout.as_millis()))),
        }
    })
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// A gRPC failure as one of ours: the peer's process is not there, or not a master.
pub(crate) fn status_error(status: tonic::Status) -> Error {
    let code = match status.code() {
        tonic::Code::Unimplemented => ErrorCode::NotSupported,
        tonic::Code::DeadlineExceeded => ErrorCode::DeadlineExceeded,
        tonic::Code::ResourceExhausted => ErrorCode::ResourceExhausted,
        _ => ErrorCode::Unavailable,
    };
    Error::new(code, format!("{:?}: {}", status.code(), status.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails when silence counts at once (tried).
    #[test]
    fn silent_members_count_as_strangers_only_after_a_while() {
        let said = |codes: &[Option<ErrorCode>]| -> BTreeMap<Address, Option<ErrorCode>> {
            let address = |port: usize| Address::new("127.0.0.1", 1 + port as u16).unwrap();
            codes.iter().enumerate().map(|(port, code)| (address(port), *code)).collect()
        };
        let (stranger, silent) = (Some(ErrorCode::WrongCluster), Some(ErrorCode::Unavailable));
        assert!(all_are_strangers(&said(&[stranger, stranger]), Duration::ZERO));
        assert!(!all_are_strangers(&said(&[stranger, silent]), Duration::ZERO), "one sample");
        assert!(all_are_strangers(&said(&[stranger, silent]), KNOWN_SILENCE_MIN));
        for other in [None, Some(ErrorCode::NotLeader)] {
            assert!(!all_are_strangers(&said(&[stranger, other]), KNOWN_SILENCE_MIN), "{other:?}");
        }
    }
}
