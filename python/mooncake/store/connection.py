"""What a store holds while it is set up: the client, the memory it lends, its name, and what must be given back."""

import contextlib
import hashlib
import logging
import os
import random
import re
import socket
import time
from typing import Optional

from mooncake.store import environment
from mooncake.store.http_server import HttpServer
from mooncake.store.settings import Settings
from tidepool import _native

log = logging.getLogger("mooncake.store")

#: Time in which a store leaves the cluster; an engine that stops does not wait longer for masters that do not answer.
CLOSE_S = 3.0
#: What is left of it for the last of many segments.
CLOSE_LEAST_S = 0.2
#: A host name without a port gets one of these, as in Mooncake.
PORT_MIN = 12300
PORT_MAX = 14300
PORT_TRIES = 20
#: Longest name of a segment, less what numbers the further segments of a store.
NAME_BYTES_MAX = 64 - len("-64")


#: What children made by fork() have of their parents, kept so that nothing of it is ended here.
_of_parents: list["Connection"] = []


class Connection:
    """Opened by `setup`, closed by `close`; used by any number of threads in between."""

    def __init__(self, settings: Settings) -> None:
        """Raises TidepoolError when no leader answered or the memory could not be lent, ValueError for a name that is none."""
        self.settings = settings
        self._process = os.getpid()
        self.nodes: dict[str, _native.LocalNode] = {}
        self._http: Optional[HttpServer] = None
        self._client: Optional[_native.Client] = None
        environment.check_bind_address(_address_of(split_address(settings.local_hostname)[0]))
        host, port, self._held = _own_name(settings.local_hostname)
        self.hostname = segment_name(host, port)
        self._host = host
        try:
            self._client = _native.Client(
                settings.masters,
                tenant=settings.tenant,
                deadline=settings.deadline,
                connect_deadline=settings.connect_deadline,
            )
            if settings.segment_bytes:
                self.lend(self.hostname, settings.segment_bytes, port if self._held else 0)
            if settings.http_port:
                self._http = HttpServer(_address_of(host), settings.http_port, self._client)
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> _native.Client:
        assert self._client is not None, "a connection is made with its client"
        return self._client

    def lend(self, name: str, size: int, port: int = 0) -> _native.LocalNode:
        """Mounts `size` bytes of new memory as the segment `name`; its replicas go when it is closed."""
        if port and self._held is not None:
            self._held.close()
            self._held = None
        address = _bracketed(_address_of(self._host))
        node = _native.LocalNode(
            self.settings.masters, size, listen=f"{address}:{port}", name=name, deadline=self.settings.connect_deadline
        )
        self.nodes[name] = node
        return node

    def close(self) -> None:
        """Leaves the cluster: replicas in the memory of this process go. May be repeated. In a child made by fork() nothing
        happens: what is held is the parent's, and the threads that serve it are not here."""
        if os.getpid() != self._process:
            _of_parents.append(self)
            return
        with contextlib.ExitStack() as rest:
            # Last in, first out; each whatever became of the others.
            if self._client is not None:
                rest.callback(self._client.close)
            if self._held is not None:
                rest.callback(self._held.close)
                self._held = None
            rest.callback(self._close_nodes)
            if self._http is not None:
                rest.callback(self._http.close)
                self._http = None

    def _close_nodes(self) -> None:
        until = time.monotonic() + CLOSE_S
        while self.nodes:
            name, node = self.nodes.popitem()
            try:
                node.close(deadline=max(CLOSE_LEAST_S, until - time.monotonic()))
            except _native.TidepoolError as error:
                # The masters did not hear of it; they find out by its silence.
                log.warning("close of segment %s: %s", name, error)


def _own_name(local_hostname: str) -> tuple[str, int, Optional[socket.socket]]:
    """(host, port, a socket that holds the port). A port that was named and is taken by others is a name all the same."""
    host, port = split_address(local_hostname)
    if port:
        return host, port, _hold(host, port)
    low = environment.number("MC_STORE_CLIENT_MIN_PORT", PORT_MIN, 1, 65535)
    high = environment.number("MC_STORE_CLIENT_MAX_PORT", PORT_MAX, low, 65535)
    tries = environment.number("MC_STORE_CLIENT_SETUP_RETRIES", PORT_TRIES, 1, 10_000)
    for _ in range(tries):
        port = random.randint(low, high)
        held = _hold(host, port)
        if held is not None:
            return host, port, held
    raise ValueError(
        f"no free port from {low} to {high} on '{host}' in {tries} tries; is '{host}' an address of this host? "
        "MC_STORE_CLIENT_MIN_PORT and _MAX_PORT choose the range"
    )


def segment_name(host: str, port: int) -> str:
    """"host:port", as a segment may be called: a host name that is too long is cut, and its hash keeps it apart from others."""
    name = re.sub(r"[^A-Za-z0-9._:\[\]-]", "-", f"{_bracketed(host)}:{port}")
    if len(name) <= NAME_BYTES_MAX:
        return name
    end = f"-{hashlib.sha256(host.encode()).hexdigest()[:8]}:{port}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", host)[: NAME_BYTES_MAX - len(end)] + end


def split_address(text: str) -> tuple[str, int]:
    """("host", port), port 0 when none is given. ValueError when the port is no port."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest[1:] if rest.startswith(":") else ""
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"'{text}': the port must be a number from 1 to 65535")
    return host, int(port or 0)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _address_of(host: str) -> str:
    """The numeric address to listen on: of IPv4 where the name has one, of IPv6 where `MC_USE_IPV6` says so. ValueError when there
    is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"local_hostname '{host}' has no address: {error}") from error
    family = socket.AF_INET6 if environment.wants_ipv6() else socket.AF_INET
    wanted = [entry[4][0] for entry in found if entry[0] == family]
    if not wanted and family == socket.AF_INET6:
        raise ValueError(f"MC_USE_IPV6: local_hostname '{host}' has no IPv6 address; give one, or unset the variable")
    return str(wanted[0] if wanted else found[0][4][0])


def _hold(host: str, port: int) -> Optional[socket.socket]:
    """Takes a port without listening on it, so that no other store of this host takes its name. None: it is taken."""
    address = _address_of(host)
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.bind((address, port))
    except OSError:
        held.close()
        return None
    return held
