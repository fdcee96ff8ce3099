"""Pools that tests run against: `pool` (one process, shared), `store` on it, and `quorum` (three masters and a datanode, of one test)."""

from __future__ import annotations

import itertools
import os
from typing import Iterator, List

import pytest

import patience
import tidepool
from support import Quorum

patience.widen()

_names = itertools.count()


@pytest.fixture(scope="session")
def pool() -> Iterator[tidepool.DevPool]:
    with tidepool.dev("512MiB") as running:
        yield running


@pytest.fixture(scope="session")
def shared_store(pool) -> Iterator[tidepool.Store]:
    with pool.store() as connected:
        yield connected


@pytest.fixture
def store(shared_store) -> tidepool.Store:
    return shared_store


@pytest.fixture
def key() -> str:
    """A key that no other test has."""
    return f"test-{os.getpid()}-{next(_names)}"


@pytest.fixture
def keys(key) -> List[str]:
    return [f"{key}-{i}" for i in range(32)]


@pytest.fixture
def quorum(tmp_path) -> Iterator[Quorum]:
    running = Quorum(tmp_path)
    try:
        yield running
    finally:
        running.close()
