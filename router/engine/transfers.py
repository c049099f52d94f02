"""Carries out the effects that move state files; each ends in the event that answers it.

Knows no plans and no holders of slots. Failures are reported as events, never raised.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from router.base.errors import BackendError, BackendRefusedError, KvError, KvFileError
from router.base.ports import Clock, SlotServer, SnapshotStore, Telemetry
from router.base.types import BackendId, BackendInfo, KvDir, Snapshot
from router.core.model import effects as ef
from router.core.model import events as ev

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
    ) -> ev.Event:
        """Carry out one effect and return its event.

        A bug in here fails the effect: unanswered, its slot would be out of use for good.
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
            return _failed(effect, type(error).__name__)

    async def save(self, effect: ef.Save, info: BackendInfo | None) -> ev.Event:
        """Let the backend write a slot to a file, and commit the file as a snapshot."""
        slot = effect.slot
        if self.store is None or info is None or info.kv_dir is None:
            return ev.SaveFailed(effect.request, slot, _NO_STORE)
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
            return ev.SaveFailed(effect.request, slot, str(error))
        self.telemetry.saved(slot, effect.reason, transfer, "")
        handling_s = max(self.clock.now() - start - transfer.seconds, 0.0)
        return ev.Saved(
            effect.request, slot, snapshot, transfer.seconds, handling_s, transfer.n_tokens
        )

    async def tidy(self, backend: BackendId) -> None:
        """Discard the orphaned files of a backend that answers again.

        The backend runs actions one after the other, so these files are written by now.
        """
        for kv_dir, name in self.orphans.pop(backend, ()):
            with suppress(KvError):
                assert self.store is not None
                await self.store.discard(kv_dir, name)

    async def restore(self, effect: ef.Restore, info: BackendInfo | None) -> ev.Event:
        """Let the backend read a snapshot into a slot, restreamed where needed."""
        slot, snapshot = effect.slot, effect.snapshot
        if self.store is None or info is None or info.kv_dir is None:
            return ev.RestoreFailed(effect.request, snapshot.id, _NO_STORE, ev.Blame.DISK)
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
            return ev.RestoreFailed(effect.request, snapshot.id, str(error), _blame(error))
        self.telemetry.restored(slot, transfer, "")
        return ev.Restored(
            effect.request, snapshot.id, transfer.n_tokens, transfer.seconds, rewrite_s
        )

    async def erase(self, effect: ef.Erase) -> ev.Event:
        """Let the backend empty a slot."""
        try:
            await self.backends[effect.slot.backend].erase(effect.slot.index)
        except BackendError as error:
            self.telemetry.erase_failed(effect.slot, str(error))
            return ev.EraseFailed(effect.request, effect.slot, str(error))
        return ev.Erased(effect.request, effect.slot)

    async def cut(self, effect: ef.Cut) -> ev.Event:
        """Make a snapshot of the first tokens of another one. No backend takes part."""
        start = self.clock.now()
        try:
            made = await self.cut_off(effect.snapshot, effect.n_tokens)
        except KvError as error:
            self.telemetry.rewritten("cut", 0, 0.0, str(error))
            return ev.CutFailed(effect.request, str(error))
        seconds = self.clock.now() - start
        self.telemetry.rewritten("cut", made.size_bytes, seconds, "")
        return ev.WasCut(effect.request, made, seconds)

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

    async def delete(self, snapshot: Snapshot) -> None:
        """Delete an unused snapshot."""
        if self.store is not None:
            try:
                await self.store.delete(snapshot)
            except KvError as error:
                self.telemetry.deleted(snapshot, str(error))
            else:
                self.telemetry.deleted(snapshot, "")

    async def quarantine(self, effect: ef.Quarantine) -> None:
        """Quarantine a snapshot that misbehaved."""
        if self.store is not None:
            try:
                await self.store.quarantine(effect.snapshot, effect.reason)
            except KvError as error:
                self.telemetry.deleted(effect.snapshot, str(error))


def _blame(error: BackendError | KvError) -> ev.Blame:
    if isinstance(error, KvFileError):
        return ev.Blame.FILE
    return ev.Blame.DISK if isinstance(error, KvError) else ev.Blame.BACKEND


def _failed(effect: Transferred, reason: str) -> ev.Event:
    match effect:
        case ef.Save():
            return ev.SaveFailed(effect.request, effect.slot, reason)
        case ef.Cut():
            return ev.CutFailed(effect.request, reason)
        case ef.Restore():
            return ev.RestoreFailed(effect.request, effect.snapshot.id, reason, ev.Blame.DISK)
        case ef.Erase():
            return ev.EraseFailed(effect.request, effect.slot, reason)
