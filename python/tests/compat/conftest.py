"""Fixtures of the Mooncake layer's tests: a cluster whose memory the stores under test lend themselves, as with Mooncake."""

import itertools

import pytest

from compat.rig import MIB, Buffer, Cluster, set_up, until
from mooncake.store import MooncakeDistributedStore

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A quorum of one without memory of its own; read leases last `rig.LEASE_S`."""
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    yield running
    running.stop()


@pytest.fixture
def make_store(cluster):
    """Makes stores that are set up, and closes them: make_store(segment=..., buffer=...)."""
    made = []

    def make(kind=MooncakeDistributedStore, on=None, **settings):
        store = kind()
        made.append(store)
        assert set_up(store, on or cluster, **settings) == 0
        if settings.get("segment", 1):
            name = store.get_hostname()
            until(f"{name} is mounted", lambda: any(s["name"] == name for s in store._client.segments()))
        return store

    yield make
    for store in made:
        if store.health_check() == 0:
            store.remove_all(True)
        store.close()


@pytest.fixture
def store(make_store):
    """One store that lends 64 MiB."""
    return make_store()


@pytest.fixture
def key():
    """A key of this test alone."""
    return f"key-{next(_numbers)}"


@pytest.fixture
def buffer(store):
    """4 MiB of memory that the store knows."""
    memory = Buffer(4 * MIB)
    assert store.register_buffer(memory.addr, memory.size) == 0
    yield memory
    store.unregister_buffer(memory.addr)
