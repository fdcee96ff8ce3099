//! Disks of masters that go bad: a bit flips, checksums find it, and an empty machine takes that master's place.

use std::fs;
use std::path::Path;

use super::{Change, Nemesis};
use crate::quorum::MASTERS;

/// How often a master whose disk went bad loses power at once; otherwise it is found when somebody reads it.
const AT_ONCE: u64 = 60;
/// What a master says that cannot start with what it has.
const CORRUPT: &str = "STORAGE_CORRUPT";

impl Nemesis {
    /// A bit flips in what a master has on its disk. In one at a time: two of three would be a majority.
    pub(super) fn damage(&mut self, id: u64) -> Result<(), String> {
        let Some(running) = self.quorum.get(id) else { return Ok(()) };
        if self.damaged.is_some() || !self.changes.is_empty() || self.spares_used == self.params.spares() {
            return Ok(());
        }
        let number = self.random.number();
        // An image that is held lies in this file.
        let snapshot = running.node.agreed_snapshot().filter(|_| self.image.is_none() && number.is_multiple_of(3));
        if let Some(snapshot) = snapshot {
            self.quorum.kill(id, usize::MAX, false);
            flip(snapshot.path(), number / 3).map_err(|error| error.to_string())?;
        } else {
            let Some(disk) = self.quorum.cluster().disk(id) else { return Ok(()) };
            // What was not known to be synced may be a torn end as well, which is cut off.
            let synced = disk.synced();
            let indexes: Vec<u64> = disk.indexes().into_iter().filter(|index| *index < synced).collect();
            let Some(index) = indexes.get(number as usize % indexes.len().max(1)) else { return Ok(()) };
            disk.flip_bit(*index, (number >> 32) as usize);
            if self.random.chance(AT_ONCE) {
                self.quorum.kill(id, usize::MAX, false);
            }
        }
        self.damaged = Some(id);
        *self.struck.entry("Damaged".to_owned()).or_default() += 1;
        Ok(())
    }

    /// A master found its disk damaged and does not start: an operator has another take its place.
    pub(super) fn give_up(&mut self, id: u64, why: &str) -> Result<(), String> {
        if !why.contains(CORRUPT) {
            return Err(why.to_owned());
        }
        self.net.trace.say(&format!("master {id} is given up: {why}"));
        *self.struck.entry("GivenUp".to_owned()).or_default() += 1;
        self.quorum.dismiss(id);
        self.spares_used += 1;
        self.changes.push_back(Change { new: MASTERS + self.spares_used, old: Some(id) });
        Ok(())
    }
}

/// Flips a bit of a file.
fn flip(path: &Path, number: u64) -> std::io::Result<()> {
    let mut bytes = fs::read(path)?;
    let at = number as usize % (bytes.len() * 8).max(1);
    if let Some(byte) = bytes.get_mut(at / 8) {
        *byte ^= 1 << (at % 8);
    }
    fs::write(path, bytes)
}
