//! Free loopback ports for processes that must know each other's addresses before any of them runs.
//!
//! Ports come from below the kernel's ephemeral range: an outgoing connection can then never sit on the port of a
//! master that is down for a moment and must come back at its address.

use std::collections::HashSet;
use std::net::TcpListener;

use anyhow::{Result, bail};
use rand::Rng;

const LOWEST: u16 = 10_000;
const TRIES_MAX: usize = 2_000;

/// First port of the kernel's ephemeral range.
fn ephemeral_start() -> u16 {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next().and_then(|word| word.parse().ok()))
        .filter(|&start| start > LOWEST + 1000)
        .unwrap_or(32_768)
}

/// `count` different ports of 127.0.0.1 that were free a moment ago.
pub fn reserve(count: usize) -> Result<Vec<u16>> {
    let end = ephemeral_start();
    let mut random = rand::rng();
    let mut seen = HashSet::new();
    let mut held = Vec::new();
    for _ in 0..TRIES_MAX {
        if held.len() == count {
            break;
        }
        let port = random.random_range(LOWEST..end);
        if seen.insert(port)
            && let Ok(listener) = TcpListener::bind(("127.0.0.1", port))
        {
            held.push((port, listener));
        }
    }
    if held.len() < count {
        bail!("found only {} of {count} free ports between {LOWEST} and {end} on 127.0.0.1", held.len());
    }
    Ok(held.into_iter().map(|(port, _listener)| port).collect())
}
