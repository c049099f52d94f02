"""`router.store.format.rewrite` and its writer, against files built anew and real servers.

Expected files are not computed here: the builder in `state_files.py` makes them from their cells.
"""

import io
import itertools
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import strategies as st

from router.base import tokens as tok
from router.base.errors import KvFileError
from router.base.types import MemoryKind
from router.core.model.memory_kinds import reusable_tokens
from router.store import files, shapes
from router.store.format import rewrite as module
from router.store.format.head import Head, read_head
from router.store.format.layout import Layout, check_agreement, read_layout
from router.store.format.rewrite import Piece, Rewrite, Span, cut, pad, restream
from tests.conftest import StartServer
from tests.support.files.state_files import appendix, attention, head, i32, recurrent, stream, u32
from tests.support.models.tiny_models import N_SWA
from tests.support.servers.llama_server import LlamaServer

ROW = 8


def cell(section: int, position: int) -> bytes:
    """Return bytes unique to a cell; zeros for the padding, which has a negative position."""
    return struct.pack("<HHI", section, position, 7 * position) if position >= 0 else bytes(ROW)


def filled(positions: Sequence[int], **shape: Any) -> bytes:
    return stream(positions, row=ROW, cell=cell, seq_id=3, **shape)


def block(positions: Sequence[int], n_stream: int = 1, index: int = 0, **shape: Any) -> bytes:
    """Return an attention block with cells in one of its streams."""
    streams = [u32(0)] * n_stream
    streams[index] = filled(positions, **shape)
    return attention(*streams)


def parse(raw: bytes) -> tuple[Head, Layout]:
    file = io.BytesIO(raw)
    found = read_head(file)
    layout = read_layout(file, found, len(raw))
    check_agreement(found, layout)
    return found, layout


def apply(raw: bytes, rewrite: Rewrite) -> bytes:
    """Apply a rewrite plainly; check its announced size and that no piece is wasted."""
    out = raw[: rewrite.start]
    for piece in rewrite.pieces:
        if isinstance(piece, Span):
            assert 0 < piece.size <= len(raw) - piece.offset
            out += raw[piece.offset : piece.offset + piece.size]
        else:
            assert piece
            out += piece
    assert len(out) == rewrite.size_bytes
    for a, b in itertools.pairwise(rewrite.pieces):
        if isinstance(a, Span) and isinstance(b, Span):
            assert a.offset + a.size != b.offset
        assert not (isinstance(a, bytes) and isinstance(b, bytes))
    return out


def restreamed(raw: bytes, n_stream: int) -> bytes:
    return apply(raw, restream(parse(raw)[1], n_stream, len(raw)))


def cut_to(raw: bytes, n: int) -> bytes:
    return apply(raw, cut(*parse(raw), n, io.BytesIO(raw)))


def padded(raw: bytes) -> bytes | None:
    rewrite = pad(parse(raw)[1], io.BytesIO(raw), len(raw))
    return None if rewrite is None else apply(raw, rewrite)


TOKENS = list(range(40, 60))
SHUFFLED = random.Random(1).sample(range(20), 20)
ORDERS: dict[str, Sequence[int]] = {
    "in order": range(20),
    "ring": [*range(12, 20), *range(12)],
    "shuffled": SHUFFLED,
    "backwards": range(19, -1, -1),
}
SHAPES: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed": {"v_trans": True},
    "mla": {"has_v": False},
}
WINDOW = [16, 17, 18, 13, 14, 15, 19]  # in ring order

# The parts behind the first block, by the number of streams.
REST: dict[str, Callable[[int], bytes]] = {
    "nothing": lambda _: b"",
    "window": lambda n: block(WINDOW, n, v_trans=True),
    "recurrent": lambda _: recurrent(19),
    "recurrent, checkpoints": lambda _: (
        recurrent(19) + appendix((5, recurrent(4)), (16, recurrent(15)))
    ),
    "window, checkpoints": lambda n: (
        block(WINDOW, n)
        + appendix((9, block([6, 8, 7], n)), (15, block(range(8, 15), n)), (16, block([15], n)))
    ),
    "window, recurrent, checkpoint": lambda n: (
        block(WINDOW, n) + recurrent(19) + appendix((9, block([6, 8, 7], n) + recurrent(8)))
    ),
    "window, recurrent": lambda n: block(WINDOW, n) + recurrent(19),
}


@pytest.mark.parametrize("n_from", [1, 2, 4])
def test_restream(n_from: int) -> None:
    wrong = []
    for shape, rest in itertools.product(SHAPES, REST):

        def made(n: int, at: int, shape: str = shape, rest: str = rest) -> bytes:
            # The window of these files is in its first stream.
            return head(TOKENS) + block(SHUFFLED, n, at, **SHAPES[shape]) + REST[rest](n)

        for n_to, index in itertools.product((1, 2, 3, 4, 256), range(n_from)):
            where = index if index < n_to else 0
            if made(n_to, where) != restreamed(made(n_from, index), n_to):
                wrong.append((shape, rest, n_to, index))
    assert wrong == []


def test_restream_of_what_has_no_streams_changes_nothing() -> None:
    raw = head(TOKENS) + recurrent(19)
    assert Rewrite(len(raw), (), len(raw)) == restream(parse(raw)[1], 4, len(raw))
    empty = head([]) + attention(u32(0))
    assert head([]) + attention(u32(0), u32(0)) == restreamed(empty, 2)


@pytest.mark.parametrize("n", [0, -1, 257])
def test_restream_refuses(n: int) -> None:
    raw = head(TOKENS) + block(range(20))
    with pytest.raises(KvFileError, match="streams"):
        restream(parse(raw)[1], n, len(raw))


@pytest.mark.parametrize("n_stream", [1, 2, 4])
def test_cut(n_stream: int) -> None:
    wrong = []
    lengths, indexes = (1, 2, 7, 12, 19), range(n_stream)
    for shape, order, n, index in itertools.product(SHAPES, ORDERS, lengths, indexes):

        def made(n: int, shape: str = shape, order: str = order, index: int = index) -> bytes:
            positions = [position for position in ORDERS[order] if position < n]
            return head(TOKENS[:n]) + block(positions, n_stream, index, **SHAPES[shape])

        whole = made(20)
        same = parse(made(n))[1].fingerprint() == parse(whole)[1].fingerprint()
        if made(n) != cut_to(whole, n) or not same:
            wrong.append((shape, order, n, index))
    assert wrong == []


def test_cut_keeps_a_plain_token_list() -> None:
    raw = head(TOKENS, legacy=True) + block(SHUFFLED)
    positions = [position for position in SHUFFLED if position < 9]
    assert head(TOKENS[:9], legacy=True) + block(positions) == cut_to(raw, 9)


def test_cut_drops_checkpoints() -> None:
    raw = head(TOKENS) + block(range(20))
    assert cut_to(raw, 9) == cut_to(raw + appendix((5, block(range(5)))), 9)


@pytest.mark.parametrize(
    ("raw", "n", "what"),
    [
        (head(TOKENS) + block(range(20)), 0, "20 tokens cannot be cut to 0"),
        (head(TOKENS) + block(range(20)), 20, "20 tokens cannot be cut to 20"),
        (head(TOKENS) + block(range(20)), 21, "20 tokens cannot be cut to 21"),
        (head(TOKENS) + block(range(20), ext=True), 9, "extension"),
        (head([1, -1, -1, 4], [(1, b"abc")]) + block(range(4)), 2, "media"),
        (head(TOKENS) + block(range(20)) + block(WINDOW), 9, "sliding_window"),
        (head(TOKENS) + block(range(20)) + recurrent(19), 9, "hybrid"),
        (head(TOKENS) + recurrent(19), 9, "recurrent"),
        (head(TOKENS) + block([0, 1, 1, *range(3, 20)]), 9, "no cell has position 2"),
        (head([]) + attention(u32(0)), 1, "0 tokens cannot be cut"),
    ],
)
def test_cut_refuses(raw: bytes, n: int, what: str) -> None:
    with pytest.raises(KvFileError, match=what):
        cut(*parse(raw), n, io.BytesIO(raw))


def test_cut_refuses_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile order of cells would need one piece for each cell."""
    raw = head(TOKENS) + block([*range(0, 20, 2), *range(1, 20, 2)], v_trans=True)
    monkeypatch.setattr(module, "MAX_PIECES", 10)
    cut_to(raw, 1)  # one run of cells
    with pytest.raises(KvFileError, match="pieces"):
        cut_to(raw, 10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_stream", [1, 2, 4])
@pytest.mark.parametrize("n_checkpoints", [0, 2])
def test_pad(n_stream: int, shape: str, n_checkpoints: int) -> None:
    base = head(TOKENS) + block(SHUFFLED, n_stream)
    for index in range(n_stream):

        def window(positions: Sequence[int], index: int = index) -> bytes:
            return block(positions, n_stream, index, **SHAPES[shape])

        states = [(9, window([7, 8])), (15, window([14]))]
        rest = appendix(*states) if n_checkpoints else b""
        # -12 gives the zeros; the position is corrected here.
        new = window([*WINDOW, -12]).replace(i32(-12, 1, 3), i32(12, 1, 3))
        raw = base + window(WINDOW) + rest
        rewrite = pad(parse(raw)[1], io.BytesIO(raw), len(raw))

        assert rewrite is not None
        assert base + new + rest == apply(raw, rewrite)
        assert rewrite.start == len(base) + 4 + 4 * index
        before, after = parse(raw)[1].attention[1], parse(base + new + rest)[1].attention[1]
        assert (before.pos_min, after.pos_min) == (13, 12)
        assert before.describe() == after.describe()


@pytest.mark.parametrize(
    "raw",
    [
        head(TOKENS) + block(range(20)),
        head(TOKENS) + block(range(20)) + block(range(20)),
        head(TOKENS) + block(range(20), ext=True) + block(WINDOW, ext=True),
        head(TOKENS) + block([*range(20), 0]) + block(range(20)),
        head(TOKENS) + block(range(20)) + block([12, *range(14, 20)]),
        head(TOKENS) + block(range(20)) + block(WINDOW) + recurrent(19),
        head(TOKENS) + block(range(20)) + recurrent(19),
        head(TOKENS) + recurrent(19),
        head([]) + attention(u32(0)) + attention(u32(0)),
    ],
    ids=["full", "same", "ext", "pos 0", "hole", "hybrid iswa", "hybrid", "rnn", "empty"],
)
def test_pad_leaves_alone(raw: bytes) -> None:
    file = io.BytesIO(raw)
    layout = read_layout(file, read_head(file), len(raw))  # not compared with the tokens
    assert pad(layout, file, len(raw)) is None


states = st.tuples(st.permutations(range(12)), st.booleans(), st.integers(1, 4), st.booleans())


def made(state: tuple[list[int], bool, int, bool]) -> bytes:
    positions, v_trans, n_stream, legacy = state
    start = head(TOKENS[: len(positions)], legacy=legacy)
    return start + block(positions, n_stream, v_trans=v_trans)


# The writer.


def written(tmp_path: Path, raw: bytes, rewrite: Rewrite) -> tuple[bytes, files.Identity]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(raw)
    target.unlink(missing_ok=True)
    found = files.write_rewritten(source, target, files.identity(source), rewrite)
    assert source.read_bytes() == raw
    return target.read_bytes(), found


def random_rewrite(seed: int, size: int, *, forward: bool) -> Rewrite:
    """Return pieces of sizes around the writer's limits; `forward`: fit for a change in place."""
    chance = random.Random(seed)
    start = at = chance.choice([0, 1, 5000, 700_000])
    end = start
    sizes = (1, 2, 100, 20_000, (1 << 18) - 1, 1 << 18, (1 << 20) + 3, (2 << 20) + 1)
    pieces: list[Piece] = []
    for _ in range(chance.randrange(60)):
        n = chance.choice(sizes)
        if chance.random() < 0.4:
            pieces.append(chance.randbytes(n))
        else:
            low = end if forward else 0
            high = min(at, size - n) if forward else size - n
            if low > high:
                continue
            near = min(low + chance.choice([0, 3, 1 << 12, (1 << 12) + 1]), high)
            offset = chance.choice([low, high, near])
            pieces.append(Span(offset, n))
            end = offset + n
        at += n
    return Rewrite(start, tuple(pieces), at)


def plain_apply(raw: bytes, rewrite: Rewrite) -> bytes:
    parts = [raw[: rewrite.start]]
    for piece in rewrite.pieces:
        if isinstance(piece, Span):
            parts.append(raw[piece.offset : piece.offset + piece.size])
        else:
            parts.append(piece)
    return b"".join(parts)


@pytest.mark.parametrize("reflink", [True, False])
@pytest.mark.thorough
def test_write_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reflink: bool
) -> None:
    if not reflink:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    raw = random.Random(7).randbytes(4 << 20)
    for seed in range(25):
        rewrite = random_rewrite(seed, len(raw), forward=False)
        found, identity = written(tmp_path, raw, rewrite)

        assert plain_apply(raw, rewrite) == found, seed
        assert files.identity(tmp_path / "target") == identity
        assert identity.size_bytes == rewrite.size_bytes
        (tmp_path / "target").unlink()


def test_rewrite_in_place(tmp_path: Path) -> None:
    raw, path = random.Random(7).randbytes(4 << 20), tmp_path / "file"
    for seed in range(25):
        rewrite = random_rewrite(seed, len(raw), forward=True)
        path.write_bytes(raw)
        inode = path.stat().st_ino

        assert files.rewrite_tail(path, rewrite) == files.identity(path)
        assert plain_apply(raw, rewrite) == path.read_bytes(), seed
        assert inode == path.stat().st_ino


def refuse(*_: object) -> int:
    raise OSError(18, "Invalid cross-device link")


@pytest.mark.parametrize(
    "pieces",
    [(Span(20, 4),), (b"ab", Span(13, 4)), (b"x" * 20, Span(20, 4), Span(10, 4))],
    ids=["down", "down after bytes", "back"],
)
def test_not_in_place(tmp_path: Path, pieces: tuple[Piece, ...]) -> None:
    """Data that moves to lower offsets could be overwritten before it is read."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(40)))
    with pytest.raises(KvFileError, match="in place"):
        files.rewrite_tail(path, Rewrite(10, pieces, 40))
    assert bytes(range(40)) == path.read_bytes()


def test_source_too_short_leaves_nothing(tmp_path: Path) -> None:
    for piece in (Span(5, 10), Span(5, 1 << 19)):
        with pytest.raises(KvFileError):
            written(tmp_path, b"x" * 8, Rewrite(4, (b"ab", piece), 100))
        assert not (tmp_path / "target").exists()


def test_existing_target_is_not_touched(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"abc")
    target.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        files.write_rewritten(source, target, files.identity(source), Rewrite(3, (), 3))
    assert target.read_bytes() == b"mine"


def test_replaced_source_is_not_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    before = files.identity(source)
    source.write_bytes(b"abcd")
    with pytest.raises(KvFileError, match="replaced"):
        files.write_rewritten(source, tmp_path / "t", before, Rewrite(3, (), 3))
    assert not (tmp_path / "t").exists()


def test_mode_comes_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"abc")
    source.chmod(0o640)
    files.write_rewritten(source, target, files.identity(source), Rewrite(1, (b"x",), 2))
    assert target.stat().st_mode & 0o777 == 0o640
    assert target.read_bytes() == b"ax"


def test_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(KvFileError, match="regular"):
        files.rewrite_tail(tmp_path / "link", Rewrite(1, (b"x",), 2))
    assert (tmp_path / "real").read_bytes() == b"abc"


# The rest talks to real servers.

PROMPT = [(i * 7 + i * i) % 500 for i in range(300)]
MORE = [11, 23, 35]  # extends PROMPT
GREEDY = {"temperature": 0, "return_tokens": True, "cache_prompt": True}


class Slots:
    """The slots of one real server."""

    def __init__(self, server: LlamaServer) -> None:
        assert server.kv_dir is not None
        self.server, self.kv_dir = server, server.kv_dir

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with (
            aiohttp.ClientSession(self.server.url) as http,
            http.post(path, json=body) as response,
        ):
            return response.status, await response.json()

    async def run(self, slot: int, prompt: list[int], n: int = 16) -> tuple[int, list[int]]:
        """Return the number of reused prompt tokens, and the generated tokens."""
        body = {**GREEDY, "prompt": prompt, "n_predict": n, "id_slot": slot}
        status, answer = await self._post("/completion", body)
        assert status == 200, answer
        return answer["timings"]["cache_n"], answer["tokens"]

    async def save(self, slot: int, name: str) -> Path:
        status, answer = await self._post(f"/slots/{slot}?action=save", {"filename": name})
        assert status == 200, answer
        return self.kv_dir / name

    async def restore(self, slot: int, name: str) -> int:
        """Restore a file; return the number of restored tokens."""
        status, answer = await self._post(f"/slots/{slot}?action=restore", {"filename": name})
        assert status == 200, (answer, self.server.log_tail())
        n: int = answer["n_restored"]
        return n

    async def refuses(self, slot: int, name: str) -> bool:
        return (await self._post(f"/slots/{slot}?action=restore", {"filename": name}))[0] == 400


def rewritten(path: Path, name: str, change: Callable[..., Rewrite | None], *args: Any) -> None:
    """Read `path`, change it, write it as `name`; check that the result is a state file too."""
    with path.open("rb") as file:
        found = read_head(file)
        size = path.stat().st_size
        layout = read_layout(file, found, size)
        given = {"layout": layout, "head": found, "file": file, "size_bytes": size}
        names = change.__code__.co_varnames[: change.__code__.co_argcount]
        rest = iter(args)
        rewrite = change(*(given[n] if n in given else next(rest) for n in names))
    assert rewrite is not None
    target = path.with_name(name)
    identity = files.write_rewritten(path, target, files.identity(path), rewrite)
    after = shapes.inspect(target, rewrite.size_bytes)
    assert identity == after.identity
    assert tok.common_prefix(found.tokens, after.head.tokens) == after.head.n_tokens


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
async def test_real_streams(llama_server: StartServer, kind: str) -> None:
    """A state moved between `-np 2`, `-np 1` and unified KV is reused whole, with equal answers."""
    servers = {
        "two": Slots(await llama_server(kind, slots=2)),
        "one": Slots(await llama_server(kind, slots=1)),
        "unified": Slots(await llama_server(kind, slots=4, extra_args=["--kv-unified"])),
    }
    n_stream = {"two": 2, "one": 1, "unified": 1}
    for origin, slots in servers.items():
        last = {"two": 1, "one": 0, "unified": 3}[origin]
        await slots.run(last, PROMPT, 0)
        path = await slots.save(last, origin)
        reused, expected = await slots.run(last, PROMPT + MORE)
        assert (reused, len(expected)) == (300, 16)
        for target, there in servers.items():
            name = f"{origin}-{target}"
            rewritten(path, name, restream, n_stream[target])
            if n_stream[origin] != n_stream[target]:
                assert await there.refuses(0, origin)
            await there.restore(0, name)
            assert (300, expected) == await there.run(0, PROMPT + MORE), name


SETTINGS = {
    "f16": [],
    "no fa": ["-fa", "off"],
    "q8_0": ["-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"],
}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_real_cut(llama_server: StartServer, setting: str) -> None:
    """A cut state continues like a slot that was rolled back to the same token."""
    slots = Slots(await llama_server(slots=2, extra_args=SETTINGS[setting]))
    await slots.run(0, PROMPT, 16)
    path = await slots.save(0, "whole")
    for k in (1, 129, 299):
        rewritten(path, f"cut{k}", cut, k)
        assert k == await slots.restore(1, f"cut{k}")
        await slots.restore(0, "whole")
        prompt = [*PROMPT[:k], 499 - PROMPT[k]]
        assert prompt != PROMPT[: k + 1]
        reused, expected = await slots.run(0, prompt)
        assert (k, expected) == await slots.run(1, prompt)
        assert reused == k
        again = await slots.save(1, "again")
        with again.open("rb") as file:
            assert prompt == tok.unpack(read_head(file).tokens)[: len(prompt)]


async def test_real_cut_of_scattered_cells(llama_server: StartServer) -> None:
    """Two slots that grow alternately mix their cells in a unified cache."""
    slots = Slots(await llama_server(slots=2, extra_args=["--kv-unified"]))
    for n in range(50, 301, 50):
        await slots.run(0, PROMPT[:n], 0)
        await slots.run(1, PROMPT[7 : n + 7], 0)
    path = await slots.save(0, "whole")
    rewritten(path, "cut", cut, 120)
    await slots.restore(0, "whole")
    _, expected = await slots.run(0, [*PROMPT[:120], 1])
    await slots.restore(0, "cut")
    assert (120, expected) == await slots.run(0, [*PROMPT[:120], 1])


@pytest.mark.parametrize("setting", SETTINGS)
async def test_real_window(llama_server: StartServer, setting: str) -> None:
    """An unpadded state gives no reuse; a padded one gives all, and can diverge safely."""
    extra = [*SETTINGS[setting], "--ctx-checkpoints", "0"]
    slots = Slots(await llama_server("gemma3", slots=2, extra_args=extra))
    await slots.run(0, PROMPT, 0)
    path = await slots.save(0, "plain")
    _, expected = await slots.run(0, PROMPT + MORE)
    rewritten(path, "padded", pad)
    in_place = path.with_name("place")
    files.copy(path, in_place, files.identity(path))
    with path.open("rb") as file:
        found = read_head(file)
        rewrite = pad(read_layout(file, found, path.stat().st_size), file, path.stat().st_size)
    assert rewrite is not None
    files.rewrite_tail(in_place, rewrite)
    assert in_place.read_bytes() == path.with_name("padded").read_bytes()

    assert await slots.restore(1, "plain") == 300
    assert (await slots.run(1, PROMPT + MORE))[0] == 0
    await slots.restore(1, "padded")
    assert (300, expected) == await slots.run(1, PROMPT + MORE)
    for at in (1, 100, 300 - N_SWA, 299 - N_SWA // 2, 299):
        prompt = [*PROMPT[:at], 499 - PROMPT[at], 3, 4]
        await slots._post("/slots/0?action=erase", {})
        fresh = await slots.run(0, prompt)
        await slots.restore(1, "padded")
        assert fresh == await slots.run(1, prompt), at
        assert fresh[0] == 0


async def test_real_window_beside_checkpoints(llama_server: StartServer) -> None:
    """Newer servers write checkpoints behind the state: they are kept and still work."""
    slots = Slots(await llama_server("gemma3", slots=2))
    await slots.run(0, PROMPT, 0)
    path = await slots.save(0, "plain")
    reused, expected = await slots.run(0, PROMPT + MORE)
    assert reused == 300
    rewritten(path, "padded", pad)
    with path.with_name("padded").open("rb") as file:
        size = path.with_name("padded").stat().st_size
        layout = read_layout(file, read_head(file), size)
    await slots.restore(1, "padded")
    assert (300, expected) == await slots.run(1, PROMPT + MORE)
    prompt = [*PROMPT[:-1], 1, 2]
    await slots.restore(1, "plain")
    before = await slots.run(1, prompt)
    await slots.restore(1, "padded")
    assert before == await slots.run(1, prompt)
    points = tuple(checkpoint.n_tokens for checkpoint in layout.checkpoints)
    kind, common = MemoryKind.SLIDING_WINDOW, len(PROMPT) - 1
    assert before[0] == reusable_tokens(
        kind, len(prompt), common, len(PROMPT), checkpoints=points, extendable=False
    )


async def test_real_window_changes_streams_and_is_padded(llama_server: StartServer) -> None:
    two = Slots(await llama_server("gemma3", slots=2))
    one = Slots(await llama_server("gemma3", slots=1))
    await two.run(1, PROMPT, 0)
    path = await two.save(1, "two")
    reused, expected = await two.run(1, PROMPT + MORE)
    assert reused == 300
    rewritten(path, "one", restream, 1)
    rewritten(path.with_name("one"), "one-padded", pad)
    await one.restore(0, "one-padded")
    assert (300, expected) == await one.run(0, PROMPT + MORE)
