"""What `setup` was told, in either of its forms, checked and with defaults."""

import os
from dataclasses import dataclass
from typing import Any

from mooncake.store import environment
from mooncake.store.environment import warn_once
from mooncake.store.sizes import parse_bool, parse_size

DEFAULT_MASTER = "127.0.0.1:50051"
DEFAULT_DICT_SIZE = 16 << 20
DEFAULT_HTTP_PORT = 9300
#: Sizes of a dictionary: 0, or from here; below it is a unit that somebody forgot.
SIZE_MIN = 1024
BUFFER_BYTES_MAX = 1 << 40
#: Time a call may take, when `MC_RPC_TIMEOUT_MS` does not say. LMCache gives up on a get after 10 s, and then uses its buffers
#: for something else: ours must have ended before.
DEADLINE_S = 8.0
#: Time until a leader must have been found, when `MC_RPC_CONNECT_TIMEOUT_MS` does not say.
CONNECT_DEADLINE_S = 10.0

# Each of the dictionary's keys with its other spellings; the first one given counts.
_SPELLINGS = {
    "rdma_devices": ("rdma_devices", "device_name"),
    "master_server_addr": ("master_server_addr", "master_server_address"),
}
_KNOWN = frozenset(
    {
        "local_hostname", "metadata_server", "global_segment_size", "local_buffer_size", "protocol", "ipc_socket_path",
        "enable_ssd_offload", "ssd_offload_path", "tenant_id", "enable_client_http_server", "client_http_port",
    }
).union(*_SPELLINGS.values())  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How a store is set up. ValueError, with what to do, when it cannot be."""

    local_hostname: str
    masters: str
    segment_bytes: int
    buffer_bytes: int
    tenant: str
    http_port: int  # 0: none
    deadline: float
    connect_deadline: float

    @staticmethod
    def of(
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = DEFAULT_HTTP_PORT,
    ) -> "Settings":
        environment.check()
        _check_protocol(protocol)
        if enable_ssd_offload or parse_bool(os.environ.get(environment.OFFLOAD_ENABLED)):
            raise ValueError(
                "enable_ssd_offload: a segment of an engine's process has no SSD behind it; take it out, and run "
                "'tidepool datanode' on hosts whose disks are to be used"
            )
        if ssd_offload_path:
            warn_once("ssd_offload_path", "has no effect while offload is off")
        if rdma_devices and rdma_devices != "auto-discovery":
            warn_once("rdma_devices", "has no effect over TCP")
        if metadata_server and metadata_server != "P2PHANDSHAKE":
            warn_once("metadata_server", "not needed: Tidepool's masters know every node")
        if not local_hostname:
            raise ValueError("local_hostname is empty; give the name or address that other hosts reach this one at")
        if min(global_segment_size, local_buffer_size) < 0:
            raise ValueError("a size is negative; global_segment_size and local_buffer_size take bytes")
        return Settings(
            local_hostname=local_hostname,
            masters=_masters(master_server_addr),
            segment_bytes=global_segment_size,
            buffer_bytes=local_buffer_size,
            tenant="" if tenant_id in ("", "default") else tenant_id,
            http_port=client_http_port if enable_client_http_server else 0,
            deadline=environment.milliseconds("MC_RPC_TIMEOUT_MS", DEADLINE_S),
            connect_deadline=environment.milliseconds("MC_RPC_CONNECT_TIMEOUT_MS", CONNECT_DEADLINE_S),
        )

    @staticmethod
    def of_dict(config: dict) -> "Settings":
        told: dict[str, Any] = {str(key): value for key, value in config.items()}
        for key, spellings in _SPELLINGS.items():
            given = [told[spelling] for spelling in spellings if told.get(spelling) not in (None, "")]
            if given:
                told[key] = given[0]
        for key in ("local_hostname", "metadata_server"):
            if not told.get(key):
                raise ValueError(f"the key '{key}' is missing; it is required")
        for key in sorted(set(told) - _KNOWN):
            warn_once(f"setup key '{key}'", "is not known, and has no effect")
        if told.get("ipc_socket_path"):
            warn_once("ipc_socket_path", "has no effect; processes of one host find each other by address")
        return Settings.of(
            str(told["local_hostname"]),
            str(told["metadata_server"]),
            _dict_size(told, "global_segment_size"),
            _dict_size(told, "local_buffer_size"),
            str(told.get("protocol") or "tcp"),
            str(told.get("rdma_devices") or ""),
            str(told.get("master_server_addr") or DEFAULT_MASTER),
            parse_bool(told.get("enable_ssd_offload")),
            str(told.get("ssd_offload_path") or ""),
            str(told.get("tenant_id") or "default"),
            parse_bool(told.get("enable_client_http_server")),
            int(told.get("client_http_port") or DEFAULT_HTTP_PORT),
        )


def _dict_size(told: dict, key: str) -> int:
    size = parse_size(told.get(key, DEFAULT_DICT_SIZE))
    if size != 0 and size < SIZE_MIN:
        raise ValueError(f"{key} is {size} bytes; give 0, or at least {SIZE_MIN} (is a unit missing?)")
    if key == "local_buffer_size" and size > BUFFER_BYTES_MAX:
        raise ValueError(f"{key} is {size} bytes; the limit is {BUFFER_BYTES_MAX}")
    return size


def _check_protocol(protocol: str) -> None:
    wanted = (os.environ.get("TIDEPOOL_MOONCAKE_PROTOCOL") or protocol or "tcp").strip().lower()
    if wanted == "rpc_only" or wanted == "tcp":
        return
    raise ValueError(
        f"protocol '{wanted}': this build moves bytes by TCP only. Set protocol to 'tcp'; where the engine's own "
        "configuration cannot be changed, set TIDEPOOL_MOONCAKE_PROTOCOL=tcp"
    )


def _masters(address: str) -> str:
    text = os.environ.get("TIDEPOOL_MASTERS") or address.strip()
    for scheme in ("etcd://", "redis://", "k8s://"):
        if text.startswith(scheme):
            raise ValueError(
                f"master address '{text}': Tidepool's masters elect their leader themselves. List their addresses: "
                "'h1:50051,h2:50051,h3:50051'"
            )
    if not text.strip(" ,"):
        raise ValueError("the master address is empty; give 'host:port', or several separated by commas")
    return ",".join(part.strip() for part in text.split(",") if part.strip())
