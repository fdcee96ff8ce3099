//! The links of one laboratory, and what can be done to them: in namespaces where this user may have them, else through proxies.

mod namespaces;
mod proxies;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};

pub use namespaces::{Host, Namespaces};
pub use proxies::{Proxies, ROLE};

use super::Refused;

/// How long a role whose cable is pulled may take to answer, to be found out.
const REACH_WITHIN: Duration = Duration::from_millis(300);

/// Which way a cut works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// Nothing gets from the first to the second.
    OneWay,
    /// Nothing gets through.
    Both,
}

/// The links of one laboratory.
pub enum Network {
    /// Every role in a network namespace: packets are dropped.
    Namespaces(Namespaces),
    /// Every role on loopback behind a proxy: what is sent is held back.
    Proxies(Proxies),
}

impl Network {
    pub(super) fn namespaces() -> Result<Network> {
        Namespaces::open().map(Network::Namespaces)
    }

    pub(super) fn proxies() -> Network {
        Network::Proxies(Proxies::default())
    }

    /// The role's cable is pulled, or put in again.
    pub fn set_link(&self, name: &str, up: bool) -> Result<()> {
        match self {
            Network::Namespaces(links) => links.set_link(name, up),
            Network::Proxies(links) => {
                links.set_link(name, up);
                Ok(())
            }
        }
    }

    /// What shows that a role whose cable is pulled cannot be reached.
    pub fn unreachable(&self, name: &str, address: SocketAddr) -> Result<String> {
        match self {
            Network::Namespaces(_) => {
                let answer = std::net::TcpStream::connect_timeout(&address, REACH_WITHIN);
                ensure!(answer.is_err(), "{name} can be reached at {address}");
                Ok(format!("{address} cannot be reached"))
            }
            Network::Proxies(links) => {
                ensure!(links.dropped() > 0, "nothing to or from {name} was held back");
                Ok(format!("{address} gets and sends nothing"))
            }
        }
    }

    /// Nothing passes between two roles any more; connections hang.
    pub fn cut(&self, from: &str, to: &str, direction: Direction) -> Result<()> {
        match self {
            Network::Namespaces(links) => links.cut(from, to, direction),
            Network::Proxies(links) => {
                links.cut(from, to, direction);
                Ok(())
            }
        }
    }

    /// Cuts a role off from the harness and its clients, in the given directions.
    pub fn cut_from_clients(&self, name: &str, hears: bool, is_heard: bool) -> Result<()> {
        match self {
            Network::Namespaces(links) => links.cut_from_clients(name, hears, is_heard),
            Network::Proxies(links) => {
                links.cut_from_clients(name, hears, is_heard);
                Ok(())
            }
        }
    }

    /// Of the packets that leave or reach a role, so many of a thousand are lost. Needs namespaces: a proxy carries streams.
    pub fn lose(&self, name: &str, of_thousand: u32) -> Result<()> {
        match self {
            Network::Namespaces(links) => links.lose(name, of_thousand),
            Network::Proxies(_) => Err(Refused("packets are lost in namespaces only".into()).into()),
        }
    }

    /// What a role sends passes at this rate.
    pub fn throttle(&self, name: &str, kbit_per_s: u32) -> Result<()> {
        match self {
            Network::Namespaces(links) => links.throttle(name, kbit_per_s),
            Network::Proxies(links) => {
                links.throttle(name, kbit_per_s);
                Ok(())
            }
        }
    }

    /// Every link is whole again.
    pub fn heal(&self) -> Result<()> {
        match self {
            Network::Namespaces(links) => links.heal(),
            Network::Proxies(links) => {
                links.heal();
                Ok(())
            }
        }
    }

    /// How much was dropped or held back since the laboratory was opened: packets that the rules dropped (lossy links: since they
    /// became so), or looks at what waits behind a cut.
    pub fn dropped(&self) -> Result<u64> {
        match self {
            Network::Namespaces(links) => links.dropped(),
            Network::Proxies(links) => Ok(links.dropped()),
        }
    }

    /// What waited or was dropped where a role's sending is throttled; fails when nothing did.
    pub fn queueing(&self, name: &str) -> Result<String> {
        match self {
            Network::Namespaces(links) => links.queueing(name),
            Network::Proxies(links) => links.queueing(name),
        }
    }
}
