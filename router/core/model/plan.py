"""A decision as data: the candidates, their prices in seconds, and which one won."""

from collections.abc import Mapping
from dataclasses import field

from router.base.frozen import dataclass
from router.base.types import Nearest, SlotId, SnapshotId, Source


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds by part; `total` is what candidates are compared by."""

    wait_s: float = 0.0
    save_s: float = 0.0  # of content that is displaced
    rewrite_s: float = 0.0  # of a state file, before it is restored; stops nobody
    restore_s: float = 0.0
    handling_s: float = 0.0  # of what is saved, by the router; stops nobody
    prefill_s: float = 0.0
    stall_s: float = 0.0  # caused to running streams, which stop for transfers and prefills
    loss_s: float = 0.0  # expected, from what is displaced and not saved

    @property
    def ttft_s(self) -> float:
        """What the request itself waits for."""
        files_s = self.save_s + self.rewrite_s + self.restore_s + self.handling_s
        return self.wait_s + files_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.stall_s + self.loss_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request."""

    slot: SlotId
    source: Source
    reused_tokens: int
    price: Price
    snapshot: SnapshotId | None = None
    cut: int | None = None  # restore this many tokens of the snapshot, cut out of its file
    copy_from: SlotId | None = None
    save_displaced: bool = False
    wait_for: SlotId | None = None  # not now: when this busy slot is done

    def order(self) -> tuple[float, int, bool, bool, SlotId]:
        """Cheapest first. On a tie, in this order:

        1. more tokens reused;
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


@dataclass(frozen=True, slots=True)
class Sight:
    """How many leading tokens of a prompt were held, when it was decided what to do with it.

    `planned`: meant to be reused. `usable`: an idle slot or a snapshot could have spared so many.
    `waiting`: a busy slot could have, later. `held`: shared with anything there is, of use or not.
    `evicted`, `displaced`: with what is not there any more. `parts`: what shares most of all goes
    on otherwise. `worth`: fewer are not worth a snapshot.
    """

    planned: int = 0
    usable: int = 0
    waiting: int = 0
    held: int = 0
    evicted: int = 0
    displaced: int = 0
    parts: bool = False
    worth: int = 1
    nearest: Nearest | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The chosen candidate, the losers in order, and the reason in words.

    `shared`: how many of its tokens each slot shared. None where the router has no say, or the
    request is to wait. `sight`: what was known of the prompt, for an explanation; see `misses`.

    `pauses` are lengths at which the prefill stops for a snapshot, which takes `pauses_s`.
    """

    chosen: Candidate
    losers: tuple[Candidate, ...] = ()
    reason: str = ""
    prefill_first: bool = field(default=False)
    pauses: tuple[int, ...] = ()
    pauses_s: float = 0.0
    shared: Mapping[SlotId, int] | None = field(default=None, repr=False, compare=False)
    sight: Sight | None = None

    @property
    def ttft_s(self) -> float:
        """What the request itself waits for once it is granted."""
        return self.chosen.price.ttft_s + self.pauses_s
