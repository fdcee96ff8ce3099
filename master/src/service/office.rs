//! Taking and leaving office: follows leadership, builds each term's `Tenure` and starts its background work.

use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::capability::{LOG_TIME_TOLD_BEHIND_MS, Secret};
use tidepool_proto::{Error, LogTime};
use tidepool_raft::Role;
use tidepool_raft::rt;

use super::core::{Service, unexpected};
use super::heat::Heat;
use super::level;
use super::liveness::NodeTable;
use super::options::DynamicReplication;
use super::proposer::Proposer;
use super::tenure::{LogClock, Tenure};
use super::upkeep;
use crate::directory::{Config, Op, Outcome};

/// Pause before office is tried again: a leader without a tenure answers nobody, and nothing else would wake it.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Follows leadership until the node is gone.
pub async fn follow(service: Arc<Service>) {
    let mut leadership = service.node().watch_leadership();
    loop {
        let now = leadership.borrow_and_update().clone();
        service.set_term(now.term);
        let in_office = service.tenure().ok().map(|t| t.term);
        match (now.role, in_office) {
            (Role::Leader, Some(term)) if term == now.term => {}
            (Role::Leader, _) => {
                service.set_tenure(None);
                match take_office(&service, now.term).await {
                    Ok(tenure) => {
                        tracing::info!(term = now.term, log_time_ms = tenure.log_time().0, "in office");
                        upkeep::start(&service, &tenure);
                        service.set_tenure(Some(tenure));
                    }
                    Err(error) => {
                        tracing::warn!(term = now.term, %error, "could not take office; trying again");
                        tokio::select! {
                            biased;
                            () = rt::sleep(RETRY_PAUSE) => continue,
                            changed = leadership.changed() => match changed {
                                Ok(()) => continue,
                                Err(_) => return,
                            },
                        }
                    }
                }
            }
            (_, Some(term)) => {
                tracing::info!(term, "left office");
                service.set_tenure(None);
            }
            (_, None) => {}
        }
        if leadership.changed().await.is_err() {
            service.set_tenure(None);
            return;
        }
    }
}

/// Everything acknowledged before this term is applied by now: `watch_leadership` says so only after the term's first
/// entry was applied here.
async fn take_office(service: &Arc<Service>, term: u64) -> Result<Arc<Tenure>, Error> {
    // A log without entries begins where a datanode that was told nothing yet cannot get to by itself (W2).
    let clock = LogClock::starting_at(service.directory().log_time().max(LogTime(LOG_TIME_TOLD_BEHIND_MS)));
    let (node, metrics, halt) = (service.node().clone(), service.metrics().clone(), service.halt().clone());
    let proposer = Proposer::start(node, (term, clock, service.options().election.timeout_max()), metrics, halt);
    let config = service.directory().config().config;
    if config.secret == Secret::default() {
        // The first leader of all; before it draws the secret, so that one that is cut short here leaves it to the next.
        level::raise_at_birth(service, &proposer).await;
    }
    let wanted = Config {
        lease_ttl_max_ms: service.options().lease_ttl_max.as_millis() as u64,
        put_start_discard_timeout_ms: service.options().put_start_discard_timeout.as_millis() as u64,
        objects_max: service.options().objects_max,
        granted_bytes_min: service.options().granted_bytes_min,
        hard_pinned_percent_max: service.options().hard_pinned_percent_max,
        strategy: service.options().allocation_strategy,
        secret: if config.secret == Secret::default() { draw_secret() } else { config.secret },
    };
    if wanted != config {
        match proposer.propose_one(Op::SetConfig(wanted), None).await? {
            Outcome::Done => {}
            Outcome::Refused(error) => return Err(error),
            other => return Err(unexpected("set_config", &other)),
        }
    }
    let first_index = service.directory().applied().map_or(0, |(index, _)| index);
    let config = service.directory().config();
    let lease_ttl_max_ms = config.config.lease_ttl_max_ms.max(config.lease_ttl_max_before_ms);
    let lease_ttl_max = Duration::from_millis(lease_ttl_max_ms);
    let heat = match service.options().dynamic_replication {
        DynamicReplication::Off => Heat::off(),
        DynamicReplication::Observe | DynamicReplication::Enforce => {
            Heat::of(service.options().dynamic_replication_reads)
        }
    };
    let tenure = Tenure::new(term, first_index, clock, proposer, NodeTable::new(), heat, lease_ttl_max);
    tenure.note_segments(service.directory());
    Ok(tenure)
}

fn draw_secret() -> Secret {
    let mut secret = [0; 32];
    rt::fill_random(&mut secret);
    Secret(secret)
}
