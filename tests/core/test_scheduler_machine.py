"""The scheduler, with servers that answer in any order, fail, restart and lose their clients."""

import os
from math import inf
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from router.base.tokens import pack, unpack
from router.base.types import (
    NO_TENANT,
    BackendId,
    MemoryKind,
    Namespace,
    Outcome,
    Prompt,
    Reported,
    RequestId,
    SlotStatus,
    Tenant,
)
from router.core.admission.backend_attach import probe_name
from router.core.execution import placement_gate
from router.core.model import effects as ef
from router.core.model.jobs import AtGate, InPrefillQueue, RequestJob
from router.core.model.policy import PolicyName, SnapshotLimits
from router.core.model.request_queue import QueueLimits
from router.core.model.slots import Phase
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.planning import prefill
from router.core.planning.planner import plan
from tests.support.scheduler import fact
from tests.support.scheduler.build import NS, A, B, backend, rates, request, scheduler
from tests.support.scheduler.driven import wakeup
from tests.support.scheduler.model_server import Ids, Server
from tests.support.scheduler.world import ANSWERS, PROMPTS, World

BRANCH_SAVES = True
_CANNOT_GO_BACK = (MemoryKind.HYBRID, MemoryKind.SLIDING_WINDOW)


class SchedulerMachine(World, RuleBasedStateMachine):
    """State machine: the rules act as the world, and the model servers hold the truth."""

    @initialize(
        policy=st.sampled_from([*PolicyName, *list(PolicyName)[:3] * 2]),
        idle_save=st.sampled_from([None, None, 0.5]),
        kind=st.sampled_from([MemoryKind.FULL, MemoryKind.FULL, *_CANNOT_GO_BACK]),
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        b=st.fixed_dictionaries(
            {
                "keeps_idle_slots": st.booleans(),
                "namespace": st.sampled_from([NS, NS, NS, Namespace("other")]),
                "n_ctx": st.sampled_from([100, 12]),
                "n_stream": st.sampled_from([1, 2]),
                "max_running": st.sampled_from([None, None, 1, 2]),
            }
        ),
        coalesce=st.sampled_from([None, 0.0, 0.1]),
        piece=st.sampled_from([None, 0.0]),
        max_tokens=st.sampled_from([-1, 20, 0]),
        room=st.sampled_from([100, 3]),
        apart=st.booleans(),
    )
    def begin(
        self,
        policy: PolicyName,
        idle_save: float | None,
        kind: MemoryKind,
        sizes: tuple[int, int],
        b: dict[str, Any],
        coalesce: float | None,
        piece: float | None,
        max_tokens: int,
        room: int,
        apart: bool,
    ) -> None:
        self.tenants = (Tenant("x"), Tenant("y")) if apart else (NO_TENANT,)
        # Prompts are short here.
        self.small = mock.patch.object(prefill, "TUNING", replace(TUNING, chunk_least=2))
        self.small.start()
        infos = [
            backend("a", sizes[0], memory_kind=kind, n_ctx=100, cuts=True),
            backend("b", sizes[1], memory_kind=kind, cuts=True, **b),
        ]
        made = scheduler(
            *infos,
            policy=policy,
            coalesce_above_s=coalesce,
            prefill_chunk_s=piece,
            max_wait_s=2.0,
            idle_save_after_s=idle_save,
            keeps_apart=apart,
            limits=SnapshotLimits(max_tokens=max_tokens),
            queue=QueueLimits(max_requests=room, deadline_s=20.0, no_backend_s=5.0),
        )
        self.populate(made, infos)

    # -- rules -------------------------------------------------------------------------------

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=3),
        kind=st.sampled_from(
            [
                *("plain", "plain", "silent", "later", "unpinned", "whole", "two"),
                *("unknown", "left", "fresh", "warm"),
            ]
        ),
        hint=st.sampled_from([None, None, None, 0, 1]),
        session=st.sampled_from([None, "x"]),
        whose=st.integers(0, 1),
        leaves=st.integers(0, 4),
    )
    def arrive(
        self,
        prompts: list[Ids],
        kind: str,
        hint: int | None,
        session: str | None,
        whose: int,
        leaves: int,
    ) -> None:
        tenant = self.tenants[whose % len(self.tenants)]
        variants: dict[str, dict[str, Any]] = {
            "plain": {"boundaries": True},
            "silent": {"boundaries": True, "streams": False, "keep_s": 50.0, "background": True},
            "later": {"streams": False, "background": True},
            "unpinned": {"pinnable": False},
            "whole": {"pinnable": False, "whole_backend": True},
            "two": {"pinnable": False, "tasks": 2},
            "unknown": {"prompt": Prompt(unknown="media")},
            "left": {"prompt": Prompt(unknown="infill"), "server_picks": True},
            "fresh": {"reuse": False},
            "warm": {"boundaries": True, "warms": True, "keep_s": inf},
        }
        for prompt in prompts:
            name = f"r{len(self.requests)}"
            more = dict(variants[kind])
            if more.pop("boundaries", False):
                positions = {1, len(prompt) // 2, len(prompt) - 1} - {0}
                more["prompt"] = Prompt(pack(prompt), boundaries=tuple(sorted(positions)))
            asked = request(name, prompt, slot_hint=hint, session=session, tenant=tenant, **more)
            self.requests[asked.id] = asked
            self.true_prompt[asked.id] = prompt
            self.fates[asked.id] = []
            if leaves == 4:
                self.leaving.add(asked.id)
            self.feed(fact.arrived(asked))

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def cancelled(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting()))
        self.fates[name].append("cancelled")
        self.feed(fact.cancelled(name))

    @precondition(lambda self: self.ops)
    @rule(data=st.data(), steps=st.integers(1, 5))
    def goes_on(self, data: st.DataObject, steps: int) -> None:
        for _ in range(steps):
            if self.ops:
                self.advance(data.draw(st.sampled_from(self.ops)), data)

    @precondition(lambda self: self.ops)
    @rule(data=st.data(), steps=st.integers(1, 5))
    def one_goes_on(self, data: st.DataObject, steps: int) -> None:
        op = data.draw(st.sampled_from(self.ops))
        for _ in range(steps):
            if op in self.ops:
                self.advance(op, data)

    @precondition(lambda self: self.answering())
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        self.feed(fact.begun(data.draw(st.sampled_from(self.answering()))))

    @precondition(lambda self: self.cutting)
    @rule(ok=st.booleans())
    def is_cut(self, ok: bool) -> None:
        self.cuts(self.cutting.pop(0), ok)

    @precondition(lambda self: self.abandoned())
    @rule(data=st.data(), answer=ANSWERS)
    def server_notices(self, data: st.DataObject, answer: Ids) -> None:
        server, name = data.draw(st.sampled_from(self.abandoned()))
        server.end(name, data.draw(st.integers(0, 20)), answer)

    @precondition(lambda self: self.answers)
    @rule()
    def answer_is_read(self) -> None:
        self.feed(self.answers.pop(0))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]), name=st.sampled_from([A, B]))
    def ticks(self, seconds: float, name: BackendId) -> None:
        """Advance the clock; one backend becomes slow, so that its content is worth a copy."""
        for backend_ in self.scheduler.state.inventory.backends.values():
            backend_.rates = rates(0.5 if backend_.id == name else 0.01)
        self.now += seconds
        self.feed(fact.tick())

    @rule(name=st.sampled_from([A, B]), chance=st.integers(0, 5))
    def goes_down(self, name: BackendId, chance: int) -> None:
        if chance == 3:
            self.dies(name)
            self.feed(fact.backend_down(name))

    @precondition(lambda self: not all(s.alive for s in self.servers.values()))
    @rule(name=st.sampled_from([A, B]), n_slots=st.integers(1, 3), held=PROMPTS, data=st.data())
    def comes_up(self, name: BackendId, n_slots: int, held: Ids, data: st.DataObject) -> None:
        """Start a new process, perhaps before the old one is known to be gone."""
        self.dies(name)
        self.released.discard(name)
        info = self.infos[name] = replace(self.infos[name], n_slots=n_slots)
        server = self.servers[name] = Server(info, [held] * n_slots)
        strangers = data.draw(st.sets(st.integers(0, n_slots - 1), max_size=2))
        for index in strangers:
            server.start(RequestId(f"stranger{index}"), (*held, 2), [index]).abandoned = True
        self.feed(
            fact.backend_up(
                info,
                tuple(
                    SlotStatus(i, i in strangers, len(server.slots[i]), info.n_ctx)
                    for i in range(n_slots)
                ),
            )
        )

    @rule(name=st.sampled_from([A, B]), chance=st.integers(0, 3))
    def is_to_leave(self, name: BackendId, chance: int) -> None:
        """Drain a backend: it gets no new requests until it is undrained."""
        if chance:
            return
        self.feed(fact.draining(name))
        assert name in self.released or name in self.scheduler.state.inventory.draining

    @precondition(lambda self: self.scheduler.state.inventory.draining)
    @rule()
    def is_to_stay(self) -> None:
        self.feed(fact.undrained(min(self.scheduler.state.inventory.draining)))

    @precondition(lambda self: self.released)
    @rule()
    def is_removed(self) -> None:
        name = min(self.released)
        self.feed(fact.removed(name))
        assert not self.scheduler.state.inventory.slots.of(name)

    @rule(
        max_tokens=st.sampled_from([-1, 30, 12, 0]),
        room=st.sampled_from([100, 2]),
        policy=st.sampled_from(PolicyName),
        chance=st.integers(0, 5),
    )
    def is_configured(self, max_tokens: int, room: int, policy: PolicyName, chance: int) -> None:
        if chance:
            return
        state = self.scheduler.state
        limits, queue = (
            SnapshotLimits(max_tokens=max_tokens),
            replace(state.queue.limits, max_requests=room),
        )
        self.feed(fact.configured(replace(state.inventory.policy, name=policy), limits, queue))
        assert not state.inventory.catalog._exceeds(state.inventory.catalog.total_tokens, 0)
        assert len(state.queue) <= room

    @precondition(lambda self: self.files)
    @rule(data=st.data(), chance=st.integers(0, 3))
    def purged(self, data: st.DataObject, chance: int) -> None:
        """Purge present or former snapshots, in use or not."""
        if chance == 0:
            names = data.draw(st.sets(st.sampled_from(sorted(self.files)), min_size=1, max_size=3))
            self.feed(fact.purged(tuple(sorted(names))))
            assert not any(name in self.scheduler.state.inventory.catalog for name in names)

    @precondition(lambda self: self.files.keys() - self.gone)
    @rule(data=st.data(), chance=st.integers(0, 2))
    def withdrawn(self, data: st.DataObject, chance: int) -> None:
        """Withdraw a snapshot that the store cannot reach; a restore in progress continues."""
        if chance == 0:
            name = data.draw(st.sampled_from(sorted(self.files.keys() - self.gone)))
            self.feed(fact.snapshot_lost(name))
            assert name not in self.scheduler.state.inventory.catalog

    @precondition(lambda self: self.files.keys() - self.gone)
    @rule(data=st.data())
    def offered_again(self, data: st.DataObject) -> None:
        """Offer a snapshot again, perhaps one that was never away or is still being read."""
        name = data.draw(st.sampled_from(sorted(self.files.keys() - self.gone)))
        self.feed(fact.snapshots_found((self.files[name],)))

    @rule(name=st.sampled_from([A, B]), chance=st.integers(0, 2))
    def is_tried_out(self, name: BackendId, chance: int) -> None:
        """Probe a backend in slots that are lent for it; their content is lost."""
        if chance or name in self.probing or not self.servers[name].alive:
            return
        self.feed(fact.probe_due(name))
        if probe_name(name) in self.scheduler.state.inventory.jobs:
            self.probing.add(name)
            self.try_out(self.servers[name])

    @precondition(lambda self: self.probing)
    @rule()
    def was_tried_out(self) -> None:
        name = self.probing.pop()
        self.feed(fact.probed(self.infos[name]))

    @precondition(lambda self: not self.stopping)
    @rule(chance=st.integers(0, 19), save=st.booleans())
    def stops(self, chance: int, save: bool) -> None:
        if chance == 19:
            self.stopping = True
            self.feed(fact.stopping(save))

    def jobs(self) -> list[RequestJob]:
        jobs = self.scheduler.state.inventory.jobs.values()
        return [job for job in jobs if isinstance(job, RequestJob)]

    # -- invariants --------------------------------------------------------------------------

    @invariant()
    def leases_are_what_is_held(self) -> None:
        state = self.scheduler.state
        jobs = state.inventory.jobs.values()
        held = [slot.id for job in jobs for slot in job.held if slot.job is job]
        used = [s.id for s in state.inventory.slots if s.phase not in (Phase.IDLE, Phase.LOST)]
        assert sorted(held) == sorted(used)

    @invariant()
    def each_request_has_one_fate(self) -> None:
        fates: tuple[list[str], ...] = (
            [],
            ["cancelled"],
            ["rejected"],
            ["dispatched"],
            ["dispatched", "accounted"],
        )
        assert all(fate in fates for fate in self.fates.values()), self.fates
        queued = {waiting.request.id for waiting in self.scheduler.state.queue}
        assert set(self.waiting()) <= queued | self.scheduler.state.inventory.jobs.keys()

    @invariant()
    def what_is_claimed_is_there(self) -> None:
        inventory = self.scheduler.state.inventory
        # On a gated backend, a start that is not reported yet may have cleared a slot. A probe
        # may have cleared one, too, until the probe ends.
        for name in inventory.up.keys() - inventory.gated - self.probing:
            for slot in inventory.slots.of(name):
                if slot.is_idle:
                    true = self.servers[name].slots[slot.id.index]
                    known = tuple(unpack(slot.content.resident.tokens))
                    assert true[: len(known)] == known, slot

    @invariant()
    def nobody_waits_beside_an_idle_backend(self) -> None:
        state = self.scheduler.state
        idle = [
            name
            for name in state.inventory.up
            if all(slot.is_idle for slot in state.inventory.slots.of(name))
        ]
        for waiting in state.queue:
            if not any(backend.id in idle for backend in state.inventory.serving(waiting.request)):
                continue
            asked = replace(waiting.request, avoid=frozenset(state.inventory.up.keys() - idle))
            if plan(asked, state.inventory, self.now, self.now - waiting.since) is None:
                continue  # `sticky`, and its home is busy
            decision = plan(waiting.request, state.inventory, self.now, self.now - waiting.since)
            assert decision is None or decision.chosen.wait_for is not None
            # `sticky` waits for its home, and a long answer for a slot that can hold it.
            waits = (
                state.inventory.policy.name is PolicyName.STICKY or waiting.request.max_new_tokens
            )
            assert decision is not None or waits

    @invariant()
    def nobody_waits_for_a_turn_that_nobody_has(self) -> None:
        state = self.scheduler.state
        waiting = [job for job in self.jobs() if isinstance(job.doing, InPrefillQueue)]
        queues = {name: there.prefills for name, there in state.inventory.up.items()}
        assert set(waiting) == {one for q in queues.values() for one in q.waiting}
        for job in waiting:
            assert not job.cancelled or job.for_others  # others wait for its prefill
            permit_until = queues[job.slot.backend].permit_until
            wakeup = self.scheduler.next_wakeup(self.now)
            assert wakeup is not None
            assert self.now < permit_until
            assert wakeup <= permit_until

    @invariant()
    def nobody_waits_at_the_gate_for_nothing(self) -> None:
        state = self.scheduler.state
        waiting = [job for job in self.jobs() if isinstance(job.doing, AtGate)]
        gates = {name: there.gate for name, there in state.inventory.up.items()}
        assert set(waiting) == {one for gate in gates.values() for one in gate.waiting}
        assert not any(placement_gate.is_free(state, job) or job.cancelled for job in waiting)
        assert not {job.id for job in waiting} & {gate.holder for gate in gates.values()}

    @invariant()
    def what_is_in_use_is_counted(self) -> None:
        state = self.scheduler.state
        used = sum(n for _, _, n in state.inventory.catalog.snapshots())
        jobs = [job.using for job in self.jobs() if job.using is not None]
        assert used <= len(jobs) + len(state.under_way)
        waited = {order.request for order, _ in state.under_way.values()}
        assert waited <= {op.effect.request for op in self.ops} | {c.request for c in self.cutting}

    @invariant()
    def what_was_kept_is_what_looking_would_find(self) -> None:
        """Check cached values: the next look at idle slots, and reach with the catalog."""
        inventory = self.scheduler.state.inventory
        assert self.scheduler.state.idle_saves_at <= wakeup(self.scheduler.state)
        for slot in inventory.slots:
            info = inventory.info(slot.id.backend)
            if info is not None:
                namespace = namespace_of(info, slot.content.tenant)
                held = slot.content.resident.tokens
                found = inventory.catalog.reach(info.memory_kind, namespace, held)
                assert inventory.reach(slot) == found

    def teardown(self) -> None:
        """End all outstanding work, and check that nothing is held any more."""
        if not hasattr(self, "scheduler"):
            return
        self.small.stop()
        for _ in range(10_000):
            self.settle()
            if not self.ops and not self.cutting and not self.abandoned():
                break
        state = self.scheduler.state
        assert state.inventory.jobs == {}
        assert state.inventory.gated == set()
        assert state.inventory.draining == set()
        assert state.under_way == {}
        assert all(entry.references == 0 for entry in state.inventory.catalog._entries.values())
        assert not any(entry.doomed for entry in state.inventory.catalog._entries.values())

    def settle(self) -> None:
        """Take one step towards the end, without choices."""
        for server, name in self.abandoned():
            server.end(name, 20, (1,))
        while self.cutting:
            self.cuts(self.cutting.pop(), ok=True)
        while self.probing:
            self.was_tried_out()
        # A slot in use is not idle before its request has ended.
        used = (
            isinstance(o.effect, ef.WatchSlot) and o.server.user_of(o.slot.index) for o in self.ops
        )
        op = next((op for op, waits in zip(self.ops, used, strict=True) if not waits), None)
        if op is None:
            return
        match op.effect:
            case ef.Save():
                self.saves(op, op.effect, ok=True)
            case ef.Restore():
                self.restores(op, op.effect, "ok")
            case ef.Erase():
                self.erases(op, op.effect, ok=True)
            case ef.Prefill():
                self.prefills(op, op.effect, 1)
            case ef.Dispatch():
                if op.started and op.server.alive:
                    op.server.runs[op.effect.request].abandoned = True
                self.finishes(op, Outcome.CLIENT_GONE, Reported())
            case ef.WatchSlot():
                self.ops.remove(op)
                self.feed(fact.quiet(op.effect.request, len(op.server.slots[op.slot.index])))


TestSchedulerMachine = SchedulerMachine.TestCase
# `make soak` runs for longer.
TestSchedulerMachine.settings = settings(
    max_examples=int(os.environ.get("KVFERRY_MACHINE_EXAMPLES", "200")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
