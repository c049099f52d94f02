"""Filters: fields that an operator sets, gives a default or strips in requests for a model.

A filter may give a model one more name, with fields of its own.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

Json = dict[str, Any]


class RequestFilter(Struct, frozen=True):
    """What happens to requests for one name. `model`: what they ask for instead; None: the same."""

    model: str | None = None
    strip: frozenset[str] = frozenset()
    default: Mapping[str, Any] = {}
    set: Mapping[str, Any] = {}

    def applied(self, body: Json) -> Json:
        """Return the body with all but its own fields in their order; `body` is not changed."""
        kept = {key: value for key, value in body.items() if key not in self.strip}
        named = {} if self.model is None else {"model": self.model}
        return {**self.default, **kept, **self.set, **named}


Filters = Mapping[str, RequestFilter]
"""By the name that a request asks for."""

NO_FILTERS: Filters = {}


def filtered(body: Json, filters: Filters) -> Json | None:
    """Return the body that is to be sent in place of this one; None: this one.

    One filter is applied: the name that it gives instead is not looked up again.
    """
    name = body.get("model")
    found = filters.get(name) if isinstance(name, str) else None
    return None if found is None else found.applied(body)
