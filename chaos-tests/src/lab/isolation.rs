//! Namespaces for one thread and all that it starts: a network with nothing in it, and mounts that nobody else sees.

use std::path::Path;

use rustix::thread::UnshareFlags;

use super::tools::run;

/// Why there can be no laboratory here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused(pub String);

impl Refused {
    /// Namespaces may be had, and were not wanted.
    pub(super) fn by_choice() -> Refused {
        Refused("disks of the roles' own need namespaces, and CHAOS_LAB chose proxies".into())
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "no laboratory on this host: {}", self.0)
    }
}

impl std::error::Error for Refused {}

/// Programs that it is made with, and the packages of Debian that have them.
const NEEDED: [(&str, &str); 5] =
    [("ip", "iproute2"), ("nft", "nftables"), ("mkfs.ext4", "e2fsprogs"), ("mount", "mount"), ("cc", "gcc")];

/// Whether one could be made; changes nothing.
pub(super) fn check() -> Result<(), Refused> {
    if !rustix::process::geteuid().is_root() {
        return Err(Refused("network namespaces and mounts need root".into()));
    }
    let path = std::env::var("PATH").unwrap_or_default();
    for (program, package) in NEEDED {
        let found = path.split(':').chain(["/usr/sbin", "/sbin"]).any(|at| Path::new(at).join(program).exists());
        if !found {
            return Err(Refused(format!("{program} is missing; scripts/setup installs {package}")));
        }
    }
    Ok(())
}

/// Takes the calling thread into namespaces of its own. Threads and processes that it starts follow.
pub(super) fn enter() -> Result<(), Refused> {
    let refuse = |what: &str, error: String| Refused(format!("{what}: {error}"));
    // Deprecated because some flags can take file descriptors from other threads; these two cannot.
    #[expect(deprecated)]
    rustix::thread::unshare(UnshareFlags::NEWNS | UnshareFlags::NEWNET)
        .map_err(|error| refuse("namespaces of its own", error.to_string()))?;
    // `ip netns` keeps its names under /run: there they go with the mount, and no other laboratory sees them.
    let steps: [&[&str]; 3] = [
        &["mount", "--make-rprivate", "/"],
        &["mount", "-t", "tmpfs", "-o", "size=1m", "tidepool-lab", "/run"],
        &["ip", "link", "set", "lo", "up"],
    ];
    for step in steps {
        run(step[0], &step[1..]).map_err(|error| refuse("making it", format!("{error:#}")))?;
    }
    Ok(())
}
