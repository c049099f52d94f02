"""Model and slots that requests other than completions ask for, also with unreadable bodies.

`tests/e2e` tests with real servers that llama-server makes a task of each input.
"""

from collections.abc import Callable

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from router.llama.routes import ROUTES
from router.web.api.slot_demand import SlotsAsked, model_asked, slots_asked

SOUND = ROUTES["/v1/audio/transcriptions"]
FORM = "multipart/form-data; boundary=b"


def part(name: str, value: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


@pytest.mark.parametrize(
    ("raw", "model", "many"),
    [
        (b'{"model": "m", "input": "x"}', "m", False),
        (b'{"input": ["x"]}', None, False),
        (b'{"input": ["x", "y"]}', None, True),
        (b'{"input": [1, 2, 3]}', None, False),
        (b'{"input": [1, true]}', None, True),
        (b'{"input": [[1], [2]]}', None, True),
        (b'{"content": ["x", "y"]}', None, True),
        (b'{"query": "q", "documents": ["x", "y"]}', None, True),
        (b'{"query": "q", "texts": ["x", "y"]}', None, True),
        (b'{"prompt": ["x", "y"]}', None, False),
        (b'{"model": 1}', None, False),
        (b"[1, 2]", None, False),
        (b"", None, False),
        (b'{"input": ["x", ', None, False),
    ],
)
async def test_of_json(raw: bytes, model: str | None, many: bool) -> None:
    path = "/v1/rerank" if b"query" in raw else "/v1/embeddings"
    request = make_mocked_request("POST", path)
    assert await slots_asked(request, raw, ROUTES[path]) == SlotsAsked(model, many, in_form=False)
    assert await model_asked(request, raw) == model


@pytest.mark.parametrize(
    ("raw", "model", "many"),
    [
        (part("model", "m") + part("prompt", "x"), "m", False),
        (part("prompt", "x") + part("prompt", "y"), None, True),
        (b"no form at all", None, False),
    ],
)
async def test_of_a_form(raw: bytes, model: str | None, many: bool) -> None:
    request = make_mocked_request("POST", "/v1/embeddings", headers={"Content-Type": FORM})
    assert await slots_asked(request, raw + b"--b--\r\n", SOUND) == SlotsAsked(
        model, many, in_form=True
    )
    assert await model_asked(request, raw + b"--b--\r\n") == model


async def test_a_body_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def noted(function: Callable[[bytes], object]) -> Callable[[bytes], object]:
        return lambda raw: read.append(raw) or function(raw)  # type: ignore[func-returns-value]

    monkeypatch.setattr("router.llama.json_offload.json_of", noted(orjson.loads))
    await slots_asked(make_mocked_request("POST", "/v1/embeddings"), b'{"model": "m"}', SOUND)
    assert read == [b'{"model": "m"}']
