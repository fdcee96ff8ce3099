"""The REST service, over real HTTP. Needs aiohttp."""

import asyncio
import json

import pytest

from compat.rig import MIB

aiohttp = pytest.importorskip("aiohttp")

from mooncake.mooncake_store_service import MooncakeStoreService  # noqa: E402
from mooncake.store import MooncakeDistributedStore  # noqa: E402


@pytest.fixture
def with_service(cluster, tmp_path):
    """Runs a test against a service that is up: with_service(async function of (session, base URL, service))."""
    path = tmp_path / "mooncake.json"
    told = {
        "local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", "master_server_address": cluster.addresses,
        "global_segment_size": "64MB", "local_buffer_size": "16MB",
    }  # fmt: skip
    path.write_text(json.dumps(told))

    def run(test):
        async def whole():
            service = MooncakeStoreService(str(path), {"protocol": "tcp"})
            assert await service.start_store_service(max_wait_time=30)
            assert await service.start_http_service(0)
            try:
                async with aiohttp.ClientSession() as session:
                    await test(session, f"http://127.0.0.1:{service.port}", service)
            finally:
                service.store.remove_all(True)
                await service.stop()
                await service.stop()

        asyncio.run(whole())

    return run


async def call(session, method, url, body=None):
    data = body if isinstance(body, (str, bytes)) else None if body is None else json.dumps(body)
    async with session.request(method, url, data=data) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw) if answer.content_type == "application/json" else raw


def test_objects(with_service, key):
    async def test(session, base, service):
        assert await call(session, "PUT", f"{base}/api/put", {"key": key, "value": "text"}) == (200, {"status": "success"})
        assert await call(session, "GET", f"{base}/api/get/{key}") == (200, b"text")
        assert await call(session, "GET", f"{base}/api/exist/{key}") == (200, {"exists": True})
        status, answer = await call(session, "DELETE", f"{base}/api/remove/{key}")
        assert status == 500 and "-706" in answer["error"]
        assert await call(session, "GET", f"{base}/api/get/{key}-none") == (404, {"error": "Key not found"})
        assert await call(session, "GET", f"{base}/api/exist/{key}-none") == (200, {"exists": False})
        status, answer = await call(session, "DELETE", f"{base}/api/remove_all")
        assert status == 200 and answer["status"].startswith("success removed")

    with_service(test)


@pytest.mark.parametrize(
    ("body", "says"),
    [({}, "Missing"), ({"key": "k"}, "Missing"), ({"key": "", "value": "v"}, "Missing"), ("{", "Malformed"), ("[]", "object")],
)
def test_bodies_that_are_none(with_service, body, says):
    async def test(session, base, service):
        status, answer = await call(session, "PUT", f"{base}/api/put", body)
        assert status == 400 and says in answer["error"]

    with_service(test)


def test_segments(with_service):
    async def test(session, base, service):
        status, answer = await call(session, "POST", f"{base}/api/mount", {"size": 16 * MIB})
        assert status == 200 and answer["allocated_size"] >= 16 * MIB
        assert (await call(session, "POST", f"{base}/api/unmount", {"segment_ids": answer["segment_ids"]}))[0] == 200
        assert (await call(session, "POST", f"{base}/api/unmount", {"segment_ids": answer["segment_ids"]}))[0] == 500
        for body in ({}, {"size": 0}, {"size": "big"}, {"size": True}):
            assert (await call(session, "POST", f"{base}/api/mount", body))[0] == 400
        assert (await call(session, "POST", f"{base}/api/unmount", {}))[0] == 400
        assert (await call(session, "POST", f"{base}/api/mount_shm", {"name": "n", "size": MIB}))[0] == 500
        _, answer = await call(session, "POST", f"{base}/api/mount", {"size": 16 * MIB})
        for route in ("unmount", "unmount_shm"):
            (name,) = answer["segment_ids"]
            assert (await call(session, "POST", f"{base}/api/{route}", {"segment_ids": name}))[0] == 200
            _, answer = await call(session, "POST", f"{base}/api/mount", {"size": 16 * MIB})

    with_service(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 200),
        ({"grace_period_seconds": 3600}, 200),
        (None, 400),
        ("{", 400),
        ("[]", 400),
        ({"grace_period_seconds": 3601}, 400),
        ({"grace_period_seconds": -1}, 400),
        ({"grace_period_seconds": True}, 400),
        ({"grace_period_seconds": "5"}, 400),
    ],
)
def test_a_disk_is_taken_away(with_service, body, status):
    async def test(session, base, service):
        assert (await call(session, "POST", f"{base}/api/unmount_local_disk", body))[0] == status

    with_service(test)


def test_reconfigure(with_service):
    async def test(session, base, service):
        assert (await call(session, "POST", f"{base}/api/reconfigure", {"mode": "other"}))[0] == 400
        assert (await call(session, "POST", f"{base}/api/reconfigure", {"mode": "decode"}))[0] == 400
        _, first = await call(session, "POST", f"{base}/api/reconfigure", {"mode": "decode", "size": 16 * MIB})
        assert first["mode"] == "decode" and len(first["segment_ids"]) == 1
        _, second = await call(session, "POST", f"{base}/api/reconfigure", {"mode": "decode", "size": 16 * MIB})
        assert len(second["segment_ids"]) == 1 and second["segment_ids"] != first["segment_ids"]
        answer = await call(session, "POST", f"{base}/api/reconfigure", {"mode": "prefill"})
        assert answer == (200, {"status": "success", "mode": "prefill"})
        assert service.mounted_segment_ids == []

    with_service(test)


@pytest.fixture
def without_masters(tmp_path):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"local_hostname": "localhost", "metadata_server": "p", "master_server_address": "etcd://h"}))
    return str(path)


def test_nobody_answers(without_masters, caplog):
    service = MooncakeStoreService(without_masters, {"nothing": "1", "from_file": "x"})
    assert "-Dnothing" in caplog.text and "-Dfrom_file" in caplog.text
    assert asyncio.run(service.start_store_service(max_wait_time=0)) is False


def test_a_setup_that_fails_is_tried_again(without_masters, cluster, monkeypatch):
    """Whatever the reason was: a name that has no address yet is one. Tried without another try: fails."""
    service = MooncakeStoreService(without_masters, {"global_segment_size": "0"})
    codes = []
    setup = MooncakeDistributedStore.setup

    def noted(store, **settings):
        codes.append(setup(store, **settings))
        monkeypatch.setenv("TIDEPOOL_MASTERS", cluster.addresses)
        return codes[-1]

    monkeypatch.setattr(MooncakeDistributedStore, "setup", noted)

    async def whole():
        assert await service.start_store_service(max_wait_time=60)
        await service.stop()

    asyncio.run(whole())
    assert codes == [-600, 0]
