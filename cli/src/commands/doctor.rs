//! `tidepool doctor`: what on this host would get in the way, each with its remedy.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use tidepool_proto::{Address, PROTOCOL_VERSION};

use super::Context;
use crate::admin;
use crate::args::DoctorArgs;
use crate::config::value::{show_duration, show_size};
use crate::exit::Exit;
use crate::output::{self, Format, Table};

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Good,
    Warning,
    Bad,
}

/// One thing looked at.
struct Finding {
    check: &'static str,
    verdict: Verdict,
    text: String,
    remedy: String,
}

impl Finding {
    fn good(check: &'static str, text: impl Into<String>) -> Finding {
        Finding { check, verdict: Verdict::Good, text: text.into(), remedy: String::new() }
    }
    fn warning(check: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { check, verdict: Verdict::Warning, text: text.into(), remedy: remedy.into() }
    }
    fn bad(check: &'static str, text: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { check, verdict: Verdict::Bad, text: text.into(), remedy: remedy.into() }
    }
    fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Good => "ok",
            Verdict::Warning => "warning",
            Verdict::Bad => "bad",
        }
    }
}

/// Runs every check. Exit code 1 when one of them is bad.
pub async fn run(context: &Context, args: &DoctorArgs) -> anyhow::Result<Exit> {
    let host = Address::parse(&args.host, 0)?;
    let mut findings = vec![version()];
    findings.extend(masters(context).await);
    findings.extend(ports(&host));
    findings.push(memlock());
    findings.push(open_files());
    findings.push(hugepages());
    findings.push(clocks());
    findings.push(disk(&args.dir));
    match context.format {
        Format::Json => {
            let all: Vec<_> = findings
                .iter()
                .map(|f| json!({"check": f.check, "verdict": f.word(), "found": f.text, "remedy": f.remedy}))
                .collect();
            output::print_json(&json!(all))?;
        }
        Format::Table => {
            let mut table = Table::new(&["check", "verdict", "found"]);
            findings.iter().for_each(|f| table.row([f.check.to_owned(), f.word().to_owned(), f.text.clone()]));
            let mut text = table.render(0);
            for finding in findings.iter().filter(|finding| finding.verdict != Verdict::Good) {
                text.push_str(&format!("\n{}: {}\n", finding.check, finding.remedy));
            }
            output::print(text.as_bytes())?;
        }
    }
    let bad = findings.iter().any(|finding| finding.verdict == Verdict::Bad);
    Ok(if bad { Exit::Failure } else { Exit::Success })
}

fn version() -> Finding {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Finding::good(
        "version",
        format!("tidepool {}, wire protocol {PROTOCOL_VERSION}, kernel {}", env!("CARGO_PKG_VERSION"), kernel.trim()),
    )
}

async fn masters(context: &Context) -> Vec<Finding> {
    let answers =
        admin::status_of_all(&context.config.addresses("masters"), context.deadline().min(Duration::from_secs(2)))
            .await;
    let lead = admin::leader(&answers).is_some();
    answers
        .iter()
        .map(|answer| match &answer.status {
            Ok(status) => {
                let theirs = status.identity.as_ref();
                let build = theirs.map_or("?", |identity| identity.build.as_str());
                let protocol = theirs.map_or(0, |identity| identity.protocol_version);
                let text = format!("{} is {}, version {build}, wire protocol {protocol}", answer.address, status.role);
                if protocol.abs_diff(PROTOCOL_VERSION) > 1 {
                    return Finding::bad("master", text, "use a binary whose wire protocol is at most one away");
                }
                Finding::good("master", text)
            }
            Err(error) => {
                let remedy =
                    "start it, or name the right masters with --masters; check routes and firewalls in between";
                if lead {
                    Finding::bad("master", error.message(), remedy)
                } else {
                    Finding::warning("master", error.message(), remedy)
                }
            }
        })
        .collect()
}

/// The default ports: free, or taken (by a running role, or by something else).
fn ports(host: &Address) -> Vec<Finding> {
    let roles = [("master RPC", 50051), ("master HTTP", 9003), ("datanode", 50052), ("datanode HTTP", 9300)];
    let mut free = Vec::new();
    let mut findings = Vec::new();
    for (role, port) in roles {
        match std::net::TcpListener::bind((host.host(), port)) {
            Ok(_) => free.push(port.to_string()),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => findings.push(Finding::warning(
                "port",
                format!("{} is in use", host.with_port(port)),
                format!("if that is not the {role} itself, choose another port (--listen, --http-port)"),
            )),
            Err(error) => findings.push(Finding::bad(
                "port",
                format!("cannot listen on {}: {error}", host.with_port(port)),
                "name an address of this host with --host",
            )),
        }
    }
    if !free.is_empty() {
        findings.insert(0, Finding::good("port", format!("free on {}: {}", host.host(), free.join(", "))));
    }
    findings
}

/// A limit of this process: soft value, None when unlimited.
fn limit(name: &str) -> Option<Option<u64>> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    match line[name.len()..].split_whitespace().next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    }
}

fn memlock() -> Finding {
    match limit("Max locked memory") {
        Some(None) => Finding::good("memlock", "unlimited"),
        Some(Some(bytes)) => Finding::warning(
            "memlock",
            format!("RLIMIT_MEMLOCK is {}", show_size(bytes)),
            "TCP works as it is; pinned or RDMA memory would need ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)",
        ),
        None => Finding::warning("memlock", "RLIMIT_MEMLOCK cannot be read", "look at /proc/self/limits"),
    }
}

fn open_files() -> Finding {
    match limit("Max open files") {
        Some(Some(files)) if files < 4096 => Finding::warning(
            "open files",
            format!("RLIMIT_NOFILE is {files}"),
            "a busy master wants 4096 or more: ulimit -n 65536 (systemd: LimitNOFILE=65536)",
        ),
        Some(Some(files)) => Finding::good("open files", format!("RLIMIT_NOFILE is {files}")),
        Some(None) => Finding::good("open files", "unlimited"),
        None => Finding::warning("open files", "RLIMIT_NOFILE cannot be read", "look at /proc/self/limits"),
    }
}

fn hugepages() -> Finding {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line[name.len()..].split_whitespace().next()?.parse::<u64>().ok()
    };
    let available = value("MemAvailable:").unwrap_or(0) << 10;
    match (value("HugePages_Free:"), value("Hugepagesize:")) {
        (Some(free), Some(kib)) if free > 0 => Finding::good(
            "memory",
            format!(
                "{} available, {} of it as free huge pages of {}",
                show_size(available),
                show_size((free * kib) << 10),
                show_size(kib << 10)
            ),
        ),
        _ => Finding::good("memory", format!("{} available, no huge pages reserved (optional)", show_size(available))),
    }
}

/// Rates of the clocks over a short while: leases and deadlines assume that hosts differ by less than 5 % (T2).
fn clocks() -> Finding {
    use rustix::time::{ClockId, clock_gettime};
    let read = |id| {
        let now = clock_gettime(id);
        Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
    };
    let all = || [ClockId::Boottime, ClockId::Monotonic, ClockId::Realtime].map(read);
    let before = all();
    std::thread::sleep(Duration::from_millis(200));
    let after = all();
    let rate = |at: usize| {
        after[at].saturating_sub(before[at]).as_secs_f64() / after[1].saturating_sub(before[1]).as_secs_f64().max(1e-9)
    };
    let (boot, wall) = (rate(0), rate(2));
    let slept = after[0].saturating_sub(after[1]);
    let text = format!(
        "BOOTTIME runs at {boot:.4} of MONOTONIC, wall clock at {wall:.4}; suspended {} since boot",
        show_duration(slept)
    );
    let off = |rate: f64| (rate - 1.0).abs() > 0.05;
    if off(boot) {
        return Finding::bad(
            "clocks",
            text,
            "leases assume clock rates within 5 %: this host's CLOCK_BOOTTIME is not fit; look at the clock source",
        );
    }
    if off(wall) {
        return Finding::warning(
            "clocks",
            text,
            "the wall clock was stepped or slewed hard; Tidepool compares no wall times, logs will be odd",
        );
    }
    Finding::good("clocks", text)
}

/// How fast the disk makes small appends durable: every acknowledged put waits for one.
fn disk(directory: &Path) -> Finding {
    const APPENDS: usize = 50;
    let measure = || -> std::io::Result<Duration> {
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        let block = [0x5au8; 4096];
        let mut spent = Vec::with_capacity(APPENDS);
        for _ in 0..APPENDS {
            let start = Instant::now();
            file.write_all(&block)?;
            file.as_file().sync_data()?;
            spent.push(start.elapsed());
        }
        spent.sort();
        Ok(spent[APPENDS / 2])
    };
    let place = directory.display();
    match measure() {
        Ok(median) => {
            let micros = median.as_micros().max(1);
            let text = format!(
                "a durable 4 KiB append in {place} takes {micros} us (median of {APPENDS}), {} a second",
                1_000_000 / micros
            );
            if median > Duration::from_millis(20) {
                return Finding::warning(
                    "disk",
                    text,
                    "masters wait for this disk: put data_dir on an SSD with power-loss protection",
                );
            }
            Finding::good("disk", text)
        }
        Err(error) => {
            Finding::bad("disk", format!("cannot write in {place}: {error}"), "name a writable directory with --dir")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_checks_answer_on_this_host() {
        let directory = tempfile::tempdir().unwrap();
        for finding in [version(), memlock(), open_files(), hugepages(), clocks(), disk(directory.path())] {
            assert!(!finding.text.is_empty(), "{}", finding.check);
            assert!(finding.verdict == Verdict::Good || !finding.remedy.is_empty(), "{} has no remedy", finding.check);
        }
        assert_eq!(disk(Path::new("/nonexistent-directory")).verdict, Verdict::Bad);
    }

    #[test]
    fn a_foreign_host_cannot_be_listened_on() {
        let findings = ports(&Address::parse("192.0.2.1", 0).unwrap());
        assert!(findings.iter().all(|finding| finding.verdict == Verdict::Bad && finding.remedy.contains("--host")));
    }
}
