//! `tidepool master`: one member of the quorum, until a signal, or until it cannot go on.

use std::path::PathBuf;
use std::time::Duration;

use tidepool_master::directory::Strategy;
use tidepool_master::restore::{self, RestoreFailed};
use tidepool_master::snapshots::Location;
use tidepool_master::{DynamicReplication, FailoverReclaim, LogFilter, Master, MasterError, MasterOptions, Stopped};
use tidepool_proto::{Address, Error, ErrorCode, NodeId};
use tidepool_raft::{ElectionProfile, Member};

use crate::anew;
use crate::args::RoleArgs;
use crate::config::Config;
use crate::config::setting::MASTER_PORT;
use crate::exit::{Exit, Failed};
use crate::http::{HttpPort, Ready, RoleFace};
use crate::logging::LogControl;
use crate::output;
use crate::port_file::PortFile;
use crate::signals::{StopSignals, stop_in_order};

/// How long an empty master waits to be told whether snapshots lie where it would publish.
const CHECK_LIMIT: Duration = Duration::from_secs(20);

/// Runs the role. A leader that is asked to stop hands over first.
pub async fn run(config: &Config, role: &RoleArgs, log: LogControl) -> anyhow::Result<Exit> {
    let mut signals = StopSignals::listen()?;
    let options = options(config)?;
    let node_id = options.node_id;
    before_the_start(config, &options).await?;
    let http =
        HttpPort::start(&options.listen, config.integer("master.http_port") as u16, "--http-port", log.clone()).await?;
    let master = tokio::select! {
        started = start(options, log) => started?,
        name = signals.received() => {
            tracing::info!("{name}: stopping before the master was up");
            return Ok(Exit::Success);
        }
    };
    http.attach(face(&master));
    if let Some(path) = &role.port_file {
        let file = PortFile {
            role: "master".to_owned(),
            pid: std::process::id(),
            node_id: node_id.0,
            rpc: master.local_address().to_string(),
            http: http.address.to_string(),
            datanode_http: None,
        };
        file.write(path)?;
    }
    let exit = tokio::select! {
        name = signals.received() => {
            tracing::info!("{name}: stopping; a leader hands over first");
            stop_in_order(&mut signals, master.shutdown()).await;
            Exit::Success
        }
        stopped = master.stopped() => {
            if matches!(stopped, Stopped::Removed(_) | Stopped::Diverged(_)) {
                stop_in_order(&mut signals, master.shutdown()).await;
            }
            let exit = how_it_ended(&stopped);
            if matches!(stopped, Stopped::Diverged(_)) {
                http.stop().await;
                return Err(anew::start());
            }
            exit
        }
    };
    http.stop().await;
    Ok(exit)
}

/// What an empty data directory needs first: a restore, if it was asked for; or the certainty that nothing is lost by beginning
/// empty.
async fn before_the_start(config: &Config, options: &MasterOptions) -> anyhow::Result<()> {
    let restores = restore_location(config)?.filter(|_| !options.join);
    let guards = options
        .snapshot_location
        .clone()
        .filter(|_| !options.join && restores.is_none() && !config.boolean("master.accept_data_loss"));
    let (data_dir, node_id, address) = (options.data_dir.clone(), options.node_id, options.advertise.clone());
    if restores.is_some() {
        let directory = data_dir.clone();
        if tokio::task::spawn_blocking(move || restore::is_wanted(&directory)).await?? {
            restore::check_others(node_id, &options.gather).await?;
        }
    }
    // An S3 store runs its own requests and must not be called from an async thread.
    let Some(location) = restores else {
        return match guards {
            Some(location) => check_nothing_to_lose(location, data_dir).await,
            None => Ok(()),
        };
    };
    let shown = data_dir.display().to_string();
    let work = move || restore::restore(&location, &data_dir, node_id, &address);
    match tokio::task::spawn_blocking(work).await?? {
        Some(report) => {
            tracing::warn!(from = report.from, objects = report.objects_kept, "restored into a new cluster");
            output::print(report.to_string().as_bytes())?;
        }
        None => tracing::info!(data_dir = shown, "--restore-from means nothing: the data directory holds data"),
    }
    Ok(())
}

/// Nothing is known of a place that does not answer in time, and nobody begins empty beside snapshots without the word.
async fn check_nothing_to_lose(location: Location, data_dir: PathBuf) -> anyhow::Result<()> {
    let place = location.to_string();
    let (say, said) = tokio::sync::oneshot::channel();
    // A thread that nobody waits for: a file system that hangs must not hold up the end of the process either.
    std::thread::Builder::new().name("snapshots-check".to_owned()).spawn(move || {
        // Nobody listens any more after the limit.
        say.send(restore::check_nothing_to_lose(&location, &data_dir)).ok();
    })?;
    let why = match tokio::time::timeout(CHECK_LIMIT, said).await {
        Ok(Ok(Ok(()))) => return Ok(()),
        Ok(Ok(Err(RestoreFailed::Store(error)))) => error.to_string(),
        Ok(Ok(Err(error))) => return Err(error.into()),
        Ok(Err(_)) => "the check ended without a word".to_owned(),
        Err(_) => format!("it did not answer within {} s", CHECK_LIMIT.as_secs()),
    };
    let error = Error::new(
        ErrorCode::Unavailable,
        format!(
            "the data directory is empty, and whether snapshots lie at {place} is not known: {why}; start again when it answers, join \
             the cluster that is running with --join, or begin an empty one with --accept-data-loss"
        ),
    );
    Err(RestoreFailed::Refused(error).into())
}

fn restore_location(config: &Config) -> anyhow::Result<Option<Location>> {
    match config.text("master.restore_from") {
        "" => Ok(None),
        url => Ok(Some(url.parse().map_err(|error| Failed::usage(format!("master.restore_from: {error}")))?)),
    }
}

/// Starts a master whose log level can be changed over RPC.
pub async fn start(options: MasterOptions, log: LogControl) -> Result<Master, MasterError> {
    Master::start(options, LogFilter::new(move |filter| log.set(filter))).await
}

/// What a master shows over HTTP.
pub fn face(master: &Master) -> RoleFace {
    let (for_metrics, for_ready) = (master.clone(), master.clone());
    RoleFace {
        routes: master.routes(),
        metrics: Box::new(move || {
            let mut families = for_metrics.metrics().gather();
            families.extend(for_metrics.raft_metrics().gather());
            families
        }),
        ready: Box::new(move || {
            let now = for_ready.readiness();
            let mut report = serde_json::json!(now);
            report["behind"] = now.leader_index.saturating_sub(now.applied_index).into();
            Ready { ready: now.ready, report, reason: now.reason }
        }),
    }
}

/// Says why a master ended by itself.
pub fn how_it_ended(stopped: &Stopped) -> Exit {
    match stopped {
        Stopped::Shutdown => Exit::Success,
        Stopped::Removed(reason) => {
            tracing::warn!(%reason, "this master is no member any more; it ends");
            Exit::Removed
        }
        Stopped::Diverged(reason) => {
            tracing::error!(%reason, "this master's state is not to be trusted; its next start begins with the last agreed snapshot");
            Exit::Diverged
        }
        Stopped::Fatal(reason) => {
            tracing::error!(%reason, "the master cannot go on");
            Exit::Failure
        }
    }
}

/// Options from settings, with the address rules: what is advertised must be reachable, what is listened on must
/// fit what is advertised.
pub fn options(config: &Config) -> anyhow::Result<MasterOptions> {
    let node_id = config.integer("master.node_id");
    let members = config.members("master.members");
    let join = config.boolean("master.join");
    let restores = restore_location(config)?.is_some();
    if join && restores {
        return Err(Failed::usage("--join and --restore-from exclude each other: a restore begins a cluster"));
    }
    if join && !members.is_empty() {
        return Err(Failed::usage(
            "--join takes no --members: whoever leads the cluster tells this master who the others are; leave one of them out",
        ));
    }
    let own = members.iter().find(|member| member.node_id == node_id).map(|member| member.address.clone());
    if own.is_none() && !members.is_empty() {
        let ids: Vec<String> = members.iter().map(|member| member.node_id.to_string()).collect();
        return Err(Failed::usage(format!(
            "master.members lists {} but not this master, {node_id}; set --node-id to one of them, or add it; to join a cluster \
             that exists, use --join instead",
            ids.join(", ")
        )));
    }
    let set_listen = config.address("master.listen");
    let mut listen = match (&set_listen, &own) {
        (Some(listen), _) => listen.clone(),
        (None, Some(own)) => own.clone(),
        (None, None) => Address::new("127.0.0.1", MASTER_PORT)?,
    };
    if listen.port() == 0 && members.is_empty() && !join {
        listen = listen.with_port(free_port(listen.host())?);
    }
    let advertise = config.address("master.advertise").or_else(|| own.clone()).unwrap_or_else(|| listen.clone());
    if let Some(own) = own.filter(|own| *own != advertise) {
        return Err(Failed::usage(format!(
            "--advertise {advertise} and this master's entry in --members, {own}, differ; the entry alone is enough"
        )));
    }
    let multi_host = members.iter().any(|member| !member.address.is_loopback());
    let setting = if members.is_empty() { "--advertise" } else { "this master's entry in --members" };
    advertise.check_advertisable(multi_host, setting).map_err(|error| Failed::usage(error.message()))?;
    if multi_host && listen.is_loopback() {
        return Err(Failed::usage(format!(
            "listening on {listen} while the quorum spans hosts: no other member could reach it; set --listen to this host's address"
        )));
    }
    let gather: Vec<Member> = match restores {
        true => members.iter().map(|m| Member { node_id: NodeId(m.node_id), address: m.address.clone() }).collect(),
        false => Vec::new(),
    };
    // The member with the lowest id restores; the others wait until it takes them in.
    let join = join || restores && members.iter().any(|member| member.node_id < node_id);
    let members = match members.is_empty() {
        _ if join && restores => Vec::new(),
        true if join => Vec::new(),
        true => vec![Member { node_id: NodeId(node_id), address: advertise.clone() }],
        false => members.into_iter().map(|m| Member { node_id: NodeId(m.node_id), address: m.address }).collect(),
    };
    let mut options = MasterOptions::new(NodeId(node_id), config.path("master.data_dir"), listen, advertise, members);
    options.join = join;
    options.gather = gather;
    options.election = match config.text("master.election") {
        "lan" => ElectionProfile::Lan,
        "wan" => ElectionProfile::Wan,
        _ => ElectionProfile::Default,
    };
    options.lease_ttl_default = config.duration("master.lease_ttl");
    options.lease_ttl_max = config.duration("master.lease_ttl_max");
    options.put_start_discard_timeout = config.duration("master.put_start_discard_timeout");
    options.failover_reclaim = match config.text("master.failover_reclaim") {
        "protect" => FailoverReclaim::Protect,
        _ => FailoverReclaim::Allow,
    };
    options.eviction_policy = config.text("master.eviction_policy").to_owned();
    options.evict_soft_pinned = config.boolean("master.evict_soft_pinned");
    options.soft_pin_ttl_default = config.duration("master.soft_pin_ttl");
    options.objects_max = config.integer("master.objects_max");
    options.granted_bytes_min = config.size("master.granted_bytes_min");
    options.hard_pinned_percent_max = config.integer("master.hard_pinned_percent_max");
    options.audit_interval = config.duration("master.audit_interval");
    (options.allocation_strategy, options.local_first) = match config.text("master.allocation_strategy") {
        "random" => (Strategy::Random, false),
        "free_ratio_first" => (Strategy::FreeRatioFirst, false),
        "local_first" => (Strategy::Balanced, true),
        _ => (Strategy::Balanced, false),
    };
    options.session_idle_timeout = config.duration("master.session_idle_timeout");
    options.heal_bytes_per_second = config.size("master.heal_bytes_per_second");
    options.dynamic_replication = match config.text("master.dynamic_replication") {
        "observe" => DynamicReplication::Observe,
        "enforce" => DynamicReplication::Enforce,
        _ => DynamicReplication::Off,
    };
    options.dynamic_replication_reads = config.integer("master.dynamic_replication_reads") as u32;
    options.dynamic_replication_window = config.duration("master.dynamic_replication_window");
    options.dynamic_replicas_max = config.integer("master.dynamic_replicas_max") as usize;
    options.node_heartbeat_interval = config.duration("master.node_heartbeat_interval");
    options.node_suspect_timeout = config.duration("master.node_suspect_timeout");
    options.node_forget_timeout = config.duration("master.node_forget_timeout");
    options.slow_call = config.duration("master.slow_call");
    options.snapshot_log_bytes = config.size("master.snapshot_log_bytes");
    options.keep_log_entries = config.integer("master.keep_log_entries");
    options.snapshot_location = match config.text("master.snapshot_url") {
        "" => None,
        url => Some(url.parse().map_err(|error| Failed::usage(format!("master.snapshot_url: {error}")))?),
    };
    options.snapshot_interval = config.duration("master.snapshot_interval");
    options.snapshot_retain = config.integer("master.snapshot_retain") as usize;
    options.snapshot_upload_bytes_per_second = config.size("master.snapshot_bytes_per_s");
    options.snapshot_on_shutdown = config.boolean("master.snapshot_on_shutdown");
    options.snapshot_send_bytes_per_s = config.size("master.snapshot_bytes_per_s");
    options.checkpoint_interval = config.duration("master.checkpoint_interval");
    check_order(config, "master.lease_ttl", "master.lease_ttl_max")?;
    check_order(config, "master.node_heartbeat_interval", "master.node_suspect_timeout")?;
    check_order(config, "master.node_suspect_timeout", "master.node_forget_timeout")?;
    Ok(options)
}

fn check_order(config: &Config, smaller: &str, larger: &str) -> anyhow::Result<()> {
    let (low, high) = (config.value(smaller), config.value(larger));
    if config.duration(smaller) > config.duration(larger) {
        return Err(Failed::usage(format!(
            "{smaller} = {} ({}) is longer than {larger} = {} ({})",
            low.text, low.origin, high.text, high.origin
        )));
    }
    Ok(())
}

/// A port nobody listens on now; only a quorum of one may start with port 0, since nobody else must know its address.
pub fn free_port(host: &str) -> anyhow::Result<u16> {
    let listener = std::net::TcpListener::bind((host, 0)).map_err(|error| {
        Failed::usage(format!("cannot listen on {host}: {error}; --listen names an address of this host"))
    })?;
    Ok(listener.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(flags: &[(&str, &str)]) -> anyhow::Result<MasterOptions> {
        options(&Config::of_flags(flags)?)
    }

    #[test]
    fn the_members_list_alone_places_a_master() {
        let options =
            with(&[("master.node_id", "2"), ("master.members", "1=10.0.0.1,2=10.0.0.2:7,3=10.0.0.3")]).unwrap();
        assert_eq!(options.listen.to_string(), "10.0.0.2:7");
        assert_eq!(options.advertise.to_string(), "10.0.0.2:7");
        assert_eq!(options.members.len(), 3);
        let alone = with(&[]).unwrap();
        assert_eq!(alone.listen.to_string(), "127.0.0.1:50051");
        assert_eq!(alone.members.len(), 1);
    }

    #[test]
    fn a_master_that_joins_names_nobody_and_says_where_it_is() {
        let options = with(&[("master.join", "true"), ("master.node_id", "4"), ("master.listen", "10.0.0.4")]).unwrap();
        assert!(options.join && options.members.is_empty());
        assert_eq!(options.advertise.to_string(), "10.0.0.4:50051");
        for (flags, wanted) in [
            (vec![("master.join", "true"), ("master.members", "1=10.0.0.1")], "--members"),
            (vec![("master.join", "true"), ("master.listen", "0.0.0.0")], "--advertise"),
            (vec![("master.join", "true"), ("master.listen", "127.0.0.1:0")], "port 0"),
        ] {
            let error = with(&flags).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn a_quorum_of_one_may_take_any_free_port() {
        assert_ne!(with(&[("master.listen", "127.0.0.1:0")]).unwrap().advertise.port(), 0);
    }

    /// User report 11: 0.0.0.0 and loopback were advertised to other hosts. Fails without check_advertisable.
    #[test]
    fn case_011_what_nobody_could_reach_is_refused_with_the_flag_to_set() {
        let three = "1=10.0.0.1,2=10.0.0.2,3=10.0.0.3";
        for (flags, wanted) in [
            (vec![("master.listen", "0.0.0.0")], "--advertise"),
            (vec![("master.listen", "[::]:50051")], "--advertise"),
            (vec![("master.members", "1=127.0.0.1,2=10.0.0.2,3=10.0.0.3")], "--members"),
            (vec![("master.members", "1=0.0.0.0,2=10.0.0.2,3=10.0.0.3")], "--members"),
            (vec![("master.members", three), ("master.listen", "127.0.0.1")], "--listen"),
            (vec![("master.members", three), ("master.node_id", "4")], "--node-id"),
            (vec![("master.members", three), ("master.advertise", "10.0.0.9")], "--advertise"),
            (vec![("master.members", "1=127.0.0.1:0,2=127.0.0.1:2,3=127.0.0.1:3")], "port 0"),
        ] {
            let error = with(&flags).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{error}");
        }
        with(&[("master.members", three), ("master.listen", "0.0.0.0")]).unwrap();
        with(&[("master.listen", "0.0.0.0"), ("master.advertise", "10.0.0.1")]).unwrap();
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let error = with(&[("master.lease_ttl", "2m")]).unwrap_err().to_string();
        assert!(error.contains("master.lease_ttl_max = 10s (default)"), "{error}");
        with(&[("master.node_suspect_timeout", "1h")]).unwrap_err();
    }
}
