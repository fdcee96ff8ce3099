"""Memory lent and taken back while a store runs."""

import logging
import time
from collections.abc import Sequence

from mooncake.store import codes
from mooncake.store.environment import warn_once
from mooncake.store.objects import RAISED, code_of
from mooncake.store.tasks import Tasks
from tidepool import _native

log = logging.getLogger("mooncake.store")

#: Segments that one store may lend, the one of `setup` included.
SEGMENTS_MAX = 64
#: How often a drain is looked at.
DRAIN_POLL_S = 0.1


class Segments(Tasks):
    """Segments of this process. Their ids are their names, "host:port-1" and so on, as `preferred_segment` takes them."""

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict:
        """Lends `size` bytes of new memory: {"ret": 0, "segment_ids": [...], "allocated_size": bytes}."""
        refused = {"ret": codes.INVALID_PARAMS, "segment_ids": [], "allocated_size": 0}
        if self._client is None:
            return {**refused, "ret": codes.INTERNAL_ERROR}
        if size <= 0 or protocol not in ("tcp", ""):
            return refused
        if location:
            warn_once("location", "of a segment has no effect")
        with self._lifecycle:
            connection = self._connection
            if connection is None:
                return {**refused, "ret": codes.INTERNAL_ERROR}
            if len(connection.nodes) >= SEGMENTS_MAX:
                log.warning("allocate_and_mount_segment: %d segments are lent already, the limit", SEGMENTS_MAX)
                return refused
            number = 1
            while f"{connection.hostname}-{number}" in connection.nodes:
                number += 1
            name = f"{connection.hostname}-{number}"
            try:
                node = connection.lend(name, size)
            except RAISED as error:
                return {**refused, "ret": code_of(error)}
            return {"ret": codes.OK, "segment_ids": [name], "allocated_size": node.size}

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Takes memory back. With a grace period its objects are moved elsewhere for so long first; what is left then goes.

        0, or -1 when an id is none of this store's (the others are taken back all the same), or the store is not set up.
        """
        connection = self._connection
        if connection is None:
            return codes.INTERNAL_ERROR
        if grace_period_seconds < 0:
            return codes.INVALID_PARAMS
        known = [name for name in segment_ids if name in connection.nodes]
        if grace_period_seconds and known:
            self._drain(connection.client, known, grace_period_seconds)
        failed = len(known) < len(segment_ids)
        for name in known:
            node = connection.nodes.pop(name, None)
            try:
                if node is not None:
                    node.close()
            except _native.TidepoolError as error:
                log.warning("unmount of %s: %s", name, error)
                failed = True
        return -1 if failed else codes.OK

    def _drain(self, client: _native.Client, names: Sequence[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            task = client.create_drain_task(names)
            while time.monotonic() < deadline:
                if client.query_task(task)["state"] not in ("PENDING", "RUNNING"):
                    return
                time.sleep(DRAIN_POLL_S)
            client.cancel_task(task)
        except RAISED as error:
            log.warning("drain of %s: %s", ", ".join(names), error)

    def mount_segment(self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = "") -> dict:
        """Not done: a segment is memory of its own, never a file that others write. {"ret": -1, "segment_ids": []}; use
        `allocate_and_mount_segment`."""
        log.error("mount_segment: Tidepool lends no files; use allocate_and_mount_segment(size)")
        return {"ret": codes.INTERNAL_ERROR, "segment_ids": []}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """As `unmount_and_free_segment`."""
        return self.unmount_and_free_segment(segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """0: this process has no disk segment."""
        return codes.OK if self._client is not None else codes.INTERNAL_ERROR
