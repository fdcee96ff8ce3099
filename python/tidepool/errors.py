"""Exceptions. Every one is a `TidepoolError` with `code`, `name`, `message`, `key`, `node`, `retryable`, `retry_after` and Mooncake's
number (`mooncake`); the classes below are for `except` clauses. `tidepool explain CODE` says what each code means."""

from __future__ import annotations

from . import _native
from ._native import ERROR_CODES, TidepoolError

__all__ = [
    "BadRequest",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "NoSpace",
    "NotFound",
    "NotSupported",
    "TidepoolError",
    "Unavailable",
    "WrongCluster",
]


class NotFound(TidepoolError):
    """No such object, task or segment."""


class BadRequest(TidepoolError):
    """An argument is out of its range; nothing was done."""


class Conflict(TidepoolError):
    """Something else holds the object: a reader's lease, another put, a task. It may succeed later."""


class DeadlineExceeded(TidepoolError):
    """The deadline passed. Whether a put or remove took effect is not known."""


class Unavailable(TidepoolError):
    """No master leads or answers, no copy can be read, or the store is closed."""


class NoSpace(TidepoolError):
    """No room for the object, or for as many copies as a strict put wants, or the tenant's quota is used up."""


class WrongCluster(TidepoolError):
    """The masters belong to another cluster, or their version is too far from this client's."""


class NotSupported(TidepoolError):
    """Not in this version, or memory that cannot be used (a GPU's)."""


class Corrupt(TidepoolError):
    """Bytes did not match their checksums; none were delivered."""


_CLASSES = {
    BadRequest: (
        "INVALID_PARAMS",
        "INVALID_KEY",
        "BUFFER_TOO_SMALL",
        "OUT_OF_BOUNDS",
        "TENANT_NOT_REGISTERED",
    ),
    NotFound: ("OBJECT_NOT_FOUND", "SEGMENT_NOT_FOUND", "TASK_NOT_FOUND", "REPLICA_NOT_FOUND"),
    Conflict: ("OBJECT_HAS_LEASE", "PUT_IN_PROGRESS", "OBJECT_HAS_REPLICATION_TASK", "REPLICA_IS_NOT_READY"),
    DeadlineExceeded: ("DEADLINE_EXCEEDED",),
    Unavailable: ("UNAVAILABLE", "NOT_LEADER", "REPLICA_UNAVAILABLE", "STATE_DIVERGED"),
    NoSpace: ("NO_SPACE", "NOT_ENOUGH_REPLICAS", "TENANT_QUOTA_EXCEEDED", "HARD_PIN_LIMIT_EXCEEDED", "FITS_NOWHERE"),
    WrongCluster: ("WRONG_CLUSTER",),
    NotSupported: ("NOT_SUPPORTED", "FEATURE_LEVEL"),
    Corrupt: ("CHECKSUM_MISMATCH",),
}

_CODES = {name: code for code, name, _, _ in ERROR_CODES}
_native.set_error_classes({_CODES[name]: cls for cls, names in _CLASSES.items() for name in names})
