"""Suspects: requests with which a llama-server ended while it computed them.

A request can end a server: a grammar that is nested 100,000 times does. Sent to the next server it
would end that one too, with all answers there. A server can also end by itself, or be killed, and
then the request is innocent. So a request is sent again once, and alone; a second end refuses it,
and others like it, for a while.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable

import structlog

from router.base.errors import SuspectError
from router.base.types import BackendId, RequestId
from router.llama import trial
from router.llama.wire import ALIKE, ParsedRequest
from router.web.server.inbound import DIGEST_BYTES, body_digest

_ENDS = 2  # of servers, until a request is refused
_REFUSED_S, _DOUBLED = 60.0, 4  # doubled with each further end, up to 16 minutes
_MOST = 1000

log = structlog.get_logger(__name__)


class Suspects:
    """The requests at each server, in the order in which they were sent; and the suspects."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Set up without suspects. `now` returns clock seconds."""
        self._now = now
        self._at: defaultdict[BackendId, dict[RequestId, None]] = defaultdict(dict)
        self._ends: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def sent(self, request: RequestId, backend: BackendId) -> None:
        """Note that a server has a request, and no other server has it."""
        self.over(request)
        self._at[backend][request] = None

    def over(self, request: RequestId) -> None:
        """Note that no server has a request any more."""
        for there in self._at.values():
            there.pop(request, None)

    def blame(
        self,
        request: RequestId,
        backend: BackendId,
        raw: bytes,
        parsed: ParsedRequest | None,
        before: int,
    ) -> int | None:
        """Return how many servers ended with a request; `before`: on other hosts, or earlier.

        None: it is not to blame. The one that was sent last is: most end their server at once.
        """
        there = self._at[backend]
        if next(reversed(there), None) != request:
            return None
        there.clear()  # the others there have no part in it
        ends = self._note(raw, parsed, before, 1)
        log.warning("server_ended_with_a_request", request_id=request, backend=backend, times=ends)
        return ends

    def told(self, raw: bytes, parsed: ParsedRequest | None, ends: int) -> None:
        """Note that another host refuses a request, which has ended so many servers there."""
        self._note(raw, parsed, ends, 0)

    def _note(self, raw: bytes, parsed: ParsedRequest | None, before: int, more: int) -> int:
        most, now = 0, self._now()
        for key in _keys(raw, parsed):
            n = max(self._ends.pop(key, (0, now))[0], before) + more
            self._ends[key] = n, now
            most = max(most, n)
        while len(self._ends) > _MOST:
            self._ends.popitem(last=False)
        return most

    def check(self, raw: bytes, parsed: ParsedRequest | None) -> int:
        """Return 1 for a request that may be sent alone only, else 0.

        Raises SuspectError for one that has ended two servers, or one like it, until it is time to
        try it again.
        """
        found = 0
        for key in _keys(raw, parsed) if self._ends else ():
            n, noted = self._ends.get(key, (0, 0.0))
            refused_s = _REFUSED_S * 2 ** min(n - _ENDS, _DOUBLED)
            left_s = noted + refused_s - self._now()
            if n >= _ENDS and left_s > 0:
                raise SuspectError(n, left_s)
            found |= n >= _ENDS
        return found


def _keys(raw: bytes, parsed: ParsedRequest | None) -> list[bytes]:
    # A large body that is let go of is its digest.
    keys = [raw if len(raw) == DIGEST_BYTES else body_digest(raw)]
    if parsed is not None:
        alike = {k: v for k, v in trial.unproven(parsed).items() if k in ALIKE}
        if alike:
            keys.append(trial.digest_of(alike, parsed.shape, ""))
    return keys
