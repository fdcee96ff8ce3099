"""How a process finds the `mooncake_client` of its host, and through it the cluster: a line of JSON over an abstract socket.

`mooncake_client` answers under a name made of its port; `setup_dummy` asks there. Where nobody answers, the environment
(`TIDEPOOL_MASTERS`, `MOONCAKE_MASTER`) says which cluster is meant.
"""

import json
import os
import socket
import threading

from mooncake.store.connection import split_address

ANSWER_BYTES_MAX = 64 << 10
TIMEOUT_S = 5.0


def _name(port: int) -> str:
    return f"\0tidepool_mooncake_client_{port}"


def ask(server_address: str) -> dict:
    """{"hostname", "masters", "tenant"}. ValueError when nobody answers at that address."""
    host, port = split_address(server_address)
    if not port:
        raise ValueError(f"server address '{server_address}' has no port; give 'host:port' of this host's mooncake_client")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(TIMEOUT_S)
            asking.connect(_name(port))
            received = b""
            while not received.endswith(b"\n") and len(received) < ANSWER_BYTES_MAX:
                part = asking.recv(4096)
                if not part:
                    break
                received += part
        told = json.loads(received)
        return {"hostname": str(told["hostname"]), "masters": str(told["masters"]), "tenant": str(told["tenant"])}
    except (OSError, ValueError, KeyError) as error:
        masters = os.environ.get("TIDEPOOL_MASTERS") or os.environ.get("MOONCAKE_MASTER")
        if masters:
            return {"hostname": host, "masters": masters, "tenant": os.environ.get("MOONCAKE_TENANT_ID", "default")}
        raise ValueError(
            f"no mooncake_client answers for '{server_address}' on this host ({error}); start one, or set "
            "MOONCAKE_MASTER to the masters' addresses"
        ) from error


class Answering:
    """Answers those who ask, until it is closed. OSError when another process answers for that port."""

    def __init__(self, port: int, hostname: str, masters: str, tenant: str) -> None:
        told = {"hostname": hostname, "masters": masters, "tenant": tenant}
        self._line = json.dumps(told).encode() + b"\n"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_name(port))
        self._socket.listen(16)
        self._thread = threading.Thread(target=self._serve, name="mooncake-client-answers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.settimeout(TIMEOUT_S)
                    peer.sendall(self._line)
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
