"""Events of a stream before its answer: the progress of a prompt that the router computes itself.

Made as llama-server makes them (`server_task_result_cmpl_partial`, server-task.cpp, b11434). The
answer that follows keeps the id of these events.
"""

import re
import secrets
import string
from typing import Any, NamedTuple

import orjson

from router.base.clock import wall_now
from router.base.types import PrefillProgress
from router.llama.answer_counts import whole_lines
from router.llama.routes import Shape
from router.llama.wire import ChatPrompt, ParsedRequest, is_int

PING = b":\n\n"
_CREATED = b"event: response.created\n"
_ID = re.compile(rb'"id":"((?:chatcmpl-|resp_)\w+)"')
_ALPHANUMERIC = string.digits + string.ascii_letters


class StreamIdentity(NamedTuple):
    """A server, as its events name it."""

    model: str
    build: str


class EarlyEvents:
    """The early events of one stream, and its later ones as parts of the same stream."""

    def __init__(self, parsed: ParsedRequest) -> None:
        source = parsed.prompt_source
        # Of /v1/messages the server reads what it makes of the body; the rest has no effect.
        self._fields = source.body if isinstance(source, ChatPrompt) else parsed.body
        self._shape = parsed.shape
        self._id = b""  # of the early events; empty: there were none
        self._theirs = b""  # the id that the server gave the answer
        self._drops = False  # the first event of the answer: its like was sent
        self._kept = b""
        self._shown = -1

    @property
    def ping_s(self) -> float | None:
        """Return the seconds between pings that a client wants; 0 for none, None: not said."""
        wanted: Any = self._fields.get("sse_ping_interval")
        return float(max(wanted, 0)) if is_int(wanted) else None

    @property
    def wants_progress(self) -> bool:
        """Return whether the client is shown the progress of its prompt."""
        return self._fields.get("return_progress") is True and self._shape is not Shape.MESSAGES

    def progress(self, told: PrefillProgress, n_tokens: int, server: StreamIdentity) -> bytes:
        """Return the event of a step of a prompt of `n_tokens`; b"" if it shows nothing new."""
        if told.n_done <= self._shown:
            return b""
        self._shown = told.n_done
        is_first, ms = not self._id, int(told.seconds * 1000)
        by = {"total": n_tokens, "cache": told.n_cached, "processed": told.n_done, "time_ms": ms}
        if is_first:
            self._id = (b"resp_" if self._shape is Shape.RESPONSES else b"chatcmpl-") + _random()
        if self._shape is Shape.RESPONSES:
            self._drops = True
            return self._of_responses(by, with_created=is_first)
        return b"data: " + orjson.dumps(self._event(by, server)) + b"\n\n"

    def _event(self, by: dict[str, int], server: StreamIdentity) -> dict[str, Any]:
        plain = {"index": 0, "content": "", "tokens": [0], "stop": False, "id_slot": -1}
        plain |= {"tokens_predicted": 0, "tokens_evaluated": by["total"], "prompt_progress": by}
        answerer = {"model": server.model, "system_fingerprint": server.build}
        created, name = int(wall_now()), self._id.decode()
        if self._shape is Shape.CHAT:
            delta = {"role": "assistant", "content": None}
            return {
                "choices": [{"finish_reason": None, "index": 0, "delta": delta}],
                "created": created,
                "id": name,
                **answerer,
                "object": "chat.completion.chunk",
                "prompt_progress": by,
            }
        if self._shape is Shape.OAI_COMPLETION:
            choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": None}
            return {
                "choices": [choice],
                "created": created,
                **answerer,
                "object": "text_completion",
                "id": name,
                **({"__verbose": plain} if self._fields.get("verbose") is True else {}),
                "prompt_progress": by,
            }
        return plain

    def _of_responses(self, by: dict[str, int], *, with_created: bool) -> bytes:
        response = {"id": self._id.decode(), "object": "response", "status": "in_progress"}
        names = ("response.created", "response.in_progress")
        events = [{"type": name, "response": response} for name in names]
        events[-1]["prompt_progress"] = by
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event))
            for event in events[not with_created :]
        )

    # -- the answer that follows -----------------------------------------------------------------

    def part(self, chunk: bytes) -> bytes:
        """Return the whole lines of an answer so far, as of the stream that began."""
        if not self._id:
            return chunk
        lines, self._kept = whole_lines(self._kept, chunk)
        if not self._theirs and (found := _ID.search(lines)):
            self._theirs = found[1]
        if self._drops:
            lines = self._without_created(lines)
        return lines.replace(self._theirs, self._id) if self._theirs else lines

    def whole(self, last: bytes) -> bytes:
        """Return the end of an answer, after which nothing comes."""
        last, self._kept = self.part(last) + self._kept, b""
        return last

    def _without_created(self, lines: bytes) -> bytes:
        """Return lines without the event `response.created`; keep it back until it is whole."""
        start = lines.find(_CREATED)
        if start < 0:
            return lines
        end = lines.find(b"\n\n", start)
        if end < 0:
            self._kept = lines[start:] + self._kept
            return lines[:start]
        self._drops = False
        return lines[:start] + lines[end + 2 :]


def _random() -> bytes:
    """Return a name like those of `random_string` (server-common.cpp)."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(32)).encode()
