"""The ids of a real llama-server, for byte-level and SentencePiece vocabularies.

With KVFERRY_TEST_VOCABS set to a folder of vocabulary-only GGUFs (llama.cpp's `models/`), each
vocabulary gets a model with zero weights and is tried as well.
"""

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import numpy as np
import pytest

from router.base.errors import BackendError
from router.base.tasks import spawn as spawn_task
from router.base.tokens import count, pack
from router.prompts.local_tokenizer import TEXTS, LocalTokenizerError, load_local
from router.prompts.special_tokens import TokenizeCall, discover_specials
from router.prompts.tokenizer import SegmentTokenizer
from tests.conftest import StartServer
from tests.support.models.tiny_models import SPECIALS, tiny_model
from tests.support.servers.llama_server import LlamaServer


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> None:
    """These functions block: the router calls them in a thread or at its start."""


pytestmark = pytest.mark.real
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant.  "},
    {"role": "user", "content": " What is\n\nthe weather 漢字 123?\n"},
]
Post = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def client(url: str) -> AsyncIterator[tuple[Post, TokenizeCall]]:
    async with aiohttp.ClientSession() as http:

        async def post(path: str, **body: object) -> Any:
            async with http.post(url + path, json=body) as response:
                if response.status != 200:
                    raise BackendError(await response.text())
                return await response.json()

        async def call(
            content: str | list[str | int], *, add_special: bool, parse_special: bool
        ) -> list[int]:
            answer = await post(
                "/tokenize", content=content, add_special=add_special, parse_special=parse_special
            )
            ids: list[int] = answer["tokens"]
            return ids

        yield post, call


def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> None:
    _ = spawn_task(coro, name=name)


def mixtures(specials: list[str], n: int) -> list[str]:
    """Return mixtures of whole and broken specials with texts; the same ones every time."""
    draw = random.Random(7)
    odd = [" ", "\n", "  ", "x", "<", "|>", "<|", ""]
    return [
        "".join(
            draw.choice([draw.choice(TEXTS), draw.choice(specials or [""]), draw.choice(odd)])
            for _ in range(draw.randint(1, 25))
        )
        for _ in range(n)
    ]


async def assert_exact(made: SegmentTokenizer, call: TokenizeCall, specials: list[str]) -> None:
    for text in mixtures(specials, 60):
        for add_special in (False, True):
            direct = await call(text, add_special=add_special, parse_special=True)
            assert pack(direct) == await made.tokenize(text, add_special=add_special), text


# --- byte-level: the tiny models ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
async def test_segments_and_local_tokenizers_are_exact(
    llama_server: StartServer, kind: str
) -> None:
    server = await llama_server(kind, slots=1, ctx=4096)
    model = tiny_model(kind)
    async with client(server.url) as (post, call):
        props = await post_props(server.url)
        found = await discover_specials(
            props["chat_template"], props["bos_token"], props["eos_token"], call
        )
        assert set(SPECIALS) == set(found)
        for local in (None, load_local(model.path), load_local(model.tokenizer_dir)):
            made = SegmentTokenizer(call, found, spawn=spawn)
            assert await made.self_check(local) is None
            assert (True, local is not None) == (made.segmenting, made.uses_local)
            await assert_exact(made, call, list(found))

        # The engine's count for a chat request equals the count for its prompt here.
        made = SegmentTokenizer(call, found, spawn=spawn)
        assert await made.self_check() is None
        prompt = (await post("/apply-template", messages=MESSAGES))["prompt"]
        answer = await post("/v1/chat/completions", messages=MESSAGES, max_tokens=1)
        ours = count(await made.tokenize(prompt, add_special=True))
        assert made.report(ours, answer["usage"]["prompt_tokens"])


async def post_props(url: str) -> dict[str, str]:
    async with aiohttp.ClientSession() as http, http.get(url + "/props") as response:
        props: dict[str, str] = await response.json()
        return props


# --- other vocabularies in models with zero weights ---------------------------------------------


def write_model(path: Path, name: str, n_vocab: int, vocabulary: Callable[[Any], None]) -> None:
    """Write a llama of one layer with zero weights; /tokenize needs no more."""
    size = 64
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_context_length(512)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(size)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(n_vocab)
    vocabulary(writer)
    writer.add_tensor("token_embd.weight", np.zeros((n_vocab, size), np.float16))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(size, np.float32))
    for matrix in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{matrix}.weight", np.zeros((size, size), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# llama.cpp treats the last two specially in models named phi-3 and modern-bert.
MARKS = ("<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "[MASK]")


def sentencepiece(*, space_prefix: bool, add_eos: bool) -> tuple[int, Callable[[Any], None]]:
    """Return size and writer of a gemma-like vocabulary: bytes, letters, prefixes of words."""
    kind = gguf.TokenType
    words = ["▁the", "▁you", "▁are", "▁how", "he", "re", "▁▁▁▁", "llo", "def", "▁漢字"]
    pieces = sorted({word[:n] for word in words for n in range(2, len(word) + 1)}, key=len)
    letters = [chr(c) for c in range(0x21, 0x7F)] + list("▁\n漢字é")
    tokens = ["<unk>", "<s>", "</s>", *MARKS, *(f"<0x{b:02X}>" for b in range(256))]
    types = [kind.UNKNOWN] + [kind.CONTROL] * (2 + len(MARKS)) + [kind.BYTE] * 256
    ordinary = [*pieces, *letters]
    tokens += ordinary
    types += [kind.NORMAL] * len(ordinary)
    scores = [0.0] * (len(tokens) - len(ordinary)) + [-float(i) for i in range(len(ordinary))]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(add_eos)
        writer.add_add_space_prefix(space_prefix)

    return len(tokens), add


@pytest.mark.parametrize(
    ("name", "space_prefix", "add_eos", "given_up"),
    [
        ("plain", True, False, set()),
        ("plain", False, True, set()),
        # llama.cpp goes by the name. All specials of phi-3 strip to their right: harmless.
        # The [MASK] of modern-bert strips to its left: harmful.
        ("phi-3", True, False, set()),
        ("modern-bert", False, False, {"[MASK]"}),
    ],
)
async def test_sentencepiece_with_its_space_prefix_is_exact(
    tmp_path: Path, name: str, space_prefix: bool, add_eos: bool, given_up: set[str]
) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, name, *sentencepiece(space_prefix=space_prefix, add_eos=add_eos))
    async with LlamaServer(path, ctx=256) as server, client(server.url) as (_, call):
        found = await discover_specials(" ".join(MARKS), "<s>", "</s>", call)
        assert {"<s>", "</s>", *MARKS} == set(found)
        made = SegmentTokenizer(call, found, spawn=spawn)

        assert await made.self_check(load_local(path) if name == "plain" else None) is None
        assert set(found) - given_up == made.specials
        assert made.uses_local == (name == "plain")
        await assert_exact(made, call, list(found))


VOCABS = sorted(Path(os.environ.get("KVFERRY_TEST_VOCABS", "/nonexistent")).glob("*.gguf"))
NAMES: Mapping[str, Path] = {path.stem: path for path in VOCABS}
SPELLED = (
    "<|im_start|><|im_end|><|endoftext|><|begin_of_text|><|start_header_id|><|eot_id|><|user|>"
    "<|assistant|><|end|><s></s>[INST][/INST]<start_of_turn><end_of_turn><|turn><turn|><unk>"
    "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜><fim_prefix>[CLS][SEP][MASK]<mask>"
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|END_OF_TURN_TOKEN|>"
)
REFUSED = {"ggml-vocab-phi-3"}  # its specials strip white space, which the file does not say


@pytest.mark.slow
@pytest.mark.skipif(not NAMES, reason="KVFERRY_TEST_VOCABS names no folder with vocabularies")
@pytest.mark.parametrize("name", NAMES)
async def test_vocabulary_family_is_exact(tmp_path: Path, name: str) -> None:
    """Vocabularies like BERT's, which ends a text with a token, are exact too.

    Some have no local tokenizer.
    """
    fields = gguf.GGUFReader(str(NAMES[name])).fields.values()
    values = [(f.name, f.contents(), f.types) for f in fields if f.name.startswith("tokenizer.")]
    n_vocab = next(len(value) for key, value, _ in values if key == "tokenizer.ggml.tokens")

    def copy(writer: Any) -> None:
        for key, value, types in values:
            writer.add_key_value(key, value, *types[:2])

    path = tmp_path / "m.gguf"
    write_model(path, name, n_vocab, copy)
    async with LlamaServer(path, ctx=256) as server, client(server.url) as (_, call):
        found = await discover_specials(SPELLED, "", "", call)
        made = SegmentTokenizer(call, found, spawn=spawn)
        try:
            local = load_local(path, found)
        except LocalTokenizerError:
            local = None

        assert await made.self_check(local) is None
        assert set(found) == made.specials
        assert made.uses_local == (local is not None and name not in REFUSED)
        await assert_exact(made, call, list(found))
