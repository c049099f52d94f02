"""Models with random weights and the shapes of real ones, one for each of three memory kinds.

Weights are Q8_0 blocks, drawn and not quantised, so that 8 GB take seconds. Attention is less sharp
than in the tiny models: through 32 layers a sharp one turns rounding into other words.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.models.tiny_models import (
    N_CTX_TRAIN,
    Array,
    Shape,
    Weights,
    add_vocabulary,
    attention,
    describe,
    feed_forward,
    gemma3,
    is_plain,
    llama,
    norm_of_heads,
)
from tests.support.models.tiny_models import vocabulary as tiny_vocabulary

_SHARP = 1.5
# Of Llama 3.1 8B, Qwen 3.5 4B and Gemma 3 4B.
CARD = {
    "llama": Shape(4096, 32, 14336, 32, 8, head=128, sharp=_SHARP),
    "qwen35": Shape(2560, 32, 9216, 16, 4, head=256, sharp=_SHARP),
    "gemma3": Shape(2560, 34, 10240, 8, 4, head=256, window=1024, sharp=_SHARP),
}
SMALL = {
    "llama": Shape(256, 4, 512, 4, 2, sharp=_SHARP),
    "qwen35": Shape(256, 4, 512, 4, 2, sharp=_SHARP),
    "gemma3": Shape(256, 6, 512, 4, 2, window=256, sharp=_SHARP),
}
_N_CTX_TRAIN = 131_072
_BLOCK = 32  # weights that share a scale
_Q8_0 = np.dtype([("scale", "<f2"), ("weights", "i1", (_BLOCK,))])
_SPREAD = 73.3  # the deviation of integers from -127 to 127
# An odd number of blocks: rows that are a multiple of it apart would be equal.
_N_DRAWN = 2**20 + 7


def write_model(path: Path, kind: str, shape: Shape, vocabulary: Path | None) -> None:
    """Write a model of Q8_0 weights.

    `vocabulary`: a GGUF with a byte-level vocabulary, and beside it `template.jinja`; None: the
    vocabulary of the tiny models.
    """
    writer: Any = gguf.GGUFWriter(str(path), kind)
    writer.add_name(f"random-{kind}")
    writer.add_context_length(N_CTX_TRAIN if vocabulary is None else _N_CTX_TRAIN)
    writer.add_embedding_length(shape.n_embd)
    writer.add_layer_norm_rms_eps(1e-5)
    if vocabulary is None:
        add_vocabulary(writer, add_bos=False)
        tokens = tiny_vocabulary()[0]
    else:
        tokens = _copied_vocabulary(writer, vocabulary)
    plain = np.array([is_plain(token) for token in tokens])  # only these are generated
    writer.add_vocab_size(len(plain))
    weights = _Drawn(writer)
    size = shape.n_embd**-0.5 if kind == "gemma3" else 1.0  # gemma3 multiplies by sqrt(n_embd)
    weights.matrix("token_embd.weight", len(plain), shape.n_embd, size * shape.n_embd**0.5)
    weights.ones("output_norm.weight", shape.n_embd)
    weights.matrix("output.weight", len(plain), shape.n_embd, 3.0, rows_kept=plain)
    _LAYERS[kind](weights, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    weights.write()
    writer.close()


def _copied_vocabulary(writer: Any, source: Path) -> list[str]:
    """Copy a vocabulary and its template, and return the tokens."""
    reader = gguf.GGUFReader(str(source))
    tokens: list[str] = []
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=inner)
        if key == "tokenizer.ggml.tokens":
            tokens = value
    writer.add_chat_template((source.parent / "template.jinja").read_text())
    return tokens


class _Drawn:
    """Announces the tensors of a model to the writer, and writes them in a second pass."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self._random = np.random.default_rng(1)
        self._blocks = np.empty(_N_DRAWN, dtype=_Q8_0)
        shape = (_N_DRAWN, _BLOCK)
        self._blocks["weights"] = self._random.integers(-127, 128, shape, dtype=np.int8)
        self._tensors: list[Callable[[], Any]] = []

    def matrix(
        self,
        name: str,
        rows: int,
        columns: int,
        gain: float = 1.0,
        *,
        rows_kept: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Add a random matrix that keeps the size of a unit-size input, times `gain`.

        Rows that are not in `rows_kept` are zero.
        """
        n_blocks = rows * columns // _BLOCK
        scale = gain / columns**0.5 / _SPREAD
        start = int(self._random.integers(_N_DRAWN))

        def drawn() -> Any:
            self._blocks["scale"] = scale
            blocks = np.resize(np.roll(self._blocks, -start), n_blocks)
            if rows_kept is not None:
                blocks["scale"] *= np.repeat(rows_kept, columns // _BLOCK)
            return blocks.view(np.uint8)

        size = n_blocks * _Q8_0.itemsize
        kind = gguf.GGMLQuantizationType.Q8_0
        self.writer.add_tensor_info(name, (rows, size // rows), np.uint8, size, kind)
        self._tensors.append(drawn)

    def ones(self, name: str, size: int, gain: float = 1.0) -> None:
        self.add(name, np.full(size, gain, dtype=np.float32))

    def add(self, name: str, values: Array) -> None:
        self.writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        self._tensors.append(lambda: values)

    def normal(self, rows: int, columns: int, scale: float) -> Array:
        return (scale * self._random.standard_normal((rows, columns))).astype(np.float32)

    def write(self) -> None:
        """Write all tensors in the order in which they were added."""
        for drawn in self._tensors:
            self.writer.write_tensor_data(drawn())


def _gemma3(w: Weights, shape: Shape) -> None:
    gemma3(w, shape, every=6)


def _qwen35(w: Weights, shape: Shape) -> None:
    """Add three layers of a gated delta net for each one of attention (src/models/qwen35.cpp)."""
    every, kernel, state = 4, 4, shape.head // 2 if shape.head > 64 else shape.head
    n_keys, n_values = shape.n_head, 2 * shape.n_head
    width, keys, inner = shape.n_embd, n_keys * state, n_values * state
    describe(w, shape.n_layers, shape.n_ff, shape.n_head, shape.n_kv)
    w.writer.add_key_length(shape.head)
    w.writer.add_value_length(shape.head)
    w.writer.add_rope_dimension_count(64)
    w.writer.add_rope_dimension_sections([11, 11, 10, 0])
    w.writer.add_rope_freq_base(10_000_000.0)
    w.writer.add_ssm_conv_kernel(kernel)
    w.writer.add_ssm_inner_size(inner)
    w.writer.add_ssm_state_size(state)
    w.writer.add_ssm_time_step_rank(n_values)
    w.writer.add_ssm_group_count(n_keys)
    w.writer.add_full_attention_interval(every)
    decay = -np.geomspace(0.003, 1.0, n_values).astype(np.float32)
    for layer in range(shape.n_layers):
        at = f"blk.{layer}"
        if (layer + 1) % every == 0:
            attention(w, layer, shape, gated=True)
            norm_of_heads(w, layer, shape)
        else:
            w.ones(f"{at}.attn_norm.weight", width)
            w.matrix(f"{at}.attn_qkv.weight", 2 * keys + inner, width)
            w.matrix(f"{at}.attn_gate.weight", inner, width)
            w.add(f"{at}.ssm_conv1d.weight", w.normal(2 * keys + inner, kernel, 0.5))
            w.add(f"{at}.ssm_dt.bias", np.full(n_values, -2.0, dtype=np.float32))
            w.add(f"{at}.ssm_a", decay)
            w.matrix(f"{at}.ssm_beta.weight", n_values, width)
            w.matrix(f"{at}.ssm_alpha.weight", n_values, width)
            w.ones(f"{at}.ssm_norm.weight", state)
            w.matrix(f"{at}.ssm_out.weight", width, inner)
        feed_forward(w, layer, shape, norm="post_attention_norm")


_LAYERS: dict[str, Callable[[Weights, Shape], None]] = {
    "llama": llama,
    "qwen35": _qwen35,
    "gemma3": _gemma3,
}
