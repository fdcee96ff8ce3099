//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use tidepool_chaos_tests::bench::BenchOptions;
use tidepool_chaos_tests::demo::DemoOptions;
use tidepool_chaos_tests::drill::{DrillFault, DrillOptions};
use tidepool_chaos_tests::worker::WorkerArgs;
use tidepool_proto::Address;
use tidepool_raft::{OpPlace, PayloadHash};

use crate::config::flags::{DatanodeFlags, MasterFlags, SharedFlags};
use crate::config::setting::MASTER_PORT;
use crate::output::Format;
use crate::snapshot_bench::SnapshotBenchOptions;
use crate::trace::TraceOptions;

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

/// `tidepool put`.
#[derive(clap::Args, Debug)]
pub struct PutArgs {
    /// Key
    pub key: String,
    /// File; stdin without it, or with -
    pub file: Option<PathBuf>,
    /// Wanted copies
    #[arg(long, value_name = "NUMBER", default_value_t = 1, alias = "replica_num")]
    pub replica_num: u32,
    /// Fail unless every wanted copy is made
    #[arg(long)]
    pub strict: bool,
    /// Replace what is there; the old value is read until the new one is complete
    #[arg(long)]
    pub replace: bool,
    /// Never evict it, until it is removed
    #[arg(long, alias = "with_hard_pin")]
    pub hard_pin: bool,
    /// Evict it only when nothing else is left, for this time (the masters' default without one)
    #[arg(long, value_name = "DURATION", num_args = 0..=1, default_missing_value = "", require_equals = true)]
    pub soft_pin: Option<String>,
    /// Name of its group; members are evicted together, and exist together
    #[arg(long, value_name = "NAME", default_value = "")]
    pub group: String,
    /// What it holds
    #[arg(long = "type", value_name = "TYPE", value_enum, default_value_t = DataTypeArg::Unknown)]
    pub data_type: DataTypeArg,
    /// Segments to choose first, by name
    #[arg(long = "segment", value_name = "NAME")]
    pub segments: Vec<String>,
}

/// What an object holds.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum DataTypeArg {
    Unknown,
    Kvcache,
    Tensor,
    Weight,
    Sample,
    Activation,
    Gradient,
    OptimizerState,
    Metadata,
    General,
}

/// `tidepool get`.
#[derive(clap::Args, Debug)]
pub struct GetArgs {
    /// Key
    pub key: String,
    /// Write to this file instead of stdout; it appears whole or not at all
    #[arg(short = 'O', long, value_name = "PATH")]
    pub out: Option<PathBuf>,
    /// First byte of the part to read
    #[arg(long, value_name = "BYTE", default_value_t = 0, requires = "length")]
    pub offset: u64,
    /// Bytes of the part to read; without it the whole object
    #[arg(long, value_name = "BYTES")]
    pub length: Option<u64>,
}

/// `tidepool rm`.
#[derive(clap::Args, Debug)]
pub struct RmArgs {
    /// Keys
    #[arg(required_unless_present_any = ["prefix", "regex", "all"], conflicts_with_all = ["prefix", "regex", "all"])]
    pub keys: Vec<String>,
    /// Remove every key that starts with this
    #[arg(long, value_name = "PREFIX")]
    pub prefix: Option<String>,
    /// Remove every key in which this finds a match
    #[arg(long, value_name = "REGEX")]
    pub regex: Option<String>,
    /// Remove everything of the tenant
    #[arg(long, conflicts_with_all = ["prefix", "regex"])]
    pub all: bool,
    /// Also when a reader holds a lease; its bytes stay valid to the end of that lease
    #[arg(long)]
    pub force: bool,
}

/// `tidepool ls`.
#[derive(clap::Args, Debug)]
pub struct LsArgs {
    /// Only keys that start with this
    #[arg(default_value = "")]
    pub prefix: String,
    /// At most this many
    #[arg(long, value_name = "NUMBER", default_value_t = 1000)]
    pub limit: u64,
    /// Only keys in which this finds a match
    #[arg(long, value_name = "REGEX", default_value = "")]
    pub regex: String,
    /// Only objects that hold this
    #[arg(long = "type", value_name = "TYPE", value_enum)]
    pub data_type: Option<DataTypeArg>,
    /// With size, copies, type and pin
    #[arg(short, long)]
    pub long: bool,
}

/// `tidepool stat`.
#[derive(clap::Args, Debug)]
pub struct StatArgs {
    /// Keys
    #[arg(required = true)]
    pub keys: Vec<String>,
    /// Answer in two levels: the directory's entry, then where each copy is
    #[arg(long = "where")]
    pub where_: bool,
}

/// `tidepool pin`.
#[derive(clap::Args, Debug)]
pub struct PinArgs {
    /// Keys
    #[arg(required = true)]
    pub keys: Vec<String>,
    /// For how long; without it, the masters' default
    #[arg(long, value_name = "DURATION")]
    pub ttl: Option<String>,
    /// End the pin
    #[arg(long, conflicts_with = "ttl")]
    pub off: bool,
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

/// `tidepool member`.
#[derive(clap::Args, Debug)]
pub struct MemberArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: MemberCommand,
}

/// What to do with the members of the quorum. Every change may be repeated: what was done is not done again.
#[derive(Subcommand, Debug)]
pub enum MemberCommand {
    /// Show the members: role, how far each is, when it was heard
    List,
    /// Take in a new master, which was started with --join
    Add {
        /// Its node id, which was never used before, and its address
        #[arg(value_name = "ID@HOST[:PORT]", value_parser = parse_new_member)]
        member: NewMember,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Remove a master for good, also one that is dead
    Remove {
        /// Its node id
        id: u64,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Take in a new master in place of another
    Replace {
        /// Node id of the one that leaves
        old: u64,
        /// Node id, never used before, and address of the new one
        #[arg(value_name = "ID@HOST[:PORT]", value_parser = parse_new_member)]
        new: NewMember,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// The last resort on a stopped master: when a majority is lost for ever, one op stops all of them, or their states differ
    Recover {
        /// From the data of this host's master; there is no other way yet
        #[arg(long, required_unless_present_any = ["skip", "start_over"])]
        from_this_node: bool,
        /// What the lost masters had acknowledged, and this one has not, is gone
        #[arg(long, requires = "from_this_node")]
        accept_data_loss: bool,
        /// On a stopped master whose state is not to be trusted: begin the next start with the last snapshot that a majority
        /// vouched for, and apply the log again
        #[arg(long, conflicts_with_all = ["from_this_node", "skip"])]
        start_over: bool,
        /// On a majority of the stopped masters: leave out the op that stops them all, as their logs name it
        #[arg(long, value_name = "INDEX.ORDINAL", conflicts_with = "from_this_node")]
        skip: Option<OpPlace>,
        /// Hash of that entry, as the log of the stopped master says it; without it nothing is changed and the hash is shown
        #[arg(long, value_name = "HASH", requires = "skip")]
        hash: Option<PayloadHash>,
        /// Its data directory; without it, master.data_dir
        #[arg(long, value_name = "PATH")]
        data_dir: Option<PathBuf>,
    },
}

/// A master that is to be taken in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewMember {
    /// Its id.
    pub node_id: u64,
    /// Where the others will reach it.
    pub address: Address,
}

fn parse_new_member(text: &str) -> Result<NewMember, String> {
    let (id, host) = text.split_once('@').ok_or("expected ID@HOST[:PORT], such as 4@h4")?;
    let node_id = id.parse::<u64>().ok().filter(|id| (1..=u64::from(u32::MAX)).contains(id));
    let node_id = node_id.ok_or_else(|| format!("'{id}' is no node id: a whole number from 1"))?;
    let address = Address::parse(host, MASTER_PORT).map_err(|error| error.message().to_owned())?;
    Ok(NewMember { node_id, address })
}

/// `tidepool snapshot`.
#[derive(clap::Args, Debug)]
pub struct SnapshotArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

/// What to do with snapshots.
#[derive(Subcommand, Debug)]
pub enum SnapshotCommand {
    /// Have a master write its directory now, and publish it if it was told where
    Take {
        /// Node id of that master; without it, a standby if there is one
        #[arg(long, value_name = "NODE_ID")]
        node: Option<u64>,
    },
    /// List what is published; needs no master
    List {
        /// Where.
        #[command(flatten)]
        from: SnapshotFrom,
    },
    /// Read every byte of what is published; exit code 7 when nothing could be restored, 6 when some could not
    Verify {
        /// Where.
        #[command(flatten)]
        from: SnapshotFrom,
    },
    /// Say whose a snapshot is and what is in it; without a name, the newest
    Show {
        /// Where.
        #[command(flatten)]
        from: SnapshotFrom,
    },
}

/// Which snapshots are meant.
#[derive(clap::Args, Debug)]
pub struct SnapshotFrom {
    /// Only this one: its name, or its path below the URL
    pub snapshot: Option<String>,
    /// Where they are: file:///path or s3://bucket/prefix; without it, master.snapshot_url
    #[arg(long, value_name = "URL")]
    pub from: Option<String>,
}

/// `tidepool feature-level`.
#[derive(clap::Args, Debug)]
pub struct FeatureLevelArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: FeatureLevelCommand,
}

/// What to do with the feature level.
#[derive(Subcommand, Debug)]
pub enum FeatureLevelCommand {
    /// Show the level of the quorum, and the highest that each master's binary knows
    Show,
    /// Raise it, for good: older binaries take part no more
    Raise {
        /// Level; without it, the highest that all masters know
        #[arg(long, value_name = "LEVEL")]
        to: Option<u32>,
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
    /// Cut the leader off from everybody; needs --spawn and root
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_member_is_an_id_at_an_address() {
        let member = parse_new_member("4@h4").unwrap();
        assert_eq!((member.node_id, member.address.to_string()), (4, format!("h4:{MASTER_PORT}")));
        assert_eq!(parse_new_member("7@[::1]:9").unwrap().address.to_string(), "[::1]:9");
        for text in ["h4", "4=h4", "0@h4", "x@h4", "4@", "4@h:x", "99999999999@h"] {
            assert!(parse_new_member(text).is_err(), "{text}");
        }
    }
}
