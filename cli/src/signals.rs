//! Signals of a role: the first SIGTERM or SIGINT asks it to stop in order, the second ends the process at once.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Both stop signals.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Starts listening; from here on neither signal kills the process by itself.
    pub fn listen() -> anyhow::Result<StopSignals> {
        Ok(StopSignals {
            terminate: signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?,
            interrupt: signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?,
        })
    }

    /// Waits for either; answers its name.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Runs `stop` to its end, or until a second signal.
pub async fn stop_in_order(signals: &mut StopSignals, stop: impl Future<Output = ()>) {
    tokio::select! {
        () = stop => {}
        name = signals.received() => {
            tracing::warn!("second {name}: ending at once, nothing more is handed over");
            std::process::exit(1);
        }
    }
}
