"""Pools of host memory: `from mooncake.buffer_pool import BufferPool`."""

from mooncake.store import BufferPool

RegisteredBufferPool = BufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
