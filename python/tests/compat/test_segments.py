"""Memory that stores lend: at setup, while they run, and what becomes of it when they end."""

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import types

import pytest

from compat.rig import MIB, Buffer, binary, pattern, set_up, until
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, deadlines
from mooncake.store.connection import segment_name
from tidepool import _native


def names(store):
    return {segment["name"] for segment in store._client.segments()}


def pinned_to(name):
    config = ReplicateConfig()
    config.preferred_segment = name
    return config


def test_a_segment_comes_and_goes_with_its_store(make_store):
    watcher, holder = make_store(segment=0), make_store(segment=32 * MIB)
    name = holder.get_hostname()
    (mounted,) = [segment for segment in watcher._client.segments() if segment["name"] == name]
    assert mounted["capacity"] >= 31 * MIB
    assert holder.close() == 0
    until("the segment is gone", lambda: name not in names(watcher))


# Whoever frees a buffer and forgets to unregister it, or takes it back twice, closes the store all the same.
def test_a_registration_that_is_gone_does_not_keep_a_store_open(make_store):
    watcher, holder = make_store(segment=0), make_store(segment=32 * MIB)
    name, buffers = holder.get_hostname(), [Buffer(4096) for _ in range(16)]
    for buffer in buffers:
        assert holder.register_buffer(buffer.addr, 4096) == 0
    for buffer in buffers[::2]:
        _native.unregister(buffer.addr)
    assert holder.close() == 0 and holder.close() == 0
    # Tried with the ValueError of the first let through: the others stay registered.
    assert not {buffer.addr for buffer in buffers} & {address for address, _ in _native.registered()}
    until("the segment is gone", lambda: name not in names(watcher))


def test_everything_is_closed_whatever_the_rest_raises(make_store):
    watcher, holder = make_store(segment=0), make_store(segment=32 * MIB)
    name, client, buffer = holder.get_hostname(), holder._client, Buffer(MIB)
    assert holder.register_buffer(buffer.addr, MIB) == 0

    def raising():
        raise OSError("no")

    holder._connection._http = types.SimpleNamespace(close=raising)
    assert holder.close() == 0
    assert client.closed and (buffer.addr, MIB) not in _native.registered()
    until("the segment is gone", lambda: name not in names(watcher))


def test_a_store_that_is_dropped_without_close_is_closed(make_store, cluster):
    watcher, dropped = make_store(segment=0), MooncakeDistributedStore()
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        port = asking.getsockname()[1]
    assert set_up(dropped, cluster, enable_client_http_server=True, client_http_port=port) == 0
    name, client, buffer = dropped.get_hostname(), dropped._client, Buffer(MIB)
    assert dropped.register_buffer(buffer.addr, MIB) == 0
    until("it is mounted", lambda: name in names(watcher))
    del dropped
    gc.collect()
    # Tried without the finalizer: the client stays open.
    assert client.closed and (buffer.addr, MIB) not in _native.registered()
    until("the segment is gone", lambda: name not in names(watcher))
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_memory_is_lent_and_taken_back_while_running(store, key):
    lent = store.allocate_and_mount_segment(16 * MIB)
    assert lent["ret"] == 0 and lent["allocated_size"] >= 16 * MIB
    (name,) = lent["segment_ids"]
    until("it is mounted", lambda: name in names(store))
    assert store.put(key, b"v", pinned_to(name)) == 0
    (copy,) = store.get_replica_desc(key)
    assert copy.get_memory_descriptor().buffer_descriptor.transport_endpoint == name
    assert store.unmount_segment([name, "nope"]) == -1
    until("it is gone", lambda: name not in names(store))
    assert store.get(key) == b""
    assert store.unmount_and_free_segment([name]) == -1
    assert store.unmount_segment([]) == 0


def test_a_grace_period_moves_what_is_there(store, key):
    (name,) = store.allocate_and_mount_segment(16 * MIB)["segment_ids"]
    until("it is mounted", lambda: name in names(store))
    assert store.put(key, pattern(100_000), pinned_to(name)) == 0
    assert store.unmount_and_free_segment([name], grace_period_seconds=20) == 0
    assert store.get(key) == pattern(100_000)


def test_what_cannot_be_lent(store):
    assert store.allocate_and_mount_segment(0)["ret"] == -600
    assert store.allocate_and_mount_segment(MIB, protocol="rdma")["ret"] == -600
    assert store.mount_segment("file", MIB) == {"ret": -1, "segment_ids": []}
    assert store.unmount_local_disk_segment() == 0


def test_a_port_of_ones_own(make_store, cluster):
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        port = asking.getsockname()[1]
    store = make_store(hostname=f"127.0.0.1:{port}")
    assert store.get_hostname() == f"127.0.0.1:{port}"
    # The port is taken, the name is free: another store may not have both.
    other = MooncakeDistributedStore()
    assert set_up(other, cluster, hostname=f"localhost:{port}") == 0
    assert other.get_hostname() == f"localhost:{port}"
    other.close()


@pytest.mark.parametrize("hostname", ["no.such.host.invalid", "localhost:99999", "localhost:x"])
def test_names_that_are_none(cluster, hostname):
    assert set_up(MooncakeDistributedStore(), cluster, hostname=hostname) == -600


def test_a_long_host_name_makes_a_segment_name():
    one = segment_name("a" * 80 + ".example", 12345)
    assert len(one) <= 61 and one.endswith(":12345") and one != segment_name("a" * 81 + ".example", 12345)
    assert segment_name("::1", 5) == "[::1]:5" and segment_name("fe80::1%eth0", 5) == "[fe80::1-eth0]:5"


def test_setup_again_begins_anew(store, cluster, key):
    store.put(key, b"v")
    first = store.get_hostname()
    assert set_up(store, cluster) == 0
    assert store.get_hostname() != "" and store.get(key) == b""
    until("the first segment is gone", lambda: first == store.get_hostname() or first not in names(store))


def test_tenants_do_not_see_each_other(store, make_store, cluster, key):
    subprocess.run([binary(), "tenant", "set", "t1", f"--masters={cluster.addresses}"], check=True, capture_output=True)
    other = make_store(segment=0, tenant_id="t1")
    assert store.put(key, b"default's") == 0
    assert other.get(key) == b"" and other.put(key, b"t1's") == 0
    assert store.get(key) == b"default's" and other.get(key) == b"t1's"
    assert other.remove_all(True) == 1 and store.is_exist(key) == 1


def test_a_tenant_over_its_quota_is_told_so(store, make_store, cluster, key, monkeypatch):
    # At once: the test would not end if the calls were repeated until their deadline. Tried with -200 in place of -1700: fails.
    monkeypatch.setattr(deadlines, "PUT_S", 600.0)
    told = [binary(), "tenant", "set", "t2", "--objects=2", "--bytes=100000", "--refuse", f"--masters={cluster.addresses}"]
    subprocess.run(told, check=True, capture_output=True)
    other = make_store(segment=0, tenant_id="t2")
    other._deadline = 600.0
    assert other.put_batch([f"{key}-1", f"{key}-2"], [b"1", b"2"]) == 0
    assert other.put(f"{key}-3", b"3") == other.upsert(f"{key}-3", b"3") == -1700
    memory = Buffer(1000)
    assert other.put_from(f"{key}-3", memory.addr, 10) == -1700
    assert other.batch_put_from([f"{key}-1", f"{key}-3"], [memory.addr] * 2, [10] * 2) == [0, -1700]
    assert other.remove(f"{key}-2", True) == 0
    until("there is room again", lambda: other.put(f"{key}-3", b"3") == 0)
    assert store.put(f"{key}-4", b"4") == 0, "the quota is one tenant's"


def test_the_http_endpoints(make_store):
    import urllib.request

    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        port = asking.getsockname()[1]
    store = make_store(segment=0, enable_client_http_server=True, client_http_port=port)

    def get(path):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10).read().decode()

    assert '"healthy"' in get("/health")
    assert "tidepool_client_" in get("/metrics") and "tidepool_client_" in get("/metrics/summary")
    with pytest.raises(OSError):
        get("/nothing")
    store.close()


CHILD = """
    import sys
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig, deadlines
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    assert store.put(sys.argv[2], b"from the child", config) == 0
    print(store.get_hostname(), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def child(cluster, key):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), cluster.addresses, key],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    name = process.stdout.readline().strip()
    assert name
    yield process, name
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_process_that_ends_leaves_by_itself(store, child, key):
    process, name = child
    assert store.get(key) == b"from the child"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(30) == 0
    assert name not in names(store)
    assert store.get(key) == b""


# User report 94: terminating the launcher leaves processes, ports and shared memory.
def test_case_094_sigterm_leaves_nothing(store, child, key):
    process, name = child
    port = int(name.rpartition(":")[2])
    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as listed:
        assert listed.read() == "", "a store starts no process"
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    until("what it held is no longer listed", lambda: store.is_exist(key) == 0, 60)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_a_killed_process_is_a_miss_and_not_wrong_bytes(store, child, key):
    process, _ = child
    process.kill()
    process.wait()
    memory = Buffer(100)

    def gone():
        result = store.get_into(key, memory.addr, 100)
        assert result < 0 or memory[:result] == b"from the child"
        return store.is_exist(key) == 0

    until("its object is not listed", gone, 60)
    assert store.put(f"{key}-after", b"v") == 0


# User report 55: "cannot allocate memory" with plenty of it, because of the limit on locked memory.
def test_case_055_no_locked_memory_is_needed(cluster, key):
    script = textwrap.dedent(CHILD).replace("sys.stdin.readline()", "assert store.get(sys.argv[2]) == b'from the child'")
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n{script}"
    subprocess.run([sys.executable, "-c", limited, cluster.addresses, key], check=True, capture_output=True, timeout=60)


# User report 56: mounting a large segment took minutes. Memory is taken when it is written, so the size does not matter.
def test_case_056_a_large_segment_is_there_at_once(make_store, key):
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    store = make_store(segment=pages * page // 4 * 3)
    assert store.put(key, pattern(MIB)) == 0
    assert store.get(key) == pattern(MIB)


FORKED = """
    import os, sys
    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "master_server_addr": sys.argv[1],
                        "global_segment_size": "32MB", "enable_client_http_server": "1", "client_http_port": sys.argv[2]}) == 0
    assert store.put("before", b"v") == 0
    child = os.fork()
    if not child:
        assert store.get("before") == b"" and store.put("in the child", b"v") < 0 and store.is_exist("before") <= 0
        assert store.health_check() != 0
        assert store.close() == 0
        own = MooncakeDistributedStore()
        print("setup in the child:", own.setup("localhost", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1]), flush=True)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    assert store.get("before") == b"v"
    assert store.put("after", b"w") == 0 and store.get("after") == b"w"
    assert store.close() == 0
"""


def test_a_child_made_by_fork_is_told_so_and_ends_nothing_of_its_parent(cluster):
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        port = asking.getsockname()[1]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED), cluster.addresses, str(port)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert "setup in the child:" in run.stdout
