"""Threads, asyncio loops and idle times in any order: whoever waits drives the process's runtime, and somebody always does."""

import asyncio
import threading
import time

import tidepool

#: Longer than a datanode may be silent before it counts as dead.
SILENCE_S = 6.0


def in_threads(count, work):
    failed = []

    def guarded(n):
        try:
            work(n)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not failed, failed


def test_one_thread_many_and_a_loop_take_turns(pool, key):
    def some(store, name, calls):
        for n in range(calls):
            value = f"{name}-{n}".encode() * 50
            assert store.put(f"{name}-{n}", value).copies == 1
            assert store.get_bytes(f"{name}-{n}") == value

    async def looped(name):
        async with tidepool.AsyncStore.connect(pool.masters) as store:
            names = [f"{name}-{n}" for n in range(50)]
            await asyncio.gather(*(store.put(each, each.encode()) for each in names))
            assert await store.get_many(names) == [each.encode() for each in names]

    with pool.store() as store:
        for turn in range(3):
            some(store, f"{key}-{turn}-alone", 100)
            in_threads(8, lambda n: some(store, f"{key}-{turn}-{n}", 25))
            asyncio.run(looped(f"{key}-{turn}-loop"))
            some(store, f"{key}-{turn}-again", 20)
            time.sleep(0.05)
            # A loop of its own while other threads call.
            in_threads(3, lambda n: some(store, f"{key}-{turn}-{n}-beside", 25) if n else asyncio.run(looped(f"{key}-{turn}-beside")))


def test_what_a_process_lends_is_served_while_its_threads_wait_for_other_things(key):
    with tidepool.dev("64MiB") as pool, tidepool.LocalNode(pool.masters, 64 << 20) as node, pool.store() as store:
        deadline = time.monotonic() + 30
        while not node.ready and time.monotonic() < deadline:
            time.sleep(0.05)
        assert node.ready
        names = [f"{key}-{n}" for n in range(64)]
        assert all(store.put_many(names, [name.encode() * 1000 for name in names]))
        time.sleep(SILENCE_S)
        assert node.ready
        assert [store.get_bytes(name) for name in names] == [name.encode() * 1000 for name in names]
        # As long again beside a thread that calls all the time.
        until = time.monotonic() + SILENCE_S
        while time.monotonic() < until:
            assert store.exist(names[0])
        assert node.ready
        assert [store.get_bytes(name) for name in names] == [name.encode() * 1000 for name in names]
