"""Plain `curl`, as people type it."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.support.clients.pair import HI, KEY, LOCKED, MODEL, Pair
from tests.support.servers.running_router import Json

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")

GREEDY: Json = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 8}


def curl(*words: str) -> str:
    """Return what curl prints. Fail if curl fails."""
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *words], capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def post(url: str, body: Json, *more: str) -> str:
    return curl(url, "-H", "Content-Type: application/json", "-d", json.dumps(body), *more)


@pytest.mark.client("curl", "chat")
def test_chat(pair: Pair) -> None:
    found = pair.same(lambda url: json.loads(post(f"{url}/v1/chat/completions", GREEDY)))

    assert found["choices"][0]["message"]["content"]


@pytest.mark.client("curl", "streaming")
def test_streaming(pair: Pair) -> None:
    def events(url: str) -> list[Any]:
        text = post(f"{url}/v1/chat/completions", GREEDY | {"stream": True}, "-N")
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    assert len(pair.same(events)) > 8


@pytest.mark.client("curl", "completions")
def test_completions(pair: Pair) -> None:
    """llama-server's own route pins to a slot if one is named."""
    body: Json = {"prompt": "Once", "n_predict": 8, "temperature": 0, "id_slot": 1}
    more = {"model": MODEL, "cache_prompt": False}
    found = pair.same(
        lambda url: {
            key: value
            for key, value in json.loads(post(f"{url}/completion", body | more)).items()
            if key not in ("id_slot", "tokens_cached", "generation_settings")
        }
    )

    assert found["tokens_predicted"] == 8


@pytest.mark.client("curl", "models")
def test_models(pair: Pair) -> None:
    found = json.loads(curl(f"{pair.routed}/v1/models"))["data"]
    (alone,) = json.loads(curl(f"{pair.direct[MODEL]}/v1/models"))["data"]
    (ours,) = [one for one in found if one["id"] == MODEL]

    assert ours | {"created": 0} == alone | {"created": 0}


@pytest.mark.client("curl", "token counts")
def test_tokenize(pair: Pair) -> None:
    found = pair.same(
        lambda url: json.loads(post(f"{url}/tokenize", {"content": "Hello?", "model": MODEL}))
    )

    assert found["tokens"]


@pytest.mark.client("curl", "errors")
def test_errors(pair: Pair) -> None:
    def status(url: str) -> list[Any]:
        text = post(f"{url}/v1/chat/completions", {"model": MODEL}, "-w", "\n%{http_code}")
        body, _, code = text.rpartition("\n")
        return [code, json.loads(body)]

    code, body = pair.same(status)

    assert code == "400"
    assert body["error"]["message"]


@pytest.mark.client("curl", "refused routes")
def test_refused_routes(pair: Pair) -> None:
    """Routes that would interfere with the router's slots are refused, and only those."""
    for method, path in (("POST", "/slots"), ("POST", "/slots/0?action=erase"), ("POST", "/props")):
        text = curl(f"{pair.routed}{path}", "-X", method, "-w", "\n%{http_code}")
        body, _, code = text.rpartition("\n")
        assert code == "403", (path, text)
        assert json.loads(body)["error"]["type"] == "permission_error"
    assert json.loads(curl(f"{pair.routed}/props"))["total_slots"] == 6  # of all servers


@pytest.mark.client("curl", "server with a key")
def test_server_with_a_key(pair: Pair) -> None:
    found = pair.same(
        lambda url: json.loads(
            post(
                f"{url}/v1/chat/completions",
                GREEDY | {"model": LOCKED},
                *(["-H", f"Authorization: Bearer {KEY}"] if url != pair.routed else []),
            )
        ),
        on=LOCKED,
    )

    assert found["choices"][0]["message"]["content"]
