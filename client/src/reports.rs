//! Failed reads, told to the leader as hints (R3). Only reads within their lease are worth a report.

use std::sync::Arc;
use std::time::Duration;

use tidepool_proto::ErrorCode;
use tidepool_proto::v1::{self, client_request, read_report};

use crate::call::Caller;
use crate::deadline::Deadline;
use crate::fetch::Fetch;
use crate::suspects::Suspects;

/// Reports sent for one call; the rest says the same.
const REPORTS_MAX: usize = 64;
/// A report that could not be delivered within this is dropped: it is a hint.
const REPORT_DEADLINE: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(crate) struct Reports(Vec<v1::ReadReport>);

impl Reports {
    /// Notes the failed attempt of `fetch`.
    pub(crate) fn add(&mut self, fetch: &Fetch, in_lease: bool) {
        let (Some(located), Some(replica), Some(error)) = (&fetch.located, fetch.chosen(), &fetch.failure) else {
            return;
        };
        if !in_lease || self.0.len() >= REPORTS_MAX {
            return;
        }
        let kind = match error.code() {
            ErrorCode::ChecksumMismatch => read_report::Kind::Corrupt,
            _ if Suspects::is_telling(error, fetch.took) => read_report::Kind::Unreachable,
            _ => return,
        };
        self.0.push(v1::ReadReport {
            kind: kind as i32,
            object_id: located.expected.object.0,
            replica_id: replica.replica_id,
            node_id: replica.node_id,
            key: fetch.key.clone(),
        });
    }

    /// Sends in the background.
    pub(crate) fn send(self, caller: &Arc<Caller>) {
        if self.0.is_empty() {
            return;
        }
        let caller = caller.clone();
        tokio::spawn(async move {
            let body = v1::ReadReportRequest { reports: self.0 };
            let sent = caller.call("read_report", Deadline::after(REPORT_DEADLINE), |_| {
                client_request::Body::ReadReport(body.clone())
            });
            if let Err(failure) = sent.await {
                tracing::debug!(error = %failure.error, "a read report was not delivered");
            }
        });
    }
}
