"""Read from a request that is no completion: the model, and how many slots it takes."""

from typing import Any

from msgspec import Struct

from router.base.decoding import UndecodableError
from router.llama import json_offload, multipart
from router.llama.routes import Route
from router.llama.wire import is_int

_UNKNOWN = 1 << 16  # more than any server has slots


class SlotsAsked(Struct, frozen=True):
    """The model and the slots that a request asks for."""

    model: str | None
    tasks: int  # that llama-server makes: one of each prompt


def model_of(raw: bytes, content_type: str) -> str | None:
    """Return the `model` of a JSON body or a form; None if it names none."""
    if multipart.is_form(content_type):
        return multipart.text_field(raw, content_type, "model")
    return _model_in(_json_object(raw))


def slots_of(raw: bytes, content_type: str, route: Route) -> SlotsAsked:
    """Return the model and the slots that a body asks for.

    A body that cannot be read counts as one prompt: the server refuses it, or it is a form with
    a sound file.
    """
    if multipart.is_form(content_type):
        # A form field that occurs twice is an array: several inputs or prompts.
        many = multipart.is_array(raw, content_type, "prompt")
        tasks = _UNKNOWN if many or route.stateless else 1
        return SlotsAsked(model_of(raw, content_type), tasks)
    body = _json_object(raw)
    tasks = max((_n_prompts(body.get(key)) for key in route.inputs), default=1)
    return SlotsAsked(_model_in(body), _UNKNOWN if route.many_tasks else tasks)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json_offload.loads(raw)
    except UndecodableError:
        return {}
    return body if isinstance(body, dict) else {}


def _model_in(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _n_prompts(value: object) -> int:
    """Return how many prompts an array is; the token ids of one are one."""
    if not isinstance(value, list) or all(map(is_int, value)):
        return 1
    return max(len(value), 1)
