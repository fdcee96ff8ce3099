"""`Store`: the client."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Dict, Iterator, List, Optional, Sequence, Type, Union

from . import _native
from ._native import ItemError, LocalNode, PutOptions, PutResult

Key = Union[str, bytes]
Masters = Union[str, Sequence[str]]

_UPSERT = PutOptions(upsert=True)
_PAGE = 1000
_NO_DEFAULT = object()


def address_list(masters: Masters) -> str:
    """Masters as one text: "h1,h2:50051", or a list of such."""
    return masters if isinstance(masters, str) else ",".join(masters)


def only(results: List[Any]) -> Any:
    """The result of a batch of one; its error is raised."""
    result = results[0]
    if type(result) is ItemError:
        raise result.exception()
    return result


def upserting(options: Optional[PutOptions]) -> PutOptions:
    """Options of an upsert."""
    if options is None:
        return _UPSERT
    if not options.upsert:
        raise ValueError("the options of an upsert need upsert=True")
    return options


class Store:
    """A connection to one cluster, for any number of threads. Close it, or use it as a context manager.

    masters: "host[:port],..." or a list of such; one reachable master is enough, the others are learned. Port 50051 when none is given.
    tenant: whose keys it sees. host_id: physical host of this process, for placement; its host name by default.
    deadline: seconds a call takes at most when it names none itself. connect_deadline: seconds to find the leader.

    Keys are str (UTF-8) or bytes, 1 to 4096 bytes. Calls of one key raise `TidepoolError` (see `tidepool.errors`); calls of many
    (`*_many`) return a list with a value or a (falsy) `ItemError` a key, and raise only what concerns the whole call.
    Calls release the GIL while they wait, and end when a signal handler raises (Ctrl-C)."""

    def __init__(
        self,
        masters: Masters = "127.0.0.1:50051",
        *,
        tenant: str = "",
        host_id: str = "",
        deadline: float = 5.0,
        connect_deadline: float = 5.0,
    ) -> None:
        self._masters = address_list(masters)
        self._client = _native.Client(
            self._masters, tenant=tenant, host_id=host_id, deadline=deadline, connect_deadline=connect_deadline
        )

    @property
    def native(self) -> _native.Client:
        """The native client under it, whose calls take codes, addresses and more."""
        return self._client

    @property
    def deadline(self) -> float:
        """Seconds a call takes at most when it names none itself."""
        return self._client.deadline

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process before a fork."""
        return self._client.closed

    def close(self) -> None:
        """Ends it; calls under way in other threads fail. May be repeated."""
        self._client.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self._masters!r}{', closed' if self.closed else ''})"

    # --- put

    def put(
        self,
        key: Key,
        value: Any,
        options: Optional[PutOptions] = None,
        *,
        group: Optional[Key] = None,
        deadline: Optional[float] = None,
    ) -> PutResult:
        """Stores an object. `value` is anything bytes-like (not copied), a CPU tensor (DLPack), or a list of them (their concatenation).

        A key that has an object keeps it: that is success, and `result.existed` says so. See `upsert`."""
        groups = None if group is None else [group]
        result: PutResult = only(self._client.put_many([key], [value], options, groups=groups, deadline=deadline))
        return result

    def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        options: Optional[PutOptions] = None,
        *,
        groups: Optional[Sequence[Key]] = None,
        deadline: Optional[float] = None,
    ) -> List[Union[PutResult, ItemError]]:
        """Stores objects. `groups`: a name a key; members of a group are evicted together and exist together."""
        return self._client.put_many(keys, values, options, groups=groups, deadline=deadline)

    def upsert(
        self, key: Key, value: Any, options: Optional[PutOptions] = None, *, deadline: Optional[float] = None
    ) -> PutResult:
        """Stores an object in place of the one that may be there, which is read until the new one is complete."""
        return self.put(key, value, upserting(options), deadline=deadline)

    def upsert_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        options: Optional[PutOptions] = None,
        *,
        deadline: Optional[float] = None,
    ) -> List[Union[PutResult, ItemError]]:
        """As `upsert`, for many."""
        return self.put_many(keys, values, upserting(options), deadline=deadline)

    # --- get

    def get(self, key: Key, *, default: Any = _NO_DEFAULT, deadline: Optional[float] = None) -> Any:
        """The object as a read-only memoryview of the bytes that arrived: verified, never copied.

        A key that is not there raises `errors.NotFound`, or gives `default` if there is one; any other failure raises."""
        result = self._client.get_many([key], deadline=deadline)[0]
        if type(result) is ItemError:
            if default is not _NO_DEFAULT and result.name == "OBJECT_NOT_FOUND":
                return default
            raise result.exception()
        return memoryview(result)

    def get_many(
        self, keys: Sequence[Key], *, deadline: Optional[float] = None
    ) -> List[Union[memoryview, ItemError]]:
        """A read-only memoryview an object."""
        results = self._client.get_many(keys, deadline=deadline)
        return [result if type(result) is ItemError else memoryview(result) for result in results]

    def get_bytes(self, key: Key, *, deadline: Optional[float] = None) -> bytes:
        """As `get`, as bytes (one copy)."""
        value: bytes = only(self._client.get_bytes_many([key], deadline=deadline))
        return value

    def get_into(self, key: Key, buffer: Any, *, deadline: Optional[float] = None) -> int:
        """Fills writable memory (anything that exports a buffer, a CPU tensor, or a list of them) with the object; its bytes.

        BUFFER_TOO_SMALL when the object is longer; then, or after another error, what is in the buffer is undefined."""
        filled: int = only(self._client.get_into_many([key], [buffer], deadline=deadline))
        return filled

    def get_into_many(
        self, keys: Sequence[Key], buffers: Sequence[Any], *, deadline: Optional[float] = None
    ) -> List[Union[int, ItemError]]:
        """As `get_into`, for many.."""
        return self._client.get_into_many(keys, buffers, deadline=deadline)

    def get_range(self, key: Key, offset: int, length: int, *, deadline: Optional[float] = None) -> memoryview:
        """A part of an object, as `get`. It must lie within the object."""
        return memoryview(only(self._client.get_range_many([key], [offset], [length], deadline=deadline)))

    def get_range_into(self, key: Key, offset: int, buffer: Any, *, deadline: Optional[float] = None) -> int:
        """Fills writable memory, all of it, with the part of an object that begins at `offset`."""
        filled: int = only(self._client.get_range_into_many([key], [offset], [buffer], deadline=deadline))
        return filled

    # --- look

    def exist(self, key: Key, *, deadline: Optional[float] = None) -> bool:
        """Whether the object is there and readable from here. Takes a lease: a get that follows finds it."""
        found: bool = only(self._client.exist_many([key], deadline=deadline))
        return found

    def exist_many(
        self, keys: Sequence[Key], *, deadline: Optional[float] = None
    ) -> List[Union[bool, ItemError]]:
        """As `exist`, for many."""
        return self._client.exist_many(keys, deadline=deadline)

    def stat(self, key: Key, *, deadline: Optional[float] = None) -> _native.StatDict:
        """Where an object is, its length, pins and leases. Touches neither leases nor recency."""
        stat: _native.StatDict = only(self._client.stat_many([key], deadline=deadline))
        return stat

    def stat_many(
        self, keys: Sequence[Key], *, deadline: Optional[float] = None
    ) -> List[Union[_native.StatDict, ItemError]]:
        """As `stat`, for many."""
        return self._client.stat_many(keys, deadline=deadline)

    def list(
        self,
        prefix: Key = b"",
        regex: str = "",
        *,
        data_type: Optional[str] = None,
        deadline: Optional[float] = None,
    ) -> Iterator[Dict[str, Any]]:
        """Objects whose keys match, page by page, in no order that means anything: key, object_id, length, replicas, data_type, hard_pinned."""
        after = b""
        while True:
            page = self._client.list(
                prefix, regex, data_type=data_type, limit=_PAGE, after=after, deadline=deadline
            )
            yield from page["objects"]
            if not page["more"]:
                return
            after = page["next"]

    # --- remove and pin

    def remove(self, key: Key, *, force: bool = False, deadline: Optional[float] = None) -> None:
        """Removes an object. A reader's lease refuses it (`errors.Conflict`) unless `force`: then it is unlisted at once, and stays valid
        for those who read it."""
        only(self._client.remove_many([key], force=force, deadline=deadline))

    def remove_many(
        self, keys: Sequence[Key], *, force: bool = False, deadline: Optional[float] = None
    ) -> List[Optional[ItemError]]:
        """As `remove`, for many: None an object that was removed."""
        return self._client.remove_many(keys, force=force, deadline=deadline)

    def remove_matching(
        self, prefix: Key = b"", regex: str = "", *, force: bool = False, deadline: Optional[float] = None
    ) -> _native.RemovedDict:
        """Removes every object whose key begins with `prefix` and in which `regex` finds a match; without either, all of the tenant's."""
        return self._client.remove_matching(prefix, regex, force=force, deadline=deadline)

    def pin(self, key: Key, ttl: Optional[float] = None, *, deadline: Optional[float] = None) -> None:
        """Keeps an object from eviction while anything else can go, for `ttl` seconds (None: the masters' default)."""
        only(self._client.pin_many([key], on=True, ttl=ttl, deadline=deadline))

    def unpin(self, key: Key, *, deadline: Optional[float] = None) -> None:
        """Ends an object's soft pin."""
        only(self._client.pin_many([key], on=False, deadline=deadline))

    # --- the cluster

    def lend(self, size: int, **options: Any) -> LocalNode:
        """Lends `size` bytes of this process's memory to the cluster until the node is closed; options as for `LocalNode`."""
        return LocalNode(self._masters, size, **options)

    def segments(self, *, deadline: Optional[float] = None) -> List[_native.SegmentDict]:
        """The cluster's memory, segment by segment."""
        return self._client.segments(deadline=deadline)

    def ping(self, *, deadline: Optional[float] = None) -> float:
        """Seconds that the leader takes to answer."""
        return self._client.ping(deadline=deadline)

    def leader(self) -> Optional[str]:
        """"host:port" of the master that leads, as far as known here."""
        return self._client.leader()

    def metrics(self) -> Dict[str, int]:
        """Counters of this store."""
        return self._client.metrics()
