"""Transfers of state files: each effect is answered with one event, whatever happens.

Saves and restores against whole routers: tests/engine/test_engine.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    BackendTimeoutError,
    KvError,
    KvFileError,
)
from router.base.types import KvDir, StagedFile, StateShape, Transfer
from router.core.model import effects as ef
from router.core.model.effects import Blame, Failed, Restored, Saved
from router.engine.transfers import Transfers
from tests.support.scheduler.build import A0, NS, A, R, backend, run_of, snapshot

LONG, PART = snapshot("s", run_of(900)), snapshot("t", run_of(500))
TWO = replace(LONG, shape=StateShape(2))
CUT = ef.Cut(R, LONG, 500)
SAVE = ef.Save(R, A0, NS, ef.SaveReason.IDLE)


class World:
    """Clock, store, backend and telemetry in one. `fails`: the error of each failing method."""

    def __init__(self, **fails: Exception) -> None:
        self.fails, self.said, self.time = fails, [], 0.0  # type: ignore[var-annotated]

    def transfers(self, *, store: bool = True) -> Transfers:
        me: Any = self
        return Transfers({A: me}, me if store else None, me, me)

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def _do(self, name: str, *args: Any) -> None:
        self.said.append((name, *args))
        if name in self.fails:
            raise self.fails[name]

    def is_on_disk(self, _: KvDir) -> bool:
        return True

    def check_budget(self, _: KvDir) -> None: ...

    def staging_name(self) -> str:
        return "staged"

    async def cut(self, of: Any, n_tokens: int) -> StagedFile:
        self._do("cut", of.id, n_tokens)
        return StagedFile(of.kv_dir, "staged", run_of(n_tokens), 1000 * n_tokens)

    async def verify(self, kv_dir: Any, name: str, size: int, kind: Any, _: Any) -> StagedFile:
        self._do("verify", name)
        return StagedFile(kv_dir, name, PART.tokens, size)

    async def commit(self, staged: StagedFile, namespace: Any) -> Any:
        self._do("commit", staged.name)
        return PART

    async def discard(self, kv_dir: Any, name: str) -> None:
        self._do("discard", name)

    async def open(self, of: Any, kv_dir: Any, n_stream: int) -> str:
        self._do("open", of.id, n_stream)
        return "opened"

    async def close(self, of: Any, kv_dir: Any, name: str) -> None:
        self._do("close", name)

    async def overwrite(self, slot: int) -> None:
        self._do("overwrite", slot)

    async def erase(self, slot: int) -> None:
        self._do("erase", slot)

    async def save(self, slot: int, name: str) -> Transfer:
        self._do("save", name)
        return Transfer(500, 500_000, 0.1)

    async def restore(self, slot: int, name: str) -> Transfer:
        self._do("restore", name)
        return Transfer(900, 900_000, 0.2)

    def rewritten(self, what: str, size_bytes: int, seconds: float, problem: str) -> None:
        self.said.append(("rewritten", what, size_bytes, problem))

    def __getattr__(self, name: str) -> Callable[..., None]:  # the rest of Telemetry
        return lambda *_: None


async def test_a_cut_becomes_a_snapshot() -> None:
    world = World()

    assert await world.transfers().cut(CUT) == Saved(PART, 1.0)
    assert world.said == [
        ("cut", "s", 500),
        ("commit", "staged"),
        ("rewritten", "cut", 500_000, ""),
    ]


@pytest.mark.parametrize(
    ("fails", "discarded"),
    [
        ({"cut": KvFileError("no")}, False),
        ({"commit": KvFileError("no")}, True),
        ({"commit": KvFileError("no"), "discard": KvError("gone")}, True),
    ],
)
async def test_a_cut_that_fails_leaves_no_file(fails: Any, discarded: bool) -> None:
    world = World(**fails)

    assert await world.transfers().cut(CUT) == Failed("no")
    assert (("discard", "staged") in world.said) == discarded
    assert ("rewritten", "cut", 0, "no") in world.said


async def test_without_a_store_or_a_backend_nothing_is_moved() -> None:
    world = World()
    info = backend()
    nowhere = world.transfers(store=False)
    restore = ef.Restore(R, A0, LONG)

    assert isinstance(await nowhere.cut(CUT), Failed)
    for transfers, about in ((nowhere, info), (world.transfers(), None)):
        assert isinstance(await transfers.save(SAVE, about), Failed)
        assert isinstance(await transfers.restore(restore, about), Failed)
    assert [name for name, *_ in world.said] == ["rewritten"]


@pytest.mark.parametrize(("held", "rewrite_s"), [(LONG, 0.0), (TWO, 1.0)])
async def test_a_restore_says_what_its_rewriting_took(held: Any, rewrite_s: float) -> None:
    world = World()
    result = await world.transfers().restore(ef.Restore(R, A0, held, erase=True), backend())

    assert result == Restored(900, 0.2, rewrite_s)
    assert ("open", "s", 1) in world.said
    assert [name for name, *_ in world.said if name != "rewritten"] == [
        "open",
        "erase",
        "restore",
        "close",
    ]


async def test_a_backend_that_refuses_is_no_bad_file() -> None:
    world = World(restore=BackendRefusedError("no", backend_status=400))
    result = await world.transfers().restore(ef.Restore(R, A0, LONG), backend())

    assert result == Failed("no", Blame.BACKEND)
    assert ("close", "opened") in world.said

    world = World(open=KvFileError("no"))
    result = await world.transfers().restore(ef.Restore(R, A0, LONG), backend())
    assert result == Failed("no", Blame.FILE)


@pytest.mark.parametrize("error", [BackendTimeoutError("late"), BackendError("broken")])
async def test_late_file_is_removed_when_the_backend_works_again(error: BackendError) -> None:
    """Late files belong to no snapshot.

    A backend may write one long after the router stopped waiting or lost the connection.
    """
    world = World(save=error)
    transfers = world.transfers()
    await transfers.save(SAVE, backend("a"))
    assert world.said.count(("discard", "staged")) == 1

    world.fails.clear()
    await transfers.save(SAVE, backend("a"))
    assert world.said[-2:] == [("commit", "staged"), ("discard", "staged")]
    await transfers.tidy(A)
    assert world.said.count(("discard", "staged")) == 2


@pytest.mark.parametrize(
    ("effect", "fails"),
    [(SAVE, "verify"), (CUT, "cut"), (ef.Restore(R, A0, LONG), "open"), (ef.Erase(R, A0), "erase")],
)
async def test_a_bug_fails_the_effect_alone(effect: Any, fails: str) -> None:
    """Unanswered, the effect would keep its slot out of use for good."""
    transfers = World(**{fails: KeyError("x")}).transfers()
    with capture_logs() as log:
        assert await transfers.carry_out(effect, {A: backend()}) == Failed("KeyError")
    assert [(entry["event"], entry["exc_info"]) for entry in log] == [("transfer_failed", True)]


async def test_each_effect_is_carried_out() -> None:
    transfers, up = World().transfers(), {A: backend()}
    for effect, kind in (
        (SAVE, Saved),
        (CUT, Saved),
        (ef.Restore(R, A0, LONG), Restored),
        (ef.Erase(R, A0), type(None)),
    ):
        assert isinstance(await transfers.carry_out(effect, up), kind)
