//! Who this process is.

/// This host's name, as the kernel has it.
pub(crate) fn name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned()).unwrap_or_default()
}
