"""An answer in slices: each is a request of its own, and goes on from the answers before.

Between two slices the slot can serve another request, and nothing that was generated is lost: the
state is saved and restored like any other (docs/adr/0028). A completion goes on from its ids. A
chat goes on from its text, as its next turn would. Pure: bodies in, bodies out.
"""

from typing import Any, NamedTuple

from msgspec.structs import replace

from router.base.decoding import UndecodableError, json_bytes, json_of
from router.base.tokens import Tokens, count, join, pack, unpack
from router.base.types import OwnPrefill
from router.llama.routes import Shape
from router.llama.wire import (
    INT32_MAX,
    LIMITS,
    ChatPrompt,
    MixedPrompt,
    ParsedRequest,
    TextPrompt,
    TokenPrompt,
    is_int,
)

Json = dict[str, Any]

# A slice takes about so long. Another request waits for its end.
_SLICE_S = 0.5
_FIRST_TOKENS = 48  # before the speed is known
# Of each slice one token at least is computed again: the last one, which the server had only
# sampled. With this many times as many tokens in the next slice, that is below 3 %.
_LEAST_PER_LOST = 40

NO_TEXT = "\ufffd"  # in place of bytes that are no whole character
# A character of 4 bytes has this many tokens at most.
_CHARACTER_TOKENS = 4

# Fields that mean the same for each slice as for the whole. Not `stop`, which may lie across two
# slices, nor what has a state from the first token on: grammars, mirostat, budgets of time.
_SAME_IN_SLICES = frozenset(
    {
        *LIMITS,
        *("model", "messages", "prompt", "stream", "n", "cache_prompt", "id_slot", "n_cache_reuse"),
        *("temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p"),
        *("top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "min_keep", "samplers"),
        *("repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
        *("dry_sequence_breakers", "logit_bias", "ignore_eos"),
        *("chat_template_kwargs", "reasoning_effort", "reasoning_format"),
        *("service_tier", "priority", "user", "metadata", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    }
)
_NOTHING: tuple[object, ...] = (None, [], {}, "")


class NotSlicedError(Exception):
    """The slices of an answer do not fit together: it has to be generated as one."""


def can_be_sliced(parsed: ParsedRequest) -> bool:
    """Return whether slices surely give the answer that the request would have got as one.

    Not a stream, whose client wants each token. With a seed only where nothing is drawn.
    """
    body, source = parsed.body, parsed.prompt_source
    if parsed.stream or parsed.whole_backend or parsed.lora or parsed.shifts:
        return False
    if not (parsed.cache_prompt and parsed.pinnable):
        return False
    seeded = body.get("seed") is not None
    if seeded and body.get("temperature") != 0:
        return False
    if not all(_is_limit(body.get(name)) for name in LIMITS):
        return False  # the server refuses it, or generates nothing
    extra = {key for key, value in body.items() if value not in _NOTHING}
    if not extra <= _SAME_IN_SLICES | {"seed"}:
        return False
    match parsed.shape:
        case Shape.COMPLETION | Shape.OAI_COMPLETION:
            return isinstance(source, TextPrompt | TokenPrompt | MixedPrompt)
        case Shape.CHAT:
            return isinstance(source, ChatPrompt) and not source.media and _may_go_on(body)
        case _:
            return False


def _is_limit(value: object) -> bool:
    """Return whether a limit of tokens means the same for the server and here; None: no limit."""
    return value is None or (is_int(value) and (value == -1 or 0 < value <= INT32_MAX))


def _may_go_on(body: Json) -> bool:
    """Return whether the answer is a message of its own, to which another can be appended."""
    last = body["messages"][-1] if body["messages"] else None
    return isinstance(last, dict) and last.get("role") != "assistant"


class SlicedAnswer:
    """One answer on its way, over all its slices. `prompt`: the ids of the client's prompt.

    `prefilled`: what the router computed of it before the first slice. `n_ctx`: tokens of a slot.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        prompt: Tokens,
        prefilled: OwnPrefill | None = None,
        n_ctx: int = INT32_MAX,
    ) -> None:
        self._parsed, self._prompt, self._n_ctx = parsed, prompt, n_ctx
        self.prefilled = prefilled
        self._limit = parsed.max_new_tokens  # None: there is none
        self._ids: list[int] = []  # of a completion
        self._text, self._thought = "", ""  # of the answer, and of the reasoning before it
        self._whole = _Part()
        self._granted = _Part()  # since the last `begin`
        self._n_text = 0  # characters of `text` at the last `begin`
        self._size = _FIRST_TOKENS

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens that were generated."""
        return self._whole.n_tokens

    @property
    def n_granted(self) -> int:
        """Return those since the last `begin`."""
        return self._granted.n_tokens

    @property
    def _is_chat(self) -> bool:
        return self._parsed.shape is Shape.CHAT

    def begin(self) -> None:
        """Begin to count for another slot."""
        self._granted, self._n_text = _Part(), len(self._text)

    @property
    def tokens(self) -> Tokens | None:
        """Return the ids of prompt and answer so far. None: those of a chat are not known."""
        return None if self._is_chat else join([self._prompt, pack(self._ids)])

    @property
    def n_left(self) -> int | None:
        """Return the tokens that may still be generated. None: there is no limit."""
        return None if self._limit is None else self._limit - self.n_tokens

    def so_far(self) -> ParsedRequest:
        """Return the request for the rest of a chat."""
        return self._request(self.n_left)

    def next(self) -> tuple[ParsedRequest, bytes]:
        """Return the request for the next slice, and its bytes."""
        if (left := self.n_left) is not None:
            self._size = min(self._size, left)
        parsed = self._request(self._size)
        return parsed, json_bytes(parsed.body)

    def _request(self, n_tokens: int | None) -> ParsedRequest:
        parsed = self._parsed
        source = parsed.prompt_source
        body = {key: value for key, value in parsed.body.items() if key not in LIMITS}
        if n_tokens is not None:
            body["n_predict"] = n_tokens
        if not self._is_chat:
            body["return_tokens"] = True
            if parsed.shape is Shape.OAI_COMPLETION:
                body["verbose"] = True  # else it returns no tokens
            if self._ids or not isinstance(source, TextPrompt):
                body["prompt"] = unpack(self._prompt) + self._ids
        elif self._text or self._thought:
            message: Json = {"role": "assistant", "content": self._text}
            if self._thought:
                message["reasoning_content"] = self._thought
            body["messages"] = [*body["messages"], message]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
            source = ChatPrompt(body)
        return replace(parsed, body=body, prompt_source=source, max_new_tokens=n_tokens)

    def add(self, raw: bytes) -> bool:
        """Take the answer of the slice; return whether the whole answer is over.

        Raises NotSlicedError if it does not go on from the answer before; it is not taken then.
        """
        try:
            answer = json_of(raw)
            made = self._made(answer)
            timings = answer["timings"]
            n_tokens, n_prompt = timings["predicted_n"], timings["prompt_n"]
            seconds = timings["predicted_ms"] / 1000
        except (UndecodableError, LookupError, TypeError, AttributeError) as error:
            raise NotSlicedError("the answer of a slice is not as expected") from error
        if not 0 < n_tokens <= self._size:
            raise NotSlicedError("a slice has another number of tokens than was asked")
        if not self._is_chat and len(made.ids) != n_tokens:
            raise NotSlicedError("a slice has not the ids of all its tokens")
        total = self.n_tokens + n_tokens
        is_over = not made.at_limit or n_tokens < self._size or total == self._limit
        if not is_over and (made.text, made.thought) == (self._text, self._thought):
            raise NotSlicedError("a slice has no text, and the next would be the same")
        if not is_over and count(self._prompt) + total + 1 >= self._n_ctx:
            raise NotSlicedError("the context is full, and a server may shift it")
        lost = n_prompt if self.n_granted else 0
        self._text, self._thought = made.text, made.thought
        self._ids += made.ids
        for part in (self._whole, self._granted):
            part.add(answer, n_tokens, seconds)
        per_token_s = self._whole.seconds / self.n_tokens
        timely = round(_SLICE_S / per_token_s) if per_token_s else 0
        self._size = max(timely, _LEAST_PER_LOST * max(lost, 1))
        return is_over

    def _made(self, answer: Json) -> "_Made":
        """Return text and ids with those of a slice. Raises LookupError, TypeError and the like."""
        shape = self._parsed.shape
        if shape is Shape.COMPLETION:
            ids, at_limit = answer["tokens"], answer["stop_type"] == "limit"
            return _Made(self._text + answer["content"], "", _checked(ids), at_limit)
        choice = answer["choices"][0]
        at_limit = choice["finish_reason"] == "length"
        if shape is Shape.OAI_COMPLETION:
            ids = answer.pop("__verbose")["tokens"]
            return _Made(self._text + choice["text"], "", _checked(ids), at_limit)
        message = choice["message"]  # with the text that it goes on from
        text, thought = message.get("content") or "", message.get("reasoning_content") or ""
        if at_limit:  # of a character that is not complete there are bytes that are no text
            text, thought = text.rstrip(NO_TEXT), thought.rstrip(NO_TEXT)
        if message.get("tool_calls"):
            raise NotSlicedError("a slice calls a tool")
        if not (text.startswith(self._text) and thought.startswith(self._thought)):
            raise NotSlicedError("a slice does not go on from the text before")
        return _Made(text, thought, [], at_limit)

    def last_ids(self) -> list[int]:
        """Return ids with the last character of a completion, which may not be complete yet."""
        return self._ids[-_CHARACTER_TOKENS - 1 :]

    def take_back(self, n_tokens: int, text: str) -> None:
        """Take the last tokens back, and their text: they are a part of a character.

        Raises NotSlicedError if the answer does not end with that text.
        """
        if not self._text.endswith(text):
            raise NotSlicedError("the text of a slice is not that of its tokens")
        self._text = self._text.removesuffix(text)
        del self._ids[len(self._ids) - n_tokens :]
        for part in (self._whole, self._granted):
            part.n_tokens -= n_tokens

    def whole(self) -> bytes:
        """Return the answer as the server would have sent it as one."""
        return self._merged(self._whole, self._text)

    def granted(self) -> bytes:
        """Return the part since the last `begin`, as an answer of its own."""
        return self._merged(self._granted, self._text[self._n_text :])

    def _merged(self, part: "_Part", text: str) -> bytes:
        answer: Json = {**part.last, "timings": part.timings()}
        first, n_tokens = part.first, part.n_tokens
        if self._parsed.shape is Shape.COMPLETION:
            answer |= {"content": text, "tokens": [], "tokens_predicted": n_tokens}
            answer |= {key: first[key] for key in ("prompt", "tokens_evaluated") if key in first}
            settings, limit = dict(answer.get("generation_settings", {})), self._limit
            for key in LIMITS:
                if key in settings:
                    settings[key] = -1 if limit is None else limit
            answer["generation_settings"] = settings
            return json_bytes(answer)
        choice = dict(answer["choices"][0])
        if self._parsed.shape is Shape.OAI_COMPLETION:
            choice["text"] = text
        else:
            choice["message"] = {**choice["message"], "content": text}
        answer["choices"] = [choice]
        usage = first["usage"]
        totals = {
            "completion_tokens": n_tokens,
            "total_tokens": usage["prompt_tokens"] + n_tokens,
        }
        answer["usage"] = {**usage, **totals}
        return json_bytes(answer)


class _Made(NamedTuple):
    """What a slice made: the whole text and reasoning so far, and its own ids."""

    text: str
    thought: str
    ids: list[int]
    at_limit: bool


def _checked(ids: list[int]) -> list[int]:
    if not all(map(is_int, ids)):
        raise TypeError
    return ids


class _Part:
    """Several slices in a row: the first answer and the last one, and sums."""

    def __init__(self) -> None:
        self.first: Json = {}
        self.last: Json = {}
        self.n_tokens = 0
        self.seconds = 0.0

    def add(self, answer: Json, n_tokens: int, seconds: float) -> None:
        self.first = self.first or answer
        self.last = answer
        self.n_tokens += n_tokens
        self.seconds += seconds

    def timings(self) -> Json:
        """Return the timings of all: the prompt is that of the first (server-common.h)."""
        ms, n = self.seconds * 1000, self.n_tokens
        return {
            **self.first["timings"],
            "predicted_n": n,
            "predicted_ms": ms,
            "predicted_per_token_ms": ms / n,
            "predicted_per_second": n * 1000 / ms if ms else 0.0,
        }
