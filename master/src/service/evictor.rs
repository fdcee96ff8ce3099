//! `Evictor`: the eviction policies of all tenants, kept warm on every master.
//!
//! What became readable and what went comes from apply, on every master alike. What was asked for comes from the
//! leader's requests, and reaches the standbys as hints outside the log (M8). Both are only noted where they happen,
//! under a short lock; the policies work them off before they are asked for victims, and every few milliseconds.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::directory::{Change, TenantId};
use crate::eviction::{self, Candidate, Inserted, Policy};

/// Requests noted and not yet worked off; more are dropped, and counted.
const REQUESTS_MAX: usize = 1 << 14;
/// Keys of requests kept for the standbys between two rounds of hints; more are dropped.
const HINT_KEYS_MAX: usize = 1 << 17;

/// The keys of one request, in its order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Requested {
    /// Name space.
    pub tenant: TenantId,
    /// Hashes of tenant and key.
    pub keys: Vec<u64>,
}

#[derive(Default)]
struct Inbox {
    events: Vec<Event>,
    requests: usize,
    dropped: u64,
}

enum Event {
    Change(Change),
    Requested(Requested),
}

struct Policies {
    by_tenant: BTreeMap<TenantId, Box<dyn Policy>>,
    /// Requests for the standbys, and their keys; None: nobody is told.
    hints: Option<(Vec<Requested>, usize)>,
}

/// See the module.
pub struct Evictor {
    policy: &'static str,
    inbox: Mutex<Inbox>,
    policies: Mutex<Policies>,
}

impl Evictor {
    /// Policies of this name; None when there is none.
    pub fn new(policy: &str) -> Option<Evictor> {
        let policy = eviction::NAMES.into_iter().find(|name| *name == policy)?;
        let policies = Policies { by_tenant: BTreeMap::new(), hints: None };
        Some(Evictor { policy, inbox: Mutex::default(), policies: Mutex::new(policies) })
    }

    /// Notes what an entry changed.
    pub fn changed(&self, changes: Vec<Change>) {
        if !changes.is_empty() {
            self.inbox.lock().events.extend(changes.into_iter().map(Event::Change));
        }
    }

    /// Notes that a request named these keys.
    pub fn requested(&self, request: Requested) {
        let mut inbox = self.inbox.lock();
        if inbox.requests == REQUESTS_MAX {
            inbox.dropped += 1;
            return;
        }
        inbox.requests += 1;
        inbox.events.push(Event::Requested(request));
    }

    /// The whole state was replaced by one in which these objects are readable.
    pub fn replaced(&self, readable: Vec<Change>) {
        let mut policies = self.policies.lock();
        *self.inbox.lock() = Inbox::default();
        policies.by_tenant.clear();
        self.work_off(&mut policies, readable.into_iter().map(Event::Change));
    }

    /// Works off what was noted. Returns how many requests had been dropped.
    pub fn catch_up(&self) -> u64 {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies)
    }

    /// Starts or stops keeping requests for the standbys.
    pub fn keep_hints(&self, keep: bool) {
        self.policies.lock().hints = keep.then(Default::default);
    }

    /// Requests to tell the standbys.
    pub fn take_hints(&self) -> Vec<Requested> {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies);
        policies.hints.as_mut().map(std::mem::take).unwrap_or_default().0
    }

    /// What a tenant should give up, first to go first; see [`Policy::victims`].
    pub fn victims(
        &self,
        tenant: TenantId,
        bytes: u64,
        limit: usize,
        accept: &mut dyn FnMut(&Candidate) -> bool,
    ) -> Vec<Candidate> {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies);
        match policies.by_tenant.get_mut(&tenant) {
            Some(policy) => policy.victims(bytes, limit, accept),
            None => Vec::new(),
        }
    }

    /// Memory that the policies take.
    pub fn memory_bytes(&self) -> usize {
        self.policies.lock().by_tenant.values().map(|policy| policy.memory_bytes()).sum()
    }

    fn take_in(&self, policies: &mut Policies) -> u64 {
        let inbox = std::mem::take(&mut *self.inbox.lock());
        self.work_off(policies, inbox.events.into_iter());
        inbox.dropped
    }

    fn work_off(&self, policies: &mut Policies, events: impl Iterator<Item = Event>) {
        let Policies { by_tenant, hints } = policies;
        let make = || eviction::by_name(self.policy).expect("the name was checked");
        for event in events {
            match event {
                Event::Change(Change::Readable { tenant, key, object, bytes, group }) => {
                    let policy = by_tenant.entry(tenant).or_insert_with(make);
                    policy.inserted(Inserted { key, object, bytes, group });
                }
                Event::Change(Change::Gone { tenant, key, object }) => {
                    if let Some(policy) = by_tenant.get_mut(&tenant) {
                        policy.removed(key, object);
                    }
                }
                Event::Requested(request) => {
                    by_tenant.entry(request.tenant).or_insert_with(make).requested(&request.keys);
                    if let Some((kept, keys)) = hints
                        && *keys + request.keys.len() <= HINT_KEYS_MAX
                    {
                        *keys += request.keys.len();
                        kept.push(request);
                    }
                }
            }
        }
    }
}
