"""`mooncake_master`: a Tidepool master, started with Mooncake's flags. The process becomes `tidepool master`, under the same id."""

import os
import sys
from typing import NoReturn

from mooncake.cli import snapshots
from mooncake.cli.flags import HELPS, FlagError, parse, with_file
from mooncake.cli.master_flags import BOOLEANS, NAMES, OWN, TRANSLATED, WITHOUT_EFFECT, command

USAGE = """mooncake_master: a Tidepool master, started with Mooncake's flags (--name=value)

Followed: --rpc_port, --port, --rpc_address, --metrics_port, --enable_snapshot, --enable_snapshot_restore,
--snapshot_interval_seconds, --snapshot_object_store_type, --config_path (JSON, or lines of name: value), --flagfile,
  {translated}
Of Tidepool itself: {own}
Without effect: {silent}

Several masters need no etcd: start each with its --node_id and the --members of all.
"""


def binary() -> str:
    """The `tidepool` program of this installation. FlagError when there is none."""
    from tidepool import _program

    try:
        return _program.path()
    except FileNotFoundError as error:
        raise FlagError(str(error)) from error


def usage() -> str:
    def flags(names: frozenset) -> str:
        return ", ".join(f"--{name}" for name in sorted(names))

    return USAGE.format(translated=flags(frozenset(TRANSLATED)), own=flags(OWN), silent=flags(WITHOUT_EFFECT))


def become(program: str, arguments: list[str]) -> NoReturn:
    """This process goes on as another program: whoever stops it by its id stops that."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, [program, *arguments])


def main() -> int:
    try:
        told = with_file(parse(sys.argv[1:], BOOLEANS, NAMES), NAMES)
        if not HELPS.isdisjoint(told):
            print(usage(), end="")
            return 0
        if "version" in told:
            become(binary(), ["--version"])
        program = binary()
        arguments, warnings = command(told, lambda url: snapshots.published_at(program, url))
    except FlagError as error:
        print(f"mooncake_master: {error}", file=sys.stderr)
        return 2
    for warning in warnings:
        print(f"mooncake_master: {warning}", file=sys.stderr)
    become(program, arguments)
