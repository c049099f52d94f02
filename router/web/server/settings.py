"""The configuration of the web layer that may change while it runs."""

from dataclasses import dataclass, field

from router.config.schema import LimitsConfig
from router.llama.bodies.filters import Filters


@dataclass(slots=True)
class Settings:
    """A change counts for later connections and requests. `body_memory_bytes`: for all bodies."""

    limits: LimitsConfig = field(default_factory=LimitsConfig)
    body_memory_bytes: int = 0
    passthrough: bool = False
    shows_page: bool = True  # at this address, and not at one for operators
    needs_key: bool = False
    browser_hosts: frozenset[str] = frozenset()
    browser_origins: frozenset[str] = frozenset()
    corrects_counts: bool = True
    tells_creation: bool = False
    filters: Filters = field(default_factory=dict)

    def model_of(self, name: str | None) -> str | None:
        """Return the model that a filter gives for a name; without one the name itself."""
        found = None if name is None else self.filters.get(name)
        return name if found is None or found.model is None else found.model
