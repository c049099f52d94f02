"""Records of finished requests, and why each prompt token was computed.

Reuse is always a prefix of the prompt, and so is what a slot or a snapshot shares with it.
`Coverage` has the lengths of these prefixes, and `missed` divides the computed tokens at them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from router.base.tokens import EMPTY, WIDTH, Tokens, count
from router.base.types import (
    BackendInfo,
    MemoryKind,
    Miss,
    Namespace,
    Nearest,
    OwnPrefill,
    Reported,
    Request,
    RequestRecord,
    SlotId,
    SnapshotId,
)
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.effects import Account
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Coverage, Plan
from router.core.model.rates import Rates
from router.core.model.tenancy import is_foreign, namespace_of, tenant_of

_AROUND = 10  # tokens on either side of the point of divergence


def coverage_of(request: Request, made: Plan, inventory: Inventory) -> Coverage | None:
    """Return the held prefixes of a prompt at plan `made`. None: the router has no say.

    Nothing may have changed since, except that the slot is leased. Only content in the namespace
    of the chosen backend and of the request's tenant counts.
    """
    if made.shared is None:
        return None
    chosen, tokens = made.chosen, request.prompt.tokens
    if chosen.reused_tokens == request.prompt.n_tokens - 1:  # the last one is always computed
        reused = chosen.reused_tokens
        return Coverage(planned=reused, usable=reused, held=reused)
    info = inventory.backends[chosen.slot.backend].info
    most = _Most()
    usable, waiting = _in_slots(
        inventory, made.shared, chosen.slot, info, request.prompt.n_tokens, most
    )
    if inventory.policy.name.moves_kv and info.memory_kind.can_restore:
        usable = max(usable, _in_snapshots(inventory.catalog, request, info, most))
    namespace = namespace_of(info, request.tenant)
    evicted = inventory.catalog.gone.nearest(namespace, tokens)
    displaced = inventory.displaced.nearest(namespace, tokens)
    return Coverage(
        planned=chosen.reused_tokens,
        usable=usable,
        waiting=waiting,
        held=most.common,
        evicted=evicted[0],
        displaced=displaced[0],
        foreign=_foreign(inventory, made.shared, namespace, tokens),
        goes_on=max((most.common, most.goes_on), evicted, displaced)[1],
        worth=max(inventory.catalog.limits.min_tokens, 1),
        nearest=most.nearest(tokens),
    )


def _foreign(
    inventory: Inventory, shared: Mapping[SlotId, int], own: Namespace, tokens: Tokens
) -> int:
    """Return the tokens that the same model with other settings holds: another projector, say."""
    catalog, longest = inventory.catalog, 0
    for other in catalog.namespaces():
        if is_foreign(other, own) and tenant_of(other) == tenant_of(own):
            longest = max(longest, catalog.nearest(other, tokens)[0])
    for backend in inventory.up.values():
        if is_foreign(backend.info.namespace, own):
            longest = max([longest, *(shared.get(slot.id, 0) for slot in backend.slots)])
    return longest


@dataclass(slots=True)
class _Most:
    """The content that shares most with a prompt; of equals, content that goes on."""

    common: int = 0
    goes_on: bool = False
    tokens: Tokens = EMPTY
    slot: SlotId | None = None
    snapshot: SnapshotId | None = None

    def see(
        self,
        common: int,
        tokens: Tokens,
        *,
        slot: SlotId | None = None,
        snapshot: SnapshotId | None = None,
    ) -> None:
        """Take in content that shares `common` of its tokens with the prompt."""
        goes_on = count(tokens) > common
        if common and (common, goes_on) > (self.common, self.goes_on):
            self.common, self.goes_on, self.tokens = common, goes_on, tokens
            self.slot, self.snapshot = slot, snapshot

    def nearest(self, prompt: Tokens) -> Nearest | None:
        if not self.common:
            return None
        at = self.common
        return Nearest(
            slot=self.slot,
            snapshot=self.snapshot,
            common=at,
            length=count(self.tokens),
            before=_part(prompt, max(at - _AROUND, 0), at),
            ours=_part(prompt, at, at + _AROUND),
            theirs=_part(self.tokens, at, at + _AROUND),
        )


def _part(tokens: Tokens, start: int, end: int) -> Tokens:
    return Tokens(tokens[start * WIDTH : end * WIDTH])


def _in_slots(
    inventory: Inventory,
    shared: Mapping[SlotId, int],
    taken: SlotId,
    info: BackendInfo,
    n_prompt: int,
    most: _Most,
) -> tuple[int, int]:
    """Return the tokens that an idle slot could spare the prompt, and those of a busy slot.

    `taken` was idle before its lease. The slots of a backend that was just released are skipped.
    """
    usable = waiting = 0
    for name, common in shared.items():
        if common < usable or (common == usable and most.goes_on):
            continue  # it would change nothing
        there = inventory.info(name.backend)
        if there is None or there.namespace != info.namespace:
            continue
        slot = inventory.slots[name]
        if slot.is_idle or name == taken:
            most.see(common, slot.content.resident.tokens, slot=name)
            usable = max(usable, inventory.reusable(slot, n_prompt, common))
        else:
            # The source of a copy computes nothing, so its resident tokens count.
            tokens = slot.work.pending or slot.content.resident.tokens
            most.see(common, tokens, slot=name)
            # A kind that was not probed yet is not the reason of a miss: count it as FULL.
            known = info.memory_kind is not MemoryKind.UNKNOWN
            kind = info.memory_kind if known else MemoryKind.FULL
            reused = reusable_tokens(kind, n_prompt, common, count(tokens))
            waiting = max(waiting, reused)
    return usable, waiting


def _in_snapshots(catalog: Catalog, request: Request, info: BackendInfo, most: _Most) -> int:
    """Return the tokens that a snapshot could spare the prompt."""
    tokens, n_prompt = request.prompt.tokens, request.prompt.n_tokens
    namespace = namespace_of(info, request.tenant)
    common, goes_on = catalog.nearest(namespace, tokens)
    if (common, goes_on) > (most.common, most.goes_on):
        for match in catalog.match(namespace, tokens, limit=2):
            most.see(match.common, catalog[match.item].tokens, snapshot=match.item)
    if info.memory_kind.goes_back:
        return reusable_tokens(info.memory_kind, n_prompt, common, common)
    useful = catalog.useful(info.memory_kind, namespace, tokens, n_prompt)
    return max((reused for _, reused in useful), default=0)


def missed(
    request: Request,
    coverage: Coverage | None,
    prompt_tokens: int,
    computed_tokens: int,
    *,
    failed: bool = False,
) -> dict[Miss, int]:
    """Return the computed tokens by reason; they add up to `computed_tokens`, and none is 0.

    Both numbers are the backend's; `computed_tokens` is at most `prompt_tokens`. `failed`: a
    planned restore, cut or copy failed. Each token gets the first reason that applies:

    1. the plan meant to reuse it: `failed` or `mispredicted`;
    2. an idle slot or a snapshot could have spared it: `price`;
    3. a busy slot could have spared it: `busy`;
    4. some content shares it, but cannot be reused up to there: `kind`;
    5. it was held once: `evicted`, `displaced`; or for other settings of the model: `foreign`;
    6. it was never held: `new` if the content that shares most ends there, or shares all but the
       last token. Else `diverged`, or `cold` if it shares nothing that is worth a snapshot.

    The last token of a prompt is always computed, so the reasons 2 to 5 never apply to it.
    """
    if coverage is None:
        reason = Miss.UNKNOWN if request.prompt.unknown else Miss.DECLINED
        return {reason: computed_tokens} if computed_tokens else {}
    n, held = prompt_tokens, coverage.held
    known = max(held, coverage.evicted, coverage.displaced)
    if known >= n - 1 or (known and not coverage.goes_on):
        rest = Miss.NEW
    else:
        rest = Miss.DIVERGED if known >= coverage.worth else Miss.COLD
    found: dict[Miss, int] = {}
    at = n - computed_tokens
    for reason, end in (
        (Miss.FAILED if failed else Miss.MISPREDICTED, min(coverage.planned, n)),
        (Miss.PRICE, min(coverage.usable, n - 1)),
        (Miss.BUSY, min(coverage.waiting, n - 1)),
        (Miss.KIND, min(held, n - 1)),
        (Miss.EVICTED, min(coverage.evicted, n - 1)),
        (Miss.DISPLACED, min(coverage.displaced, n - 1)),
        (Miss.FOREIGN, min(coverage.foreign, n - 1)),
        (rest, n),
    ):
        if end > at:
            found[reason] = end - at
            at = end
    return found


def record_of(account: Account) -> RequestRecord:
    """Return the record for log and metrics."""
    end = account.end
    reported = end.reported.with_prefill(account.prefilled)
    chosen, sight = account.plan.chosen, account.plan.coverage
    return RequestRecord(
        request=account.request.id,
        slot=account.slot,
        source=chosen.source,
        reason=account.plan.reason,
        outcome=end.outcome,
        planned_tokens=chosen.reused_tokens,
        prompt_tokens=reported.prompt_tokens,
        cached_tokens=reported.cached_tokens,
        computed_tokens=reported.computed_tokens,
        generated_tokens=reported.generated_tokens,
        waited_s=account.waited_s,
        prepared_s=account.prepared_s,
        prefill_queue_s=account.prefill_queue_s,
        ttft_s=end.ttft_s,
        total_s=end.total_s,
        predicted_s=account.plan.ttft_s + account.waited_s,
        clients_id=account.request.clients_id,
        caller=account.request.caller,
        session=account.request.session,
        model=account.request.model,
        misread=_is_misread(account),
        cost=account.cost,
        server_s=_server_s(account, reported, end.total_s),
        avoided_s=account.avoided_s,
        missed=_missed(account, reported.computed_tokens),
        nearest=sight.nearest if sight is not None else None,
    )


def _is_misread(account: Account) -> bool:
    """Return whether the backend counted other tokens of an exact prompt than were read."""
    request, told = account.request, account.end.reported.prompt_tokens
    several = request.takes_several or not request.prompt.is_exact
    return told is not None and not several and told != request.prompt.n_tokens


def _server_s(account: Account, reported: Reported, total_s: float) -> float:
    """Return the seconds of a server's work; without a report, those in which it held its slot.

    /v1/messages and /v1/responses report no times.
    """
    if reported.prompt_s is not None or reported.generated_s is not None:
        return (reported.prompt_s or 0.0) + (reported.generated_s or 0.0)
    return max(total_s - account.waited_s - account.prefill_queue_s, 0.0)


def avoided_s(rates: Rates, reported: Reported, prefilled: OwnPrefill | None) -> float:
    """Return the seconds to compute the reused tokens, by the current `rates`.

    Reused tokens are the first of the prompt, so a prefill of them alone is priced.
    """
    cached = reported.with_prefill(prefilled).cached_tokens
    return 0.0 if cached is None else rates.prefill_s(cached)


def _missed(account: Account, computed: int | None) -> dict[Miss, int]:
    """Return the computed tokens by reason; empty if the backend did not report them."""
    n_prompt, sight = account.end.reported.prompt_tokens, account.plan.coverage
    if n_prompt is None or computed is None:
        return {}
    # `planned` is of the first plan; a plan that failed reuses fewer tokens.
    failed = sight is not None and account.plan.chosen.reused_tokens < sight.planned
    return missed(account.request, sight, n_prompt, computed, failed=failed)
