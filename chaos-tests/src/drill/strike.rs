//! How the leader of a live quorum is made to go, and how one sees that it went.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use tidepool_proto::v1::StatusRequest;

use super::live::LiveMember;
use super::options::{DrillFault, LiveOptions};
use crate::admin;
use crate::clock::monotonic_ns;
use crate::cluster::POLL_EVERY;
use crate::process::Fault;

/// How long a command of the operator's may run.
const COMMAND_WITHIN: Duration = Duration::from_secs(60);
/// How long a master may still answer after the command that kills it.
const GONE_WITHIN: Duration = Duration::from_secs(15);
/// How long the operator may take to kill a master by hand; the load goes on meanwhile.
const MANUAL_WITHIN: Duration = Duration::from_secs(120);
/// Pause between two questions to a master that is about to go: the precision of the fault's instant.
const WATCH_EVERY: Duration = Duration::from_millis(5);

/// What ends a reign.
#[derive(Clone, Debug)]
enum Means {
    /// A signal to the process that this file names.
    PidFile(String),
    /// A shell command.
    Command(String),
    /// The operator.
    Manual,
    /// The leader itself, asked to hand over.
    Transfer,
}

/// How the leader goes, and how it comes back.
#[derive(Clone, Debug)]
pub(super) struct Strike {
    means: Means,
    restart: Option<String>,
    /// Stopped, not killed: it wakes up as it was.
    pause: bool,
}

impl Strike {
    pub(super) fn of(fault: DrillFault, options: &LiveOptions) -> Result<Strike> {
        let restart = options.restart_command.clone();
        let pause = fault == DrillFault::PauseLeader;
        if fault == DrillFault::Transfer {
            if options.pid_file.is_some() || options.kill_command.is_some() || options.kill.is_some() {
                bail!("drill transfer kills nobody: leave --kill, --kill-command and --pid-file out");
            }
            if restart.is_some() {
                bail!("drill transfer kills nobody: leave --restart-command out");
            }
            return Ok(Strike { means: Means::Transfer, restart, pause });
        }
        let means = match (&options.pid_file, &options.kill_command, options.kill) {
            (Some(path), ..) => Means::PidFile(path.clone()),
            (None, Some(command), _) => Means::Command(command.clone()),
            (None, None, Some(_)) => Means::Manual,
            (None, None, None) => bail!(
                "say how the leader is struck: --kill-command 'ssh {{host}} systemctl kill -s KILL tidepool-master', --pid-file \
                 PATH, or --kill manual; drill transfer hands over instead, --spawn drills a pool of its own"
            ),
        };
        if pause && restart.is_none() && !matches!(means, Means::PidFile(_)) {
            bail!(
                "say how the stopped leader is woken: --restart-command 'ssh {{host}} systemctl kill -s CONT tidepool-master'; \
                 with --pid-file the drill does it"
            );
        }
        Ok(Strike { means, restart, pause })
    }

    pub(super) fn describe(&self) -> String {
        match &self.means {
            Means::PidFile(path) => format!("{} to the process that {path} names", self.signal_name()),
            Means::Command(command) => format!("by running: {command}"),
            Means::Manual => format!("say which master to strike, and wait {MANUAL_WITHIN:?} for you to do it"),
            Means::Transfer => "ask it to hand over to its best standby".to_owned(),
        }
    }

    fn signal_name(&self) -> &'static str {
        if self.pause { "SIGSTOP" } else { "SIGKILL" }
    }

    pub(super) fn describe_return(&self) -> String {
        match (&self.means, &self.restart) {
            (Means::Transfer, _) => "wait until it follows the new leader".to_owned(),
            (Means::PidFile(_), None) if self.pause => "wake it by SIGCONT".to_owned(),
            (_, Some(command)) => format!("start it again by running: {command}"),
            (_, None) => "wait until something else has started it again".to_owned(),
        }
    }

    /// Ends the reign of `leader` in `term`; returns once that is certain.
    pub(super) async fn end(&self, leader: &LiveMember, term: u64) -> Result<Fault> {
        let connection = admin::connect(&leader.address).await?;
        let limit = if matches!(self.means, Means::Manual) { MANUAL_WITHIN } else { COMMAND_WITHIN + GONE_WITHIN };
        let since_ns = monotonic_ns();
        let (known, seen) = tokio::try_join!(self.act(leader), watch(connection, leader, term, since_ns, limit))?;
        Ok(known.unwrap_or(seen))
    }

    /// Does it. Answers when, where that is known better than by watching.
    async fn act(&self, leader: &LiveMember) -> Result<Option<Fault>> {
        match &self.means {
            Means::PidFile(path) if self.pause => stop_by_file(&leader.fill_in(path)).await.map(Some),
            Means::PidFile(path) => kill_by_file(&leader.fill_in(path)).await.map(Some),
            Means::Command(command) => run(&leader.fill_in(command)).await.map(|()| None),
            Means::Manual => {
                eprintln!(">>> strike {leader} now ({} to its process); waiting {MANUAL_WITHIN:?}", self.signal_name());
                Ok(None)
            }
            Means::Transfer => {
                let at_ns = monotonic_ns();
                admin::transfer_leader(&leader.address, 0).await?;
                Ok(Some(Fault { at_ns, certain_ns: monotonic_ns() }))
            }
        }
    }

    /// Has the master started again, where that is the drill's business.
    pub(super) async fn start_again(&self, member: &LiveMember) -> Result<()> {
        match (&self.means, &self.restart) {
            (Means::Transfer, _) => Ok(()),
            (Means::PidFile(path), None) if self.pause => wake_by_file(&member.fill_in(path)),
            (_, Some(command)) => run(&member.fill_in(command)).await,
            (_, None) => {
                eprintln!(">>> waiting until {member} runs again");
                Ok(())
            }
        }
    }
}

/// Asks the leader until it no longer answers as the leader of `term`. The fault's instant is that of the last question
/// it answered: the process lived then, so no outage is told shorter than it was by more than one question and answer.
async fn watch(
    mut connection: tidepool_proto::v1::admin_service_client::AdminServiceClient<tonic::transport::Channel>,
    leader: &LiveMember,
    term: u64,
    since_ns: u64,
    within: Duration,
) -> Result<Fault> {
    let give_up = Instant::now() + within;
    let mut alive_ns = since_ns;
    loop {
        let asked_ns = monotonic_ns();
        let answer = tokio::time::timeout(admin::CALL_WITHIN, connection.status(StatusRequest {})).await;
        match answer.map(|answer| answer.map(tonic::Response::into_inner)) {
            Ok(Ok(status)) if status.role == "leader" && status.term == term => alive_ns = asked_ns,
            _ => return Ok(Fault { at_ns: alive_ns, certain_ns: monotonic_ns() }),
        }
        if Instant::now() > give_up {
            bail!("{leader} still leads {within:?} after it should have gone");
        }
        tokio::time::sleep(WATCH_EVERY).await;
    }
}

/// Runs a shell command of the operator's; its output goes to stderr.
async fn run(command: &str) -> Result<()> {
    eprintln!("running: {command}");
    let mut child = tokio::process::Command::new("sh");
    child.args(["-c", command]).stdin(std::process::Stdio::null()).stdout(std::io::stderr()).kill_on_drop(true);
    let status = tokio::time::timeout(COMMAND_WITHIN, child.status()).await;
    let status = status.map_err(|_| anyhow!("'{command}' did not end within {COMMAND_WITHIN:?}"))?;
    let status = status.with_context(|| format!("running '{command}'"))?;
    if !status.success() {
        bail!("'{command}' failed ({status})");
    }
    Ok(())
}

/// SIGKILL to the master whose process id a file has, and waits until it is gone.
async fn kill_by_file(path: &str) -> Result<Fault> {
    let (pid, raw) = master_of(path)?;
    let at_ns = monotonic_ns();
    kill_process(pid, Signal::KILL).with_context(|| format!("SIGKILL to process {raw}"))?;
    wait_until(raw, |state| matches!(state, None | Some('Z' | 'X'))).await?;
    Ok(Fault { at_ns, certain_ns: monotonic_ns() })
}

/// SIGSTOP to it, and waits until it is stopped.
async fn stop_by_file(path: &str) -> Result<Fault> {
    let (pid, raw) = master_of(path)?;
    let at_ns = monotonic_ns();
    kill_process(pid, Signal::STOP).with_context(|| format!("SIGSTOP to process {raw}"))?;
    wait_until(raw, |state| state == Some('T')).await?;
    Ok(Fault { at_ns, certain_ns: monotonic_ns() })
}

/// SIGCONT to it.
fn wake_by_file(path: &str) -> Result<()> {
    let (pid, raw) = master_of(path)?;
    kill_process(pid, Signal::CONT).with_context(|| format!("SIGCONT to process {raw}"))
}

/// The master whose process id a file has.
fn master_of(path: &str) -> Result<(Pid, i32)> {
    let text = std::fs::read_to_string(path).with_context(|| format!("process id file {path}"))?;
    let raw = process_id(&text).ok_or_else(|| anyhow!("{path} has no process id: '{}'", text.trim()))?;
    // The file may be older than the process that has this id now.
    let command = std::fs::read(format!("/proc/{raw}/cmdline")).with_context(|| format!("process {raw} of {path}"))?;
    if !command.split(|&byte| byte == 0).any(|word| word == b"master") {
        bail!("process {raw} of {path} is not a master: '{}'", String::from_utf8_lossy(&command).replace('\0', " "));
    }
    let pid = Pid::from_raw(raw).ok_or_else(|| anyhow!("{path} has no process id"))?;
    Ok((pid, raw))
}

async fn wait_until(raw: i32, hit: impl Fn(Option<char>) -> bool) -> Result<()> {
    let give_up = Instant::now() + GONE_WITHIN;
    while !hit(state_of(raw)) {
        if Instant::now() > give_up {
            bail!("process {raw} goes on {GONE_WITHIN:?} after the signal");
        }
        tokio::time::sleep(POLL_EVERY / 10).await;
    }
    Ok(())
}

/// None: no such process. A zombie has closed its sockets: it is dead, whoever reaps it.
fn state_of(pid: i32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next())
}

/// A bare number, or the `pid` of what `--port-file` writes.
fn process_id(text: &str) -> Option<i32> {
    let number = match text.trim().parse::<i32>() {
        Ok(number) => number,
        Err(_) => serde_json::from_str::<serde_json::Value>(text).ok()?.get("pid")?.as_i64()?.try_into().ok()?,
    };
    (number > 1).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_id_file_is_a_number_or_a_port_file() {
        assert_eq!(process_id("4711\n"), Some(4711));
        assert_eq!(process_id(r#"{"role":"master","pid":4712}"#), Some(4712));
        for bad in ["", "0", "1", "-1", "x", "{}", r#"{"pid":-5}"#] {
            assert_eq!(process_id(bad), None, "{bad}");
        }
    }

    #[test]
    fn contradicting_ways_to_end_a_reign_are_refused() {
        let options = LiveOptions::default();
        let refused = |fault, options: &LiveOptions| Strike::of(fault, options).unwrap_err().to_string();
        assert!(refused(DrillFault::KillLeader, &options).contains("--kill-command"));
        let command = LiveOptions { kill_command: Some("x".into()), ..options.clone() };
        assert!(refused(DrillFault::Transfer, &command).contains("--kill-command"));
        assert!(refused(DrillFault::PauseLeader, &command).contains("--restart-command"));
        let restart = LiveOptions { restart_command: Some("x".into()), ..options };
        assert!(refused(DrillFault::Transfer, &restart).contains("--restart-command"));
    }
}
