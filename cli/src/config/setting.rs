//! The one table of settings. Flags, environment names, file keys, `config show` and the reference page in the
//! book are all made from it.

use super::value::Kind;

/// Where a setting belongs: shared by every command, or of one role.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Section {
    /// Top level of the file: what clients and every role share.
    Shared,
    /// `[master]`.
    Master,
    /// `[datanode]`.
    Datanode,
}

impl Section {
    /// Every section.
    pub const ALL: [Section; 3] = [Section::Shared, Section::Master, Section::Datanode];

    /// Table name in the file; empty for the top level.
    pub fn name(self) -> &'static str {
        match self {
            Section::Shared => "",
            Section::Master => "master",
            Section::Datanode => "datanode",
        }
    }
}

/// How a foreign name's bare number or loose size reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    /// As our own values.
    Own,
    /// A bare number is milliseconds.
    Milliseconds,
    /// A bare number is seconds.
    Seconds,
    /// `8gb` means 8 GiB.
    LooseSize,
    /// A port: replaces the port of the setting's address.
    Port,
}

/// A name under which Mooncake users know the same thing.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    /// Flag name without dashes, or environment name.
    pub name: &'static str,
    /// How its value reads.
    pub unit: Unit,
}

/// One setting.
#[derive(Debug)]
pub struct Setting {
    /// Section of the file.
    pub section: Section,
    /// Key in the section.
    pub name: &'static str,
    /// What it accepts.
    pub kind: Kind,
    /// Default as text; empty when it is derived or there is none.
    pub default: &'static str,
    /// What happens without a value, when `default` is empty.
    pub otherwise: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Mooncake's flags for it.
    pub flags: &'static [Alias],
    /// Mooncake's environment names for it.
    pub environment: &'static [Alias],
}

impl Setting {
    /// `section.name`, or the bare name at the top level.
    pub fn path(&self) -> String {
        match self.section {
            Section::Shared => self.name.to_owned(),
            section => format!("{}.{}", section.name(), self.name),
        }
    }
    /// `TIDEPOOL_[SECTION_]NAME`.
    pub fn environment_name(&self) -> String {
        format!("TIDEPOOL_{}", self.path().replace('.', "_").to_ascii_uppercase())
    }
    /// Flag without its dashes.
    pub fn flag_name(&self) -> String {
        self.name.replace('_', "-")
    }
    /// The setting at a path.
    pub fn find(path: &str) -> Option<&'static Setting> {
        SETTINGS.iter().find(|setting| setting.path() == path)
    }
    /// The settings of a section, in table order.
    pub fn of(section: Section) -> impl Iterator<Item = &'static Setting> {
        SETTINGS.iter().filter(move |setting| setting.section == section)
    }
}

/// Port of a master's RPC.
pub const MASTER_PORT: u16 = 50051;
/// Port of a datanode's data and RPC.
pub const DATANODE_PORT: u16 = 50052;

const NONE: &[Alias] = &[];

const fn setting(
    section: Section,
    name: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
) -> Setting {
    Setting { section, name, kind, default, otherwise: "", help, flags: NONE, environment: NONE }
}

impl Setting {
    const fn otherwise(mut self, text: &'static str) -> Setting {
        self.otherwise = text;
        self
    }
    const fn flags(mut self, aliases: &'static [Alias]) -> Setting {
        self.flags = aliases;
        self
    }
    const fn environment(mut self, aliases: &'static [Alias]) -> Setting {
        self.environment = aliases;
        self
    }
}

const fn alias(name: &'static str, unit: Unit) -> Alias {
    Alias { name, unit }
}

/// Every setting there is.
pub static SETTINGS: &[Setting] = &[
    // Shared.
    setting(
        Section::Shared,
        "masters",
        Kind::Addresses(MASTER_PORT),
        "127.0.0.1:50051",
        "masters of the quorum, HOST[:PORT] separated by commas; any one is enough to find the others",
    )
    .flags(&[alias("master_server_address", Unit::Own)])
    .environment(&[alias("MOONCAKE_MASTER", Unit::Own)]),
    setting(Section::Shared, "deadline", Kind::Duration, "5s", "time a command may take in all, retries included"),
    setting(Section::Shared, "tenant", Kind::Text, "", "tenant whose keys are meant")
        .otherwise("the default tenant")
        .flags(&[alias("tenant_id", Unit::Own)])
        .environment(&[alias("MOONCAKE_TENANT_ID", Unit::Own)]),
    setting(
        Section::Shared,
        "log_filter",
        Kind::Text,
        "",
        "what is logged to stderr: a level, or target=level pairs separated by commas",
    )
    .otherwise("info (openraft: warn) for a role, warn for every other command"),
    setting(Section::Shared, "log_format", Kind::Choice(&["text", "json"]), "text", "how log lines are written"),
    // Master.
    setting(
        Section::Master,
        "node_id",
        Kind::Integer(1, u32::MAX as u64),
        "1",
        "id of this member, unique in the quorum and never reused",
    ),
    setting(
        Section::Master,
        "listen",
        Kind::Address(MASTER_PORT),
        "",
        "address this master serves RPC on; its host governs every port of the role",
    )
    .otherwise("this member's entry in members, else 127.0.0.1:50051")
    .flags(&[alias("rpc_port", Unit::Port), alias("port", Unit::Port)]),
    setting(
        Section::Master,
        "http_port",
        Kind::Integer(0, 65535),
        "9003",
        "port of metrics, health and admin HTTP, on the host of listen; 0 picks a free one",
    )
    .flags(&[alias("metrics_port", Unit::Own)]),
    setting(
        Section::Master,
        "advertise",
        Kind::Address(MASTER_PORT),
        "",
        "address the other members, datanodes and clients reach this master at",
    )
    .otherwise("this member's entry in members, else listen"),
    setting(
        Section::Master,
        "members",
        Kind::Members(MASTER_PORT),
        "",
        "the initial quorum, ID=HOST[:PORT] separated by commas, this master included",
    )
    .otherwise("a quorum of one: this master"),
    setting(
        Section::Master,
        "join",
        Kind::Boolean,
        "false",
        "with an empty data directory: begin no cluster, wait until tidepool member add or replace takes this master in",
    ),
    setting(
        Section::Master,
        "restore_from",
        Kind::Text,
        "",
        "with an empty data directory: restore the newest whole snapshot at this URL into a new cluster (the member with the lowest id does, the others are taken in); with data it means nothing",
    )
    .otherwise("an empty data directory begins an empty cluster, unless snapshot_url has snapshots"),
    setting(
        Section::Master,
        "accept_data_loss",
        Kind::Boolean,
        "false",
        "with an empty data directory: begin an empty cluster even though snapshots lie at snapshot_url",
    ),
    setting(
        Section::Master,
        "data_dir",
        Kind::Path,
        "/var/lib/tidepool/master",
        "directory of the oplog and the snapshots",
    ),
    setting(
        Section::Master,
        "election",
        Kind::Choice(&["lan", "default", "wan"]),
        "default",
        "heartbeat and election timing: lan 20/60/120 ms, default 50/150/300 ms, wan 200/1000/2000 ms",
    ),
    setting(Section::Master, "lease_ttl", Kind::Duration, "10s", "read lease of a request that names none")
        .flags(&[alias("default_kv_lease_ttl", Unit::Milliseconds)]),
    setting(
        Section::Master,
        "lease_ttl_max",
        Kind::Duration,
        "10s",
        "longest read lease; replicated when the first leader takes office",
    ),
    setting(
        Section::Master,
        "put_start_discard_timeout",
        Kind::Duration,
        "30s",
        "time of leadership after which an unfinished put may be preempted",
    )
    .flags(&[alias("put_start_discard_timeout_sec", Unit::Seconds)]),
    setting(
        Section::Master,
        "failover_reclaim",
        Kind::Choice(&["allow", "protect"]),
        "allow",
        "when a new leader runs out of space before its predecessor's leases ended: allow reuses space (a late reader gets a miss), protect refuses the put",
    ),
    setting(
        Section::Master,
        "eviction_policy",
        Kind::Choice(&["adaptive", "lru", "s3-fifo"]),
        "adaptive",
        "which objects go first when space is needed; see Eviction in the book",
    ),
    setting(
        Section::Master,
        "evict_soft_pinned",
        Kind::Boolean,
        "true",
        "whether soft-pinned objects go when nothing else is left; otherwise the put is refused",
    )
    .flags(&[alias("allow_evict_soft_pinned_objects", Unit::Own)]),
    setting(Section::Master, "soft_pin_ttl", Kind::Duration, "30m", "soft pin of a put that names no time, 1ms to 24h")
        .flags(&[alias("default_kv_soft_pin_ttl", Unit::Milliseconds)]),
    setting(
        Section::Master,
        "objects_max",
        Kind::Integer(1, 1 << 32),
        "268435456",
        "objects in the directory; above it puts evict by count. Count on 300 bytes of master memory each; replicated",
    ),
    setting(
        Section::Master,
        "granted_bytes_min",
        Kind::Size,
        "256MiB",
        "bytes that one client may have granted and not ended in any pool; in a large one it is 10 % of the pool; replicated",
    ),
    setting(
        Section::Master,
        "hard_pinned_percent_max",
        Kind::Integer(0, 100),
        "90",
        "share of the pool that tenants without a quota of bytes may pin for good; more such puts are refused; 100: no limit; replicated",
    ),
    setting(
        Section::Master,
        "audit_interval",
        Kind::Duration,
        "1s",
        "how often every master recomputes one more shard of its directory and compares it with what it keeps up; 0: never",
    ),
    setting(
        Section::Master,
        "allocation_strategy",
        Kind::Choice(&["balanced", "random", "free_ratio_first", "local_first"]),
        "balanced",
        "where replicas go: the emptier of two segments drawn, any, the emptiest of six, or the writer's own host first; replicated",
    ),
    setting(
        Section::Master,
        "session_idle_timeout",
        Kind::Duration,
        "10m",
        "silence after which a client's session ends; a client that still lives says hello again",
    ),
    setting(
        Section::Master,
        "heal_bytes_per_second",
        Kind::Size,
        "256MiB",
        "bytes a second that are copied to make up for copies that are missing, and as many for hot objects",
    ),
    setting(
        Section::Master,
        "dynamic_replication",
        Kind::Choice(&["off", "observe", "enforce"]),
        "off",
        "what is done about objects that are read often: nothing, count and show them, or copy them to other hosts",
    )
    .flags(&[alias("dynamic_replication_mode", Unit::Own)]),
    setting(
        Section::Master,
        "dynamic_replication_reads",
        Kind::Integer(1, 1 << 20),
        "50",
        "reads within dynamic_replication_window that make an object hot; with less than half it is cold again",
    ),
    setting(
        Section::Master,
        "dynamic_replication_window",
        Kind::Duration,
        "10s",
        "time over which reads are counted, 100ms to 1h",
    )
    .flags(&[alias("dynamic_replication_heat_window_seconds", Unit::Seconds)]),
    setting(
        Section::Master,
        "dynamic_replicas_max",
        Kind::Integer(1, 15),
        "2",
        "replicas that a hot object may have, those that its put asked for included",
    )
    .flags(&[alias("dynamic_replication_max_memory_replicas", Unit::Own)]),
    setting(Section::Master, "node_heartbeat_interval", Kind::Duration, "200ms", "how often datanodes report"),
    setting(
        Section::Master,
        "node_suspect_timeout",
        Kind::Duration,
        "2s",
        "silence after which a datanode is suspect: unlisted, nothing dropped",
    ),
    setting(
        Section::Master,
        "node_forget_timeout",
        Kind::Duration,
        "10m",
        "silence after which a datanode's replicas are dropped",
    ),
    setting(Section::Master, "slow_call", Kind::Duration, "500ms", "calls slower than this are logged"),
    setting(
        Section::Master,
        "snapshot_log_bytes",
        Kind::Size,
        "256MiB",
        "log bytes after which a snapshot is taken and the log purged",
    ),
    setting(
        Section::Master,
        "keep_log_entries",
        Kind::Integer(0, u64::MAX),
        "50000",
        "log entries kept behind the snapshot for lagging standbys",
    ),
    setting(
        Section::Master,
        "snapshot_url",
        Kind::Text,
        "",
        "where snapshots are published: file:///path or s3://bucket/prefix?endpoint=URL&region=NAME; the keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    )
    .otherwise("they stay on the masters' own disks"),
    setting(
        Section::Master,
        "snapshot_interval",
        Kind::Duration,
        "10m",
        "how often each standby publishes a snapshot, one after the other; 0: only what the log's growth makes, and on demand",
    ),
    setting(
        Section::Master,
        "snapshot_retain",
        Kind::Integer(2, 1_000),
        "2",
        "published snapshots that each master keeps",
    ),
    setting(
        Section::Master,
        "snapshot_bytes_per_s",
        Kind::Size,
        "0",
        "bytes of snapshots that a master sends to standbys a second, all together, and as many again that it publishes; 0: as fast as it goes",
    ),
    setting(
        Section::Master,
        "snapshot_on_shutdown",
        Kind::Boolean,
        "true",
        "whether a master that is asked to stop publishes what is new, within 30 s",
    ),
    setting(
        Section::Master,
        "checkpoint_interval",
        Kind::Duration,
        "5s",
        "how often the masters compare their states; one that differs from the majority starts over; 0: this master does not, and takes its own word for its snapshots",
    ),
    // Datanode.
    setting(
        Section::Datanode,
        "listen",
        Kind::Address(DATANODE_PORT),
        "127.0.0.1:50052",
        "address this datanode serves data and RPC on; its host governs every port of the role",
    )
    .flags(&[alias("port", Unit::Port)]),
    setting(
        Section::Datanode,
        "http_port",
        Kind::Integer(0, 65535),
        "9300",
        "port of metrics, health and admin HTTP, on the host of listen; 0 picks a free one",
    ),
    setting(Section::Datanode, "advertise", Kind::Address(DATANODE_PORT), "", "address clients reach this datanode at")
        .otherwise("listen"),
    setting(Section::Datanode, "dram", Kind::Size, "1GiB", "memory lent to the pool")
        .flags(&[alias("global_segment_size", Unit::LooseSize)])
        .environment(&[alias("MOONCAKE_GLOBAL_SEGMENT_SIZE", Unit::LooseSize)]),
    setting(
        Section::Datanode,
        "data_dir",
        Kind::Path,
        "/var/lib/tidepool/datanode",
        "directory of this datanode's persistent id",
    ),
    setting(
        Section::Datanode,
        "host_id",
        Kind::Text,
        "",
        "name of the physical host; copies of an object spread over hosts",
    )
    .otherwise("the host name"),
    setting(Section::Datanode, "segment_size", Kind::Size, "64GiB", "largest segment the memory is split into"),
    setting(
        Section::Datanode,
        "hugepages",
        Kind::Boolean,
        "false",
        "use huge pages of the hugetlb pool where enough are free, else plain ones",
    ),
    setting(
        Section::Datanode,
        "prefault",
        Kind::Boolean,
        "true",
        "take the pages in the background after the start, instead of when they are first written",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_parses_and_every_name_is_one() {
        let mut paths = std::collections::BTreeSet::new();
        for setting in SETTINGS {
            assert!(paths.insert(setting.path()), "{} is listed twice", setting.path());
            if setting.default.is_empty() {
                assert!(
                    !setting.otherwise.is_empty(),
                    "{}: says neither a default nor what happens without one",
                    setting.path()
                );
            } else {
                setting.kind.parse(setting.default).unwrap_or_else(|error| panic!("{}: {error}", setting.path()));
            }
            assert!(
                setting.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{}",
                setting.path()
            );
            assert!(!setting.help.ends_with('.'), "{}: help is one phrase", setting.path());
        }
    }

    #[test]
    fn a_role_has_fewer_than_forty_settings() {
        // Of the shared ones a master takes how it logs; whom to ask, as whom and for how long is the others'. What is said
        // once, at the first start, is not lived with.
        let shared = Setting::of(Section::Shared).count();
        let logging = Setting::of(Section::Shared).filter(|setting| setting.name.starts_with("log_")).count();
        for (section, of_all) in [(Section::Master, logging), (Section::Datanode, shared)] {
            let first = ["join", "restore_from", "accept_data_loss"];
            let lasting = Setting::of(section).filter(|setting| !first.contains(&setting.name)).count();
            assert!(of_all + lasting < 40, "{section:?}: {}", of_all + lasting);
        }
    }
}
