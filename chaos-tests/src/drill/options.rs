//! What a drill is told on the command line.

use std::path::PathBuf;

use crate::bulk::Bulk;

/// How full the pool is when the leader goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Fill {
    /// As it is.
    None,
    /// Half full: nothing has to be evicted, every acknowledged object must be there.
    Half,
    /// 95 % full and steadily overwritten: eviction works all the time.
    #[value(name = "95")]
    Overflow,
}

impl Fill {
    /// As printed.
    pub fn name(self) -> &'static str {
        match self {
            Fill::None => "none",
            Fill::Half => "half",
            Fill::Overflow => "95",
        }
    }
}

/// What a drill does, one subcommand each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DrillFault {
    /// SIGKILL to the leader.
    KillLeader,
    /// SIGSTOP to the leader: its connections stay, nothing answers.
    PauseLeader,
    /// The leader is cut off from everybody; no packet says so.
    IsolateLeader,
    /// The leader is asked to hand over, as before maintenance.
    Transfer,
    /// SIGKILL to a standby.
    KillStandby,
    /// SIGKILL to a datanode; every object has two copies.
    KillDatanode,
    /// All masters lose power at once: what was not durable is gone.
    PowerCut,
    /// SIGKILL to all masters, which are started again.
    FullRestart,
    /// All masters and their disks are lost; a published snapshot is restored.
    Restore,
}

impl DrillFault {
    /// As typed and printed.
    pub fn name(self) -> &'static str {
        match self {
            DrillFault::KillLeader => "kill-leader",
            DrillFault::PauseLeader => "pause-leader",
            DrillFault::IsolateLeader => "isolate-leader",
            DrillFault::Transfer => "transfer",
            DrillFault::KillStandby => "kill-standby",
            DrillFault::KillDatanode => "kill-datanode",
            DrillFault::PowerCut => "power-cut",
            DrillFault::FullRestart => "full-restart",
            DrillFault::Restore => "restore",
        }
    }

    /// Whether it may be done to a quorum that serves others: what an operator could do to one leader, and undo.
    pub fn may_be_live(self) -> bool {
        matches!(self, DrillFault::KillLeader | DrillFault::PauseLeader | DrillFault::Transfer)
    }

    /// Whether it needs links or disks of the masters' own.
    pub fn needs_lab(self) -> bool {
        matches!(self, DrillFault::IsolateLeader | DrillFault::PowerCut)
    }

    /// Copies that the drill's objects have.
    pub fn replica_num(self) -> u32 {
        if self == DrillFault::KillDatanode { 2 } else { 1 }
    }
}

/// Who kills, when no command does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Killer {
    /// The operator, by hand: the drill says which master, and waits until it is gone.
    Manual,
}

/// What a drill on a quorum that serves others does to it.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "On a quorum that serves others (without --spawn)")]
pub struct LiveOptions {
    /// Who kills the leader
    #[arg(long, value_enum, conflicts_with_all = ["spawn", "kill_command", "pid_file"])]
    pub kill: Option<Killer>,
    /// Shell command that strikes the leader, run on this host; {host}, {address} and {node_id} are the leader's
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["spawn", "pid_file"])]
    pub kill_command: Option<String>,
    /// Kill (or stop) the process whose id this file has (a number, or what --port-file wrote); {node_id} and the like as above
    #[arg(long, value_name = "PATH", conflicts_with = "spawn")]
    pub pid_file: Option<String>,
    /// Shell command that starts the killed master again (or wakes the stopped one); without it, something else must
    #[arg(long, value_name = "COMMAND", conflicts_with = "spawn")]
    pub restart_command: Option<String>,
    /// Really do it; without it the drill says what it would do and ends
    #[arg(long, conflicts_with = "spawn")]
    pub yes: bool,
}

/// Options of every drill.
#[derive(Clone, Debug, clap::Args)]
pub struct DrillOptions {
    /// Start a pool of separate processes on this host for the drill, instead of drilling the one at --masters
    #[arg(long)]
    pub spawn: bool,
    /// How often it is done
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// How full the pool is; with --spawn half without it, else as it is
    #[arg(long, value_enum)]
    pub fill: Option<Fill>,
    /// Election profile of the masters that --spawn starts
    #[arg(long, default_value = "lan")]
    pub election: String,
    /// Writer processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub writers: u32,
    /// Reader processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub readers: u32,
    /// Calls a second of each process, on a fixed schedule
    #[arg(long, default_value_t = 100.0)]
    pub rate: f64,
    /// Bytes a second that one more process writes, in batches of 1 MiB values; at most an eighth of the pool a round, unless --fill is 95
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub bulk_bytes_per_s: u64,
    /// Processes that put, replace, get and remove the same few keys; their answers must fit together (restore does without)
    #[arg(long, default_value_t = 2)]
    pub contenders: u32,
    /// Middle value size in bytes; a quarter and four times that are as frequent
    #[arg(long)]
    pub value_bytes: Option<u64>,
    /// DRAM of each of the two datanodes that --spawn starts, in bytes
    #[arg(long, default_value_t = 256 << 20)]
    pub segment_bytes: u64,
    /// Data directories, logs and call logs go here and stay; without it a temporary directory is used
    #[arg(long)]
    pub work_dir: Option<PathBuf>,
    /// Write a report with a picture of every round to this file, as one HTML page
    #[arg(long, value_name = "PATH")]
    pub report: Option<PathBuf>,
    /// On a live quorum.
    #[command(flatten)]
    pub live: LiveOptions,
}

impl DrillOptions {
    /// How full the pool is to be.
    pub fn fill(&self) -> Fill {
        self.fill.unwrap_or(if self.spawn { Fill::Half } else { Fill::None })
    }

    /// What the bulk writer puts in one round, if there is to be one. Half of a pool is full of what must stay, and what a round removes
    /// is free again only when its leases have ended.
    pub(super) fn bulk(&self, capacity_bytes: u64, copies: u32) -> Option<Bulk> {
        let fits = capacity_bytes / 8 / u64::from(copies.max(1));
        let bytes_max = if self.fill() == Fill::Overflow { u64::MAX } else { fits };
        (self.bulk_bytes_per_s > 0).then_some(Bulk { bytes_per_s: self.bulk_bytes_per_s, bytes_max })
    }

    /// Sizes of the values that writers put.
    pub(super) fn value_bytes(&self) -> Vec<u64> {
        let middle = self.value_bytes.unwrap_or(match self.fill() {
            Fill::None | Fill::Half => 4 << 10,
            Fill::Overflow => 16 << 10,
        });
        vec![(middle / 4).max(1), middle, middle * 4]
    }
}
