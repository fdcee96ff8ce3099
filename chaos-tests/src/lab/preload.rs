//! Faults that no namespace can cause: a library preloaded into one role, and the page of knobs that it obeys.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::tools::compile;

const SOURCE: &str = include_str!("faults.c");
const KNOBS: usize = 9;

/// What can be set, and what is counted; the order of `faults.c`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Knob {
    /// Microseconds that every fsync takes longer.
    SyncDelayUs = 0,
    /// The error every fsync ends with.
    SyncError,
    /// The error every write ends with.
    WriteError,
    /// 1: half of the next write happens, then the process is gone.
    TearWrite,
    /// How far the wall clock is off.
    WallOffsetMs,
    /// Counted: fsyncs that were delayed or failed.
    SyncHits,
    /// Counted: writes that failed or were torn.
    WriteHits,
    /// Counted: readings of the wrong wall clock.
    ClockHits,
    /// 1: fsync says that it did, and did not.
    SyncLies,
}

/// The knobs of one role.
#[derive(Debug)]
pub struct Preload {
    page: File,
    /// What its process must have in its environment.
    pub environment: Vec<(String, String)>,
}

impl Preload {
    /// Builds the library beside `page` on first use; `page` is created, files under `data_dir` are concerned.
    pub fn create(page: &Path, data_dir: &Path) -> Result<Preload> {
        let beside = page.parent().context("a page of faults has a directory")?;
        let library = compile(beside, "faults.so", SOURCE, &["-shared", "-fPIC"])?;
        let file = File::options().create(true).truncate(true).read(true).write(true).open(page);
        let file = file.with_context(|| format!("page of faults {}", page.display()))?;
        file.set_len((KNOBS * 8) as u64)?;
        let environment = [
            ("LD_PRELOAD", library.display().to_string()),
            ("TIDEPOOL_FAULTS", page.display().to_string()),
            ("TIDEPOOL_FAULTS_UNDER", data_dir.display().to_string()),
        ];
        let environment = environment.map(|(name, value)| (name.to_owned(), value)).to_vec();
        Ok(Preload { page: file, environment })
    }

    /// Sets one; at once.
    pub fn set(&self, knob: Knob, value: i64) -> Result<()> {
        self.page.write_all_at(&value.to_ne_bytes(), knob as u64 * 8).context("page of faults")
    }

    /// Reads one.
    pub fn get(&self, knob: Knob) -> Result<i64> {
        let mut value = [0; 8];
        self.page.read_exact_at(&mut value, knob as u64 * 8).context("page of faults")?;
        Ok(i64::from_ne_bytes(value))
    }
}
