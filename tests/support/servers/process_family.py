"""Processes that others have started. Linux only."""

from pathlib import Path


def family(pid: int) -> list[int]:
    """Return a process and its descendants; empty if it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]
