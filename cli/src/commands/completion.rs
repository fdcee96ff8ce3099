//! `tidepool completion SHELL`.

use clap::CommandFactory;

use crate::args::Cli;
use crate::exit::Exit;
use crate::output;

/// Prints the completion script.
pub fn run(shell: clap_complete::Shell) -> anyhow::Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "tidepool", &mut script);
    output::print(&script)?;
    Ok(Exit::Success)
}
