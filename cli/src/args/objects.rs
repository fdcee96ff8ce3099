//! The command line: objects.

use std::path::PathBuf;

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
