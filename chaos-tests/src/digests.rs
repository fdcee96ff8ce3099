//! SAME-INDEX-SAME-HASH, asked over the network: the leader logs a checkpoint, every master remembers its digest there,
//! and all are asked for that index. Works under load.

use std::fmt::Display;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

use crate::admin;
use crate::cluster::POLL_EVERY;

/// State digests of all masters at one applied index.
#[derive(Clone, Debug)]
pub struct DigestComparison {
    /// The index they were compared at.
    pub applied_index: u64,
    /// One digest a master, in order.
    pub digests: Vec<Vec<u8>>,
}

impl DigestComparison {
    /// SAME-INDEX-SAME-HASH.
    pub fn is_equal(&self) -> bool {
        self.digests.windows(2).all(|pair| pair[0] == pair[1])
    }
}

/// Compares the digests of these masters; tries again until they all answer for one index.
pub async fn compare(masters: &[impl Display], within: Duration) -> Result<DigestComparison> {
    let give_up = Instant::now() + within;
    loop {
        let problem = match at_a_new_checkpoint(masters).await {
            Ok(comparison) => return Ok(comparison),
            Err(error) => format!("{error:#}"),
        };
        if Instant::now() > give_up {
            bail!("the masters' digests could not be compared within {within:?}: {problem}");
        }
        tokio::time::sleep(POLL_EVERY).await;
    }
}

async fn at_a_new_checkpoint(masters: &[impl Display]) -> Result<DigestComparison> {
    let ask_all =
        |index| async move { futures::future::join_all(masters.iter().map(|m| admin::state_digest(m, index))).await };
    let mut problem = anyhow!("no master was asked");
    let mut checkpoint = None;
    for answer in ask_all(0).await {
        match answer {
            Ok(answer) => checkpoint = Some(answer.applied_index),
            Err(error) => problem = error,
        }
    }
    let Some(applied_index) = checkpoint else { return Err(problem) };
    let answers: Result<Vec<_>> = ask_all(applied_index).await.into_iter().collect();
    let digests = answers?.into_iter().map(|a| a.digest.to_vec()).collect();
    Ok(DigestComparison { applied_index, digests })
}
