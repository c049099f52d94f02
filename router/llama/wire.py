"""Requests to llama-server: their parsed fields, and the bytes that are sent on.

Pure functions. A body is parsed for its prompt and a few fields, then sent on as it came: the
backend answers as it would without a router. Only a body that is no JSON object is refused here;
the backend refuses wrong fields.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple, TypeGuard

import orjson
from msgspec import Struct
from msgspec.structs import replace

from router.base.decoding import UndecodableError, json_bytes
from router.base.errors import BadRequestError
from router.base.tokens import Tokens, pack, pieces
from router.llama import json_offload
from router.llama.bodies.anthropic import BILLING_PREFIX, anthropic_to_chat, without_stamp
from router.llama.bodies.filters import NO_FILTERS, Filters, filtered
from router.llama.bodies.hints import NO_HINTS, CacheHints, hints_of
from router.llama.bodies.responses import responses_to_chat
from router.llama.routes import Shape

INT32_MAX = 2**31 - 1
# Names of the limit of an answer's tokens: the first that is not null counts.
LIMITS = ("n_predict", "max_completion_tokens", "max_tokens")
# Of each type of media: a payload of one zero byte, which /apply-template decodes and ignores.
_TINY = {
    "image_url": {"url": "data:image/png;base64,AA=="},
    "input_audio": {"data": "data:audio/wav;base64,AA=="},
    **{key: {"data": "data:video/mp4;base64,AA=="} for key in ("input_video", "video_url")},
}


class TokenPrompt(Struct, frozen=True):
    """A token array; the server takes it as it is and adds no BOS."""

    tokens: Tokens


class TextPrompt(Struct, frozen=True):
    """Text, tokenized with add_special=true and parse_special=true."""

    text: str


class MixedPrompt(Struct, frozen=True):
    """Strings and ids, the `content` of /tokenize; only a first string gets add_special."""

    parts: tuple[str | int, ...]


class ChatPrompt(Struct, frozen=True):
    """A chat body for POST /apply-template; the rendered answer is a TextPrompt.

    Every media part keeps its place, with a payload of one byte. The template renders the same
    media marker, and no image is sent or downloaded twice. `media` has the fingerprints of the
    true payloads, in the order of the markers.
    """

    body: dict[str, Any]
    media: tuple[str, ...] = ()

    @property
    def has_boundaries(self) -> bool:
        """Return whether other chats may diverge from it at the ends of its messages.

        With media the router does not claim what a slot holds; a last message that is gone on from
        has no end.
        """
        return not self.media and "continue_final_message" not in self.body


class InfillPrompt(Struct, frozen=True):
    """The parts of an /infill body; the server puts them together. `extra`: names and texts."""

    prefix: str
    suffix: str
    prompt: str = ""
    extra: tuple[tuple[str, str], ...] = ()


# Requests that show how a server puts the parts together. The first has no text that occurs twice.
INFILL_PROBES = (
    InfillPrompt("alpha beta", "gamma delta"),
    InfillPrompt(
        "def f(x):\n    ", "\n    return x\n", "y =", (("a.py", "x = 1\n"), ("tmp", "two  parts"))
    ),
)


class UnknownPrompt(Struct, frozen=True):
    """A prompt with tokens that the router cannot know, for this reason."""

    reason: str
    legal: bool = False  # the server may know the tokens; else it refuses the request


PromptSource = TokenPrompt | TextPrompt | MixedPrompt | ChatPrompt | InfillPrompt | UnknownPrompt


# Fields that make two requests alike, whatever their prompts are: each gets code of its own in the
# server. Tools do as well, but all requests of an agent have the same ones. Kept of a large body.
ALIKE = frozenset({"grammar", "json_schema", "response_format", "grammar_triggers", "samplers"})
_SHORT = 4096  # characters


class ParsedRequest(Struct, frozen=True):
    """One completion request, as llama-server reads it."""

    shape: Shape
    body: dict[str, Any]
    model: str | None
    stream: bool
    max_new_tokens: int | None  # None: as many as the backend's own limit allows
    cache_prompt: bool
    slot_hint: int | None
    tasks: int  # that llama-server makes of it
    answers: int  # of them to each prompt
    lora: bool
    shifts: bool  # the server may shift chunks of KV for it (llama-server.md section 2.3)
    pinnable: bool
    prompt_source: PromptSource
    hints: CacheHints = NO_HINTS
    background: bool = False  # its client can wait
    salt: str = ""  # its client's digest of `cache_salt`: nothing is shared between two of them

    def without_prompt(self) -> "ParsedRequest":
        """Return the request without what may be large; its other fields stay."""
        body = {n: v for n, v in self.body.items() if n in ALIKE or _is_short(v)}
        gone = UnknownPrompt("it was let go of")
        return replace(self, body=body, prompt_source=gone, hints=replace(self.hints, forks=()))

    @property
    def counts_asked(self) -> list[Any] | None:
        """Return its `response_fields` with the counts that it leaves out. None: it has them."""
        fields = self.body.get("response_fields")
        native = self.shape in (Shape.COMPLETION, Shape.INFILL)
        if not native or not isinstance(fields, list) or not fields or "timings" in fields:
            return None
        if not all(isinstance(field, str) for field in fields):
            return None  # the server ignores such a list: the answer is whole
        if self.stream and self.body.get("timings_per_token"):
            return None  # the events of its stream have them
        return [*fields, "timings"]


def _is_short(value: object) -> bool:
    return not isinstance(value, list | dict) and not (
        isinstance(value, str) and len(value) > _SHORT
    )


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a body. Raises BadRequestError if it is not a JSON object."""
    try:
        body = json_offload.loads(raw)
    except UndecodableError as error:
        raise BadRequestError(f"the request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError(f"the request body must be a JSON object, not {_json_type(body)}")
    return body


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def parse_completion(
    shape: Shape, raw: bytes, filters: Filters = NO_FILTERS
) -> tuple[ParsedRequest, bytes]:
    """Parse a body, and free what the router does not need. Raises BadRequestError.

    Returns the bytes to send, too: others than `raw` where a filter changes the body. For a long
    body, call it by `json_offload.read`.
    """
    body = parse_body(raw)
    changed = filtered(body, filters) if filters else None
    if shape is Shape.CHAT and BILLING_PREFIX in raw:
        unstamped = without_stamp(body if changed is None else changed)
        changed = changed if unstamped is None else unstamped
    parsed = parse_request(shape, body if changed is None else changed)
    sent = raw if changed is None else json_bytes(changed)
    if isinstance(parsed.prompt_source, TokenPrompt):
        json_offload.forget_ids(parsed.body)
    return parsed, sent


def parse_request(shape: Shape, body: dict[str, Any]) -> ParsedRequest:
    """Parse the fields that the router needs. Never raises, never changes `body`."""
    n_prompts = 1
    # `eval_llama_cmpl_schema` reads the converted body where there is one. The converted body of
    # /v1/messages has no id_slot, n, cache_prompt or lora (llama-server.md section 2.1).
    fields = body
    source: PromptSource
    convert: Callable[[dict[str, Any]], dict[str, Any]] = dict
    match shape:
        case Shape.COMPLETION | Shape.OAI_COMPLETION:
            source, n_prompts = _native_prompt(body)
        case Shape.INFILL:
            source = _infill_prompt(body)
        case Shape.CHAT:
            source = _chat_prompt(body)
        case Shape.MESSAGES | Shape.RESPONSES:
            convert = anthropic_to_chat if shape is Shape.MESSAGES else responses_to_chat
            try:
                fields = convert(body)
            except ValueError as error:
                fields = {}
                source = UnknownPrompt(f"the server will refuse this body: {error}")
            else:
                source = _chat_prompt(fields)
    model, slot = body.get("model"), _int32(fields.get("id_slot"))
    answers = max(_first_int(fields, "n_cmpl", "n") or 1, 1)
    return ParsedRequest(
        shape=shape,
        body=body,
        model=model if isinstance(model, str) else None,
        stream=body.get("stream") is True,
        max_new_tokens=_max_new_tokens(fields),
        cache_prompt=fields.get("cache_prompt") is not False,
        slot_hint=slot if slot is not None and slot >= 0 else None,
        tasks=n_prompts * answers,
        answers=answers,
        lora=fields.get("lora") not in (None, []),
        shifts=_int32(fields.get("n_cache_reuse", 0)) != 0,  # null: the server's `--cache-reuse`
        pinnable=shape is not Shape.MESSAGES,
        prompt_source=source,
        background=_is_background(body),
        salt=_salt(body),
        hints=hints_of(body, convert) if isinstance(source, ChatPrompt) else NO_HINTS,
    )


def _is_background(body: dict[str, Any]) -> bool:
    """Return whether a client can wait: OpenAI's `service_tier`, or vLLM's `priority` above 0."""
    priority = body.get("priority")
    later = isinstance(priority, int) and not isinstance(priority, bool) and priority > 0
    return later or body.get("service_tier") in ("flex", "batch")


def _salt(body: dict[str, Any]) -> str:
    """Return a digest of vLLM's `cache_salt`, which a client may want to be secret; "" without."""
    salt = body.get("cache_salt")
    if not isinstance(salt, str) or not salt:
        return ""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _max_new_tokens(fields: dict[str, Any]) -> int | None:
    """Return `n_predict` or an alias, in the order of server-schema.cpp; -1 is no limit."""
    limit = _first_int(fields, *LIMITS)
    return limit if limit is not None and limit >= 0 else None


def _first_int(fields: dict[str, Any], *names: str) -> int | None:
    """Return the first value that is not null (`field_num::eval`, server-schema.cpp)."""
    for name in names:
        if fields.get(name) is not None:
            return _int32(fields[name])
    return None


def _int32(value: object) -> int | None:
    """Convert as `json::get<int>()`: truncate floats, take booleans; None if it would refuse."""
    if not isinstance(value, int | float):
        return None
    number = int(value)
    return number if -INT32_MAX <= number <= INT32_MAX else None


def _native_prompt(body: dict[str, Any]) -> tuple[PromptSource, int]:
    """Return a prompt, and how many there are (`tokenize_input_prompts`, server-common.cpp).

    An array without any number is a batch; a batch of one is that one prompt.
    """
    if "prompt" not in body:
        return UnknownPrompt("there is no prompt"), 1
    prompt = body["prompt"]
    if isinstance(prompt, list) and not any(is_int(part) for part in prompt):
        if not prompt:
            return UnknownPrompt("the prompt is an empty array"), 1
        if len(prompt) > 1:
            return UnknownPrompt(f"a batch of {len(prompt)} prompts"), len(prompt)
        prompt = prompt[0]
    return _single_prompt(prompt), 1


def _single_prompt(prompt: object) -> PromptSource:
    """Parse one prompt, as `tokenize_input_subprompt` (server-common.cpp)."""
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, list):
        if all(is_int(part) for part in prompt):
            return _token_prompt(prompt)
        if any(is_int(part) for part in prompt) and any(isinstance(part, str) for part in prompt):
            return _mixed_prompt(prompt)
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if "multimodal_data" in prompt:
            return UnknownPrompt("multimodal_data is tokenized by the server", legal=True)
        text = prompt["prompt_string"]  # read by tokenize_mixed: strings and ids in any mixture
        if isinstance(text, str):
            return TextPrompt(text)
        if isinstance(text, list):
            return _mixed_prompt(text)
    return UnknownPrompt("the server takes no prompt of this type")


def _mixed_prompt(parts: list[Any]) -> PromptSource:
    """Parse an array of strings and ids, as `tokenize_mixed` (server-common.cpp)."""
    if not all(isinstance(part, str) or is_int(part) for part in parts):
        return UnknownPrompt("the prompt holds a value that is neither a string nor a token id")
    ids = [part for part in parts if is_int(part)]
    if len(ids) == len(parts):
        return _token_prompt(parts)
    checked = _token_prompt(ids)
    return checked if isinstance(checked, UnknownPrompt) else MixedPrompt(tuple(parts))


def _infill_prompt(body: dict[str, Any]) -> PromptSource:
    """Return the parts of an infill body (`post_infill`, server-context.cpp)."""
    if not {"input_prefix", "input_suffix"} <= body.keys():
        return UnknownPrompt("'input_prefix' and 'input_suffix' are required")
    prefix, suffix, prompt = body["input_prefix"], body["input_suffix"], body.get("prompt")
    if not isinstance(prompt, str):
        prompt = ""  # as the server: json_value returns its default for another type
    extra = body.get("input_extra", [])
    if not isinstance(extra, list):
        return UnknownPrompt("the server will refuse 'input_extra'")
    chunks: list[tuple[str, str]] = []
    for chunk in extra:
        fields = chunk if isinstance(chunk, dict) else {}
        name, text = fields.get("filename", "tmp"), fields.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            return UnknownPrompt("the server will refuse a chunk of 'input_extra'")
        chunks.append((name, text))
    if not isinstance(prefix, str) or not isinstance(suffix, str):
        return UnknownPrompt("the parts hold token ids", legal=True)
    return InfillPrompt(prefix, suffix, prompt, tuple(chunks))


def _token_prompt(ids: list[int]) -> PromptSource:
    """Pack ids. The server refuses negative ids, and `types.Prompt` uses them for media."""
    if any(min(piece) < 0 for piece in pieces(ids)):
        return UnknownPrompt("the prompt holds a negative token id")
    try:
        return TokenPrompt(pack(ids))
    except OverflowError:
        return UnknownPrompt("the prompt holds a token id that is not an int32")


def is_int(value: object) -> TypeGuard[int]:
    """Return `is_number_integer()` of a value; in Python a bool is an int too."""
    return type(value) is int


def _chat_prompt(body: dict[str, Any]) -> PromptSource:
    """Return the body for /apply-template, without the media payloads."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return UnknownPrompt("'messages' must be an array")
    media: list[str] = []
    light = [_without_payloads(message, media) for message in messages]
    return ChatPrompt({**body, "messages": light} if media else body, tuple(media))


def _without_payloads(message: object, media: list[str]) -> object:
    """Return the message with tiny payloads; append the true ones' fingerprints to `media`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_tiny_part(part, media) for part in message["content"]]}


def _tiny_part(part: object, media: list[str]) -> object:
    """Return a part with a tiny payload if it is media, else unchanged.

    Media are those of `oaicompat_content_load_media` (server-common.cpp). A part without a
    payload stays as it is: the server refuses the part in both requests alike.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TINY:
        return part
    holder, tiny = part.get(kind), _TINY[kind]
    keys = ("url",) if kind == "image_url" else ("data", "url")
    found = [holder.get(key) for key in keys] if isinstance(holder, dict) else []
    payload = next((text for text in found if isinstance(text, str)), "")
    if not payload:
        return part
    media.append(fingerprint(payload))
    return {**part, kind: tiny}


def fingerprint(payload: str) -> str:
    """Return the digest of a data URL's data, or of another URL itself.

    The content behind a URL may change unnoticed. This is safe: the server compares the content's
    own hash before it reuses anything.
    """
    data = payload.partition(",")[2] if payload.startswith("data:") else payload
    return blake2b(data.encode(), digest_size=16).hexdigest()


def with_fields(raw: bytes, body: dict[str, Any], fields: dict[str, Any]) -> bytes:
    """Set fields in `raw`, otherwise unchanged unless the client sent one of them."""
    if fields.keys() & body.keys():
        return json_bytes({**body, **fields})
    # the first brace opens the object, after at most a byte order mark and white space
    start = raw.index(b"{") + 1
    comma = b"," if body else b""
    return b"%b%b%b%b" % (raw[:start], orjson.dumps(fields)[1:-1], comma, raw[start:])


def kept_in_place(body: dict[str, Any]) -> dict[str, Any]:
    """Return the field that keeps the server from shifting KV (llama-server.md section 2.3).

    Empty if the client sent this field.
    """
    return {} if "n_cache_reuse" in body else {"n_cache_reuse": 0}


def pin_slot(raw: bytes, body: dict[str, Any], slot: int, **more: object) -> bytes:
    """Set `id_slot` and the given fields in `raw`."""
    return with_fields(raw, body, {"id_slot": slot, **more})


def strip_slot(raw: bytes, body: dict[str, Any], **more: object) -> bytes:
    """Remove the client's own `id_slot` from `raw` and set the given fields."""
    if "id_slot" not in body:
        return with_fields(raw, body, more) if more else raw
    return json_bytes({key: value for key, value in body.items() if key != "id_slot"} | more)


class Shown(NamedTuple):
    """A prompt of text with media: files in base64, one for each marker in the text."""

    text: str
    media: tuple[str, ...]
