//! Commands that the laboratory is made with, and the two little C programs that it needs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};

/// Runs a program to its end; its error output is part of the failure.
pub(super) fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("running {program}; scripts/setup installs it"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} {} failed ({}): {}", arguments.join(" "), output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The same with text on its standard input.
pub(super) fn run_with(program: &str, arguments: &[&str], input: &str) -> Result<String> {
    use std::io::Write;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("running {program}; scripts/setup installs it"))?;
    let mut pipe = child.stdin.take().ok_or_else(|| anyhow!("{program} has no standard input"))?;
    pipe.write_all(input.as_bytes()).with_context(|| format!("writing to {program}"))?;
    drop(pipe);
    let output = child.wait_with_output().with_context(|| format!("waiting for {program}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{program} failed ({}): {} on input:\n{input}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Compiles a C program into a directory, if it is not there yet.
pub(super) fn compile(directory: &Path, name: &str, source: &str, arguments: &[&str]) -> Result<PathBuf> {
    static ONE_AT_A_TIME: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _one = ONE_AT_A_TIME.lock();
    let target = directory.join(name);
    if !target.exists() {
        let text = target.to_str().ok_or_else(|| anyhow!("{} is not UTF-8", target.display()))?;
        let all: Vec<&str> = [arguments, &["-O1", "-x", "c", "-o", text, "-"]].concat();
        run_with("cc", &all, source)?;
    }
    Ok(target)
}
