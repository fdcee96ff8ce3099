//! Links of a laboratory that may have namespaces: one bridge, a namespace and an address for every role, and one table of rules
//! that says who is cut off from whom. The harness and its load clients stand at the bridge itself.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use parking_lot::Mutex;

use super::Direction;
use crate::lab::tools::{run, run_with};

/// The harness's end.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// First address of a role.
const FIRST_HOST: u8 = 11;
/// Roles that one laboratory has room for.
const HOSTS_MAX: u8 = 200;

/// Rules: a set of directed pairs that pass nothing, a set of roles that hear nothing of the harness (`deaf`) or are not
/// heard by it (`mute`), and a chain that is filled when a link is to lose some packets.
const RULES: &str = r#"table bridge tidepool {
  set cut {
    type ifname . ifname
  }
  set deaf {
    type ifname
  }
  set mute {
    type ifname
  }
  chain lossy {
  }
  chain between {
    type filter hook forward priority 0; policy accept;
    meta iifname . meta oifname @cut counter drop
    jump lossy
  }
  chain to_harness {
    type filter hook input priority 0; policy accept;
    meta iifname @mute counter drop
    jump lossy
  }
  chain from_harness {
    type filter hook output priority 0; policy accept;
    meta oifname @deaf counter drop
    jump lossy
  }
}
"#;

/// Where a role lives.
#[derive(Clone, Debug)]
pub struct Host {
    /// Role name; also the name of its namespace and of its port of the bridge.
    pub name: String,
    /// Its address.
    pub ip: IpAddr,
    /// Its network namespace, as any process finds it.
    pub namespace: PathBuf,
}

/// Namespaces and the bridge between them.
pub struct Namespaces {
    hosts: Mutex<Vec<Host>>,
}

impl Namespaces {
    pub(super) fn open() -> Result<Namespaces> {
        for step in ["link add br0 type bridge", "link set br0 up", &format!("addr add {GATEWAY}/24 dev br0")] {
            run("ip", &step.split(' ').collect::<Vec<_>>())?;
        }
        run_with("nft", &["-f", "-"], RULES)?;
        Ok(Namespaces { hosts: Mutex::default() })
    }

    /// A namespace with an address for a role, linked to the bridge.
    pub fn add_host(&self, name: &str) -> Result<Host> {
        let mut hosts = self.hosts.lock();
        if let Some(host) = hosts.iter().find(|host| host.name == name) {
            return Ok(host.clone());
        }
        let number = u8::try_from(hosts.len()).ok().filter(|&n| n < HOSTS_MAX);
        let number = number.ok_or_else(|| anyhow!("a laboratory has room for {HOSTS_MAX} roles"))?;
        let ip = Ipv4Addr::new(10, 77, 0, FIRST_HOST + number);
        for step in [
            format!("netns add {name}"),
            format!("link add {name} type veth peer name eth0 netns {name}"),
            format!("link set {name} master br0 up"),
            format!("-n {name} addr add {ip}/24 dev eth0"),
            format!("-n {name} link set eth0 up"),
            format!("-n {name} link set lo up"),
            format!("-n {name} route add default via {GATEWAY}"),
        ] {
            run("ip", &step.split(' ').collect::<Vec<_>>())?;
        }
        let host =
            Host { name: name.to_owned(), ip: ip.into(), namespace: PathBuf::from(format!("/run/netns/{name}")) };
        hosts.push(host.clone());
        Ok(host)
    }

    /// The role's cable is pulled, or put in again.
    pub fn set_link(&self, name: &str, up: bool) -> Result<()> {
        run("ip", &["link", "set", name, if up { "up" } else { "down" }]).map(|_| ())
    }

    /// No packet passes between two roles any more; connections hang.
    pub fn cut(&self, from: &str, to: &str, direction: Direction) -> Result<()> {
        let pairs = match direction {
            Direction::OneWay => format!("\"{from}\" . \"{to}\""),
            Direction::Both => format!("\"{from}\" . \"{to}\", \"{to}\" . \"{from}\""),
        };
        nft(&format!("add element bridge tidepool cut {{ {pairs} }}"))
    }

    /// Cuts a role off from the harness and its clients, in the given directions.
    pub fn cut_from_clients(&self, name: &str, hears: bool, is_heard: bool) -> Result<()> {
        if !hears {
            nft(&format!("add element bridge tidepool deaf {{ \"{name}\" }}"))?;
        }
        if !is_heard {
            nft(&format!("add element bridge tidepool mute {{ \"{name}\" }}"))?;
        }
        Ok(())
    }

    /// Of the packets that leave or reach a role, so many of a thousand are lost.
    pub fn lose(&self, name: &str, of_thousand: u32) -> Result<()> {
        nft(&format!(
            "add rule bridge tidepool lossy meta iifname \"{name}\" numgen random mod 1000 < {of_thousand} counter drop\n\
             add rule bridge tidepool lossy meta oifname \"{name}\" numgen random mod 1000 < {of_thousand} counter drop"
        ))
    }

    /// What a role sends passes at this rate.
    pub fn throttle(&self, name: &str, kbit_per_s: u32) -> Result<()> {
        let rate = format!("{kbit_per_s}kbit");
        let own = ["-n", name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", &rate];
        run("tc", &[&own[..], &["burst", "32kb", "latency", "400ms"]].concat()).map(|_| ())
    }

    /// Every link is whole again.
    pub fn heal(&self) -> Result<()> {
        nft(
            "flush set bridge tidepool cut\nflush set bridge tidepool deaf\nflush set bridge tidepool mute\nflush chain bridge tidepool lossy",
        )?;
        for host in self.hosts.lock().iter() {
            self.set_link(&host.name, true)?;
            // Fails when there is none.
            let _ = run("tc", &["-n", &host.name, "qdisc", "del", "dev", "eth0", "root"]);
        }
        Ok(())
    }

    /// How many packets the rules have dropped since the laboratory was opened (lossy links: since they became so).
    pub fn dropped(&self) -> Result<u64> {
        let text = run("nft", &["-j", "list", "table", "bridge", "tidepool"])?;
        let listing: serde_json::Value = serde_json::from_str(&text).context("the answer of nft")?;
        Ok(counters(&listing))
    }

    /// What waited or was dropped where a role's sending is throttled; fails when nothing did.
    pub fn queueing(&self, name: &str) -> Result<String> {
        let text = run("tc", &["-n", name, "-s", "qdisc", "show", "dev", "eth0"])?;
        let over = text.split("overlimits ").nth(1).and_then(|rest| rest.split_whitespace().next());
        match over.and_then(|number| number.parse::<u64>().ok()) {
            Some(over) if over > 0 => Ok(format!("{over} packets of {name} had to wait")),
            _ => bail!("nothing that {name} sent had to wait: {}", text.trim()),
        }
    }

    /// Connections that a role's relay took over, by the counter of its rule.
    pub fn redirected(&self, name: &str) -> Result<u64> {
        let text = run("ip", &["netns", "exec", name, "nft", "-j", "list", "table", "ip", "tidepool"])?;
        Ok(counters(&serde_json::from_str(&text).context("the answer of nft")?))
    }

    /// Rules within a role's own namespace.
    pub fn in_namespace(&self, name: &str, rules: &str) -> Result<()> {
        if !self.hosts.lock().iter().any(|host| host.name == name) {
            bail!("the laboratory has no host {name}");
        }
        run_with("ip", &["netns", "exec", name, "nft", "-f", "-"], rules).map(|_| ())
    }
}

fn nft(commands: &str) -> Result<()> {
    run_with("nft", &["-f", "-"], &format!("{commands}\n")).map(|_| ())
}

/// Sum of all packet counters of a listing.
fn counters(value: &serde_json::Value) -> u64 {
    match value {
        serde_json::Value::Array(items) => items.iter().map(counters).sum(),
        serde_json::Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match name.as_str() {
                "counter" => value.get("packets").and_then(serde_json::Value::as_u64).unwrap_or(0),
                _ => counters(value),
            })
            .sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_wherever_they_are() {
        let listing = serde_json::json!({"nftables": [{"rule": {"expr": [{"counter": {"packets": 3, "bytes": 9}}, {"drop": null}]}},
            {"rule": {"expr": [{"counter": {"packets": 4, "bytes": 9}}]}}, {"set": {"elem": ["a"]}}]});
        assert_eq!(counters(&listing), 7);
    }
}
