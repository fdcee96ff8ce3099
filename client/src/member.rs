//! One task per master: keeps a stream to it and asks it whether it leads, whenever nobody is known to.
//!
//! All members are dialled and asked at once, so the first that leads wins and an address that swallows packets
//! delays nobody. Streams to standbys stay open: after a failover the new leader is one round trip away.

use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::v1::{client_request, client_response};
use tidepool_proto::{Address, Error, ErrorCode, v1};
use tokio::sync::watch;

use crate::backoff::Search;
use crate::link::Link;
use crate::quorum::{Quorum, WithHistory};

/// A dial that takes longer is dropped and begun again: a lost SYN would be repeated by the kernel only after 1 s.
const DIAL_MAX: Duration = Duration::from_millis(500);
/// A member that does not answer a hello for this long is dialled anew.
const HELLO_MAX: Duration = Duration::from_millis(1000);
/// First and longest pause between hellos to a standby while a leader is known that keeps its callers waiting.
const STALL_PAUSE_MIN: Duration = Duration::from_millis(15);
const STALL_PAUSE_MAX: Duration = Duration::from_millis(60);
/// First and longest pause between dials while another member leads. Each is a quarter longer than the one before: a member that
/// restarted has its clients again when it was gone for little longer, and may be the next leader soon.
const DIAL_PAUSE_MIN: Duration = Duration::from_millis(15);
const DIAL_PAUSE_MAX: Duration = Duration::from_secs(1);

pub(crate) async fn attend(quorum: Arc<Quorum>, address: Address) {
    let mut leader = quorum.watch_leader();
    let mut named = quorum.watch_named();
    let mut search = Search::default();
    let mut pause = DIAL_PAUSE_MIN;
    loop {
        quorum.settings.metrics.dials.add(1);
        let dial = Link::dial(address.clone(), quorum.settings.resolver.clone());
        let failure = match tokio::time::timeout(DIAL_MAX, dial).await {
            Ok(Ok(link)) => {
                pause = DIAL_PAUSE_MIN;
                let reason = tokio::select! {
                    reason = converse(&quorum, &link, &mut search) => reason,
                    reason = hear_of_members(&quorum, &link) => reason,
                };
                link.close(reason);
                quorum.link_ended(&link);
                format!("the stream to master {address} ended: {reason}")
            }
            Ok(Err(error)) => error.message().to_owned(),
            Err(_) => format!("master {address} did not take a connection within {} ms", DIAL_MAX.as_millis()),
        };
        tracing::debug!(master = %address, failure, "no stream");
        quorum.note_failure(&address, Some(Error::new(ErrorCode::Unavailable, failure)));
        // With a leader, dial less and less often; once it is lost, at once and often, but not for ever.
        if leader.borrow_and_update().is_none() {
            tokio::select! {
                () = tokio::time::sleep(search.next()) => {}
                () = named_anew(&mut named, &address) => search.reset(),
            }
        } else {
            search.reset();
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 5 / 4).min(DIAL_PAUSE_MAX),
                _ = leader.wait_for(Option::is_none) => pause = DIAL_PAUSE_MIN,
            }
        }
    }
}

/// Resolves when another member names this one as the leader.
async fn named_anew(named: &mut watch::Receiver<Option<Address>>, address: &Address) {
    while named.changed().await.is_ok() {
        if named.borrow_and_update().as_ref() == Some(address) {
            return;
        }
    }
    // The quorum is gone, and with it this task.
    std::future::pending().await
}

/// Takes in what the master tells of the quorum's members, for as long as the stream lives.
async fn hear_of_members(quorum: &Arc<Quorum>, link: &Arc<Link>) -> &'static str {
    let mut told = link.watch_told();
    while told.changed().await.is_ok() {
        let members = told.borrow_and_update().clone();
        quorum.hear_of_members(link, &members);
    }
    // The sender lives in the link, which is borrowed here.
    std::future::pending().await
}

/// Keeps one stream; returns why it is over.
async fn converse(quorum: &Arc<Quorum>, link: &Arc<Link>, search: &mut Search) -> &'static str {
    const ENDED: &str = "it was closed";
    let mut leader = quorum.watch_leader();
    let mut named = quorum.watch_named();
    let mut stalls = quorum.watch_stalls();
    let mut with_history = WithHistory::Known;
    let mut ask = true;
    let mut pause = STALL_PAUSE_MIN;
    loop {
        let (leads, led) = {
            let present = leader.borrow_and_update();
            (present.as_ref().is_some_and(|l| Arc::ptr_eq(&l.link, link)), present.is_some())
        };
        if led {
            search.reset();
        } else {
            (ask, pause) = (true, STALL_PAUSE_MIN);
        }
        if !ask || leads {
            ask = tokio::select! {
                () = link.closed() => return ENDED,
                _ = leader.changed() => false,
                _ = stalls.changed() => true,
            };
            continue;
        }
        ask = false;
        let answer = tokio::select! {
            () = link.closed() => return ENDED,
            answer = tokio::time::timeout(HELLO_MAX, hello(quorum, link, with_history)) => answer,
        };
        let outcome = match answer {
            Ok(Ok((term, hello))) => quorum.offer(link, term, hello),
            Ok(Err(error)) => Err(error),
            Err(_) => return "it did not answer a hello in time",
        };
        if let Err(error) = outcome {
            quorum.follow(error.leader());
            // A master says NOT_LEADER only after it has found nothing wrong with the cluster and history that it was asked for.
            if error.code() == ErrorCode::NotLeader && with_history == WithHistory::Known {
                quorum.heard_of_known();
            }
            if error.code() == ErrorCode::WrongCluster {
                // The cluster that this one goes on in (a restore) is taken when nobody of the known one leads.
                with_history = WithHistory::Any;
            }
            let said = Error::new(error.code(), format!("{}: {}", link.address(), error.message()));
            quorum.note_failure(link.address(), Some(said));
            let wait = if led { pause } else { search.next() };
            tokio::select! {
                () = link.closed() => return ENDED,
                () = tokio::time::sleep(wait) => pause = (pause * 2).min(STALL_PAUSE_MAX),
                () = named_anew(&mut named, link.address()) => search.reset(),
            }
        } else {
            quorum.note_failure(link.address(), None);
            with_history = WithHistory::Known;
        }
    }
}

async fn hello(
    quorum: &Arc<Quorum>,
    link: &Arc<Link>,
    with_history: WithHistory,
) -> Result<(u64, v1::HelloResponse), Error> {
    let request = v1::ClientRequest {
        id: quorum.next_id(),
        remaining_ms: HELLO_MAX.as_millis() as u32,
        tenant: quorum.settings.tenant.clone(),
        body: Some(client_request::Body::Hello(quorum.hello(with_history))),
    };
    let answer = link.send(request)?.answer().await?;
    match (answer.error, answer.body) {
        (Some(error), _) => Err(error.into()),
        (None, Some(client_response::Body::Hello(hello))) => Ok((answer.term, hello)),
        (None, _) => Err(Error::new(
            ErrorCode::Internal,
            format!("master {} answered a hello with something else", link.address()),
        )),
    }
}
