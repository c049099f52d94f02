"""Probe of a backend: try its abilities once, in an idle slot.

Prefill a small text, save, erase, restore, extend, diverge: the cached tokens and the likeliest
next tokens afterwards show the memory kind. The blocks of the state file only say what else may be
tried: a padded window, a cut. What was not seen to work is not used. `kvferry doctor` shows the
same results.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    KvError,
    KvFileError,
    ProbePutOffError,
)
from router.base.ports import SnapshotStore
from router.base.tokens import Tokens, count, head, join, pack, tail, unpack
from router.base.types import KvDir, MemoryKind, SlotStatus
from router.llama.attach.namespace import Behaviour, alike
from router.llama.attach.probe_result import (
    MOVES_CHUNKS,
    NO_EXTENSION,
    NO_KV,
    SWA_FULL,
    WRONG_ENDING,
    Padding,
    ProbeResult,
)
from router.llama.attach.probe_slots import (
    discard,
    erase,
    has_ram_cache,
    infill_answers,
    keeps_idle_slots,
    moves_chunks,
    places_by_prefix,
    put_aside,
    put_back,
)
from router.llama.client import LlamaClient
from router.store import files, shapes
from router.store.format.head import Head, read_head
from router.store.format.layout import OPAQUE, Layout, read_layout
from router.store.io_pool import QUICK_S

# Long enough that RoPE settings show in what follows, short enough for a second on a CPU.
TEXT = (
    "The ferry leaves the northern pier at half past six and crosses the strait in forty minutes. "
    "On board, 213 passengers read, sleep or look at the water; the cook counts cups, the mate "
    "counts heads, and nobody counts the gulls. "
) * 2
# Tokens that outgrow a window of 1,024 (gemma 3) and one of 4,096 (mistral, phi 3).
_LONGER = (1200, 4600)
_LONGER_S = 2.0  # seconds for such a text: a hint must not cost the server more
# Tokens of a chunk that --cache-reuse would move (presets: 256). Shorter on a slow server.
_CHUNK = 520
# Tokens that a live slot goes back by: more than what lies between a checkpoint and the end.
_BACK = 24

# In a server's answer to every completion of a model without KV (server-context.cpp:3388).
_NO_LOGITS = "logits computation"


async def probe(
    client: LlamaClient,
    store: SnapshotStore | None,
    kv_dir: KvDir | None,
    slots: list[SlotStatus],
    *,
    tenants: bool = False,
    makes_way: Callable[[], bool] = lambda: False,
) -> ProbeResult:
    """Probe one backend. Raises BackendError if it goes away; all else is in the result.

    Works in an idle slot, an empty one if there is one; the slot's content is restored.
    `tenants`: tenants are kept apart, so look for a RAM cache that mixes them. `makes_way` is asked
    between the steps: if it is time to end, ProbePutOffError is raised and nothing is known.
    """
    found, slot = ProbeResult(), _idle(slots)
    if slot is None:
        found.problem = "every slot was busy; the router probes it again later"
        found.untried = True
        return found
    room, tokens = _room(slot), await _text(client, slot)
    keep = await put_aside(client, store, kv_dir, slot)
    try:
        if store is None or kv_dir is None:
            found.problem = "no kv_dir is configured for this backend"
            await _prefill(client, slot.index, tokens, found)
        else:
            trial = _Trial(client, store, kv_dir, slot.index, room, found, makes_way)
            try:
                await trial.run(tokens)
            finally:
                await discard(store, kv_dir, trial.name)
        put_off_if(makes_way)
        await erase(client, slot.index)
        found.behaviour = await client.fingerprint(slot.index, tokens)
        found.infill = await infill_answers(client, slot.index)
        put_off_if(makes_way)
        found.by_prefix = await places_by_prefix(client, slots, slot, tokens)
        found.keeps_idle_slots = await keeps_idle_slots(client, slots, slot, tokens)
        if tenants:
            found.ram_cache = await has_ram_cache(client, slot.index, tokens)
    except BackendRefusedError as error:
        if _NO_LOGITS not in str(error):
            raise
        found.generates, found.problem, found.note = False, None, NO_KV
        found.restores_wrong = True
    finally:
        await put_back(client, store, kv_dir, slot, keep, restores=not found.restores_wrong)
    return found


def put_off_if(makes_way: Callable[[], bool]) -> None:
    """Raise ProbePutOffError if the probe is to make way for a request."""
    if makes_way():
        raise ProbePutOffError


async def is_still_so(
    client: LlamaClient,
    store: SnapshotStore | None,
    kv_dir: KvDir | None,
    slots: list[SlotStatus],
    before: ProbeResult,
) -> bool:
    """Return whether the model predicts what it did in the probe of an equal process before.

    Layout and speed depend on what the process was started with. What it predicts depends on files
    as well, which may have been replaced: adapters, control vectors, what a script reads.
    """
    if not before.behaviour or not before.generates:
        return True
    slot = _idle(slots)
    if slot is None:
        return False
    keep = await put_aside(client, store, kv_dir, slot)
    try:
        tokens = await _text(client, slot)
        await erase(client, slot.index)
        return alike(await client.fingerprint(slot.index, tokens), before.behaviour)
    finally:
        await put_back(client, store, kv_dir, slot, keep)


def _idle(slots: list[SlotStatus]) -> SlotStatus | None:
    """Return the idle slot that holds least; None: all are busy."""
    idle = (slot for slot in slots if not slot.is_processing)
    return min(idle, key=lambda s: (s.n_tokens or 0, s.index), default=None)


async def _text(client: LlamaClient, slot: SlotStatus) -> Tokens:
    """Return the tokens of the probe's text, as many as fit into half of a slot."""
    ids = await client.tokenize(TEXT, add_special=True, parse_special=True)
    return head(pack(ids), _room(slot))


def _room(slot: SlotStatus) -> int:
    return max((slot.n_ctx or 512) // 2, 8)


async def _prefill(client: LlamaClient, slot: int, tokens: Tokens, found: ProbeResult) -> None:
    """Prefill an erased slot, so that time and result are its own."""
    await erase(client, slot)
    reported = await client.prefill(slot, tokens)
    found.n_tokens = count(tokens)
    found.prefill_s = reported.prompt_s if reported.cached_tokens == 0 else None


class _Trial:
    """Trial of saving and restoring in one slot.

    A failure goes into `found.problem` and ends the trial: a server is used without snapshots
    rather than with doubtful ones.
    """

    def __init__(
        self,
        client: LlamaClient,
        store: SnapshotStore,
        kv_dir: KvDir,
        slot: int,
        room: int,
        found: ProbeResult,
        makes_way: Callable[[], bool],
    ) -> None:
        self._makes_way = makes_way
        self.name = store.staging_name()
        self._client = client
        self._store = store
        self._kv_dir = kv_dir
        self._slot = slot
        self._room = room  # tokens that the text may have
        self._found = found

    async def run(self, tokens: Tokens) -> None:
        """Run the whole trial. Raises BackendError if the server goes away.

        Several attention blocks are those of a sliding window or of a sparse attention. With
        `--swa-full` a window serves every prompt, too, until it is outgrown.
        """
        found = self._found
        fresh = await self._save(tokens)
        if found.layout is None:
            return
        found.memory_kind = found.layout.memory_kind
        if found.memory_kind is MemoryKind.SLIDING_WINDOW:
            whole = await self._keeps_all(tokens)
            if whole:
                found.memory_kind = MemoryKind.FULL
            if found.problem is None:
                tokens, fresh = await self._outgrow_window(tokens, fresh)
            if whole and found.window:
                found.memory_kind, found.problem = MemoryKind.UNKNOWN, SWA_FULL
                found.restores_wrong = True
        if found.problem is None and not found.extends:
            found.problem = NO_EXTENSION
        if found.problem is None and await self._verify():
            await self._restore(tokens, fresh)
        # KV of other memory kinds cannot be moved, except with --swa-full.
        if found.problem is None and found.memory_kind is MemoryKind.FULL:
            rate = _rate(found)
            longest = _CHUNK if rate is None else min(_CHUNK, int(_LONGER_S / 2 / rate))
            chunk = head(join([tokens] * (_CHUNK // count(tokens) + 1)), min(longest, self._room))
            if chunk and await moves_chunks(self._client, self._slot, chunk):
                found.problem = MOVES_CHUNKS

    async def _save(self, tokens: Tokens) -> Behaviour:
        """Compute and save `tokens`, read the file; return what two more tokens predict.

        The live slot is tried as well: extended, and with the same prompt again.
        """
        found = self._found
        put_off_if(self._makes_way)
        found.live_extension = found.live_again = found.live_back = None
        await _prefill(self._client, self._slot, tokens, found)
        put_off_if(self._makes_way)
        try:
            saved = await self._client.save(self._slot, self.name)
        except BackendError as error:
            found.problem = f"the server refuses to save a slot: {error}"
            return []
        found.can_save = True
        found.save_s, found.size_bytes = saved.seconds, saved.size_bytes
        path = Path(self._kv_dir) / self.name
        try:
            async with asyncio.timeout(QUICK_S):
                seen = await asyncio.to_thread(_read, path, saved.size_bytes)
            if seen.head.tokens != tokens:
                raise KvFileError("its head names other tokens than those that were computed")
            found.layout, found.unread = seen.layout, seen.unread
            found.state_version = seen.head.version
        except FileNotFoundError:
            found.problem = (
                "the server saved a slot, but no file appeared in kv_dir: it must be the server's "
                "--slot-save-path, as seen from this machine"
            )
        except TimeoutError:
            found.problem = "kv_dir does not answer"
        except (KvFileError, OSError) as error:
            found.problem = f"the state file cannot be used: {error}"
        if found.layout is None or found.problem is not None:
            return []
        longer = await self._client.prefill(self._slot, _extended(tokens, 1))
        found.live_extension = longer.cached_tokens
        if longer.computed_tokens == 1:
            found.output_s = longer.prompt_s
        fresh = await self._client.fingerprint(self._slot, _extended(tokens, 2))
        found.live_again = (await self._client.prefill(self._slot, tokens)).cached_tokens
        held = tokens
        if found.live_again and found.layout.memory_kind is not MemoryKind.FULL:
            await self._client.prefill(self._slot, _extended(tokens, _BACK))
            held = join([tokens, tail(tokens, _BACK // 2)])
            found.live_back = (await self._client.prefill(self._slot, held)).cached_tokens
        if found.extends:
            longer = await self._client.prefill(self._slot, _extended(held, 1), cache=None)
            found.caches_by_default = longer.cached_tokens != 0
        return fresh

    async def _keeps_all(self, tokens: Tokens) -> bool:
        """Return whether an unpadded file with further blocks serves an extended prompt.

        One with a window does only with --swa-full. The window is not in such a file, yet the
        server reuses the file for prompts that diverge inside the window (llama-server.md 0.9).
        """
        return await self._reuse(self.name, _extended(tokens, 1)) >= count(tokens)

    async def _outgrow_window(self, tokens: Tokens, fresh: Behaviour) -> tuple[Tokens, Behaviour]:
        """Save longer texts until the window shows, while they take at most `_LONGER_S`."""
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
        if found.memory_kind is not MemoryKind.SLIDING_WINDOW:
            return tokens, fresh
        found.padded = Padding.NEEDED
        if not found.window:
            found.note = (
                f"its sliding window is longer than the {count(tokens)} tokens that were tried: "
                "the window will be learned from the first long state"
            )
        return tokens, fresh

    async def _verify(self) -> bool:
        """Verify the file as the store uses it, padded if needed; False on a problem."""
        found = self._found
        assert found.size_bytes is not None
        try:
            staged = await self._store.verify(
                self._kv_dir, self.name, found.size_bytes, found.memory_kind
            )
        except KvError as error:
            found.problem = f"the state file cannot be used: {error}"
            return False
        found.size_bytes = staged.size_bytes
        if found.window and not staged.shape.extendable:
            found.padded = Padding.FAILS
            found.problem = "its state files cannot be padded, so nothing in them is reused"
        return found.problem is None

    async def _restore(self, tokens: Tokens, fresh: Behaviour) -> None:
        """Restore, extend and diverge; `fresh` is the behaviour of a state never saved.

        The slot holds another text of the same length before, or has held it: on some builds its
        checkpoints outlive an erase and a restore (seen on b9713).
        """
        found, n = self._found, count(tokens)
        if found.memory_kind is not MemoryKind.FULL:
            await self._client.prefill(self._slot, pack(reversed(unpack(tokens))))
        found.restored_extension = await self._reuse(self.name, _extended(tokens, 1))
        again = await self._client.fingerprint(self._slot, _extended(tokens, 2))
        half = head(tokens, (n + 1) // 2)
        # Not the beginning: the text is one paragraph twice, and would just continue after `half`.
        other = tail(tokens, n - n // 4)
        found.restored_divergence = await self._reuse(self.name, join([half, other]))
        if found.problem is None and found.restored_divergence:
            await self._compare_ending(tokens, join([half, other]))
        if found.problem is not None:
            return
        if found.memory_kind is MemoryKind.FULL and found.restored_divergence < n // 2:
            # The file has all positions, and the server does not go back to them.
            found.memory_kind, found.layout = MemoryKind.OPAQUE, OPAQUE
            found.unread = "its server reuses whole states only"
        if found.padded is Padding.NEEDED and not found.window:
            return
        if found.restored_extension < n:
            found.problem = (
                f"a restored {found.memory_kind} state of {n} tokens gives "
                f"{found.restored_extension or 'no'} cached tokens on this server"
            )
        elif not alike(again, fresh):
            found.restores_wrong = True
            found.problem = (
                "the model continues a restored state in another way than a computed one"
            )
        if found.padded is Padding.NEEDED:
            found.padded = Padding.WORKS if found.problem is None else Padding.FAILS
        if found.memory_kind is MemoryKind.FULL and found.problem is None:
            await self._try_cut(half, head(other, 2))

    async def _compare_ending(self, tokens: Tokens, prompt: Tokens) -> None:
        """Compare a prompt that went back in a restored state with one that did in a live slot.

        Both are computed in the same parts: other batches change the last digits. (SmolLM2's log
        probabilities differ by 0.23 if the beginning is computed by itself.)
        """
        found = self._found
        put_off_if(self._makes_way)
        restored = await self._client.fingerprint(self._slot, _extended(prompt, 1))
        await erase(self._client, self._slot)
        for part in (tokens, prompt):
            await self._client.prefill(self._slot, part)
        unmoved = await self._client.fingerprint(self._slot, _extended(prompt, 1))
        if not alike(restored, unmoved):
            found.memory_kind, found.problem = MemoryKind.UNKNOWN, WRONG_ENDING
            found.restores_wrong = True

    async def _try_cut(self, half: Tokens, then: Tokens) -> None:
        """Test that half of the file works like a cold start for a prompt that diverges there.

        The slot has just computed such a prompt: it holds `half` and other tokens behind it.
        """
        found, name = self._found, self._store.staging_name()
        prompt = join([half, then])
        whole = await self._client.fingerprint(self._slot, prompt)
        source, target = Path(self._kv_dir) / self.name, Path(self._kv_dir) / name
        try:
            async with asyncio.timeout(QUICK_S):
                size = await asyncio.to_thread(_cut, source, target, count(half))
        except (KvFileError, OSError) as error:
            found.note = f"no prefix can be cut out of its state files: {error}"
            return
        try:
            await self._store.verify(self._kv_dir, name, size, MemoryKind.FULL)
            cached = await self._reuse(name, head(prompt, count(half) + 1))
            again = await self._client.fingerprint(self._slot, prompt)
        except KvError as error:
            found.note = f"no prefix can be cut out of its state files: {error}"
            return
        finally:
            await discard(self._store, self._kv_dir, name)
        found.cuts = cached == count(half) and alike(again, whole)
        if not found.cuts:
            # A refused restore in `_reuse` concerns the cut file only, and stops nothing.
            found.note = found.problem or "a prefix that was cut out of a state file is of no use"
            found.problem = None

    async def _reuse(self, name: str, prompt: Tokens) -> int:
        """Restore a file and return how many tokens of `prompt` are then cached."""
        put_off_if(self._makes_way)
        await self._client.erase(self._slot)
        try:
            restored = await self._client.restore(self._slot, name)
        except BackendError as error:
            self._found.problem = f"the server refuses to restore its own state file: {error}"
            return 0
        self._found.restore_s = restored.seconds
        return (await self._client.prefill(self._slot, prompt)).cached_tokens or 0


def _extended(tokens: Tokens, n: int) -> Tokens:
    return join([tokens, head(tokens, n)])


def _rate(found: ProbeResult) -> float | None:
    """Return the seconds of prefill per token, or None if not measured."""
    return found.prefill_s / found.n_tokens if found.prefill_s else None


def _window(layout: Layout | None) -> int:
    """Return the cells of the sliding window if the state has outgrown it; else 0."""
    window = None if layout is None else layout.window
    return 0 if window is None else window.cell_count


class _Seen(NamedTuple):
    head: Head
    layout: Layout
    unread: str | None  # why the layout is opaque


def _read(path: Path, size_bytes: int) -> _Seen:
    """Read head and layout of a state file. Blocks. Raises OSError, KvFileError."""
    with path.open("rb") as file:
        actual = path.stat().st_size
        if actual != size_bytes:
            raise KvFileError(f"{size_bytes} bytes were reported and {actual} are there")
        head = read_head(file)
        try:
            return _Seen(head, read_layout(file, head, size_bytes), None)
        except KvFileError as error:
            return _Seen(head, OPAQUE, str(error))


def _cut(source: Path, target: Path, n_tokens: int) -> int:
    """Cut `n_tokens` out of a file; return the new size. Blocks. Raises OSError, KvFileError."""
    return shapes.cut(source, target, files.identity(source), n_tokens).identity.size_bytes
