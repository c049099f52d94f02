"""Operators' own prompts: plan one without effect, or have it computed and saved ahead of use."""

from dataclasses import dataclass
from math import inf

from aiohttp import web
from msgspec.structs import replace

from router.base.errors import BadRequestError, ConflictError
from router.base.tokens import count
from router.base.types import BackendId, Outcome, Reported, Request
from router.core.model.effects import AnswerEnd
from router.core.model.tenancy import namespace_of, salted
from router.engine.engine import Engine
from router.llama import json_offload
from router.llama.bodies.hints import seconds_of
from router.llama.routes import shape_of
from router.llama.wire import parse_completion
from router.web.admin.guard import Guard
from router.web.admin.requests import plan_json
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.api.completions import Completions
from router.web.server.call import Call
from router.web.server.error_responses import json_response
from router.web.server.inbound import Bodies
from router.web.server.settings import Settings

WARM = "/kvferry/warm"

_MOST_DIGITS = 6  # of a time


@dataclass(slots=True, eq=False)
class PromptRoutes:
    """The handlers. The body of each call is that of a request; nothing is sent to a client."""

    _engine: Engine
    _selection: BackendSelection
    _completions: Completions
    _bodies: Bodies
    _guard: Guard
    _settings: Settings
    _keys: Keys

    async def plan(self, call: Call) -> web.Response:
        """Run the planner without effect: candidates, prices, choice.

        `?path=` names the route, chat by default; `?tenant=` the tenant, where tenants are kept
        apart. Raises BadRequestError.
        """
        await self._parse(call)
        await self._describe(call)
        described = call.scheduled
        made = self._engine.plan(described)
        return json_response(
            {
                "prompt_tokens": None if described.prompt.unknown else len(described.prompt),
                "unknown": described.prompt.unknown,
                "plan": plan_json(made) if made else None,
                "reason": made.reason if made else "no slot is free: the request would wait",
            }
        )

    async def warm(self, call: Call) -> web.Response:
        """Compute and save the prompt of a request, and protect it from eviction.

        `?keep=` is a time such as `24h`, or `always`; `?path=` and `?tenant=` as for `plan`. Waits
        for a slot like any request. Raises RouterError.
        """
        self._guard.check(call.http)
        keep_s = _keep_s(call.http.query.get("keep", "always"))
        await self._parse(call)
        try:
            await self._describe(call)
            while call.reader is None and self._selection.can_wait_for_reader(call.model):
                await self._selection.wait_for_reader(call.model, call.id)
                await self._describe(call)
            return await self._warmed(call, keep_s)
        finally:
            self._selection.no_longer_waits(call.id)

    async def _warmed(self, call: Call, keep_s: float) -> web.Response:
        asked = replace(
            call.scheduled,
            keep_s=keep_s,
            warms=True,
            pinnable=True,  # it is not sent, so any slot will do
            reuse=True,
            streams=False,
            whole_backend=False,
            slot_hint=None,
            max_new_tokens=0,
        )
        if self._keys.known.keeps_apart and not asked.tenant:
            raise BadRequestError("tenant: say whose the prompt is; tenants are kept apart")
        if not asked.prompt.is_exact:
            why = asked.prompt.unknown or "it has pictures or sounds"
            raise BadRequestError(f"only a prompt that the router can read can be warmed: {why}")
        grant = await self._engine.submit(asked)
        n = len(asked.prompt)
        if grant.prefilled is None or not grant.prefilled.tokens:
            # Nothing is known of the slot: it is looked at before it is used again.
            self._engine.finish(asked.id, AnswerEnd(Outcome.REFUSED))
            raise ConflictError(
                "the prompt could not be computed ahead: its backend or the policy does not do so"
                " (kvferry doctor says which backends save and restore)"
            )
        computed = grant.prefilled.tokens
        reported = Reported(prompt_tokens=n, cached_tokens=n, generated_tokens=0)
        self._engine.finish(asked.id, AnswerEnd(Outcome.OK, reported))
        saved = self._saved_tokens(grant.lease.slot.backend, asked)
        if not saved:
            raise ConflictError(
                "the prompt was computed, but could not be saved: it is shorter than"
                " store.min_tokens, or see `problem` and `note` of its backend in /kvferry/state"
            )
        return json_response(
            {
                "backend": grant.lease.slot.backend,
                "prompt_tokens": n,
                "computed_tokens": computed,
                "saved_tokens": saved,
            }
        )

    def _saved_tokens(self, backend: BackendId, request: Request) -> int:
        """Return how many tokens of a prompt a snapshot for this backend can give back.

        0 if less than nearly all, for a memory kind that can go back: such a state is another's.
        """
        inventory, tokens = self._engine.state.inventory, request.prompt.tokens
        if (info := inventory.info(backend)) is None:
            return 0
        namespace = namespace_of(info, request.tenant)
        reach = inventory.catalog.reach(info.memory_kind, namespace, tokens)
        return 0 if info.memory_kind.goes_back and reach < count(tokens) - 1 else reach

    async def kept(self, _: Call) -> web.Response:
        """List the snapshots that are kept until the router stops, the most used first."""
        found = sorted(
            self._engine.state.inventory.catalog.kept_for_good(), key=lambda one: -one[1]
        )
        return json_response(
            {
                "kept": [
                    {
                        "snapshot": held.id,
                        "namespace": held.namespace,
                        "tokens": len(held),
                        "size_bytes": held.size_bytes,
                        "hits": uses - 1,  # the first is that it was saved
                    }
                    for held, uses in found
                ]
            }
        )

    async def _parse(self, call: Call) -> None:
        path = call.http.query.get("path", "/v1/chat/completions")
        shape = shape_of(path)
        if shape is None:
            raise BadRequestError(f"path: {path!r} is not a completion route")
        call.is_trusted = True
        await self._bodies.read(call)
        filters = self._settings.filters
        parsed, _ = await json_offload.read(call.raw, parse_completion, shape, call.raw, filters)
        call.parsed = parsed
        call.name_model(call.parsed.model)

    async def _describe(self, call: Call) -> None:
        await self._completions.describe(call)
        tenant = call.http.query.get("tenant", "")
        if tenant and not self._keys.has_tenant(tenant):
            raise BadRequestError(
                f"tenant: {tenant!r} is not the tenant of a key, or tenants are not kept apart"
            )
        if tenant:
            salt = "" if call.parsed is None else call.parsed.salt
            call.request = replace(call.scheduled, tenant=salted(tenant, salt))


def _keep_s(text: str) -> float:
    """Return a time in seconds; inf for `always`. Raises BadRequestError."""
    found = inf if text == "always" else seconds_of(text, _MOST_DIGITS)
    if found is None:
        raise BadRequestError(f"keep: {text!r} is neither a time such as 24h nor `always`")
    return found
