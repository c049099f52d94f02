"""`kvferry usage`: rows summed over what is not asked for."""

from typing import Any

from router.tools.console.usage import by


def test_rows_are_summed_over_what_is_not_asked_for() -> None:
    rows: list[dict[str, Any]] = [
        {"day": day, "tenant": tenant, "model": "m", "computed_tokens": n}
        for day, tenant, n in (("1", "alice", 1), ("2", "alice", 2), ("2", "bob", 4))
    ]
    assert list(by(rows, ["tenant"])) == [
        {"tenant": "bob", "computed_tokens": 4},
        {"tenant": "alice", "computed_tokens": 3},
    ]
