"""Carries out the orders that move state files, and returns what became of each.

Knows no plans and no holders of slots. Failures are returned, never raised.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from router.base.errors import BackendError, BackendRefusedError, KvError, KvFileError
from router.base.ports import Clock, SlotServer, SnapshotStore, Telemetry
from router.base.types import BackendId, BackendInfo, KvDir, Snapshot
from router.core.model import effects as ef
from router.core.model.effects import Blame, Failed, Restored, Saved

log = structlog.get_logger(__name__)

_NO_STORE = "no store"

Transferred = ef.Save | ef.Cut | ef.Restore | ef.Erase


@dataclass(frozen=True, slots=True)
class Transfers:
    """Saves, restores, erases, cuts. `info`: facts about the backend now; None: it is down."""

    backends: Mapping[BackendId, SlotServer]
    store: SnapshotStore | None
    clock: Clock
    telemetry: Telemetry
    # Files that a backend may still write: no answer came to a save, or not in time.
    orphans: dict[BackendId, list[tuple[KvDir, str]]] = field(default_factory=dict)

    async def carry_out(
        self, effect: Transferred, infos: Mapping[BackendId, BackendInfo]
    ) -> Saved | Restored | Failed | None:
        """Carry out one order and return its result.

        A bug in here fails the order: unanswered, its slot would be out of use for good.
        """
        try:
            match effect:
                case ef.Save():
                    return await self.save(effect, infos.get(effect.slot.backend))
                case ef.Cut():
                    return await self.cut(effect)
                case ef.Restore():
                    return await self.restore(effect, infos.get(effect.slot.backend))
                case ef.Erase():
                    return await self.erase(effect)
        except Exception as error:
            log.exception("transfer_failed", effect=type(effect).__name__, request=effect.request)
            return Failed(type(error).__name__)

    async def save(self, effect: ef.Save, info: BackendInfo | None) -> Saved | Failed:
        """Let the backend write a slot to a file, and commit the file as a snapshot."""
        slot = effect.slot
        if self.store is None or info is None or info.kv_dir is None:
            return Failed(_NO_STORE)
        name, start = self.store.staging_name(), self.clock.now()
        try:
            self.store.check_budget(info.kv_dir)
            transfer = await self.backends[slot.backend].save(slot.index, name)
            staged = await self.store.verify(
                info.kv_dir, name, transfer.size_bytes, info.memory_kind, effect.media
            )
            snapshot = await self.store.commit(staged, effect.namespace)
            await self.tidy(slot.backend)
        except (BackendError, KvError) as error:
            with suppress(KvError):
                await self.store.discard(info.kv_dir, name)
            if isinstance(error, BackendError) and not isinstance(error, BackendRefusedError):
                self.orphans.setdefault(slot.backend, []).append((info.kv_dir, name))
            self.telemetry.saved(slot, effect.reason, None, str(error))
            return Failed(str(error))
        self.telemetry.saved(slot, effect.reason, transfer, "")
        handling_s = max(self.clock.now() - start - transfer.seconds, 0.0)
        return Saved(snapshot, transfer.seconds, handling_s, transfer.n_tokens)

    async def tidy(self, backend: BackendId) -> None:
        """Discard the orphaned files of a backend that answers again.

        The backend runs actions one after the other, so these files are written by now.
        """
        for kv_dir, name in self.orphans.pop(backend, ()):
            with suppress(KvError):
                assert self.store is not None
                await self.store.discard(kv_dir, name)

    async def restore(self, effect: ef.Restore, info: BackendInfo | None) -> Restored | Failed:
        """Let the backend read a snapshot into a slot, restreamed where needed."""
        slot, snapshot = effect.slot, effect.snapshot
        if self.store is None or info is None or info.kv_dir is None:
            return Failed(_NO_STORE)
        backend, rewrite_s, start = self.backends[slot.backend], 0.0, self.clock.now()
        try:
            name = await self.store.open(snapshot, info.kv_dir, info.n_stream)
            restreamed = snapshot.shape.needs_restream(info.n_stream)
            if restreamed or not snapshot.whole:
                rewrite_s = self.clock.now() - start
                what = "restream" if restreamed else "assemble"
                self.telemetry.rewritten(what, snapshot.size_bytes, rewrite_s, "")
            try:
                if effect.erase:
                    await backend.erase(slot.index)
                transfer = await backend.restore(slot.index, name)
            finally:
                with suppress(KvError):
                    await self.store.close(snapshot, info.kv_dir, name)
        except (BackendError, KvError) as error:
            self.telemetry.restored(slot, None, str(error))
            return Failed(str(error), _blame(error))
        self.telemetry.restored(slot, transfer, "")
        return Restored(transfer.n_tokens, transfer.seconds, rewrite_s)

    async def erase(self, effect: ef.Erase) -> Failed | None:
        """Let the backend empty a slot."""
        try:
            await self.backends[effect.slot.backend].erase(effect.slot.index)
        except BackendError as error:
            self.telemetry.erase_failed(effect.slot, str(error))
            return Failed(str(error), Blame.BACKEND)
        return None

    async def cut(self, effect: ef.Cut) -> Saved | Failed:
        """Make a snapshot of the first tokens of another one. No backend takes part."""
        start = self.clock.now()
        try:
            made = await self.cut_off(effect.snapshot, effect.n_tokens)
        except KvError as error:
            self.telemetry.rewritten("cut", 0, 0.0, str(error))
            return Failed(str(error))
        seconds = self.clock.now() - start
        self.telemetry.rewritten("cut", made.size_bytes, seconds, "")
        return Saved(made, seconds)

    async def cut_off(self, snapshot: Snapshot, n_tokens: int) -> Snapshot:
        """Return a new snapshot of the first tokens of another one. Raises KvError."""
        if self.store is None:
            raise KvError(_NO_STORE)
        staged = await self.store.cut(snapshot, n_tokens)
        try:
            return await self.store.commit(staged, snapshot.namespace)
        except KvError:
            with suppress(KvError):
                await self.store.discard(staged.kv_dir, staged.name)
            raise

    async def delete(self, snapshot: Snapshot, fault: str = "") -> None:
        """Delete an unused snapshot; `fault`: what was wrong with it."""
        if fault:
            log.warning("snapshot_given_up", snapshot=snapshot.id, reason=fault)
        if self.store is not None:
            try:
                await self.store.delete(snapshot)
            except KvError as error:
                self.telemetry.deleted(snapshot, str(error))
            else:
                self.telemetry.deleted(snapshot, "")


def _blame(error: BackendError | KvError) -> Blame:
    if isinstance(error, KvFileError):
        return Blame.FILE
    return Blame.DISK if isinstance(error, KvError) else Blame.BACKEND
