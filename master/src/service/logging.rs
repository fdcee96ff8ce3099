//! The hook through which the process that runs a master lets its log level be changed.

use std::fmt;
use std::sync::Arc;

type SetFilter = dyn Fn(&str) -> Result<(), String> + Send + Sync;

/// Changes the log filter of the process (EnvFilter syntax).
#[derive(Clone)]
pub struct LogFilter(Arc<SetFilter>);

impl LogFilter {
    /// From the process's own setter.
    pub fn new(set: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static) -> LogFilter {
        LogFilter(Arc::new(set))
    }
    /// A filter that cannot be changed.
    pub fn fixed() -> LogFilter {
        LogFilter::new(|_| Err("this process does not change its log level".to_owned()))
    }
    /// Sets it.
    pub fn set(&self, filter: &str) -> Result<(), String> {
        (self.0)(filter)
    }
}

impl fmt::Debug for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogFilter")
    }
}
