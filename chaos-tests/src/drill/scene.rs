//! What the rounds of one drill share: the objects that fill the pool, the load, and what is taken away at the end.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use tidepool_client::{Client, PutOptions};

use super::html;
use super::options::{DrillFault, DrillOptions, Fill};
use super::report::{print_round, report_contest, report_losses, summarise};
use crate::audit::{self, Expected};
use crate::content::{content_hash, value_of};
use crate::failover::{Judged, Quorum, fault_round};
use crate::fleet::FleetOptions;
use crate::output::{Format, Verdict};

/// Size of the objects that fill the pool before the first round.
const FILL_OBJECT_BYTES: u64 = 1 << 20;
/// How many of them one put call carries.
const FILL_BATCH: usize = 16;
/// Deadline of one such call.
const FILL_WITHIN: Duration = Duration::from_secs(20);
/// Deadline of one page of a listing.
const LIST_WITHIN: Duration = Duration::from_secs(20);
/// Keys of one page.
const LIST_KEYS: u32 = 1000;
/// Passes over the drill's own keys until none is left.
const REMOVE_PASSES: usize = 20;

/// What the rounds of one drill share.
pub(super) struct Scene<'a> {
    pub(super) fault: DrillFault,
    pub(super) options: &'a DrillOptions,
    pub(super) binary: &'a Path,
    pub(super) directory: PathBuf,
    pub(super) client: Client,
    pub(super) masters: String,
    pub(super) tenant: String,
    /// Every key of the drill starts with it.
    pub(super) prefix: String,
    pub(super) capacity_bytes: u64,
    pub(super) judged: Judged,
    pub(super) format: Format,
}

impl Scene<'_> {
    pub(super) async fn run(&self, quorum: &mut impl Quorum, filler_bytes: u64) -> Result<Verdict> {
        let filler = self.fill(filler_bytes).await?;
        let overflows = self.options.fill() == Fill::Overflow;
        let mut rounds = Vec::new();
        let mut filler_lost = 0;
        for number in 1..=self.options.rounds {
            let load = self.load(number);
            let round = fault_round(quorum, &self.client, &load, self.contenders(), self.judged).await?;
            if !overflows {
                let audit = audit::read_back(&self.client, &filler).await?;
                report_losses("objects that filled the pool", &audit);
                filler_lost += audit.lost();
                let keys: Vec<&str> = round.keys.iter().map(String::as_str).collect();
                audit::remove_all(&self.client, &keys).await?;
            }
            report_losses("acknowledged puts of this round", &round.audit);
            report_contest(&round);
            print_round(number, &round, self.format);
            rounds.push(round);
            if self.options.work_dir.is_none() {
                std::fs::remove_dir_all(&load.directory)?;
            }
        }
        if let Some(path) = &self.options.report {
            html::write(path, self.fault, self.options, &rounds, filler_lost)?;
            eprintln!("wrote {}", path.display());
        }
        Ok(summarise(self.fault, self.options, &rounds, filler_lost, self.format))
    }

    fn load(&self, number: u32) -> FleetOptions {
        FleetOptions {
            binary: self.binary.to_owned(),
            directory: self.directory.join(format!("round-{number}")),
            masters: self.masters.clone(),
            tenant: self.tenant.clone(),
            writers: self.options.writers,
            readers: self.options.readers,
            rate_per_s: self.options.rate,
            value_bytes: self.options.value_bytes(),
            prefix: format!("{}/{number}", self.prefix),
            seed: u64::from(number),
            deadline: Duration::from_secs(5),
            replica_num: self.fault.replica_num(),
            recent_bytes: self.capacity_bytes / 8,
            bulk: self.options.bulk(self.capacity_bytes, self.fault.replica_num()),
        }
    }

    /// What is restored is older than what clients saw: their answers do not fit together by right.
    fn contenders(&self) -> u32 {
        if self.fault == DrillFault::Restore { 0 } else { self.options.contenders }
    }

    /// Puts objects of 1 MiB until `bytes` are stored.
    async fn fill(&self, bytes: u64) -> Result<Vec<Expected>> {
        let mut stored = Vec::new();
        let count = (bytes / FILL_OBJECT_BYTES) as usize;
        for from in (0..count).step_by(FILL_BATCH) {
            let keys = (from..count.min(from + FILL_BATCH)).map(|at| format!("{}/fill/{at}", self.prefix));
            let mut items = Vec::new();
            for key in keys {
                let value = value_of(&key, 0, FILL_OBJECT_BYTES as usize);
                items.push(tidepool_client::PutItem::new(key.clone(), value.clone()));
                stored.push(Expected { key, hash: content_hash(&value), bytes: FILL_OBJECT_BYTES });
            }
            let put = PutOptions {
                deadline: Some(FILL_WITHIN),
                replica_num: self.fault.replica_num(),
                ..PutOptions::default()
            };
            for result in self.client.put_many(items, put).await {
                result?;
            }
        }
        Ok(stored)
    }

    /// Removes whatever is listed under the drill's prefix, until nothing is; answers how many objects went.
    pub(super) async fn remove_own_keys(&self) -> Result<u64> {
        let prefix = format!("{}/", self.prefix);
        let mut removed = 0;
        for _ in 0..REMOVE_PASSES {
            let mut found = 0;
            let mut after = bytes::Bytes::new();
            loop {
                let page = self.client.list(prefix.as_bytes(), LIST_KEYS, &after, Some(LIST_WITHIN)).await?;
                let keys: Vec<&[u8]> = page.objects.iter().map(|object| &object.key[..]).collect();
                anyhow::ensure!(
                    keys.iter().all(|key| key.starts_with(prefix.as_bytes())),
                    "the listing under '{prefix}' names keys of others"
                );
                audit::remove_all(&self.client, &keys).await?;
                found += keys.len() as u64;
                if !page.more {
                    break;
                }
                after = page.next;
            }
            removed += found;
            if found == 0 {
                return Ok(removed);
            }
        }
        bail!("keys under '{prefix}' keep appearing");
    }
}
