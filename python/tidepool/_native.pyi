"""The native module under `tidepool.Store` and `mooncake.store`: batches in, batches out, one result an item.

Common to every call that talks to the cluster:

- Keys are `str` (UTF-8) or `bytes`, 1 to 4096 bytes.
- `deadline` is seconds (None: the client's default). The call returns by then, plus 50 ms.
- The GIL is released while the call waits. A signal handler that raises (Ctrl-C) ends the call within 0.2 s.
- `loop=None`: the call blocks. With an asyncio loop, the call returns at once an `asyncio.Future` of that loop, resolved with
  what the call would have returned; cancelling the future drops the call. No thread waits for it.
- A batch call never raises for one item: the result list has, at each place, the item's value or an `ItemError`.
  With `codes=True` it has an int at each place: the value, or the (negative) Mooncake number of the error.
- Arguments of a wrong type raise TypeError; lists of unequal length and numbers out of range raise ValueError. Neither sends anything.
- A call on a closed client, or in a child made by fork(), raises TidepoolError: nothing is sent, nothing hangs.

Items of one call whose memory overlaps are filled one after another.

Addresses are plain ints (numpy `a.ctypes.data`, torch `t.data_ptr()`). A range that an address names must lie within one range
given to `register` (or within a live `Memory`), unless `unchecked=True`; otherwise the item fails with INVALID_PARAMS
(-600). Memory that is not mapped in this process any more fails alike, also with `unchecked=True`. Whoever passes addresses keeps
the memory alive until the call ended, and does not change it meanwhile; buffer objects are kept alive by the call.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, List, Literal, TypedDict, Union

Key = Union[str, bytes]
#: Anything that exports a C-contiguous buffer (bytes, bytearray, memoryview, numpy arrays, Value, Memory), or a contiguous DLPack tensor on the CPU (torch).
Buffer = Any
Loop = Union[asyncio.AbstractEventLoop, None]

__version__: str
#: Every error code: (code, name, Mooncake's number, may succeed later).
ERROR_CODES: list[tuple[int, str, int, bool]]
#: Names of data types, by number: "unknown", "kvcache", "tensor", ...
DATA_TYPES: list[str]
#: Largest payload of one object.
OBJECT_BYTES_MAX: int
#: Longest key.
KEY_BYTES_MAX: int
#: Version of the wire protocol. Peers further apart than one are refused when the client connects.
PROTOCOL_VERSION: int

class TidepoolError(Exception):
    """What the cluster, or the way to it, answered. `str(error)` is "NAME: message"."""

    code: int
    name: str
    #: Mooncake's number for it, negative.
    mooncake: int
    message: str
    #: Key it is about; None: none, or several.
    key: Union[bytes, None]
    #: Node it is about, as "host:port" or an id; None: not known.
    node: Union[str, None]
    #: The same call may succeed later.
    retryable: bool
    #: Advice in seconds; 0.0: none.
    retry_after: float

class ItemError:
    """Why one item of a batch failed: as TidepoolError, but a value. Falsy."""

    code: int
    name: str
    mooncake: int
    message: str
    key: Union[bytes, None]
    node: Union[str, None]
    retryable: bool
    retry_after: float
    def exception(self) -> TidepoolError: ...
    def __bool__(self) -> Literal[False]: ...

class Value:
    """The bytes of one object, as they arrived: exports a read-only buffer (`memoryview(value)`), so nothing is copied."""

    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    #: Address of the first byte; valid as long as this object.
    address: int
    def ptr(self) -> int: ...
    def size(self) -> int: ...

class Memory:
    """Page-aligned, zeroed, writable host memory: exports a writable buffer, and its addresses count as registered."""

    def __init__(self, size: int) -> None: ...
    address: int
    size: int
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def free(self) -> None:
        """Gives it back now. BufferError while a memoryview of it lives or a call uses it."""

class PutOptions:
    """How objects are stored. Immutable; make it once and use it for many calls."""

    def __init__(
        self,
        *,
        replicas: int = 1,
        strict: bool = False,  # all copies or nothing; else one copy is success
        upsert: bool = False,  # replace what is there
        data_type: Union[str, int] = "unknown",
        soft_pin: Union[Literal["preserve", "enable", "disable"], None] = "preserve",
        soft_pin_ttl: Union[float, None] = None,  # seconds; None: the masters' default
        hard_pin: bool = False,
        preferred_segments: Sequence[str] = (),
        prefer_own_host: bool = False,
        independent: bool = True,  # False: what is stored when space runs short is a prefix of the batch
    ) -> None: ...
    @property
    def upsert(self) -> bool: ...

class PutResult:
    """A put that succeeded. Truthy; `int()` is 0."""

    #: Copies this put made; 0 when the key had an object already, which stays (without `upsert`).
    copies: int
    existed: bool
    object_id: int

class ReplicaDict(TypedDict):
    replica_id: int
    segment_id: int
    segment: str  # its name
    node_id: int
    endpoint: str  # "host:port" of its datanode; "" when not known
    host_id: str
    offset: int
    length: int  # of the extent, header included; the payload's is in StatDict
    kind: str  # "memory", "local_disk"
    listed: bool  # False: its node is suspect

class StatDict(TypedDict):
    object_id: int
    length: int  # payload bytes
    state: str  # "PROCESSING", "COMPLETE"
    replicas: list[ReplicaDict]
    leases: int
    lease_remaining: float
    age: float
    data_type: str
    hard_pinned: bool
    soft_pin_remaining: float  # 0.0: none
    group: bytes

class ListDict(TypedDict):
    objects: list[dict[str, Any]]  # key: bytes, object_id, length, replicas, data_type, hard_pinned
    more: bool
    next: bytes  # what to pass as `after`

class RemovedDict(TypedDict):
    removed: int
    leased: int  # left because a reader may be on them
    unfinished: int  # left because they are being put
    left_keys: list[bytes]  # the first of those
    next: Union[bytes, None]  # set when the deadline passed before the end

class TaskDict(TypedDict):
    task_id: int
    kind: str  # "copy", "move", "drain"
    state: str  # "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"
    moved: int
    failed: int
    left: int
    message: str
    age: float
    source_segments: list[str]

class SegmentDict(TypedDict):
    segment_id: int
    name: str
    node_id: int
    endpoint: str
    host_id: str
    capacity: int
    free: int
    state: str  # "MOUNTED", "UNMOUNTING", "SUSPECT"

Item = Any  # the value that the call names, or ItemError

class Client:
    """A connection to one cluster, for any number of threads."""

    def __init__(
        self,
        masters: str,  # "host[:port],host[:port],..."; port 50051 when none is given
        *,
        tenant: str = "",  # "" is the default tenant
        host_id: str = "",  # physical host of this process, for placement; "": its host name
        deadline: float = 5.0,
        connect_deadline: float = 5.0,
    ) -> None:
        """Finds the leader. TidepoolError when no leader answered in time (UNAVAILABLE, DEADLINE_EXCEEDED) or the versions are too far apart
        (WRONG_CLUSTER). `await Client.connect_async(loop, masters, ...)` is the same without blocking."""

    @staticmethod
    def connect_async(loop: asyncio.AbstractEventLoop, masters: str, **options: Any) -> "asyncio.Future[Client]": ...
    closed: bool
    tenant: str
    host_id: str
    deadline: float
    def close(self) -> None:
        """Ends it; calls under way in other threads fail with UNAVAILABLE. May be repeated."""

    # Put. groups: a name a key, b"" or "" is none.
    def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Union[Buffer, Sequence[Buffer]]],  # a list or tuple of buffers is one object of their concatenation
        options: Union[PutOptions, None] = None,
        *,
        groups: Union[Sequence[Key], None] = None,
        deadline: Union[float, None] = None,
        codes: bool = False,
        loop: Loop = None,
    ) -> List[Item]:
        """PutResult an item; with codes 0 or negative. An object that existed is success (0) and stays. An empty value is INVALID_PARAMS."""

    def put_from_many(
        self,
        keys: Sequence[Key],
        addresses: Sequence[Union[int, Sequence[int]]],
        sizes: Sequence[Union[int, Sequence[int]]],
        options: Union[PutOptions, None] = None,
        *,
        groups: Union[Sequence[Key], None] = None,
        deadline: Union[float, None] = None,
        codes: bool = False,
        unchecked: bool = False,
        loop: Loop = None,
    ) -> List[Item]:
        """As put_many, from addresses. A list of addresses gathers one object."""

    # Get.
    def get_many(self, keys: Sequence[Key], *, deadline: Union[float, None] = None, loop: Loop = None) -> List[Item]:
        """Value an item: the memory that was received into."""

    def get_bytes_many(
        self, keys: Sequence[Key], *, deadline: Union[float, None] = None, missing: Any = ..., loop: Loop = None
    ) -> List[Item]:
        """bytes an item (one copy). With `missing`, that object in place of every ItemError (`missing=b""` for Mooncake's get)."""

    def get_into_many(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Union[Buffer, Sequence[Buffer]]],
        *,
        deadline: Union[float, None] = None,
        codes: bool = False,
        loop: Loop = None,
    ) -> List[Item]:
        """Payload bytes an item, written into the buffers in order; BUFFER_TOO_SMALL (-600) when the object is longer. A read-only buffer is
        BufferError. What is in a buffer after an error is undefined."""

    def get_into_addresses_many(
        self,
        keys: Sequence[Key],
        addresses: Sequence[Union[int, Sequence[int]]],
        sizes: Sequence[Union[int, Sequence[int]]],
        *,
        deadline: Union[float, None] = None,
        codes: bool = False,
        unchecked: bool = False,
        loop: Loop = None,
    ) -> List[Item]:
        """As get_into_many, into addresses. A list of addresses scatters one object."""

    def get_range_many(
        self, keys: Sequence[Key], offsets: Sequence[int], lengths: Sequence[int], *, deadline: Union[float, None] = None, loop: Loop = None
    ) -> List[Item]:
        """Value an item: a part of the payload. A part that does not lie within the object is INVALID_PARAMS."""

    def get_range_into_many(
        self,
        keys: Sequence[Key],
        offsets: Sequence[int],
        buffers: Sequence[Union[Buffer, Sequence[Buffer]]],
        *,
        deadline: Union[float, None] = None,
        codes: bool = False,
        loop: Loop = None,
    ) -> List[Item]:
        """Bytes an item; each buffer is filled whole, from that offset of the payload."""

    def get_range_into_addresses_many(
        self,
        keys: Sequence[Key],
        offsets: Sequence[int],
        addresses: Sequence[Union[int, Sequence[int]]],
        sizes: Sequence[Union[int, Sequence[int]]],
        *,
        deadline: Union[float, None] = None,
        codes: bool = False,
        unchecked: bool = False,
        loop: Loop = None,
    ) -> List[Item]: ...

    # Look.
    def exist_many(
        self, keys: Sequence[Key], *, deadline: Union[float, None] = None, codes: bool = False, loop: Loop = None
    ) -> List[Item]:
        """bool an item; with codes 1, 0 or negative. Grants leases."""

    def size_many(
        self, keys: Sequence[Key], *, deadline: Union[float, None] = None, codes: bool = False, loop: Loop = None
    ) -> List[Item]:
        """Payload bytes an item, from the directory. OBJECT_NOT_FOUND (-704) for a miss, NotReady (-703) while it is being put. Grants no lease."""

    def stat_many(self, keys: Sequence[Key], *, deadline: Union[float, None] = None, loop: Loop = None) -> List[Item]:
        """StatDict an item. Touches neither leases nor recency."""

    def list(
        self,
        prefix: Key = b"",
        regex: str = "",  # keys that it finds a match in
        *,
        data_type: Union[str, None] = None,
        limit: int = 0,
        after: bytes = b"",
        deadline: Union[float, None] = None,
        loop: Loop = None,
    ) -> ListDict:
        """One page, in the order of the directory. Raises TidepoolError."""

    # Remove, pin, replicas.
    def remove_many(
        self,
        keys: Sequence[Key],
        *,
        force: bool = False,
        deadline: Union[float, None] = None,
        codes: bool = False,
        loop: Loop = None,
    ) -> List[Item]:
        """None an item; with codes 0 or negative. OBJECT_HAS_LEASE (-706) while a reader may be on it, unless `force`."""

    def remove_matching(
        self,
        prefix: Key = b"",
        regex: str = "",
        *,
        force: bool = False,
        after: Union[bytes, None] = None,
        deadline: Union[float, None] = None,
        loop: Loop = None,
    ) -> RemovedDict:
        """Removes what matches both; neither is everything. Raises TidepoolError."""

    def pin_many(
        self,
        keys: Sequence[Key],
        *,
        on: bool = True,
        ttl: Union[float, None] = None,
        deadline: Union[float, None] = None,
        codes: bool = False,
        loop: Loop = None,
    ) -> List[Item]: ...
    def clear_replicas(
        self, keys: Sequence[Key], segment: str = "", *, deadline: Union[float, None] = None, loop: Loop = None
    ) -> List[Item]:
        """bool an item: whether its replicas on that segment ("": on all) went. False: leased, being put, or none there."""

    # Tasks of the masters.
    def create_copy_task(
        self, key: Key, targets: Sequence[str], *, deadline: Union[float, None] = None, loop: Loop = None
    ) -> int:
        """Id of the task: one more replica in each target segment (names or ids). Raises TidepoolError."""

    def create_move_task(
        self, key: Key, source: str, target: str, *, deadline: Union[float, None] = None, loop: Loop = None
    ) -> int: ...
    def create_drain_task(
        self,
        segments: Sequence[str],
        targets: Sequence[str] = (),
        *,
        unmount: bool = False,
        concurrency: int = 0,
        deadline: Union[float, None] = None,
        loop: Loop = None,
    ) -> int: ...
    def query_task(self, task_id: int, *, deadline: Union[float, None] = None, loop: Loop = None) -> TaskDict:
        """TidepoolError TASK_NOT_FOUND (-1400) when there is none, or it was forgotten after it ended."""

    def cancel_task(self, task_id: int, *, deadline: Union[float, None] = None, loop: Loop = None) -> None: ...

    # The cluster.
    def segments(self, *, deadline: Union[float, None] = None, loop: Loop = None) -> List[SegmentDict]: ...
    def ping(self, *, deadline: Union[float, None] = None, loop: Loop = None) -> float:
        """Asks the leader for something small; seconds it took. TidepoolError when none answered."""

    def leader(self) -> Union[str, None]:
        """"host:port" of the master that leads, as far as this client knows now."""

    def masters(self) -> List[str]: ...
    def metrics(self) -> dict[str, int]: ...

class LocalNode:
    """Memory of this process, lent to the cluster: an embedded datanode. When it is closed, or the process ends, its replicas go."""

    def __init__(
        self,
        masters: str,
        size: int,  # bytes, at least 1 MiB
        *,
        listen: str = "127.0.0.1:0",  # "host:port"; port 0 takes a free one
        advertise: Union[str, None] = None,  # what others dial; the listen address when None. A loopback address is refused when a master is remote
        name: Union[str, None] = None,  # of its segment: 1 to 64 letters, digits and -_.:[]; None: dram-0
        host_id: str = "",
        deadline: float = 10.0,  # until it is mounted
    ) -> None:
        """Returns when its segment is mounted. TidepoolError when it is not in time."""

    address: str
    segments: list[str]  # names
    node_id: int
    size: int
    def ready(self) -> bool: ...
    def __enter__(self) -> "LocalNode": ...
    def __exit__(self, *error: Any) -> None: ...
    def close(self, *, deadline: float = 10.0) -> None:
        """Leaves the cluster: its segment is unmounted and the memory freed. May be repeated."""

# Memory.
def register(address: int, size: int) -> None:
    """Lets calls use addresses in this range. ValueError: it is not mapped readable and writable here (a GPU pointer, freed memory), or overlaps another
    registered range of a different extent. Registering the same range again is counted."""

def unregister(address: int) -> None:
    """Takes back one `register` of the range that starts there. ValueError: none does."""

def registered() -> list[tuple[int, int]]: ...
def copy_memory(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], *, unchecked: bool = False) -> None:
    """Copies memory to memory without the GIL; the same checks as above (ValueError)."""

def buffer_address(buffer: Buffer, writable: bool = False) -> tuple[int, int]:
    """(address, bytes) of a buffer object or CPU tensor. BufferError: not contiguous, or not writable. TidepoolError NOT_SUPPORTED: it lies on a GPU."""

def set_error_classes(classes: dict[int, type[TidepoolError]]) -> None:
    """Which class is raised for each code; the package's own import names them."""

# Not there: a put in parts at different times. The data plane writes an object in one go, so a layer-wise put stages its parts in a
# `Memory` (copy_memory) and puts that at its end.
