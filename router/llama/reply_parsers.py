"""Parsers of the completion answers' shapes, one JSON object at a time.

llama-server.md section 2.4 is the table; the functions that write these objects are in
server-task.cpp. `replies.read_reply` calls these parsers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from router.base.decoding import UndecodableError
from router.base.tokens import Tokens, pack
from router.base.types import Reported
from router.llama import json_offload
from router.llama.routes import Shape

Json = dict[str, Any]
T = TypeVar("T")


def _int(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _seconds(milliseconds: object) -> float | None:
    if type(milliseconds) not in (int, float) or not isinstance(milliseconds, int | float):
        return None
    return milliseconds / 1000 if milliseconds >= 0 else None


def loads(raw: bytes) -> Any:
    """Return a JSON value; None if it is none."""
    try:
        return json_offload.loads(raw)
    except UndecodableError:
        return None


def as_dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(slots=True)
class Reading:
    """Facts read from an answer so far; the last value of a number counts."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_s: float | None = None
    generated_tokens: int | None = None
    generated_s: float | None = None
    ids: list[Any] | None = None
    text: str | None = None
    opaque: bool = False  # reasoning or tool calls: the raw text cannot be rebuilt
    ended: bool = False
    several: bool = False  # more than one choice: the numbers belong to none of them alone

    def report(self, *, complete: bool) -> Reported:
        if self.several:
            return Reported()
        return Reported(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            prompt_s=self.prompt_s,
            generated_tokens=self.generated_tokens,
            generated_s=self.generated_s,
            generated=self._generated() if complete else None,
            text=self.text if complete and not self.opaque else None,
        )

    def _generated(self) -> Tokens | None:
        """Return the generated ids, or None if some are missing.

        A stream omits a token that ends inside a UTF-8 character, with its id (process_token,
        server-context.cpp). Therefore the ids count only if their number is right.
        """
        if not self.ids or len(self.ids) != self.generated_tokens:
            return None
        if not all(type(token) is int for token in self.ids):
            return None
        try:
            return pack(self.ids)
        except OverflowError:
            return None

    def add_text(self, text: object) -> None:
        if isinstance(text, str):
            self.text = (self.text or "") + text

    def add_ids(self, ids: object) -> None:
        self.ids = (self.ids or []) + _list(ids)

    def see_timings(self, timings: object) -> None:
        """Read the timings (`server_slot_stats::to_json`, server-common.cpp).

        Most events of a stream have none.
        """
        if not isinstance(timings, dict):
            return
        cached, processed = _int(timings.get("cache_n")), _int(timings.get("prompt_n"))
        self.see_prompt(None if cached is None or processed is None else cached + processed, cached)
        self.see_generated(timings.get("predicted_n"))
        self.prompt_s = _or(_seconds(timings.get("prompt_ms")), self.prompt_s)
        self.generated_s = _or(_seconds(timings.get("predicted_ms")), self.generated_s)

    def see_prompt(self, total: object, cached: object) -> None:
        self.prompt_tokens = _or(_int(total), self.prompt_tokens)
        self.cached_tokens = _or(_int(cached), self.cached_tokens)

    def see_generated(self, total: object) -> None:
        self.generated_tokens = _or(_int(total), self.generated_tokens)


def _or(new: T | None, old: T | None) -> T | None:
    return old if new is None else new


def _read_progress(reading: Reading, event: Json) -> bool:
    """Read a `return_progress` chunk; return False if `event` is none.

    Such a chunk carries a token id that was never sampled.
    """
    progress = event.get("prompt_progress")
    if not isinstance(progress, dict):
        return False
    reading.see_prompt(progress.get("total"), progress.get("cache"))
    return True


def _read_native(reading: Reading, event: Json) -> None:
    """Read `to_json_non_oaicompat` (server-task.cpp) of an event or of the whole answer.

    `tokens_cached` is not used: it is the slot's length after the request.
    """
    reading.several |= event.get("index", 0) != 0
    reading.see_timings(event.get("timings"))
    if _read_progress(reading, event):
        return
    reading.add_text(event.get("content"))
    reading.add_ids(event.get("tokens"))
    reading.see_prompt(event.get("tokens_evaluated"), None)
    reading.see_generated(event.get("tokens_predicted"))


def _read_openai(reading: Reading, event: Json) -> Json:
    """Read the fields common to chat and text completions; return the choice, or {}."""
    reading.see_timings(event.get("timings"))
    in_progress = _read_progress(reading, event)
    if isinstance(usage := event.get("usage"), dict):
        details = as_dict(usage.get("prompt_tokens_details"))
        reading.see_prompt(usage.get("prompt_tokens"), details.get("cached_tokens"))
        reading.see_generated(usage.get("completion_tokens"))
    # `verbose: true` adds the native object, and with `return_tokens` the ids
    verbose = as_dict(event.get("__verbose"))
    if verbose and not in_progress:
        reading.add_ids(verbose.get("tokens"))
    choices = _list(event.get("choices"))
    choice = as_dict(choices[0]) if choices else {}
    reading.several |= len(choices) > 1 or choice.get("index", 0) != 0
    return choice


def _read_completion(reading: Reading, event: Json) -> None:
    """Read `to_json_oaicompat` (server-task.cpp)."""
    reading.add_text(_read_openai(reading, event).get("text"))


def _read_chat(reading: Reading, event: Json) -> None:
    """Read `to_json_oaicompat_chat` and `_chat_stream` (server-task.cpp)."""
    choice = _read_openai(reading, event)
    if choice:
        message = as_dict(choice.get("message", choice.get("delta")))
        reading.opaque |= bool(message.get("reasoning_content") or message.get("tool_calls"))
        reading.add_text(message.get("content") or "")  # null in an answer without text


def _read_messages(reading: Reading, event: Json) -> None:
    """Read `to_json_anthropic` and `_anthropic_stream` (server-task.cpp): three usages."""
    kind = event.get("type")
    message = as_dict(event.get("message")) if kind == "message_start" else event
    usage = as_dict(message.get("usage"))
    new, cached = _int(usage.get("input_tokens")), _int(usage.get("cache_read_input_tokens"))
    if new is not None and cached is not None:
        reading.see_prompt(new + cached, cached)
    reading.see_generated(usage.get("output_tokens"))
    if kind in ("message", "message_start"):
        reading.add_text("")
        for block in _list(message.get("content")):
            _read_block(reading, as_dict(block), "text")
    elif kind == "content_block_start":
        _read_block(reading, as_dict(event.get("content_block")), "text")
    elif kind == "content_block_delta":
        _read_block(reading, as_dict(event.get("delta")), "text_delta")


def _read_block(reading: Reading, block: Json, text_type: str) -> None:
    if block.get("type") == text_type:
        reading.add_text(block.get("text"))
    else:
        reading.opaque = True


def _read_responses(reading: Reading, event: Json) -> None:
    """Read `to_json_oaicompat_resp` and `_resp_stream` (server-task.cpp)."""
    reading.see_timings(event.get("timings"))
    _read_progress(reading, event)
    match event.get("type"):
        case "response.output_text.delta":
            reading.add_text(event.get("delta"))
        case "response.output_item.added":
            reading.opaque |= as_dict(event.get("item")).get("type") != "message"
        case "response.completed":
            _read_response(reading, as_dict(event.get("response")))
        case None:
            _read_response(reading, event)
        case _:
            pass


def _read_response(reading: Reading, response: Json) -> None:
    """Read the whole answer, which also ends a stream.

    A second one belongs to another choice.
    """
    if response.get("object") != "response":
        return
    reading.several |= reading.ended
    reading.ended = True
    usage = as_dict(response.get("usage"))
    details = as_dict(usage.get("input_tokens_details"))
    reading.see_prompt(usage.get("input_tokens"), details.get("cached_tokens"))
    reading.see_generated(usage.get("output_tokens"))
    reading.text = ""  # the text of the deltas is repeated here
    for item in map(as_dict, _list(response.get("output"))):
        reading.opaque |= item.get("type") != "message"
        for part in map(as_dict, _list(item.get("content"))):
            reading.add_text(part.get("text"))


READERS: dict[Shape, Callable[[Reading, Json], None]] = {
    Shape.COMPLETION: _read_native,
    Shape.INFILL: _read_native,
    Shape.OAI_COMPLETION: _read_completion,
    Shape.CHAT: _read_chat,
    Shape.MESSAGES: _read_messages,
    Shape.RESPONSES: _read_responses,
}
