"""Fixtures shared by the end-to-end tests of faults."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.conftest import START_TIMEOUT_S
from tests.support.faults.breaking import Reference
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(server_argv: list[str]) -> AsyncIterator[Reference]:
    """Yield a server that no test disturbs, for all tests."""
    model = tiny_model("llama").path
    server = LlamaServer(model, ctx=8192, argv=server_argv, start_timeout_s=START_TIMEOUT_S)
    async with server:
        yield Reference(server)
