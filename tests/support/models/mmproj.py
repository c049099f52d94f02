"""A tiny projector with random weights for the tiny `llama` model, with pictures and sounds for it.

Pictures use LLaVA's kind, the plainest that llama.cpp knows (tools/mtmd/models/llava.cpp): patches,
one block, two matrices into the embedding space of the language model. Each patch becomes one
position, and there are no tokens around the picture.

Sounds use the kind of Gemma 4's unified models (gemma4ua.cpp), which is one matrix: 40 ms of the
wave become one position, between the text `<|audio>` and `<audio|>`.

The embeddings are noise, but depend on every patch and frame, as the tests need.
"""

import base64
import io
import struct
import wave
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.support.models.tiny_models import written_once

_FILE = "mmproj.gguf"
TEXT_EMBD = (
    128  # of tests/support/models/tiny_models.py: llama-server refuses a projector of another width
)
PATCH, SIDE = 14, 112  # pixels
N_POSITIONS = (SIDE // PATCH) ** 2  # positions of a picture in a slot
_EMBD, _FF, _HEADS = 64, 128, 1
SAMPLE_RATE = 16_000  # Hz, to which the server converts sounds
FRAME = 640  # samples per position


def tiny_mmproj(seed: int = 7, width: int = TEXT_EMBD) -> Path:
    """Return the file for `--mmproj`, written on first use; another seed has other weights.

    `width`: of the embeddings of the language model.
    """
    name = f"mmproj-{seed}-{width}"
    return written_once(name, Path(__file__), partial(_write, seed=seed, width=width)) / _FILE


def picture(seed: int) -> str:
    """Return coloured noise as a data URI; another seed gives another picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return "data:image/png;base64," + base64.b64encode(_png(pixels)).decode()


def sound(seed: int, n_frames: int = 25, *, rate: int = SAMPLE_RATE) -> bytes:
    """Return a WAV file of one tone, of `n_frames` times 40 ms; another seed gives another tone."""
    at = np.arange(n_frames * FRAME * rate // SAMPLE_RATE) / rate  # seconds
    samples = 20_000 * np.sin(2 * np.pi * (200 + 37.3 * seed) * at)
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return written.getvalue()


def silent_mp3(n_frames: int = 12) -> bytes:
    """Return MPEG-1 layer III, 128 kbit/s, 44.1 kHz, mono, with zeros in all frames."""
    return (b"\xff\xfb\x90\xc4" + bytes(413)) * n_frames


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a minimal PNG: 8-bit RGB, no filter."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _write(home: Path, *, seed: int, width: int) -> None:
    """Write keys and tensors as tools/mtmd/clip-impl.h names them and clip.cpp reads them."""
    writer: Any = gguf.GGUFWriter(str(home / _FILE), "clip")
    writer.add_name("tiny-mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.vision.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": SIDE,
        "patch_size": PATCH,
        "embedding_length": _EMBD,
        "feed_forward_length": _FF,
        "projection_dim": width,
        "block_count": 1,
        "attention.head_count": _HEADS,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    # Without this key LLaVA's last block is not run (clip_graph_llava::build).
    writer.add_array("clip.vision.feature_layer", [1])
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.audio.projector_type", "gemma4ua")
    for key, value in {
        "embedding_length": FRAME,
        "feed_forward_length": 0,
        "projection_dim": width,
        "block_count": 0,
        "attention.head_count": 1,
        "num_mel_bins": FRAME,
    }.items():
        writer.add_uint32(f"clip.audio.{key}", value)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-6)

    random = np.random.default_rng(seed)

    def matrix(name: str, rows: int, *shape: int) -> None:
        """Add random weights that keep the size of a unit-size input."""
        values = random.standard_normal((rows, *shape)) / np.prod(shape) ** 0.5
        writer.add_tensor(name, values.astype(np.float32))

    def constant(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, dtype=np.float32))

    matrix("v.patch_embd.weight", _EMBD, 3, PATCH, PATCH)
    matrix("v.position_embd.weight", N_POSITIONS, _EMBD)
    for norm in ("ln1", "ln2"):
        constant(f"v.blk.0.{norm}.weight", _EMBD, 1.0)
        constant(f"v.blk.0.{norm}.bias", _EMBD, 0.0)
    for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
        matrix(f"v.blk.0.{part}.weight", _EMBD, _EMBD)
    matrix("v.blk.0.ffn_up.weight", _FF, _EMBD)
    matrix("v.blk.0.ffn_down.weight", _EMBD, _FF)
    matrix("mm.0.weight", width, _EMBD)
    constant("mm.0.bias", width, 0.0)
    matrix("mm.2.weight", width, width)
    constant("mm.2.bias", width, 0.0)
    matrix("mm.a.input_projection.weight", width, FRAME)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
