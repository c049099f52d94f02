"""A tiny model that embeds and cannot generate: BERT's architecture with random weights.

Like most embedding models, the model has no KV, so llama-server refuses its completions
(llama-server.md section 2.1).
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.models.tiny_models import N_VOCAB, add_vocabulary, written_once

_FILE = "encoder.gguf"
N_EMBD, N_HEAD, N_FF, N_LAYERS, N_CTX = 128, 2, 256, 2, 512


def tiny_encoder() -> Path:
    """Return the model, written on first use; for a server with `--embeddings`."""
    return written_once("encoder", Path(__file__), _write) / _FILE


def _write(home: Path) -> None:
    writer: Any = gguf.GGUFWriter(str(home / _FILE), "bert")
    writer.add_name("tiny-encoder")
    writer.add_context_length(N_CTX)
    writer.add_vocab_size(N_VOCAB)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(1)
    add_vocabulary(writer, add_bos=False)
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> None:
        values = random.standard_normal(shape) / shape[-1] ** 0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def with_bias(name: str, rows: int, columns: int) -> None:
        weight(name, rows, columns)
        writer.add_tensor(f"{name}.bias", np.zeros(rows, dtype=np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(N_EMBD, dtype=np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(N_EMBD, dtype=np.float32))

    weight("token_embd", N_VOCAB, N_EMBD)
    weight("token_types", 1, N_EMBD)
    weight("position_embd", N_CTX, N_EMBD)
    norm("token_embd_norm")
    for layer in range(N_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            with_bias(f"blk.{layer}.{part}", N_EMBD, N_EMBD)
        norm(f"blk.{layer}.attn_output_norm")
        with_bias(f"blk.{layer}.ffn_up", N_FF, N_EMBD)
        with_bias(f"blk.{layer}.ffn_down", N_EMBD, N_FF)
        norm(f"blk.{layer}.layer_output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
