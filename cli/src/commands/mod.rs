//! One file a command.

pub mod completion;
pub mod config;
pub mod datanode;
pub mod dev;
pub mod doctor;
pub mod drill;
pub mod explain;
pub mod feature_level;
pub mod get;
pub mod hot;
pub mod ls;
pub mod master;
pub mod member;
pub mod member_recover;
pub mod pin;
pub mod plan;
pub mod put;
pub mod rm;
pub mod snapshot;
pub mod stat;
pub mod status;
pub mod task;
pub mod tenant;
pub mod transfer_leader;

use std::time::Duration;

use tidepool_client::{Client, ClientOptions};
use tidepool_proto::Error;

use crate::config::Config;
use crate::exit::{Exit, Failed, describe};
use crate::output::Format;

/// What every client command works with.
pub struct Context {
    /// Resolved settings.
    pub config: Config,
    /// How to print.
    pub format: Format,
}

impl Context {
    /// Deadline of the whole command.
    pub fn deadline(&self) -> Duration {
        self.config.duration("deadline")
    }

    /// A connected client.
    pub async fn client(&self) -> Result<Client, Error> {
        let mut options = ClientOptions::new(self.config.addresses("masters"));
        options.tenant = self.config.text("tenant").to_owned();
        options.deadline = self.deadline();
        options.connect_deadline = self.deadline();
        Client::connect(options).await
    }
}

/// Says on stderr which item of a batch failed, and why.
pub fn report(what: &str, key: &str, error: &Error) {
    eprintln!("{what} '{key}': {}", describe(error));
}

/// A failure with the exit code of its error.
pub fn failed(what: &str, key: &str, error: &Error) -> anyhow::Error {
    let hint = format!("see: tidepool explain {}", crate::exit::code_name(error.code()));
    anyhow::Error::new(Failed {
        exit: Exit::of(error.code()),
        message: format!("{what} '{key}': {}; {hint}", describe(error)),
    })
}
