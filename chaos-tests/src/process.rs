//! One child process: its own process group, its output in a log file, signals by id, and no way to outlive its owner.
//!
//! A child is started through the binary's hidden `load-worker` command, which asks the kernel to kill it when the
//! parent dies (PR_SET_PDEATHSIG) and then executes the real command in place. The kernel ties that to the *thread*
//! that forked, so all children are forked by threads that live as long as the process: one for each mount namespace, since
//! a child sees what the thread that forked it sees.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::Mutex;
pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};

use crate::clock::monotonic_ns;
use crate::worker::{ExecSpec, WorkerSpec};

/// How long a child may take to disappear after SIGKILL before that is an error.
const REAP_WITHIN: Duration = Duration::from_secs(20);

/// What becomes of the child when its owner goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifetime {
    /// Killed with the owner, on drop or death.
    WithOwner,
    /// Killed on drop, unless `Process::detach` was called; the owner's death alone does not end it (`tidepool demo --keep`).
    MayOutlive,
}

/// Where the child's standard input comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// Nothing to read.
    Null,
    /// A pipe held by the owner; closing it tells a load process to stop.
    Pipe,
}

/// What to start.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Name in messages and of the log file.
    pub name: String,
    /// The tidepool binary.
    pub binary: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Variables added to the environment.
    pub environment: Vec<(String, String)>,
    /// Network namespace it runs in; its owner's without one. Only for children that go with their owner.
    pub namespace: Option<PathBuf>,
    /// Output goes here, appended.
    pub log: PathBuf,
}

/// When something was done to a process.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// CLOCK_MONOTONIC right before kill(2).
    pub at_ns: u64,
    /// CLOCK_MONOTONIC when the process was seen dead or stopped: calls started later cannot have been answered by it.
    pub certain_ns: u64,
}

/// CPU and memory of a process, from /proc.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// User and system time.
    pub cpu: Duration,
    /// Resident set.
    pub resident_bytes: u64,
}

/// A running (or finished) child.
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
    status: Option<ExitStatus>,
    detached: bool,
}

type SpawnJob = Box<dyn FnOnce() + Send>;

/// Runs `job` on the thread that forks for the caller's mount namespace.
fn on_spawner<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    static SPAWNERS: Mutex<BTreeMap<PathBuf, mpsc::Sender<SpawnJob>>> = Mutex::new(BTreeMap::new());
    let namespace = std::fs::read_link("/proc/thread-self/ns/mnt").context("this thread's mount namespace")?;
    let spawner = SPAWNERS
        .lock()
        .entry(namespace)
        .or_insert_with(|| {
            let (send, receive) = mpsc::channel::<SpawnJob>();
            std::thread::spawn(move || receive.into_iter().for_each(|job| job()));
            send
        })
        .clone();
    let (send, receive) = mpsc::channel();
    let wrapped: SpawnJob = Box::new(move || {
        // The asker waits below; it is gone only when its process is ending.
        send.send(job()).ok();
    });
    spawner.send(wrapped).map_err(|_| anyhow!("the thread that starts processes is gone"))?;
    receive.recv().context("the thread that starts processes is gone")
}

impl Process {
    /// Starts it.
    pub fn spawn(launch: &Launch, lifetime: Lifetime, input: Input) -> Result<Process> {
        let log = File::options().create(true).append(true).open(&launch.log);
        let log = log.with_context(|| format!("log file {} of {}", launch.log.display(), launch.name))?;
        let mut command = match lifetime {
            Lifetime::MayOutlive => {
                let mut command = Command::new(&launch.binary);
                command.args(&launch.arguments);
                command
            }
            Lifetime::WithOwner => {
                let spec = WorkerSpec::Exec(ExecSpec {
                    parent: std::process::id(),
                    program: launch.binary.clone(),
                    arguments: launch.arguments.clone(),
                    namespace: launch.namespace.clone(),
                });
                let mut command = Command::new(&launch.binary);
                command.arg("load-worker").arg(serde_json::to_string(&spec)?);
                command
            }
        };
        command.envs(launch.environment.iter().map(|(k, v)| (k, v)));
        command.stdout(log.try_clone()?).stderr(log).process_group(0);
        command.stdin(match input {
            Input::Null => Stdio::null(),
            Input::Pipe => Stdio::piped(),
        });
        let child = on_spawner(move || command.spawn())?;
        let child = child.with_context(|| format!("starting {} ({})", launch.name, launch.binary.display()))?;
        Ok(Process { name: launch.name.clone(), log: launch.log.clone(), child, status: None, detached: false })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
    /// Name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// The writing end of its standard input, once.
    pub fn take_input(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Its exit status, when it has ended.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait().with_context(|| format!("waiting for {}", self.name))?;
        }
        Ok(self.status)
    }

    /// Fails, with the end of its log, when it has ended.
    pub fn expect_running(&mut self) -> Result<()> {
        match self.exited()? {
            None => Ok(()),
            Some(status) => bail!("{} ended by itself ({status}); its log ends:\n{}", self.name, self.log_tail()),
        }
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        log_tail(&self.log)
    }

    /// Sends a signal; the fault's instant is stamped right before kill(2).
    pub fn signal(&mut self, signal: Signal) -> Result<u64> {
        // A reaped id may belong to somebody else by now.
        if let Some(status) = self.exited()? {
            bail!("{} has ended already ({status})", self.name);
        }
        let pid = Pid::from_raw(self.child.id() as i32).ok_or_else(|| anyhow!("{} has no process id", self.name))?;
        let at_ns = monotonic_ns();
        kill_process(pid, signal).with_context(|| format!("signal {signal:?} to {}", self.name))?;
        Ok(at_ns)
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(&mut self) -> Result<Fault> {
        let at_ns = self.signal(Signal::KILL)?;
        self.status = Some(self.child.wait().with_context(|| format!("reaping {}", self.name))?);
        Ok(Fault { at_ns, certain_ns: monotonic_ns() })
    }

    /// SIGSTOP, and waits until every thread is stopped.
    pub fn pause(&mut self) -> Result<Fault> {
        let at_ns = self.signal(Signal::STOP)?;
        let give_up = Instant::now() + REAP_WITHIN;
        while self.state()? != 'T' {
            if Instant::now() > give_up {
                bail!("{} did not stop within {REAP_WITHIN:?} of SIGSTOP", self.name);
            }
            std::thread::yield_now();
        }
        Ok(Fault { at_ns, certain_ns: monotonic_ns() })
    }

    /// Whether it is stopped by a signal.
    pub fn is_stopped(&self) -> Result<bool> {
        Ok(self.state()? == 'T')
    }

    /// SIGCONT.
    pub fn resume(&mut self) -> Result<u64> {
        self.signal(Signal::CONT)
    }

    /// Waits for its end.
    pub async fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let give_up = Instant::now() + within;
        loop {
            if let Some(status) = self.exited()? {
                return Ok(status);
            }
            if Instant::now() > give_up {
                bail!("{} did not end within {within:?}; its log ends:\n{}", self.name, self.log_tail());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// SIGTERM, and waits for the end it chooses.
    pub async fn terminate(&mut self, within: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.wait(within).await
    }

    /// CPU time so far and resident memory.
    pub fn usage(&self) -> Result<Usage> {
        process_usage(self.child.id())
    }

    fn state(&self) -> Result<char> {
        let fields = stat_fields(self.child.id())?;
        fields.first().and_then(|f| f.chars().next()).ok_or_else(|| anyhow!("{}: empty /proc stat", self.name))
    }

    /// Lets it live on after its owner.
    pub fn detach(&mut self) {
        self.detached = true;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.detached && matches!(self.exited(), Ok(None)) {
            // A stopped process dies of SIGKILL too. Failing to kill it means it is gone.
            if self.child.kill().is_ok() {
                self.child.wait().ok();
            }
        }
    }
}

/// The fields of /proc/PID/stat after the command name: state first.
fn stat_fields(pid: u32) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid}"))?;
    let rest = text.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    Ok(rest.split_whitespace().map(str::to_owned).collect())
}

/// CPU time and memory of any process.
pub fn process_usage(pid: u32) -> Result<Usage> {
    let fields = stat_fields(pid)?;
    let number = |at: usize| -> Result<u64> {
        fields.get(at).and_then(|f| f.parse().ok()).ok_or_else(|| anyhow!("/proc/{pid}/stat has no field {at}"))
    };
    // Fields 14, 15 (utime, stime) and 24 (rss) of proc(5), counted from the state, which is 3.
    let ticks = number(11)? + number(12)?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Usage {
        cpu: Duration::from_nanos(ticks * 1_000_000_000 / per_second),
        resident_bytes: number(21)? * rustix::param::page_size() as u64,
    })
}

/// The last 30 lines of a file.
pub fn log_tail(path: &Path) -> String {
    match std::fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(30)..].join("\n")
        }
        Err(error) => format!("({}: {error})", path.display()),
    }
}
