//! Setting values as people write them: durations `10s`, sizes `64GiB`, addresses, members, choices.

use std::fmt;
use std::time::Duration;

use tidepool_proto::Address;

/// What a setting accepts.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Any text.
    Text,
    /// A path of the local file system.
    Path,
    /// `HOST[:PORT]`, with the port used when none is given.
    Address(u16),
    /// Comma-separated `HOST[:PORT]`.
    Addresses(u16),
    /// Comma-separated `ID=HOST[:PORT]`.
    Members(u16),
    /// A duration with its unit.
    Duration,
    /// A number of bytes with its unit.
    Size,
    /// A whole number within bounds, both included.
    Integer(u64, u64),
    /// `true` or `false`.
    Boolean,
    /// One of a few words.
    Choice(&'static [&'static str]),
}

/// One member of the quorum: its id and the address the others reach it at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberAddress {
    /// Node id, a setting.
    pub node_id: u64,
    /// RPC address.
    pub address: Address,
}

/// A checked value.
#[derive(Clone, Debug, PartialEq)]
pub enum Typed {
    /// Text, path or choice.
    Text(String),
    /// One address.
    Address(Address),
    /// Several addresses.
    Addresses(Vec<Address>),
    /// Members of a quorum.
    Members(Vec<MemberAddress>),
    /// A duration.
    Duration(Duration),
    /// Bytes.
    Size(u64),
    /// A whole number.
    Integer(u64),
    /// Yes or no.
    Boolean(bool),
}

impl Kind {
    /// Checks and converts `text`; the error says what is accepted.
    pub fn parse(self, text: &str) -> Result<Typed, String> {
        match self {
            Kind::Text | Kind::Path => Ok(Typed::Text(text.to_owned())),
            Kind::Address(port) => address(text, port).map(Typed::Address),
            Kind::Addresses(port) => {
                list(text).map(|item| address(item, port)).collect::<Result<_, _>>().map(Typed::Addresses)
            }
            Kind::Members(port) => list(text)
                .map(|item| member(item, port))
                .collect::<Result<Vec<_>, _>>()
                .and_then(distinct)
                .map(Typed::Members),
            Kind::Duration => parse_duration(text).map(Typed::Duration),
            Kind::Size => parse_size(text).map(Typed::Size),
            Kind::Integer(least, most) => match text.parse::<u64>() {
                Ok(number) if (least..=most).contains(&number) => Ok(Typed::Integer(number)),
                _ => Err(format!("expected a whole number from {least} to {most}")),
            },
            Kind::Boolean => match text {
                "true" | "1" | "yes" | "on" => Ok(Typed::Boolean(true)),
                "false" | "0" | "no" | "off" => Ok(Typed::Boolean(false)),
                _ => Err("expected true or false".to_owned()),
            },
            Kind::Choice(words) if words.contains(&text) => Ok(Typed::Text(text.to_owned())),
            Kind::Choice(words) => Err(format!("expected one of {}", words.join(", "))),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Text => f.write_str("text"),
            Kind::Path => f.write_str("path"),
            Kind::Address(_) => f.write_str("address"),
            Kind::Addresses(_) => f.write_str("addresses"),
            Kind::Members(_) => f.write_str("members"),
            Kind::Duration => f.write_str("duration"),
            Kind::Size => f.write_str("size"),
            Kind::Integer(0, u64::MAX) => f.write_str("number"),
            Kind::Integer(least, u64::MAX) => write!(f, "number, at least {least}"),
            Kind::Integer(least, most) => write!(f, "number, {least} to {most}"),
            Kind::Boolean => f.write_str("true or false"),
            Kind::Choice(words) => f.write_str(&words.join(", ")),
        }
    }
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ';']).map(str::trim).filter(|item| !item.is_empty())
}

fn address(text: &str, default_port: u16) -> Result<Address, String> {
    if let Some((scheme, _)) = text.split_once("://") {
        return Err(format!(
            "'{text}' has the scheme {scheme}://; Tidepool keeps its own quorum and needs no coordination service: \
             list the masters as HOST[:PORT], separated by commas"
        ));
    }
    Address::parse(text, default_port).map_err(|error| error.message().to_owned())
}

fn member(text: &str, default_port: u16) -> Result<MemberAddress, String> {
    let (id, host) = text.split_once('=').ok_or_else(|| format!("'{text}': expected ID=HOST[:PORT]"))?;
    match id.trim().parse::<u64>() {
        Ok(node_id) if node_id > 0 => Ok(MemberAddress { node_id, address: address(host.trim(), default_port)? }),
        _ => Err(format!("'{text}': a member id is a whole number from 1")),
    }
}

fn distinct(members: Vec<MemberAddress>) -> Result<Vec<MemberAddress>, String> {
    for (at, one) in members.iter().enumerate() {
        for other in &members[at + 1..] {
            if one.node_id == other.node_id {
                return Err(format!("member id {} is given twice", one.node_id));
            }
            if one.address == other.address {
                return Err(format!(
                    "address {} is given to members {} and {}",
                    one.address, one.node_id, other.node_id
                ));
            }
        }
    }
    Ok(members)
}

/// Parses `500ms`, `10s`, `2m`, `1h`, `1d`. A bare number has no unit and is refused, `0` excepted.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected = || "expected a duration with its unit, such as 500ms, 10s, 2m or 1h".to_owned();
    let text = text.trim();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (number, unit) = split_unit(text).ok_or_else(expected)?;
    let milliseconds = match unit {
        "us" => 0.001,
        "ms" => 1.0,
        "s" => 1000.0,
        "m" | "min" => 60_000.0,
        "h" => 3_600_000.0,
        "d" => 86_400_000.0,
        _ => return Err(expected()),
    };
    let seconds = number * milliseconds / 1000.0;
    if seconds > 366.0 * 86_400.0 {
        return Err("expected at most 366d".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Parses `64GiB`, `512MiB`, `100GB`, `4096`. Binary units are powers of 1024, decimal ones of 1000.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let expected = || "expected a size such as 512MiB, 64GiB, 1TiB (or bytes as a bare number)".to_owned();
    let text = text.trim();
    if let Ok(bytes) = text.parse::<u64>() {
        return Ok(bytes);
    }
    let (number, unit) = split_unit(text).ok_or_else(expected)?;
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "b" => 1,
        "kib" | "ki" => 1 << 10,
        "mib" | "mi" => 1 << 20,
        "gib" | "gi" => 1 << 30,
        "tib" | "ti" => 1 << 40,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "m" | "g" | "t" => {
            return Err(format!(
                "'{unit}' is ambiguous: write {0}iB (powers of 1024) or {0}B (powers of 1000)",
                unit.to_ascii_uppercase()
            ));
        }
        _ => return Err(expected()),
    };
    let bytes = number * scale as f64;
    if bytes >= (1u64 << 60) as f64 {
        return Err("expected less than 1EiB".to_owned());
    }
    Ok(bytes as u64)
}

fn split_unit(text: &str) -> Option<(f64, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let number = text[..end].parse::<f64>().ok()?;
    Some((number, text[end..].trim()))
}

/// A size for people: the largest binary unit that leaves at least 1, one decimal where it is not whole.
pub fn show_size(bytes: u64) -> String {
    for (scale, unit) in [(1u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= scale {
            let whole = bytes / scale;
            return if bytes.is_multiple_of(scale) {
                format!("{whole}{unit}")
            } else {
                format!("{:.1}{unit}", bytes as f64 / scale as f64)
            };
        }
    }
    format!("{bytes}B")
}

/// A duration for people.
pub fn show_duration(duration: Duration) -> String {
    let milliseconds = duration.as_millis();
    match milliseconds {
        0 => "0ms".to_owned(),
        1..=9_999 if !milliseconds.is_multiple_of(1000) => format!("{milliseconds}ms"),
        _ if milliseconds < 120_000 => format!("{}s", milliseconds / 1000),
        _ if milliseconds < 7_200_000 => format!("{}m", milliseconds / 60_000),
        _ if milliseconds < 172_800_000 => format!("{}h", milliseconds / 3_600_000),
        _ => format!("{}d", milliseconds / 86_400_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_units_and_sizes_say_which_thousand() {
        for (text, milliseconds) in
            [("500ms", 500), ("10s", 10_000), ("1.5s", 1500), ("2m", 120_000), ("1h", 3_600_000), ("0", 0)]
        {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(milliseconds), "{text}");
        }
        for text in ["10", "s", "", "-1s", "10 parsecs", "1e9s", "400d", "1..5s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for (text, bytes) in
            [("4096", 4096), ("64GiB", 64 << 30), ("1.5KiB", 1536), ("4 GB", 4_000_000_000), ("1Ti", 1 << 40)]
        {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        assert!(parse_size("64G").unwrap_err().contains("ambiguous"));
        for text in ["", "GiB", "-1GiB", "1XiB", "99999999TiB"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn shown_values_read_back() {
        for bytes in [0, 1, 1024, 3 << 20, 64 << 30, 1 << 40] {
            assert_eq!(parse_size(&show_size(bytes)).unwrap(), bytes);
        }
        assert_eq!(show_size(1536), "1.5KiB");
        assert_eq!(show_duration(Duration::from_millis(1500)), "1500ms");
        assert_eq!(show_duration(Duration::from_secs(10)), "10s");
    }

    #[test]
    fn members_are_distinct_and_addresses_carry_no_scheme() {
        let members = Kind::Members(50051).parse("1=a,2=b:7,3=[::1]").unwrap();
        let Typed::Members(members) = members else { panic!("not members") };
        assert_eq!(members[0].address.to_string(), "a:50051");
        assert_eq!(members[1].address.to_string(), "b:7");
        for text in ["1=a,1=b", "1=a,2=a", "a", "0=a", "x=a"] {
            assert!(Kind::Members(1).parse(text).is_err(), "{text}");
        }
        assert!(Kind::Addresses(1).parse("etcd://a:2379").unwrap_err().contains("own quorum"));
    }
}
