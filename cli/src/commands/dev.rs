//! `tidepool dev`: a whole pool in one process, a quorum of one and a datanode, for a first look. The same code as
//! the separate roles.

use anyhow::Context as _;
use tempfile::TempDir;
use tidepool_datanode::{Datanode, DatanodeOptions, split_dram};
use tidepool_master::{MasterOptions, Stopped};
use tidepool_proto::{Address, NodeId};
use tidepool_raft::Member;

use crate::anew;
use crate::args::DevArgs;
use crate::commands::{self, master::free_port};
use crate::config::setting::{DATANODE_PORT, MASTER_PORT};
use crate::config::value::{parse_size, show_size};
use crate::exit::{Exit, Failed};
use crate::http::HttpPort;
use crate::logging::LogControl;
use crate::output;
use crate::port_file::PortFile;
use crate::signals::{StopSignals, stop_in_order};

/// Runs both roles until a signal, or until one of them cannot go on. Without a data directory one is made and handed to
/// `temporary`, whose owner removes it when nothing runs any more.
pub async fn run(args: &DevArgs, log: LogControl, temporary: &mut Option<TempDir>) -> anyhow::Result<Exit> {
    let mut signals = StopSignals::listen()?;
    let dram = parse_size(&args.dram).map_err(|why| Failed::usage(format!("--dram {}: {why}", args.dram)))?;
    let host = Address::parse(&args.host, 0).map_err(|error| Failed::usage(error.message()))?;
    let port = |wanted: u16| if args.free_ports { free_port(host.host()) } else { Ok(wanted) };
    let http_port = |wanted: u16| if args.free_ports { 0 } else { wanted };
    let rpc = host.with_port(port(MASTER_PORT)?);
    rpc.check_advertisable(false, "--host").map_err(|error| Failed::usage(error.message()))?;

    let data_dir = match &args.data_dir {
        Some(given) => given.clone(),
        None => {
            let fresh = tempfile::Builder::new().prefix("tidepool-dev-").tempdir();
            temporary.insert(fresh.context("cannot make a temporary directory")?).path().to_owned()
        }
    };

    let http = HttpPort::start(&host, http_port(9003), "--free-ports", log.clone()).await?;
    let datanode_http = HttpPort::start(&host, http_port(9300), "--free-ports", log.clone()).await?;
    let members = vec![Member { node_id: NodeId(1), address: rpc.clone() }];
    let options = MasterOptions::new(NodeId(1), data_dir.join("master"), rpc.clone(), rpc.clone(), members);
    let master = commands::master::start(options, log).await?;
    http.attach(commands::master::face(&master));
    let listen = host.with_port(port(DATANODE_PORT)?);
    let mut options =
        DatanodeOptions::new(data_dir.join("datanode"), listen, vec![rpc.clone()], split_dram(dram, dram));
    options.host_id = commands::datanode::host_name();
    let datanode = Datanode::start(options).await?;
    datanode_http.attach(commands::datanode::face(&datanode));

    if let Some(path) = &args.role.port_file {
        let file = PortFile {
            role: "dev".to_owned(),
            pid: std::process::id(),
            node_id: 1,
            rpc: rpc.to_string(),
            http: http.address.to_string(),
            datanode_http: Some(datanode_http.address.to_string()),
        };
        file.write(path)?;
    }
    let masters =
        if rpc.port() == MASTER_PORT && rpc.is_loopback() { String::new() } else { format!(" --masters {rpc}") };
    output::print(
        format!(
            "a pool of {} is up: master at {rpc}, datanode at {}, metrics at http://{}/metrics\n\n  \
             tidepool put hello ./file{masters}\n  tidepool get hello{masters}\n  tidepool status{masters}\n\n\
             everything is in {}{}; stop with Ctrl-C\n",
            show_size(dram),
            datanode.address(),
            http.address,
            data_dir.display(),
            if args.data_dir.is_none() { ", which goes when this ends" } else { "" },
        )
        .as_bytes(),
    )?;
    let exit = tokio::select! {
        name = signals.received() => {
            tracing::info!("{name}: stopping");
            let stop = async {
                drop(datanode.shutdown().await);
                master.shutdown().await;
            };
            stop_in_order(&mut signals, stop).await;
            Exit::Success
        }
        () = stdin_ends(args.exit_with_stdin) => {
            tracing::info!("standard input ended: stopping");
            drop(datanode.shutdown().await);
            master.shutdown().await;
            Exit::Success
        }
        stopped = master.stopped() => {
            let exit = commands::master::how_it_ended(&stopped);
            if let Stopped::Diverged(_) = stopped {
                if args.data_dir.is_some() {
                    let stop = async {
                        drop(datanode.shutdown().await);
                        master.shutdown().await;
                    };
                    stop_in_order(&mut signals, stop).await;
                    tokio::join!(http.stop(), datanode_http.stop());
                    return Err(anew::start());
                }
                tracing::error!("without --data-dir there is nothing to begin again with; start it again");
            }
            exit
        }
        reason = datanode.stopped() => commands::datanode::how_it_ended(&reason),
    };
    http.stop().await;
    datanode_http.stop().await;
    Ok(exit)
}

/// Resolves when standard input ends, if that is asked for. Read by a thread of its own: a runtime would wait for it at its end.
async fn stdin_ends(wanted: bool) {
    let (ended, heard) = tokio::sync::oneshot::channel();
    if wanted {
        std::thread::spawn(move || {
            // An error ends it as well as the end does.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            // Fails when the pool has stopped by itself.
            let _ = ended.send(());
        });
        if heard.await.is_ok() {
            return;
        }
    }
    std::future::pending().await
}
