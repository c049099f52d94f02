"""What a request that is no completion says of itself: the model, and how many slots it takes."""

from typing import Any

import orjson
from aiohttp import web

from router.base.frozen import dataclass
from router.llama import json_offload, multipart
from router.llama.wire import is_int

_INPUTS = ("input", "content", "documents", "texts")


@dataclass(frozen=True, slots=True)
class SlotsAsked:
    """Of a request that takes slots."""

    model: str | None
    many: bool  # several prompts: llama-server makes a task of each
    in_form: bool


async def model_asked(request: web.BaseRequest, raw: bytes) -> str | None:
    """The `model` of a JSON body or a form, whatever else is in it."""
    kind = request.headers.get("Content-Type", "")
    return await json_offload.read(raw, _model_of, raw, kind)


async def slots_asked(request: web.BaseRequest, raw: bytes) -> SlotsAsked:
    """The same of a request that takes slots. What cannot be read is one: the server refuses it,
    or it is a form with a sound file."""
    kind = request.headers.get("Content-Type", "")
    return await json_offload.read(raw, _slots_of, raw, kind)


def _model_of(raw: bytes, content_type: str) -> str | None:
    if multipart.is_form(content_type):
        return multipart.text_field(raw, content_type, "model")
    return _model_in(_json_object(raw))


def _slots_of(raw: bytes, content_type: str) -> SlotsAsked:
    if multipart.is_form(content_type):
        # A field that a form has twice is an array: several inputs, or prompts.
        many = multipart.is_array(raw, content_type, "prompt")
        return SlotsAsked(_model_of(raw, content_type), many, in_form=True)
    body = _json_object(raw)
    return SlotsAsked(
        _model_in(body), any(_is_many(body.get(key)) for key in _INPUTS), in_form=False
    )


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json_offload.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _model_in(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    return model if isinstance(model, str) else None


def _is_many(value: object) -> bool:
    """An array of anything but the ids of one prompt."""
    return isinstance(value, list) and len(value) > 1 and not all(map(is_int, value))
