"""`ReplicateConfig`, `MooncakeConfig`, the forms of `setup`, and the environment."""

import copy
import json
import os
import socket

import pytest

from compat import peer_variables
from compat.rig import set_up, until
from mooncake.mooncake_config import DEFAULT_GLOBAL_SEGMENT_SIZE, MooncakeConfig
from mooncake.store import MooncakeDistributedStore, ObjectDataType, ReplicateConfig, SoftPinAction, environment
from mooncake.store.connection import _address_of
from mooncake.store.replicate import ConfigRefused, group_names, put_options
from mooncake.store.settings import Settings
from mooncake.store.sizes import parse_size


def test_a_config_has_the_documented_defaults():
    config = ReplicateConfig()
    assert config.replica_num == 1 and config.nof_replica_num == 0 and config.dfs_replica_num == 0
    assert config.soft_pin_action is SoftPinAction.PRESERVE and config.soft_pin_ttl_ms is None
    assert config.with_hard_pin is False and config.prefer_alloc_in_same_node is False
    assert config.preferred_segments == [] and config.preferred_nof_segments == [] and config.preferred_segment == ""
    assert config.data_type is ObjectDataType.UNKNOWN and config.group_ids is None
    assert str(config) == (
        "ReplicateConfig: { replica_num: 1, nof_replica_num: 0, dfs_replica_num: 0, soft_pin_action: PRESERVE, "
        "soft_pin_ttl_ms: default, with_hard_pin: 0, preferred_segments: [], preferred_nof_segments: [], "
        "prefer_alloc_in_same_node: 0, data_type: UNKNOWN }"
    )


def test_a_config_shows_what_was_set():
    config = ReplicateConfig()
    config.group_ids, config.soft_pin_ttl_ms, config.preferred_segments = ["a"], 5, ["x", "y"]
    assert "soft_pin_ttl_ms: 5" in str(config) and "preferred_segments: [x, y]" in str(config)
    assert str(config).endswith("group_ids: [a] }")
    assert str(copy.deepcopy(config)) == str(config)


@pytest.mark.parametrize("value", [-1, 2**64, "a", 1.5])
def test_a_ttl_that_is_none_is_a_type_error(value):
    with pytest.raises(TypeError, match="soft_pin_ttl_ms"):
        ReplicateConfig().soft_pin_ttl_ms = value


@pytest.mark.parametrize(("name", "value"), [("replica_num", -1), ("replica_num", "a"), ("group_ids", "abc"), ("data_type", 1)])
def test_a_wrong_type_is_a_type_error(name, value):
    with pytest.raises(TypeError, match=name):
        setattr(ReplicateConfig(), name, value)


def test_attributes_of_other_versions_may_be_set():
    config = ReplicateConfig()
    config.session_ids = ["s"]
    config.with_soft_pin = True
    assert config.soft_pin_action is SoftPinAction.ENABLE
    put_options(config)


@pytest.mark.parametrize("action", list(SoftPinAction))
@pytest.mark.parametrize(("ttl", "legal"), [(None, True), (1000, False), (10**12, False)])
def test_a_ttl_goes_with_enable_only(action, ttl, legal):
    config = ReplicateConfig()
    config.soft_pin_action, config.soft_pin_ttl_ms = action, ttl
    if legal or (action is SoftPinAction.ENABLE and ttl == 1000):
        put_options(config)
    else:
        with pytest.raises(ConfigRefused) as refused:
            put_options(config)
        assert refused.value.code == -600


def test_options_follow_a_change():
    config = ReplicateConfig()
    before = put_options(config)
    assert put_options(config) is before
    config.replica_num = 2
    assert put_options(config) is not before


@pytest.mark.parametrize(("groups", "count", "legal"), [(["a"], 1, True), (["a"], 2, False), ([], 1, False), (None, 3, True)])
def test_groups_are_one_a_key(groups, count, legal):
    config = ReplicateConfig()
    config.group_ids = groups
    if legal:
        assert group_names(config, count) == (None if groups is None else tuple(groups))
    else:
        with pytest.raises(ConfigRefused):
            group_names(config, count)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16MB", 16 << 20), ("16 MB", 16 << 20), ("4g", 4 << 30), ("1e9", 10**9), ("2e3k", 2000 << 10), ("1.5 GiB", 3 << 29),
        (123, 123), ("0", 0), ("33554432", 1 << 25),
    ],  # fmt: skip
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(("size", "code"), [("16MB", 0), ("16 MB", 0), (16 << 20, 0), ("50%", -600), ("512", -600)])
@pytest.mark.parametrize("name", ["global_segment_size", "local_buffer_size"])
def test_sizes_of_a_dict_are_what_is_set_up(cluster, name, size, code):
    store = MooncakeDistributedStore()
    told = {**TOLD, "master_server_addr": cluster.addresses, "global_segment_size": 0, name: size}
    assert store.setup(told) == code
    store.close()


@pytest.mark.parametrize("text", ["50%", "", "MB", "-1", "1 XB", "1e", "1e999", "e9", None, True])
def test_what_is_no_size(text):
    with pytest.raises(ValueError):
        parse_size(text)


TOLD = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}


def test_a_dict_has_defaults():
    settings = Settings.of_dict(TOLD)
    assert settings.masters == "127.0.0.1:50051" and settings.segment_bytes == settings.buffer_bytes == 16 << 20
    assert settings.tenant == "" and settings.http_port == 0


@pytest.mark.parametrize("spelling", ["master_server_addr", "master_server_address"])
def test_both_spellings_of_the_master_count(spelling):
    assert Settings.of_dict({**TOLD, spelling: "a:1, b:2,c"}).masters == "a:1,b:2,c"


def test_the_short_spelling_goes_first():
    told = {**TOLD, "master_server_address": "b:1", "master_server_addr": "a:1", "device_name": "mlx5_0"}
    assert Settings.of_dict(told).masters == "a:1"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"global_segment_size": "50%"}, "50%"),
        ({"global_segment_size": "16"}, "global_segment_size"),
        ({"local_buffer_size": str(2 << 40)}, "local_buffer_size"),
        ({"protocol": "rdma"}, "rdma"),
        ({"enable_ssd_offload": "true"}, "enable_ssd_offload"),
        ({"master_server_addr": "etcd://h:2379"}, "etcd"),
        ({"metadata_server": ""}, "metadata_server"),
        ({"local_hostname": ""}, "local_hostname"),
    ],
)
def test_what_cannot_be_is_refused_and_named(change, names):
    with pytest.raises(ValueError, match=names):
        Settings.of_dict({**TOLD, **change})
    assert MooncakeDistributedStore().setup({**TOLD, **change}) == -600


def test_an_engine_that_insists_on_rdma_can_be_overruled(monkeypatch):
    monkeypatch.setenv("TIDEPOOL_MOONCAKE_PROTOCOL", "tcp")
    Settings.of_dict({**TOLD, "protocol": "rdma", "rdma_devices": "mlx5_0"})


@pytest.mark.parametrize(
    ("arguments", "keywords", "names"),
    [
        ((1,), {}, "local_hostname|metadata_server"),
        ((), {}, "local_hostname"),
        (({},), {"bogus": 1}, "bogus"),
        (("h", "m", 1, 1, "tcp", "", "x"), {"foo": 1}, "foo"),
        (("h", "m", 1, 1, "tcp", "", "x"), {"protocol": "tcp"}, "protocol"),
        (("h", "m", "1", 1, "tcp", "", "x"), {}, "global_segment_size"),
        (("h", "m", 1, 1, "tcp", "", "x") + (None,) * 7, {}, "positional"),
    ],
)
def test_other_forms_are_type_errors(arguments, keywords, names):
    with pytest.raises(TypeError, match=names):
        MooncakeDistributedStore().setup(*arguments, **keywords)


@pytest.fixture
def warned(monkeypatch, caplog):
    """The warnings of a test, none of which were given before; none of Mooncake's variables are set."""
    for name in list(os.environ):
        if name.startswith(("MC_", "MOONCAKE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_warned", set())
    return lambda: [record.getMessage() for record in caplog.records]


def test_variables_without_effect_are_named_once_and_in_one_line(monkeypatch, warned):
    monkeypatch.setenv("MC_STORE_MEMCPY", "1")
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/disk")
    Settings.of_dict(TOLD)
    Settings.of_dict(TOLD)
    assert warned() == ["MC_LOG_LEVEL, MC_STORE_MEMCPY, MOONCAKE_OFFLOAD_FILE_STORAGE_PATH: no effect with Tidepool"]


@pytest.mark.parametrize("name", peer_variables.VARIABLES)
def test_no_variable_of_mooncakes_is_ignored_in_silence(name, monkeypatch, warned):
    kinds = [
        name in environment.FOLLOWED,
        name in environment.NEEDLESS,
        name in environment.REFUSED or name == environment.BIND_ADDRESS,
        environment.is_without_effect(name),
    ]
    assert sum(kinds) == 1
    monkeypatch.setenv(name, "1000")
    if name in environment.REFUSED:
        with pytest.raises(ValueError, match=name):
            Settings.of_dict(TOLD)
        return
    Settings.of_dict(TOLD)
    assert warned() == ([f"{name}: no effect with Tidepool"] if environment.is_without_effect(name) else [])


def test_programs_that_begin_as_mooncakes_variables_do_are_left_alone(monkeypatch, warned):
    for name in ("MC_HOST_minio", "MC_SID", "MOONCAKE_SENDER_WORKERS", "MOONCAKE_EP_NUM_LOCAL_RANKS"):
        monkeypatch.setenv(name, "1")
    Settings.of_dict(TOLD)
    assert warned() == []


@pytest.mark.parametrize(("value", "code"), [("127.0.0.1", 0), ("0.0.0.0", 0), ("::", 0), ("127.0.0.9", -600)])
def test_a_store_never_listens_elsewhere_than_it_was_told(cluster, monkeypatch, value, code):
    """Tried without the look at the address: fails."""
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", value)
    store = MooncakeDistributedStore()
    assert set_up(store, cluster, segment=0) == code
    store.close()


@pytest.mark.parametrize("value", ["1", "true", "0", "off", ""])
def test_the_family_of_addresses_is_followed(monkeypatch, value):
    entry = lambda family, address: (family, socket.SOCK_STREAM, 6, "", (address, 0))  # noqa: E731
    known = {
        "both": [entry(socket.AF_INET6, "fd00::1"), entry(socket.AF_INET, "10.0.0.1")],
        "old": [entry(socket.AF_INET, "10.0.0.2")],
        "new": [entry(socket.AF_INET6, "fd00::3")],
    }
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: known[host])
    monkeypatch.setenv("MC_USE_IPV6", value)
    assert _address_of("new") == "fd00::3"
    if value in ("1", "true"):
        assert _address_of("both") == "fd00::1"
        with pytest.raises(ValueError, match="MC_USE_IPV6"):
            _address_of("old")
    else:
        assert _address_of("both") == "10.0.0.1" and _address_of("old") == "10.0.0.2"


def test_a_store_that_is_to_use_ipv6_lends_its_memory_there_or_not_at_all(cluster, monkeypatch, key):
    monkeypatch.setenv("MC_USE_IPV6", "1")
    store = MooncakeDistributedStore()
    # Tried without the look at the variable: it listens on 127.0.0.1.
    assert set_up(store, cluster, hostname="127.0.0.1") == -600
    try:
        with socket.socket(socket.AF_INET6) as asking:
            asking.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    assert set_up(store, cluster, hostname="::1") == 0
    assert store.get_hostname().startswith("[::1]:")
    until("the memory is there", lambda: store.put(key, b"v") == 0)
    assert store.get(key) == b"v"
    store.close()


def test_a_disk_that_is_not_turned_on_is_harmless(monkeypatch, warned, tmp_path):
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path))
    config = MooncakeConfig.load_from_env()
    assert config.ssd_offload_path == str(tmp_path) and not config.enable_ssd_offload
    Settings.of_dict({**TOLD, "ssd_offload_path": config.ssd_offload_path, "enable_ssd_offload": config.enable_ssd_offload})
    assert "ssd_offload_path: has no effect while offload is off" in warned()
    monkeypatch.setenv("MOONCAKE_OFFLOAD_ENABLED", "1")
    with pytest.raises(ValueError, match="enable_ssd_offload"):
        Settings.of_dict(TOLD)


def test_keys_that_are_not_known_are_named_and_change_nothing(tmp_path, warned):
    """Mooncake ignores them in silence; the same file may hold settings of the engine."""
    path = tmp_path / "mooncake.json"
    told = {**TOLD, "master_server_address": "m:1", "global_segmnt_size": "1GB", "prefer_alloc": True}
    path.write_text(json.dumps(told))
    config = MooncakeConfig.from_file(str(path))
    assert config.global_segment_size == DEFAULT_GLOBAL_SEGMENT_SIZE and not hasattr(config, "prefer_alloc")
    assert warned() == [f"{path}: global_segmnt_size, prefer_alloc: not known, and without effect"]
    assert Settings.of_dict({**TOLD, "prefer_alloc": True}) == Settings.of_dict(TOLD)
    assert "prefer_alloc" in warned()[1]


@pytest.mark.parametrize(("name", "value"), [("MC_RPC_PROTOCOL", "rdma"), ("MC_CXL_DEV_SIZE", "1024"), ("MC_RPC_TIMEOUT_MS", "-1")])
def test_variables_that_cannot_be_followed_are_errors(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name):
        Settings.of_dict(TOLD)


def test_the_call_timeout_is_followed(monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1500")
    assert Settings.of_dict(TOLD).deadline == 1.5


def test_a_config_file(tmp_path, monkeypatch):
    path = tmp_path / "mooncake.json"
    told = {
        "local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "a:1,b:1,c:1", "protocol": "TCP",
        "global_segment_size": "1GB", "enable_client_http_server": "false", "client_http_port": 9301,
    }  # fmt: skip
    path.write_text(json.dumps(told))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    monkeypatch.setenv("MOONCAKE_MASTER", "elsewhere:1")
    config = MooncakeConfig.load_from_env()
    assert config.master_server_address == "a:1,b:1,c:1" and config.protocol == "tcp"
    assert config.global_segment_size == 1 << 30 and config.local_buffer_size == 1 << 30
    assert config.client_http_port == 9301 and config.enable_client_http_server is False


def test_a_config_from_variables(monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2GB")
    monkeypatch.setenv("MOONCAKE_TENANT_ID", "t")
    config = MooncakeConfig.load_from_env()
    assert (config.global_segment_size, config.tenant_id, config.metadata_server) == (2 << 30, "t", "P2PHANDSHAKE")
    assert config.local_hostname == "localhost" and config.local_buffer_size == 1 << 30


@pytest.mark.parametrize("missing", ["local_hostname", "metadata_server", "master_server_address"])
def test_a_config_file_lacks_a_field(tmp_path, missing):
    told = {"local_hostname": "h", "metadata_server": "p", "master_server_address": "m"}
    del told[missing]
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError, match=missing):
        MooncakeConfig.from_file(str(path))
