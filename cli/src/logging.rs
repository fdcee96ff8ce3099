//! Logs: text or JSON on stderr, every line naming the node, the level changeable while the process runs.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::{Format, Full, Json, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, reload};

/// Changes what is logged, while the process runs.
#[derive(Clone)]
pub struct LogControl {
    handle: reload::Handle<EnvFilter, Registry>,
}

impl LogControl {
    /// Replaces the filter: a level, or `target=level` pairs separated by commas.
    pub fn set(&self, filter: &str) -> Result<(), String> {
        let parsed = parse(filter)?;
        self.handle.reload(parsed).map_err(|error| format!("the log filter cannot be changed any more: {error}"))?;
        tracing::info!(filter, "log filter changed");
        Ok(())
    }

    /// The filter in force.
    pub fn current(&self) -> String {
        self.handle.with_current(EnvFilter::to_string).unwrap_or_default()
    }
}

fn parse(filter: &str) -> Result<EnvFilter, String> {
    if filter.trim().is_empty() {
        return Err(
            "log filter is empty; write a level such as info, or target=level pairs separated by commas".to_owned()
        );
    }
    EnvFilter::builder().parse(filter).map_err(|error| {
        format!("log filter '{filter}': {error}; write a level such as info, or target=level pairs separated by commas")
    })
}

/// Starts logging to stderr. `node` names this process on every line; empty for client commands.
pub fn start(filter: &str, format: &str, node: &str) -> anyhow::Result<LogControl> {
    let filter = parse(filter).map_err(crate::exit::Failed::usage)?;
    let (filter, handle) = reload::Layer::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    let result = if format == "json" {
        let inner = tracing_subscriber::fmt::format().json().flatten_event(true).with_span_list(false);
        registry
            .with(layer.fmt_fields(JsonFields::new()).event_format(NodeJson { inner, node: node.to_owned() }))
            .try_init()
    } else {
        let prefix = if node.is_empty() { String::new() } else { format!("node={node} ") };
        let inner = tracing_subscriber::fmt::format().with_ansi(false);
        registry.with(layer.event_format(NodeText { inner, prefix })).try_init()
    };
    result.map_err(|error| anyhow::anyhow!("logging cannot start: {error}"))?;
    Ok(LogControl { handle })
}

/// Text lines that start with the node.
struct NodeText {
    inner: Format<Full>,
    prefix: String,
}

impl<S, N> FormatEvent<S, N> for NodeText
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        writer.write_str(&self.prefix)?;
        self.inner.format_event(context, writer, event)
    }
}

/// JSON objects whose first member is the node.
struct NodeJson {
    inner: Format<Json>,
    node: String,
}

impl<S, N> FormatEvent<S, N> for NodeJson
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let mut line = String::new();
        self.inner.format_event(context, Writer::new(&mut line), event)?;
        let rest = line.strip_prefix('{').ok_or(fmt::Error)?;
        write!(writer, "{{\"node\":{},{rest}", serde_json::Value::from(self.node.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_is_refused_with_what_is_accepted() {
        for filter in ["", "  ", "tidepool=lou d", "a=b=c"] {
            let error = parse(filter).expect_err(filter);
            assert!(error.contains("target=level"), "{error}");
        }
        for filter in ["info", "warn,tidepool_master=debug", "off"] {
            parse(filter).unwrap();
        }
    }
}
