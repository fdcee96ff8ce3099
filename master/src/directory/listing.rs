//! Listings: pages of what a filter wants, in the order of (shard, hash, key).
//!
//! Under a shard's lock places are gathered, then a slice of keys at a time is copied out; the filter's test runs on the
//! copies, under no lock, however long it takes.

use super::Directory;
use super::limits::{LIST_PAGE_MAX, LIST_SCAN_MAX, SHARDS};
use super::objects::{Record, Shard, Shards};
use super::op::TenantId;
use super::view::{ListFilter, ListPage, ListedObject};

/// Objects copied out of a shard at once.
const SLICE_MIN: usize = 32;
const SLICE_MAX: usize = 1024;

/// Where a record lies in its shard, with its key's hash.
type Place = (u64, u32);

impl Directory {
    /// One page of the objects that a filter wants. A page looks at no more than `LIST_SCAN_MAX` objects and the rest of a
    /// shard. What changes while it is made is in it or not.
    pub fn list(&self, tenant: TenantId, filter: &ListFilter<'_>, after: Option<&[u8]>, limit: usize) -> ListPage {
        let limit = limit.clamp(1, LIST_PAGE_MAX);
        let mut page = ListPage::default();
        let mut scanned = 0;
        let resume = after.map(|key| (self.shards.hash(tenant, key), key));
        let first = resume.map_or(0, |(hash, _)| Shards::shard_of(hash));
        for number in first..SHARDS {
            let (places, last, held) = self.places(number, tenant, filter, resume.filter(|_| number == first));
            scanned += held;
            let mut rest = &places[..];
            while !rest.is_empty() {
                let count = rest.len().min((limit - page.objects.len()).clamp(SLICE_MIN, SLICE_MAX));
                let (slice, later) = rest.split_at(count);
                rest = later;
                for object in self.copy_out(number, tenant, filter, slice) {
                    // An upsert may have switched the key to its new value meanwhile.
                    let is_new = page.objects.last().is_none_or(|before| before.key != object.key);
                    if !is_new || filter.matches.is_some_and(|matches| !matches(&object.key)) {
                        continue;
                    }
                    page.objects.push(object);
                    if page.objects.len() == limit {
                        page.next = page.objects.last().map(|o| o.key.clone());
                        return page;
                    }
                }
            }
            // A page that resumes must get past the shard it resumes in, or it would name the same key for ever.
            let is_past = number > first || resume.is_none();
            if scanned >= LIST_SCAN_MAX && is_past && last.is_some() {
                page.next = last;
                break;
            }
        }
        page
    }

    /// Where the records of a shard lie that may be wanted, in order; the last key of the tenant's; and the records held.
    fn places(
        &self,
        number: usize,
        tenant: TenantId,
        filter: &ListFilter<'_>,
        after: Option<(u64, &[u8])>,
    ) -> (Vec<Place>, Option<Box<[u8]>>, usize) {
        let shard = self.shards.read(number);
        let mut places: Vec<Place> = Vec::new();
        let mut last: Option<(u64, &[u8])> = None;
        for (slot, record) in shard.records_by_slot().filter(|(_, record)| record.tenant == tenant) {
            let place = (self.shards.hash(tenant, &record.key), &*record.key);
            last = last.max(Some(place));
            let is_next = after.is_none_or(|after| place > after);
            if is_next && wants(filter, record) {
                places.push((place.0, slot));
            }
        }
        let key = |slot| shard.record(slot).map(|record| &record.key);
        places.sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| key(a.1).cmp(&key(b.1))));
        (places, last.map(|(_, key)| key.into()), shard.len())
    }

    /// What is at some places now, if it is listed.
    fn copy_out(
        &self,
        number: usize,
        tenant: TenantId,
        filter: &ListFilter<'_>,
        places: &[Place],
    ) -> Vec<ListedObject> {
        let topology = self.topology.read();
        let shard = self.shards.read(number);
        let listed = places.iter().filter_map(|&(hash, slot)| {
            let is_same = |r: &&Record| r.tenant == tenant && self.shards.hash(tenant, &r.key) == hash;
            let record = shard.record(slot).filter(is_same).filter(|record| wants(filter, record))?;
            let replicas = topology.listed(record);
            // An upsert's new value is under no key yet.
            let is_found = shard.find(hash, tenant, &record.key).is_some_and(|found| is_at(&shard, found, record));
            ((replicas > 0 || filter.unreadable_too) && is_found).then(|| ListedObject {
                key: record.key.clone(),
                object: record.object,
                length: record.length,
                replicas,
                data_type: record.data_type,
                hard_pinned: record.hard_pinned,
            })
        });
        listed.collect()
    }
}

/// What a filter says of a record, but for its test of the key.
fn wants(filter: &ListFilter<'_>, record: &Record) -> bool {
    record.key.starts_with(filter.prefix) && filter.data_type.is_none_or(|wanted| wanted == record.data_type)
}

fn is_at(shard: &Shard, slot: u32, record: &Record) -> bool {
    shard.record(slot).is_some_and(|found| found.object == record.object)
}
