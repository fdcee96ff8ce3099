//! `tidepool plan`: what a pool of so many objects needs of its hosts, from figures that were measured.

use serde_json::json;
use tidepool_proto::object::{OBJECT_BYTES_MAX, extent_bytes, stored_bytes};

use super::Context;
use crate::args::PlanArgs;
use crate::config::value::{parse_size, show_size};
use crate::exit::{Exit, Failed};
use crate::output::{self, Format, Table};

/// Directory bytes an object with all its indexes, without its key: `bytes_per_object` of `tidepool bench directory` at keys of 64
/// bytes, less those.
const DIRECTORY_BYTES: u64 = 243 - 64;
/// Eviction policy, per object.
const POLICY_BYTES: u64 = 56;
/// A further replica of an object.
const REPLICA_BYTES: u64 = 40;
/// What a master's process has beside, of which buffers of log and connections are the most.
const PROCESS_BYTES: u64 = 256 << 20;
/// Allocator and tables that are about to grow: the process's memory over what its parts count.
const HEADROOM_PERCENT: u64 = 160;
/// Bytes an object in an image, without its key, which does not compress when it is a hash: `bytes` of `tidepool bench snapshot`.
const IMAGE_BYTES: u64 = 26;
/// Part of a segment that eviction keeps free at most.
const RESERVE_PERCENT: u64 = 5;
/// Objects restored a second on two cores: half of what `restore_s` of `tidepool bench snapshot` comes to, for keys that do not compress.
const RESTORED_PER_SECOND: u64 = 900_000;

/// What a pool needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Payload of one object.
    object_bytes: u64,
    /// Memory of all datanodes together.
    pool_bytes: u64,
    /// Memory of each master.
    master_bytes: u64,
    /// The same, at worst, while an image is written and every object changes.
    master_bytes_at_most: u64,
    /// One image, and so one published snapshot.
    snapshot_bytes: u64,
    /// Disk of each master: two images, one that is written, the log between them.
    master_disk_bytes: u64,
    /// What each master keeps published.
    published_bytes: u64,
    /// Seconds that a restore reads.
    restore_seconds: u64,
}

/// What is to be planned for.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    objects: u64,
    bytes: u64,
    key_bytes: u64,
    replicas: u64,
    snapshot_log_bytes: u64,
    retain: u64,
}

fn plan(wanted: Wanted) -> Plan {
    let Wanted { objects, bytes, key_bytes, replicas, snapshot_log_bytes, retain } = wanted;
    let object_bytes = bytes.div_ceil(objects);
    // Far above what an object may have, nothing adds up exactly any more.
    let extents = extent_bytes(object_bytes.min(OBJECT_BYTES_MAX)).saturating_mul(objects).saturating_mul(replicas);
    let per_object = DIRECTORY_BYTES + key_bytes + POLICY_BYTES + (replicas - 1) * REPLICA_BYTES;
    let directory = objects.saturating_mul(per_object);
    let master_bytes = PROCESS_BYTES.saturating_add((directory / 100).saturating_mul(HEADROOM_PERCENT));
    let snapshot_bytes = objects.saturating_mul(IMAGE_BYTES + key_bytes);
    Plan {
        object_bytes,
        pool_bytes: (extents / (100 - RESERVE_PERCENT)).saturating_mul(100),
        master_bytes,
        master_bytes_at_most: master_bytes.saturating_add(directory),
        snapshot_bytes,
        // The log of two snapshots' worth, each a quarter longer at most: masters take theirs one after the other.
        master_disk_bytes: snapshot_bytes.saturating_mul(3).saturating_add(snapshot_log_bytes.saturating_mul(3)),
        published_bytes: snapshot_bytes.saturating_mul(retain + 1),
        restore_seconds: objects.div_ceil(RESTORED_PER_SECOND),
    }
}

/// Prints it.
pub fn run(context: &Context, args: &PlanArgs) -> anyhow::Result<Exit> {
    let size = |name: &str, text: &str| parse_size(text).map_err(|error| Failed::usage(format!("--{name}: {error}")));
    let wanted = Wanted {
        objects: args.objects,
        bytes: size("bytes", &args.bytes)?,
        key_bytes: args.key_bytes,
        replicas: args.replica_num,
        snapshot_log_bytes: context.config.size("master.snapshot_log_bytes"),
        retain: context.config.integer("master.snapshot_retain"),
    };
    let needs = plan(wanted);
    match context.format {
        Format::Json => output::print_json(&as_json(&wanted, &needs))?,
        Format::Table => {
            let mut table = Table::new(&["what", "needs", "of"]);
            let copies = if wanted.replicas == 1 { "1 copy".to_owned() } else { format!("{} copies", wanted.replicas) };
            let stored = stored_bytes(needs.object_bytes) - needs.object_bytes;
            for (what, needs, of) in [
                (
                    "datanodes, memory together",
                    needs.pool_bytes,
                    format!("{copies}, {stored} bytes of checksums and header each, {RESERVE_PERCENT} % kept free"),
                ),
                (
                    "each master, memory",
                    needs.master_bytes,
                    format!(
                        "directory and eviction policy; up to {} while an image is written",
                        show_size(needs.master_bytes_at_most)
                    ),
                ),
                (
                    "each master, disk",
                    needs.master_disk_bytes,
                    "two images, one being written, and the log between them".to_owned(),
                ),
                (
                    "a snapshot",
                    needs.snapshot_bytes,
                    format!("read back in about {} s on two cores", needs.restore_seconds),
                ),
                (
                    "each master, published",
                    needs.published_bytes,
                    format!("{} snapshots and one being written; nothing without snapshot_url", wanted.retain),
                ),
            ] {
                table.row([what.to_owned(), show_size(needs), of]);
            }
            let head = format!(
                "{} objects of {} in the mean, keys of {} bytes\n",
                wanted.objects,
                show_size(needs.object_bytes),
                wanted.key_bytes
            );
            output::print(format!("{head}{}", table.render(0)).as_bytes())?;
        }
    }
    Ok(Exit::Success)
}

fn as_json(wanted: &Wanted, plan: &Plan) -> serde_json::Value {
    json!({
        "objects": wanted.objects, "bytes": wanted.bytes, "key_bytes": wanted.key_bytes, "replica_num": wanted.replicas,
        "object_bytes": plan.object_bytes, "pool_bytes": plan.pool_bytes, "master_memory_bytes": plan.master_bytes,
        "master_memory_bytes_at_most": plan.master_bytes_at_most, "master_disk_bytes": plan.master_disk_bytes,
        "snapshot_bytes": plan.snapshot_bytes, "published_bytes": plan.published_bytes, "restore_seconds": plan.restore_seconds,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Wanted = Wanted {
        objects: 10_000_000,
        bytes: 10 << 40,
        key_bytes: 64,
        replicas: 1,
        snapshot_log_bytes: 256 << 20,
        retain: 2,
    };

    #[test]
    fn needs_grow_with_what_is_wanted() {
        let needs = plan(WANTED);
        assert_eq!(needs.object_bytes, (10u64 << 40).div_ceil(10_000_000));
        assert!(needs.pool_bytes > 10 << 40 && needs.pool_bytes < 11 << 40, "{needs:?}");
        let twice = plan(Wanted { replicas: 2, ..WANTED });
        assert!(twice.pool_bytes >= needs.pool_bytes * 2 - 200 && twice.master_bytes > needs.master_bytes);
        assert_eq!(twice.snapshot_bytes, needs.snapshot_bytes);
        let longer = plan(Wanted { key_bytes: 128, ..WANTED });
        assert_eq!(longer.snapshot_bytes - needs.snapshot_bytes, 64 * WANTED.objects);
    }

    #[test]
    fn nothing_overflows() {
        let most = Wanted {
            objects: u64::MAX,
            bytes: u64::MAX,
            key_bytes: 4096,
            replicas: 8,
            snapshot_log_bytes: u64::MAX,
            retain: 1_000,
        };
        assert_eq!(plan(most).snapshot_bytes, u64::MAX);
    }
}
