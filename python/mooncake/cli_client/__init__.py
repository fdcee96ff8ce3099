"""`mooncake_client`: a process that lends memory of its host, with Mooncake's flags. `setup_dummy` finds the cluster through it."""

import logging
import os
import signal
import sys
import threading

from mooncake.cli import become, binary
from mooncake.cli.flags import (
    BOOLEANS_OF_LIBRARIES,
    HELPS,
    OF_LIBRARIES,
    REFUSED_OF_LIBRARIES,
    FlagError,
    is_true,
    parse,
    refuse,
)
from mooncake.cli.master_flags import own_address
from mooncake.store import MooncakeDistributedStore
from mooncake.store.connection import split_address
from mooncake.store.local_clients import Answering
from mooncake.store.sizes import parse_size

DEFAULT_PORT = 50052
_DEFAULTS = {
    "host": "",
    "port": str(DEFAULT_PORT),
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
    "device_names": "",
    "protocol": "tcp",
    "global_segment_size": "4 GB",
    "local_buffer_size": "0",
    "tenant_id": "default",
    "enable_offload": "false",
    "enable_http_server": "false",
    "http_port": "9300",
}
_WITHOUT_EFFECT = OF_LIBRARIES | {"threads", "start_offload_rpc_server"}
_BOOLEANS = BOOLEANS_OF_LIBRARIES | {"enable_offload", "enable_http_server", "start_offload_rpc_server"}
_NAMES = frozenset(_DEFAULTS) | _WITHOUT_EFFECT | frozenset(REFUSED_OF_LIBRARIES) | HELPS | {"version"}


def _are_here(masters: str) -> bool:
    """Whether all masters are on the loopback address, where nobody else reads from."""
    hosts = [split_address(part.strip())[0] for part in masters.split(",")]
    return all(host == "localhost" or host == "::1" or host.startswith("127.") for host in hosts)


def _settings(told: dict[str, str]) -> dict:
    values = {**_DEFAULTS, **told}
    host = values["host"]
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1" if not host and _are_here(values["master_server_address"]) else own_address()
    try:
        return {
            "local_hostname": f"{host}:{int(values['port'])}",
            "metadata_server": values["metadata_server"],
            "global_segment_size": parse_size(values["global_segment_size"]),
            "local_buffer_size": parse_size(values["local_buffer_size"]),
            "protocol": values["protocol"],
            "rdma_devices": values["device_names"],
            "master_server_addr": values["master_server_address"],
            "tenant_id": values["tenant_id"],
            "enable_ssd_offload": is_true("enable_offload", values["enable_offload"]),
            "enable_client_http_server": is_true("enable_http_server", values["enable_http_server"]),
            "client_http_port": int(values["http_port"]),
        }
    except ValueError as error:
        raise FlagError(str(error)) from error


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="mooncake_client: %(message)s")
    log = logging.getLogger("mooncake.client")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        told = parse(sys.argv[1:], _BOOLEANS, _NAMES)
        if "version" in told:
            become(binary(), ["--version"])
        if not HELPS.isdisjoint(told):
            print("mooncake_client: lends memory. Flags: " + ", ".join(f"--{name}" for name in sorted(_NAMES)))
            return 0
        refuse(told, REFUSED_OF_LIBRARIES)
        settings = _settings(told)
    except FlagError as error:
        print(f"mooncake_client: {error}", file=sys.stderr)
        return 2
    for name in sorted(_WITHOUT_EFFECT.intersection(told)):
        log.warning("--%s has no effect with Tidepool", name)
    store = MooncakeDistributedStore()
    code = store.setup(**settings)
    if code != 0:
        log.error("setup failed: %d", code)
        return 1
    try:
        port = int(settings["local_hostname"].rpartition(":")[2])
        masters = os.environ.get("TIDEPOOL_MASTERS") or settings["master_server_addr"]
        answering = Answering(port, settings["local_hostname"].rpartition(":")[0], masters, settings["tenant_id"])
        log.info("lends %d bytes as %s", settings["global_segment_size"], store.get_hostname())
        stop.wait()
        answering.close()
        return 0
    except OSError as error:
        log.error("another mooncake_client of this host has port %d: %s", port, error)
        return 1
    finally:
        store.close()
