//! Addresses as people write them: names, IPv4, IPv6 plain or bracketed, link-local with an interface.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

use crate::error::{Error, ErrorCode};

/// Host and port. The host is a DNS name or an IP literal without brackets; IPv6 may carry `%interface`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Address {
    host: String,
    port: u16,
}

impl Address {
    /// From parts; the host must be valid by itself.
    pub fn new(host: &str, port: u16) -> Result<Address, Error> {
        check_host(host)?;
        Ok(Address { host: host.to_owned(), port })
    }

    /// Parses `host`, `host:port`, `[v6]`, `[v6]:port` or a plain IPv6 literal.
    pub fn parse(text: &str, default_port: u16) -> Result<Address, Error> {
        let bad = |why: &str| Error::new(ErrorCode::InvalidParams, format!("address '{text}': {why}"));
        let port_of = |p: &str| match p.parse::<u16>() {
            Ok(port) if p.bytes().all(|b| b.is_ascii_digit()) => Ok(port),
            _ => Err(bad("the port must be a number up to 65535")),
        };
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, after) = rest.split_once(']').ok_or_else(|| bad("'[' without ']'"))?;
            if !is_v6(host) {
                return Err(bad("brackets are for IPv6 addresses"));
            }
            match after.strip_prefix(':') {
                Some(port) => (host, port_of(port)?),
                None if after.is_empty() => (host, default_port),
                None => return Err(bad("expected ':port' after ']'")),
            }
        } else if is_v6(text) {
            (text, default_port)
        } else {
            match text.split_once(':') {
                Some((_, port)) if port.contains(':') => return Err(bad("not an IPv6 address; write [v6]:port")),
                Some((host, port)) => (host, port_of(port)?),
                None => (text, default_port),
            }
        };
        check_host(host).map_err(|e| bad(e.message()))?;
        Ok(Address { host: host.to_owned(), port })
    }

    /// Host without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }
    /// Port.
    pub fn port(&self) -> u16 {
        self.port
    }
    /// The same host with another port.
    pub fn with_port(&self, port: u16) -> Address {
        Address { host: self.host.clone(), port }
    }
    /// The IP when the host is a literal (an interface suffix is left out).
    pub fn ip(&self) -> Option<IpAddr> {
        self.host.split('%').next().and_then(|h| h.parse().ok())
    }
    /// `http://host:port`, as gRPC endpoints want it. `%` of an IPv6 zone is percent-encoded (RFC 6874).
    pub fn to_uri(&self) -> String {
        format!("http://{}", self.to_string().replace('%', "%25"))
    }

    /// Refuses what other hosts could never reach: unspecified addresses, and with `multi_host` loopback (M#904).
    pub fn check_advertisable(&self, multi_host: bool, setting: &str) -> Result<(), Error> {
        let refuse = |what: &str| {
            Err(Error::new(
                ErrorCode::InvalidParams,
                format!("cannot advertise {self}: {what}; set {setting} to an address that every other host can reach"),
            ))
        };
        match self.ip() {
            Some(ip) if ip.is_unspecified() => refuse("it is the unspecified address"),
            Some(ip) if multi_host && ip.is_loopback() => refuse("it is a loopback address and other members are not"),
            _ if self.port == 0 => refuse("port 0"),
            _ => Ok(()),
        }
    }

    /// True for loopback literals and `localhost`.
    pub fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.ip().is_some_and(|ip| ip.is_loopback())
    }
}

fn is_v6(host: &str) -> bool {
    let (ip, zone) = host.split_once('%').map_or((host, None), |(ip, zone)| (ip, Some(zone)));
    ip.parse::<Ipv6Addr>().is_ok()
        && zone.is_none_or(|z| !z.is_empty() && z.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)))
}

fn check_host(host: &str) -> Result<(), Error> {
    if is_v6(host) || host.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let label_ok = |l: &str| {
        !l.is_empty()
            && l.len() <= 63
            && !l.starts_with('-')
            && !l.ends_with('-')
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    };
    let name = host.strip_suffix('.').unwrap_or(host);
    if name.len() <= 253 && name.split('.').all(label_ok) && !looks_like_bad_v4(name) {
        return Ok(());
    }
    Err(Error::new(ErrorCode::InvalidParams, format!("'{host}' is neither a host name nor an IP address")))
}

fn looks_like_bad_v4(name: &str) -> bool {
    name.split('.').all(|l| l.bytes().all(|b| b.is_ascii_digit()))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for Address {
    type Err = Error;
    /// Parses an address that must name its port.
    fn from_str(text: &str) -> Result<Address, Error> {
        let address = Address::parse(text, 0)?;
        if address.port == 0 && !text.ends_with(":0") {
            return Err(Error::new(ErrorCode::InvalidParams, format!("address '{text}' names no port")));
        }
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// User report 80: plain, bracketed and link-local IPv6, and v4/v6 mixes.
    #[test]
    fn case_080_address_forms_parse_format_and_round_trip() {
        let table = [
            ("localhost", "localhost:7"),
            ("node-1.example.com:50051", "node-1.example.com:50051"),
            ("10.0.0.1", "10.0.0.1:7"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("::1", "[::1]:7"),
            ("[::1]", "[::1]:7"),
            ("[::1]:80", "[::1]:80"),
            ("2001:db8::17", "[2001:db8::17]:7"),
            ("[2001:db8::17]:50051", "[2001:db8::17]:50051"),
            ("fe80::1%eth0", "[fe80::1%eth0]:7"),
            ("[fe80::1%eth0]:50051", "[fe80::1%eth0]:50051"),
            ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]:7"),
        ];
        for (text, shown) in table {
            let address = Address::parse(text, 7).unwrap();
            assert_eq!(address.to_string(), shown, "{text}");
            assert_eq!(shown.parse::<Address>().unwrap(), address, "{text}");
        }
        let bad = [
            "",
            ":80",
            "a b",
            "[::1",
            "::1]:80",
            "[10.0.0.1]:80",
            "10.0.0.1:",
            "10.0.0.1:x",
            "10.0.0.1:65536",
            "1.2.3",
            "256.1.1.1",
            "2001:db8::zz",
            "host:1:2",
            "[::1]80",
            "fe80::1%",
            "-a",
            "a..b",
            "h:+5",
        ];
        for text in bad {
            let error = Address::parse(text, 7).expect_err(text);
            assert_eq!(error.code(), ErrorCode::InvalidParams);
            assert!(error.message().contains(text), "{error} does not name '{text}'");
        }
    }

    /// User report 11: 0.0.0.0 was published as the leader's address.
    #[test]
    fn case_011_unroutable_addresses_are_not_advertised() {
        for text in ["0.0.0.0:1", "[::]:1", "127.0.0.1:1", "[::1]:1"] {
            let error = text.parse::<Address>().unwrap().check_advertisable(true, "--advertise").unwrap_err();
            assert!(error.message().contains("--advertise"), "{error}");
        }
        "127.0.0.1:1".parse::<Address>().unwrap().check_advertisable(false, "--advertise").unwrap();
        "10.1.2.3:1".parse::<Address>().unwrap().check_advertisable(true, "--advertise").unwrap();
    }
}
