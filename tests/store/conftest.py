"""Stores of two directories."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.base.types import KvDir
from router.store.store import KvStore
from tests.support.files.stores import Stores


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Stores]:
    made = Stores((KvDir(str(tmp_path / "a")), KvDir(str(tmp_path / "b"))))
    yield made
    await made.aclose()


@pytest.fixture
async def store(stores: Stores) -> KvStore:
    made = stores.make()
    assert await made.load() == []
    return made
