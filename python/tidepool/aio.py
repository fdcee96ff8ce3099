"""`AsyncStore`: the client for asyncio. No thread waits for a call; cancelling an awaitable drops its call."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, AsyncIterator, Dict, List, Optional, Sequence, Type, Union

from . import _native
from ._native import ItemError, PutOptions, PutResult
from .store import _NO_DEFAULT, _PAGE, Key, Masters, address_list, only, upserting


class AsyncStore:
    """`Store` with awaitable calls; arguments and results are the same. Make it by `await AsyncStore.connect(...)`, or

        async with AsyncStore.connect("m1,m2,m3") as store: ...
    """

    def __init__(self, client: _native.Client) -> None:
        # Untyped: with a loop a call returns a future of what its stub says.
        self._client: Any = client

    @staticmethod
    def connect(masters: Masters = "127.0.0.1:50051", **options: Any) -> "_Connecting":
        """Finds the leader. Options as for `Store`."""
        return _Connecting(address_list(masters), options)

    @property
    def native(self) -> _native.Client:
        """The native client under it."""
        return self._client

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process before a fork."""
        return self._client.closed

    def close(self) -> None:
        """Ends it; calls under way fail. May be repeated."""
        self._client.close()

    async def __aenter__(self) -> "AsyncStore":
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    async def put(
        self,
        key: Key,
        value: Any,
        options: Optional[PutOptions] = None,
        *,
        group: Optional[Key] = None,
        deadline: Optional[float] = None,
    ) -> PutResult:
        """See `Store.put`."""
        groups = None if group is None else [group]
        results = await self.put_many([key], [value], options, groups=groups, deadline=deadline)
        result: PutResult = only(results)
        return result

    async def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        options: Optional[PutOptions] = None,
        *,
        groups: Optional[Sequence[Key]] = None,
        deadline: Optional[float] = None,
    ) -> List[Union[PutResult, ItemError]]:
        """See `Store.put_many`."""
        return await self._client.put_many(keys, values, options, groups=groups, deadline=deadline, loop=_loop())

    async def upsert(
        self, key: Key, value: Any, options: Optional[PutOptions] = None, *, deadline: Optional[float] = None
    ) -> PutResult:
        """See `Store.upsert`."""
        return await self.put(key, value, upserting(options), deadline=deadline)

    async def upsert_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        options: Optional[PutOptions] = None,
        *,
        deadline: Optional[float] = None,
    ) -> List[Union[PutResult, ItemError]]:
        """See `Store.upsert_many`."""
        return await self.put_many(keys, values, upserting(options), deadline=deadline)

    async def get(self, key: Key, *, default: Any = _NO_DEFAULT, deadline: Optional[float] = None) -> Any:
        """See `Store.get`."""
        result = (await self._client.get_many([key], deadline=deadline, loop=_loop()))[0]
        if type(result) is ItemError:
            if default is not _NO_DEFAULT and result.name == "OBJECT_NOT_FOUND":
                return default
            raise result.exception()
        return memoryview(result)

    async def get_many(
        self, keys: Sequence[Key], *, deadline: Optional[float] = None
    ) -> List[Union[memoryview, ItemError]]:
        """See `Store.get_many`."""
        results = await self._client.get_many(keys, deadline=deadline, loop=_loop())
        return [result if type(result) is ItemError else memoryview(result) for result in results]

    async def get_bytes(self, key: Key, *, deadline: Optional[float] = None) -> bytes:
        """See `Store.get_bytes`."""
        value: bytes = only(await self._client.get_bytes_many([key], deadline=deadline, loop=_loop()))
        return value

    async def get_into(self, key: Key, buffer: Any, *, deadline: Optional[float] = None) -> int:
        """See `Store.get_into`."""
        filled: int = only(await self.get_into_many([key], [buffer], deadline=deadline))
        return filled

    async def get_into_many(
        self, keys: Sequence[Key], buffers: Sequence[Any], *, deadline: Optional[float] = None
    ) -> List[Union[int, ItemError]]:
        """See `Store.get_into_many`."""
        return await self._client.get_into_many(keys, buffers, deadline=deadline, loop=_loop())

    async def get_range(self, key: Key, offset: int, length: int, *, deadline: Optional[float] = None) -> memoryview:
        """See `Store.get_range`."""
        results = await self._client.get_range_many([key], [offset], [length], deadline=deadline, loop=_loop())
        return memoryview(only(results))

    async def get_range_into(self, key: Key, offset: int, buffer: Any, *, deadline: Optional[float] = None) -> int:
        """See `Store.get_range_into`."""
        results = await self._client.get_range_into_many([key], [offset], [buffer], deadline=deadline, loop=_loop())
        filled: int = only(results)
        return filled

    async def exist(self, key: Key, *, deadline: Optional[float] = None) -> bool:
        """See `Store.exist`."""
        found: bool = only(await self.exist_many([key], deadline=deadline))
        return found

    async def exist_many(
        self, keys: Sequence[Key], *, deadline: Optional[float] = None
    ) -> List[Union[bool, ItemError]]:
        """See `Store.exist_many`."""
        return await self._client.exist_many(keys, deadline=deadline, loop=_loop())

    async def stat(self, key: Key, *, deadline: Optional[float] = None) -> _native.StatDict:
        """See `Store.stat`."""
        stat: _native.StatDict = only(await self.stat_many([key], deadline=deadline))
        return stat

    async def stat_many(
        self, keys: Sequence[Key], *, deadline: Optional[float] = None
    ) -> List[Union[_native.StatDict, ItemError]]:
        """See `Store.stat_many`."""
        return await self._client.stat_many(keys, deadline=deadline, loop=_loop())

    async def list(
        self,
        prefix: Key = b"",
        regex: str = "",
        *,
        data_type: Optional[str] = None,
        deadline: Optional[float] = None,
    ) -> AsyncIterator[Dict[str, Any]]:
        """See `Store.list`."""
        after = b""
        while True:
            page = await self._client.list(
                prefix, regex, data_type=data_type, limit=_PAGE, after=after, deadline=deadline, loop=_loop()
            )
            for found in page["objects"]:
                yield found
            if not page["more"]:
                return
            after = page["next"]

    async def remove(self, key: Key, *, force: bool = False, deadline: Optional[float] = None) -> None:
        """See `Store.remove`."""
        only(await self.remove_many([key], force=force, deadline=deadline))

    async def remove_many(
        self, keys: Sequence[Key], *, force: bool = False, deadline: Optional[float] = None
    ) -> List[Optional[ItemError]]:
        """See `Store.remove_many`."""
        return await self._client.remove_many(keys, force=force, deadline=deadline, loop=_loop())

    async def remove_matching(
        self, prefix: Key = b"", regex: str = "", *, force: bool = False, deadline: Optional[float] = None
    ) -> _native.RemovedDict:
        """See `Store.remove_matching`."""
        return await self._client.remove_matching(prefix, regex, force=force, deadline=deadline, loop=_loop())

    async def pin(self, key: Key, ttl: Optional[float] = None, *, deadline: Optional[float] = None) -> None:
        """See `Store.pin`."""
        only(await self._client.pin_many([key], on=True, ttl=ttl, deadline=deadline, loop=_loop()))

    async def unpin(self, key: Key, *, deadline: Optional[float] = None) -> None:
        """See `Store.unpin`."""
        only(await self._client.pin_many([key], on=False, deadline=deadline, loop=_loop()))

    async def segments(self, *, deadline: Optional[float] = None) -> List[_native.SegmentDict]:
        """See `Store.segments`."""
        return await self._client.segments(deadline=deadline, loop=_loop())

    async def ping(self, *, deadline: Optional[float] = None) -> float:
        """See `Store.ping`."""
        return await self._client.ping(deadline=deadline, loop=_loop())

    def leader(self) -> Optional[str]:
        """See `Store.leader`."""
        return self._client.leader()

    def metrics(self) -> Dict[str, int]:
        """See `Store.metrics`."""
        return self._client.metrics()


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


class _Connecting:
    """Awaited, or entered, it is an `AsyncStore`."""

    def __init__(self, masters: str, options: Dict[str, Any]) -> None:
        self._masters = masters
        self._options = options
        self._store: Optional[AsyncStore] = None

    async def _connect(self) -> AsyncStore:
        self._store = AsyncStore(await _native.Client.connect_async(_loop(), self._masters, **self._options))
        return self._store

    def __await__(self) -> Any:
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncStore:
        return await self._connect()

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self._store is not None:
            self._store.close()
