"""A tiny LoRA adapter with random weights for the tiny `llama` model."""

import hashlib
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.models.tiny_models import HEAD, tiny_model

RANK, N_EMBD, N_LAYERS = 4, 128, 4


def tiny_lora(seed: int = 0) -> Path:
    """Return the file for `--lora`, written on first use.

    The adapter changes K and V of every layer, and so all later output.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = tiny_model("llama").path.parent.parent / f"lora-{seed}-{recipe}" / "lora.gguf"
    if not path.is_file():
        staged = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent.parent))
        try:
            _write(staged / path.name, seed)
            with suppress(OSError):  # another process was faster; its bytes are the same
                staged.rename(path.parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return path


def _write(path: Path, seed: int) -> None:
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    random = np.random.default_rng(seed)
    for layer in range(N_LAYERS):
        for name in ("attn_k", "attn_v"):
            for half, shape in (("a", (RANK, N_EMBD)), ("b", (HEAD, RANK))):
                values = random.standard_normal(shape) / shape[1] ** 0.5
                tensor = f"blk.{layer}.{name}.weight.lora_{half}"
                writer.add_tensor(tensor, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
