"""Copies and moves that the masters carry out, by the names of segments."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Optional

from mooncake.store import codes
from mooncake.store.descriptors import QueryTaskResponse, task_of
from mooncake.store.layer_wise import LayerWise
from mooncake.store.objects import RAISED, code_of

_NO_TASK = (0, 0)
#: Copies that were there already, and of which a store remembers that they ended.
NOTHING_TO_DO_MAX = 1024


class Tasks(LayerWise):
    """Tasks. An id is a pair of numbers: (0, id of the masters), or (1, number) when there was nothing to do; (0, 0) is none."""

    def __init__(self) -> None:
        super().__init__()
        self._nothing_to_do: OrderedDict[int, dict] = OrderedDict()
        self._task_numbers = itertools.count(1)

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[tuple[int, int], int]:
        """One more copy on each target segment: (id, 0), or ((0, 0), negative). A target that has one already is done."""
        if not targets:
            return _NO_TASK, codes.INVALID_PARAMS
        task, code = self._created(lambda client: client.create_copy_task(key, targets))
        if code != codes.REPLICA_ALREADY_EXISTS:
            return task, code
        left = [target for target in targets if target not in self._places(key)]
        if left:
            return self._created(lambda client: client.create_copy_task(key, left))
        number = next(self._task_numbers)
        with self._lifecycle:
            self._nothing_to_do[number] = {"kind": "copy", "state": "SUCCEEDED", "age": 0.0, "message": "every target has a copy"}
            while len(self._nothing_to_do) > NOTHING_TO_DO_MAX:
                self._nothing_to_do.popitem(last=False)
        return (1, number), codes.OK

    def _places(self, key: str) -> set[str]:
        """Segments that have a copy."""
        (stat,) = self._stats([key])
        return {replica["segment"] for replica in stat["replicas"]} if isinstance(stat, dict) else set()

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
        if not isinstance(task_id, (tuple, list)) or len(task_id) != 2 or not all(isinstance(part, int) for part in task_id):
            raise TypeError(f"task_id takes a pair of numbers, not {task_id!r}")
        high, low = task_id
        if high == 1 and low in self._nothing_to_do:
            return task_of(self._nothing_to_do[low], task_id), codes.OK
        if high != 0:
            return None, codes.TASK_NOT_FOUND
        try:
            return task_of(client.query_task(low), task_id), codes.OK
        except RAISED as error:
            return None, code_of(error)
