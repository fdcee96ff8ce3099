"""`mooncake_master` and `mooncake_client`: Mooncake's flags, real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from compat import peer_flags
from compat.rig import MIB, binary, free_port, pattern, until
from mooncake import cli_client
from mooncake.cli import flags, master_flags, snapshots, usage
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tidepool import _native


def translated(*arguments):
    told = flags.parse(arguments, master_flags.BOOLEANS, master_flags.NAMES)
    return master_flags.command(flags.with_file(told, master_flags.NAMES))


@pytest.fixture(autouse=True)
def own_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("TIDEPOOL_DATA_DIR", str(tmp_path / "data"))


def test_common_flags_of_a_master():
    arguments, warnings = translated("--rpc_address=127.0.0.1", "--port=61351", "--max_threads=2", "--metrics_port", "19003")
    assert arguments[0] == "master" and "--listen=127.0.0.1:61351" in arguments and "--http-port=19003" in arguments
    assert warnings == ["--max_threads has no effect with Tidepool"]


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--default_kv_lease_ttl=500", ["--lease-ttl=500ms", "--lease-ttl-max=500ms"]),
        ("--default_kv_soft_pin_ttl=1000", ["--soft-pin-ttl=1000ms"]),
        ("--noallow_evict_soft_pinned_objects", ["--evict-soft-pinned=false"]),
        ("--put_start_discard_timeout_sec=5", ["--put-start-discard-timeout=5000ms"]),
        ("--client_ttl=3", ["--node-forget-timeout=3000ms"]),
        ("--allocation_strategy=free_ratio_first", ["--allocation-strategy=free_ratio_first"]),
        ("--dynamic_replication_mode=observe", ["--dynamic-replication=observe"]),
        ("--dynamic_replication_admission_qps_threshold=0.8", ["--dynamic-replication-reads=8"]),
        ("--rpc_port=0", ["--listen=0.0.0.0:50051"]),
        ("--node_id=2", ["--node-id=2"]),
    ],
)
def test_what_a_flag_becomes(flag, ours):
    arguments, warnings = translated(flag, "--rpc_address=0.0.0.0")
    assert set(ours) <= set(arguments) and not warnings


def test_a_master_that_listens_everywhere_untold_says_so():
    for untold in ([], ["--rpc_address="]):
        arguments, warnings = translated(*untold)
        assert "--listen=0.0.0.0:50051" in arguments
        assert len(warnings) == 1 and "0.0.0.0" in warnings[0] and "--rpc_address=" in warnings[0]


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--enable_offload=true", "datanode"),
        ("--enable_cxl", "CXL"),
        ("--allocation_strategy=cxl", "CXL"),
        ("--enable_ha=true", "--members"),
        ("--root_fs_dir=d", "file tier"),
        ("--no_such_flag=1", "no such flag"),
        ("--promotion_on_hit", "promote"),
        ("--default_kv_lease_ttl=soon", "number"),
        ("--rpc_port", "takes a value"),
        ("word", "no flag"),
        ("--enable_snapshot", "MOONCAKE_SNAPSHOT_LOCAL_PATH"),
        ("--config_path=no-such-file", "no-such-file"),
    ],
)
def test_what_cannot_be_followed_says_what_to_do(flag, says, monkeypatch):
    monkeypatch.delenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", raising=False)
    with pytest.raises(flags.FlagError, match=says):
        translated(flag)


def test_promises_that_are_not_asked_for():
    told = ("--enable_offload=false", "--offload_on_evict=0", "--promotion_on_hit=no", "--enable_ha=false", "--rpc_address=a")
    assert translated(*told)[1] == []


def test_several_masters():
    arguments, _ = translated("--enable_ha=true", "--members=1=a,2=b", "--node_id=1", "--rpc_address=a")
    assert "--members=1=a,2=b" in arguments and not any(each.startswith("--advertise") for each in arguments)


def test_snapshots(monkeypatch, tmp_path):
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", str(tmp_path))
    arguments, _ = translated("--enable_snapshot", "--enable_snapshot_restore=true", "--snapshot_interval_seconds=60")
    url = f"file://{tmp_path}"
    assert {f"--snapshot-url={url}", f"--restore-from={url}", "--snapshot-interval=60000ms"} <= set(arguments)


def test_what_is_asked_to_be_restored(monkeypatch, tmp_path):
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", str(tmp_path / "snapshots"))
    told = {"enable_snapshot_restore": "true", "data_dir": str(tmp_path / "data")}
    restore = f"--restore-from=file://{tmp_path}/snapshots"
    arguments, warnings = master_flags.command(told, lambda url: False)
    assert restore not in arguments and any("begins empty" in warning for warning in warnings)
    assert restore in master_flags.command(told, lambda url: True)[0]
    # A place that cannot be looked at is the master's to refuse.
    assert snapshots.published_at("/no/such/program", "file:///nowhere")
    assert snapshots.published_at(binary(), "nothing://that-is-known")
    assert not snapshots.published_at(binary(), f"file://{tmp_path}/snapshots")
    # Data of its own: it goes on from there, whatever lies elsewhere, and nobody is asked.
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "log").touch()
    assert restore in master_flags.command(told, lambda url: pytest.fail(url))[0]


def test_a_first_start_with_restore_begins_empty_and_a_later_one_never(monkeypatch, tmp_path):
    """Tried with a restore at every start: the first ends. Tried with none at any: the second does."""
    monkeypatch.setenv("MOONCAKE_SNAPSHOT_LOCAL_PATH", str(tmp_path / "snapshots"))
    (tmp_path / "snapshots").mkdir()

    def master(name):
        port = free_port()
        return port, run(
            "mooncake.cli", "--enable_snapshot", "--enable_snapshot_restore", f"--port={port}", "--rpc_address=127.0.0.1",
            f"--metrics_port={free_port()}", f"--data_dir={tmp_path / name}",
        )  # fmt: skip

    port, first = master("first")
    until("the first master listens", lambda: listening(port) or first.poll() is not None)
    take = [binary(), "snapshot", "take", f"--masters=127.0.0.1:{port}"]
    until("a snapshot is published", lambda: subprocess.run(take, capture_output=True).returncode == 0)
    assert first.poll() is None and ended(first) == 0
    port, second = master("second")
    until("the second master listens", lambda: listening(port) or second.poll() is not None)
    assert second.poll() is None and ended(second) == 0
    # What is there and cannot be restored is never taken for nothing.
    for descriptor in (tmp_path / "snapshots").rglob("descriptor.txt"):
        descriptor.write_bytes(b"damaged")
    _, third = master("third")
    assert third.wait(30) != 0 and "restored" in third.stderr.read()
    third.stderr.close()


@pytest.mark.parametrize(
    "text",
    ['{"default_kv_lease_ttl": 700, "client_live_ttl_sec": 4}', "default_kv_lease_ttl: 700 # ms\nclient_live_ttl_sec: 4\n"],
)
def test_a_file_of_flags(tmp_path, text):
    path = tmp_path / "master.conf"
    path.write_text(text)
    assert {"--lease-ttl=700ms", "--node-forget-timeout=4000ms"} <= set(translated(f"--config_path={path}")[0])
    assert "--lease-ttl=900ms" in translated(f"--config_path={path}", "--default_kv_lease_ttl=900")[0]


def test_every_flag_is_one_thing():
    groups = [set(master_flags.TRANSLATED), set(master_flags.OWN), set(master_flags.WITHOUT_EFFECT), set(master_flags.REFUSED)]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert "--default_kv_lease_ttl" in usage()


@pytest.mark.parametrize("name", peer_flags.MASTER)
def test_every_flag_of_mooncakes_master_is_known(name):
    """From its own help: each is followed, without effect, or refused with a reason; none is an unknown word."""
    known = master_flags
    kinds = [known.TRANSLATED, known.FOLLOWED, known.WITHOUT_EFFECT, known.REFUSED, known.ELECTION, flags.HELPS]
    assert sum(name in kind for kind in kinds) == 1
    assert (name in master_flags.BOOLEANS) == (name in peer_flags.MASTER_BOOLEANS)


@pytest.mark.parametrize("name", peer_flags.CLIENT)
def test_every_flag_of_mooncakes_client_is_known(name):
    assert name in cli_client._NAMES or name == flags.FILE_OF_FLAGS
    assert (name in cli_client._BOOLEANS) == (name in peer_flags.CLIENT_BOOLEANS)


@pytest.mark.parametrize("name", sorted(flags.OF_LIBRARIES - flags.BOOLEANS_OF_LIBRARIES))
def test_flags_of_its_libraries_change_nothing(name):
    arguments, warnings = translated("--rpc_address=a", f"--{name}=1")
    assert arguments == translated("--rpc_address=a")[0] and warnings == [f"--{name} has no effect with Tidepool"]


@pytest.mark.parametrize("name", sorted(flags.REFUSED_OF_LIBRARIES))
def test_flags_that_change_the_command_line_are_refused(name):
    with pytest.raises(flags.FlagError, match=name):
        translated(f"--{name}=port")
    process = run("mooncake.cli_client", f"--{name}=port")
    assert process.wait(30) == 2 and name in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("name", ["snapshot_object_store_type", "snapshot_payload_store_type", "snapshot_payload_backend_type"])
def test_every_name_of_the_snapshots_store(name, monkeypatch):
    monkeypatch.setenv("MOONCAKE_AWS_BUCKET_NAME", "bucket")
    monkeypatch.delenv("MOONCAKE_AWS_S3_ENDPOINT", raising=False)
    monkeypatch.delenv("MOONCAKE_AWS_REGION", raising=False)
    assert "--snapshot-url=s3://bucket/mooncake_master_snapshot" in translated("--enable_snapshot", f"--{name}=s3")[0]


def test_a_flagfile(tmp_path):
    path = tmp_path / "flags"
    path.write_text("# of the master\n--default_kv_lease_ttl=700\n\n--noallow_evict_soft_pinned_objects\n")
    arguments, _ = translated("--rpc_address=a", f"--flagfile={path}")
    assert {"--lease-ttl=700ms", "--evict-soft-pinned=false"} <= set(arguments)
    # As there, whatever stands later counts.
    assert "--lease-ttl=900ms" in translated(f"--flagfile={path}", "--default_kv_lease_ttl=900")[0]
    path.write_text(f"--flagfile={path}\n")
    with pytest.raises(flags.FlagError, match="names itself|name itself"):
        translated(f"--flagfile={path}")
    with pytest.raises(flags.FlagError, match="no-such"):
        translated(f"--flagfile={tmp_path}/no-such")


def run(module, *arguments):
    environment = {**os.environ, "TIDEPOOL_BINARY": binary()}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment, stderr=subprocess.PIPE, text=True)


def ended(process):
    process.send_signal(signal.SIGTERM)
    code = process.wait(30)
    process.stderr.close()
    return code


def listening(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_the_program_is_the_one_of_the_installation():
    run = subprocess.run([sys.executable, "-m", "mooncake.cli", "--version"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stdout.startswith("tidepool"), run.stderr
    run = subprocess.run([sys.executable, "-m", "mooncake.cli", "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "--default_kv_lease_ttl" in run.stdout


def test_a_wrong_command_line_ends_with_2():
    for module in ("mooncake.cli", "mooncake.cli_client"):
        process = run(module, "--no_such_flag")
        assert process.wait(30) == 2 and "no such flag" in process.stderr.read()
        process.stderr.close()


def test_master_client_and_dummy_client(tmp_path, key):
    port, client_port, http_port, metrics = (free_port() for _ in range(4))
    master = run(
        "mooncake.cli", f"--port={port}", "--max_threads=2", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1",
        "--default_kv_lease_ttl=500", f"--data_dir={tmp_path / 'master'}",
    )  # fmt: skip
    lender = None
    stores = []
    try:
        until("the master listens", lambda: listening(port) and master.poll() is None)
        lender = run(
            "mooncake.cli_client", f"--master_server_address=127.0.0.1:{port}", f"--port={client_port}", "--host=127.0.0.1",
            "--global_segment_size=64 MB", "--enable_http_server", f"--http_port={http_port}", "--threads=1",
        )  # fmt: skip

        def segments():
            assert lender.poll() is None
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{metrics}/get_all_segments", timeout=5).read().decode().strip()
            except OSError:
                return ""

        until("a segment is mounted", segments)  # what SGLang waits for
        for _ in range(2):
            store = MooncakeDistributedStore()
            until("the lender answers", lambda store=store: store.setup_dummy(64 * MIB, 16 * MIB, f"127.0.0.1:{client_port}") == 0)
            stores.append(store)
        one, two = stores
        assert one.put(key, pattern(10_000)) == 0
        assert two.get(key) == pattern(10_000)
        (copy,) = two.get_replica_desc(key)
        name = copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
        assert name == f"127.0.0.1:{client_port}"
        config = ReplicateConfig()
        config.preferred_segment = name
        address = one.alloc_from_mem_pool(MIB)
        assert address and one.put_from(f"{key}-2", address, MIB, config) == 0
        assert one.alloc_from_mem_pool(64 * MIB) == 0
        into = two.alloc_from_mem_pool(MIB)
        assert two.get_into(f"{key}-2", into, MIB) == MIB
        names = [f"{key}-{n}" for n in range(3, 7)]
        assert one.batch_put_from(names, [address + 100 * n for n in range(4)], [100] * 4, config) == [0] * 4
        assert two.batch_is_exist([*names, "none"]) == [1] * 4 + [0]
        assert two.batch_get_into([*names, "none"], [into + 100 * n for n in range(5)], [100] * 5) == [100] * 4 + [-704]
        assert two.get_into_ranges([into], [[names[0]]], [[[7]]], [[[50]]], [[[25]]]) == [[[25]]]
        assert two.batch_get_session_start(names) == [0] * 4
        assert two.batch_get_into_multi_buffer_ranges(names[:1], [[into]], [[30]], [[70]]) == [30]
        assert two.batch_get_session_end(names) == 0
        assert two.remove(names[0], True) == 0 and one.is_exist(names[0]) == 0
        health = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{http_port}/health", timeout=5).read())
        assert health["status"] == "healthy"
    finally:
        for store in stores:
            store.close()
        if lender is not None:
            assert ended(lender) == 0
        assert ended(master) == 0
    assert not listening(port) and not listening(client_port)


@pytest.mark.parametrize(
    ("masters", "here"), [("127.0.0.1:1", True), ("localhost:1,127.0.0.2", True), ("10.1.2.3:1", False), ("localhost,h2:1", False)]
)
def test_where_a_client_listens(masters, here):
    hostname = cli_client._settings({"master_server_address": masters})["local_hostname"]
    assert hostname == ("127.0.0.1:50052" if here else f"{master_flags.own_address()}:50052")


def test_a_dummy_client_without_a_client(monkeypatch):
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.delenv("TIDEPOOL_MASTERS", raising=False)
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, f"127.0.0.1:{free_port()}") == -600
    assert MooncakeDistributedStore().setup_dummy(MIB, MIB, "127.0.0.1") == -600


def test_a_dummy_client_that_is_told_by_the_environment(cluster, monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", cluster.addresses)
    store = MooncakeDistributedStore()
    assert store.setup_dummy(MIB, MIB, f"127.0.0.1:{free_port()}") == 0
    address = store.alloc_from_mem_pool(MIB)
    assert address and store.close() == 0
    # A call of another thread may not have ended: its memory stays until nobody holds the store.
    assert (address, MIB) in _native.registered() and store.alloc_from_mem_pool(1) == 0
    del store
    assert (address, MIB) not in _native.registered()


def test_init_all(cluster, monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTER", cluster.addresses)
    store = MooncakeDistributedStore()
    assert store.init_all("tcp", "", 0) == 0 and store.health_check() == 0
    assert store.close() == 0
    monkeypatch.delenv("MOONCAKE_MASTER")
    assert store.init_all("tcp", "") == -600
