"""The scheduler against servers that answer in any order, fail, restart and lose their clients."""

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.core import effects as ef
from router.core import events as ev
from router.core.catalog import Limits
from router.core.planner import plan
from router.core.policy import PolicyName
from router.core.queue import QueueLimits
from router.core.slots import Phase
from router.tokens import pack, unpack
from router.types import (
    BackendId,
    MemoryKind,
    Namespace,
    Outcome,
    Prompt,
    Reported,
    RequestId,
    SlotId,
    SlotStatus,
    Snapshot,
    SnapshotId,
)
from tests.core.build import NS, A, B, backend, request, scheduler
from tests.core.model_server import Ids, Server

ROOTS: tuple[Ids, ...] = ((), (1,) * 4, (1,) * 10, (1, 1, 1, 1, 2, 2, 2, 2))
PROMPTS = st.builds(
    lambda root, rest: root + tuple(rest),
    st.sampled_from(ROOTS),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4),
)
ANSWERS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4).map(tuple)
Answerable = ef.Save | ef.Restore | ef.Prefill | ef.Dispatch | ef.Watch
ACTIONS = (ef.Save, ef.Restore, ef.Prefill)


class Op:
    """An effect that has not been answered, and the server it went to."""

    def __init__(self, effect: Answerable, server: Server) -> None:
        self.effect, self.server = effect, server
        self.held: Ids = ()  # by the slot when its server died
        self.started = self.confirmed = self.stopped = False

    def __repr__(self) -> str:
        return f"<{type(self.effect).__name__} {self.effect.request} {self.slot}>"

    @property
    def slot(self) -> SlotId:
        return self.effect.lease.slot if isinstance(self.effect, ef.Dispatch) else self.effect.slot

    @property
    def may_go_anywhere(self) -> bool:
        return isinstance(self.effect, ef.Dispatch) and not self.effect.pin


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what the world does; the model servers are what is true."""

    @initialize(
        policy=st.sampled_from(PolicyName),
        kind=st.sampled_from([MemoryKind.FULL, MemoryKind.FULL, MemoryKind.HYBRID]),
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        b=st.fixed_dictionaries(
            {
                "keeps_idle_slots": st.booleans(),
                "namespace": st.sampled_from([NS, NS, NS, Namespace("other")]),
                "n_ctx": st.sampled_from([100, 12]),
            }
        ),
        coalesce=st.sampled_from([None, 0.0, 0.1]),
        max_tokens=st.sampled_from([-1, 20, 0]),
        room=st.sampled_from([100, 3]),
    )
    def begin(
        self,
        policy: PolicyName,
        kind: MemoryKind,
        sizes: tuple[int, int],
        b: dict[str, Any],
        coalesce: float | None,
        max_tokens: int,
        room: int,
    ) -> None:
        infos = [
            backend("a", sizes[0], memory_kind=kind, n_ctx=100),
            backend("b", sizes[1], memory_kind=kind, **b),
        ]
        self.scheduler = scheduler(
            *infos,
            policy=policy,
            coalesce_above_s=coalesce,
            max_wait_s=2.0,
            limits=Limits(max_tokens=max_tokens),
            queue=QueueLimits(max_requests=room, deadline_s=20.0, no_backend_s=5.0),
        )
        self.infos = {info.id: info for info in infos}
        self.servers = {info.id: Server(info) for info in infos}
        self.now = 1.0
        self.ops: list[Op] = []
        self.requests: dict[RequestId, ev.Arrived] = {}
        self.fates: dict[RequestId, list[str]] = {}
        self.files: dict[SnapshotId, Snapshot] = {}
        self.gone: set[SnapshotId] = set()
        self.answers: list[ev.AnswerRead] = []
        self.stopping = False

    # -- the world ---------------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        kind=st.sampled_from(["plain", "plain", "plain", "unpinned", "whole", "unknown", "fresh"]),
        hint=st.sampled_from([None, None, None, 0, 1]),
        session=st.sampled_from([None, "x"]),
    )
    def arrives(self, prompt: Ids, kind: str, hint: int | None, session: str | None) -> None:
        name = f"r{len(self.requests)}"
        more: dict[str, Any] = {
            "plain": {},
            "unpinned": {"pinnable": False},
            "whole": {"pinnable": False, "whole_backend": True},
            "unknown": {"prompt": Prompt(unknown="media")},
            "fresh": {"reuse": False},
        }[kind]
        arrived = ev.Arrived(request(name, prompt, slot_hint=hint, session=session, **more))
        self.requests[arrived.request.id] = arrived
        self.true_prompt = getattr(self, "true_prompt", {})
        self.true_prompt[arrived.request.id] = prompt
        self.fates[arrived.request.id] = []
        self.feed(arrived)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting()))
        self.fates[name].append("cancelled")
        self.feed(ev.Cancelled(name))

    @precondition(lambda self: self.ops)
    @rule(data=st.data())
    def goes_on(self, data: st.DataObject) -> None:
        self.advance(data.draw(st.sampled_from(self.ops)), data)

    @precondition(lambda self: self.ops)
    @rule(data=st.data())
    def goes_on_again(self, data: st.DataObject) -> None:
        self.advance(data.draw(st.sampled_from(self.ops)), data)

    @precondition(lambda self: self.abandoned())
    @rule(data=st.data(), answer=ANSWERS)
    def server_notices(self, data: st.DataObject, answer: Ids) -> None:
        server, name = data.draw(st.sampled_from(self.abandoned()))
        server.end(name, data.draw(st.integers(0, 20)), answer)

    @precondition(lambda self: self.answers)
    @rule()
    def answer_is_read(self) -> None:
        self.feed(self.answers.pop(0))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def ticks(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    @rule(name=st.sampled_from([A, B]))
    def goes_down(self, name: BackendId) -> None:
        self.dies(name)
        self.feed(ev.BackendDown(name))

    @rule(name=st.sampled_from([A, B]), n_slots=st.integers(1, 3), held=PROMPTS, data=st.data())
    def comes_up(self, name: BackendId, n_slots: int, held: Ids, data: st.DataObject) -> None:
        """A new process, perhaps before anybody noticed that the old one was gone."""
        self.dies(name)
        info = self.infos[name] = replace(self.infos[name], n_slots=n_slots)
        server = self.servers[name] = Server(info, [held] * n_slots)
        strangers = data.draw(st.sets(st.integers(0, n_slots - 1), max_size=2))
        for index in strangers:
            server.start(RequestId(f"stranger{index}"), held + (2,), [index]).abandoned = True
        self.feed(
            ev.BackendUp(
                info,
                tuple(
                    SlotStatus(i, i in strangers, len(server.slots[i]), info.n_ctx)
                    for i in range(n_slots)
                ),
            )
        )

    @precondition(lambda self: not self.stopping)
    @rule(chance=st.integers(0, 9), save=st.booleans())
    def stops(self, chance: int, save: bool) -> None:
        if chance == 0:
            self.stopping = True
            self.feed(ev.Stopping(save))

    def dies(self, name: BackendId) -> None:
        for op in self.ops:
            if op.server is self.servers[name] and op.server.alive:
                op.held = op.server.slots[op.slot.index]
        self.ops = [
            op
            for op in self.ops
            if op.server is not self.servers[name] or not isinstance(op.effect, ef.Watch)
        ]
        self.servers[name].alive = False

    # -- what becomes of effects -------------------------------------------------------------

    def advance(self, op: Op, data: st.DataObject) -> None:
        match op.effect:
            case ef.Save():
                self.saves(op, op.effect, data.draw(st.booleans()))
            case ef.Restore():
                self.restores(op, op.effect, data.draw(st.sampled_from(["ok", "no", "bad"])))
            case ef.Prefill():
                self.prefills(op, op.effect, data.draw(st.integers(0, 3)))
            case ef.Watch():
                if op.server.user_of(op.slot.index) is None:
                    self.ops.remove(op)
                    self.feed(ev.Quiet(op.effect.request, len(op.server.slots[op.slot.index])))
            case ef.Dispatch():
                self.relays(op, op.effect, data)

    def saves(self, op: Op, effect: ef.Save, ok: bool) -> None:
        self.ops.remove(op)
        held = op.server.slots[op.slot.index] if op.server.alive else op.held
        if not ok or not held:
            self.feed(ev.SaveFailed(effect.request, op.slot, "no"))
            return
        name = SnapshotId(f"s{len(self.files)}")
        made = Snapshot(name, effect.namespace, self.place(), pack(held), 1000 * len(held))
        self.files[name] = made
        self.feed(ev.Saved(effect.request, op.slot, made, 0.001))

    def restores(self, op: Op, effect: ef.Restore, how: str) -> None:
        self.ops.remove(op)
        held = tuple(unpack(effect.snapshot.tokens))
        if how == "ok" and op.server.alive:
            assert len(held) <= op.server.info.n_ctx, "a snapshot that the slot cannot hold"
            op.server.slots[op.slot.index] = held
            self.feed(ev.Restored(effect.request, effect.snapshot.id, len(held), 0.001))
            return
        if op.server.alive:
            op.server.slots[op.slot.index] = ()
        self.feed(ev.RestoreFailed(effect.request, effect.snapshot.id, "no", how == "bad"))

    def prefills(self, op: Op, effect: ef.Prefill, how: int) -> None:
        ids, name = tuple(unpack(effect.tokens)), RequestId(f"prefill {effect.request}")
        if op.server.alive and not op.started:
            op.server.start(name, ids, [op.slot.index])
            op.started = True
            return
        self.ops.remove(op)
        if op.server.alive:
            cached = op.server.runs[name].cached
            if how and not op.stopped:
                op.server.end(name, len(ids), (0,))
                reported = Reported(len(ids), cached, 0.01 * (len(ids) - cached))
                self.feed(ev.Prefilled(effect.request, reported))
                return
            op.server.end(name, how, ())
        self.feed(ev.PrefillFailed(effect.request, "no"))

    def relays(self, op: Op, effect: ef.Dispatch, data: st.DataObject) -> None:
        asked = self.requests[effect.request].request
        ids = self.true_prompt[effect.request]
        if not op.server.alive:
            self.finishes(op, Outcome.BACKEND_ERROR, Reported())
        elif not op.started:
            if data.draw(st.integers(0, 4)) == 0:
                outcome = data.draw(st.sampled_from([Outcome.CLIENT_GONE, Outcome.REFUSED]))
                self.finishes(op, outcome, Reported())
                return
            op.started = True
            slots = [op.slot.index]
            if not effect.pin:
                slots = [data.draw(st.sampled_from(op.server.idle()))]
            if asked.whole_backend:
                slots = op.server.idle()
            op.server.start(effect.request, ids, slots)
        elif effect.confirm and not op.confirmed and data.draw(st.booleans()):
            op.confirmed = True
            self.feed(ev.Launched(effect.request, op.server.runs[effect.request].slots[0]))
        elif data.draw(st.integers(0, 3)) == 0:
            op.server.runs[effect.request].abandoned = True
            outcome = data.draw(st.sampled_from([Outcome.CLIENT_GONE, Outcome.BACKEND_ERROR]))
            self.finishes(op, outcome, Reported())
        else:
            self.answers_well(op, effect, ids, data)

    def answers_well(self, op: Op, effect: ef.Dispatch, ids: Ids, data: st.DataObject) -> None:
        answer: Ids = data.draw(ANSWERS)
        run = op.server.runs[effect.request]
        op.server.end(effect.request, len(ids), answer)
        said = Reported(len(ids), run.cached, 0.01 * (len(ids) - run.cached), len(answer), 0.1)
        if data.draw(st.booleans()):
            said = replace(said, generated=pack(answer))
        else:
            lease, true = effect.lease, self.requests[effect.request].request.prompt.tokens
            read = ev.AnswerRead(lease.slot, lease.generation, true, pack(answer))
            self.answers.append(read)
        self.finishes(op, Outcome.OK, said)

    def finishes(self, op: Op, outcome: Outcome, reported: Reported) -> None:
        self.ops.remove(op)
        self.feed(ev.Finished(op.effect.request, outcome, reported))

    # -- what the scheduler answers ----------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        before = len(self.scheduler.state.fleet.catalog)
        assert before >= 0
        for effect in self.scheduler.handle(event, self.now):
            self.takes(effect)
        if isinstance(event, ev.Finished):
            assert self.fates[event.request] == ["dispatched", "accounted"]

    def takes(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Save() | ef.Restore() | ef.Prefill() | ef.Dispatch() | ef.Watch():
                self.begins(effect)
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
            case ef.Quarantine():
                assert effect.snapshot.id not in self.gone, "quarantined twice"
                self.gone.add(effect.snapshot.id)

    def begins(self, effect: Any) -> None:
        op = Op(effect, self.servers[self.slot_of(effect).backend])
        assert op.server.alive, "work for a backend that is down"
        assert op.slot.index < op.server.info.n_slots
        peers = [o for o in self.ops if o.server is op.server and not o.confirmed]
        if not isinstance(effect, ef.Watch) and not op.may_go_anywhere:
            assert op.server.user_of(op.slot.index) is None, "the slot is somebody else's"
            assert all(o.slot != op.slot for o in peers), "two things at once on a slot"
            astray = [o for o in peers if o.may_go_anywhere and not o.started]
            assert not astray, "the server may put another request there"
        if op.may_go_anywhere:
            assert op.server.idle(), "no slot to go to"
            assert not any(isinstance(o.effect, ACTIONS) for o in peers), "may land on an action"
        if isinstance(effect, ef.Restore):
            assert effect.snapshot.id not in self.gone
            assert effect.snapshot.namespace == op.server.info.namespace
        if isinstance(effect, ef.Dispatch):
            self.fates[effect.request].append("dispatched")
        self.ops.append(op)

    @staticmethod
    def slot_of(effect: Any) -> SlotId:
        slot: SlotId = effect.lease.slot if isinstance(effect, ef.Dispatch) else effect.slot
        return slot

    @staticmethod
    def place() -> Any:
        return backend().place

    def restoring(self) -> set[SnapshotId]:
        return {op.effect.snapshot.id for op in self.ops if isinstance(op.effect, ef.Restore)}

    def waiting(self) -> list[RequestId]:
        return [name for name, fate in self.fates.items() if not fate]

    def abandoned(self) -> list[tuple[Server, RequestId]]:
        live = [server for server in self.servers.values() if server.alive]
        return [(s, name) for s in live for name, run in s.runs.items() if run.abandoned]

    # -- promises ----------------------------------------------------------------------------

    @invariant()
    def leases_are_what_is_held(self) -> None:
        state = self.scheduler.state
        leases = [lease for job in state.jobs.values() for lease in (job.lease, *job.others)]
        held = [lease.slot for lease in leases if state.fleet.slots.holds(lease)]
        used = [s.id for s in state.fleet.slots if s.phase not in (Phase.IDLE, Phase.LOST)]
        assert sorted(held) == sorted(used)

    @invariant()
    def each_request_has_one_fate(self) -> None:
        fates = ([], ["cancelled"], ["rejected"], ["dispatched"], ["dispatched", "accounted"])
        assert all(fate in fates for fate in self.fates.values()), self.fates

    @invariant()
    def what_is_claimed_is_there(self) -> None:
        fleet = self.scheduler.state.fleet
        # Behind a gate a start may have emptied a slot that nobody has heard of yet.
        for name in fleet.infos.keys() - fleet.gated:
            for slot in fleet.slots.of(name):
                if slot.is_idle:
                    true = self.servers[name].slots[slot.id.index]
                    known = tuple(unpack(slot.resident.tokens))
                    assert true[: len(known)] == known, slot

    @invariant()
    def nobody_waits_beside_an_idle_backend(self) -> None:
        state = self.scheduler.state
        idle = [
            name
            for name in state.fleet.infos
            if all(slot.is_idle for slot in state.fleet.slots.of(name))
        ]
        for waiting in state.queue:
            if not any(state.fleet.serves(name, waiting.request) for name in idle):
                continue
            asked = replace(waiting.request, avoid=frozenset(state.fleet.infos.keys() - idle))
            if plan(asked, state.fleet, self.now, self.now - waiting.since) is None:
                continue  # `sticky`, whose home is busy
            decision = plan(waiting.request, state.fleet, self.now, self.now - waiting.since)
            assert decision is None or decision.chosen.wait_for is not None
            assert state.fleet.policy.name is PolicyName.STICKY or decision is not None

    @invariant()
    def what_is_in_use_is_counted(self) -> None:
        state = self.scheduler.state
        used = sum(n for _, _, n in state.fleet.catalog.snapshots())
        jobs = [job.using for job in state.jobs.values() if job.using is not None]
        assert used <= len(jobs) + len(state.late)
        assert set(state.late) <= {op.effect.request for op in self.ops}

    def teardown(self) -> None:
        """Everything outstanding comes to its end: nothing is held any more."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            self.settle()
            if not self.ops and not self.abandoned():
                break
        state = self.scheduler.state
        assert state.jobs == {}
        assert state.fleet.gated == set()
        assert state.late == {}
        assert all(entry.references == 0 for entry in state.fleet.catalog._entries.values())
        assert not any(entry.doomed for entry in state.fleet.catalog._entries.values())

    def settle(self) -> None:
        """One step nearer to the end, without choices."""
        for server, name in self.abandoned():
            server.end(name, 20, (1,))
        if not self.ops:
            return
        op = self.ops[0]
        match op.effect:
            case ef.Save():
                self.saves(op, op.effect, ok=True)
            case ef.Restore():
                self.restores(op, op.effect, "ok")
            case ef.Prefill():
                self.prefills(op, op.effect, 1)
            case ef.Dispatch():
                if op.started and op.server.alive:
                    op.server.runs[op.effect.request].abandoned = True
                self.finishes(op, Outcome.CLIENT_GONE, Reported())
            case ef.Watch():
                self.ops.remove(op)
                self.feed(ev.Quiet(op.effect.request, len(op.server.slots[op.slot.index])))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(__import__("os").environ.get("N", "150")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
