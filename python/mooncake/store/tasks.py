"""Copies and moves that the masters carry out, by the names of segments."""

from collections.abc import Sequence
from typing import Optional

from mooncake.store import codes
from mooncake.store.descriptors import QueryTaskResponse, task_of
from mooncake.store.layer_wise import LayerWise
from mooncake.store.objects import RAISED, code_of

_NO_TASK = (0, 0)


class Tasks(LayerWise):
    """Tasks. An id is a pair of numbers; (0, 0) is none."""

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[tuple[int, int], int]:
        """One more copy on each target segment: (id, 0), or ((0, 0), negative)."""
        if not targets:
            return _NO_TASK, codes.INVALID_PARAMS
        return self._created(lambda client: client.create_copy_task(key, targets))

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """The copy on one segment goes to another: (id, 0), or ((0, 0), negative)."""
        if source == target:
            return _NO_TASK, codes.INVALID_PARAMS
        return self._created(lambda client: client.create_move_task(key, source, target))

    def _created(self, call) -> tuple[tuple[int, int], int]:
        client = self._client
        if client is None:
            return _NO_TASK, codes.INVALID_PARAMS
        try:
            return (0, call(client)), codes.OK
        except RAISED as error:
            code = code_of(error)
            # A segment that there is not is an invalid argument here, as for Mooncake.
            return _NO_TASK, codes.INVALID_PARAMS if code == codes.SEGMENT_NOT_FOUND else code

    def query_task(self, task_id: tuple[int, int]) -> tuple[Optional[QueryTaskResponse], int]:
        """(how far it is, 0), or (None, negative); -1400 when there is no such task."""
        client = self._client
        if client is None:
            return None, codes.INVALID_PARAMS
        high, low = task_id
        if high != 0:
            return None, codes.TASK_NOT_FOUND
        try:
            return task_of(client.query_task(low)), codes.OK
        except RAISED as error:
            return None, code_of(error)
