"""What of the configuration the web layer goes by, and may change while it runs."""

from dataclasses import dataclass


@dataclass(slots=True)
class Settings:
    """Sizes in bytes, times in seconds. What is changed counts for what comes after."""

    max_body_bytes: int = 0
    body_timeout_s: float = 0.0
    idle_timeout_s: float = 0.0
    send_timeout_s: float = 0.0
    passthrough: bool = False
