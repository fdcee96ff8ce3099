//! What a drill, demo or benchmark gives back to the command line.

/// Did everything hold that had to?
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Yes.
    Held,
    /// No: exit code 1.
    Broken,
}

impl Verdict {
    /// Held when `held`.
    pub fn of(held: bool) -> Verdict {
        if held { Verdict::Held } else { Verdict::Broken }
    }
}

/// How results are printed on stdout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// For people.
    Table,
    /// One JSON object a line.
    Json,
}

/// A directory for data and logs: the caller's, kept, or a temporary one, removed at the end.
pub enum WorkDir {
    /// Given by the caller.
    Given(std::path::PathBuf),
    /// Removed with this value.
    Temporary(tempfile::TempDir),
}

impl WorkDir {
    /// The given directory, which must be empty or absent, or a fresh temporary one.
    pub fn open(given: Option<&std::path::Path>, purpose: &str) -> anyhow::Result<WorkDir> {
        use anyhow::Context;
        match given {
            Some(path) => {
                std::fs::create_dir_all(path).with_context(|| format!("work directory {}", path.display()))?;
                let mut entries = std::fs::read_dir(path)?;
                anyhow::ensure!(
                    entries.next().is_none(),
                    "work directory {} is not empty; give an empty one, or remove it",
                    path.display()
                );
                Ok(WorkDir::Given(path.to_owned()))
            }
            None => {
                let prefix = format!("tidepool-{purpose}-");
                let directory = tempfile::Builder::new().prefix(&prefix).tempdir();
                Ok(WorkDir::Temporary(directory.context("temporary work directory")?))
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &std::path::Path {
        match self {
            WorkDir::Given(path) => path,
            WorkDir::Temporary(directory) => directory.path(),
        }
    }

    /// Leaves it on disk.
    pub fn keep(self) -> std::path::PathBuf {
        match self {
            WorkDir::Given(path) => path,
            WorkDir::Temporary(directory) => directory.keep(),
        }
    }
}
