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
_MANY = 128  # snapshots that wait, and none was ever used: more are in vain, too. Chosen
_HOPELESS = 0.1  # a chance below this. Chosen
_SAMPLED = 8  # of so many contents of a kind that is given up, one is saved
_MEMORY = 64.0  # snapshots: with more, both counts are halved, so that old ones count less
_KINDS = 5000
_KNOWN = 50_000  # snapshots whose content is followed
_GOLDEN = 0x9E3779B1  # 2 ** 32 / the golden ratio: samples fall on no pattern of requests


@dataclass(slots=True)
class _Counts:
    used: float = 0.0
    vain: float = 0.0
    begun: int = 0
    waiting: int = 0


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
        length, named = request.prompt.n_tokens.bit_length(), request.session
        kind = request.client or request.owner, length
        session = None if named is None else (named.id, length)
        lot = (self._counts.get(kind, _NONE).begun * _GOLDEN & 0xFFFFFFFF) >> 16
        return Fate(kind, session, is_sample=lot % _SAMPLED == _SAMPLED - 1)

    def saved(self, snapshot: SnapshotId, fate: Fate | None, now: float) -> None:
        """Note a snapshot of a content."""
        self._lapse(now)
        if fate is not None and not fate.returned:
            fate.waiting += 1
            self._note(fate, waiting=1)
            self._saved[snapshot] = fate
            self._due.append((now + _UNUSED_S, snapshot))
            if len(self._saved) > _KNOWN:
                del self._saved[next(iter(self._saved))]

    def restored(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot is used."""
        self.came_back(self._saved.get(snapshot))

    def came_back(self, fate: Fate | None) -> None:
        """Note that a request goes on from a content, wherever that is."""
        if fate is not None and not fate.returned:
            fate.returned = True
            self._note(fate, 1.0, -1.0 if fate.was_vain else 0.0, -fate.waiting)

    def chance(self, fate: Fate | None, usual: float) -> float:
        """Return the chance that a content is asked for again; `usual`: without experience.

        0: those like it were saved in vain. A conversation that its client names begins with no
        less than `usual`: its client may be many.
        """
        if fate is None:
            return usual
        learned = self._learned(fate.kind, usual)
        if fate.session is not None:
            learned = self._learned(fate.session, max(learned, usual))
        return max(learned, usual) if fate.is_sample else learned

    def _learned(self, kind: Kind, usual: float) -> float:
        counts = self._counts.get(kind, _NONE)
        n = counts.used + counts.vain
        many = not counts.used and counts.waiting >= _MANY
        if many or (counts.vain >= _ENOUGH and counts.used < _HOPELESS * n):
            return 0.0
        return (counts.used + 2 * usual) / (n + 2)

    def _lapse(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            fate = self._saved.get(self._due.popleft()[1])
            if fate is not None and not fate.returned:
                fate.waiting -= 1
                self._note(fate, 0.0, 0.0 if fate.was_vain else 1.0, -1)
                fate.was_vain = True

    def _note(self, fate: Fate, used: float = 0.0, vain: float = 0.0, waiting: int = 0) -> None:
        for kind in (fate.kind, fate.session):
            if kind is not None:
                counts = self._of(kind)
                counts.used += used
                counts.waiting += waiting
                counts.vain = max(counts.vain + vain, 0.0)
                if counts.used + counts.vain > _MEMORY:
                    counts.used, counts.vain = counts.used / 2, counts.vain / 2

    def _of(self, kind: Kind) -> _Counts:
        counts = self._counts.setdefault(kind, _Counts())
        self._counts.move_to_end(kind)
        if len(self._counts) > _KINDS:
            self._counts.popitem(last=False)
        return counts
