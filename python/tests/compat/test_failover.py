"""Masters that die under a store that was set up once: right bytes or a number below 0, and on within two seconds."""

import threading
import time

import pytest

from compat.rig import Buffer, Cluster, mounted, pattern, set_up, until
from mooncake.store import MooncakeDistributedStore

KEYS = 64
SIZE = 16 * 1024
#: From the kill of a leader to the first calls that are served, and how often that is tried.
RESUMED_S = 2.0
ROUNDS = 3
#: What a slot holds before a call: a slot that counts as read must not hold it any more.
STALE = b"\xee" * SIZE


@pytest.fixture
def quorum(tmp_path):
    running = Cluster(tmp_path, masters=3, datanodes=2, dram="64MiB")
    yield running
    running.stop()


@pytest.fixture
def store(quorum):
    made = MooncakeDistributedStore()
    assert set_up(made, quorum, segment=0) == 0
    mounted(made, 2)
    yield made
    made.close()


def leader(store, quorum):
    """The process of the master that leads."""
    store._client.ping()
    address = store._client.leader()
    return quorum.masters[quorum.addresses.split(",").index(address)]


# User report 95: a master killed, or pages loaded from the pool, gave garbled text.
def test_case_095_a_leader_killed_during_200_batches_leaves_no_slot_wrong(store, quorum):
    keys = [f"block-{n}" for n in range(KEYS)]
    values = [pattern(SIZE, n) for n in range(KEYS)]
    assert store.put_batch(keys, values) == 0
    memory = Buffer(KEYS * SIZE)
    assert store.register_buffer(memory.addr, memory.size) == 0
    at = [memory.addr + n * SIZE for n in range(KEYS)]
    killed = {}

    def kill():
        victim = leader(store, quorum)
        victim.kill()
        killed["at"] = time.monotonic()

    failed = served_after = 0
    resumed = None
    for call in range(200):
        if call == 60:
            killer = threading.Thread(target=kill)
            killer.start()
        memory[:] = STALE * KEYS
        began = time.monotonic()
        results = store.batch_get_into(keys, at, [SIZE] * KEYS)
        assert len(results) == KEYS
        for n, result in enumerate(results):
            if result < 0:
                failed += 1
                continue
            # Tried with a get that counts a slot it did not fill: fails here.
            assert result == SIZE and memory[n * SIZE : (n + 1) * SIZE] == values[n], (call, n, result)
        if "at" in killed and began > killed["at"] and all(result == SIZE for result in results):
            served_after += 1
            resumed = resumed or time.monotonic()
    killer.join()
    until("batches are served again", lambda: store.batch_get_into(keys, at, [SIZE] * KEYS) == [SIZE] * KEYS)
    print(f"slots that failed: {failed} of {200 * KEYS}; first whole batch after the kill: {resumed and resumed - killed['at']}")
    assert served_after > 0


def test_calls_resume_within_two_seconds_of_the_loss_of_a_leader_without_a_new_setup(store, quorum):
    """The best of the rounds counts: the host may have other things to do."""
    gaps = []
    assert store.put("before", b"v") == 0
    for turn in range(ROUNDS):
        victim = leader(store, quorum)
        began = time.monotonic()
        victim.kill()
        until("a put is taken", lambda turn=turn: store.put(f"after-{turn}", b"v") == 0)
        until("a get is answered", lambda: store.get("before") == b"v")
        gaps.append(time.monotonic() - began)
        assert store.get(f"after-{turn}") == b"v"
        victim.start()
        victim.ports()
    print("seconds without a put and a get:", ", ".join(f"{gap:.3f}" for gap in gaps))
    assert min(gaps) <= RESUMED_S, gaps
    assert [store.get(f"after-{turn}") for turn in range(ROUNDS)] == [b"v"] * ROUNDS


def test_with_no_quorum_calls_end_and_say_so(quorum, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1500")
    store = MooncakeDistributedStore()
    assert set_up(store, quorum, segment=0) == 0
    mounted(store, 2)
    assert store.put("k", b"v") == 0
    for master in quorum.masters[:2]:
        master.kill()
    # Engines take is_exist for a truth value.
    assert store.is_exist("k") == 0
    assert store.batch_is_exist(["k"])[0] in (-900, -901, -1011, -1010)
    memory = Buffer(100)
    result = store.batch_get_into(["k"] * 8, [memory.addr + n for n in range(8)], [1] * 8)
    assert all(each in (-900, -901, -1011, -1010) for each in result), result
    assert store.put("k2", b"v") in (-900, -901, -1011, -1010)
    assert store.health_check() == 2
    for master in quorum.masters[:2]:
        master.start()
    until("it is served again", lambda: store.get("k") == b"v")
    assert store.health_check() == 0
    assert store.close() == 0


def test_a_store_closes_although_no_master_answers(tmp_path):
    own = Cluster(tmp_path)
    store = MooncakeDistributedStore()
    assert set_up(store, own) == 0
    assert store.allocate_and_mount_segment(16 << 20)["ret"] == 0
    own.masters[0].kill()
    assert store.close() == 0
    assert store.health_check() == 1
    own.stop()


def test_a_bad_address_among_the_masters_does_not_matter(quorum):
    store = MooncakeDistributedStore()
    addresses = f"127.0.0.1:1,{quorum.addresses}"
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", addresses) == 0
    mounted(store, 2)
    assert store.put("k", b"v") == 0
    store.close()
