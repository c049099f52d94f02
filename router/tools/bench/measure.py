"""Measure one llama-server: a prompt is computed in steps, and saved and restored after each.

All work is done in one idle slot. A step begins when nothing else runs on the server.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from router.base.errors import BackendError, BackendRefusedError, KvError
from router.base.ports import SnapshotStore
from router.base.tokens import Tokens, head, pack
from router.base.types import KvDir, SlotStatus
from router.llama.attach.probe_slots import SlotFolder, discard, erase, put_aside, put_back
from router.llama.client import LlamaClient
from router.llama.replies import Props
from router.store import shapes
from router.store.format.layout import Layout
from router.tools.doctor.facts import DirectoryProbeStore

LENGTHS = (1024, 4096, 8192, 16384, 32768, 65536)
# A slot keeps room for an answer.
_SPARE = 64
_WORDS = "amber basin cedar delta ember fjord grove haven inlet joist knoll ledge mason north"
_IDLE_PATIENCE_S = 30.0
# More often than once in a second hides disconnects from the server (LlamaClient.slots).
_POLL_S = 1.5


class Point(Struct, frozen=True):
    """The times for a prompt of `tokens` tokens, in seconds. None: not measured.

    `cold_s` and `here_s` are times to the first token: computed, and restored.
    """

    tokens: int
    cold_s: float
    prefill_tokens_per_s: float  # of the tokens since the point before
    save_s: float | None = None
    size_bytes: int | None = None
    restore_s: float | None = None
    here_s: float | None = None


class Measured(Struct, frozen=True):
    """All that was measured of one server; `notes` say what was not, and why."""

    name: str
    model: str
    build: str
    slots: int
    n_ctx: int
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    cache_types: tuple[str, str] | None = None  # of K and V
    flash_attention: bool | None = None
    folder: str | None = None


@dataclass(slots=True)
class ServerBench:
    """The measurement of one server: its share of `seconds` of computing."""

    client: LlamaClient
    folder: Path | None
    seconds: float
    shares: int
    progress: Callable[[str], None]
    lengths: Sequence[int] = LENGTHS
    # Only the methods that a probe uses are called.
    _store: SnapshotStore = field(
        default_factory=lambda: cast(SnapshotStore, DirectoryProbeStore())
    )
    _notes: list[str] = field(default_factory=list)
    _layout: Layout | None = None
    _saves: bool = True

    async def run(self) -> Measured:
        """Measure the server. Raises BackendError if it is busy, refuses or goes away."""
        props = await self.client.props()
        slot = await _idle_slot(self.client)
        kv_dir = None if self.folder is None else KvDir(str(self.folder))
        if kv_dir is None:
            self._notes.append("nothing was saved: no kv_dir is given (--kv-dir)")
        place = None if kv_dir is None else SlotFolder(self._store, kv_dir)
        keep = await put_aside(self.client, place, slot)
        if keep is None and slot.n_tokens:
            self._notes.append(f"slot {slot.index} held {slot.n_tokens} tokens, which are gone")
        try:
            points = await self._points(slot.index, props)
        finally:
            await put_back(self.client, place, slot, keep)
        layout = self._layout
        attention = layout.attention if layout is not None else ()
        return Measured(
            name=self.client.id,
            model=Path(props.model_alias or props.model_path).name,
            build=props.build_info,
            slots=props.total_slots,
            n_ctx=props.n_ctx,
            points=points,
            notes=tuple(self._notes),
            cache_types=shapes.cache_types(layout) if layout is not None and attention else None,
            flash_attention=not attention[0].v_trans if attention else None,
            folder=kv_dir,
        )

    async def _points(self, slot: int, props: Props) -> tuple[Point, ...]:
        lengths = [n for n in self.lengths if n <= props.n_ctx - _SPARE]
        if not lengths:
            lengths = [max(props.n_ctx // 2, 8)]
        if len(lengths) < len(self.lengths):
            self._notes.append(f"a slot of this server holds {props.n_ctx:,} tokens")
        tokens = await _some_tokens(self.client, lengths[-1] + 1)
        await erase(self.client, slot)
        points: list[Point] = []
        cold_s, before, expected_s = 0.0, 0, 0.0
        for length in lengths:
            if points and cold_s + expected_s * (length - before) > self.seconds / self.shares:
                wait_s = expected_s * (length - before)
                self._notes.append(
                    f"{length:,} tokens were left out: about {wait_s:.0f} s more; allow it with"
                    f" --seconds {(cold_s + 2 * wait_s) * self.shares:.0f}"
                )
                break
            self.progress(f"{self.client.id}: computing {length:,} tokens")
            await _until_alone(self.client)
            took_s = await self._first_token(slot, head(tokens, length))
            cold_s += took_s
            expected_s = took_s / (length - before) * 1.3  # attention reads more with each token
            point = Point(length, cold_s, (length - before) / took_s)
            before = length
            points.append(await self._moved(point, slot, head(tokens, length + 1)))
        return tuple(points)

    async def _moved(self, point: Point, slot: int, longer: Tokens) -> Point:
        """Save and restore a state; `longer` is its prompt and one more token."""
        if self.folder is None or not self._saves:
            return point
        kv_dir, name = KvDir(str(self.folder)), self._store.staging_name()
        self.progress(f"{self.client.id}: saving and restoring {point.tokens:,} tokens")
        try:
            await _until_alone(self.client)
            saved = await self.client.save(slot, name)
            try:
                staged = await self._store.verify(kv_dir, name, saved.size_bytes)
                self._layout = (
                    await asyncio.to_thread(shapes.inspect, self.folder / name, staged.size_bytes)
                ).layout
            except KvError as error:
                self._saves = False  # else one more such file would stay for each length
                self._notes.append(f"the file {name} that the server saved cannot be read: {error}")
                return point
            if saved.n_tokens != point.tokens:
                self._notes.append(f"another request took the slot at {point.tokens:,} tokens")
                return point
            restored_s, here_s = await self._restored(slot, name, longer)
        except BackendRefusedError as error:
            self._notes.append(f"the server saves nothing: {error}")
            return point
        finally:
            await discard(SlotFolder(self._store, kv_dir), name)
        return replace(
            point,
            save_s=saved.seconds,
            size_bytes=saved.size_bytes,
            restore_s=restored_s,
            here_s=here_s,
        )

    async def _restored(self, slot: int, name: str, longer: Tokens) -> tuple[float, float]:
        """Return the seconds of a restore, and those to the first token after it."""
        await erase(self.client, slot)
        await _until_alone(self.client)
        begun = time.perf_counter()
        restored = await self.client.restore(slot, name)
        took_s = time.perf_counter() - begun
        return restored.seconds, took_s + await self._first_token(slot, longer)

    async def _first_token(self, slot: int, tokens: Tokens) -> float:
        begun = time.perf_counter()
        await self.client.prefill(slot, tokens)
        return time.perf_counter() - begun


async def _idle_slot(client: LlamaClient) -> SlotStatus:
    """Return the idle slot with the fewest tokens. Raises BackendError."""
    await _until_alone(client)
    slots = await client.slots()
    return min(slots, key=lambda slot: (slot.n_tokens or 0, -slot.index))


async def _until_alone(client: LlamaClient) -> None:
    """Wait until no slot is at work, so that no answer is delayed. Raises BackendError."""
    deadline = time.monotonic() + _IDLE_PATIENCE_S
    while any(slot.is_processing for slot in await client.slots()):
        if time.monotonic() > deadline:
            raise BackendError(f"{client.id} is at work: try again when no request runs there")
        await asyncio.sleep(_POLL_S)


async def _some_tokens(client: LlamaClient, n: int) -> Tokens:
    """Return `n` tokens of nonsense that no earlier prompt began with."""
    chance = random.SystemRandom()
    text = " ".join(chance.choices(_WORDS.split(), k=400))
    ids = await client.tokenize(text, add_special=False, parse_special=False)
    return pack(chance.choices(ids, k=n))
