//! The fault matrix: every fault that must be survived, what must hold, which tests show it, and what their last runs found.
//!
//! Tests of this crate write a row each run ([`record`]); `chaos-tests matrix` makes the table of the book from them.

mod catalogue;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::clock::load1;
use crate::findings::Findings;
pub use catalogue::{CATALOGUE, Row};

/// What one run of a row's process test found. Appended to `fault-matrix/F1.jsonl`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// F1 to F28.
    pub id: String,
    /// Whether what must hold held; with `not_here` it was not tried.
    pub held: bool,
    /// Why it cannot run on that host; empty: it ran.
    #[serde(default)]
    pub not_here: String,
    /// Acknowledged puts that were lost.
    pub rpo_lost: u64,
    /// Acknowledged puts.
    pub acknowledged: u64,
    /// The outage of writes around the last fault.
    pub rto_write_ms: Option<f64>,
    /// The same of reads.
    pub rto_read_ms: Option<f64>,
    /// Longest call of the load.
    pub longest_call_ms: f64,
    /// What showed that the fault happened.
    pub evidence: Vec<String>,
    /// Load of the host.
    pub load1: f64,
}

/// Where runs are kept: in the build's target directory, beside the test's executable.
pub fn directory() -> Result<PathBuf> {
    let test = std::env::current_exe().context("this executable's path")?;
    let target = test.ancestors().find(|at| at.file_name().is_some_and(|name| name == "release" || name == "debug"));
    let target = target.and_then(Path::parent).context("no target directory above the executable")?;
    Ok(target.join("fault-matrix"))
}

/// Keeps what a run found.
pub fn record(id: &str, findings: &Findings) -> Result<()> {
    append(&Run {
        id: id.into(),
        held: true,
        rpo_lost: findings.lost,
        acknowledged: findings.acknowledged,
        rto_write_ms: findings.outage.rto_write_ms,
        rto_read_ms: findings.outage.rto_read_ms,
        longest_call_ms: findings.outage.longest_call_ms,
        evidence: findings.evidence.clone(),
        load1: load1(),
        ..Run::default()
    })
}

/// Keeps that a test without a load of its own held, which read back so many acknowledged objects.
pub fn record_read_back(id: &str, acknowledged: u64) -> Result<()> {
    append(&Run { id: id.into(), held: true, acknowledged, load1: load1(), ..Run::default() })
}

/// Keeps that what must hold did not, or that the run could not tell.
pub fn record_broken(id: &str) -> Result<()> {
    append(&Run { id: id.into(), load1: load1(), ..Run::default() })
}

/// Keeps that a row could not be tried on this host.
pub fn record_not_here(id: &str, why: &str) -> Result<()> {
    append(&Run { id: id.into(), not_here: why.into(), ..Run::default() })
}

/// Keeps what must never be: something acknowledged that is lost, wrong bytes, states that differ. `scripts/test` fails by it, whatever
/// comes of a second try. Answers it as an error.
pub fn never(what: String) -> anyhow::Error {
    let keep = || -> Result<()> {
        use std::io::Write;
        let directory = directory()?;
        std::fs::create_dir_all(&directory)?;
        let mut file = std::fs::File::options().create(true).append(true).open(directory.join("never"))?;
        Ok(writeln!(file, "{what}")?)
    };
    match keep() {
        Ok(()) => anyhow::anyhow!(what),
        Err(error) => anyhow::anyhow!("{what} (and that could not be kept: {error:#})"),
    }
}

fn append(run: &Run) -> Result<()> {
    use std::io::Write;
    let directory = directory()?;
    std::fs::create_dir_all(&directory).with_context(|| format!("{}", directory.display()))?;
    let path = directory.join(format!("{}.jsonl", run.id));
    let mut line = serde_json::to_vec(run)?;
    line.push(b'\n');
    let file = std::fs::File::options().create(true).append(true).open(&path);
    file.and_then(|mut file| file.write_all(&line)).with_context(|| format!("{}", path.display()))
}

fn runs(directory: &Path, id: &str) -> Result<Vec<Run>> {
    let path = directory.join(format!("{id}.jsonl"));
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
    };
    text.lines().map(|line| serde_json::from_str(line).with_context(|| format!("{}: {line}", path.display()))).collect()
}

/// The page of the book, from the runs in a directory.
pub fn page(directory: &Path) -> Result<String> {
    let mut out = String::from(
        "# The fault matrix\n\n\
         What must hold under which fault, the tests that show it, and what the runs found. Made by\n\n\
         ```sh\n\
         cargo nextest run --release -p tidepool-chaos-tests --test matrix\n\
         cargo run --release -p tidepool-chaos-tests --bin chaos-tests -- matrix > docs/reference/fault-matrix.md\n\
         ```\n\n\
         Tiers: *process* is the release binary in separate processes, with real signals, links, disks and load from separate processes; *simulated* \
         is a whole quorum on a virtual clock, network and disk; *unit* is beside the code. Figures are of the process tier: acknowledged puts \
         lost of all that were acknowledged, and the longest time after the fault until a put (a get) that was sent after it succeeded. Meanwhile \
         three processes put, replace, get and remove the same few keys, and their answers must fit together (linearizability, by the judge of \
         [the simulation](../internals/simulation.md)). Bounds of time are judged at ten times what is written here, so that a busy host \
         breaks none.\n\n\
         | fault | | must hold | tier and tests | runs | lost / acknowledged | writes back, ms | reads back, ms | verdict |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for row in CATALOGUE {
        let runs = runs(directory, row.id)?;
        let tried: Vec<&Run> = runs.iter().filter(|run| run.not_here.is_empty()).collect();
        let most = |pick: fn(&Run) -> Option<f64>| {
            tried.iter().filter_map(|run| pick(run)).reduce(f64::max).map_or("-".to_owned(), |ms| format!("{ms:.0}"))
        };
        let lost: u64 = tried.iter().map(|run| run.rpo_lost).sum();
        let acknowledged: u64 = tried.iter().map(|run| run.acknowledged).sum();
        let counted = if tried.is_empty() { "-".to_owned() } else { format!("{lost} / {acknowledged}") };
        let verdict = match (tried.is_empty(), tried.iter().all(|run| run.held), row.open) {
            (_, _, open) if !open.is_empty() => format!("in part: {open}"),
            (false, true, _) => "held".to_owned(),
            (false, false, _) => "NOT HELD".to_owned(),
            (true, ..) => match runs.last() {
                Some(run) => format!("not here: {}", run.not_here),
                None if !row.records() => "held by its tests".to_owned(),
                None => "not run".to_owned(),
            },
        };
        let mut tests = Vec::new();
        for (tier, names) in [("process", row.process), ("simulated", row.simulated), ("unit", row.unit)] {
            if !names.is_empty() {
                let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
                tests.push(format!("{tier}: {}", names.join(", ")));
            }
        }
        out.push_str(&format!(
            "| {} | {} | {} | {} | {} | {counted} | {} | {} | {verdict} |\n",
            row.id,
            row.fault,
            row.must_hold,
            tests.join("<br>"),
            tried.len(),
            most(|run| run.rto_write_ms),
            most(|run| run.rto_read_ms),
        ));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_a_row_in_order_and_somebody_who_tests_it() {
        assert_eq!(CATALOGUE.len(), 28);
        for (at, row) in CATALOGUE.iter().enumerate() {
            assert_eq!(row.id, format!("F{}", at + 1));
            assert!(!(row.process.is_empty() && row.simulated.is_empty() && row.unit.is_empty()), "{}", row.id);
        }
    }

    /// Every source of the workspace, in one text.
    fn sources() -> String {
        let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("..")];
        let mut text = String::new();
        while let Some(at) = open.pop() {
            for entry in std::fs::read_dir(at).unwrap().flatten() {
                let (path, name) = (entry.path(), entry.file_name());
                if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
                    open.push(path);
                } else if path.extension().is_some_and(|end| end == "rs") {
                    text.push_str(&std::fs::read_to_string(path).unwrap());
                }
            }
        }
        text
    }

    #[test]
    fn every_test_that_the_matrix_names_exists() {
        let sources = sources();
        for row in CATALOGUE {
            for name in row.process.iter().chain(row.simulated).chain(row.unit) {
                let name = name.split(' ').next().unwrap();
                assert!(sources.contains(&format!("fn {name}(")), "{}: there is no test {name}", row.id);
            }
        }
    }

    #[test]
    fn the_book_has_the_table_as_it_is_now() {
        let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/fault-matrix.md");
        let book = std::fs::read_to_string(book).unwrap();
        for row in CATALOGUE {
            let line = format!("| {} | {} | {} |", row.id, row.fault, row.must_hold);
            assert!(book.contains(&line), "the page of the fault matrix is to be made again: {line}");
        }
    }

    #[test]
    fn the_table_sums_up_runs() {
        let directory = tempfile::tempdir().unwrap();
        let run = |lost, ms| Run {
            id: "F1".into(),
            held: lost == 0,
            rpo_lost: lost,
            acknowledged: 10,
            rto_write_ms: Some(ms),
            ..Run::default()
        };
        let lines = [run(0, 100.0), run(0, 250.4)].map(|run| serde_json::to_string(&run).unwrap());
        std::fs::write(directory.path().join("F1.jsonl"), lines.join("\n")).unwrap();
        let text = page(directory.path()).unwrap();
        let row = text.lines().find(|line| line.starts_with("| F1 ")).unwrap();
        assert!(row.contains("| 2 | 0 / 20 | 250 | - | held |"), "{row}");
        std::fs::write(directory.path().join("F1.jsonl"), serde_json::to_string(&run(1, 1.0)).unwrap()).unwrap();
        assert!(page(directory.path()).unwrap().contains("NOT HELD"));
    }
}
