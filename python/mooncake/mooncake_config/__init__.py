"""`MooncakeConfig`: how a store is set up, from a JSON file (`MOONCAKE_CONFIG_PATH`) or the `MOONCAKE_*` variables."""

import json
import os
from dataclasses import dataclass
from typing import Optional

from mooncake.store.environment import warn_once
from mooncake.store.sizes import parse_bool, parse_size

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1 << 30
DEFAULT_CLIENT_HTTP_PORT = 9300

_OTHER_SPELLINGS = {"master_server_addr": "master_server_address", "rdma_devices": "device_name"}
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")


@dataclass
class MooncakeConfig:
    """ValueError, naming the field, for what cannot be. `master_server_address` may list several masters, separated by commas."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: Optional[str]
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = DEFAULT_CLIENT_HTTP_PORT

    def __post_init__(self) -> None:
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r}; give a name, for example 'tcp'")
        self.protocol = self.protocol.strip().lower()
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)}; a size is not negative")
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Config field {name!r} must be a non-empty string, not {value!r}")

    @staticmethod
    def from_file(file_path: str) -> "MooncakeConfig":
        """Reads a JSON file."""
        with open(file_path, encoding="utf-8") as file:
            told = json.load(file)
        for other, name in _OTHER_SPELLINGS.items():
            told.setdefault(name, told[other]) if other in told else None
        for name in _REQUIRED:
            if name not in told:
                raise ValueError(f"Missing required config field: {name}")
        unknown = sorted(set(told) - set(MooncakeConfig.__dataclass_fields__) - set(_OTHER_SPELLINGS))
        if unknown:
            warn_once(f"{file_path}: {', '.join(unknown)}", "not known, and without effect")
        return MooncakeConfig._of(told)

    @staticmethod
    def load_from_env() -> "MooncakeConfig":
        """The file that `MOONCAKE_CONFIG_PATH` names, else the variables; one of the two is needed."""
        path = os.environ.get("MOONCAKE_CONFIG_PATH")
        if path is not None:
            return MooncakeConfig.from_file(path)
        env = os.environ
        if not env.get("MOONCAKE_MASTER"):
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        told = {
            "local_hostname": env.get("MOONCAKE_LOCAL_HOSTNAME") or env.get("LOCAL_HOSTNAME") or "localhost",
            "metadata_server": env.get("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
            "global_segment_size": env.get("MOONCAKE_GLOBAL_SEGMENT_SIZE"),
            "local_buffer_size": env.get("MOONCAKE_LOCAL_BUFFER_SIZE"),
            "protocol": env.get("MOONCAKE_PROTOCOL", "tcp"),
            "device_name": env.get("MOONCAKE_DEVICE", ""),
            "master_server_address": env["MOONCAKE_MASTER"],
            "enable_ssd_offload": env.get("MOONCAKE_OFFLOAD_ENABLED"),
            "ssd_offload_path": env.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"),
            "tenant_id": env.get("MOONCAKE_TENANT_ID"),
            "enable_client_http_server": env.get("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER"),
            "client_http_port": env.get("MOONCAKE_CLIENT_HTTP_PORT"),
        }
        return MooncakeConfig._of({name: value for name, value in told.items() if value is not None})

    @staticmethod
    def _of(told: dict) -> "MooncakeConfig":
        tenant, path = told.get("tenant_id"), told.get("ssd_offload_path")
        return MooncakeConfig(
            local_hostname=told["local_hostname"],
            metadata_server=told["metadata_server"],
            global_segment_size=_size("segment size", told.get("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE)),
            local_buffer_size=_size("segment size", told.get("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE)),
            protocol=told.get("protocol", "tcp"),
            device_name=told.get("device_name", ""),
            master_server_address=told["master_server_address"],
            enable_ssd_offload=parse_bool(told.get("enable_ssd_offload")),
            ssd_offload_path="" if path is None else str(path),
            tenant_id="default" if tenant is None else str(tenant),
            enable_client_http_server=parse_bool(told.get("enable_client_http_server")),
            client_http_port=int(told.get("client_http_port", DEFAULT_CLIENT_HTTP_PORT)),
        )


def _size(what: str, value: object) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise ValueError(f"Invalid {what}: {error}") from error
