"""What a backend can do, found out by doing it once, on a slot that nobody uses.

Prefill a small text, save, erase, restore, extend, diverge: from what is cached afterwards
follows the memory kind. What kvferry makes of state files is tried too: a padded window, a cut.
`kvferry doctor` shows the same.
"""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from router.base.errors import BackendError, BackendRefusedError, KvError, KvFileError
from router.base.ports import SnapshotStore
from router.base.tokens import Tokens, count, head, join, pack, tail
from router.base.types import MemoryKind, Place, SlotStatus
from router.llama.attach.namespace import Behaviour, alike
from router.llama.attach.probe_slots import (
    discard,
    erase,
    has_ram_cache,
    keeps_idle_slots,
    moves_chunks,
    put_aside,
    put_back,
)
from router.llama.client import LlamaClient
from router.store import files, shapes
from router.store.format.head import read_head
from router.store.format.layout import Layout, read_layout
from router.store.io_pool import QUICK_S

# Long enough that RoPE settings show in what follows, short enough for a second on a CPU.
TEXT = (
    "The ferry leaves the northern pier at half past six and crosses the strait in forty minutes. "
    "On board, 213 passengers read, sleep or look at the water; the cook counts cups, the mate "
    "counts heads, and nobody counts the gulls. "
) * 2
# Tokens that outgrow a window of 1,024 (gemma 3) and one of 4,096 (mistral, phi 3).
_LONGER = (1200, 4600)
_LONGER_S = 2.0  # what such a text may take; a server is not to be kept waiting for a hint
# A chunk that a server which moves some will move: presets have 256. Shorter on a slow one.
_CHUNK = 520

NO_SWA_FULL = "restart it without --swa-full"
NO_CACHE_REUSE = "restart it without --cache-reuse"
# What a server says to every completion of a model without KV (server-context.cpp:3388).
_NO_LOGITS = "logits computation"
NO_KV = "its model is one for embeddings: it answers no completions, and its slots hold no KV"
SWA_FULL = (
    "a restored state could give wrong answers, since llama-server was started with --swa-full or "
    f"remembers in a way that is not known here; {NO_SWA_FULL}"
)
MOVES_CHUNKS = (
    "it moves what a slot holds to other positions (--cache-reuse, also in llama-server's own "
    "presets for code), which is not what a prefill gives, and so is not to be saved; "
    f"{NO_CACHE_REUSE}"
)


class Padding(StrEnum):
    """Whether state files have to be padded to be of use (llama-server.md section 4.4)."""

    NOT_NEEDED = "not needed"
    NEEDED = "needed"  # and not tried: the window is longer than the text
    WORKS = "works"
    FAILS = "fails"


@dataclass(slots=True)
class Probe:
    """What was found. Seconds, bytes, tokens; None where it could not be measured."""

    memory_kind: MemoryKind = MemoryKind.UNKNOWN
    layout: Layout | None = None
    behaviour: Behaviour = field(default_factory=list)
    keeps_idle_slots: bool = True
    n_tokens: int = 0  # of the text that was saved
    prefill_s: float | None = None
    save_s: float | None = None
    restore_s: float | None = None
    size_bytes: int | None = None
    can_save: bool = False
    restored_extension: int | None = None  # tokens cached after restore, prompt extended
    restored_divergence: int | None = None  # the same, prompt diverging half-way
    window: int = 0  # tokens of the sliding window; 0: none, or not seen
    padded: Padding = Padding.NOT_NEEDED
    cuts: bool = False  # a prefix cut out of the file did what the whole did
    problem: str | None = None  # why snapshots are off, in words for the operator
    note: str | None = None  # what is worth knowing and stops nothing
    ram_cache: bool | None = None  # prompts come back from main memory; None: not asked
    untried: bool = False  # there was no idle slot to try anything in
    generates: bool = True  # False: it refuses every completion

    @property
    def n_stream(self) -> int:
        """KV streams of its state files; 0 without attention."""
        return self.layout.n_stream if self.layout is not None else 1

    @property
    def cache_types(self) -> tuple[str, str]:
        """Of K and V; "none" without attention."""
        return shapes.cache_types(self.layout) if self.layout is not None else ("none", "none")

    @property
    def usable(self) -> bool:
        """States can be saved and restored, and that was seen to be right."""
        seen = self.layout is not None and self.memory_kind is not MemoryKind.UNKNOWN
        return seen and self.problem is None


async def probe(
    client: LlamaClient,
    store: SnapshotStore | None,
    place: Place | None,
    slots: list[SlotStatus],
    *,
    tenants: bool = False,
) -> Probe:
    """Probe one backend. Raises BackendError if it goes away; all else is in the result.

    Works on an idle slot, an empty one if there is one; what that slot held is put back.
    `tenants` are to be kept apart: see whether it would.
    """
    found = Probe()
    idle = [slot for slot in slots if not slot.is_processing]
    if not idle:
        found.problem = "every slot was busy when it was to be tried; it will be, later"
        found.untried = True
        return found
    slot = min(idle, key=lambda s: (s.n_tokens or 0, s.index))
    ids = await client.tokenize(TEXT, add_special=True, parse_special=True)
    room = max((slot.n_ctx or 512) // 2, 8)
    tokens = head(pack(ids), room)
    keep = await put_aside(client, store, place, slot)
    try:
        if store is None or place is None:
            found.problem = "no kv_dir is configured for this backend"
            await _prefill(client, slot.index, tokens, found)
        else:
            trial = _Trial(client, store, place, slot.index, room, found)
            try:
                await trial.run(tokens)
            finally:
                await discard(store, place, trial.name)
        await erase(client, slot.index)
        found.behaviour = await client.fingerprint(slot.index, tokens)
        found.keeps_idle_slots = await keeps_idle_slots(client, slots, slot, tokens)
        if tenants:
            found.ram_cache = await has_ram_cache(client, slot.index, tokens)
    except BackendRefusedError as error:
        if _NO_LOGITS not in str(error):
            raise
        found.generates, found.problem, found.note = False, None, NO_KV
    finally:
        await put_back(client, store, place, slot, keep)
    return found


async def _prefill(client: LlamaClient, slot: int, tokens: Tokens, found: Probe) -> None:
    """From nothing, so that neither its time nor its result is another request's."""
    await erase(client, slot)
    reported = await client.prefill(slot, tokens)
    found.n_tokens = count(tokens)
    found.prefill_s = reported.prompt_s if reported.cached_tokens == 0 else None


class _Trial:
    """Saving and restoring, tried in one slot. What is wrong goes into `found.problem`, and ends
    the trial: a server is used without snapshots rather than with doubtful ones."""

    def __init__(
        self,
        client: LlamaClient,
        store: SnapshotStore,
        place: Place,
        slot: int,
        room: int,
        found: Probe,
    ) -> None:
        self.name = store.staging_name()
        self._client = client
        self._store = store
        self._place = place
        self._slot = slot
        self._room = room  # tokens that the text may have
        self._found = found

    async def run(self, tokens: Tokens) -> None:
        """All of it. Raises BackendError if the server goes away."""
        found = self._found
        fresh = await self._save(tokens)
        if found.layout is None:
            return
        found.memory_kind = found.layout.memory_kind
        if found.memory_kind is MemoryKind.SLIDING_WINDOW:
            if await self._keeps_all(tokens):
                found.memory_kind, found.problem = MemoryKind.UNKNOWN, SWA_FULL
            if found.problem is None:
                tokens, fresh = await self._outgrow_window(tokens, fresh)
        if found.problem is None and await self._verify():
            await self._restore(tokens, fresh)
        # Of other kinds nothing can be moved, but for --swa-full.
        if found.problem is None and found.memory_kind is MemoryKind.FULL:
            rate = _rate(found)
            longest = _CHUNK if rate is None else min(_CHUNK, int(_LONGER_S / 2 / rate))
            chunk = head(join([tokens] * (_CHUNK // count(tokens) + 1)), min(longest, self._room))
            if chunk and await moves_chunks(self._client, self._slot, chunk):
                found.problem = MOVES_CHUNKS

    async def _save(self, tokens: Tokens) -> Behaviour:
        """Compute and save `tokens`; the layout of the file, and what comes after two more."""
        found = self._found
        await _prefill(self._client, self._slot, tokens, found)
        try:
            saved = await self._client.save(self._slot, self.name)
        except BackendError as error:
            found.problem = f"the server refuses to save a slot: {error}"
            return []
        found.can_save = True
        found.save_s, found.size_bytes = saved.seconds, saved.size_bytes
        path = Path(self._place) / self.name
        try:
            async with asyncio.timeout(QUICK_S):
                found.layout = await asyncio.to_thread(_layout_of, path, saved.size_bytes)
        except FileNotFoundError:
            found.problem = (
                "the server saved a slot, but no file appeared in kv_dir: is it the directory "
                "that the server was started with (--slot-save-path), seen from this machine?"
            )
        except TimeoutError:
            found.problem = "kv_dir does not answer"
        except (KvFileError, OSError) as error:
            found.problem = f"the state file cannot be used: {error}"
        return await self._client.fingerprint(self._slot, _extended(tokens, 2))

    async def _keeps_all(self, tokens: Tokens) -> bool:
        """A file with a window serves an extension as the server wrote it.

        With --swa-full it does. The window is not in such a file, and yet the server reuses it
        for prompts that diverge inside of it (llama-server.md section 0.9).
        """
        return await self._reuse(self.name, _extended(tokens, 1)) >= count(tokens)

    async def _outgrow_window(self, tokens: Tokens, fresh: Behaviour) -> tuple[Tokens, Behaviour]:
        """Longer texts until the window shows, while they cost next to nothing."""
        found, text, rate = self._found, tokens, _rate(self._found)
        for length in _LONGER:
            if _window(found.layout) or rate is None or length * rate > _LONGER_S:
                break
            longer = head(join([text] * (length // count(text) + 1)), min(length, self._room))
            if count(longer) <= count(tokens):
                break
            tokens, fresh = longer, await self._save(longer)
            if found.problem is not None:
                break
        found.window = _window(found.layout)
        found.padded = Padding.NEEDED
        if not found.window:
            found.note = (
                f"its sliding window is longer than the {count(tokens)} tokens that were tried: "
                "it will be learned from the first long state"
            )
        return tokens, fresh

    async def _verify(self) -> bool:
        """The file as the store will use it, padded if need be."""
        found = self._found
        assert found.size_bytes is not None
        try:
            staged = await self._store.verify(self._place, self.name, found.size_bytes)
        except KvError as error:
            found.problem = f"the state file cannot be used: {error}"
            return False
        found.size_bytes = staged.size_bytes
        if found.window and not staged.shape.extendable:
            found.padded = Padding.FAILS
            found.problem = "its state files cannot be padded, and without it give nothing"
        return found.problem is None

    async def _restore(self, tokens: Tokens, fresh: Behaviour) -> None:
        """Extend and diverge; `fresh` is what never left its slot says."""
        found, n = self._found, count(tokens)
        found.restored_extension = await self._reuse(self.name, _extended(tokens, 1))
        again = await self._client.fingerprint(self._slot, _extended(tokens, 2))
        half = head(tokens, (n + 1) // 2)
        # Not the beginning again: the text is one paragraph twice, and would just go on.
        other = tail(tokens, n - n // 4)
        found.restored_divergence = await self._reuse(self.name, join([half, other]))
        if found.problem is not None:
            return
        if found.memory_kind is MemoryKind.FULL and found.restored_divergence < n // 2:
            found.memory_kind = MemoryKind.UNKNOWN
            found.problem = (
                f"a restored state gives {found.restored_divergence or 'no'} cached tokens to a "
                f"prompt that leaves it after {count(half)}: not what its files look like"
            )
            return
        if found.padded is Padding.NEEDED and not found.window:
            return
        if found.restored_extension < n:
            found.problem = (
                f"a restored {found.memory_kind} state of {n} tokens gives "
                f"{found.restored_extension or 'no'} cached tokens on this server"
            )
        elif not alike(again, fresh):
            found.problem = (
                "the model continues a restored state in another way than a computed one"
            )
        if found.padded is Padding.NEEDED:
            found.padded = Padding.WORKS if found.problem is None else Padding.FAILS
        if found.memory_kind is MemoryKind.FULL and found.problem is None:
            await self._try_cut(half, head(other, 2))

    async def _try_cut(self, half: Tokens, then: Tokens) -> None:
        """The first half of the file must do what the whole does when a prompt leaves it there.

        The slot has just done that: it holds `half` and other tokens behind it.
        """
        found, name = self._found, self._store.staging_name()
        prompt = join([half, then])
        whole = await self._client.fingerprint(self._slot, prompt)
        source, target = Path(self._place) / self.name, Path(self._place) / name
        try:
            async with asyncio.timeout(QUICK_S):
                size = await asyncio.to_thread(_cut, source, target, count(half))
        except (KvFileError, OSError) as error:
            found.note = f"no prefix can be cut out of its state files: {error}"
            return
        try:
            await self._store.verify(self._place, name, size)
            cached = await self._reuse(name, head(prompt, count(half) + 1))
            again = await self._client.fingerprint(self._slot, prompt)
        except KvError as error:
            found.note = f"no prefix can be cut out of its state files: {error}"
            return
        finally:
            await discard(self._store, self._place, name)
        found.cuts = cached == count(half) and alike(again, whole)
        if not found.cuts:
            # What _reuse says of a refused restore is about this file, and stops nothing.
            found.note = found.problem or "a prefix that was cut out of a state file is of no use"
            found.problem = None

    async def _reuse(self, name: str, prompt: Tokens) -> int:
        """Tokens of `prompt` that are cached after a file was restored."""
        await self._client.erase(self._slot)
        try:
            restored = await self._client.restore(self._slot, name)
        except BackendError as error:
            self._found.problem = f"the server refuses to restore what it saved: {error}"
            return 0
        self._found.restore_s = restored.seconds
        return (await self._client.prefill(self._slot, prompt)).cached_tokens or 0


def _extended(tokens: Tokens, n: int) -> Tokens:
    return join([tokens, head(tokens, n)])


def _rate(found: Probe) -> float | None:
    """Seconds for a token of prefill."""
    return found.prefill_s / found.n_tokens if found.prefill_s else None


def _window(layout: Layout | None) -> int:
    """Cells of the second block, if it has forgotten some that the first has; else 0."""
    if layout is None or len(layout.attention) < 2:
        return 0
    base, window = layout.attention[:2]
    return window.cell_count if window.cell_count < base.cell_count else 0


def _layout_of(path: Path, size_bytes: int) -> Layout:
    """Blocking. Raises FileNotFoundError, OSError, KvFileError."""
    with path.open("rb") as file:
        actual = path.stat().st_size
        if actual != size_bytes:
            raise KvFileError(f"{size_bytes} bytes were reported and {actual} are there")
        return read_layout(file, read_head(file), size_bytes)


def _cut(source: Path, target: Path, n_tokens: int) -> int:
    """Blocking; returns the size. Raises OSError, KvFileError."""
    return shapes.cut(source, target, files.identity(source), n_tokens).identity.size_bytes
