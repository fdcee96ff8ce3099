//! Sizes as people write them on the command line.

use std::fmt;
use std::str::FromStr;

/// A number of bytes: `4096`, `64KiB`, `1GiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl FromStr for ByteSize {
    type Err = String;
    fn from_str(text: &str) -> Result<ByteSize, String> {
        let refuse = || format!("'{text}' is not a size; write bytes, or a number with KiB, MiB or GiB");
        let split = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
        let (number, factor) = split.unwrap_or((text, 1));
        let number: u64 = number.trim().parse().map_err(|_| refuse())?;
        number.checked_mul(factor).map(ByteSize).ok_or_else(refuse)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, factor) in UNITS {
            if self.0 >= factor && self.0.is_multiple_of(factor) {
                return write!(f, "{}{unit}", self.0 / factor);
            }
        }
        write!(f, "{}B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_and_print() {
        for (text, bytes, shown) in [
            ("4096", 4096, "4KiB"),
            ("1GiB", 1 << 30, "1GiB"),
            ("3 MiB", 3 << 20, "3MiB"),
            ("7B", 7, "7B"),
            ("0", 0, "0B"),
        ] {
            let size: ByteSize = text.parse().unwrap();
            assert_eq!(size, ByteSize(bytes), "{text}");
            assert_eq!(size.to_string(), shown);
        }
        for text in ["", "x", "-1", "1.5GiB", "99999999999GiB", "GiB"] {
            assert!(text.parse::<ByteSize>().unwrap_err().contains(text));
        }
    }
}
