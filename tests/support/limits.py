"""Limits of what clients may send, as a configuration gives them."""

from router.config.schema import LimitsConfig


def limits(**known: float) -> LimitsConfig:
    """Return the default limits but for some, by the names of their fields."""
    return LimitsConfig.model_construct(**known)  # type: ignore[arg-type]
