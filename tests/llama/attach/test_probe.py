"""Probe of real servers of each memory kind, and of servers that misbehave."""

import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import pytest
from msgspec.structs import replace

from router.base.errors import BackendRefusedError, KvFileError
from router.base.tokens import Tokens
from router.base.types import BackendId, KvDir, MemoryKind, Namespace, Reported, Transfer
from router.llama.attach import probe
from router.llama.attach.learning import Attached, attach
from router.llama.attach.probe import Probe
from router.llama.attach.probe_result import MOVES_CHUNKS, NO_KV, SWA_FULL, WRONG_ENDING, Padding
from router.llama.attach.probe_slots import SlotFolder
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.llama.wire import Shown
from router.store import shapes
from router.store.format import rewrite
from router.store.store import KvStore
from tests.conftest import StartServer
from tests.support.models.tiny_models import N_SWA, tiny_model
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.llama_server import LlamaServer

Q8 = ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on"]
KINDS = {
    "llama": MemoryKind.FULL,
    "gemma3": MemoryKind.SLIDING_WINDOW,
    "lfm2": MemoryKind.HYBRID,
    "mamba": MemoryKind.RECURRENT,
}


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    async with Connections() as made:
        yield made


async def look(server: LlamaServer, connections: Connections, *known: Namespace) -> Attached:
    assert server.kv_dir is not None
    client = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
    return await examine(client, server.kv_dir, *known)


async def examine(client: LlamaClient, folder: Path, *known: Namespace) -> Attached:
    """Attach, and check that nothing is left in the directory."""
    kv_dir = KvDir(str(folder))
    store = KvStore([kv_dir], wall_now=lambda: 1.0)
    await store.load()
    try:
        return await attach(
            client,
            await client.props(),
            folder=SlotFolder(store, kv_dir),
            probe=Probe(client, SlotFolder(store, kv_dir)),
            known=set(known),
        )
    finally:
        await store.aclose()
        assert [name for name in os.listdir(kv_dir) if name.startswith("kvf-")] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [[], ["-fa", "off"], Q8, ["--kv-unified"]], ids=" ".join)
async def test_memory_kind(
    llama_server: StartServer, connections: Connections, kind: str, flags: list[str]
) -> None:
    server = await llama_server(kind, extra_args=flags)
    attached = await look(server, connections)

    info, found = attached.info, attached.probe
    assert info.memory_kind is KINDS[kind]
    assert info.keeps_idle_slots
    assert info.kv_dir is not None
    assert (found.problem, found.note) == (None, None)
    assert found.can_save
    assert found.size_bytes
    assert found.behaviour
    # llama-server.md section 4.3; files with a window are padded.
    assert found.restored_extension == found.n_tokens
    assert bool(found.restored_divergence) == (kind == "llama")
    assert info.cuts == (kind == "llama")
    assert info.window == (N_SWA if kind == "gemma3" else 0)
    assert found.padded is (Padding.WORKS if kind == "gemma3" else Padding.NOT_NEEDED)
    assert info.n_stream == (0 if kind == "mamba" else 1 if flags == ["--kv-unified"] else 2)
    cache_type = "none" if kind == "mamba" else "q8_0" if flags is Q8 else "f16"
    assert found.cache_types == (cache_type, cache_type)


async def test_swa_full(llama_server: StartServer, connections: Connections) -> None:
    """Restored states lack what a prompt that diverges inside the window needs (0.9)."""
    server = await llama_server("gemma3", extra_args=["--swa-full"])
    attached = await look(server, connections)

    assert attached.probe.problem == SWA_FULL
    assert attached.info.memory_kind is MemoryKind.UNKNOWN
    assert attached.info.kv_dir is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [[], ["--cache-ram", "64"]], ids=" ".join)
async def test_a_server_that_moves_what_it_holds(
    llama_server: StartServer, connections: Connections, kind: str, flags: list[str]
) -> None:
    """llama-server's presets for code set `--cache-reuse`; only full attention is moved.

    A RAM cache that remembers the last probe changes nothing.
    """
    plain = await llama_server(kind, extra_args=flags)
    moves = await llama_server(kind, extra_args=["--cache-reuse", "256", *flags])
    for _ in range(2):
        for server, expected in ((plain, False), (moves, kind == "llama")):
            found = await look(server, connections)
            assert found.probe.problem == (MOVES_CHUNKS if expected else None)
            assert (found.info.kv_dir is None) == expected


def with_window(folder: Path, window: int) -> Path:
    """Copy the tiny gemma3 with another window."""
    path = folder / f"gemma3-{window}.gguf"
    shutil.copy(tiny_model("gemma3").path, path)
    model = gguf.GGUFReader(str(path), "r+")
    (at,) = model.fields["gemma3.attention.sliding_window"].data
    model.fields["gemma3.attention.sliding_window"].parts[at][0] = window
    model.data.flush()
    return path


@pytest.mark.parametrize(("window", "ctx", "n_tokens"), [(512, 8192, 1200), (1536, 16384, 4096)])
@pytest.mark.thorough
async def test_longer_window(
    server_argv: list[str],
    connections: Connections,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
    ctx: int,
    n_tokens: int,
) -> None:
    """The text is repeated until the window shows, up to half of what a slot holds."""
    monkeypatch.setattr(probe, "_LONGER_S", 60.0)  # however busy this machine is
    model = with_window(tmp_path, window)
    async with LlamaServer(
        model, slots=2, ctx=ctx, kv_dir=tmp_path / "kv", argv=server_argv
    ) as server:
        attached = await look(server, connections)

    found = attached.probe
    assert (found.window, found.n_tokens, found.padded) == (window, n_tokens, "works")
    assert found.restored_extension == found.n_tokens
    assert (found.problem, found.note) == (None, None)


@pytest.mark.parametrize("because", ["the slot is small", "the server is slow"])
async def test_window_that_is_not_seen(
    server_argv: list[str],
    connections: Connections,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    because: str,
) -> None:
    """An unseen window does not rule out snapshots: a long state will show the window."""
    small = because == "the slot is small"
    window, n_tokens = (4000, 2048) if small else (512, 279)
    monkeypatch.setattr(probe, "_LONGER_S", 60.0 if small else 1e-6)
    model = with_window(tmp_path, window)
    async with LlamaServer(
        model, slots=2, ctx=8192, kv_dir=tmp_path / "kv", argv=server_argv
    ) as server:
        attached = await look(server, connections)
        monkeypatch.setattr(probe, "_LONGER_S", 60.0)
        later = await look(server, connections, attached.info.namespace)

    info, found = attached.info, attached.probe
    assert later.info.namespace == info.namespace  # whether it was slow tells no two models apart
    assert (info.memory_kind, info.window) == (MemoryKind.SLIDING_WINDOW, 0)
    assert info.kv_dir is not None
    assert (found.problem, found.padded, found.n_tokens) == (None, Padding.NEEDED, n_tokens)
    assert f"longer than the {n_tokens} tokens" in (found.note or "")


@pytest.mark.parametrize("how", ["refused", "of no use", "other content"])
async def test_padding_that_does_not_work(
    llama_server: StartServer, connections: Connections, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A padded state that gives no reuse or wrong answers is not worth keeping."""
    real = shapes.pad

    def refuse(*_: object) -> None:
        raise KvFileError("no")

    def useless(_: Path, found: shapes.Inspected) -> shapes.Inspected:
        return shapes.Inspected(found.identity, found.head, found.layout, found.kind, padded=True)

    def spoil(path: Path, found: shapes.Inspected) -> shapes.Inspected:
        """Replace V in each layer of the base block by V of other tokens."""
        made = real(path, found)
        raw = bytearray(path.read_bytes())
        base = next(stream for stream in made.layout.attention[0].streams if stream.cell_count)
        for section in base.v:
            size = section.row_bytes * base.cell_count
            part = raw[section.offset : section.offset + size]
            raw[section.offset : section.offset + size] = part[::-2] + part[::-2]
        path.write_bytes(raw)
        return made

    if how == "refused":
        monkeypatch.setattr(rewrite, "pad", refuse)
    else:
        monkeypatch.setattr(shapes, "pad", useless if how == "of no use" else spoil)
    attached = await look(await llama_server("gemma3"), connections)

    expected = {
        "refused": "cannot be padded",
        "of no use": "of 279 tokens gives",
        "other content": "continues a restored state in another way",
    }
    assert expected[how] in (attached.probe.problem or "")
    assert attached.probe.padded is Padding.FAILS
    assert attached.info.memory_kind is MemoryKind.SLIDING_WINDOW
    assert attached.info.kv_dir is None


async def test_same_model_same_namespace(
    llama_server: StartServer, connections: Connections, tmp_path: Path
) -> None:
    """Neither batch sizes nor the number of streams matter: files are rewritten for streams.

    Another RoPE base, which the server neither reports nor checks, makes another namespace. Another
    cache type does too.
    """
    namespaces: list[Namespace] = []
    started: list[tuple[int, list[str]]] = [
        (2, []),
        (2, ["-ub", "64", "-b", "64"]),
        (1, []),
        (2, ["--rope-freq-base", "500000"]),
        (2, Q8),
    ]
    for i, (slots, extra) in enumerate(started):
        server = await llama_server(slots=slots, extra_args=extra, kv_dir=tmp_path / str(i))
        namespaces.append((await look(server, connections, *namespaces)).info.namespace)
    same, batches, one_stream, rope, cache = namespaces

    assert same == batches == one_stream
    assert len({same, rope, cache}) == 3


# --- a server that does something else ------------------------------------------------------------


@dataclass
class Oddities:
    """Faults of a server, each with the number of the restore that it follows; 0: never.

    Restore 1 is of the whole file, extended; 2 of the whole, diverging; 3 of the cut.
    """

    other_answers: int = 0
    other_endings: int = 0  # of how many prompts that diverge after the second restore
    nothing_cached: int = 0
    refused: int = 0
    slow_save: int = 0  # which save
    restores: int = field(default=0, init=False)
    saves: int = field(default=0, init=False)


class OddClient(LlamaClient):
    """A client of a fake, with the answers of a faulty server."""

    def __init__(self, url: str, connections: Connections, odd: Oddities) -> None:
        super().__init__(BackendId("a"), url, connections, Timeouts())
        self._odd = odd

    async def save(self, slot: int, name: str) -> Transfer:
        self._odd.saves += 1
        slow = self._odd.saves == self._odd.slow_save
        return replace(await super().save(slot, name), seconds=0.3 if slow else 0.001)

    async def restore(self, slot: int, name: str) -> Transfer:
        self._odd.restores += 1
        if self._odd.restores == self._odd.refused:
            raise BackendRefusedError("no", backend_status=400)
        return await super().restore(slot, name)

    async def prefill(self, slot: int, tokens: Tokens, **more: Any) -> Reported:
        reported = await super().prefill(slot, tokens, **more)
        odd = self._odd.restores == self._odd.nothing_cached != 0
        return Reported(prompt_s=0.1, cached_tokens=0 if odd else reported.cached_tokens)

    async def fingerprint(self, slot: int, prompt: Tokens | Shown) -> list[tuple[int, float]]:
        await super().fingerprint(slot, prompt)
        odd = self._odd.restores == self._odd.other_answers != 0
        if self._odd.restores == 2 and self._odd.other_endings:
            self._odd.other_endings -= 1
            odd = True
        return [(5, -1.5 if odd else -0.5), (6, -2.5)]


async def odd_one(tmp_path: Path, **oddities: int) -> Attached:
    odd = Oddities(**oddities)
    async with FakeLlama(kv_dir=tmp_path) as fake, Connections() as connections:
        attached = await examine(OddClient(fake.url, connections, odd), tmp_path)
        assert fake.violations == []
        assert [slot.tokens for slot in fake.slots] == [[], []]
    assert odd.restores >= max(oddities.values(), default=0)
    return attached


async def test_one_slow_save_says_nothing(tmp_path: Path) -> None:
    """A busy machine: with its price for a save, no save of a small model would pay."""
    assert (await odd_one(tmp_path, slow_save=1)).info.save_s == 0.001


async def test_nothing_odd(tmp_path: Path) -> None:
    attached = await odd_one(tmp_path)
    assert (attached.probe.problem, attached.probe.note, attached.info.cuts) == (None, None, True)


@pytest.mark.parametrize(
    ("oddities", "problem"),
    [
        ({"other_answers": 1}, "in another way than a computed one"),
        ({"nothing_cached": 1}, "gives no cached tokens"),
        ({"refused": 1}, "refuses to restore"),
        ({"refused": 2}, "refuses to restore"),
    ],
)
async def test_odd_restore(tmp_path: Path, oddities: dict[str, int], problem: str) -> None:
    """A faulty server gets no snapshots: a doubtful state is worse than none."""
    attached = await odd_one(tmp_path, **oddities)

    assert problem in (attached.probe.problem or "")
    assert attached.info.kv_dir is None
    assert not attached.info.cuts


async def test_not_what_the_file_looks_like(tmp_path: Path) -> None:
    """A server that reuses nothing when a prompt diverges is given whole states only."""
    attached = await odd_one(tmp_path, nothing_cached=2)

    assert attached.probe.problem is None
    assert attached.info.memory_kind is MemoryKind.OPAQUE
    assert attached.info.kv_dir is not None
    assert not attached.info.cuts


async def test_a_diverging_prompt_that_is_answered_otherwise(tmp_path: Path) -> None:
    """Going back in a restored state must give what a slot gives that computed all of it."""
    attached = await odd_one(tmp_path, other_endings=1)

    assert attached.probe.problem == WRONG_ENDING
    assert attached.info.memory_kind is MemoryKind.UNKNOWN
    assert attached.info.kv_dir is None


@pytest.mark.parametrize(
    ("oddities", "note"),
    [
        ({"other_answers": 3}, "is of no use"),
        ({"nothing_cached": 3}, "is of no use"),
        ({"refused": 3}, "refuses to restore"),
    ],
)
async def test_odd_cut(tmp_path: Path, oddities: dict[str, int], note: str) -> None:
    """Snapshots of whole states are still used."""
    attached = await odd_one(tmp_path, **oddities)

    assert not attached.info.cuts
    assert note in (attached.probe.note or "")
    assert attached.probe.problem is None
    assert attached.info.kv_dir is not None


async def test_file_that_cannot_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise KvFileError("cells in a strange order")

    monkeypatch.setattr(rewrite, "cut", refuse)
    attached = await odd_one(tmp_path, refused=0)

    assert not attached.info.cuts
    assert "cells in a strange order" in (attached.probe.note or "")
    assert attached.info.kv_dir is not None


async def test_a_model_without_kv_is_used_for_what_it_can(
    tmp_path: Path, connections: Connections
) -> None:
    """A server of such a model refuses every completion, but is used for other routes.

    Any other refusal is a reason not to use a server.
    """
    async with FakeLlama(kv_dir=tmp_path) as fake:
        client = LlamaClient(BackendId("a"), fake.url, connections, Timeouts())
        fake.faults.refuses = "the current context does not support logits computation. skipping"
        found = await examine(client, tmp_path)
        assert (found.info.generates, found.info.kv_dir) == (False, None)
        assert (found.probe.problem, found.probe.note) == (None, NO_KV)

        fake.faults.refuses = "out of memory"
        with pytest.raises(BackendRefusedError, match="out of memory"):
            await examine(client, tmp_path)
