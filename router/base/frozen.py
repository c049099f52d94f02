"""`dataclass(frozen=True)` for objects that each request makes: mypy refuses to change them, and
nothing is checked at run time.

Python's own frozen data classes call `object.__setattr__` for each field: 0.35 µs instead of 0.05.
A request sets about two hundred fields.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses

    def dataclass(*, frozen: bool = False, **options: Any) -> Any:
        """Make a class as `dataclasses.dataclass` does; equal and hashed as if frozen."""
        return dataclasses.dataclass(unsafe_hash=frozen, **options)
