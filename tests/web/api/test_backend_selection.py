"""Selection of the backend that reads a prompt.

Boundaries are read only for backends with states that can only be extended."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web

from router.base.errors import BackendError
from router.base.ports import Telemetry
from router.base.types import (
    NO_TENANT,
    BackendId,
    BackendInfo,
    KvDir,
    MemoryKind,
    Prompt,
    RequestId,
    Tenant,
)
from router.core.model.budget import Budget
from router.engine.engine import Engine
from router.llama.attach.monitor import Monitor
from router.llama.routes import Shape
from router.llama.wire import ParsedRequest, parse_request
from router.prompts.reader import PromptReader
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.api.completions import Completions
from router.web.api.elsewhere import Nowhere
from router.web.api.sending import Sender
from router.web.api.suspects import Suspects
from router.web.server.call import Call
from router.web.server.settings import Settings
from tests.support.scheduler.build import backend

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


def directory_of(*infos: BackendInfo, reader: Reader | None = None) -> BackendSelection:
    return reading({info.id: (info, reader) for info in infos})


def reading(backends: Mapping[str, tuple[BackendInfo, Reader | None]]) -> BackendSelection:
    """Return a selection; `backends`: by name, in the order in which they came up, with readers."""
    infos = {info.id: info for info, _ in backends.values()}
    readers = {info.id: cast(PromptReader, one) for info, one in backends.values() if one}
    monitors = {name: monitor_of(name, set(info.models)) for name, info in infos.items()}
    engine = cast(Engine, SimpleNamespace(infos=infos, view=SimpleNamespace(server_models=[])))
    return BackendSelection(monitors, readers, engine, reads_prompts=True)


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
    up = {BackendId("e"): info_of("e", MemoryKind.UNKNOWN, model="e")}
    readers = {BackendId("e"): cast(PromptReader, Reader())}
    engine = cast(Engine, SimpleNamespace(infos=up, view=SimpleNamespace(server_models=[])))
    directory = BackendSelection(monitors, readers, engine, reads_prompts=True)
    assert directory.without_kv(model) == avoided
    _, reader = await directory.read(CHAT, model, NO_TENANT, directory.without_kv(model))
    assert (reader is None) == (bool(avoided) or model == "c")


async def asked(directory: BackendSelection, model: str = "m") -> tuple[Prompt, Reader | None]:
    prompt, reader = await directory.read(CHAT, model, NO_TENANT, directory.without_kv(model))
    return prompt, cast(Reader | None, reader)


async def test_the_first_one_reads_and_remembers() -> None:
    a, b = Reader(), Reader()
    full = MemoryKind.FULL
    directory = reading({"a": (info_of("a", full), a), "b": (info_of("b", full), b)})
    for _ in range(3):
        assert (await asked(directory))[1] is a


async def test_each_one_that_answers_to_the_model_is_asked_once() -> None:
    """A backend that fails is doubted, and from then on asked last."""
    a, b, other = Reader("gone", "gone"), Reader("late", "gone"), Reader()
    full = MemoryKind.FULL
    directory = reading(
        {
            "a": (info_of("a", full), a),
            "o": (info_of("o", full, model="other"), other),
            "b": (info_of("b", full), b),
        }
    )
    prompt, reader = await asked(directory)
    assert prompt.unknown == "no backend answered the call to render and tokenize the prompt: late"
    assert reader is None
    assert (len(a.boundaries), len(b.boundaries), len(other.boundaries)) == (1, 1, 0)
    assert directory.monitors[BackendId("a")].client.doubted
    assert directory.monitors[BackendId("b")].client.doubted

    directory.monitors[BackendId("b")].client.doubted = False
    prompt, reader = await asked(directory)
    assert (len(a.boundaries), len(b.boundaries)) == (2, 2)  # `b` first: it is not doubted
    assert reader is None
    directory.monitors[BackendId("b")].client.doubted = False
    assert (await asked(directory))[1] is b


@pytest.mark.parametrize("kind", MemoryKind)
def test_boundaries_are_for_states_that_are_extended_only(kind: MemoryKind) -> None:
    wanted = kind not in (MemoryKind.FULL, MemoryKind.UNKNOWN)
    assert directory_of(info_of("a", kind)).wants_boundaries("m") is wanted
    assert directory_of(info_of("a", kind)).wants_boundaries(None) is wanted


def test_boundaries_are_for_states_that_are_saved() -> None:
    assert not directory_of(info_of("a", MemoryKind.HYBRID, kv_dir=None)).wants_boundaries("m")
    assert not directory_of().wants_boundaries("m")


def test_one_backend_of_the_model_is_enough() -> None:
    full, hybrid = info_of("a", MemoryKind.FULL), info_of("b", MemoryKind.HYBRID)
    assert directory_of(full, hybrid).wants_boundaries("m")
    other = info_of("b", MemoryKind.HYBRID, model="other")
    assert not directory_of(full, other).wants_boundaries("m")
    assert directory_of(full, other).wants_boundaries(None)


@pytest.mark.parametrize("kind", [MemoryKind.FULL, MemoryKind.HYBRID])
async def test_completion_is_read_with_the_wanted_boundaries(kind: MemoryKind) -> None:
    reader = Reader()
    directory = directory_of(info_of("a", kind), reader=reader)
    completions = Completions(
        cast(Engine, None),
        directory,
        cast(Sender, None),
        Settings(),
        Keys(cast(Telemetry, None), Budget()),
        Suspects(lambda: 0.0),
        Nowhere(cast(Engine, None)),
    )
    nobody = SimpleNamespace(headers={}, remote=None, path="/v1/chat/completions")
    call = Call(cast(web.Request, nobody), RequestId("r"), parsed=CHAT)
    await completions.describe(call)
    assert reader.boundaries == [kind is MemoryKind.HYBRID]
