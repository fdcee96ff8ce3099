//! Figures of masters as they report them themselves, from `/metrics`.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::cluster::Cluster;

const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Bytes that the running masters have evicted since they started.
pub async fn evicted_bytes(cluster: &mut Cluster) -> Result<u64> {
    let mut sum = 0.0;
    for master in &mut cluster.masters {
        if master.is_running()? {
            sum += sum_of(&metrics(master.http).await?, "tidepool_master_evicted_bytes_total");
        }
    }
    Ok(sum as u64)
}

async fn metrics(address: SocketAddr) -> Result<String> {
    let read = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        anyhow::Ok(String::from_utf8_lossy(&answer).into_owned())
    };
    tokio::time::timeout(ANSWER_WITHIN, read).await?.with_context(|| format!("metrics of {address}"))
}

/// Sum of a metric over its labels.
fn sum_of(text: &str, name: &str) -> f64 {
    let value = |line: &str| {
        let rest = line.strip_prefix(name)?;
        let is_it = rest.starts_with('{') || rest.starts_with(' ');
        is_it.then(|| rest.rsplit(' ').next()?.trim().parse::<f64>().ok()).flatten()
    };
    text.lines().filter_map(value).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_summed_over_its_labels_and_no_other_is() {
        let text =
            "# HELP a_total x\na_total{reason=\"put\"} 3\r\na_total{reason=\"reserve\"} 4\na_total_other 9\nb 1\n";
        assert_eq!(sum_of(text, "a_total"), 7.0);
        assert_eq!(sum_of(text, "b"), 1.0);
        assert_eq!(sum_of(text, "c"), 0.0);
    }
}
