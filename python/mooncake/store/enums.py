"""Enumerations of the API. They print as Mooncake's do (`SoftPinAction.ENABLE`) and convert with `int()`."""

import enum


class _Numbered(enum.Enum):
    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


class SoftPinAction(_Numbered):
    """What a put or an upsert does about the soft pin of its key."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(_Numbered):
    """What an object holds, as far as its writer said."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(_Numbered):
    """State of one copy."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(_Numbered):
    """What a task does."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(_Numbered):
    """How far a task is. The numbers are Mooncake's, 2 and 3 in this order."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3
