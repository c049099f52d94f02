"""Totals of an answer to a request of several tasks: a list of prompts, `n`, or both.

llama-server tells the counts of each task, but in a plain answer of OpenAI's shapes those of the
first one only (`send_final_response`, server-context.cpp). There the others are estimated.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from router.base.types import Reported
from router.llama.reply_parsers import READERS, Reading, as_dict
from router.llama.routes import Shape
from router.llama.wire import ParsedRequest, is_int

Json = dict[str, Any]


_COUNTS = (b'"usage":', b'"timings":', b'"tokens_predicted":')


class Asked(NamedTuple):
    """What was asked: `n` answers to each prompt, of `limit` tokens; the size of each prompt."""

    n: int
    limit: int | None
    sizes: tuple[int, ...]


def asked_in(parsed: ParsedRequest) -> Asked:
    """Return what a body of several tasks asks for; sizes are in bytes or ids."""
    prompts = parsed.body.get("prompt")
    if not isinstance(prompts, list) or any(map(is_int, prompts)):
        prompts = [prompts]
    sizes = tuple(max(len(one), 1) if isinstance(one, str | list) else 1 for one in prompts)
    return Asked(parsed.answers, parsed.max_new_tokens, sizes)


def read_totals(shape: Shape, events: Iterable[object], asked: Asked) -> Reported:
    """Return the sums over all tasks; a prompt counts once, whatever its `n`. Never raises.

    `events`: of a stream, or the one plain answer.
    """
    tasks: dict[int, Reading] = {}
    merged: list[Any] = []
    for index, event in _by_task(shape, events):
        choices = event.get("choices")
        if isinstance(choices, list) and len(choices) > 1:
            merged = choices
        reading = tasks.setdefault(index, Reading())
        READERS[shape](reading, event)
        reading.several = False  # each has its own
    told = {index: reading.report(complete=False) for index, reading in tasks.items()}
    if not told:
        return Reported()
    if merged:
        told |= _estimated(told[min(told)], merged, asked)
    prompts = [one for index, one in told.items() if index % asked.n == 0]
    return Reported(
        prompt_tokens=_sum(one.prompt_tokens for one in prompts),
        cached_tokens=_sum(one.cached_tokens for one in prompts),
        prompt_s=_sum(one.prompt_s for one in prompts),
        generated_tokens=_sum(one.generated_tokens for one in told.values()),
        generated_s=max((one.generated_s or 0.0 for one in told.values()), default=0.0),
    )


def telling(stream: bytes) -> bytes:
    """Return the events of a stream that may tell counts, each with the one before it.

    Usage names no task, and follows the last event of its own. Most events are a token each.
    """
    events = stream.split(b"\n\n")
    tell = [any(word in event for word in _COUNTS) for event in events]
    kept = (
        event for event, *near in zip(events, tell, [*tell[1:], False], strict=True) if any(near)
    )
    return b"\n\n".join(kept) + b"\n\n"


def _by_task(shape: Shape, events: Iterable[object]) -> Iterator[tuple[int, Json]]:
    """Yield each object with the index of its task.

    The usage at the end of a stream names no task, and follows the last event of its own. Answers
    of /v1/responses name none: the next one begins when one has ended.
    """
    index = 0
    for event in events:
        if isinstance(event, list):
            yield from enumerate(map(as_dict, event))
            continue
        if not isinstance(event, dict):
            continue
        if shape is Shape.RESPONSES:
            yield index, event
            index += event.get("type") == "response.completed"
            continue
        choices = event.get("choices")
        named = as_dict(choices[0]) if isinstance(choices, list) and choices else event
        told = named.get("index")
        index = told if is_int(told) and told >= 0 else index
        yield index, event


def _estimated(first: Reported, choices: list[Any], asked: Asked) -> dict[int, Reported]:
    """Return the tasks of a plain answer whose first one is told.

    An answer that was cut off has as many tokens as its limit; another one as many for its length
    as the first. A prompt likewise; what the server had of it is not known, and counts as computed.
    """
    texts = [_text(as_dict(choice)) for choice in choices]
    cut = [as_dict(choice).get("finish_reason") == "length" for choice in choices]
    generated = first.generated_tokens or 0
    limit = generated if cut[0] else asked.limit
    per_character = generated / max(len(texts[0]), 1)
    found = {}
    for index in range(1, len(choices)):
        size = asked.sizes[min(index // asked.n, len(asked.sizes) - 1)]
        tokens = round((first.prompt_tokens or 0) * size / asked.sizes[0])
        known = limit is not None and cut[index]
        found[index] = Reported(
            prompt_tokens=None if first.prompt_tokens is None else tokens,
            cached_tokens=None if first.cached_tokens is None else 0,
            generated_tokens=limit if known else round(per_character * len(texts[index])),
        )
    return found


def _text(choice: Json) -> str:
    message = as_dict(choice.get("message"))
    parts = (choice.get("text"), message.get("content"), message.get("reasoning_content"))
    calls = message.get("tool_calls")
    return "".join(part for part in parts if isinstance(part, str)) + (str(calls) if calls else "")


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of what is told; None: nothing is."""
    told = [value for value in values if value is not None]
    return sum(told) if told else None
