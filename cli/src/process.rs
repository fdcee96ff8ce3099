//! What every role says of its process: version, memory, processor time, open files.

use prometheus::proto::MetricFamily;
use prometheus::{Gauge, IntGauge, IntGaugeVec, Opts, Registry};

/// Gauges read from /proc when they are asked for.
pub struct ProcessMetrics {
    registry: Registry,
    resident_bytes: IntGauge,
    cpu_seconds: Gauge,
    open_files: IntGauge,
}

impl ProcessMetrics {
    /// Registers the gauges.
    pub fn new() -> Result<ProcessMetrics, prometheus::Error> {
        let registry = Registry::new();
        let build =
            IntGaugeVec::new(Opts::new("tidepool_build_info", "1, with the version of this binary"), &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let resident_bytes = IntGauge::new("tidepool_process_resident_bytes", "Resident memory of this process")?;
        let cpu_seconds = Gauge::new("tidepool_process_cpu_seconds_total", "User and system time of this process")?;
        let open_files = IntGauge::new("tidepool_process_open_files", "Open file descriptors of this process")?;
        registry.register(Box::new(build))?;
        registry.register(Box::new(resident_bytes.clone()))?;
        registry.register(Box::new(cpu_seconds.clone()))?;
        registry.register(Box::new(open_files.clone()))?;
        Ok(ProcessMetrics { registry, resident_bytes, cpu_seconds, open_files })
    }

    /// Reads and gathers. What the system does not tell keeps its last value.
    pub fn gather(&self) -> Vec<MetricFamily> {
        if let Some(pages) = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| resident_pages(&text)) {
            self.resident_bytes.set((pages * rustix::param::page_size() as u64) as i64);
        }
        if let Some(ticks) = std::fs::read_to_string("/proc/self/stat").ok().and_then(|text| cpu_ticks(&text)) {
            self.cpu_seconds.set(ticks as f64 / rustix::param::clock_ticks_per_second() as f64);
        }
        if let Ok(entries) = std::fs::read_dir("/proc/self/fd") {
            self.open_files.set(entries.count() as i64);
        }
        self.registry.gather()
    }
}

fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_whitespace().nth(1)?.parse().ok()
}

/// utime + stime: fields 14 and 15; the second field is in parentheses and may contain anything.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_knows_itself() {
        let families = ProcessMetrics::new().unwrap().gather();
        let text = prometheus::TextEncoder::new().encode_to_string(&families).unwrap();
        for name in ["tidepool_build_info{version=", "tidepool_process_resident_bytes ", "tidepool_process_open_files "]
        {
            assert!(text.contains(name), "{name} not in\n{text}");
        }
        assert_eq!(cpu_ticks("1 (a) b) S 1 1 1 0 -1 4194304 1 1 1 1 30 12 0 0 20"), Some(42));
        assert_eq!(resident_pages("10 7 3"), Some(7));
    }
}
