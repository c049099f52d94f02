"""Proofs on disk: what the probe of a server has found out, for the next process that is equal.

One small file in the KV directory of the servers. What it says is checked by behaviour at each load
(`probe.is_still_so`). Blocks: call it in a thread.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from router import __version__
from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import KvFileError
from router.llama.attach.probe_result import ProbeResult
from router.llama.replies import ModelsInfo, Props
from router.store.files import put_whole, read_small

NAME = "kvf-proofs.json"
_MOST = 100  # servers; the last ones are kept


class Proof(Struct, frozen=True):
    """What a server said of itself, and what its probe found. `by`: the kvferry that probed it."""

    props: Props  # without the marker, which is another one in each process
    models: ModelsInfo
    probe: ProbeResult
    by: str = __version__


_decode = json_decoder(dict[str, Proof])


def read_proofs(folder: Path) -> dict[str, Proof]:
    """Return the proofs by identity. Never raises: a server without one is probed."""
    with suppress(OSError, KvFileError, UndecodableError):
        found = _decode(read_small(folder / NAME))
        return {identity: proof for identity, proof in found.items() if proof.by == __version__}
    return {}


def write_proofs(folder: Path, proofs: Mapping[str, Proof]) -> None:
    """Write the newest proofs. Raises OSError."""
    put_whole(folder / NAME, msgspec.json.encode(dict([*proofs.items()][-_MOST:])))
