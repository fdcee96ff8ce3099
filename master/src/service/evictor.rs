//! `Evictor`: the eviction policies of all tenants, kept warm on every master.
//!
//! What became readable and what went comes from apply, on every master alike. What was asked for comes from the
//! leader's requests, and reaches the standbys as hints outside the log (M8). Both are only noted where they happen,
//! under a short lock; the policies work them off before they are asked for victims, and every few milliseconds.
//!
//! Of lookups the policies hear only so many keys a second and tenant, in whole requests. It is several times as many as
//! can be put in a second: when more are looked up, most are found, and asked for again and again before they could be
//! evicted. Puts are always told, because their order makes chains.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use parking_lot::Mutex;
use tidepool_proto::{ObjectId, SegmentId};

use crate::directory::{Change, TenantId};
use crate::eviction::{self, Answer, Candidate, Inserted, Policy};

/// Keys of requests noted and not yet worked off; requests beyond are dropped, and counted.
const INBOX_KEYS_MAX: usize = 1 << 17;
/// Keys of requests kept for the standbys between two rounds of hints; more are dropped.
const HINT_KEYS_MAX: usize = 1 << 17;
/// Keys of lookups that are told between two rounds of work.
const HEARD_KEYS: i64 = 4_096;
/// What a tenant that asked for less may have left for a burst.
const HEARD_KEYS_SAVED_MAX: i64 = 8 * HEARD_KEYS;
/// Counts of keys to be heard; tenants share them by number.
const EARS: usize = 64;
/// Room of the inbox that is kept when a burst is over, in events and in keys.
const INBOX_KEPT: usize = 1 << 14;

/// Requests, in order, with the hashes of tenant and key that they named.
#[derive(Default)]
pub struct Requests {
    /// Whose, and how many keys.
    lengths: Vec<(TenantId, u32)>,
    keys: Vec<u64>,
}

impl Requests {
    fn push(&mut self, tenant: TenantId, keys: &[u64]) {
        if self.keys.len() + keys.len() <= HINT_KEYS_MAX {
            self.lengths.push((tenant, keys.len() as u32));
            self.keys.extend_from_slice(keys);
        }
    }

    /// Each request's tenant and keys.
    pub fn iter(&self) -> impl Iterator<Item = (TenantId, &[u64])> {
        let mut rest = &self.keys[..];
        self.lengths.iter().map(move |&(tenant, length)| {
            let (keys, after) = rest.split_at(length as usize);
            rest = after;
            (tenant, keys)
        })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }
}

#[derive(Default)]
struct Inbox {
    events: Vec<Event>,
    /// The keys of the requests among them, one after the other.
    keys: Vec<u64>,
    dropped: u64,
}

enum Event {
    Change(Change),
    Requested { tenant: TenantId, keys: u32 },
}

impl Inbox {
    /// Empties it; it keeps some of its room.
    fn clear(&mut self) {
        self.events.clear();
        self.events.shrink_to(INBOX_KEPT);
        self.keys.clear();
        self.keys.shrink_to(INBOX_KEPT);
        self.dropped = 0;
    }
}

#[derive(Default)]
struct Policies {
    by_tenant: BTreeMap<TenantId, Box<dyn Policy>>,
    /// Requests for the standbys; None: nobody is told.
    hints: Option<Requests>,
    /// An empty inbox to take the full one's place.
    spare: Inbox,
}

/// See the module.
pub struct Evictor {
    policy: &'static str,
    /// Keys of lookups still to be heard in this round.
    ears: [AtomicI64; EARS],
    unheard: AtomicU64,
    inbox: Mutex<Inbox>,
    policies: Mutex<Policies>,
    /// Where the walk through a segment goes on, by address.
    cursors: Mutex<BTreeMap<SegmentId, u64>>,
}

/// An object whose place in the order is asked for.
pub type Ranked = (TenantId, u64, ObjectId);

impl Evictor {
    /// Policies of this name; None when there is none.
    pub fn new(policy: &str) -> Option<Evictor> {
        let policy = eviction::NAMES.into_iter().find(|name| *name == policy)?;
        let policies = Policies { by_tenant: BTreeMap::new(), hints: None, spare: Inbox::default() };
        Some(Evictor {
            policy,
            ears: std::array::from_fn(|_| AtomicI64::new(HEARD_KEYS_SAVED_MAX)),
            unheard: AtomicU64::new(0),
            inbox: Mutex::default(),
            policies: Mutex::new(policies),
            cursors: Mutex::default(),
        })
    }

    /// Notes what an entry changed.
    pub fn changed(&self, changes: Vec<Change>) {
        if !changes.is_empty() {
            self.inbox.lock().events.extend(changes.into_iter().map(Event::Change));
        }
    }

    /// Whether the policies are to be told of a lookup of so many keys.
    pub fn hears(&self, tenant: TenantId, keys: usize) -> bool {
        let ear = &self.ears[usize::from(tenant.0) % EARS];
        if ear.load(Ordering::Relaxed) <= 0 {
            self.unheard.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        ear.fetch_sub(keys as i64, Ordering::Relaxed);
        true
    }

    /// Notes that a request named these keys, in this order: hashes of tenant and key.
    pub fn requested(&self, tenant: TenantId, keys: &[u64]) {
        let mut inbox = self.inbox.lock();
        if inbox.keys.len() + keys.len() > INBOX_KEYS_MAX {
            inbox.dropped += 1;
            return;
        }
        inbox.keys.extend_from_slice(keys);
        inbox.events.push(Event::Requested { tenant, keys: keys.len() as u32 });
    }

    /// The whole state was replaced by one in which these objects are readable.
    pub fn replaced(&self, readable: Vec<Change>) {
        // Made aside, and what was there goes last: nobody waits for a million records.
        let mut fresh = Policies::default();
        let events = readable.into_iter().map(Event::Change).collect();
        self.work_off(&mut fresh, &Inbox { events, ..Inbox::default() });
        let mut policies = self.policies.lock();
        let inbox = std::mem::take(&mut *self.inbox.lock());
        let before = std::mem::replace(&mut policies.by_tenant, fresh.by_tenant);
        drop(policies);
        drop((inbox, before));
    }

    /// Works off what was noted, and hears again. Returns how many requests were not told since the last time.
    pub fn catch_up(&self) -> u64 {
        for ear in &self.ears {
            let left = ear.load(Ordering::Relaxed);
            ear.store((left + HEARD_KEYS).min(HEARD_KEYS_SAVED_MAX), Ordering::Relaxed);
        }
        let mut policies = self.policies.lock();
        self.take_in(&mut policies) + self.unheard.swap(0, Ordering::Relaxed)
    }

    /// Starts or stops keeping requests for the standbys.
    pub fn keep_hints(&self, keep: bool) {
        self.policies.lock().hints = keep.then(Default::default);
    }

    /// Requests to tell the standbys.
    pub fn take_hints(&self) -> Requests {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies);
        policies.hints.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What a tenant should give up, first to go first; see [`Policy::victims`].
    pub fn victims(
        &self,
        tenant: TenantId,
        bytes: u64,
        limit: usize,
        accept: &mut dyn FnMut(&Candidate) -> Answer,
    ) -> Vec<Candidate> {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies);
        match policies.by_tenant.get_mut(&tenant) {
            Some(policy) => policy.victims(bytes, limit, accept),
            None => Vec::new(),
        }
    }

    /// What was found and did not go takes its place again. In the order in which it was found; see [`Policy::spared`].
    pub fn spared(&self, objects: &[Ranked]) {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies);
        for (tenant, key, object) in objects.iter().rev() {
            if let Some(policy) = policies.by_tenant.get_mut(tenant) {
                policy.spared(*key, *object);
            }
        }
    }

    /// Where objects stand in the order of eviction of their tenants; see [`Policy::rank`].
    pub fn ranks(&self, objects: impl Iterator<Item = Ranked>) -> Vec<Option<u64>> {
        let mut policies = self.policies.lock();
        self.take_in(&mut policies);
        let rank = |(tenant, key, object): Ranked| policies.by_tenant.get(&tenant)?.rank(key, object);
        objects.map(rank).collect()
    }

    /// Where the walk through a segment goes on; see [`Evictor::set_cursor`].
    pub fn cursor(&self, segment: SegmentId) -> u64 {
        self.cursors.lock().get(&segment).copied().unwrap_or(0)
    }

    /// Notes where it goes on; 0: from the start.
    pub fn set_cursor(&self, segment: SegmentId, address: u64) {
        let mut cursors = self.cursors.lock();
        match address {
            0 => cursors.remove(&segment),
            _ => cursors.insert(segment, address),
        };
    }

    /// Drops the policies of tenants that are no more.
    pub fn forget_tenants(&self, is_there: impl Fn(TenantId) -> bool) {
        self.policies.lock().by_tenant.retain(|&tenant, _| is_there(tenant));
    }

    /// Memory that the policies take.
    pub fn memory_bytes(&self) -> usize {
        self.policies.lock().by_tenant.values().map(|policy| policy.memory_bytes()).sum()
    }

    fn take_in(&self, policies: &mut Policies) -> u64 {
        let mut inbox = std::mem::take(&mut policies.spare);
        std::mem::swap(&mut *self.inbox.lock(), &mut inbox);
        self.work_off(policies, &inbox);
        let dropped = inbox.dropped;
        inbox.clear();
        policies.spare = inbox;
        dropped
    }

    fn work_off(&self, policies: &mut Policies, inbox: &Inbox) {
        let Policies { by_tenant, hints, .. } = policies;
        let make = || eviction::by_name(self.policy).expect("the name was checked");
        let mut rest = &inbox.keys[..];
        for event in &inbox.events {
            match *event {
                Event::Change(Change::Readable { tenant, key, object, bytes, group }) => {
                    let policy = by_tenant.entry(tenant).or_insert_with(make);
                    policy.inserted(Inserted { key, object, bytes, group });
                }
                Event::Change(Change::Gone { tenant, key, object }) => {
                    if let Some(policy) = by_tenant.get_mut(&tenant) {
                        policy.removed(key, object);
                    }
                }
                Event::Requested { tenant, keys } => {
                    let (keys, after) = rest.split_at(keys as usize);
                    rest = after;
                    by_tenant.entry(tenant).or_insert_with(make).requested(keys);
                    if let Some(hints) = hints {
                        hints.push(tenant, keys);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: TenantId = TenantId(3);

    fn readable(tenant: TenantId, key: u64) -> Change {
        Change::Readable { tenant, key, object: ObjectId(key), bytes: 1, group: None }
    }

    fn order(evictor: &Evictor) -> Vec<u64> {
        let victims = evictor.victims(TENANT, u64::MAX, 100, &mut |_| Answer::Take);
        victims.iter().map(|victim| victim.key).collect()
    }

    #[test]
    fn events_are_worked_off_in_their_order() {
        let evictor = Evictor::new("lru").expect("a policy");
        evictor.keep_hints(true);
        evictor.changed((1..=4).map(|key| readable(TENANT, key)).collect());
        evictor.requested(TENANT, &[1]);
        evictor.changed(vec![readable(TENANT, 5)]);
        evictor.requested(TENANT, &[3, 2]);
        evictor.changed(vec![Change::Gone { tenant: TENANT, key: 4, object: ObjectId(4) }]);
        assert_eq!(order(&evictor), [1, 5, 2, 3]);
        let hints = evictor.take_hints();
        assert_eq!(hints.iter().collect::<Vec<_>>(), [(TENANT, &[1][..]), (TENANT, &[3, 2][..])]);
        assert!(evictor.take_hints().is_empty());
    }

    /// Fails when lookups are told without a limit, and when a tenant's lookups are not heard because of another's.
    #[test]
    fn lookups_are_heard_in_whole_requests_at_a_bounded_rate() {
        let evictor = Evictor::new("lru").expect("a policy");
        let heard = |tenant| (0..10_000).filter(|_| evictor.hears(tenant, 32)).count() as i64;
        assert_eq!(heard(TENANT), HEARD_KEYS_SAVED_MAX / 32, "a burst");
        assert_eq!(heard(TenantId(4)), HEARD_KEYS_SAVED_MAX / 32, "another tenant has its own");
        let missed = 2 * (10_000 - HEARD_KEYS_SAVED_MAX / 32) as u64;
        assert_eq!(evictor.catch_up(), missed, "what was not heard is counted");
        assert_eq!(heard(TENANT), HEARD_KEYS / 32, "a round's share");
        assert!(!evictor.hears(TENANT, 1));
        evictor.catch_up();
        assert!(evictor.hears(TENANT, 10 * HEARD_KEYS as usize), "a large request is heard whole");
        for _ in 0..9 {
            evictor.catch_up();
            assert!(!evictor.hears(TENANT, 1), "and paid for afterwards");
        }
        evictor.catch_up();
        assert!(evictor.hears(TENANT, 1));
    }

    /// Fails when the inbox counts requests: one may name thousands of keys.
    #[test]
    fn the_inbox_is_bounded_by_keys_and_changes_are_never_dropped() {
        let evictor = Evictor::new("lru").expect("a policy");
        let keys: Vec<u64> = (0..10_000).collect();
        for _ in 0..20 {
            evictor.requested(TENANT, &keys);
        }
        evictor.changed(keys.iter().map(|&key| readable(TENANT, key)).collect());
        assert_eq!(evictor.catch_up(), 20 - (INBOX_KEYS_MAX / 10_000) as u64);
        assert_eq!(evictor.policies.lock().by_tenant[&TENANT].len(), 10_000);
        evictor.requested(TENANT, &keys);
        assert_eq!(evictor.catch_up(), 0, "there is room again");
    }

    #[test]
    fn the_policy_of_a_dropped_tenant_goes_with_it() {
        let evictor = Evictor::new("adaptive").expect("a policy");
        evictor.changed(vec![readable(TENANT, 1), readable(TenantId::DEFAULT, 2)]);
        evictor.catch_up();
        let both = evictor.memory_bytes();
        evictor.forget_tenants(|tenant| tenant != TENANT);
        assert_eq!(evictor.memory_bytes(), both / 2);
        assert!(order(&evictor).is_empty());
    }

    #[test]
    fn ranks_follow_the_order_of_eviction() {
        for policy in eviction::NAMES {
            let evictor = Evictor::new(policy).expect("a policy");
            evictor.changed((1..=5).map(|key| readable(TENANT, key)).collect());
            let asked = (1..=6).map(|key| (TENANT, key, ObjectId(key)));
            let ranks = evictor.ranks(asked.chain([(TENANT, 1, ObjectId(9)), (TenantId(4), 1, ObjectId(1))]));
            assert_eq!(ranks[5..], [None; 3], "{policy}: not resident under this id");
            let mut by_rank: Vec<u64> = (1..=5).collect();
            by_rank.sort_by_key(|&key| ranks[key as usize - 1]);
            assert_eq!(by_rank.len(), 5);
            assert!(ranks[..5].iter().all(Option::is_some), "{policy}");
        }
    }
}
