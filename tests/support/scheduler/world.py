"""Model servers and the effects on their way to them, for the scheduler's state machine.

Each effect is checked against what the servers are doing at that moment.
"""

from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from router.base.tokens import TokenPieces, head, pack, unpack
from router.base.types import (
    NO_TENANT,
    BackendId,
    BackendInfo,
    Outcome,
    Reported,
    Request,
    RequestId,
    SlotId,
    Snapshot,
    SnapshotId,
    StateShape,
    Tenant,
)
from router.core.admission.backend_attach import probe_name
from router.core.execution import job_ends
from router.core.model import effects as ef
from router.core.model.effects import Blame
from router.core.model.jobs import AtGate, RequestJob
from router.core.model.slots import Phase
from router.core.model.tenancy import namespace_of, tenant_of
from tests.support.scheduler import fact
from tests.support.scheduler.build import backend
from tests.support.scheduler.driven import Driven
from tests.support.scheduler.model_server import Ids, Server, common

ROOTS: tuple[Ids, ...] = ((), (1,) * 4, (1,) * 10, (1, 1, 1, 1, 2, 2, 2, 2))
PROMPTS = st.builds(
    lambda root, rest: root + tuple(rest),
    st.sampled_from(ROOTS),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
)
ANSWERS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4).map(tuple)
Answerable = ef.Save | ef.Restore | ef.Erase | ef.Prefill | ef.Dispatch | ef.WatchSlot
ACTIONS = (ef.Save, ef.Restore, ef.Erase, ef.Prefill)


class Op:
    """An effect that has not been answered, and the server it went to."""

    def __init__(self, effect: Answerable, server: Server) -> None:
        self.effect, self.server = effect, server
        self.held: Ids = ()  # content of the slot when its server died
        self.started = self.confirmed = self.stopped = self.broke = False

    def __repr__(self) -> str:
        return f"<{type(self.effect).__name__} {self.effect.request} {self.slot}>"

    @property
    def slot(self) -> SlotId:
        return self.effect.lease.slot if isinstance(self.effect, ef.Dispatch) else self.effect.slot

    @property
    def may_go_anywhere(self) -> bool:
        return isinstance(self.effect, ef.Dispatch) and not self.effect.pin

    def may_go_to(self, slot: SlotId, prompt: Ids) -> bool:
        """Return whether the server may place the request on `slot`.

        A steered request goes by prefix: the slot expected for it holds nearly all of its prompt
        (llama-server.md section 2.2). Other server-placed requests may go to any idle slot.
        """
        return self.may_go_anywhere and slot.index in self.slots_for(prompt)

    def slots_for(self, prompt: Ids) -> list[int]:
        held = self.server.slots[self.slot.index]
        steered = self.server.info.is_managed and common(held, prompt) >= len(prompt) - 1 > 0
        return self.server.picks(prompt) if steered else self.server.idle()


class World:
    """Servers, requests and effects. The state machine adds when each effect happens."""

    tenants: tuple[Tenant, ...] = (NO_TENANT,)

    def populate(self, scheduler: Driven, infos: list[BackendInfo]) -> None:
        """Start with all servers up and empty."""
        self.scheduler = scheduler
        self.infos = {info.id: info for info in infos}
        self.servers = {info.id: Server(info) for info in infos}
        self.now = 1.0
        self.events: list[fact.Fact] = []
        self.carries_out = False
        self.leaving: set[RequestId] = set()  # their clients leave as they are sent
        self.ops: list[Op] = []
        self.requests: dict[RequestId, Request] = {}
        self.true_prompt: dict[RequestId, Ids] = {}  # also where the router does not know it
        self.fates: dict[RequestId, list[str]] = {}
        self.files: dict[SnapshotId, Snapshot] = {}
        self.gone: set[SnapshotId] = set()
        self.answers: list[fact.Fact] = []
        self.cutting: list[ef.Cut] = []
        self.stopping = False
        self.released: set[BackendId] = set()
        self.probing: set[BackendId] = set()

    def dies(self, name: BackendId) -> None:
        for op in self.ops:
            if op.server is self.servers[name] and op.server.alive:
                op.held = op.server.slots[op.slot.index]
        self.ops = [
            op
            for op in self.ops
            if op.server is not self.servers[name] or not isinstance(op.effect, ef.WatchSlot)
        ]
        self.servers[name].alive = False
        self.probing.discard(name)

    def try_out(self, server: Server) -> None:
        """Empty the slots that a probe was lent."""
        lent = probe_name(server.info.id)
        for slot in self.scheduler.state.inventory.slots.of(server.info.id):
            if slot.holder == lent:
                assert server.user_of(slot.id.index) is None, "lent, and somebody else's"
                server.slots[slot.id.index] = ()

    # -- what becomes of effects -------------------------------------------------------------

    def advance(self, op: Op, data: st.DataObject) -> None:
        match op.effect:
            case ef.Save():
                self.saves(op, op.effect, data.draw(st.booleans()))
            case ef.Restore():
                self.restores(
                    op,
                    op.effect,
                    data.draw(st.sampled_from(["ok", *(blame.value for blame in Blame)])),
                )
            case ef.Erase():
                self.erases(op, op.effect, data.draw(st.integers(0, 4)) > 0)
            case ef.Prefill():
                self.prefills(op, op.effect, data.draw(st.integers(0, 4)))
            case ef.WatchSlot():
                if op.server.user_of(op.slot.index) is None:
                    self.ops.remove(op)
                    self.feed(fact.quiet(op.effect.request, len(op.server.slots[op.slot.index])))
            case ef.Dispatch():
                self.relays(op, op.effect, data)

    def saves(self, op: Op, effect: ef.Save, ok: bool) -> None:
        self.ops.remove(op)
        held = op.server.slots[op.slot.index] if op.server.alive else op.held
        if not ok or not held:
            self.feed(fact.save_failed(effect.request, op.slot, "no"))
            return
        if op.server.alive:
            owner = op.server.owners[op.slot.index]
            assert tenant_of(effect.namespace) in (owner, NO_TENANT), "it is another's"
        name = SnapshotId(f"s{len(self.files)}")
        shape = StateShape(op.server.info.n_stream)
        made = Snapshot(
            name, effect.namespace, self.kv_dir(), TokenPieces(pack(held)), 1000 * len(held), shape
        )
        self.files[name] = made
        self.feed(fact.saved(effect.request, op.slot, made, 0.001))

    def cuts(self, effect: ef.Cut, ok: bool) -> None:
        if not ok:
            self.feed(fact.cut_failed(effect.request, "no"))
            return
        name = SnapshotId(f"s{len(self.files)}")
        whole = effect.snapshot
        part = replace(
            whole,
            id=name,
            tokens=head(whole.tokens, effect.n_tokens),
            size_bytes=1000 * effect.n_tokens,
        )
        self.files[name] = part
        self.feed(fact.was_cut(effect.request, part, 0.001))

    def restores(self, op: Op, effect: ef.Restore, how: str) -> None:
        self.ops.remove(op)
        held = tuple(unpack(effect.snapshot.tokens))
        if how == "ok" and op.server.alive:
            assert len(held) <= op.server.info.n_ctx, "a snapshot that the slot cannot hold"
            op.server.slots[op.slot.index] = held
            op.server.owners[op.slot.index] = tenant_of(effect.snapshot.namespace)
            self.feed(fact.restored(effect.request, len(held), 0.001))
            return
        if op.server.alive:
            op.server.slots[op.slot.index] = ()
        blame = Blame(how) if op.server.alive else Blame.BACKEND
        self.feed(fact.restore_failed(effect.request, "no", blame))

    def erases(self, op: Op, effect: ef.Erase, ok: bool) -> None:
        self.ops.remove(op)
        if ok and op.server.alive:
            op.server.slots[op.slot.index] = ()
            self.feed(fact.erased(effect.request, op.slot))
        else:
            self.feed(fact.erase_failed(effect.request, op.slot, "no"))

    def prefills(self, op: Op, effect: ef.Prefill, how: int) -> None:
        ids, name = tuple(unpack(effect.tokens)), RequestId(f"prefill {effect.request}")
        if op.server.alive and not op.started:
            op.server.start(name, ids, [op.slot.index], self.requests[effect.request].tenant)
            op.started = True
            return
        if how == 4 and not op.broke:
            op.broke = True
            self.feed(fact.prefill_broke(effect.request))
            return
        self.ops.remove(op)
        if op.server.alive:
            cached = op.server.runs[name].cached
            if how and not op.stopped and not op.broke:
                op.server.end(name, len(ids), (0,))
                reported = Reported(len(ids), cached, 0.01 * (len(ids) - cached))
                self.feed(fact.prefilled(effect.request, reported))
                return
            op.server.end(name, how, ())
            if op.broke:  # noticed when the prefill is over, with the tokens it computed
                n = len(op.server.slots[op.slot.index])
                self.feed(fact.prefill_failed(effect.request, "no", n))
                return
        self.feed(fact.prefill_failed(effect.request, "no"))

    def relays(self, op: Op, effect: ef.Dispatch, data: st.DataObject) -> None:
        ids = self.true_prompt[effect.request]
        if not op.server.alive:
            self.finishes(op, Outcome.BACKEND_ERROR, Reported())
        elif not op.started:
            if data.draw(st.integers(0, 4)) == 0:
                outcome = data.draw(st.sampled_from([Outcome.CLIENT_GONE, Outcome.REFUSED]))
                self.finishes(op, outcome, Reported())
                return
            for other in self.ops[: self.ops.index(op) + 1]:
                if other.server is op.server and not other.started:
                    self.reaches_server(other, data)
            assert op.started or not op.server.info.is_managed
        elif effect.confirm and not op.confirmed and data.draw(st.booleans()):
            op.confirmed = True
            first, *others = op.server.runs[effect.request].slots
            self.feed(fact.launched(effect.request, first, frozenset(others)))
        elif data.draw(st.integers(0, 3)) == 0:
            op.server.runs[effect.request].abandoned = True
            outcome = data.draw(st.sampled_from([Outcome.CLIENT_GONE, Outcome.BACKEND_ERROR]))
            self.finishes(op, outcome, Reported())
        else:
            self.answers_well(op, effect, ids, data)

    def reaches_server(self, op: Op, data: st.DataObject) -> None:
        """Start a request on its server. Requests arrive in the order in which they were sent."""
        sent = op.effect
        if not isinstance(sent, ef.Dispatch):
            return
        managed = op.server.info.is_managed
        if not managed and not op.server.idle():
            return  # it waits in the server's queue
        op.started = True
        slots, prompt = [op.slot.index], self.true_prompt[sent.request]
        tenant = self.requests[sent.request].tenant
        asked = self.requests[sent.request]
        if asked.takes_several:
            n = asked.n_slots(op.server.info.n_slots)
            slots = data.draw(st.permutations(op.server.idle()))[:n]
        elif not sent.pin:
            # Between tenants it matters that the longest prefix wins.
            free = op.server.picks(prompt) if tenant else op.slots_for(prompt)
            slots = [data.draw(st.sampled_from(free))]
        if not sent.pin and managed and not asked.takes_several:
            there = [o for o in self.ops if o.server is op.server and o.slot.index == slots[0]]
            there = [o for o in there if o is not op and not isinstance(o.effect, ef.WatchSlot)]
            assert all(o.may_go_anywhere for o in there), "the slot is somebody else's"
            self.is_nobodys(SlotId(op.server.info.id, slots[0]), sent.request)
        op.server.start(sent.request, prompt, slots, tenant)

    def answers_well(self, op: Op, effect: ef.Dispatch, ids: Ids, data: st.DataObject) -> None:
        answer: Ids = data.draw(ANSWERS)
        run = op.server.runs[effect.request]
        op.server.end(effect.request, len(ids), answer)
        said = Reported(len(ids), run.cached, 0.01 * (len(ids) - run.cached), len(answer), 0.1)
        if data.draw(st.booleans()):
            said = replace(said, generated=pack(answer))
        else:
            lease, true = effect.lease, self.requests[effect.request].prompt.tokens
            read = fact.answer_read(lease.slot, lease.generation, true, pack(answer))
            self.answers.append(read)
        seen_late = effect.confirm and not op.confirmed and data.draw(st.booleans())
        self.finishes(op, Outcome.OK, said, run.slots[0] if seen_late else None)

    def finishes(
        self, op: Op, outcome: Outcome, reported: Reported, index: int | None = None
    ) -> None:
        self.ops.remove(op)
        name = op.effect.request
        self.feed(fact.finished(name, outcome, reported, index))

    # -- what the scheduler answers ----------------------------------------------------------

    def feed(self, event: fact.Fact) -> None:
        """Handle an event, then those that its effects caused, as the engine does."""
        self.events.append(event)
        while self.events and not self.carries_out:
            self.carries_out = True
            self.handles(self.events.pop(0))
            self.carries_out = False

    def handles(self, event: fact.Fact) -> None:
        state = self.scheduler.state
        before, draining = set(state.inventory.jobs), set(state.inventory.draining)
        for effect in self.scheduler.handle(event, self.now):
            self.takes(effect)
        for job in state.inventory.jobs.values():
            if job.id not in before and isinstance(job, RequestJob):
                assert job.slot.backend not in draining & state.inventory.draining, "a new request"
        if event.take is job_ends.finished:
            assert self.fates[event.args[0]] == ["dispatched", "accounted"]

    def takes(self, effect: ef.Effect) -> None:
        match effect:
            case (
                ef.Save()
                | ef.Restore()
                | ef.Erase()
                | ef.Prefill()
                | ef.Dispatch()
                | ef.WatchSlot()
            ):
                self.begins(effect)
            case ef.Cut():
                assert effect.snapshot.id not in self.gone
                assert 0 < effect.n_tokens < len(effect.snapshot)
                self.cutting.append(effect)
            case ef.Reject():
                self.fates[effect.request].append("rejected")
            case ef.Account():
                self.fates[effect.request.id].append("accounted")
            case ef.StopWork():
                for op in self.ops:
                    op.stopped |= op.effect.request == effect.request
            case ef.Delete():
                name = effect.snapshot.id
                assert name not in self.gone, "deleted twice, or after its quarantine"
                assert name not in self.restoring(), "deleted while it is being restored"
                self.gone.add(name)
            case ef.Detach():
                slots = self.scheduler.state.inventory.slots.of(effect.backend)
                assert {slot.phase for slot in slots} <= {Phase.LOST}
                left = [op for op in self.ops if op.server is self.servers[effect.backend]]
                # Foreign requests may use its slots for ever.
                left = [op for op in left if not op.effect.request.startswith("stranger-")]
                assert not any(isinstance(op.effect, ef.Dispatch) for op in left)
                assert not (left and self.servers[effect.backend].alive), "not over"
                self.dies(effect.backend)
                self.released.add(effect.backend)
            case ef.StartServer() | ef.StopServer() | ef.ModelReady() | ef.Limited() | ef.Prove():
                raise AssertionError("all servers here are probed, and none is on demand")
            case ef.Spent():
                pass  # nobody has a key
            case ef.Quarantine():
                assert effect.snapshot.id not in self.gone, "quarantined twice"
                self.gone.add(effect.snapshot.id)

    def begins(self, effect: Any) -> None:
        op = Op(effect, self.servers[self.slot_of(effect).backend])
        assert op.server.alive, "work for a backend that is down"
        assert op.slot.index < op.server.info.n_slots
        peers = [o for o in self.ops if o.server is op.server and not o.confirmed]
        if not isinstance(effect, ef.WatchSlot) and not op.may_go_anywhere:
            assert op.server.user_of(op.slot.index) is None, "the slot is somebody else's"
            assert all(o.slot != op.slot for o in peers), "two things at once on a slot"
            astray = [o for o in peers if o.may_go_anywhere and not o.started]
            astray = [o for o in astray if o.may_go_to(op.slot, self.prompt_of(o))]
            assert not astray, "the server may put another request there"
        if op.may_go_anywhere:
            assert op.server.idle() or not op.server.info.is_managed, "no slot to go to"
            # If the content of a slot is unknown, its prefill is taken to arrive first: it was sent
            # before.
            slots = self.scheduler.state.inventory.slots
            first = [
                isinstance(o.effect, ef.Prefill) and slots[o.slot].content.resident.may_hold_more
                for o in peers
            ]
            peers = [o for o, is_first in zip(peers, first, strict=True) if not is_first]
            actions = [o for o in peers if isinstance(o.effect, ACTIONS)]
            landing = [o for o in actions if op.may_go_to(o.slot, self.prompt_of(op))]
            assert not landing, "may land on an action"
        if isinstance(effect, ef.Restore):
            assert effect.snapshot.id not in self.gone
            tenant = self.requests[effect.request].tenant
            assert effect.snapshot.namespace == namespace_of(op.server.info, tenant)
        if isinstance(effect, ef.Dispatch):
            self.fates[effect.request].append("dispatched")
            if effect.request in self.leaving:
                self.feed(fact.finished(effect.request, Outcome.CLIENT_GONE, Reported()))
                return
        self.ops.append(op)

    def prompt_of(self, op: Op) -> Ids:
        request = self.requests[op.effect.request]
        return () if request.takes_several else self.true_prompt[request.id]

    def is_nobodys(self, slot: SlotId, request: RequestId) -> None:
        """Check that a slot the server gave away is not being prepared for another request."""
        held = self.scheduler.state.inventory.slots[slot]
        other = held.job
        if held.phase is Phase.PREPARING and other is not None and other.id != request:
            assert isinstance(other, RequestJob), "the slot is being prepared"
            assert isinstance(other.doing, AtGate), "the slot is being prepared"

    @staticmethod
    def slot_of(effect: Any) -> SlotId:
        slot: SlotId = effect.lease.slot if isinstance(effect, ef.Dispatch) else effect.slot
        return slot

    @staticmethod
    def kv_dir() -> Any:
        return backend().kv_dir

    def restoring(self) -> set[SnapshotId]:
        return {op.effect.snapshot.id for op in self.ops if isinstance(op.effect, ef.Restore)}

    def waiting(self) -> list[RequestId]:
        return [name for name, fate in self.fates.items() if not fate]

    def answering(self) -> list[RequestId]:
        """Return the requests that were sent and are not over."""
        sent = (op.effect for op in self.ops)
        return [effect.request for effect in sent if isinstance(effect, ef.Dispatch)]

    def abandoned(self) -> list[tuple[Server, RequestId]]:
        live = [server for server in self.servers.values() if server.alive]
        return [(s, name) for s in live for name, run in s.runs.items() if run.abandoned]
