"""Fixtures for `router.web`: blocking calls fail, and the router's backend records every byte."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.blocking import blocking_calls_fail as blocking_calls_fail
from tests.support.servers.recorder import QUIET, Recorder, recording
from tests.support.servers.running_router import RunningRouter, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[Recorder]:
    async with recording() as recorder:
        yield recorder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kvferry(backend: Recorder) -> AsyncIterator[RunningRouter]:
    async with running([("a", backend.url)], None, yaml=QUIET) as router:
        yield router
