"""Probe of a backend: try its abilities once, in an idle slot.

Prefill a small text, save, erase, restore, extend, diverge: the cached tokens and the likeliest
next tokens afterwards show the memory kind. The blocks of the state file only say what else may be
tried: a padded window, a cut. What was not seen to work is not used. `kvferry doctor` shows the
same results.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    KvError,
    KvFileError,
    ProbePutOffError,
)
from router.base.tasks import spawn
from router.base.tokens import EMPTY, Tokens, count, head, join, pack, tail, unpack
from router.base.types import MemoryKind, SlotStatus
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
    SlotFolder,
    discard,
    erase,
    has_ram_cache,
    keeps_idle_slots,
    moves_chunks,
    places_by_prefix,
    put_aside,
    put_back,
)
from router.llama.client import LlamaClient
from router.llama.wire import INFILL_PROBES, Shown
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
# Tokens of the text after which a load looks at the likeliest next ones again: at most 64 computed.
_GLANCE = 62
# Tokens of a long text that are computed at once: a server ends a batch before it looks whether
# somebody still waits for it.
_AT_ONCE = 64
# Tries of a step that is left for requests; then one waits for it. Without a limit a server with
# one slot that is always asked would never be probed.
_TRIES = 3
_LOOKS_S = 0.05  # seconds between two looks for requests
_SLOW_S = 0.02  # a save of the text that took longer is tried once more
# Tokens that a live slot goes back by: more than what lies between a checkpoint and the end.
_BACK = 24

# In a server's answer to every completion of a model without KV (server-context.cpp:3388).
_NO_LOGITS = "logits computation"


class Probe:
    """The probe of one server process, in steps; between them, and within, it gives way.

    A step that was left is begun anew later, perhaps in another slot: no step needs what an earlier
    one left there. After `_TRIES` tries, or in a slot whose content would be lost, it is not left.
    A problem ends the trial of saved states: a server is used without snapshots rather than with
    doubtful ones.
    """

    def __init__(
        self,
        client: LlamaClient,
        folder: SlotFolder | None,
        *,
        tenants: bool = False,
        sample: Shown | None = None,
    ) -> None:
        """Set up. `tenants`: they are kept apart, so look for a RAM cache that mixes them.

        `sample`: a prompt with media, of a server that takes some.
        """
        self._client, self._tenants, self._sample = client, tenants, sample
        self._found = ProbeResult()
        # What names the model, however slow its server is; what is saved, and predicts `_fresh`.
        self._text, self._tokens, self._fresh = EMPTY, EMPTY, Behaviour()
        self._windowed = self._whole = self._proved = False
        self._done = self._tries = 0
        self.touched: set[int] = set()  # slots that do not hold what they held, in the last run
        self._folder, self._steps = folder, [self._compute]
        if folder is not None:
            self._store, self._kv_dir = folder
            self._name = folder.store.staging_name()
            longer = [partial(self._outgrow, length) for length in _LONGER]
            self._steps = [self._try_text, self._try_whole, *longer, self._end_windows]
            self._steps += [self._try_restore, self._try_chunks]
        self._steps += [self._behave, self._infill, self._place]
        self._steps += [self._look] if sample is not None else []

    async def run(
        self, slots: list[SlotStatus], makes_way: Callable[[], bool] = lambda: False
    ) -> ProbeResult:
        """Go on to the end. Raises BackendError if the server goes away, and ProbePutOffError.

        Works in an idle slot, an empty one if there is one; the slot's content is restored.
        `makes_way`: whether it is time to leave the slots to a request.
        """
        found, slot = self._found, _idle(slots)
        self.touched = set()
        if slot is None:
            problem = "every slot was busy; the router probes it again later"
            return ProbeResult(problem=problem, untried=True)
        self._slot, self._slots, self._status, self._room = slot.index, slots, slot, _room(slot)
        if not self._text:
            self._text = self._tokens = await _text(self._client, slot)
        if self._tries < _TRIES and makes_way():
            self._tries += 1
            raise ProbePutOffError
        keep = await put_aside(self._client, self._folder, slot)
        self.touched.add(slot.index)
        put_off = False
        try:
            while self._done < len(self._steps):
                stays = self._tries >= _TRIES or (keep is not None and not self._proved)
                await self._step(None if stays else makes_way)
        except ProbePutOffError:
            put_off = True
            raise
        except BackendRefusedError as error:
            if _NO_LOGITS not in str(error):
                raise
            found.generates, found.problem, found.note = False, None, NO_KV
            found.restores_wrong = True
        finally:
            try:
                # A slot that was empty is left as it is: a request waits, and this may be in work.
                if keep is not None or not put_off:
                    restores = not found.restores_wrong
                    await put_back(self._client, self._folder, slot, keep, restores=restores)
                    if keep is not None and restores:
                        self.touched.clear()
            finally:
                if not put_off and self._folder is not None:
                    await discard(self._folder, self._name)
        return found

    async def _step(self, makes_way: Callable[[], bool] | None) -> None:
        """Take the next step. Raises ProbePutOffError if it was left for a request."""
        if makes_way is None:
            await self._steps[self._done]()
        else:
            try:
                async with asyncio.timeout(None) as limit:
                    watching = spawn(_watch(makes_way, limit), name="watch for requests")
                    try:
                        await self._steps[self._done]()
                    finally:
                        watching.cancel()
            except TimeoutError:
                self._tries += 1
                raise ProbePutOffError from None
        self._done, self._tries = self._done + 1, 0

    # --- steps ------------------------------------------------------------------------------------

    async def _compute(self) -> None:
        self._found.problem = "no kv_dir is configured for this backend"
        await self._prefill(self._tokens)

    async def _behave(self) -> None:
        for part in (head(self._text, _GLANCE), self._text):
            await erase(self._client, self._slot)
            seen = await self._client.fingerprint(self._slot, part)
            self._found.glance, self._found.behaviour = self._found.behaviour, seen

    async def _look(self) -> None:
        assert self._sample is not None
        try:
            self._found.seen = await self._client.fingerprint(self._slot, self._sample)
        except BackendRefusedError as error:
            self._found.unseen = str(error)

    async def _infill(self) -> None:
        with suppress(BackendRefusedError):  # the model has none
            asked = [await self._client.infill(self._slot, parts) for parts in INFILL_PROBES]
            self._found.infill = tuple(asked)

    async def _place(self) -> None:
        """Find out how the server places requests, and what becomes of its idle slots."""
        client, found, tokens = self._client, self._found, self._text
        found.by_prefix = await places_by_prefix(client, self._slots, self._status, tokens)
        found.keeps_idle_slots = await keeps_idle_slots(client, self._slots, self._status, tokens)
        if self._tenants:
            found.ram_cache = await has_ram_cache(client, self._slot, tokens)

    async def _try_text(self) -> None:
        self._fresh = await self._save(self._tokens)
        if self._found.layout is not None:
            self._found.memory_kind = self._found.layout.memory_kind
            self._windowed = self._found.memory_kind is MemoryKind.SLIDING_WINDOW

    async def _try_whole(self) -> None:
        """Find out whether an unpadded file with further blocks serves an extended prompt.

        Several attention blocks are those of a sliding window or of a sparse attention. With
        `--swa-full` a window serves every prompt, too, until it is outgrown: it is not in such a
        file, yet the server reuses the file for prompts that diverge inside the window
        (llama-server.md 0.9).
        """
        if self._windowed:
            reused = await self._reuse(self._name, _extended(self._tokens, 1))
            self._whole = reused >= count(self._tokens)
            if self._whole:
                self._found.memory_kind = MemoryKind.FULL

    async def _outgrow(self, length: int) -> None:
        """Save a longer text until the window shows, if it takes at most `_LONGER_S`."""
        found, rate = self._found, self._found.prefill_s_per_token
        if not self._windowed or found.problem is not None or _window(found.layout):
            return
        if rate is None or length * rate > _LONGER_S:
            return
        times = length // count(self._text) + 1
        longer = head(join([self._text] * times), min(length, self._room))
        if count(longer) > count(self._tokens):
            self._fresh, self._tokens = await self._save(longer), longer

    async def _end_windows(self) -> None:
        found = self._found
        if self._windowed and found.problem is None:
            found.window = _window(found.layout)
            if found.memory_kind is MemoryKind.SLIDING_WINDOW:
                found.padded = Padding.NEEDED
                if not found.window:
                    found.note = (
                        f"its sliding window is longer than the {count(self._tokens)} tokens that"
                        " were tried: the window will be learned from the first long state"
                    )
        if self._whole and found.window:
            found.memory_kind, found.problem = MemoryKind.UNKNOWN, SWA_FULL
            found.restores_wrong = True
        if found.problem is None and not found.extends:
            found.problem = NO_EXTENSION

    async def _try_restore(self) -> None:
        if self._found.problem is None and await self._verify():
            await self._restore(self._tokens, self._fresh)
        self._proved = True  # that a restored content is right, or else `restores_wrong`

    async def _try_chunks(self) -> None:
        """Look for moved KV: that of other memory kinds cannot be moved, except with --swa-full."""
        found, tokens, rate = self._found, self._tokens, self._found.prefill_s_per_token
        if found.problem is not None or found.memory_kind is not MemoryKind.FULL:
            return
        longest = _CHUNK if rate is None else min(_CHUNK, int(_LONGER_S / 2 / rate))
        chunk = head(join([tokens] * (_CHUNK // count(tokens) + 1)), min(longest, self._room))
        if chunk and await moves_chunks(self._client, self._slot, chunk):
            found.problem = MOVES_CHUNKS

    # --- what the steps do ------------------------------------------------------------------------

    async def _prefill(self, tokens: Tokens) -> None:
        """Prefill an erased slot, so that time and result are its own."""
        await erase(self._client, self._slot)
        n = count(tokens)
        ends = [*range(_AT_ONCE, n, _AT_ONCE), n] if n >= _LONGER[0] // 2 else [n]
        told = [await self._client.prefill(self._slot, head(tokens, end)) for end in ends]
        took_s = sum(one.prompt_s or 0.0 for one in told)
        self._found.n_tokens = n
        self._found.prefill_s = took_s if took_s and told[0].cached_tokens == 0 else None

    async def _save(self, tokens: Tokens) -> Behaviour:
        """Compute and save `tokens`, read the file; return what two more tokens predict.

        The live slot is tried as well: extended, and with the same prompt again.
        """
        found = self._found
        found.live_extension = found.live_again = found.live_back = None
        await self._prefill(tokens)
        try:
            saved = await self._client.save(self._slot, self._name)
            if saved.seconds > _SLOW_S:  # perhaps the machine was busy: else no save would pay
                again = await self._client.save(self._slot, self._name)
                saved = min(saved, again, key=lambda one: one.seconds)
        except BackendError as error:
            found.problem = f"the server refuses to save a slot: {error}"
            return []
        found.can_save = True
        found.save_s, found.size_bytes = saved.seconds, saved.size_bytes
        path = Path(self._kv_dir) / self._name
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
            found.output_s_per_token = longer.prompt_s
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

    async def _verify(self) -> bool:
        """Verify the file as the store uses it, padded if needed; False on a problem."""
        found = self._found
        assert found.size_bytes is not None
        try:
            staged = await self._store.verify(
                self._kv_dir, self._name, found.size_bytes, found.memory_kind
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
        found.restored_extension = await self._reuse(self._name, _extended(tokens, 1))
        again = await self._client.fingerprint(self._slot, _extended(tokens, 2))
        half = head(tokens, (n + 1) // 2)
        # Not the beginning: the text is one paragraph twice, and would just continue after `half`.
        other = tail(tokens, n - n // 4)
        found.restored_divergence = await self._reuse(self._name, join([half, other]))
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
        source, target = Path(self._kv_dir) / self._name, Path(self._kv_dir) / name
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
            await discard(SlotFolder(self._store, self._kv_dir), name)
        found.cuts = cached == count(half) and alike(again, whole)
        if not found.cuts:
            # A refused restore in `_reuse` concerns the cut file only, and stops nothing.
            found.note = found.problem or "a prefix that was cut out of a state file is of no use"
            found.problem = None

    async def _reuse(self, name: str, prompt: Tokens) -> int:
        """Restore a file and return how many tokens of `prompt` are then cached."""
        await self._client.erase(self._slot)
        try:
            restored = await self._client.restore(self._slot, name)
        except BackendError as error:
            self._found.problem = f"the server refuses to restore its own state file: {error}"
            return 0
        self._found.restore_s = min(self._found.restore_s or restored.seconds, restored.seconds)
        return (await self._client.prefill(self._slot, prompt)).cached_tokens or 0


async def _watch(makes_way: Callable[[], bool], limit: asyncio.Timeout) -> None:
    while not makes_way():  # noqa: ASYNC110 - queue, readers and hosts would each have an event
        await asyncio.sleep(_LOOKS_S)
    limit.reschedule(0.0)


async def is_still_so(
    client: LlamaClient, folder: SlotFolder | None, slots: list[SlotStatus], before: ProbeResult
) -> bool:
    """Return whether the model predicts what it did in the probe of an equal process before.

    Layout and speed depend on what the process was started with. What it predicts depends on files
    as well, which may have been replaced: adapters, control vectors, what a script reads.
    """
    if not before.glance or not before.generates:
        return True
    slot = _idle(slots)
    if slot is None:
        return False
    keep = await put_aside(client, folder, slot)
    try:
        tokens = head(await _text(client, slot), _GLANCE)
        await erase(client, slot.index)
        return alike(await client.fingerprint(slot.index, tokens), before.glance)
    finally:
        await put_back(client, folder, slot, keep)


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


def _extended(tokens: Tokens, n: int) -> Tokens:
    return join([tokens, head(tokens, n)])


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
