"""The `llm` command, with a model in `extra-openai-models.yaml` that names `api_base`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clients.pair import LOOK, MODEL, Pair

pytest.importorskip("llm", reason="make test-clients")

ASKED = "Why is the sky blue?"
GREEDY = ["-o", "temperature", "0", "-o", "max_tokens", "8"]


class Command:
    """The command, with a configuration of its own for each address."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def __call__(self, base: str, *words: str, code: int = 0) -> str:
        home = self._home / base.rpartition(":")[2]
        home.mkdir(exist_ok=True)
        model = {
            "model_id": "mine",
            "model_name": MODEL,
            "api_base": f"{base}/v1",
            "supports_schema": True,
            "supports_tools": True,
        }
        (home / "extra-openai-models.yaml").write_text(json.dumps([model]))
        done = subprocess.run(
            [sys.executable, "-m", "llm", *words],
            env=os.environ | {"LLM_USER_PATH": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout or done.stderr


@pytest.fixture
def llm(tmp_path: Path) -> Command:
    return Command(tmp_path)


@pytest.mark.client("llm", "chat")
def test_chat(pair: Pair, llm: Command) -> None:
    assert pair.same(lambda url: llm(url, "-m", "mine", "--no-stream", *GREEDY, ASKED)).strip()


@pytest.mark.client("llm", "streaming")
def test_streaming(pair: Pair, llm: Command) -> None:
    """`llm` streams unless `--no-stream` is given."""
    found = pair.same(lambda url: llm(url, "-m", "mine", *GREEDY, ASKED))

    assert found == llm(pair.routed, "-m", "mine", "--no-stream", *GREEDY, ASKED)


@pytest.mark.client("llm", "conversation")
def test_conversation(pair: Pair, llm: Command) -> None:
    """`-c` continues the last conversation, which the command keeps in its own database."""

    def both(url: str) -> list[str]:
        first = llm(url, "-m", "mine", *GREEDY, ASKED)
        return [first, llm(url, "-c", *GREEDY, "And at night?")]

    first, second = pair.same(both)

    assert first != second


@pytest.mark.client("llm", "JSON schema")
def test_json_schema(pair: Pair, llm: Command) -> None:
    long = [*GREEDY[:-1], "60"]
    found = pair.same(
        lambda url: llm(url, "-m", "mine", "--schema", json.dumps(LOOK), *long, ASKED)
    )

    assert json.loads(found)["page"] in LOOK["properties"]["page"]["enum"]


@pytest.mark.client("llm", "errors")
def test_errors(pair: Pair, llm: Command) -> None:
    found = pair.same(lambda url: llm(url, "-m", "mine", *GREEDY, "long " * 9000, code=1))

    assert "exceeds the available context size" in found
