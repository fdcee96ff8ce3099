"""A wheel and masters of releases too far apart: one explicit error when the store is set up, from either side."""

import re
import socket
import threading

import pytest

import tidepool
from mooncake.store import MooncakeDistributedStore
from support import until

#: Kind of the HTTP/2 frames that carry messages, and the length of a frame's head.
DATA, HEAD = 0, 9
#: What a client says before its first frame.
PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
#: `protocol_version` (field 4 of `Identity`) of one byte, with a part before it that only an identity has: the cluster's id and history
#: of a master, or the node id 0 and no cluster of a client that knows none yet.
FROM_MASTER = re.compile(rb"(\x0a\x10.{16}\x11.{8}(?:\x18.)?\x20)[\x01-\x7f]", re.DOTALL)
FROM_CLIENT = re.compile(rb"(\x0a[\x02-\x40](?:\x11.{8})?\x20)[\x01-\x7f]", re.DOTALL)


class Forger:
    """A relay to a master that changes the version which one of the sides announces. `changed` counts."""

    def __init__(self, master: str, announced: "re.Pattern[bytes]", version: int) -> None:
        host, port = master.rsplit(":", 1)
        self._master = (host, int(port))
        self._announced = announced
        self._version = version
        self.changed = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listening]
        self.address = "%s:%d" % self._listening.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            master = socket.create_connection(self._master)
            self._open += [client, master]
            forged = self._announced is FROM_CLIENT
            for source, target, skip, forge in ((client, master, PREFACE, forged), (master, client, 0, not forged)):
                threading.Thread(target=self._relay, args=(source, target, skip, forge), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, skip: int, forge: bool) -> None:
        try:
            with source.makefile("rb") as stream:
                target.sendall(stream.read(skip))
                while len(head := stream.read(HEAD)) == HEAD:
                    body = stream.read(int.from_bytes(head[:3], "big"))
                    if forge and head[3] == DATA:
                        body, count = self._announced.subn(lambda found: found[1] + bytes([self._version]), body)
                        self.changed += count
                    target.sendall(head + body)
        except (OSError, ValueError):
            pass
        finally:
            for end in (source, target):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def __enter__(self) -> "Forger":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            each.close()


@pytest.fixture(params=[FROM_MASTER, FROM_CLIENT], ids=["a-newer-master", "a-newer-wheel"])
def announced(request):
    return request.param


def test_releases_side_by_side_work_together(pool, key, announced):
    """One version apart. Shows too that the relay itself breaks nothing."""
    with Forger(pool.masters, announced, 2) as forger, tidepool.Store(forger.address) as store:
        until(lambda: forger.changed, what="a version was forged")
        store.put(key, b"value")
        assert store.get(key) == b"value"


def test_releases_too_far_apart_say_so_at_setup(pool, announced):
    with Forger(pool.masters, announced, 9) as forger:
        with pytest.raises(tidepool.errors.WrongCluster) as raised:
            tidepool.Store(forger.address, connect_deadline=60.0)
        assert forger.changed
    assert raised.value.name == "WRONG_CLUSTER" and "protocol" in raised.value.message
    assert {"1", "9"} <= set(re.findall(r"\b[0-9]+\b", raised.value.message)), "it names both versions"
    assert not raised.value.retryable


def test_mooncake_setup_fails_with_the_code(pool, announced):
    """Never a store whose every get is a miss."""
    with Forger(pool.masters, announced, 9) as forger:
        store = MooncakeDistributedStore()
        code = store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", forger.address)
        assert code == -300 and forger.changed
        assert store.health_check() != 0
