"""`mc_store_rest_server`: a store behind a small REST interface. Needs aiohttp (the extra `rest`, or `pip install aiohttp`)."""

import argparse
import asyncio
import json
import logging
import signal
from typing import Optional

from aiohttp import web

from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore
from mooncake.store.sizes import parse_bool, parse_size

log = logging.getLogger("mooncake.store_service")

BODY_BYTES_MAX = 100 << 20
MOUNT_BYTES_MIN = 1 << 20
SETUP_RETRY_S = 1.0
#: Longest time that a disk's segment may be given to be read from.
GRACE_S_MAX = 3600
_SIZES = ("global_segment_size", "local_buffer_size")
_FLAGS = ("enable_ssd_offload", "enable_client_http_server")


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _json(status: int, body: dict) -> web.Response:
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")


def _answering(handler):
    async def answer(self: "MooncakeStoreService", request: web.Request) -> web.Response:
        try:
            return await handler(self, request)
        except Refused as error:
            return _json(error.status, {"error": str(error)})
        except web.HTTPException:
            raise
        except Exception as error:  # whatever it was, the service goes on, and the client is told
            log.exception("%s %s", request.method, request.path)
            return _json(500, {"error": str(error)})

    return answer


async def _body(request: web.Request, may_be_empty: bool = True) -> dict:
    try:
        told = json.loads(await request.text() or ("{}" if may_be_empty else ""))
    except ValueError as error:
        raise Refused(400, "Malformed JSON body") from error
    if not isinstance(told, dict):
        raise Refused(400, "Request body must be a JSON object")
    return told


def _positive(told: dict, name: str) -> int:
    value = told.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise Refused(400, f"Invalid {name}, must be a positive integer")
    return value


class MooncakeStoreService:
    """The store and its HTTP server."""

    def __init__(self, config_path: Optional[str] = None, cli_config: Optional[dict] = None) -> None:
        config = MooncakeConfig.from_file(config_path) if config_path else MooncakeConfig.load_from_env()
        for name, value in (cli_config or {}).items():
            if name not in MooncakeConfig.__dataclass_fields__:
                log.warning("-D%s: no such setting; it has no effect", name)
                continue
            convert = parse_size if name in _SIZES else parse_bool if name in _FLAGS else str
            setattr(config, name, int(value) if name == "client_http_port" else convert(value))
        config.__post_init__()
        self.config = config
        self.store: Optional[MooncakeDistributedStore] = None
        self.current_mode = "prefill"
        self.mounted_segment_ids: list[str] = []
        self.port = 0
        self._runner: Optional[web.AppRunner] = None
        self._mounts: Optional[asyncio.Lock] = None  # made in the event loop: Python 3.9 binds it to the one that runs

    async def start_store_service(
        self, max_wait_time: float = 60.0, shutdown_event: Optional[asyncio.Event] = None
    ) -> bool:
        """Whether the store was set up in time. What fails is tried again: names and masters may be there a moment later."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait_time
        config = self.config
        arguments = {
            "local_hostname": config.local_hostname,
            "metadata_server": config.metadata_server,
            "global_segment_size": config.global_segment_size,
            "local_buffer_size": config.local_buffer_size,
            "protocol": config.protocol,
            "rdma_devices": config.device_name or "",
            "master_server_addr": config.master_server_address,
            "enable_ssd_offload": config.enable_ssd_offload,
            "ssd_offload_path": config.ssd_offload_path,
            "tenant_id": config.tenant_id,
            "enable_client_http_server": config.enable_client_http_server,
            "client_http_port": config.client_http_port,
        }
        store = MooncakeDistributedStore()
        while not (shutdown_event and shutdown_event.is_set()):
            code = await asyncio.to_thread(lambda: store.setup(**arguments))
            if code == 0:
                self.store = store
                return True
            left = deadline - loop.time()
            if left <= 0:
                log.error("setup failed within %g s: %d", max_wait_time, code)
                return False
            await asyncio.sleep(min(SETUP_RETRY_S, left))
        return False

    async def start_http_service(self, port: int = 8080, host: str = "127.0.0.1") -> bool:
        """Whether it listens now; port 0 takes a free one (`self.port`)."""
        self._mounts = asyncio.Lock()
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.put("/api/put", self.handle_put),
                web.get("/api/get/{key:.+}", self.handle_get),
                web.get("/api/exist/{key:.+}", self.handle_exist),
                web.delete("/api/remove/{key:.+}", self.handle_remove),
                web.delete("/api/remove_all", self.handle_remove_all),
                web.post("/api/mount", self.handle_mount),
                web.post("/api/unmount", self.handle_unmount),
                web.post("/api/mount_shm", self.handle_mount_shm),
                web.post("/api/unmount_shm", self.handle_unmount),
                web.post("/api/unmount_local_disk", self.handle_unmount_local_disk),
                web.post("/api/reconfigure", self.handle_reconfigure),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, host, port)
            await site.start()
        except OSError as error:
            log.error("port %d: %s", port, error)
            return False
        self.port = self._runner.addresses[0][1]
        return True

    def _one_at_a_time(self) -> asyncio.Lock:
        assert self._mounts is not None, "requests come through the server"
        return self._mounts

    def _opened(self) -> MooncakeDistributedStore:
        if self.store is None:
            raise Refused(503, "the store is not set up")
        return self.store

    @_answering
    async def handle_put(self, request: web.Request) -> web.Response:
        told = await _body(request)
        key, value = told.get("key"), told.get("value")
        if not isinstance(key, str) or not key or not isinstance(value, str):
            raise Refused(400, "Missing key or value")
        code = await asyncio.to_thread(self._opened().put, key, value.encode())
        if code != 0:
            raise Refused(500, f"PUT operation failed, ret={code}")
        return _json(200, {"status": "success"})

    @_answering
    async def handle_get(self, request: web.Request) -> web.Response:
        key = request.match_info["key"]
        found = await asyncio.to_thread(self._opened().get_buffer, key)
        if found is not None:
            return web.Response(status=200, body=bytes(found), content_type="application/octet-stream")
        exists = (await asyncio.to_thread(self._opened().batch_is_exist, [key]))[0]
        if exists == 0:
            raise Refused(404, "Key not found")
        raise Refused(500, "GET operation failed")

    @_answering
    async def handle_exist(self, request: web.Request) -> web.Response:
        exists = (await asyncio.to_thread(self._opened().batch_is_exist, [request.match_info["key"]]))[0]
        if exists < 0:
            raise Refused(500, f"Exist check failed, ret={exists}")
        return _json(200, {"exists": exists > 0})

    @_answering
    async def handle_remove(self, request: web.Request) -> web.Response:
        code = await asyncio.to_thread(self._opened().remove, request.match_info["key"])
        if code != 0:
            raise Refused(500, f"Remove operation failed, ret={code}")
        return _json(200, {"status": "success"})

    @_answering
    async def handle_remove_all(self, request: web.Request) -> web.Response:
        count = await asyncio.to_thread(self._opened().remove_all)
        if count < 0:
            raise Refused(500, f"RemoveAll operation failed, ret={count}")
        return _json(200, {"status": f"success removed {count} keys"})

    async def _mount(self, size: int) -> dict:
        if size < MOUNT_BYTES_MIN:
            raise Refused(400, f"Invalid size, must be at least {MOUNT_BYTES_MIN}")
        result = await asyncio.to_thread(self._opened().allocate_and_mount_segment, size)
        if result["ret"] != 0:
            raise Refused(500, f"Allocate and mount failed, ret={result['ret']}")
        self.mounted_segment_ids.extend(result["segment_ids"])
        return result

    async def _unmount(self, names: list, grace_period_seconds: int = 0) -> None:
        code = await asyncio.to_thread(self._opened().unmount_and_free_segment, names, grace_period_seconds)
        self.mounted_segment_ids = [name for name in self.mounted_segment_ids if name not in names]
        if code != 0:
            raise Refused(500, f"Unmount failed, ret={code}")

    @_answering
    async def handle_mount(self, request: web.Request) -> web.Response:
        size = _positive(await _body(request), "size")
        async with self._one_at_a_time():
            result = await self._mount(size)
        return _json(200, {"status": "success", **{k: result[k] for k in ("segment_ids", "allocated_size")}})

    @_answering
    async def handle_unmount(self, request: web.Request) -> web.Response:
        told = await _body(request)
        names = told.get("segment_ids")
        if isinstance(names, str):
            names = [names]
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise Refused(400, "Missing segment_ids")
        async with self._one_at_a_time():
            await self._unmount(names, int(told.get("grace_period_seconds", 0)))
        return _json(200, {"status": "success"})

    @_answering
    async def handle_mount_shm(self, request: web.Request) -> web.Response:
        raise Refused(500, "Mount failed, ret=-1: segments are memory of their own; POST /api/mount with a size")

    @_answering
    async def handle_unmount_local_disk(self, request: web.Request) -> web.Response:
        told = await _body(request, may_be_empty=False)
        grace = told.get("grace_period_seconds", 0)
        if isinstance(grace, bool) or not isinstance(grace, int) or not 0 <= grace <= GRACE_S_MAX:
            raise Refused(400, f"Invalid grace_period_seconds, must be a non-negative integer no greater than {GRACE_S_MAX}")
        code = await asyncio.to_thread(self._opened().unmount_local_disk_segment)
        if code != 0:
            raise Refused(500, f"Unmount local disk failed, ret={code}")
        return _json(200, {"status": "success"})

    @_answering
    async def handle_reconfigure(self, request: web.Request) -> web.Response:
        """`decode` lends `size` bytes in place of what was lent before, `prefill` takes all of it back."""
        told = await _body(request)
        mode = str(told.get("mode", "")).lower()
        if mode not in ("decode", "prefill"):
            raise Refused(400, "Invalid mode. Use 'decode' or 'prefill'")
        async with self._one_at_a_time():
            before = list(self.mounted_segment_ids)
            if mode == "decode":
                await self._mount(_positive(told, "size"))
            if before:
                await self._unmount(before)
            self.current_mode = mode
            answer: dict = {"status": "success", "mode": mode}
            if mode == "decode":
                answer["segment_ids"] = list(self.mounted_segment_ids)
        return _json(200, answer)

    async def stop(self) -> None:
        """Stops serving, then closes the store. May be repeated."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        store, self.store = self.store, None
        if store is not None:
            await asyncio.to_thread(store.close)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mc_store_rest_server", description=__doc__)
    parser.add_argument("--config", help="JSON file; else MOONCAKE_CONFIG_PATH, or the MOONCAKE_ variables")
    parser.add_argument("-D", "--define", action="append", default=[], metavar="KEY=VALUE", help="one setting")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    parser.add_argument("--max-wait-time", type=float, default=60.0, help="seconds to wait for the cluster (default: 60)")
    return parser.parse_args()


async def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO)
    settings = dict(item.split("=", 1) for item in arguments.define if "=" in item)
    for item in arguments.define:
        if "=" not in item:
            log.warning("-D%s: no KEY=VALUE; it has no effect", item)
    service = MooncakeStoreService(arguments.config, settings)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        if not await service.start_store_service(arguments.max_wait_time, stop):
            return 0 if stop.is_set() else 1
        if not await service.start_http_service(arguments.port, arguments.host):
            return 1
        log.info("listening on %s:%d", arguments.host, service.port)
        await stop.wait()
        return 0
    finally:
        await service.stop()


def sync_main() -> int:
    """The console script."""
    return asyncio.run(main())
