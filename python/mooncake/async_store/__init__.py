"""The store for asyncio: every method once more as `async_<name>`, run in the event loop's threads."""

import asyncio
import functools

from mooncake.store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """`await store.async_put(...)` is `store.put(...)` without blocking the loop. A call whose await is cancelled goes on until its
    deadline at most; its buffers must be kept until then."""

    def __getattr__(self, name: str):
        plain = getattr(type(self), name[6:], None) if name.startswith("async_") else None
        if not callable(plain):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        method = getattr(self, name[6:])

        @functools.wraps(plain)
        async def call(*args, **kwargs):
            return await asyncio.get_running_loop().run_in_executor(None, functools.partial(method, *args, **kwargs))

        self.__dict__[name] = call
        return call
