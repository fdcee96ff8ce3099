//! A small ext4 of a role's own, in a file: full, read-only, or without power.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::tools::{compile, run};

/// Cuts the power of a file system: what was not made durable is gone, and everything after fails (EXT4_IOC_SHUTDOWN without
/// a flush of the journal).
const POWER_SWITCH: &str = r#"
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/ioctl.h>
int main(int count, char **words) {
    uint32_t no_log_flush = 2;
    int file = count > 1 ? open(words[1], O_RDONLY) : -1;
    if (file < 0 || ioctl(file, _IOR('X', 125, uint32_t), &no_log_flush)) { perror(words[1]); return 1; }
    return 0;
}
"#;

/// A file system in a file.
#[derive(Debug)]
pub struct Disk {
    image: PathBuf,
    at: PathBuf,
}

impl Disk {
    pub(super) fn create(directory: &Path, name: &str, bytes: u64) -> Result<Disk> {
        let disk = Disk { image: directory.join(format!("{name}.ext4")), at: directory.join(format!("{name}.disk")) };
        let file = File::create(&disk.image).with_context(|| format!("image {}", disk.image.display()))?;
        file.set_len(bytes)?;
        let image = disk.image.display().to_string();
        run("mkfs.ext4", &["-q", "-F", "-E", "lazy_itable_init=1,nodiscard", &image])?;
        std::fs::create_dir_all(&disk.at)?;
        disk.mount()?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Mounts it: the host has booted.
    pub fn mount(&self) -> Result<()> {
        run("mount", &["-o", "loop", &self.image.display().to_string(), &self.at.display().to_string()]).map(|_| ())
    }

    /// Unmounts it; nothing may use it any more.
    pub fn unmount(&self) -> Result<()> {
        run("umount", &[&self.at.display().to_string()]).map(|_| ())
    }

    /// Lets go of it whoever uses it.
    pub(super) fn detach(&self) {
        // It may not be mounted: the scenario may have ended between a power cut and the boot.
        let _ = run("umount", &["-l", &self.at.display().to_string()]);
    }

    /// Cuts its power: from now on every access fails, and what was not durable will not be there after `reboot`.
    pub fn cut_power(&self) -> Result<()> {
        let beside = self.image.parent().context("an image has a directory")?;
        let switch = compile(beside, "power-switch", POWER_SWITCH, &[])?;
        run(&switch.display().to_string(), &[&self.at.display().to_string()]).map(|_| ())
    }

    /// After `cut_power`, when the role's process is gone: what a host finds when it boots.
    pub fn reboot(&self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    /// Whether it may be written.
    pub fn set_writable(&self, writable: bool) -> Result<()> {
        let mode = if writable { "remount,rw" } else { "remount,ro" };
        run("mount", &["-o", mode, &self.at.display().to_string()]).map(|_| ())
    }

    /// Takes all the space that is left, and answers the file that holds it.
    pub fn fill(&self) -> Result<PathBuf> {
        let path = self.at.join("filler");
        let mut file = File::create(&path).with_context(|| format!("{}", path.display()))?;
        for size in [1 << 20, 4096, 1] {
            let chunk = vec![1u8; size];
            loop {
                match file.write(&chunk) {
                    Ok(written) if written > 0 => {}
                    Ok(_) => break,
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
                }
            }
        }
        // Without this the space is only promised.
        let _ = file.sync_all();
        Ok(path)
    }
}
