"""A decision as data: the candidates, their prices in seconds, and the chosen one."""

from collections.abc import Mapping
from math import inf

from msgspec import Struct
from msgspec.structs import force_setattr

from router.base.tokens import EMPTY, Tokens
from router.base.types import Nearest, SlotId, SnapshotId, Source

_MOST = 1 << 50  # larger numbers are no sizes


class Price(Struct, frozen=True):
    """Predicted seconds by component; candidates are compared by `total_s`."""

    wait_s: float = 0.0
    save_s: float = 0.0  # of displaced content
    rewrite_s: float = 0.0  # of a state file, before its restore; stops no stream
    restore_s: float = 0.0
    handling_s: float = 0.0  # the router's own share of a save; stops no stream
    prefill_s: float = 0.0
    stall_s: float = 0.0  # of running streams, which stop for transfers and prefills
    loss_s: float = 0.0  # expected, from unsaved displaced content

    ttft_s: float = 0.0  # predicted seconds until the first token of this request; derived
    total_s: float = 0.0  # derived

    def __post_init__(self) -> None:
        files_s = self.save_s + self.rewrite_s + self.restore_s + self.handling_s
        ttft_s = self.wait_s + files_s + self.prefill_s
        force_setattr(self, "ttft_s", ttft_s)
        force_setattr(self, "total_s", ttft_s + self.stall_s + self.loss_s)


class Candidate(Struct, frozen=True):
    """One way to serve a request."""

    slot: SlotId
    source: Source
    reused_tokens: int
    price: Price
    snapshot: SnapshotId | None = None
    cut: int | None = None  # restore only this many tokens, cut out of the snapshot
    copy_from: SlotId | None = None
    save_displaced: bool = False
    wait_for: SlotId | None = None  # start only when this busy slot is done

    def order(self) -> tuple[float, int, bool, bool, SlotId]:
        """Return the sort key: cheapest first. A tie goes, in this order, to:

        1. more reused tokens;
        2. no wait;
        3. no restore (a restore can fail, a resident prefix cannot);
        4. the lowest slot, so that the same input always gives the same plan.
        """
        return (
            round(self.price.total_s, 9),
            -self.reused_tokens,
            self.wait_for is not None,
            self.source in (Source.SNAPSHOT, Source.COPY),
            self.slot,
        )


class Coverage(Struct, frozen=True):
    """The numbers of leading tokens of a prompt that were held when its plan was made.

    - `planned`: meant to be reused.
    - `usable`: reusable from an idle slot or a snapshot.
    - `waiting`: reusable from a busy slot, later.
    - `held`: shared with any slot or snapshot, reusable or not.
    - `evicted`, `displaced`: shared with an evicted snapshot, with displaced slot content.
    - `foreign`: shared with a slot or snapshot of the model with other settings.
    - `goes_on`: the content that shares most goes on after the shared prefix.
    - `worth`: the fewest tokens that are worth a snapshot.
    """

    planned: int = 0
    usable: int = 0
    waiting: int = 0
    held: int = 0
    evicted: int = 0
    displaced: int = 0
    foreign: int = 0
    goes_on: bool = False
    worth: int = 1
    nearest: Nearest | None = None


class Plan(Struct, frozen=True):
    """The chosen candidate, the other candidates in order, and the reason in words.

    `shared`: how many of the prompt's tokens each slot shared. None: the router has no say, or
    the request is to wait. `coverage`: the held prefixes; see `reporting/miss_reasons.py`.

    `boundary_saves`: prefill lengths with a boundary save; the saves take `boundary_saves_s`.
    """

    chosen: Candidate
    losers: tuple[Candidate, ...] = ()
    reason: str = ""
    prefill_first: bool = False
    boundary_saves: tuple[int, ...] = ()
    boundary_saves_s: float = 0.0
    shared: Mapping[SlotId, int] | None = None
    coverage: Coverage | None = None

    @property
    def ttft_s(self) -> float:
        """Return the predicted seconds from admission to the first token."""
        return self.chosen.price.ttft_s + self.boundary_saves_s


class Quote(Struct, frozen=True):
    """The price of a request on this host, for a host that compares hosts.

    `price_s`: seconds until the first token, with all that other requests lose by it. `wait_s` is
    the part of it before a slot or server is free; `aside_s` the part for saving what is displaced,
    and for what others lose. `fetched`: the price includes a fetch from another host.
    """

    price_s: float
    wait_s: float = 0.0
    reused_tokens: int = 0
    source: Source = Source.COLD
    aside_s: float = 0.0
    fetched: bool = False


class Offered(Struct, frozen=True, array_like=True):
    """A state that another host would hand out: so many tokens of a prompt need no computing then.

    It has `n_tokens` tokens and `size_bytes`, and can be fetched after `ready_s` seconds: then it
    is saved, or even computed (`computing`). `sharers`: fetches under way at its host, which share
    the link. `digest`: of all its tokens, where it is of use only if the prompt begins with them.
    """

    reused: int
    n_tokens: int
    size_bytes: int
    ready_s: float = 0.0
    computing: bool = False
    sharers: int = 0
    digest: bytes = b""

    @property
    def is_sound(self) -> bool:
        """Return whether the numbers can be: another host has told them."""
        sizes = 0 < self.reused <= self.n_tokens < _MOST and 0 < self.size_bytes < _MOST
        return sizes and 0 <= self.ready_s < inf and 0 <= self.sharers < _MOST


class Handout(Struct, frozen=True):
    """What another host would get: a snapshot, or what a slot has. `cut`: its first tokens.

    `whole`: all its tokens, if it is of use only for a prompt that begins with all of them.
    """

    content: SnapshotId | SlotId
    offered: Offered
    cut: int | None = None
    whole: Tokens = EMPTY
