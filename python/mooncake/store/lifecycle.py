"""Setting up and closing a store, and what it knows of itself."""

import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Callable, Optional

from mooncake.store import codes, local_clients
from mooncake.store.connection import Connection
from mooncake.store.host_memory import MemoryPool
from mooncake.store.sessions import Sessions
from mooncake.store.settings import DEADLINE_S, DEFAULT_HTTP_PORT, Settings
from tidepool import _native

log = logging.getLogger("mooncake.store")

_POSITIONAL = (
    "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "rdma_devices",
    "master_server_addr", "engine", "enable_ssd_offload", "ssd_offload_path", "tenant_id", "enable_client_http_server",
    "client_http_port",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "engine": None,
    "enable_ssd_offload": False,
    "ssd_offload_path": "",
    "tenant_id": "default",
    "enable_client_http_server": False,
    "client_http_port": DEFAULT_HTTP_PORT,
}
_KINDS: dict[str, type] = {
    "global_segment_size": int, "local_buffer_size": int, "enable_ssd_offload": bool, "enable_client_http_server": bool,
    "client_http_port": int,
}  # fmt: skip
_FORMS = (
    "setup takes (local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices, "
    "master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path='', tenant_id='default', "
    "enable_client_http_server=False, client_http_port=9300), or one dict"
)


class Lifecycle:
    """A store before `setup`, and after it. `_client` is None while it is not set up."""

    def __init__(self) -> None:
        self._client: Optional[_native.Client] = None
        self._setup_failed = False
        self._connection: Optional[Connection] = None
        self._closing: Optional[weakref.finalize] = None
        self._buffer_bytes = 0
        self._deadline = DEADLINE_S
        self._registered: dict[int, int] = {}
        self._announced: set[int] = set()  # those of them that the native module knows from here
        self._sessions = Sessions(0)
        self._pool: Optional[MemoryPool] = None
        self._lifecycle = threading.RLock()

    def setup(self, *args: object, **kwargs: object) -> int:
        """Connects, and lends `global_segment_size` bytes of memory. 0, or negative; the reason is logged.

        Two forms: positional arguments as in `_FORMS`, or one dict (`config=`). TypeError for any other.
        `master_server_addr` may list several masters, separated by commas. A store that is set up is closed first.
        """
        config = args[0] if len(args) == 1 and not kwargs else kwargs.get("config") if not args else None
        if isinstance(config, dict) and len(kwargs) <= 1:
            return self._set_up(lambda: Settings.of_dict(config))
        arguments = _bound(args, kwargs)
        arguments.pop("engine")  # Tidepool moves bytes itself; a TransferEngine is not needed.
        return self._set_up(lambda: Settings.of(**arguments))

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connects through the `mooncake_client` of this host at `server_address`: it says which cluster. Lends no memory."""

        def settings() -> Settings:
            told = local_clients.ask(server_address)
            return Settings.of(
                told["hostname"], "P2PHANDSHAKE", 0, local_buffer_size, "tcp", "", told["masters"], tenant_id=told["tenant"]
            )

        code = self._set_up(settings)
        with self._lifecycle:
            if code == codes.OK and self._client is not None:
                self._pool = MemoryPool(mem_pool_size)
        return code

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16 << 20) -> int:
        """`setup` with everything from the environment (`MOONCAKE_MASTER`, ...), except what is given."""
        from mooncake.mooncake_config import MooncakeConfig

        def settings() -> Settings:
            config = MooncakeConfig.load_from_env()
            return Settings.of(
                config.local_hostname, config.metadata_server, mount_segment_size, config.local_buffer_size, protocol,
                device_name, config.master_server_address, tenant_id=config.tenant_id,
            )  # fmt: skip

        return self._set_up(settings)

    def _set_up(self, settings_of: Callable[[], Settings]) -> int:
        with self._lifecycle:
            self.close()
            self._setup_failed = True
            try:
                settings = settings_of()
                self._connection = Connection(settings)
            except _native.TidepoolError as error:
                log.error("setup: %s", error)
                return error.mooncake or codes.RPC_FAIL
            except (ValueError, OSError) as error:
                log.error("setup: %s", error)
                return codes.INVALID_PARAMS
            self._buffer_bytes = settings.buffer_bytes
            self._deadline = settings.deadline
            self._sessions = Sessions(settings.buffer_bytes)
            self._client = self._connection.client
            self._pool = None
            self._setup_failed = False
            # Also when the store is dropped without `close`, and when the interpreter ends.
            self._closing = weakref.finalize(self, _end, self._connection, self._announced)
            return codes.OK

    def close(self) -> int:
        """Gives back what the store holds: the memory that it lent goes with its replicas. 0; may be repeated."""
        with self._lifecycle:
            closing, self._closing = self._closing, None
            self._connection = self._client = None
            try:
                if closing is not None:
                    closing()
            except (RuntimeError, ValueError, OSError, _native.TidepoolError):
                log.exception("close")
            finally:
                # The pool stays as long as the store, or until it is set up again: a call that the connection ended may still be on
                # its way out in another thread, which holds the store.
                self._registered.clear()
                self._sessions.clear()
            return codes.OK

    def health_check(self) -> int:
        """0 healthy, 1 not set up or closed, 2 no master answers."""
        client = self._client
        if client is None:
            return 1
        try:
            client.ping()
        except _native.TidepoolError as error:
            log.debug("health_check: %s", error)
            return 2
        return 0

    def get_hostname(self) -> str:
        """"host:port" of this store, which is also the name of its segment; "" before setup."""
        connection = self._connection
        return "" if connection is None else connection.hostname

    def get_offload_rpc_read_count(self) -> int:
        """Reads that another process's SSD served by a call of its own; Tidepool's are not counted apart."""
        return 0

    def alloc_from_mem_pool(self, size: int) -> int:
        """Address of `size` bytes of the pool that `setup_dummy` was given; 0 when there is none, or it is used up."""
        pool = self._pool
        return 0 if pool is None or self._client is None else pool.allocate(size)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Announces memory that calls will use by address. -600: not memory of this host (a GPU's), or announced before."""
        with self._lifecycle:
            if self._client is None:
                return codes.INVALID_PARAMS
            if _overlap(buffer_ptr, size, self._registered.items()):
                log.warning("register_buffer: %d bytes at %#x overlap what this store was told of before", size, buffer_ptr)
                return codes.INVALID_PARAMS
            try:
                _native.register(buffer_ptr, size)
                self._announced.add(buffer_ptr)
            except (ValueError, OverflowError) as error:
                # Another store of this process may have announced the memory in other pieces; calls do not depend on it.
                if size <= 0 or not _overlap(buffer_ptr, size, _native.registered()):
                    log.warning("register_buffer: %s", error)
                    return codes.INVALID_PARAMS
            self._registered[buffer_ptr] = size
            return codes.OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Takes `register_buffer` back."""
        with self._lifecycle:
            if self._registered.pop(buffer_ptr, None) is None:
                return codes.INVALID_PARAMS
            if buffer_ptr in self._announced:
                self._announced.remove(buffer_ptr)
                _withdraw(buffer_ptr)
            return codes.OK


def _end(connection: Connection, announced: set[int]) -> None:
    """Ends what a store held: its calls first, then what they may have used. `announced` is the store's own set."""
    try:
        connection.close()
    finally:
        while announced:
            _withdraw(announced.pop())


def _withdraw(address: int) -> None:
    try:
        _native.unregister(address)
    except ValueError as error:
        # Somebody else took it back; nothing is left to do.
        log.debug("unregister_buffer: %s", error)


def _overlap(address: int, size: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(start < address + size and address < start + length for start, length in ranges)


def _bound(args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments by name, in their types. TypeError names what does not fit."""
    if len(args) > len(_POSITIONAL):
        raise TypeError(f"setup() got {len(args)} positional arguments; {_FORMS}")
    bound: dict[str, Any] = dict(zip(_POSITIONAL, args))
    for name, value in kwargs.items():
        if name not in _POSITIONAL:
            raise TypeError(f"setup() got an unexpected keyword argument '{name}'; {_FORMS}")
        if name in bound:
            raise TypeError(f"setup() got '{name}' twice; {_FORMS}")
        bound[name] = value
    for name in _POSITIONAL:
        if name not in bound:
            if name not in _DEFAULTS:
                raise TypeError(f"setup() lacks '{name}'; {_FORMS}")
            bound[name] = _DEFAULTS[name]
        kind = _KINDS.get(name, str)
        if name != "engine" and (not isinstance(bound[name], kind) or (kind is int and isinstance(bound[name], bool))):
            raise TypeError(f"setup() takes {kind.__name__} for '{name}', not {bound[name]!r}; {_FORMS}")
    return bound
