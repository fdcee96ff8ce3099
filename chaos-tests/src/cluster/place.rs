//! Where a role lives: its addresses, its network namespace, its disk and the faults built into it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;

use super::ClusterOptions;
use crate::lab::{Disk, Lab, Network, Preload};
use crate::ports;

/// Ports of a role that has an address of its own.
const OWN_RPC_PORT: u16 = 50_051;
const OWN_HTTP_PORT: u16 = 9_003;

/// What a pool stands on.
#[derive(Clone, Debug, Default)]
pub enum Ground {
    /// Loopback: all roles at 127.0.0.1, at ports that were free.
    #[default]
    Loopback,
    /// A laboratory: every role at an address of its own.
    Lab(Lab),
}

/// Where one role lives.
pub(super) struct Place {
    /// Where it listens.
    pub(super) listen: SocketAddr,
    /// Where it is known: the same, or its proxy.
    pub(super) rpc: SocketAddr,
    pub(super) http: SocketAddr,
    pub(super) namespace: Option<PathBuf>,
    pub(super) data_dir: PathBuf,
    pub(super) disk: Option<Arc<Disk>>,
    pub(super) preload: Option<Arc<Preload>>,
}

/// Where the roles of these names live, in their order. Masters may have disks and built-in faults.
pub(super) fn places(options: &ClusterOptions, names: &[String]) -> Result<Vec<Place>> {
    let ports = match &options.ground {
        Ground::Lab(lab) if matches!(lab.network(), Network::Namespaces(_)) => {
            [OWN_RPC_PORT, OWN_HTTP_PORT].repeat(names.len())
        }
        Ground::Loopback | Ground::Lab(_) => ports::reserve(2 * names.len())?,
    };
    names.iter().zip(ports.chunks(2)).map(|(name, ports)| place(options, name, ports)).collect()
}

fn place(options: &ClusterOptions, name: &str, ports: &[u16]) -> Result<Place> {
    let is_master = name.starts_with("master");
    let at_home = SocketAddr::from((Ipv4Addr::LOCALHOST, ports[0]));
    let (listen, rpc, namespace) = match &options.ground {
        Ground::Loopback => (at_home, at_home, None),
        Ground::Lab(lab) => match lab.network() {
            Network::Namespaces(links) => {
                let host = links.add_host(name)?;
                let own = SocketAddr::new(host.ip, ports[0]);
                (own, own, Some(host.namespace))
            }
            Network::Proxies(proxies) => (at_home, proxies.put_before(name, at_home)?, None),
        },
    };
    let disk = match (&options.ground, options.disk_bytes) {
        (Ground::Lab(lab), Some(bytes)) if is_master => Some(lab.add_disk(name, bytes)?),
        _ => None,
    };
    let data_dir = match &disk {
        Some(disk) => disk.path().join("data"),
        None => options.work_dir.join(name),
    };
    let preload = match options.built_in_faults && is_master {
        true => Some(Arc::new(Preload::create(&options.work_dir.join(format!("{name}.faults")), &data_dir)?)),
        false => None,
    };
    let http = SocketAddr::new(listen.ip(), ports[1]);
    Ok(Place { listen, rpc, http, namespace, data_dir, disk, preload })
}
