"""A real Redis for the tests of the directory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.servers.redis_server import RedisServer


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """Yield a running Redis; without the program the test is skipped."""
    async with RedisServer.started(tmp_path) as server:
        yield server
