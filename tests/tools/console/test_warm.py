"""The file of `kvferry warm`: a body or a text, and the route that it is for."""

from typing import Any

import pytest

from router.tools.console.client import CallError
from router.tools.console.warm import body_of, path_of

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def test_other_files_are_refused() -> None:
    with pytest.raises(CallError, match="neither JSON nor a text"):
        body_of(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "x"}, "/completion"),
        ({"input": "x"}, "/v1/responses"),
        ({"messages": [{"role": "system", "content": "x"}]}, CHAT),
        ({"system": "x", "messages": []}, MESSAGES),
        ({"messages": None}, CHAT),
    ],
)
def test_route_is_told_by_the_fields(body: dict[str, Any], path: str) -> None:
    assert path_of(body) == path
