"""The tiny models are valid for llama-server, repeatable, and sensitive to their context."""

import json
from pathlib import Path

import aiohttp
import pytest
from transformers import AutoTokenizer

from tests.conftest import StartServer
from tests.support.models.tiny_models import KINDS, N_VOCAB, tiny_model
from tests.support.servers.llama_server import LlamaServer

STRINGS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "tabs\tand\n\nnewlines \n x",
    "numbers 1234567890 and 3.14",
    "don't, we'll, I'm, they've",
    "naïve café, Füße, Ænima",
    "日本語のテキスト",
    "emoji 🦙🚢 and ZWJ 👩‍💻",
    "<|im_start|>user\nhi<|im_end|>\n",
    "almost <|im_start and |im_end|>",
    "def f(x):\n    return x  # comment\n",
    "http://example.org/?a=1&b=%20",
    "a" * 300,
]


async def post(server: LlamaServer, path: str, body: object) -> dict[str, object]:
    """POST JSON, expect 200 and JSON."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, object] = await response.json()
        return answer


async def greedy(server: LlamaServer, prompt: list[int], n: int = 32) -> list[int]:
    """Return the `n` most likely tokens after `prompt`, computed without reuse."""
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
    }
    tokens = (await post(server, "/completion", body))["tokens"]
    assert isinstance(tokens, list)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
async def test_model_talks(llama_server: StartServer, kind: str) -> None:
    """Models generate 48 tokens without stopping, and not one token for ever."""
    server = await llama_server(kind)
    prompt = list(range(20, 220))
    tokens = await greedy(server, prompt, 48)

    assert len(tokens) == 48
    assert len(set(tokens)) > 8
    assert tokens == await greedy(server, prompt, 48)


@pytest.mark.parametrize("kind", KINDS)
async def test_answer_depends_on_the_context(llama_server: StartServer, kind: str) -> None:
    """Lost or foreign prefixes are noticed: same last 8 tokens, other 40 before them."""
    server = await llama_server(kind)
    tail = list(range(100, 108))
    one = await greedy(server, list(range(20, 60)) + tail)
    other = await greedy(server, list(range(220, 260)) + tail)

    assert one != other


@pytest.mark.parametrize("kind", KINDS)
async def test_huggingface_tokenizer_is_the_servers(llama_server: StartServer, kind: str) -> None:
    """Ids are equal, so a local tokenizer may stand in for the server's."""
    server = await llama_server(kind)
    ours = AutoTokenizer.from_pretrained(str(tiny_model(kind).tokenizer_dir))

    for text in STRINGS:
        for add_special in (False, True):
            body = {"content": text, "add_special": add_special, "parse_special": True}
            theirs = (await post(server, "/tokenize", body))["tokens"]
            assert ours.encode(text, add_special_tokens=add_special) == theirs, text


@pytest.mark.parametrize("with_tools", [False, True])
async def test_chat_template_renders_alike(llama_server: StartServer, with_tools: bool) -> None:
    """transformers' Jinja and llama.cpp's render the same text."""
    server = await llama_server("llama")
    ours = AutoTokenizer.from_pretrained(str(tiny_model("llama").tokenizer_dir))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12 x 12?"},
        {"role": "assistant", "content": "144."},
        {"role": "user", "content": "Sure?\nReally?"},
    ]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Now", "parameters": schema}
    tools = [{"type": "function", "function": function}] if with_tools else None
    body = {"messages": messages} | ({"tools": tools} if tools else {})

    rendered = ours.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert rendered == (await post(server, "/apply-template", body))["prompt"]


def test_same_seed_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches on two machines hold the same model; another seed gives another model."""
    monkeypatch.setenv("KVFERRY_TEST_CACHE", str(tmp_path / "a"))
    one, other = tiny_model("llama"), tiny_model("llama", seed=1)
    monkeypatch.setenv("KVFERRY_TEST_CACHE", str(tmp_path / "b"))
    again = tiny_model("llama")

    assert one.path != again.path
    assert one.path.read_bytes() == again.path.read_bytes()
    assert one.path.read_bytes() != other.path.read_bytes()
    assert one.path.stat().st_size == other.path.stat().st_size


def test_cached_model_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling again writes nothing, and nothing half-written stays behind."""
    monkeypatch.setenv("KVFERRY_TEST_CACHE", str(tmp_path))
    first = tiny_model("mamba")
    written = first.path.stat().st_mtime_ns

    assert tiny_model("mamba") == first
    assert first.path.stat().st_mtime_ns == written
    assert [path.name for path in tmp_path.iterdir()] == [first.path.parent.name]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="rwkv"):
        tiny_model("rwkv")


def test_vocabulary_size() -> None:
    """Vocabulary: every byte, the merges, three specials; the HF file and the GGUF count alike."""
    data = json.loads((tiny_model("llama").tokenizer_dir / "tokenizer.json").read_text())
    assert len(data["model"]["vocab"]) == N_VOCAB
