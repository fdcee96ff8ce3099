"""Every call that waits ends by its deadline, whatever the masters do: stopped ones, and ports that accept and say nothing.

Tried with one call (`Store.stat`) that has 7 s of its own: fails, and names it."""

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import signal
import socket
import time

import pytest

import tidepool
from compat import api
from mooncake.store import MooncakeDistributedStore
from support import freeze, until

#: What each call is given, and how much later it may end.
DEADLINE_S = 0.5
MARGIN_S = 2.0
#: How many calls wait at a time.
AT_ONCE = 8
OBJECT = 1000

#: Calls of `Store` and `AsyncStore` by name; `into` is a writable buffer.
CALLS = {
    "exist": lambda store, into, **more: store.exist("k", **more),
    "exist_many": lambda store, into, **more: store.exist_many(["k"], **more),
    "get": lambda store, into, **more: store.get("k", **more),
    "get_bytes": lambda store, into, **more: store.get_bytes("k", **more),
    "get_into": lambda store, into, **more: store.get_into("k", into, **more),
    "get_into_many": lambda store, into, **more: store.get_into_many(["k"], [into], **more),
    "get_many": lambda store, into, **more: store.get_many(["k"], **more),
    "get_range": lambda store, into, **more: store.get_range("k", 0, 10, **more),
    "get_range_into": lambda store, into, **more: store.get_range_into("k", 0, into, **more),
    "list": lambda store, into, **more: store.list(**more),
    "pin": lambda store, into, **more: store.pin("k", **more),
    "ping": lambda store, into, **more: store.ping(**more),
    "put": lambda store, into, **more: store.put("new", b"v", **more),
    "put_many": lambda store, into, **more: store.put_many(["new"], [b"v"], **more),
    "remove": lambda store, into, **more: store.remove("k", **more),
    "remove_many": lambda store, into, **more: store.remove_many(["k"], **more),
    "remove_matching": lambda store, into, **more: store.remove_matching("nothing", **more),
    "segments": lambda store, into, **more: store.segments(**more),
    "stat": lambda store, into, **more: store.stat("k", **more),
    "stat_many": lambda store, into, **more: store.stat_many(["k"], **more),
    "unpin": lambda store, into, **more: store.unpin("k", **more),
    "upsert": lambda store, into, **more: store.upsert("new", b"v", **more),
    "upsert_many": lambda store, into, **more: store.upsert_many(["new"], [b"v"], **more),
}
#: Ask nobody, or make something of their own, which other tests end.
ASK_NOBODY = {"close", "connect", "leader", "metrics", "native", "closed", "deadline"}

#: Calls of a Mooncake store: how many waits follow each other, and the call. `at` is the address of `OBJECT` bytes.
MOONCAKE_CALLS = {
    "batch_get_buffer": (1, lambda store, at: store.batch_get_buffer(["k"])),
    "batch_get_into": (1, lambda store, at: store.batch_get_into(["k"], [at], [OBJECT])),
    "batch_get_into_multi_buffer_ranges": (
        2,
        lambda store, at: store.batch_get_into_multi_buffer_ranges(["k"], [[at]], [[10]], [[0]]),
    ),
    "batch_get_into_multi_buffers": (1, lambda store, at: store.batch_get_into_multi_buffers(["k"], [[at]], [[OBJECT]])),
    "batch_get_replica_desc": (1, lambda store, at: store.batch_get_replica_desc(["k"])),
    "batch_get_session_start": (2, lambda store, at: store.batch_get_session_start(["k"])),
    "batch_is_exist": (1, lambda store, at: store.batch_is_exist(["k"])),
    "batch_put_from": (1, lambda store, at: store.batch_put_from(["new"], [at], [OBJECT])),
    "batch_put_from_multi_buffers": (1, lambda store, at: store.batch_put_from_multi_buffers(["new"], [[at]], [[OBJECT]])),
    "batch_put_session_end": (1, lambda store, at: store.batch_put_session_end(["staged"])),
    "batch_put_session_start": (1, lambda store, at: store.batch_put_session_start(["other"], [OBJECT])),
    "batch_remove": (1, lambda store, at: store.batch_remove(["k"])),
    "batch_replica_clear": (1, lambda store, at: store.batch_replica_clear(["k"])),
    "batch_upsert_from": (1, lambda store, at: store.batch_upsert_from(["new"], [at], [OBJECT])),
    "create_copy_task": (1, lambda store, at: store.create_copy_task("k", ["s"])),
    "create_move_task": (1, lambda store, at: store.create_move_task("k", "s", "t")),
    "get": (1, lambda store, at: store.get("k")),
    "get_batch": (1, lambda store, at: store.get_batch(["k"])),
    "get_buffer": (1, lambda store, at: store.get_buffer("k")),
    "get_into": (1, lambda store, at: store.get_into("k", at, OBJECT)),
    "get_into_ranges": (1, lambda store, at: store.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[10]]])),
    "get_replica_desc": (1, lambda store, at: store.get_replica_desc("k")),
    "get_size": (1, lambda store, at: store.get_size("k")),
    "health_check": (1, lambda store, at: store.health_check()),
    "is_exist": (1, lambda store, at: store.is_exist("k")),
    "put": (1, lambda store, at: store.put("new", b"v")),
    "put_batch": (1, lambda store, at: store.put_batch(["new"], [b"v"])),
    "put_from": (1, lambda store, at: store.put_from("new", at, OBJECT)),
    "put_from_with_metadata": (1, lambda store, at: store.put_from_with_metadata("new", at, at, OBJECT, 10)),
    "put_parts": (1, lambda store, at: store.put_parts("new", b"v", b"w")),
    "query_task": (1, lambda store, at: store.query_task((0, 1))),
    "remove": (1, lambda store, at: store.remove("k")),
    "remove_all": (1, lambda store, at: store.remove_all()),
    "remove_by_regex": (1, lambda store, at: store.remove_by_regex("nothing")),
    "upsert": (1, lambda store, at: store.upsert("new", b"v")),
    "upsert_batch": (1, lambda store, at: store.upsert_batch(["new"], [b"v"])),
    "upsert_from": (1, lambda store, at: store.upsert_from("new", at, OBJECT)),
    "upsert_parts": (1, lambda store, at: store.upsert_parts("new", b"v")),
}
#: Ask nobody; or lend memory and set up, which have a test of their own below.
MOONCAKE_ASK_NOBODY = {
    "alloc_from_mem_pool", "batch_get_session_end", "batch_put_from_multi_buffer_ranges", "batch_put_session_revoke", "get_hostname",
    "get_offload_rpc_read_count", "mount_segment", "register_buffer", "unmount_local_disk_segment", "unregister_buffer",
    "allocate_and_mount_segment", "close", "init_all", "setup_dummy", "unmount_and_free_segment", "unmount_segment",
}  # fmt: skip


def in_time(results, within):
    """Fails for each call that took longer than it may: `results` are (name, waits, seconds)."""
    late = [(name, seconds) for name, waits, seconds in results if seconds > waits * within + MARGIN_S]
    assert not late, late


def timed(call):
    began = time.monotonic()
    # What a call says is another test's; here it only has to end.
    with contextlib.suppress(tidepool.TidepoolError):
        call()
    return time.monotonic() - began


def all_timed(calls):
    """Runs (name, waits, call) several at a time: (name, waits, seconds) each."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
        under_way = [(name, waits, threads.submit(timed, call)) for name, waits, call in calls]
        return [(name, waits, seconds.result()) for name, waits, seconds in under_way]


@pytest.fixture
def own():
    """A pool of one test, which `freeze` stops; it goes on in the end."""
    with tidepool.dev("64MiB") as running:
        yield running
        os.kill(running.pid, signal.SIGCONT)


@pytest.fixture
def silent():
    """A port that accepts and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield "127.0.0.1:%d" % listening.getsockname()[1]


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_every_call_is_in_a_table():
    assert public(tidepool.Store) - ASK_NOBODY - {"lend"} == set(CALLS)
    assert public(tidepool.AsyncStore) - ASK_NOBODY == set(CALLS)
    assert {name for name in api.METHODS if "tensor" not in name} - MOONCAKE_ASK_NOBODY == set(MOONCAKE_CALLS)


@pytest.mark.parametrize("whose", ["the call's", "the store's"])
def test_calls_of_a_store_end(own, whose):
    with own.store(deadline=60.0 if whose == "the call's" else DEADLINE_S) as store:
        store.put("k", b"v" * OBJECT)
        freeze(own.pid)
        more = {"deadline": DEADLINE_S} if whose == "the call's" else {}

        def whole(call):
            answer = call(store, bytearray(10), **more)
            return list(answer) if inspect.isgenerator(answer) else answer

        results = all_timed([(name, 1, lambda call=call: whole(call)) for name, call in CALLS.items()])
    in_time(results, DEADLINE_S)


def test_calls_of_an_asynchronous_store_end(own):
    async def one(store, name):
        began = time.monotonic()
        answer = CALLS[name](store, bytearray(10), deadline=DEADLINE_S)
        with contextlib.suppress(tidepool.TidepoolError):
            if hasattr(answer, "__aiter__"):
                [each async for each in answer]
            else:
                await answer
        return name, 1, time.monotonic() - began

    async def test():
        async with tidepool.AsyncStore.connect(own.masters, deadline=60.0) as store:
            freeze(own.pid)
            return await asyncio.gather(*(one(store, name) for name in CALLS))

    in_time(asyncio.run(test()), DEADLINE_S)


def test_calls_of_a_mooncake_store_end(own, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", str(int(DEADLINE_S * 1000)))
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", own.masters) == 0
    until(lambda: store.put("k", b"v" * OBJECT) == 0, what="the pool takes an object")
    assert store.batch_get_session_start(["k"]) == [0]
    assert store.batch_put_session_start(["staged"], [OBJECT]) == [0]
    memory = [tidepool.Memory(OBJECT) for _ in MOONCAKE_CALLS]
    freeze(own.pid)
    calls = [
        (name, waits, lambda call=call, at=at: call(store, at.address))
        for (name, (waits, call)), at in zip(MOONCAKE_CALLS.items(), memory)
    ]
    in_time(all_timed(calls), DEADLINE_S)
    in_time([("close", 1, timed(store.close))], 3.0)


def test_memory_is_lent_and_taken_back_in_time(own, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", str(int(DEADLINE_S * 1000)))
    monkeypatch.setenv("MC_RPC_CONNECT_TIMEOUT_MS", "10000")
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", own.masters) == 0
    lent = [store.allocate_and_mount_segment(1 << 20)["segment_ids"] for _ in range(2)]
    assert all(lent)
    freeze(own.pid)
    calls = [
        ("unmount_segment", 1, lambda: store.unmount_segment(lent[0])),
        ("unmount_and_free_segment", 1, lambda: store.unmount_and_free_segment(lent[1], 1)),
        ("allocate_and_mount_segment", 1, lambda: store.allocate_and_mount_segment(1 << 20)),
    ]
    in_time(all_timed(calls), 10.0)
    in_time([("close", 1, timed(store.close))], 3.0)


@pytest.mark.parametrize("kind", ["stopped", "silent"])
def test_connecting_ends(own, silent, kind, monkeypatch):
    monkeypatch.setenv("MC_RPC_CONNECT_TIMEOUT_MS", str(int(DEADLINE_S * 1000)))
    masters = own.masters if kind == "stopped" else silent
    monkeypatch.setenv("MOONCAKE_MASTER", masters)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    freeze(own.pid)

    async def connect():
        async with tidepool.AsyncStore.connect(masters, connect_deadline=DEADLINE_S):
            pytest.fail("nobody answered")

    def set_up(call):
        assert call(MooncakeDistributedStore()) < 0

    calls = [
        ("Store", 1, lambda: tidepool.Store(masters, connect_deadline=DEADLINE_S)),
        ("AsyncStore", 1, lambda: asyncio.run(connect())),
        ("LocalNode", 1, lambda: tidepool.LocalNode(masters, 1 << 20, deadline=DEADLINE_S)),
        ("setup", 2, lambda: set_up(lambda s: s.setup("localhost", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", masters))),
        ("init_all", 2, lambda: set_up(lambda s: s.init_all("tcp", ""))),
        ("setup_dummy", 2, lambda: set_up(lambda s: s.setup_dummy(1 << 20, 1 << 20, "127.0.0.1:1"))),
    ]
    in_time(all_timed(calls), DEADLINE_S)
