//! `tidepool datanode`: lends memory to the pool, until a signal, or until it is fenced.

use tidepool_datanode::{Datanode, DatanodeOptions, HugePages, Prefault, StopReason, split_dram};

use crate::args::RoleArgs;
use crate::config::Config;
use crate::exit::{Exit, Failed};
use crate::http::{HttpPort, Ready, RoleFace};
use crate::logging::LogControl;
use crate::port_file::PortFile;
use crate::signals::{StopSignals, stop_in_order};

/// Runs the role. Asked to stop, it leaves the pool in order.
pub async fn run(config: &Config, role: &RoleArgs, log: LogControl) -> anyhow::Result<Exit> {
    let mut signals = StopSignals::listen()?;
    let options = options(config)?;
    let http =
        HttpPort::start(&options.listen, config.integer("datanode.http_port") as u16, "--http-port", log).await?;
    let datanode = Datanode::start(options).await?;
    http.attach(face(&datanode));
    if let Some(path) = &role.port_file {
        let file = PortFile {
            role: "datanode".to_owned(),
            pid: std::process::id(),
            node_id: datanode.node_id().map_or(0, |node| node.0),
            rpc: datanode.address().to_string(),
            http: http.address.to_string(),
            datanode_http: None,
        };
        file.write(path)?;
    }
    let exit = tokio::select! {
        name = signals.received() => {
            tracing::info!("{name}: leaving the pool");
            stop_in_order(&mut signals, async { drop(datanode.shutdown().await) }).await;
            Exit::Success
        }
        reason = datanode.stopped() => how_it_ended(&reason),
    };
    http.stop().await;
    Ok(exit)
}

/// What a datanode shows over HTTP.
pub fn face(datanode: &Datanode) -> RoleFace {
    let (for_metrics, for_ready) = (datanode.clone(), datanode.clone());
    RoleFace {
        routes: datanode.routes(),
        metrics: Box::new(move || for_metrics.metrics().gather()),
        ready: Box::new(move || {
            let now = for_ready.readiness();
            let reason = if now.ready { String::new() } else { now.doing.clone() };
            Ready { ready: now.ready, report: serde_json::json!(now), reason }
        }),
    }
}

/// Says why a datanode ended by itself.
pub fn how_it_ended(reason: &StopReason) -> Exit {
    if *reason == StopReason::Shutdown {
        return Exit::Success;
    }
    tracing::error!(%reason, "the datanode cannot go on");
    Exit::Failure
}

/// Options from settings, with the address rules.
pub fn options(config: &Config) -> anyhow::Result<DatanodeOptions> {
    let masters = config.addresses("masters");
    if masters.is_empty() {
        return Err(Failed::usage("no master is named; set --masters HOST[:PORT],..."));
    }
    let listen =
        config.address("datanode.listen").ok_or_else(|| Failed::usage("no address to listen on; set --listen"))?;
    let advertise = config.address("datanode.advertise");
    let multi_host = masters.iter().any(|master| !master.is_loopback());
    // Port 0 stands for the port that will be taken, so only the host is judged.
    let told = advertise.clone().unwrap_or_else(|| listen.clone());
    let judged = if told.port() == 0 { told.with_port(1) } else { told };
    let setting = if advertise.is_some() { "--advertise" } else { "--listen (or --advertise)" };
    judged.check_advertisable(multi_host, setting).map_err(|error| Failed::usage(error.message()))?;
    let dram = config.size("datanode.dram");
    let segments = split_dram(dram, config.size("datanode.segment_size"));
    if segments.is_empty() {
        return Err(Failed::usage(format!("datanode.dram = {}: lend at least 1MiB", config.text("datanode.dram"))));
    }
    let mut options = DatanodeOptions::new(config.path("datanode.data_dir"), listen, masters, segments);
    options.advertise = advertise;
    options.host_id = match config.text("datanode.host_id") {
        "" => host_name(),
        name => name.to_owned(),
    };
    options.huge_pages = if config.boolean("datanode.hugepages") { HugePages::Try } else { HugePages::Off };
    options.prefault = if config.boolean("datanode.prefault") { Prefault::Background } else { Prefault::Lazy };
    Ok(options)
}

/// This host's name, as the kernel has it.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(flags: &[(&str, &str)]) -> anyhow::Result<DatanodeOptions> {
        options(&Config::of_flags(flags)?)
    }

    /// User report 11: a datanode told other hosts to dial 127.0.0.1. Fails without check_advertisable.
    #[test]
    fn case_011_a_datanode_says_which_flag_makes_it_reachable() {
        for flags in [
            vec![("masters", "10.0.0.1")],
            vec![("masters", "10.0.0.1"), ("datanode.listen", "0.0.0.0")],
            vec![("masters", "10.0.0.1"), ("datanode.advertise", "127.0.0.1")],
        ] {
            let error = with(&flags).unwrap_err().to_string();
            assert!(error.contains("--advertise"), "{error}");
        }
        with(&[("masters", "10.0.0.1"), ("datanode.listen", "10.0.0.2:0")]).unwrap();
        with(&[("masters", "10.0.0.1"), ("datanode.listen", "0.0.0.0"), ("datanode.advertise", "10.0.0.2")]).unwrap();
        let local = with(&[("datanode.dram", "3MiB")]).unwrap();
        assert_eq!(local.segments.iter().sum::<u64>(), 3 << 20);
        assert!(with(&[("datanode.dram", "1KiB")]).is_err());
    }
}
