"""Correction of the counts in an answer: what the router computed for a request is not cached.

The server finds a prompt in its slot that the router computed there a moment before, and calls all
of it cached. Only the numbers are replaced, in the bytes as they came: a parsed and rewritten
answer would differ in more than its counts. llama-server.md section 2.4 lists the fields.
"""

import re
from collections.abc import Mapping

from router.base.types import OwnPrefill
from router.llama.routes import Shape

# A quote inside a JSON string has a backslash before it, so no text of an answer looks like a key.
# The arguments of a tool in a plain `/v1/messages` answer do: they are an object.
# `timings/`: fields picked by `response_fields` (json_get_nested_values, server-common.cpp).
_KEYS = (
    rb"cache_n|prompt_n|prompt_ms|prompt_per_token_ms|prompt_per_second"  # timings
    rb"|cached_tokens"  # usage
    rb"|cache|time_ms"  # prompt_progress
)


def _count_of(keys: bytes) -> re.Pattern[bytes]:
    """Return a pattern of a count: all before its number, its key, the number."""
    return re.compile(rb'((?<!\\)"(?:timings/)?(%b)":\s*)([-+.\deE]+)' % keys)


_COUNT = _count_of(_KEYS)
# In the usage of the other routes `input_tokens` is the whole prompt. The usage of this route is
# behind all arguments of tools (to_json_anthropic, server-task.cpp).
_MESSAGES_COUNT = _count_of(rb"cache_read_input_tokens|input_tokens")
_USAGE = b'"usage":'
# The last one of picked fields. It has no object inside (`server_slot_stats::to_json`).
_TIMINGS = re.compile(rb',?(?<!\\)"timings":\{[^{}]*\}(?=\})')
_CACHED = (b"cache_n", b"cached_tokens", b"cache", b"cache_read_input_tokens")


def whole_lines(kept: bytes, chunk: bytes) -> tuple[bytes, bytes]:
    """Return the whole lines of what was kept back and a chunk, and what is to be kept back."""
    lines, newline, rest = chunk.rpartition(b"\n")
    return (kept + lines + newline, rest) if newline else (b"", kept + rest)


class AnswerCounts:
    """Corrects one answer to a request with an own prefill: `part` by part, then its `rest`.

    A plain answer and each event of a stream are one line, and all counts of a line agree.
    `tells_creation`: an answer to /v1/messages calls what was computed of the prompt
    `cache_creation_input_tokens`, as Anthropic does for a prompt that its client marked.
    `hides_timings`: the client left them out by `response_fields`, and kvferry asked for them.
    """

    def __init__(
        self,
        shape: Shape,
        prefill: OwnPrefill,
        *,
        tells_creation: bool = False,
        hides_timings: bool = False,
    ) -> None:
        self._hides_timings = hides_timings
        self._tells_creation = tells_creation and shape is Shape.MESSAGES
        self._count = _MESSAGES_COUNT if shape is Shape.MESSAGES else _COUNT
        self._prefill = prefill
        self._kept = b""

    def whole(self, answer: bytes) -> bytes:
        """Return an answer that has come to its end, corrected."""
        return self.part(answer) + self.rest()

    def part(self, chunk: bytes) -> bytes:
        """Return the whole lines so far, each corrected; keep the rest of a line."""
        lines, self._kept = whole_lines(self._kept, chunk)
        if self._count.search(lines) is None:
            return lines
        return b"".join(map(self._line, lines.splitlines(keepends=True)))

    def rest(self) -> bytes:
        """Return the end of an answer that has no line break."""
        kept, self._kept = self._kept, b""
        return self._line(kept)

    def _line(self, line: bytes) -> bytes:
        if self._prefill.tokens or self._tells_creation:
            line = self._with_right_counts(line)
        return _TIMINGS.sub(b"", line) if self._hides_timings else line

    def _with_right_counts(self, line: bytes) -> bytes:
        at = line.rfind(_USAGE) if self._count is _MESSAGES_COUNT else 0
        if at < 0:
            return line
        before, behind = line[:at], line[at:]
        try:
            found = {match[2]: float(match[3]) for match in self._count.finditer(behind)}
            new = self._corrected(found) if found else {}
        except (ValueError, OverflowError):  # no number, or none of this world
            return line
        if self._tells_creation and b"input_tokens" in found:
            computed = new.get(b"input_tokens", b"%d" % found[b"input_tokens"])
            new[b"input_tokens"] = b'0,"cache_creation_input_tokens":' + computed
        if not new:
            return line
        return before + self._count.sub(lambda m: m[1] + new.get(m[2], m[3]), behind)

    def _corrected(self, found: Mapping[bytes, float]) -> dict[bytes, bytes]:
        """Return the right values for the numbers of one line."""
        own = self._prefill
        cached = next((int(found[key]) for key in _CACHED if key in found), own.tokens)
        moved = own.among(cached)
        new: dict[bytes, float] = {key: cached - moved for key in _CACHED if key in found}
        for key in (b"prompt_n", b"input_tokens"):
            if key in found:
                new[key] = int(found[key]) + moved
        if b"prompt_ms" in found:
            new[b"prompt_ms"] = found[b"prompt_ms"] + own.seconds * 1000
        if b"time_ms" in found:
            new[b"time_ms"] = int(found[b"time_ms"] + own.seconds * 1000)
        # Both as in `server_slot_stats` (server-common.h): 0 without tokens or time.
        if b"prompt_n" in new and b"prompt_ms" in new:
            tokens, ms = new[b"prompt_n"], new[b"prompt_ms"]
            new[b"prompt_per_token_ms"] = ms / tokens if tokens else 0.0
            new[b"prompt_per_second"] = tokens * 1000 / ms if ms else 0.0
        return {key: repr(value).encode() for key, value in new.items()}
