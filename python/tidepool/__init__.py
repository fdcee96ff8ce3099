"""Tidepool: a highly available KV-cache store.

    import tidepool

    with tidepool.dev() as pool:
        store = pool.store()
        store.put("greeting", b"hello")
        assert store.get("greeting") == b"hello"

`Store` is the client, `AsyncStore` the same for asyncio, `dev()` a whole cluster in a child process, `LocalNode` memory of this process
lent to a cluster.
"""

from . import errors
from ._native import (
    DATA_TYPES,
    ERROR_CODES,
    ItemError,
    LocalNode,
    Memory,
    PutOptions,
    PutResult,
    TidepoolError,
    Value,
    __version__,
    register,
    unregister,
)
from .aio import AsyncStore
from .dev import DevPool, dev
from .store import Store

__all__ = [
    "DATA_TYPES",
    "ERROR_CODES",
    "AsyncStore",
    "DevPool",
    "ItemError",
    "LocalNode",
    "Memory",
    "PutOptions",
    "PutResult",
    "Store",
    "TidepoolError",
    "Value",
    "__version__",
    "dev",
    "errors",
    "register",
    "unregister",
]
