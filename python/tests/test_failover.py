"""Three masters, whose leader dies under load."""

import threading
import time

import tidepool
from support import until


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
