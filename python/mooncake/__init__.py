"""The package that engines import Mooncake from. Tidepool answers for `mooncake.store` and what stands around it.

Everything of ours below this package is a directory of its own, so that no file is shared with an installed original: a
directory goes before a module of the same name. What we do not have (`mooncake.engine`, `mooncake.ep`, ...) stays the original's.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

__all__ = ["BufferPool", "RegisteredBufferPool"]


def __getattr__(name: str):
    # Only when asked for, so that importing a sibling does not load the native module.
    if name in __all__:
        from mooncake.store import BufferPool

        return BufferPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
