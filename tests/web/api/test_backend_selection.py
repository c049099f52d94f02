"""Selection of the backend that reads a prompt.

Boundaries are read only for backends with states that can only be extended."""

from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from router.base.errors import BackendError
from router.base.types import NO_TENANT, BackendId, BackendInfo, KvDir, MemoryKind, Prompt, Tenant
from router.engine.engine import Engine
from router.llama.attach.monitor import Monitor
from router.llama.routes import Shape
from router.llama.wire import ParsedRequest, parse_request
from router.prompts.reader import PromptReader
from router.web.api.backend_selection import BackendSelection
from tests.support.scheduler.build import backend, inventory

PLACE = KvDir("/kv")
CHAT = parse_request(Shape.CHAT, {"messages": [], "model": "m"})


class Reader:
    """A prompt reader that records whether boundaries were asked for."""

    def __init__(self, *failures: str) -> None:
        self.boundaries: list[bool] = []
        self._failures = failures

    def of(self, tenant: Tenant) -> "Reader":
        assert tenant == NO_TENANT
        return self

    async def read(
        self, parsed: ParsedRequest, *, boundaries: bool = False, n_ctx: int = 0
    ) -> Prompt:
        self.boundaries.append(boundaries)
        if len(self.boundaries) <= len(self._failures):
            raise BackendError(self._failures[len(self.boundaries) - 1])
        return Prompt()


def info_of(
    name: str, kind: MemoryKind, model: str = "m", kv_dir: KvDir | None = PLACE
) -> BackendInfo:
    return backend(name, memory_kind=kind, models=frozenset({model}), kv_dir=kv_dir)


def monitor_of(name: str, models: set[str], *, generates: bool = True) -> Monitor:
    client = SimpleNamespace(id=BackendId(name), doubted=False)
    told = SimpleNamespace(client=client, models=frozenset(models), generates=generates)
    told.doubt = lambda: setattr(client, "doubted", True)
    return cast(Monitor, told)


@pytest.mark.parametrize(
    ("chat", "embedding", "model", "avoided"),
    [
        pytest.param({"c"}, {"e"}, None, {"e"}, id="no name"),
        pytest.param({"c"}, {"e"}, "e", set[str](), id="its name"),
        pytest.param({"c"}, {"e"}, "c", set[str](), id="the other's name"),
        pytest.param(set[str](), {"e"}, None, {"e"}, id="the other was never up"),
        pytest.param(None, {"e"}, None, set[str](), id="alone"),
    ],
)
async def test_who_names_no_model_does_not_mean_one_without_kv(
    chat: set[str] | None, embedding: set[str], model: str | None, avoided: set[str]
) -> None:
    """Also while the other backends are down: the request then waits for them."""
    monitors = {BackendId("e"): monitor_of("e", embedding, generates=False)}
    if chat is not None:
        monitors[BackendId("c")] = monitor_of("c", chat)
    state = SimpleNamespace(inventory=inventory(info_of("e", MemoryKind.UNKNOWN, model="e")))
    readers = {BackendId("e"): cast(PromptReader, Reader())}
    engine = cast(Engine, SimpleNamespace(state=state))
    directory = BackendSelection(monitors, readers, engine, True, AsyncMock(return_value=False))
    assert directory.without_kv(model) == avoided
    _, reader = await directory.read(CHAT, model, NO_TENANT, directory.without_kv(model))
    assert (reader is None) == (bool(avoided) or model == "c")
