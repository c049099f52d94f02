"""Model and slots that requests other than completions ask for, also with unreadable bodies.

`tests/e2e` tests with real servers that llama-server makes a task of each input.
"""

import pytest

from router.llama.routes import ROUTES
from router.web.api.slot_demand import SlotsAsked, model_of, slots_of

SOUND = ROUTES["/v1/audio/transcriptions"]
FORM = "multipart/form-data; boundary=b"


def part(name: str, value: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


@pytest.mark.parametrize(
    ("raw", "model", "tasks"),
    [
        (b'{"model": "m", "input": "x"}', "m", 1),
        (b'{"input": ["x"]}', None, 1),
        (b'{"input": ["x", "y"]}', None, 2),
        (b'{"input": [1, 2, 3]}', None, 1),
        (b'{"input": [1, true]}', None, 2),
        (b'{"input": [[1], [2]]}', None, 2),
        (b'{"content": ["x", "y"]}', None, 2),
        (b'{"query": "q", "documents": ["x", "y"]}', None, 2),
        (b'{"query": "q", "texts": ["x", "y"]}', None, 2),
        (b'{"prompt": ["x", "y"]}', None, 1),
        (b'{"model": 1}', None, 1),
        (b"[1, 2]", None, 1),
        (b"", None, 1),
        (b'{"input": ["x", ', None, 1),
    ],
)
def test_of_json(raw: bytes, model: str | None, tasks: int) -> None:
    path = "/v1/rerank" if b"query" in raw else "/v1/embeddings"
    assert slots_of(raw, "application/json", ROUTES[path]) == SlotsAsked(model, tasks)
    assert model_of(raw, "application/json") == model


@pytest.mark.parametrize(
    ("raw", "model", "tasks"),
    [
        (part("model", "m") + part("prompt", "x"), "m", 1),
        (part("prompt", "x") + part("prompt", "y"), None, 1 << 16),
        (b"no form at all", None, 1),
    ],
)
def test_of_a_form(raw: bytes, model: str | None, tasks: int) -> None:
    assert slots_of(raw + b"--b--\r\n", FORM, SOUND) == SlotsAsked(model, tasks)
    assert model_of(raw + b"--b--\r\n", FORM) == model
