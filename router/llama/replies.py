"""Parsing of llama-server's answers, as far as the router needs them.

`read_reply` is for completions. The function never raises: the client has its answer by then, and
only knowledge is lost. The `*_from` functions are for control calls and raise BackendError,
because the router cannot go on without those answers.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from router.base.errors import BackendError, KvferryError, RouterModeError
from router.base.tokens import pack
from router.base.types import PrefillProgress, Reported, SlotStatus, Transfer
from router.llama.reply_parsers import READERS, Json, Reading, as_dict, loads
from router.llama.routes import Shape
from router.llama.wire import is_int

IDENTITY = (None, "", "identity")
T = TypeVar("T")


def read_reply(
    shape: Shape,
    stream: bool,
    chunks: list[bytes] | bytes,
    content_encoding: str | None = None,
    *,
    complete: bool = True,
) -> Reported:
    """Return the facts in a completion's answer (llama-server.md section 2.4). Never raises.

    `complete=False`: bytes are missing in the middle, so there are totals but no ids and no text.
    `text` is the text that the client saw, without stop words, end-of-turn tokens and the parts
    that the chat parser removed. The text may be shorter than `generated_tokens`, never made up.
    """
    if content_encoding not in IDENTITY:
        return Reported()
    raw = chunks if isinstance(chunks, bytes) else b"".join(chunks)
    # an error before the first token is a plain object, also for a stream: no event
    events = events_in(raw, stream)
    reading = Reading()
    for event in events:
        if not isinstance(event, dict):
            # an array: several native results, each with totals of its own
            return Reported()
        READERS[shape](reading, event)
    return reading.report(complete=complete)


def events_in(raw: bytes, stream: bool) -> Iterator[Any]:
    """Yield the objects of an answer: those of its stream, or the one that it is. Never raises."""
    return _events(raw) if stream else iter([loads(raw)])


def read_usage(raw: bytes) -> Reported:
    """Return the tokens that an answer of embeddings or reranking tells; none of it is cached."""
    found = _EMBEDDED.search(raw)
    return Reported() if found is None else Reported(int(found[1]), 0)


def tokens_seen(chunks: list[bytes], size_bytes: int) -> int:
    """Return about how many tokens a stream brought that broke off. Never raises.

    A server sends an event for each token (llama-server.md section 2.4), and a few others. They are
    counted and not parsed. `size_bytes`: of the whole stream, of which `chunks` may lack a middle.
    """
    raw = b"".join(chunks)
    events = raw.count(b"data: {") - sum(map(raw.count, _NO_TOKEN))
    return max(round(events * size_bytes / max(len(raw), 1)), 0)


_GENERATED = (b"predicted_n", b"tokens_predicted", b"completion_tokens", b"output_tokens")
_PROMPTS = (b"prompt_n", b"prompt_tokens", b"input_tokens")
_COUNT = re.compile(rb'"(%b)":\s*(\d+)' % b"|".join((b"cache_n", *_PROMPTS, *_GENERATED)))


def with_counts(reported: Reported, parts: Sequence[bytes], *, several: bool = False) -> Reported:
    """Return a report with the counts that an answer, or its ends, show, if it has none.

    For answers that are not read as an object. `several`: of several tasks, each with its counts.
    In a text, the quotes around a name are escaped.
    """
    found = dict[bytes, int]()
    for name, n in _COUNT.findall(b"".join(parts)):
        found[name] = int(n) + (found.get(name, 0) if several else 0)
    prompt = next((found[name] for name in _PROMPTS if name in found), None)
    if reported.prompt_tokens is None and prompt is not None:
        cached = found.get(b"cache_n", 0) if b"prompt_n" in found else 0
        reported = replace(reported, prompt_tokens=prompt + cached, cached_tokens=cached)
    generated = next((found[name] for name in _GENERATED if name in found), None)
    return reported if generated is None else replace(reported, generated_tokens=generated)


_EMBEDDED = re.compile(rb'"usage":\s*\{[^{}]*"(?:prompt|input)_tokens":\s*(\d+)')
_NO_TOKEN = (b'"prompt_progress":', b'"content":null', b'"type":"message_start"', b'"type":"ping"')


def _events(raw: bytes) -> Iterator[Json]:
    """Yield the JSON objects of an event stream, without comments, [DONE] and fragments."""
    data: list[bytes] = []
    for line in (*raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), b""):
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
        elif data:
            event = loads(b"\n".join(data))
            data = []
            if isinstance(event, dict):
                yield event


Process = tuple[str, str, str]
_OLD_MARKER = "<__media__>"  # the same on every older server


@dataclass(frozen=True, slots=True)
class Props:
    """`GET /props` (get_res_props, server-context.cpp)."""

    total_slots: int
    n_ctx: int  # tokens one slot can hold
    model_path: str
    model_alias: str
    chat_template: str
    media_marker: str
    build_info: str
    bos_token: str
    eos_token: str
    has_vision: bool
    has_audio: bool
    endpoint_slots: bool
    is_sleeping: bool

    @property
    def takes_media(self) -> bool:
        """Return whether it was started with a projector."""
        return self.has_vision or self.has_audio

    @property
    def process(self) -> Process:
        """Return an identity that differs after each start (llama-server.md section 5.2).

        If `told_by_nothing`, the identity does not differ.
        """
        return self.media_marker, self.model_path, self.build_info

    @property
    def told_by_nothing(self) -> bool:
        """Return True if two servers of one model and version answer alike."""
        return self.media_marker in ("", _OLD_MARKER)


@dataclass(frozen=True, slots=True)
class ModelsInfo:
    """`GET /v1/models` (get_res_model_info, server-context.cpp), of the first model."""

    names: frozenset[str]  # id and aliases, of all models
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    ftype: str
    architecture: str  # modalities, as in "text+image->text"


class _Answer:
    """One answer to a control call. A missing or wrongly typed value raises BackendError."""

    def __init__(self, payload: object, call: str) -> None:
        self._call = call
        self.value: Any = loads(payload) if isinstance(payload, bytes) else payload

    def malformed(self, what: str) -> BackendError:
        return BackendError(f"the backend's answer to {self._call} is malformed: {what}")

    def get(self, path: str, kind: type[T], default: T | None = None) -> T:
        """Return the value at a path such as "data/0/id"; `default` if missing or null."""
        found = self.value
        for step in path.split("/"):
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                found = found.get(step) if isinstance(found, dict) else None
        if found is None and default is not None:
            return default
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind:
            raise self.malformed(f"{path} is not {_KINDS[kind]}")
        return found

    def items(self, path: str | None = None) -> list["_Answer"]:
        """Return the elements of the array at `path`, or of the answer itself."""
        found = self.value if path is None else self.get(path, list)
        if not isinstance(found, list):
            raise self.malformed("it is not an array")
        return [_Answer(item, self._call) for item in found]


_KINDS: dict[type, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "a boolean",
    list: "an array",
}


def props_from(payload: object) -> Props:
    """Read the answer to GET /props, as bytes or parsed. Raises BackendError."""
    answer = _Answer(payload, "GET /props")
    if answer.get("role", str, "") == "router":
        raise RouterModeError("GET /props: its role is router")
    return Props(
        total_slots=answer.get("total_slots", int),
        n_ctx=answer.get("default_generation_settings/n_ctx", int),
        model_path=answer.get("model_path", str),
        model_alias=answer.get("model_alias", str, ""),
        chat_template=answer.get("chat_template", str, ""),
        media_marker=answer.get("media_marker", str, ""),
        build_info=answer.get("build_info", str, ""),
        bos_token=answer.get("bos_token", str, ""),
        eos_token=answer.get("eos_token", str, ""),
        has_vision=answer.get("modalities/vision", bool, False),
        has_audio=answer.get("modalities/audio", bool, False),
        endpoint_slots=answer.get("endpoint_slots", bool, False),
        is_sleeping=answer.get("is_sleeping", bool, False),
    )


def models_from(payload: object) -> ModelsInfo:
    """Read the answer to GET /v1/models, as bytes or parsed. Raises BackendError.

    A server in router mode lists unloaded models without `meta`; such a server is no backend.
    """
    answer = _Answer(payload, "GET /v1/models")
    names: set[str] = set()
    for model in answer.items("data"):
        names.add(model.get("id", str))
        names.update(alias for alias in model.get("aliases", list, []) if isinstance(alias, str))
    sides = [
        "+".join(map(str, answer.get(f"data/0/architecture/{side}_modalities", list, ["text"])))
        for side in ("input", "output")
    ]
    return ModelsInfo(
        names=frozenset(names),
        n_vocab=answer.get("data/0/meta/n_vocab", int),
        n_ctx_train=answer.get("data/0/meta/n_ctx_train", int),
        n_embd=answer.get("data/0/meta/n_embd", int),
        n_params=answer.get("data/0/meta/n_params", int),
        size=answer.get("data/0/meta/size", int),
        ftype=answer.get("data/0/meta/ftype", str, ""),
        architecture="->".join(sides),
    )


def slots_from(payload: object) -> list[SlotStatus]:
    """Read the answer to GET /slots, as bytes or parsed. Raises BackendError."""
    statuses: list[SlotStatus] = []
    for slot in _Answer(payload, "GET /slots").items():
        if slot.get("backend", str, ""):
            raise KvferryError("GET /slots: these are the slots of a kvferry's backends")
        # missing on a slot that never ran a task (llama-server.md section 5.1)
        n_tokens, task = slot.get("n_prompt_tokens", int, -1), slot.get("id_task", int, -1)
        statuses.append(
            SlotStatus(
                index=slot.get("id", int),
                is_processing=slot.get("is_processing", bool),
                n_tokens=n_tokens if n_tokens >= 0 else None,
                n_ctx=slot.get("n_ctx", int),
                id_task=task if task >= 0 else None,
                adapted=bool(slot.get("params/lora", list, [])),
                speculative=slot.get("speculative", bool, False),
            )
        )
    return statuses


def transfer_from(payload: object, action: Literal["save", "restore"]) -> Transfer:
    """Read the answer to a slot save or restore, as bytes or parsed. Raises BackendError."""
    answer = _Answer(payload, f"a slot {action}")
    tokens, size = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    return Transfer(
        n_tokens=answer.get(tokens, int),
        size_bytes=answer.get(size, int),
        seconds=answer.get(f"timings/{action}_ms", float) / 1000,
    )


def ids_from(payload: object) -> list[int]:
    """Read the answer to POST /tokenize as a list of ids. Raises BackendError."""
    answer = _Answer(payload, "POST /tokenize")
    ids = answer.get("tokens", list)
    try:
        pack(ids)
    except (TypeError, OverflowError) as error:
        raise answer.malformed("tokens holds a value that is no token id") from error
    return ids


def field_from(payload: object, call: str, name: str, kind: type[T]) -> T:
    """Read one field of the answer to a call, as bytes or parsed. Raises BackendError."""
    return _Answer(payload, call).get(name, kind)


def knows_no_answer(payload: bytes) -> bool:
    """Return whether a control's answer says that it has no active completion of that id.

    Source: server-context.cpp, SERVER_TASK_TYPE_CONTROL.
    """
    return as_dict(loads(payload)).get("message") == "no active completion for this id"


def progress_in(events: bytes) -> Iterator[PrefillProgress]:
    """Yield the progress that whole events of a stream report."""
    for event in _events(events):
        told = as_dict(event.get("prompt_progress"))
        counts: list[Any] = [told.get(name) for name in ("processed", "cache", "time_ms")]
        if all(map(is_int, counts)):
            done, cached, ms = counts
            yield PrefillProgress(done, cached, ms / 1000)


def progress_reader(told: Callable[[PrefillProgress], None]) -> Callable[[bytes], None]:
    """Return what takes the chunks of a stream and tells the progress in its whole events."""
    kept = b""

    def seen(chunk: bytes) -> None:
        nonlocal kept
        whole, end, kept = (kept + chunk).rpartition(b"\n\n")
        for progress in progress_in(whole + end):
            told(progress)

    return seen


def error_message_from(payload: bytes) -> str:
    """Return an error answer's message, or "" (format_error_response, server-common.cpp)."""
    message = as_dict(as_dict(loads(payload)).get("error")).get("message")
    return message if isinstance(message, str) else ""


def top_logprobs_from(payload: bytes) -> list[tuple[int, float]]:
    """Return ids and log probabilities for the first token of a native answer with `n_probs`.

    Empty if the answer ended within a character: the server holds back such tokens, and their
    probabilities with them. Raises BackendError.
    """
    answer = _Answer(payload, "POST /completion with n_probs")
    if not answer.get("completion_probabilities", list, []):
        return []
    top = answer.items("completion_probabilities/0/top_logprobs")
    return [(entry.get("id", int), entry.get("logprob", float)) for entry in top]


@dataclass(frozen=True, slots=True)
class InfillAnswer:
    """Text and number of tokens of the prompt that an /infill answer was made for."""

    prompt: str
    n_tokens: int


def infill_from(payload: object) -> InfillAnswer:
    """Read a native answer to POST /infill. Raises BackendError."""
    answer = _Answer(payload, "POST /infill")
    return InfillAnswer(answer.get("prompt", str), answer.get("tokens_evaluated", int))


def error_of(payload: bytes, status: int) -> Json:
    """Return the `error` object of an answer with an error status; made up if there is none."""
    found = as_dict(loads(payload)).get("error")
    made_up = {"code": status, "message": f"HTTP {status}", "type": "server_error"}
    return found if isinstance(found, dict) else made_up
