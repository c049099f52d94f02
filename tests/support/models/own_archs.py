"""Tiny models of architectures that llama.cpp's own test leaves out: RWKV 7 and Gemma 4.

Tensors and keys are those of src/models/rwkv7.cpp and gemma4.cpp of llama.cpp b11434.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.models.tiny_models import N_CTX_TRAIN, N_VOCAB, add_vocabulary

_EMBD, _FF, _HEAD, _LAYERS = 128, 256, 64, 3
_SHARP = 3.0  # as in tiny_models.Shape
Array = npt.NDArray[np.float32]


class _Weights:
    """Draws tensors and hands them to the writer."""

    def __init__(self, writer: Any, seed: int) -> None:
        self._writer = writer
        self._random = np.random.default_rng(seed)

    def matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = self._random.standard_normal((rows, columns)) * gain / columns**0.5
        self.add(name, values.astype(np.float32))

    def full(self, name: str, size: int, value: float = 1.0) -> None:
        self.add(name, np.full(size, value, dtype=np.float32))

    def add(self, name: str, values: Array) -> None:
        self._writer.add_tensor(name, values)


def write_rwkv7(target: Path, seed: int) -> None:
    """Write a recurrent model with a matrix for each head as its state."""
    rank = 32

    def settings(writer: Any) -> None:
        writer.add_layer_norm_eps(1e-5)
        writer.add_wkv_head_size(_HEAD)
        writer.add_decay_lora_rank(rank)
        writer.add_iclr_lora_rank(rank)
        writer.add_value_residual_mix_lora_rank(rank)
        writer.add_gate_lora_rank(rank)
        writer.add_token_shift_count(2)
        writer.add_head_count(0)

    def tensors(w: _Weights) -> None:
        for name in ("token_embd_norm", "output_norm"):
            _norm(w, name)
        for layer in range(_LAYERS):
            at = f"blk.{layer}"
            for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
                _norm(w, f"{at}.{name}")
            for letter, start in (("w", -2.0), ("a", 0.0), ("v", 0.0)):
                w.full(f"{at}.time_mix_{letter}0.weight", _EMBD, start)
                w.matrix(f"{at}.time_mix_{letter}1.weight", rank, _EMBD)
                w.matrix(f"{at}.time_mix_{letter}2.weight", _EMBD, rank)
            w.matrix(f"{at}.time_mix_g1.weight", rank, _EMBD)
            w.matrix(f"{at}.time_mix_g2.weight", _EMBD, rank)
            lerp = np.full((6, 1, 1, _EMBD), 0.3, dtype=np.float32)
            w.add(f"{at}.time_mix_lerp_fused.weight", lerp)
            for name, value in (("k_k", 1.0), ("k_a", 1.0), ("r_k", 0.1)):
                w.full(f"{at}.time_mix_{name}.weight", _EMBD, value)
            for name in ("key", "value", "receptance", "output"):
                w.matrix(f"{at}.time_mix_{name}.weight", _EMBD, _EMBD)
            lerp = np.full((1, 1, _EMBD), 0.3, dtype=np.float32)
            w.add(f"{at}.channel_mix_lerp_k.weight", lerp)
            w.matrix(f"{at}.channel_mix_key.weight", _FF, _EMBD)
            w.matrix(f"{at}.channel_mix_value.weight", _EMBD, _FF)

    _write(target, "rwkv7", seed, settings, tensors)


def write_gemma4(target: Path, seed: int) -> None:
    """Write a model with a sliding window of 64 tokens in two of three layers."""
    per_layer = 16

    def settings(writer: Any) -> None:
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        for add in (writer.add_key_length, writer.add_value_length):
            add(_HEAD)
        writer.add_uint32("gemma4.attention.key_length_swa", _HEAD)
        writer.add_uint32("gemma4.attention.value_length_swa", _HEAD)
        writer.add_sliding_window(64)
        writer.add_array("gemma4.attention.sliding_window_pattern", [True, True, False])
        writer.add_uint32("gemma4.embedding_length_per_layer_input", per_layer)
        writer.add_uint32("gemma4.attention.shared_kv_layers", 0)
        writer.add_rope_freq_base(1_000_000.0)
        writer.add_float32("gemma4.rope.freq_base_swa", 10_000.0)
        writer.add_rope_dimension_count(_HEAD)
        writer.add_uint32("gemma4.rope.dimension_count_swa", _HEAD)

    def tensors(w: _Weights) -> None:
        w.full("output_norm.weight", _EMBD)
        w.full("rope_freqs.weight", _HEAD // 2)
        w.matrix("per_layer_token_embd.weight", N_VOCAB, per_layer * _LAYERS)
        w.matrix("per_layer_model_proj.weight", per_layer * _LAYERS, _EMBD)
        w.full("per_layer_proj_norm.weight", per_layer)
        for layer in range(_LAYERS):
            at = f"blk.{layer}"
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                w.full(f"{at}.{name}.weight", _EMBD)
            w.full(f"{at}.post_norm.weight", _EMBD)
            w.matrix(f"{at}.attn_q.weight", 2 * _HEAD, _EMBD, _SHARP)
            w.matrix(f"{at}.attn_k.weight", _HEAD, _EMBD, _SHARP)
            w.matrix(f"{at}.attn_v.weight", _HEAD, _EMBD)
            w.matrix(f"{at}.attn_output.weight", _EMBD, 2 * _HEAD)
            for name in ("attn_q_norm", "attn_k_norm"):
                w.full(f"{at}.{name}.weight", _HEAD)
            w.matrix(f"{at}.ffn_gate.weight", _FF, _EMBD)
            w.matrix(f"{at}.ffn_up.weight", _FF, _EMBD)
            w.matrix(f"{at}.ffn_down.weight", _EMBD, _FF)
            w.matrix(f"{at}.inp_gate.weight", per_layer, _EMBD)
            w.matrix(f"{at}.proj.weight", _EMBD, per_layer)

    _write(target, "gemma4", seed, settings, tensors)


OWN: dict[str, Callable[[Path, int], None]] = {"rwkv7-own": write_rwkv7, "gemma4-own": write_gemma4}


def _norm(w: _Weights, name: str) -> None:
    w.full(f"{name}.weight", _EMBD)
    w.full(f"{name}.bias", _EMBD, 0.0)


def _write(
    target: Path,
    arch: str,
    seed: int,
    settings: Callable[[Any], None],
    tensors: Callable[[_Weights], None],
) -> None:
    writer = gguf.GGUFWriter(str(target), arch)
    writer.add_name(f"tiny-{arch}-{seed}")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_vocab_size(N_VOCAB)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FF)
    add_vocabulary(writer, add_bos=False)
    settings(writer)
    weights = _Weights(writer, seed)
    weights.matrix("token_embd.weight", N_VOCAB, _EMBD)
    weights.matrix("output.weight", N_VOCAB, _EMBD, 3.0)
    tensors(weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
