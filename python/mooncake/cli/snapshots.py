"""Mooncake's flags and variables for snapshots: where they are published, and whether a master that starts has one to restore."""

import json
import os
import subprocess
from typing import Callable

from mooncake.cli.flags import FlagError, is_true, seconds

#: Longest look at a place: `tidepool` itself gives up on a store that does not answer after a minute.
LOOK_S = 90.0

#: One flag, and the names it had before.
_STORE_TYPES = ("snapshot_object_store_type", "snapshot_payload_store_type", "snapshot_payload_backend_type")

_AWS = frozenset(
    "MOONCAKE_AWS_" + name for name in ("BUCKET_NAME", "S3_ENDPOINT", "REGION", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
)


def arguments(told: dict[str, str], data_dir: str, published: Callable[[str], bool], warnings: list[str]) -> list[str]:
    """What `tidepool master` is told of snapshots. FlagError when there is no place for them.

    Mooncake's master begins empty when there is nothing to restore, `tidepool master` refuses to: it is asked to restore unless the
    place is known to hold nothing at all. What is there and damaged, or cannot be read, stays its business to refuse.
    """
    wanted = is_true("enable_snapshot", told.get("enable_snapshot", "false"))
    restore = is_true("enable_snapshot_restore", told.get("enable_snapshot_restore", "false"))
    if not wanted and not restore:
        return []
    url = told.get("snapshot_url") or _url(told)
    unused = sorted(name for name in os.environ if name.startswith("MOONCAKE_AWS_") and name not in _AWS)
    if unused and url.startswith("s3:"):
        warnings.append(f"{', '.join(unused)}: no effect with Tidepool")
    found = []
    if wanted:
        found.append(f"--snapshot-interval={seconds('snapshot_interval_seconds', told.get('snapshot_interval_seconds', '600'))}")
        found += [] if "snapshot_url" in told else [f"--snapshot-url={url}"]
    if restore and "restore_from" not in told:
        if _holds_data(data_dir) or published(url):
            found.append(f"--restore-from={url}")
        else:
            warnings.append(f"--enable_snapshot_restore: nothing is published at {url} yet; begins empty")
    return found


def published_at(program: str, url: str) -> bool:
    """Whether anything lies at a place, whole or not; also true when that cannot be found out."""
    try:
        done = subprocess.run(
            [program, "snapshot", "list", "--from", url, "--output=json"], stdout=subprocess.PIPE, text=True, timeout=LOOK_S
        )
        return done.returncode != 0 or json.loads(done.stdout)["snapshots"] != []
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired):
        return True


def _holds_data(directory: str) -> bool:
    """Whether a master goes on from there: it then restores nothing."""
    try:
        return bool(os.listdir(directory))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _url(told: dict[str, str]) -> str:
    store = next((told[name] for name in _STORE_TYPES if told.get(name)), "")
    env = os.environ
    if store in ("", "local"):
        path = env.get("MOONCAKE_SNAPSHOT_LOCAL_PATH")
        if not path:
            raise FlagError("--enable_snapshot: set MOONCAKE_SNAPSHOT_LOCAL_PATH, or give --snapshot_url")
        return f"file://{os.path.abspath(path)}"
    if store == "s3":
        bucket = env.get("MOONCAKE_AWS_BUCKET_NAME")
        if not bucket:
            raise FlagError("--snapshot_object_store_type=s3: set MOONCAKE_AWS_BUCKET_NAME, or give --snapshot_url")
        for ours, theirs in (("AWS_ACCESS_KEY_ID", "ACCESS_KEY_ID"), ("AWS_SECRET_ACCESS_KEY", "SECRET_ACCESS_KEY")):
            if env.get(f"MOONCAKE_AWS_{theirs}"):
                env.setdefault(ours, env[f"MOONCAKE_AWS_{theirs}"])
        endpoint, region = env.get("MOONCAKE_AWS_S3_ENDPOINT"), env.get("MOONCAKE_AWS_REGION")
        options = [f"endpoint={endpoint}"] if endpoint else []
        options += [f"region={region}"] if region else []
        return f"s3://{bucket}/mooncake_master_snapshot" + (f"?{'&'.join(options)}" if options else "")
    raise FlagError(f"--snapshot_object_store_type={store}: it is local or s3")
