"""A decision as data: the candidates, their prices in seconds, and which one won."""

from dataclasses import dataclass, field

from router.types import SlotId, SnapshotId, Source


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds by part; `total` is what candidates are compared by."""

    wait_s: float = 0.0
    save_s: float = 0.0  # of content that is displaced
    rewrite_s: float = 0.0  # of a state file, before it is restored; stops nobody
    restore_s: float = 0.0
    prefill_s: float = 0.0
    stall_s: float = 0.0  # caused to running streams, which stop for transfers and prefills
    loss_s: float = 0.0  # expected, from what is displaced and not saved

    @property
    def ttft_s(self) -> float:
        """What the request itself waits for."""
        return self.wait_s + self.save_s + self.rewrite_s + self.restore_s + self.prefill_s

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
class Plan:
    """The chosen candidate, the losers in order, and the reason in words.

    `pauses` are lengths at which the prefill stops for a snapshot, which takes `pauses_s`.
    """

    chosen: Candidate
    losers: tuple[Candidate, ...] = ()
    reason: str = ""
    prefill_first: bool = field(default=False)
    pauses: tuple[int, ...] = ()
    pauses_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """What the request itself waits for once it is granted."""
        return self.chosen.price.ttft_s + self.pauses_s
