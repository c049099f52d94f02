"""The configuration of the web layer that may change while it runs."""

from dataclasses import dataclass, field

from router.base.forwarded import Network
from router.llama.bodies.filters import Filters


@dataclass(slots=True)
class Settings:
    """Sizes in bytes, times in seconds. A change counts for later connections and requests."""

    connections: int = 0  # -1: no limit
    connections_per_client: int = 0
    max_request_line_bytes: int = 0
    max_header_bytes: int = 0
    max_headers: int = 0
    header_timeout_s: float = 0.0
    keep_alive_timeout_s: float = 0.0
    max_body_bytes: int = 0
    body_memory_bytes: int = 0
    body_timeout_s: float = 0.0
    idle_timeout_s: float = 0.0
    send_timeout_s: float = 0.0
    passthrough: bool = False
    shows_page: bool = True  # at this address, and not at one for operators
    needs_key: bool = False
    trusted_proxies: tuple[Network, ...] = ()
    browser_hosts: frozenset[str] = frozenset()
    browser_origins: frozenset[str] = frozenset()
    corrects_counts: bool = True
    tells_creation: bool = False
    filters: Filters = field(default_factory=dict)

    def model_of(self, name: str | None) -> str | None:
        """Return the model that a filter gives for a name; without one the name itself."""
        found = None if name is None else self.filters.get(name)
        return name if found is None or found.model is None else found.model
