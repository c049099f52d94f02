"""Tiny language models with random weights: one for each memory kind that kvferry tells apart.

The models load in 0.2 s and prefill thousands of tokens a second on one thread. llama-server treats
them as real ones: same KV code, same state files, same chat route. Their output is noise, but
depends on every token of the context, as the tests need.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from tests.support.paths import ROOT

KINDS = ("llama", "gemma3", "lfm2", "mamba")
N_CTX_TRAIN = 65536
N_SWA = 64  # window of `gemma3`, in tokens
ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (ENDOFTEXT, IM_START, IM_END)
N_VOCAB = 512
HEAD = 64  # a multiple of 64: llama.cpp then rotates a quantised KV (llama-server.md section 1.5)
Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model: of its rows, layers and heads; `window` in tokens."""

    n_embd: int
    n_layers: int
    n_ff: int
    n_head: int
    n_kv: int
    head: int = HEAD
    window: int = N_SWA
    # Of Q and K. With 1, attention averages over the context, and no single token matters.
    sharp: float = 3.0


_TINY = Shape(n_embd=128, n_layers=4, n_ff=512, n_head=2, n_kv=1)

# ChatML; newlines are spelled out, since the two Jinja engines trim differently.
CHAT_TEMPLATE = r"""
{%- set given = messages[0]['role'] == 'system' -%}
{{- '<|im_start|>system\n' -}}
{{- messages[0]['content'] if given else 'You are a helpful assistant.' -}}
{%- if tools -%}
{{- '\n\n# Tools\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\n' -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
{%- if not (loop.first and given) -%}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '\n<tool_call>' -}}{{- call['function'] | tojson -}}{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Text from which the merges are learned; any English would do.
SENTENCES = """The quick brown fox jumps over the lazy dog, and then the other dog sleeps again.
You are a helpful assistant. Answer the question of the user with the tools that you have.
There was once a small server that read the same long prompt again and again, all day long.
Then somebody wrote a proxy that remembered what each slot had seen, and the prompt was read once.
What is the weather in London today? It is raining there, as it was the whole of last week.
I would like to know how this works, because nothing in the documentation tells me about it.
Please summarize these documents, find every mistake, and explain which change would be safest.
People usually write code that somebody else must understand, maintain and improve years later."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model on disk and the Hugging Face tokenizer that belongs to it."""

    kind: str
    seed: int
    path: Path
    tokenizer_dir: Path  # tokenizer.json and tokenizer_config.json

    @property
    def add_bos(self) -> bool:
        """Return whether the server puts a BOS in front: `gemma3` only, so that tests see both."""
        return self.kind == "gemma3"


def tiny_model(kind: str, seed: int = 0) -> TinyModel:
    """Return the model of this kind, written on first use. Same kind and seed, same bytes.

    Kinds: `llama` full attention, `gemma3` sliding window of N_SWA tokens, `lfm2` hybrid, `mamba`
    recurrent. Another seed gives another model of the same shape. Raises ValueError for an unknown
    kind.
    """
    if kind not in KINDS:
        raise ValueError(f"no such kind of tiny model: {kind}")

    def write(staged: Path) -> None:
        _write_model(staged / f"{kind}.gguf", kind, seed)
        _write_tokenizer(staged / "tokenizer", add_bos=kind == "gemma3")

    home = written_once(f"{kind}-{seed}", Path(__file__), write)
    return TinyModel(kind, seed, home / f"{kind}.gguf", home / "tokenizer")


def written_once(name: str, code: Path, write: Callable[[Path], None]) -> Path:
    """Return the cached directory that `write` fills, once for all processes.

    The directory's name holds a hash of the file `code`: output of older code is never taken for
    new.
    """
    recipe = hashlib.sha256(code.read_bytes()).hexdigest()[:12]
    home = _cache() / f"{name}-{recipe}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=".new-", dir=home.parent))
        try:
            write(staged)
            with suppress(OSError):  # another process was faster; its bytes are the same
                staged.rename(home)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return home


def _cache() -> Path:
    chosen = os.environ.get("KVFERRY_TEST_CACHE")
    return Path(chosen) if chosen else ROOT / ".cache" / "models"


# --- vocabulary -----------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """Return GPT-2's printable stand-in for each of the 256 bytes, in order of the byte."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def learn_merges(n: int) -> list[tuple[str, str]]:
    """Return the first `n` BPE merges of SENTENCES; on a tie the pair that sorts first."""
    alphabet = byte_alphabet()
    # GPT-2's words; digits alone, as in SmolLM (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    words = re.findall(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s+", SENTENCES)
    split = [[alphabet[byte] for byte in word.encode()] for word in words]
    merges: list[tuple[str, str]] = []
    while len(merges) < n:
        pairs = Counter(pair for word in split for pair in pairwise(word))
        if not pairs:
            raise ValueError(f"the sentences yield {len(merges)} merges, not {n}")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = [list(_merge(word, best)) for word in split]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> Iterator[str]:
    i = 0
    while i < len(word):
        if tuple(word[i : i + 2]) == pair:
            yield word[i] + word[i + 1]
            i += 2
        else:
            yield word[i]
            i += 1


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """Return the tokens and the merges of all tiny models."""
    merges = learn_merges(N_VOCAB - 256 - len(SPECIALS))
    return [*byte_alphabet(), *(a + b for a, b in merges), *SPECIALS], merges


def _write_tokenizer(folder: Path, *, add_bos: bool) -> None:
    tokens, merges = vocabulary()
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{ENDOFTEXT} $A", special_tokens=[(ENDOFTEXT, tokens.index(ENDOFTEXT))]
        )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": ENDOFTEXT,
        "eos_token": IM_END,
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": N_CTX_TRAIN,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


# --- weights --------------------------------------------------------------------------------------


class Weights(Protocol):
    """Takes the tensors of a model in a fixed order, and draws the random ones."""

    writer: Any

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a random matrix that keeps the size of a unit-size input, times `gain`."""

    def ones(self, name: str, size: int, gain: float = 1.0) -> None: ...

    def add(self, name: str, values: Array) -> None: ...

    def normal(self, rows: int, columns: int, scale: float) -> Array: ...


class _Weights:
    """Draws tensors in a fixed order and hands them to the writer."""

    def __init__(self, writer: Any, kind: str, seed: int) -> None:
        self.writer = writer
        self.random = np.random.default_rng([KINDS.index(kind), seed])

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self.add(name, self.normal(rows, columns, gain / columns**0.5), np.float16)

    def normal(self, rows: int, columns: int, scale: float) -> Array:
        return (scale * self.random.standard_normal((rows, columns))).astype(np.float32)

    def ones(self, name: str, size: int, gain: float = 1.0) -> None:
        self.add(name, np.full(size, gain, dtype=np.float32))

    def add(self, name: str, values: Array, kind: type[np.floating[Any]] = np.float32) -> None:
        self.writer.add_tensor(name, values.astype(kind))


def _write_model(path: Path, kind: str, seed: int) -> None:
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_name(f"tiny-{kind}-{seed}")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_vocab_size(N_VOCAB)
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer, add_bos=kind == "gemma3")
    weights = _Weights(writer, kind, seed)
    n_embd = _TINY.n_embd
    writer.add_embedding_length(n_embd)
    # gemma3 multiplies by sqrt(n_embd): the embedding must not drown what the layers add.
    size = n_embd**-0.5 if kind == "gemma3" else 1.0
    weights.add("token_embd.weight", weights.normal(N_VOCAB, n_embd, size), np.float16)
    norm = "token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight"
    weights.ones(norm, n_embd)
    weights.add("output.weight", _output(weights, n_embd), np.float16)
    build = {"llama": llama, "gemma3": gemma3, "lfm2": _lfm2, "mamba": _mamba}[kind]
    build(weights, _TINY)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, *, add_bos: bool) -> None:
    """Write the vocabulary of all tiny models into the head of a file."""
    tokens, merges = vocabulary()
    n_normal = N_VOCAB - len(SPECIALS)
    kinds = [gguf.TokenType.NORMAL] * n_normal + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(tokens.index(ENDOFTEXT))
    writer.add_eos_token_id(tokens.index(IM_END))
    writer.add_add_bos_token(add_bos)
    # For /infill: bytes that occur in no text of a test.
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", 1)
    writer.add_uint32("tokenizer.ggml.fim_suf_token_id", 2)
    writer.add_uint32("tokenizer.ggml.fim_mid_token_id", 3)
    writer.add_chat_template(CHAT_TEMPLATE)


def _output(weights: _Weights, n_embd: int) -> Array:
    """Return weights for logits that spread by about 3 for plain ASCII tokens; all others are 0.

    Generation therefore goes on (a logit of 0 is never the largest of some 300). Every token is
    text by itself: a stream of bytes above 127 would be held back as incomplete UTF-8.
    """
    rows = weights.normal(N_VOCAB, n_embd, 3.0 / n_embd**0.5)
    for i, token in enumerate(vocabulary()[0]):
        if not is_plain(token):
            rows[i] = 0.0
    return rows


def is_plain(token: str) -> bool:
    """Return whether a token of a byte-level vocabulary is a word of ASCII letters."""
    word = token.lstrip("Ġ")
    return word.isascii() and word.isalpha()


def attention(w: Weights, layer: int, shape: Shape, *, gated: bool = False) -> None:
    """Add the tensors of an attention layer; `gated`: Q has a gate as wide as itself."""
    at, head = f"blk.{layer}", shape.head
    w.ones(f"{at}.attn_norm.weight", shape.n_embd)
    w.matrix(f"{at}.attn_q.weight", (1 + gated) * shape.n_head * head, shape.n_embd, shape.sharp)
    w.matrix(f"{at}.attn_k.weight", shape.n_kv * head, shape.n_embd, shape.sharp)
    w.matrix(f"{at}.attn_v.weight", shape.n_kv * head, shape.n_embd, 2.0)
    w.matrix(f"{at}.attn_output.weight", shape.n_embd, shape.n_head * head)


def feed_forward(w: Weights, layer: int, shape: Shape, norm: str = "ffn_norm") -> None:
    """Add the tensors of a gated feed-forward layer."""
    w.ones(f"blk.{layer}.{norm}.weight", shape.n_embd)
    w.matrix(f"blk.{layer}.ffn_gate.weight", shape.n_ff, shape.n_embd)
    w.matrix(f"blk.{layer}.ffn_up.weight", shape.n_ff, shape.n_embd)
    w.matrix(f"blk.{layer}.ffn_down.weight", shape.n_embd, shape.n_ff)


def norm_of_heads(w: Weights, layer: int, shape: Shape) -> None:
    """Add the norms of Q and K, which decide how sharp attention is."""
    for name in ("attn_q_norm", "attn_k_norm"):
        w.ones(f"blk.{layer}.{name}.weight", shape.head, shape.sharp)


def describe(w: Weights, n_layers: int, n_ff: int, n_head: int, n_kv: int | list[int]) -> None:
    """Add the sizes that every architecture has."""
    w.writer.add_block_count(n_layers)
    w.writer.add_feed_forward_length(n_ff)
    w.writer.add_head_count(n_head)
    w.writer.add_head_count_kv(n_kv)


def llama(w: Weights, shape: Shape) -> None:
    """Add the layers of a model with full attention."""
    describe(w, shape.n_layers, shape.n_ff, shape.n_head, shape.n_kv)
    w.writer.add_rope_dimension_count(shape.head)
    for layer in range(shape.n_layers):
        attention(w, layer, shape)
        feed_forward(w, layer, shape)


def gemma3(w: Weights, shape: Shape, every: int = 2) -> None:
    """Add the layers of a model of which all but each `every`th see a window of tokens only."""
    describe(w, shape.n_layers, shape.n_ff, shape.n_head, shape.n_kv)
    w.writer.add_key_length(shape.head)
    w.writer.add_value_length(shape.head)
    w.writer.add_sliding_window(shape.window)
    w.writer.add_sliding_window_pattern([bool((n + 1) % every) for n in range(shape.n_layers)])
    for layer in range(shape.n_layers):
        attention(w, layer, shape)
        norm_of_heads(w, layer, shape)
        w.ones(f"blk.{layer}.post_attention_norm.weight", shape.n_embd)
        feed_forward(w, layer, shape)
        w.ones(f"blk.{layer}.post_ffw_norm.weight", shape.n_embd)


def _lfm2(w: Weights, shape: Shape) -> None:
    n_embd, kernel = shape.n_embd, 3
    describe(w, shape.n_layers, shape.n_ff, shape.n_head, [0, 1, 0, 1])  # 0: a convolution
    w.writer.add_shortconv_l_cache(kernel)
    for layer in range(shape.n_layers):
        if layer % 2:
            attention(w, layer, shape)
            norm_of_heads(w, layer, shape)
        else:
            w.ones(f"blk.{layer}.attn_norm.weight", n_embd)
            w.add(f"blk.{layer}.shortconv.conv.weight", w.normal(n_embd, kernel, 1.0))
            w.matrix(f"blk.{layer}.shortconv.in_proj.weight", 3 * n_embd, n_embd)
            w.matrix(f"blk.{layer}.shortconv.out_proj.weight", n_embd, n_embd)
        feed_forward(w, layer, shape)


def _mamba(w: Weights, shape: Shape) -> None:
    n_embd, n_layers, d_state, d_conv, dt_rank = shape.n_embd, 3, 16, 4, 8
    d_inner = 2 * n_embd  # llama.cpp knows no other expansion (src/models/mamba.cpp)
    describe(w, n_layers, 0, 0, 0)
    w.writer.add_ssm_conv_kernel(d_conv)
    w.writer.add_ssm_inner_size(d_inner)
    w.writer.add_ssm_state_size(d_state)
    w.writer.add_ssm_time_step_rank(dt_rank)
    decay = np.tile(-np.geomspace(0.003, 1.0, d_state), (d_inner, 1)).astype(np.float32)
    for layer in range(n_layers):
        w.ones(f"blk.{layer}.attn_norm.weight", n_embd)
        w.matrix(f"blk.{layer}.ssm_in.weight", 2 * d_inner, n_embd)
        w.add(f"blk.{layer}.ssm_conv1d.weight", w.normal(d_inner, d_conv, 0.5))
        w.add(f"blk.{layer}.ssm_conv1d.bias", np.zeros(d_inner, dtype=np.float32))
        w.matrix(f"blk.{layer}.ssm_x.weight", dt_rank + 2 * d_state, d_inner)
        w.matrix(f"blk.{layer}.ssm_dt.weight", d_inner, dt_rank)
        # softplus(-2) = 0.13: a token is remembered for some 8 to 2,600 tokens.
        w.add(f"blk.{layer}.ssm_dt.bias", np.full(d_inner, -2.0, dtype=np.float32))
        w.add(f"blk.{layer}.ssm_a", decay)
        w.ones(f"blk.{layer}.ssm_d", d_inner, 0.1)  # small: the state decides, not the last token
        w.matrix(f"blk.{layer}.ssm_out.weight", n_embd, d_inner)
