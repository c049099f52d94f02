"""Every example of docs/clients.md does what it says, with only the address substituted."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.table import PAGE
from tests.support.clients.pair import Pair

ADDRESS = "http://127.0.0.1:8080"
# Fenced blocks that are run. Others are text: settings of programs that cannot run here.
BLOCKS = re.findall(r"^```(python|bash)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
NEEDS = ("anthropic", "langchain_openai", "litellm", "llm", "openai", "pydantic_ai")


def needs(text: str) -> list[str]:
    return [name for name in NEEDS if re.search(rf"^(import|from) {name}\b|^{name} ", text, re.M)]


def name_of(block: tuple[str, str]) -> str:
    language, text = block
    return "-".join([language, *needs(text)])


def test_examples_are_found() -> None:
    """Examples cover each client, and all of them ask the router."""
    assert {name for _, text in BLOCKS for name in needs(text)} == set(NEEDS)
    assert all(ADDRESS in text or "$OPENAI_BASE_URL" in text for _, text in BLOCKS)


@pytest.mark.real
@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_example(pair: Pair, block: tuple[str, str], tmp_path: Path) -> None:
    language, text = block
    for package in needs(text):
        pytest.importorskip(package, reason="make test-clients")
    text = text.replace(ADDRESS, pair.routed)
    command = (
        [sys.executable, "-c", text]
        if language == "python"
        else ["bash", "-euo", "pipefail", "-c", text]
    )
    # The PATH of a user's shell after `. .venv/bin/activate`.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": path, "LLM_USER_PATH": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
