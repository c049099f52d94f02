"""A tokenizer in this process: other threads run meanwhile, and bytes that have no token."""

import asyncio
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from router.prompts.local_tokenizer import BYTE_TEXTS, LocalTokenizer, load_local
from tests.support.models.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> None:
    """Loading blocks: the router does it in a thread."""


def tokenizers() -> list[LocalTokenizer]:
    model = tiny_model("llama")
    return [load_local(model.path), load_local(model.tokenizer_dir)]


@pytest.mark.parametrize("text", ["a" * (4 << 20), "word 123, " * (400 << 10)])
@pytest.mark.thorough
async def test_the_event_loop_runs_while_a_long_text_is_encoded(text: str) -> None:
    """With `Tokenizer.encode` it stood still for 98 % of the time."""
    for local in tokenizers():
        longest_s = 0.0
        begun = last = perf_counter()
        job = asyncio.get_running_loop().create_task(local.encode(text))
        while not job.done():
            await asyncio.sleep(0.001)
            now = perf_counter()
            longest_s, last = max(longest_s, now - last), now
        assert await job
        assert longest_s < (last - begun) / 2


def test_a_text_has_at_least_as_many_tokens_as_told() -> None:
    for local in tokenizers():
        for text in ("", "a", "a" * 5000, "word 123, " * 500, " " * 5000, "漢字 \x13\x00" * 500):
            assert local.least_tokens(text) <= len(local.encode_now(text))
        assert local.least_tokens("a" * 5000) > 0


TEXTS = ["\u0120", "}", "\u0120}", "a"]  # Ġ: the space


def _with_texts(folder: Path, texts: list[str], merges: list[str]) -> list[Path]:
    """Write the same BPE vocabulary as a GGUF and as a tokenizer.json."""
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([1] * len(texts))
    writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    return [path, folder]


def test_a_byte_without_a_token_is_dropped_after_merging(tmp_path: Path) -> None:
    """llama.cpp: `" \\x13}"` is a space and a brace, not the token of both."""
    for path in _with_texts(tmp_path, TEXTS, ["\u0120 }"]):
        local = load_local(path)
        assert local.encode_now(" }") == [2]
        assert local.encode_now(" \x13}") == [0, 1]
        assert local.encode_now("\x13") == []
        assert local.least_tokens("\x13" * 5000) == 0


def test_a_vocabulary_with_all_bytes_is_read_as_it_is(tmp_path: Path) -> None:
    for path in _with_texts(tmp_path, [*BYTE_TEXTS, "\u0120}"], ["\u0120 }"]):
        assert load_local(path).encode_now(" \x13}") == [32, 19, 125]
