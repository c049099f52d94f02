"""What bodies of requests that are no completions say, and what becomes of those that say nothing.

That llama-server makes a task of each input is tested with real ones, in `tests/e2e`.
"""

from collections.abc import Callable

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from router.web.asked import SlotsAsked, model_asked, slots_asked

FORM = "multipart/form-data; boundary=b"


def part(name: str, value: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"model": "m", "input": "x"}', SlotsAsked("m", many=False, in_form=False)),
        (b'{"input": ["x"]}', SlotsAsked(None, many=False, in_form=False)),
        (b'{"input": ["x", "y"]}', SlotsAsked(None, many=True, in_form=False)),
        (b'{"input": [1, 2, 3]}', SlotsAsked(None, many=False, in_form=False)),
        (b'{"input": [1, true]}', SlotsAsked(None, many=True, in_form=False)),
        (b'{"input": [[1], [2]]}', SlotsAsked(None, many=True, in_form=False)),
        (b'{"content": ["x", "y"]}', SlotsAsked(None, many=True, in_form=False)),
        (b'{"query": "q", "documents": ["x", "y"]}', SlotsAsked(None, many=True, in_form=False)),
        (b'{"query": "q", "texts": ["x", "y"]}', SlotsAsked(None, many=True, in_form=False)),
        (b'{"prompt": ["x", "y"]}', SlotsAsked(None, many=False, in_form=False)),
        (b'{"model": 1}', SlotsAsked(None, many=False, in_form=False)),
        (b"[1, 2]", SlotsAsked(None, many=False, in_form=False)),
        (b"", SlotsAsked(None, many=False, in_form=False)),
        (b'{"input": ["x", ', SlotsAsked(None, many=False, in_form=False)),
    ],
)
async def test_of_json(raw: bytes, expected: SlotsAsked) -> None:
    request = make_mocked_request("POST", "/v1/embeddings")
    assert await slots_asked(request, raw) == expected
    assert await model_asked(request, raw) == expected.model


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (part("model", "m") + part("prompt", "x"), SlotsAsked("m", many=False, in_form=True)),
        (part("prompt", "x") + part("prompt", "y"), SlotsAsked(None, many=True, in_form=True)),
        (b"no form at all", SlotsAsked(None, many=False, in_form=True)),
    ],
)
async def test_of_a_form(raw: bytes, expected: SlotsAsked) -> None:
    request = make_mocked_request("POST", "/v1/embeddings", headers={"Content-Type": FORM})
    assert await slots_asked(request, raw + b"--b--\r\n") == expected
    assert await model_asked(request, raw + b"--b--\r\n") == expected.model


async def test_a_body_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []

    def noted(function: Callable[[bytes], object]) -> Callable[[bytes], object]:
        return lambda raw: read.append(raw) or function(raw)  # type: ignore[func-returns-value]

    monkeypatch.setattr("router.adapters.long_bodies.orjson.loads", noted(orjson.loads))
    await slots_asked(make_mocked_request("POST", "/v1/embeddings"), b'{"model": "m"}')
    assert read == [b'{"model": "m"}']
