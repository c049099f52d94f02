"""Tiny models of every architecture: those of llama.cpp's own test, made fit for a server.

`test-llama-archs -o DIR` writes a model of each architecture with random weights, without a
vocabulary and with a context of 256 tokens. Each gets the vocabulary here and a longer context; its
tensors stay as they are.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.models.tiny_models import (
    CHAT_TEMPLATE,
    ENDOFTEXT,
    IM_END,
    SPECIALS,
    byte_alphabet,
    learn_merges,
)

N_CTX_TRAIN = 65536
_POSITIONS = 8192  # of a model with learned positions
# Drawn with a deviation of 0.1, scales and norms silence every layer, and no context would show:
# these become 1. Queries and logits are made sharper.
_ONES = re.compile(r".*\.(input_)?scale|.*norm.*\.weight")
_GAINS = {r"output\.weight": 3.0, r"blk\.\d+\.attn_(q|q_b|qkv)\.weight": 2.0}
_PLAIN = [*range(0x20, 0x7F), 0x0A]  # ASCII text; other bytes have no token
_LEARNED = "position_embd.weight"
# The vocabulary that the writer sets, and what only describes the file.
_REPLACED = ("tokenizer.", "GGUF.")


def with_vocabulary(source: Path, target: Path) -> None:
    """Write `source` anew with a vocabulary of its own size, and a context of N_CTX_TRAIN."""
    reader = gguf.GGUFReader(str(source))
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(str(target), arch)
    size = next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight")
    learned = any(t.name == _LEARNED for t in reader.tensors)
    n_ctx = _POSITIONS if learned else N_CTX_TRAIN
    for key, field in reader.fields.items():
        if key.startswith(_REPLACED) or key == "general.architecture":
            continue
        value = n_ctx if key == f"{arch}.context_length" else field.contents()
        if isinstance(value, list) and not value:
            continue  # the writer takes no empty array, and the server needs none
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type=inner)
    _add_vocabulary(writer, size)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, _changed(tensor.name, np.ascontiguousarray(tensor.data)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _changed(name: str, data: Any) -> Any:
    """Return the tensor, with sharper logits, and with learned positions repeated."""
    if name == _LEARNED:
        return np.tile(data, (_POSITIONS // data.shape[0], 1))
    if _ONES.fullmatch(name) and data.ndim == 1:
        return np.ones_like(data)
    gains = (gain for pattern, gain in _GAINS.items() if re.fullmatch(pattern, name))
    return data * data.dtype.type(next(gains, 1.0))


def _add_vocabulary(writer: Any, size: int) -> None:
    """Add `size` tokens: plain ASCII, the special tokens, then as many merges as fit."""
    alphabet = byte_alphabet()
    plain = [alphabet[byte] for byte in _PLAIN]
    merges = learn_merges(min(size - len(plain) - len(SPECIALS), 250))
    tokens = [*plain, *SPECIALS, *(a + b for a, b in merges)]
    unused = [f"[unused{number}]" for number in range(size - len(tokens))]
    kinds = [gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * len(unused)])
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(tokens.index(ENDOFTEXT))
    writer.add_eos_token_id(tokens.index(IM_END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
