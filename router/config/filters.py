"""The `filters` section: fields of requests that are set, stripped or given, by model."""

from collections.abc import Iterator, Mapping

from pydantic import Field, JsonValue

from router.config import values
from router.config.loader import ConfigSection, Misfit

# Without them it would be another request, or another slot.
KEPT = frozenset({"model", "stream", "id_slot", "messages", "prompt", "input", "system"})


class FilterConfig(ConfigSection):
    """A filter. `name` is the model that requests ask for."""

    name: values.Text
    model: values.Text | None = None  # None: the same
    strip: tuple[values.Text, ...] = Field(default=(), strict=False)
    default: Mapping[str, JsonValue] = Field(default_factory=dict)
    set: Mapping[str, JsonValue] = Field(default_factory=dict)

    def misfits(self) -> Iterator[Misfit]:
        for key, names in (("strip", self.strip), ("default", self.default), ("set", self.set)):
            for name in names:
                if name in KEPT:
                    told = f"{name} is a field that no filter changes"
                    remedy = "; `model` of the filter does" if name == "model" else ""
                    yield (key,), told + remedy
