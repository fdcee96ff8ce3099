//! How much memory this host, or this process's control group, has at all: pages of a memfd are taken on first use, so lending more
//! than there is would succeed now and end in the kernel's out-of-memory killer later.

use std::fs;

/// Refuses segments that can never fit; warns when they do not fit what is free now.
pub(crate) fn check(segments: &[u64]) -> Result<(), String> {
    let Some(lent) = segments.iter().try_fold(0u64, |sum, &bytes| sum.checked_add(bytes)) else {
        return Err("the segments add up to more than 2^64 bytes; lend less DRAM (--dram)".into());
    };
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let group = fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    judge(lent, kilobytes(&meminfo, "MemTotal:"), kilobytes(&meminfo, "MemAvailable:"), group)
}

fn judge(lent: u64, total: Option<u64>, available: Option<u64>, group: Option<u64>) -> Result<(), String> {
    let limits = [(total, "the host"), (group, "this process's control group")];
    for (limit, whose) in limits {
        if let Some(limit) = limit.filter(|&limit| lent > limit) {
            return Err(format!("{lent} bytes of DRAM do not fit the {limit} bytes of {whose}; lend less (--dram)"));
        }
    }
    if let Some(available) = available.filter(|&available| lent > available) {
        tracing::warn!(lent, available, "more DRAM is lent than is free now; the host may run out of memory");
    }
    Ok(())
}

fn kilobytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with(name))?;
    let kilobytes: u64 = line[name.len()..].split_whitespace().next()?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_host_has_is_refused_by_name() {
        let host = judge(100, Some(99), None, None).unwrap_err();
        assert!(host.contains("100 bytes") && host.contains("99") && host.contains("--dram"), "{host}");
        assert!(judge(100, Some(200), None, Some(99)).unwrap_err().contains("control group"));
        judge(100, Some(100), Some(1), Some(100)).unwrap();
        judge(100, None, None, None).unwrap();
        assert!(check(&[u64::MAX, 1]).is_err());
        assert!(check(&[1 << 60]).is_err(), "this host has an exabyte");
        check(&[1 << 20]).unwrap();
    }

    #[test]
    fn reads_what_the_kernel_writes() {
        let text = "MemTotal:       24689132 kB\nMemAvailable:    7 kB\nOdd: x kB\n";
        assert_eq!(kilobytes(text, "MemTotal:"), Some(24_689_132 * 1024));
        assert_eq!(kilobytes(text, "MemAvailable:"), Some(7 * 1024));
        assert_eq!((kilobytes(text, "Odd:"), kilobytes(text, "None:")), (None, None));
    }
}
