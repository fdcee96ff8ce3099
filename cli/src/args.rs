//! The command line.

mod members;
mod objects;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use tidepool_chaos_tests::bench::BenchOptions;
use tidepool_chaos_tests::demo::DemoOptions;
use tidepool_chaos_tests::drill::{DrillFault, DrillOptions};
use tidepool_chaos_tests::worker::WorkerArgs;

use crate::config::flags::{DatanodeFlags, MasterFlags, SharedFlags};
use crate::output::Format;
use crate::snapshot_bench::SnapshotBenchOptions;
use crate::trace::TraceOptions;

pub use members::{
    FeatureLevelArgs, FeatureLevelCommand, MemberArgs, MemberCommand, NewMember, SnapshotArgs, SnapshotCommand,
    SnapshotFrom,
};
pub use objects::{DataTypeArg, GetArgs, LsArgs, PinArgs, PutArgs, RmArgs, StatArgs};

/// A shared pool of KV cache for LLM serving: hosts lend memory, engines put and get, a quorum of masters keeps
/// the directory.
#[derive(Parser, Debug)]
#[command(name = "tidepool", version, propagate_version = true, max_term_width = 120)]
#[command(
    after_help = "Every setting is a flag, an environment variable (TIDEPOOL_...) and a key of the file given by --config;\n\
                        'tidepool config show' prints each with its origin. Data goes to stdout, everything else to stderr.\n\
                        Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 exists already, 5 try later, 6 partial, 7 corrupt, 8 removed, 9 diverged."
)]
pub struct Cli {
    /// Configuration file (TOML)
    #[arg(long, global = true, value_name = "PATH", env = "TIDEPOOL_CONFIG", help_heading = "Shared options")]
    pub config: Option<PathBuf>,
    /// How data is printed
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table, help_heading = "Shared options")]
    pub output: Format,
    /// Settings of every command.
    #[command(flatten)]
    pub shared: SharedFlags,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run a whole pool in one process: a quorum of one and a datanode
    Dev(DevArgs),
    /// Run a master, one member of the quorum
    Master(MasterArgs),
    /// Run a datanode, which lends memory to the pool
    Datanode(DatanodeArgs),
    /// Store a file, or stdin, under a key
    Put(PutArgs),
    /// Write an object to stdout, or to a file
    Get(GetArgs),
    /// Remove objects
    Rm(RmArgs),
    /// List keys
    Ls(LsArgs),
    /// Show what is known of objects, without touching them
    Stat(StatArgs),
    /// Keep objects from being evicted for a time, or no longer
    Pin(PinArgs),
    /// Register tenants, and see what they hold
    Tenant(TenantArgs),
    /// Copy, move and drain replicas, and see how far that is
    Task(TaskArgs),
    /// Show the objects that are read most, as dynamic replication counts them
    Hot(HotArgs),
    /// Show the quorum, the nodes, the capacity, and what to do next
    Status,
    /// See who belongs to the quorum, and change it
    Member(MemberArgs),
    /// Take a snapshot of the directory now, and look at those that are published
    Snapshot(SnapshotArgs),
    /// See the feature level of the quorum, and raise it after an upgrade
    FeatureLevel(FeatureLevelArgs),
    /// Hand leadership to another master
    TransferLeader(TransferArgs),
    /// Say what so many objects need: memory, disk, snapshots
    Plan(PlanArgs),
    /// Measure, beside a ceiling of the same shape taken in the same run
    Bench(BenchArgs),
    /// Break something on purpose and report what clients saw
    Drill(DrillArgs),
    /// Check this host: ports, limits, disk, clocks, versions, masters
    Doctor(DoctorArgs),
    /// Look at the configuration
    Config(ConfigArgs),
    /// Print a shell completion script
    Completion {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Explain an error code: TP0020, OBJECT_NOT_FOUND or Mooncake's -704
    #[command(allow_negative_numbers = true)]
    Explain {
        /// Code
        code: String,
    },
    /// A process of a drill or a benchmark; not for people
    #[command(hide = true)]
    LoadWorker(WorkerArgs),
    /// Boot a pool on this host, store real files, kill the leader, give every byte back; see scripts/demo
    #[command(hide = true)]
    Demo(DemoOptions),
}

/// What every role takes.
#[derive(clap::Args, Debug, Clone, Default)]
pub struct RoleArgs {
    /// Write the addresses really listened on to this file, as JSON
    #[arg(long, value_name = "PATH")]
    pub port_file: Option<PathBuf>,
}

/// `tidepool master`.
#[derive(clap::Args, Debug)]
pub struct MasterArgs {
    /// For every role.
    #[command(flatten)]
    pub role: RoleArgs,
    /// Settings.
    #[command(flatten)]
    pub flags: MasterFlags,
}

/// `tidepool datanode`.
#[derive(clap::Args, Debug)]
pub struct DatanodeArgs {
    /// For every role.
    #[command(flatten)]
    pub role: RoleArgs,
    /// Settings.
    #[command(flatten)]
    pub flags: DatanodeFlags,
}

/// `tidepool dev`.
#[derive(clap::Args, Debug)]
pub struct DevArgs {
    /// For every role.
    #[command(flatten)]
    pub role: RoleArgs,
    /// Host that every port binds to
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Pick free ports instead of 50051, 9003, 50052 and 9300
    #[arg(long)]
    pub free_ports: bool,
    /// Memory of the pool
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub dram: String,
    /// Stop when standard input ends, as it does when the process that holds its other end is gone
    #[arg(long)]
    pub exit_with_stdin: bool,
    /// Where the directory is kept; without it, in a temporary directory that goes with the process
    #[arg(long, value_name = "PATH")]
    pub data_dir: Option<PathBuf>,
}

/// `tidepool tenant`.
#[derive(clap::Args, Debug)]
pub struct TenantArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TenantCommand,
}

/// What to do with tenants.
#[derive(Subcommand, Debug)]
pub enum TenantCommand {
    /// Register a tenant, or set its quotas
    Set {
        /// Name
        name: String,
        /// Bytes it may hold, all copies counted; 0: no limit
        #[arg(long, value_name = "SIZE", default_value = "0")]
        bytes: String,
        /// Objects it may hold; 0: no limit
        #[arg(long, value_name = "NUMBER", default_value_t = 0)]
        objects: u64,
        /// Refuse a put over quota; without it, the tenant's own objects go, those that the eviction policy gives up first
        #[arg(long)]
        refuse: bool,
    },
    /// Show all tenants and what they hold
    List,
    /// Forget a tenant that holds nothing
    Drop {
        /// Name
        name: String,
    },
}

/// `tidepool hot`.
#[derive(clap::Args, Debug)]
pub struct HotArgs {
    /// At most this many
    #[arg(long, value_name = "NUMBER", default_value_t = 20)]
    pub limit: u32,
}

/// `tidepool task`.
#[derive(clap::Args, Debug)]
pub struct TaskArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: TaskCommand,
}

/// What to do with tasks.
#[derive(Subcommand, Debug)]
pub enum TaskCommand {
    /// One more replica of an object in each segment named
    Copy {
        /// Key
        key: String,
        /// Segments, by name or id
        #[arg(long = "to", value_name = "SEGMENT", required = true)]
        targets: Vec<String>,
    },
    /// A replica of an object goes from one segment to another
    Move {
        /// Key
        key: String,
        /// Segment it leaves, by name or id
        #[arg(long = "from", value_name = "SEGMENT")]
        source: String,
        /// Segment it goes to, by name or id
        #[arg(long = "to", value_name = "SEGMENT")]
        target: String,
    },
    /// Every replica leaves these segments, which take no puts meanwhile
    Drain {
        /// Segments, by name or id
        #[arg(required = true)]
        segments: Vec<String>,
        /// Where the replicas may go; without it, wherever there is room
        #[arg(long = "to", value_name = "SEGMENT")]
        targets: Vec<String>,
        /// Objects under way at once
        #[arg(long, value_name = "NUMBER", default_value_t = 4, alias = "max_concurrency")]
        concurrency: u32,
        /// Unmount the segments when they are empty
        #[arg(long)]
        unmount: bool,
    },
    /// Show tasks: those that run, and the last that ended
    List {
        /// Only this task
        task: Option<u64>,
    },
    /// Wait until a task has ended
    Wait {
        /// Task
        task: u64,
    },
    /// End a task; what it has done stays done
    Cancel {
        /// Task
        task: u64,
    },
}

/// `tidepool plan`.
#[derive(clap::Args, Debug)]
pub struct PlanArgs {
    /// Objects in the pool
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub objects: u64,
    /// Their payload, all together
    #[arg(long, value_name = "SIZE")]
    pub bytes: String,
    /// Bytes of a key
    #[arg(long, value_name = "NUMBER", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub key_bytes: u64,
    /// Copies of each object
    #[arg(long, value_name = "NUMBER", default_value_t = 1, alias = "replica_num", value_parser = clap::value_parser!(u64).range(1..=8))]
    pub replica_num: u64,
}

/// `tidepool transfer-leader`.
#[derive(clap::Args, Debug)]
pub struct TransferArgs {
    /// Node id of the new leader; without it, the standby that is furthest
    #[arg(long, value_name = "NODE_ID")]
    pub to: Option<u64>,
}

/// `tidepool doctor`.
#[derive(clap::Args, Debug)]
pub struct DoctorArgs {
    /// Directory whose disk is measured
    #[arg(long, value_name = "PATH", default_value = ".")]
    pub dir: PathBuf,
    /// Host whose default ports are checked
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
}

/// `tidepool config`.
#[derive(clap::Args, Debug)]
pub struct ConfigArgs {
    /// What to show.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What to show of the configuration.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Print every setting with its value and where that came from
    Show,
    /// Print the reference of all settings, as Markdown
    Reference,
}

/// `tidepool bench`: suites that start a pool, and those that need none.
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// Suites without a pool.
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// Suites against a pool.
    #[command(flatten)]
    pub pool: Option<BenchOptions>,
}

/// A suite that needs no pool.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Replay a trace of requests against eviction policies: how much of the prompts' prefixes stays cached
    Trace(TraceOptions),
    /// Write images of a directory while it is changed at full speed: how long, and how long it held up who serves
    Snapshot(SnapshotBenchOptions),
}

/// `tidepool drill`.
#[derive(clap::Args, Debug)]
pub struct DrillArgs {
    /// What to break.
    #[command(subcommand)]
    pub command: DrillCommand,
}

/// What to break.
#[derive(Subcommand, Debug)]
pub enum DrillCommand {
    /// Kill the leader under load, again and again; report lost objects and outages as clients saw them
    KillLeader(DrillOptions),
    /// Stop the leader's process without killing it: its connections stay, nothing answers
    PauseLeader(DrillOptions),
    /// Cut the leader off from everybody; needs --spawn
    IsolateLeader(DrillOptions),
    /// Have the leader hand over, as before maintenance
    Transfer(DrillOptions),
    /// Kill a standby; needs --spawn
    KillStandby(DrillOptions),
    /// Kill a datanode, every object having two copies; needs --spawn
    KillDatanode(DrillOptions),
    /// Cut the power of all masters at once, what was not durable being gone; needs --spawn and root
    PowerCut(DrillOptions),
    /// Kill all masters and start them again; needs --spawn
    FullRestart(DrillOptions),
    /// Lose all masters with their disks, and restore a published snapshot; needs --spawn
    Restore(DrillOptions),
}

impl DrillCommand {
    /// What is done, and how.
    pub fn parts(&self) -> (DrillFault, &DrillOptions) {
        match self {
            DrillCommand::KillLeader(options) => (DrillFault::KillLeader, options),
            DrillCommand::PauseLeader(options) => (DrillFault::PauseLeader, options),
            DrillCommand::IsolateLeader(options) => (DrillFault::IsolateLeader, options),
            DrillCommand::Transfer(options) => (DrillFault::Transfer, options),
            DrillCommand::KillStandby(options) => (DrillFault::KillStandby, options),
            DrillCommand::KillDatanode(options) => (DrillFault::KillDatanode, options),
            DrillCommand::PowerCut(options) => (DrillFault::PowerCut, options),
            DrillCommand::FullRestart(options) => (DrillFault::FullRestart, options),
            DrillCommand::Restore(options) => (DrillFault::Restore, options),
        }
    }
}
