"""Consistency checks for a quiet router, whatever was done to router, servers and files.

Records are read here from the disk, without the code that writes them.
"""

import asyncio
import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from router.base.decoding import msgpack_decoder
from router.llama.attach.proofs import NAME as PROOFS
from tests.support.conversations.conversing import differs_in_earnest
from tests.support.conversations.prompts import Json
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import PATIENCE_S, Answer, RunningRouter

LOCK = "kvferry.lock"
_BLOBS = "kvf-blobs"
_MANIFEST = re.compile(r"kvf-([0-9a-f]{32})\.manifest")
_POLL_S = 0.05
_unpacked = msgpack_decoder(dict[str, Any])
# Makes an answer report the probability of each of its tokens.
TOLD: Json = {"n_probs": 5}


async def assert_consistent(
    kvferry: RunningRouter,
    kv_dirs: Iterable[Path],
    *,
    foreign: Iterable[str] = (),
    blobs: Path | None = None,
) -> None:
    """Check that the router's offers, its records and the files on the disk agree.

    Also: no lease is left, no file is unaccounted for, and the limits hold. `foreign`: names of
    files that a test has touched, which may exist in any state. `blobs`: the directory of blobs, in
    which every file has to be reachable.

    Waits until all of that holds: files are recorded in the background.
    """
    await kvferry.until_quiet()
    wrong = ["never looked"]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while wrong:
                wrong = await _differences(kvferry, list(kv_dirs), frozenset(foreign), blobs)
                await asyncio.sleep(_POLL_S if wrong else 0)
    except TimeoutError:
        raise AssertionError(f"never consistent: {wrong}") from None


async def assert_undisturbed(
    kvferry: RunningRouter, server: LlamaServer, prompts: Sequence[Sequence[int]]
) -> list[Answer]:
    """Check that prompts are answered as by an undisturbed server that computes all of them."""
    answers = []
    direct = dataclasses.replace(kvferry, url=server.url)
    for prompt in prompts:
        answer = await kvferry.complete(prompt, **TOLD)
        expected = await direct.complete(prompt, cache_prompt=False, **TOLD)
        assert (answer.status, expected.status) == (200, 200), answer.body
        wrong = differs_in_earnest(answer, expected)
        assert not wrong, f"{prompt[:4]}...: {wrong}"
        answers.append(answer)
    return answers


async def _differences(
    kvferry: RunningRouter, kv_dirs: list[Path], foreign: frozenset[str], blobs: Path | None
) -> list[str]:
    listed = (await kvferry.get("/kvferry/snapshots?limit=1000")).json
    rows = {row["id"]: row for row in listed["snapshots"]}
    wrong = []
    recorded: dict[str, Json] = {}
    for kv_dir in kv_dirs:
        records = _manifests(kv_dir)
        recorded |= records
        named = {f"kvf-{name}.{kind}" for name in records for kind in ("kv", "manifest")}
        owned = named | foreign | {LOCK, PROOFS, _BLOBS}
        others = set(os.listdir(kv_dir)) - owned
        # A directory in the place of a file cannot be removed.
        others = {name for name in others if not (kv_dir / name).is_dir()}
        wrong += [f"{name} is nobody's" for name in sorted(others)]
        for name, record in records.items():
            file = f"kvf-{name}.kv"
            if file in foreign:
                continue
            problem = _disagreement(kv_dir / file, record, rows.get(name))
            wrong += [f"{file}: {problem}"] if problem else []
    folders = [kv_dir / _BLOBS for kv_dir in kv_dirs] if blobs is None else [blobs]
    for blobs in folders:
        split = _manifests(blobs)
        wrong += [f"{name} is split and not offered" for name in split.keys() - rows.keys()]
        wrong += _unreachable(blobs, split, foreign)
        recorded |= split
    wrong += [f"{name} is offered and not recorded" for name in rows.keys() - recorded.keys()]
    snapshots = (await kvferry.state())["snapshots"]
    for what, key in (("tokens", "tokens"), ("bytes", "size_bytes")):
        total, limit = sum(row[key] for row in rows.values()), snapshots[f"max_{what}"]
        if 0 <= limit < total:
            wrong.append(f"{total} {what} are over the limit of {limit}")
    return wrong


def _manifests(folder: Path) -> dict[str, Json]:
    """Return the manifests in a directory by id. Every one must be whole."""
    found: dict[str, Json] = {}
    for name in os.listdir(folder) if folder.exists() else ():
        if match := _MANIFEST.fullmatch(name):
            with suppress(FileNotFoundError):  # deleted meanwhile
                raw = (folder / name).read_bytes()
                assert xxhash.xxh3_128(raw[:-16]).digest() == raw[-16:], name
                found[match[1]] = _unpacked(raw[:-16])
                assert found[match[1]]["id"] == match[1], name
    return found


def _unreachable(blobs: Path, split: dict[str, Json], foreign: frozenset[str]) -> list[str]:
    """Return what is wrong with the blobs on disk: missing, or named by no manifest."""
    there = {path.name for path in blobs.glob("??/*")}
    named = {f"{blob.hex()}.blob" for one in split.values() for blob in one["blobs"]}
    wrong = [f"{name} is missing" for name in named - there - foreign]
    return wrong + [f"{name} is nobody's" for name in there - named]


def _disagreement(file: Path, record: Json, row: Json | None) -> str:
    if row is None:
        return "recorded and not offered"
    if not file.is_file() or file.is_symlink():
        return "not there"
    raw, (size_bytes, _, _, checksum) = file.read_bytes(), record["file"]
    if not len(raw) == size_bytes == row["size_bytes"]:
        return f"{len(raw)} bytes, recorded {size_bytes}, listed {row['size_bytes']}"
    if xxhash.xxh3_128(raw).hexdigest() != checksum:
        return "another checksum than recorded"
    return "" if raw.startswith(record["head"]) else "other tokens than recorded"
