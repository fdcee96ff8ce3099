"""What is told of copies and tasks, in the shapes that Mooncake tells them in."""

import time
from collections.abc import Mapping
from typing import Any

from mooncake.store.enums import ReplicaStatus, TaskStatus, TaskType

_TASK_STATUS = {
    "PENDING": TaskStatus.PENDING,
    "RUNNING": TaskStatus.PROCESSING,
    "SUCCEEDED": TaskStatus.SUCCESS,
    "FAILED": TaskStatus.FAILED,
    "CANCELLED": TaskStatus.FAILED,
}


class Descriptor:
    """Where the bytes of a copy in memory are. `transport_endpoint` is the name of the segment, as `preferred_segment` takes it."""

    def __init__(self) -> None:
        self.size = 0
        self.buffer_address = 0
        self.transport_endpoint = ""

    def __repr__(self) -> str:
        return (
            f"<Descriptor size={self.size} buffer_address={self.buffer_address} "
            f"transport_endpoint={self.transport_endpoint}>"
        )


BufferDescriptor = Descriptor


class MemoryDescriptor:
    """A copy in the memory of a segment."""

    def __init__(self, buffer_descriptor: Descriptor) -> None:
        self.buffer_descriptor = buffer_descriptor


class DiskDescriptor:
    """A copy on a disk: its owner's address, and its bytes."""

    def __init__(self, file_path: str, object_size: int) -> None:
        self.file_path = file_path
        self.object_size = object_size


class ReplicaDescriptor:
    """One copy of an object."""

    def __init__(self, status: ReplicaStatus, kind: str, descriptor: object) -> None:
        self.status = status
        self._kind = kind
        self._descriptor = descriptor

    def is_memory_replica(self) -> bool:
        return self._kind == "memory"

    def is_disk_replica(self) -> bool:
        """A copy in a shared file system, which Tidepool does not make."""
        return False

    def is_local_disk_replica(self) -> bool:
        return self._kind == "local_disk"

    def get_memory_descriptor(self) -> MemoryDescriptor:
        if not isinstance(self._descriptor, MemoryDescriptor):
            raise RuntimeError("Expected MemoryDescriptor")
        return self._descriptor

    def get_disk_descriptor(self) -> DiskDescriptor:
        raise RuntimeError("Expected DiskDescriptor")

    def __repr__(self) -> str:
        return f"<ReplicaDescriptor {self._kind} {self.status.name}>"


class QueryTaskResponse:
    """A task: its id as a pair, like every UUID of this API; times in milliseconds of the epoch."""

    def __init__(self) -> None:
        self.id = (0, 0)
        self.type = TaskType.REPLICA_COPY
        self.status = TaskStatus.PENDING
        self.created_at_ms_epoch = 0
        self.last_updated_at_ms_epoch = 0
        self.assigned_client = (0, 0)
        self.message = ""

    def __repr__(self) -> str:
        return (
            f"QueryTaskResponse(id={self.id[0]}-{self.id[1]}, type={int(self.type)}, status={int(self.status)}, "
            f"created_at={self.created_at_ms_epoch}, last_updated_at={self.last_updated_at_ms_epoch}, "
            f'assigned_client={self.assigned_client[0]}-{self.assigned_client[1]}, message="{self.message}")'
        )


def replicas_of(stat: dict) -> list[ReplicaDescriptor]:
    """The copies that a reader may use, of what the directory says of an object."""
    if stat["state"] != "COMPLETE":
        return []
    found = []
    for replica in stat["replicas"]:
        if not replica["listed"]:
            continue
        if replica["kind"] == "memory":
            place = Descriptor()
            place.size = stat["length"]
            place.buffer_address = replica["offset"]
            place.transport_endpoint = replica["segment"]
            descriptor: object = MemoryDescriptor(place)
        else:
            descriptor = DiskDescriptor(replica["endpoint"], stat["length"])
        found.append(ReplicaDescriptor(ReplicaStatus.COMPLETE, replica["kind"], descriptor))
    return found


def task_of(task: Mapping[str, Any], task_id: tuple[int, int]) -> QueryTaskResponse:
    """A task of the masters, as an answer of `query_task`."""
    answer = QueryTaskResponse()
    answer.id = task_id
    answer.type = TaskType.REPLICA_MOVE if task["kind"] == "move" else TaskType.REPLICA_COPY
    answer.status = _TASK_STATUS.get(task["state"], TaskStatus.PROCESSING)
    answer.last_updated_at_ms_epoch = int(time.time() * 1000)
    answer.created_at_ms_epoch = answer.last_updated_at_ms_epoch - int(task["age"] * 1000)
    answer.message = task["message"]
    return answer
