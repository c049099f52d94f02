"""Chance that a prompt is asked for again: learned by client and length. Pure.

A clock in front of a prompt, or texts put into it at each turn, make each prompt new. What is saved
of such prompts is never restored, and pushes out what would be. So it is noted whether what was
saved was used within half an hour. Where almost nothing was, one state of eight is still saved: a
client may change its ways.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from router.base.types import Request, SnapshotId
from router.core.model.slots import Fate, Kind

_UNUSED_S = 1800.0  # a snapshot that nobody used for so long was saved in vain. Chosen
_ENOUGH = 8  # snapshots in vain, until a kind of prompt is given up. Chosen
_HOPELESS = 0.1  # a chance below this. Chosen
_SAMPLED = 8  # of so many contents of a kind that is given up, one is saved
_MEMORY = 64.0  # snapshots: with more, both counts are halved, so that old ones count less
_KINDS = 1000


@dataclass(slots=True)
class _Counts:
    used: float = 0.0
    vain: float = 0.0
    begun: int = 0


_NONE = _Counts()


@dataclass(slots=True)
class Returns:
    """What became of the contents of each kind of prompt."""

    _counts: OrderedDict[Kind, _Counts] = field(default_factory=OrderedDict)
    _saved: dict[SnapshotId, Fate] = field(default_factory=dict)
    _due: deque[tuple[float, SnapshotId]] = field(default_factory=deque)  # by time

    def begin(self, request: Request) -> Fate:
        """Return the fate of what a request leaves in a slot."""
        fate = self.next(request)
        self._of(fate.kind).begun += 1
        return fate

    def next(self, request: Request) -> Fate:
        """Return the fate that `begin` would return now."""
        kind = request.client or request.owner, request.prompt.n_tokens.bit_length()
        counts = self._counts.get(kind, _NONE)
        return Fate(kind, is_sample=counts.begun % _SAMPLED == _SAMPLED - 1)

    def saved(self, snapshot: SnapshotId, fate: Fate | None, now: float) -> None:
        """Note a snapshot of a content."""
        self._lapse(now)
        if fate is not None and not fate.returned:
            self._saved[snapshot] = fate
            self._due.append((now + _UNUSED_S, snapshot))

    def restored(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot is used."""
        self.came_back(self._saved.get(snapshot))

    def came_back(self, fate: Fate | None) -> None:
        """Note that a request goes on from a content, wherever that is."""
        if fate is not None and not fate.returned:
            fate.returned = True
            self._note(fate.kind, used=1.0)

    def chance(self, fate: Fate | None, usual: float) -> float:
        """Return the chance that a content is asked for again; `usual`: without experience.

        0: those like it were saved in vain.
        """
        counts = _NONE if fate is None else self._counts.get(fate.kind, _NONE)
        n = counts.used + counts.vain
        learned = (counts.used + 2 * usual) / (n + 2)
        if fate is not None and fate.is_sample:
            return max(learned, usual)
        return 0.0 if counts.vain >= _ENOUGH and counts.used < _HOPELESS * n else learned

    def _lapse(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            fate = self._saved.pop(self._due.popleft()[1], None)
            if fate is not None and not fate.returned:
                self._note(fate.kind, vain=1.0)

    def _note(self, kind: Kind, used: float = 0.0, vain: float = 0.0) -> None:
        counts = self._of(kind)
        counts.used += used
        counts.vain += vain
        if counts.used + counts.vain > _MEMORY:
            counts.used, counts.vain = counts.used / 2, counts.vain / 2

    def _of(self, kind: Kind) -> _Counts:
        counts = self._counts.setdefault(kind, _Counts())
        self._counts.move_to_end(kind)
        if len(self._counts) > _KINDS:
            self._counts.popitem(last=False)
        return counts
