"""What llama-server lists of itself, of several servers as one: models, slots, properties."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.llama.reply_parsers import Json, as_dict, loads
from router.llama.wire import is_int

# The status of a model in llama-server's router mode (llama-server.md section 5.8), by the phase of
# its server.
_STATUS = {"starting": "loading", "up": "loaded", "leaving": "loaded", "failed": "failed"}
# Of a slot. Its `params` have text of the prompt, and so have `prompt` and `generated`.
_SHAPE = ("n_ctx", "speculative", "is_processing")
_COUNTS = ("id_task", "n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache")
_NEXT = ("has_next_token", "has_new_line", "n_remain", "n_decoded")


@dataclass(frozen=True, slots=True)
class Listed:
    """A model of servers on demand. `n_ctx`: of a slot; 0: not known before it is loaded."""

    phase: str
    n_ctx: int
    n_slots: int


def merge_models(payloads: list[bytes]) -> Json:
    """Merge answers to GET /v1/models: each model once, as the first answer lists it."""
    answers = [as_dict(loads(payload)) for payload in payloads]
    merged: Json = {"object": "list"}
    for key, name in (("models", "name"), ("data", "id")):
        found: dict[object, Json] = {}
        for answer in answers:
            for model in answer.get(key, []):
                if isinstance(model, dict):
                    found.setdefault(model.get(name, len(found)), model)
        merged[key] = list(found.values())
    return merged


def with_names(models: Json, names: Iterable[str]) -> Json:
    """Add models that are others by another name."""
    entries = models.setdefault("data", [])
    known = {entry.get("id") for entry in entries}
    entries += [
        {"id": name, "object": "model", "owned_by": "kvferry", "created": 0}
        for name in names
        if name not in known
    ]
    return models


def with_status(models: Json, servers: Mapping[tuple[str, ...], Listed]) -> Json:
    """Add the models that servers on demand serve, each with a status as in router mode.

    `servers`: by the names of each model. The entry of one that is loaded is the server's.
    """
    entries = models.setdefault("data", [])
    for names, server in servers.items():
        listed = [entry for entry in entries if entry.get("id") in names]
        if not listed:
            listed = [{"id": names[0], "object": "model", "owned_by": "llamacpp", "created": 0}]
            if server.n_ctx:
                listed[0]["meta"] = {"n_ctx": server.n_ctx}
            entries += listed
        for entry in listed:
            theirs = [name for name in entry.get("aliases") or [] if isinstance(name, str)]
            known = dict.fromkeys([*names, *theirs])
            entry["aliases"] = [name for name in known if name != entry.get("id")]
            entry["status"] = {"value": _STATUS.get(server.phase, "unloaded")}
    return models


def unloaded_props(names: Sequence[str], server: Listed) -> Json:
    """Return the answer of GET /props for a model that is not loaded."""
    shape = {"n_ctx": server.n_ctx} if server.n_ctx else {}
    return {
        "default_generation_settings": shape,
        "total_slots": server.n_slots,
        "model_alias": names[0],
        "model_path": "",
        "chat_template": "",
        "is_sleeping": True,  # a request wakes it
        "status": {"value": _STATUS.get(server.phase, "unloaded")},
    }


def slots_in(payload: bytes) -> list[Json]:
    """Return the slots of an answer to GET /slots, without any text; none of a wrong answer."""
    found = loads(payload)
    slots = [as_dict(slot) for slot in found] if isinstance(found, list) else []
    return [_without_text(slot) for slot in slots if is_int(slot.get("id"))]


def _without_text(slot: Json) -> Json:
    shown: Json = {name: slot[name] for name in ("id", *_SHAPE, *_COUNTS) if name in slot}
    following: Any = slot.get("next_token")
    if isinstance(following, list):
        told = [as_dict(one) for one in following]
        shown["next_token"] = [{name: one[name] for name in _NEXT if name in one} for one in told]
    return shown


def of_others(slot: Json) -> Json:
    """Return a slot without what only its tenant may see."""
    return {name: slot[name] for name in ("id", *_SHAPE) if name in slot}
