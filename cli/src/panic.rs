//! In a role a panic anywhere ends the process: a half-dead master or datanode is worse than a dead one, whose
//! work others take over.

/// Logs the panic with its place and backtrace, then aborts; but for one of the ops that a master applies (M1).
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        let place = info.location().map(ToString::to_string).unwrap_or_default();
        let payload = info.payload();
        let message = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let backtrace = std::backtrace::Backtrace::force_capture();
        if tidepool_master::is_applying() {
            // The master writes down which op it was, and ends in order.
            tracing::error!(place, message, %backtrace, "panic while an op was applied: this master stops");
            return;
        }
        tracing::error!(place, message, %backtrace, "panic: this process ends now");
        std::process::abort();
    }));
}
