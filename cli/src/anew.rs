//! The same command again, in the same process: what a master does that has to start over from the last agreed snapshot.
//! Whoever supervises the process sees nothing of it; how often that may be is counted in the data directory.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// This binary, also after its file was replaced.
const OWN_BINARY: &str = "/proc/self/exe";

/// Replaces this process by a fresh one of the same command line. Returns only if that fails.
pub fn start() -> anyhow::Error {
    let mut words = std::env::args_os();
    let mut command = Command::new(OWN_BINARY);
    if let Some(name) = words.next() {
        command.arg0(name);
    }
    let error = command.args(words).exec();
    anyhow::Error::new(error).context("this master has to start over, and could not start itself again; start it")
}
