//! Links of a laboratory without namespaces: every role listens on loopback and is known by the address of a proxy in the harness.
//! The proxy finds out which role calls, and holds back what does not pass.
//!
//! What differs from namespaces: nothing is lost, only late; a port answers the dialler even where nothing passes; no address is
//! a role's own.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result, ensure};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};

use super::Direction;
use crate::lab::relay::{self, Pass, RelaySettings};

/// Variable in a role's environment that has its name: who calls a proxy is found by it.
pub const ROLE: &str = "CHAOS_ROLE";

/// Proxies of one pool, and the rules that they obey. A caller that is no role is a client.
#[derive(Clone, Default)]
pub struct Proxies {
    rules: Arc<Mutex<Rules>>,
}

#[derive(Default)]
struct Rules {
    /// Where each role really listens.
    behind: BTreeMap<String, SocketAddr>,
    down: BTreeSet<String>,
    cut: BTreeSet<(String, String)>,
    /// Do not hear clients.
    deaf: BTreeSet<String>,
    /// Are not heard by clients.
    mute: BTreeSet<String>,
    /// Bytes a second that a role may send.
    rates: BTreeMap<String, u64>,
    /// What happens to everything that passes a role's proxy.
    relays: BTreeMap<String, RelaySettings>,
    /// Looks at bytes that wait behind a cut.
    held: u64,
    /// Chunks that had to wait for their sender's rate.
    queued: BTreeMap<String, u64>,
    /// Connections through each role's proxy.
    joined: BTreeMap<String, u64>,
}

impl Rules {
    /// Whether anything gets from the one to the other; none: a client.
    fn passes(&self, from: Option<&str>, to: Option<&str>) -> bool {
        if [from, to].into_iter().flatten().any(|name| self.down.contains(name)) {
            return false;
        }
        match (from, to) {
            (Some(from), Some(to)) => !self.cut.contains(&(from.to_owned(), to.to_owned())),
            (None, Some(to)) => !self.deaf.contains(to),
            (Some(from), None) => !self.mute.contains(from),
            (None, None) => true,
        }
    }

    fn all_is_whole(&self) -> bool {
        [&self.down, &self.deaf, &self.mute].iter().all(|names| names.is_empty())
            && self.cut.is_empty()
            && self.rates.is_empty()
    }
}

/// One direction of one connection through the proxy of a role.
struct Way {
    rules: Arc<Mutex<Rules>>,
    /// The role whose proxy it is.
    role: String,
    /// Who connected to it, as soon as that is known; none: a client.
    caller: Arc<OnceLock<Option<String>>>,
    /// Whether this is what the caller sends.
    inwards: bool,
}

impl Way {
    /// Sender and receiver, once they are known.
    fn ends(&self) -> Option<(Option<&str>, Option<&str>)> {
        let (caller, role) = (self.caller.get()?.as_deref(), Some(self.role.as_str()));
        Some(if self.inwards { (caller, role) } else { (role, caller) })
    }
}

impl Pass for Way {
    fn settings(&self) -> RelaySettings {
        let rules = self.rules.lock();
        let mut settings = rules.relays.get(&self.role).copied().unwrap_or_default();
        match self.ends() {
            Some((from, to)) => {
                settings.stalled |= !rules.passes(from, to);
                if let Some(rate) = from.and_then(|from| rules.rates.get(from)) {
                    settings.bytes_per_s = *rate;
                }
            }
            // Whom it concerns is found out in a moment.
            None => settings.stalled |= !rules.all_is_whole(),
        }
        settings
    }

    fn held(&self) {
        self.rules.lock().held += 1;
    }

    fn queued(&self) {
        if let Some((Some(from), _)) = self.ends() {
            *self.rules.lock().queued.entry(from.to_owned()).or_default() += 1;
        }
    }
}

impl Proxies {
    /// A proxy in front of `listen`, where the role `name` is going to listen; answers where it is known from now on. Called
    /// again, it leads there.
    pub fn put_before(&self, name: &str, listen: SocketAddr) -> Result<SocketAddr> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a port for a proxy")?;
        listener.set_nonblocking(true)?;
        let (address, listener) = (listener.local_addr()?, TcpListener::from_std(listener)?);
        self.rules.lock().behind.insert(name.to_owned(), listen);
        let (proxies, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            while let Ok((near, caller)) = listener.accept().await {
                tokio::spawn(proxies.clone().join(near, caller, address, name.clone()));
            }
        });
        Ok(address)
    }

    async fn join(self, near: TcpStream, caller: SocketAddr, proxy: SocketAddr, name: String) {
        let who = Arc::new(OnceLock::new());
        let found = who.clone();
        // Detached: it ends when it has looked once.
        drop(tokio::task::spawn_blocking(move || found.set(caller_of(caller, proxy))));
        let Some(to) = self.rules.lock().behind.get(&name).copied() else { return };
        *self.rules.lock().joined.entry(name.clone()).or_default() += 1;
        let way = |inwards| Way { rules: self.rules.clone(), role: name.clone(), caller: who.clone(), inwards };
        relay::join(near, to, way(true), way(false)).await;
    }

    pub(super) fn set_link(&self, name: &str, up: bool) {
        let mut rules = self.rules.lock();
        let _ = if up { rules.down.remove(name) } else { rules.down.insert(name.to_owned()) };
    }

    pub(super) fn cut(&self, from: &str, to: &str, direction: Direction) {
        let mut rules = self.rules.lock();
        rules.cut.insert((from.to_owned(), to.to_owned()));
        if direction == Direction::Both {
            rules.cut.insert((to.to_owned(), from.to_owned()));
        }
    }

    pub(super) fn cut_from_clients(&self, name: &str, hears: bool, is_heard: bool) {
        let mut rules = self.rules.lock();
        if !hears {
            rules.deaf.insert(name.to_owned());
        }
        if !is_heard {
            rules.mute.insert(name.to_owned());
        }
    }

    pub(super) fn throttle(&self, name: &str, kbit_per_s: u32) {
        self.rules.lock().rates.insert(name.to_owned(), u64::from(kbit_per_s) * 1000 / 8);
    }

    pub(super) fn heal(&self) {
        let mut rules = self.rules.lock();
        rules.down.clear();
        rules.cut.clear();
        rules.deaf.clear();
        rules.mute.clear();
        rules.rates.clear();
    }

    pub(super) fn dropped(&self) -> u64 {
        self.rules.lock().held
    }

    pub(super) fn queueing(&self, name: &str) -> Result<String> {
        let queued = self.rules.lock().queued.get(name).copied().unwrap_or(0);
        ensure!(queued > 0, "nothing that {name} sent had to wait");
        Ok(format!("{queued} chunks of {name} had to wait"))
    }

    /// What happens to everything that passes the proxy of `name`.
    pub(in crate::lab) fn relay(&self, name: &str, settings: RelaySettings) {
        self.rules.lock().relays.insert(name.to_owned(), settings);
    }

    /// Connections that went through the proxy of `name`.
    pub(in crate::lab) fn joined(&self, name: &str) -> u64 {
        self.rules.lock().joined.get(name).copied().unwrap_or(0)
    }
}

/// The role that holds the far end of a connection from `caller` to `proxy`, if it is one.
fn caller_of(caller: SocketAddr, proxy: SocketAddr) -> Option<String> {
    let inode = socket_between(&std::fs::read_to_string("/proc/net/tcp").ok()?, caller, proxy)?;
    let wanted = format!("socket:[{inode}]");
    let processes = std::fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path());
    processes.filter_map(|process| Some((role_of(&process)?, process))).find_map(|(role, process)| {
        let mut open = std::fs::read_dir(process.join("fd")).ok()?.flatten();
        open.any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == wanted.as_str()))
            .then_some(role)
    })
}

/// The name of the role that a process is, from its environment.
fn role_of(process: &Path) -> Option<String> {
    let environment = std::fs::read(process.join("environ")).ok()?;
    let prefix = format!("{ROLE}=");
    environment.split(|byte| *byte == 0).find_map(|variable| {
        let name = std::str::from_utf8(variable).ok()?.strip_prefix(&prefix)?;
        Some(name.to_owned())
    })
}

/// Inode of the socket whose own address is `local` and whose peer is `remote`, from a table as /proc/net/tcp is.
fn socket_between(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u64> {
    let (local, remote) = (as_in_table(local)?, as_in_table(remote)?);
    table.lines().find_map(|line| {
        let mut columns = line.split_whitespace().skip(1);
        let found = columns.next()? == local && columns.next()? == remote;
        found.then(|| columns.nth(6)?.parse().ok()).flatten()
    })
}

/// An address as the kernel prints it there: the four bytes as one number of this machine's order, and the port, in hexadecimal.
fn as_in_table(address: SocketAddr) -> Option<String> {
    let SocketAddr::V4(address) = address else { return None };
    Some(format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_hold_back_what_they_name_and_nothing_else() {
        let proxies = Proxies::default();
        let passes = |from: Option<&str>, to: Option<&str>| proxies.rules.lock().passes(from, to);
        proxies.cut("a", "b", Direction::OneWay);
        assert!(!passes(Some("a"), Some("b")) && passes(Some("b"), Some("a")) && passes(Some("a"), Some("c")));
        proxies.cut_from_clients("c", false, true);
        assert!(!passes(None, Some("c")) && passes(Some("c"), None) && passes(Some("a"), Some("c")));
        proxies.cut_from_clients("b", true, false);
        assert!(passes(None, Some("b")) && !passes(Some("b"), None));
        proxies.set_link("c", false);
        assert!(!passes(Some("c"), None) && !passes(Some("a"), Some("c")) && passes(None, Some("a")));
        proxies.heal();
        assert!(passes(Some("a"), Some("b")) && passes(None, Some("c")) && passes(Some("b"), None));
    }

    #[test]
    fn the_callers_socket_is_found() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let inode = socket_between(&table, near.local_addr().unwrap(), near.peer_addr().unwrap()).unwrap();
        let own = std::os::fd::AsRawFd::as_raw_fd(&near);
        let link = std::fs::read_link(format!("/proc/self/fd/{own}")).unwrap();
        assert_eq!(link.to_str().unwrap(), format!("socket:[{inode}]"));
        // This process is no role.
        assert_eq!(caller_of(near.local_addr().unwrap(), near.peer_addr().unwrap()), None);
    }
}
