"""Trial: a request's fields, judged by the server before the router computes its prompt.

llama-server refuses wrong fields, and grammars that do not parse, when a slot takes the request and
before it computes anything. The router's own prefill has none of these fields, so it would compute
a whole prompt for a refusal. So the first such request is sent with its own fields and the leased
slot; its first progress event says that they are accepted, and the connection is closed. What was
computed by then stays in the slot, and the prefill goes on from there.
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import isfinite
from typing import Any

from router.base.decoding import json_bytes
from router.llama.routes import Shape
from router.llama.wire import ChatPrompt, ParsedRequest, is_int, kept_in_place, with_fields

CHAT_PATH = "/v1/chat/completions"
_MOST_ACCEPTED = 10_000

Check = Callable[[Any], bool]


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _number(least: float, most: float) -> Check:
    def check(value: Any) -> bool:
        number = is_int(value) or isinstance(value, float)
        return number and isfinite(value) and least <= value <= most

    return check


def _integer(least: int, most: int) -> Check:
    return lambda value: is_int(value) and least <= value <= most


def _is_stop(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and all(map(_is_text, value)))


# Fields that the server reads, with values that it surely accepts (server-schema.cpp, b11434).
# None: no value is known to be good by itself.
_FIELDS: Mapping[str, Check | None] = {
    **dict.fromkeys(
        ("stream", "cache_prompt", "return_progress", "timings_per_token", "return_tokens"),
        _is_bool,
    ),
    **dict.fromkeys(("ignore_eos", "parallel_tool_calls", "logprobs", "echo"), _is_bool),
    **dict.fromkeys(("n_predict", "max_tokens", "max_completion_tokens"), _integer(-1, 2**31 - 1)),
    "max_output_tokens": _integer(1, 2**31 - 1),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "xtc_probability"), _number(0, 1)),
    "temperature": _number(0, 5),
    "top_k": _integer(0, 1_000_000),
    "seed": _integer(0, 2**31 - 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _number(-2, 2)),
    "repeat_penalty": _number(0.5, 5),
    "repeat_last_n": _integer(0, 2**31 - 1),
    "n_keep": _integer(0, 2**31 - 1),
    "n_probs": _integer(0, 20),
    "id_slot": _integer(-1, 2**31 - 1),
    "n": _integer(1, 1),
    "stop": _is_stop,
    "stop_sequences": _is_stop,
    "stream_options": lambda value: (
        value in ({}, {"include_usage": True}, {"include_usage": False})
    ),
    "tool_choice": lambda value: value in ("auto", "none"),
    "tools": lambda value: value == [],
    "response_format": lambda value: value == {"type": "text"},
    **dict.fromkeys(
        (
            *("dynatemp_range", "dynatemp_exponent", "top_n_sigma", "xtc_threshold", "samplers"),
            *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
            *("dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta", "min_keep"),
            *("adaptive_target", "adaptive_decay", "logit_bias", "backend_sampling", "n_indent"),
            *("n_discard", "n_cache_reuse", "t_max_predict_ms", "post_sampling_probs", "verbose"),
            *("response_fields", "sse_ping_interval", "n_cmpl", "lora", "grammar", "json_schema"),
            *("grammar_lazy", "grammar_triggers", "preserved_tokens", "suffix", "best_of", "text"),
            *("speculative.n_max", "speculative.n_min", "speculative.p_min", "thinking"),
            *("reasoning_budget_tokens", "reasoning_budget_message", "reasoning_control"),
            *("reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning"),
            *("reasoning_budget_end_tags", "reasoning_format", "reasoning_effort"),
            *("continue_final_message", "generation_prompt", "chat_format", "chat_parser"),
            *("parse_tool_calls", "chat_template_kwargs", "add_generation_prompt"),
            *("output_config", "message_delimiters", "functions", "function_call", "top_logprobs"),
        ),
        None,
    ),
}
_LIMITS = ("n_predict", "max_tokens", "max_completion_tokens")


def unproven(parsed: ParsedRequest) -> dict[str, Any]:
    """Return the fields of a request that the server may refuse."""
    body = parsed.body
    found = {
        name: value
        for name, value in body.items()
        if name in _FIELDS and value is not None and not _is_good(name, value)
    }
    if body.get("logprobs") is True and _integer(0, 20)(body.get("top_logprobs")):
        del found["top_logprobs"]  # which is refused without `logprobs`
    return found


def _is_good(name: str, value: Any) -> bool:
    check = _FIELDS[name]
    return check is not None and check(value)


def request(parsed: ParsedRequest, path: str, raw: bytes, slot: int) -> tuple[str, bytes]:
    """Return path and body of the trial of a request in a slot.

    Routes that do not take `id_slot` are tried as the chat that the server makes of them.
    """
    body, source = parsed.body, parsed.prompt_source
    if parsed.shape in (Shape.MESSAGES, Shape.RESPONSES) and isinstance(source, ChatPrompt):
        path, body = CHAT_PATH, source.body
        raw = json_bytes(body)
    wanted = {"stream": True, "return_progress": True, "cache_prompt": True, **kept_in_place(body)}
    if all(_is_good(name, body[name]) for name in _LIMITS if body.get(name) is not None):
        wanted["n_predict"] = 0
    more: dict[str, Any] = {
        name: value
        for name, value in wanted.items()
        if body.get(name) is None or _is_good(name, body[name])  # a wrong one is to be judged
    }
    if path == CHAT_PATH and not parsed.stream and body.get("logprobs") is True:
        # With tools the server has them only without a stream, and a trial is one.
        more |= {"logprobs": None, "top_logprobs": None}
    more["id_slot"] = slot
    return path, with_fields(raw, body, more)


class Accepted(dict[bytes, None]):
    """The fields that servers have accepted, by digest; the oldest are forgotten."""

    def add(self, digest: bytes) -> None:
        """Remember a digest."""
        self[digest] = None
        if len(self) > _MOST_ACCEPTED:
            del self[next(iter(self))]


def digest_of(fields: Mapping[str, Any], shape: Shape, namespace: str) -> bytes:
    """Return a digest of fields, for one route of one model."""
    told = json_bytes([namespace, shape.value, sorted(fields.items(), key=lambda each: each[0])])
    return blake2b(told, digest_size=16).digest()
