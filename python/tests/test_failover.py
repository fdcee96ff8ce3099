"""Three masters, whose leader dies under load."""

import os
import signal
import threading
import time

import pytest

import tidepool
from tidepool import errors
from support import freeze, until


def test_calls_go_on_after_the_leader_died(quorum):
    """What was acknowledged stays, a failed call has a negative code, and the same store goes on."""
    store = tidepool.Store(quorum.masters, deadline=10.0)
    until(lambda: store.segments(), what="the segment")
    names = [f"k{i}" for i in range(64)]
    values = [f"value of {name}".encode() * 50 for name in names]
    assert all(store.put_many(names, values))
    targets = [bytearray(4096) for _ in names]
    acknowledged, failures, stop = [], [], threading.Event()

    def write():
        n = 0
        while not stop.is_set():
            n += 1
            try:
                store.put(f"w{n}", b"x" * 1000)
                acknowledged.append(f"w{n}")
            except tidepool.TidepoolError as error:
                failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until(lambda: len(acknowledged) > 50, what="writes before the kill")
        quorum.kill(store.leader())
        killed_at, seen = time.monotonic(), len(acknowledged)
        while time.monotonic() - killed_at < 3 or len(acknowledged) < seen + 50:
            assert time.monotonic() - killed_at < 60, (len(acknowledged), failures[-3:])
            for target, value, filled in zip(targets, values, store.get_into_many(names, targets)):
                if filled:
                    assert filled == len(value) and target[:filled] == value
                else:
                    assert filled.mooncake < 0
    finally:
        stop.set()
        writer.join()
    assert store.leader() in quorum.roles
    assert all(store.exist_many(acknowledged)), "an acknowledged put is lost"
    store.close()


def test_calls_end_by_their_deadline_when_nobody_moves():
    """The whole pool is stopped: sockets stay open, nothing answers. A hang is a failure by the test's own limit."""
    with tidepool.dev("64MiB") as pool, pool.store() as store:
        store.put("k", b"x" * 1000)
        target = bytearray(1000)
        freeze(pool.pid)
        try:
            for call in (
                lambda: store.get("k", deadline=0.2),
                lambda: store.get_into("k", target, deadline=0.2),
                lambda: store.put("other", target, deadline=0.2),
                lambda: store.exist("k", deadline=0.2),
                lambda: store.remove("other", deadline=0.2),
                lambda: list(store.list(deadline=0.2)),
                lambda: store.segments(deadline=0.2),
                lambda: store.ping(deadline=0.2),
                lambda: store.native.create_copy_task("k", ["dram-0"], deadline=0.2),
            ):
                with pytest.raises(errors.DeadlineExceeded):
                    call()
            assert all(not found for found in store.exist_many(["k"] * 100, deadline=0.2))
            target.append(1)  # nothing holds it any more
        finally:
            os.kill(pool.pid, signal.SIGCONT)
        # Its datanode is suspect until it has answered.
        assert until(lambda: store.get_many(["k"])[0], what="the first get that succeeds") == b"x" * 1000


def test_an_error_names_the_node_that_it_is_about(quorum):
    """The first failure is the node's own; later the masters know that it is gone."""
    with tidepool.Store(quorum.masters, deadline=5.0) as store:
        until(lambda: store.segments(), what="the segment")
        store.put("k", b"x" * 100_000)
        (replica,) = store.stat("k")["replicas"]
        with pytest.raises(errors.NotFound) as raised:
            store.get("none")
        assert raised.value.node is None
        quorum.datanode.kill()
        with pytest.raises(tidepool.TidepoolError) as raised:
            store.put("other", b"x" * 100_000, deadline=1.0)
        assert raised.value.node == replica["endpoint"] and replica["endpoint"] in raised.value.message
