"""The cut at special tokens against an oracle that tokenizes whole texts, and against faults."""

import asyncio
import contextlib
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.base.errors import BackendError, BackendRefusedError
from router.base.tokens import pack, unpack
from router.base.types import Tenant
from router.prompts import special_tokens, tokenizer
from router.prompts.local_tokenizer import LocalTokenizer, LocalTokenizerError, load_local
from router.prompts.special_tokens import candidates, discover_specials
from router.prompts.tokenizer import SegmentTokenizer

BOS, EOS, START, END = 1, 2, 3, 4
SPECIALS = {"<s>": BOS, "</s>": EOS, "<|start|>": START, "<|end|>": END}
TEMPLATE = (
    "{{ bos }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
)
Content = str | list[str | int]


@dataclass
class Oracle:
    """llama.cpp's order of work, written plainly.

    Specials are applied one after the other over all fragments, the longest first. Then every
    fragment is tokenized by itself, three characters a token, so that a wrong cut shows.
    """

    specials: dict[str, int] = field(default_factory=lambda: dict(SPECIALS))
    user_defined: dict[str, int] = field(default_factory=dict)
    strips_left: frozenset[str] = frozenset()
    head: tuple[int, ...] = (BOS,)
    tail: tuple[int, ...] = ()
    takes_arrays: bool = True
    gate: asyncio.Event | None = None
    spoil: Callable[[Content, list[int]], list[int]] | None = None
    calls: list[Content] = field(default_factory=list)
    words: dict[str, int] = field(default_factory=dict)

    @property
    def n_characters(self) -> int:
        return sum(len(c) if isinstance(c, str) else 0 for c in self.calls)

    async def __call__(
        self, content: Content, *, add_special: bool, parse_special: bool
    ) -> list[int]:
        self.calls.append(content)
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(content, str):
            ids = self.ids(content, add_special, parse_special)
        elif not self.takes_arrays:
            raise BackendRefusedError("no arrays here", backend_status=400)
        else:
            ids = []
            for item in content:
                ids += [item] if isinstance(item, int) else self.ids(item, False, parse_special)
        return self.spoil(content, ids) if self.spoil else ids

    def ids(self, text: str, add_special: bool, parse_special: bool = True) -> list[int]:
        marks = self.user_defined | (self.specials if parse_special else {})
        fragments: list[str | int] = [text]
        for mark in sorted(marks, key=len, reverse=True):
            fragments = [
                part
                for fragment in fragments
                for part in (
                    self._apart(fragment, mark, marks[mark])
                    if isinstance(fragment, str)
                    else [fragment]
                )
            ]
        ids: list[int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                for at in range(0, len(fragment), 3):
                    ids.append(self.words.setdefault(fragment[at : at + 3], 100 + len(self.words)))
        return [*self.head, *ids, *self.tail] if add_special else ids

    def _apart(self, text: str, mark: str, token: int) -> list[str | int]:
        pieces = text.split(mark)
        if mark in self.strips_left:
            pieces = [*(piece.rstrip() for piece in pieces[:-1]), pieces[-1]]
        parts: list[str | int] = [pieces[0]]
        for piece in pieces[1:]:
            parts += [token, piece]
        return [part for part in parts if part != ""]


_tasks: set[asyncio.Future[None]] = set()


def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> None:
    task = asyncio.get_running_loop().create_task(coro, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def make(oracle: Oracle, cache_bytes: int = 1 << 20) -> SegmentTokenizer:
    return SegmentTokenizer(oracle, oracle.specials, spawn=spawn, cache_bytes=cache_bytes)


async def checked(oracle: Oracle, cache_bytes: int = 1 << 20) -> SegmentTokenizer:
    """Return a checked tokenizer that segments, with an empty cache and no call counted."""
    made = make(oracle, cache_bytes)
    assert await made.self_check() is None
    made._void()
    oracle.calls.clear()
    return made


async def turns() -> None:
    """Let every task that can run do so until all wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def turn(role: str, text: str) -> str:
    return f"<|start|>{role}\n{text}<|end|>\n"


ENDING = "<|end|>\n"  # ends every message: cached after the first
CHAT = (
    turn("system", "Be brief. " * 40) + turn("user", "Why? " * 90) + turn("assistant", "So. " * 99)
)


# --- what is tokenized, and how often -----------------------------------------------------------


@pytest.mark.parametrize("cuts", [True, False])
async def test_what_one_tenant_has_sent_is_new_for_another(cuts: bool) -> None:
    """Short and simultaneous texts are not shared either: timing would reveal another's text."""
    oracle = Oracle()
    made = await checked(oracle) if cuts else make(oracle)
    for text in (CHAT, "short"):
        expected = pack(oracle.ids(text, True))
        for tenants in ("ab", "aa", "bb", "cd"):
            oracle.calls.clear()
            asked = [made.tokenize(text, add_special=True, tenant=Tenant(t)) for t in tenants]
            assert await asyncio.gather(*asked) == [expected, expected]
            assert len(oracle.calls) == (2 if tenants in ("ab", "cd") else 0)


async def test_second_turn_tokenizes_only_what_is_new() -> None:
    oracle = Oracle()
    made = await checked(oracle)
    await made.tokenize(CHAT, add_special=True)
    oracle.calls.clear()
    new = turn("user", "And then?")

    assert pack(oracle.ids(CHAT + new, True)) == await made.tokenize(CHAT + new, add_special=True)
    assert oracle.calls == ["<|start|>user\nAnd then?"]


async def test_text_with_very_many_segments_is_tokenized_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle = Oracle()
    made = await checked(oracle)
    monkeypatch.setattr(tokenizer, "MAX_SEGMENTS", 3)
    text = "<|end|>" * 4

    assert pack([END] * 4) == await made.tokenize(text, add_special=False)
    assert pack([END] * 4) == await made.tokenize(text, add_special=False)
    assert [text] == oracle.calls


async def test_long_text_is_cut_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle()
    made = await checked(oracle)
    monkeypatch.setattr(tokenizer, "LONG_TEXT", len(CHAT) - 1)
    monkeypatch.setattr(tokenizer, "LONG_IDS", 1)
    threads: set[int] = set()
    cutter = made._cutter
    assert cutter is not None
    cut, split = cutter.cut, cutter.split

    def watched_cut(text: str, tenant: Tenant) -> object:
        threads.add(threading.get_ident())
        return cut(text, tenant)

    def watched_split(ids: object, run: object) -> object:
        threads.add(threading.get_ident())
        return split(ids, run)  # type: ignore[arg-type]

    monkeypatch.setattr(cutter, "cut", watched_cut)
    monkeypatch.setattr(cutter, "split", watched_split)

    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)
    assert threads
    assert threading.get_ident() not in threads


# --- several at once ----------------------------------------------------------------------------


@pytest.mark.parametrize("segmenting", [True, False])
async def test_identical_misses_are_one_call(segmenting: bool) -> None:
    oracle = Oracle()
    made = await checked(oracle) if segmenting else make(oracle)

    answers = await asyncio.gather(*(made.tokenize(CHAT, add_special=True) for _ in range(5)))

    assert [pack(oracle.ids(CHAT, True))] * 5 == answers
    assert len(oracle.calls) == 1


async def test_shared_prefix_under_way_is_not_tokenized_again() -> None:
    oracle = Oracle(gate=None)
    made = await checked(oracle)
    oracle.gate = asyncio.Event()
    first = asyncio.gather(made.tokenize(CHAT + turn("user", "one"), add_special=True))
    await turns()
    loop = asyncio.get_running_loop()
    text = CHAT + turn("user", "two")
    second = loop.create_task(made.tokenize(text, add_special=True))
    await turns()
    oracle.gate.set()

    assert pack(oracle.ids(text, True)) == await second
    await first
    assert [(CHAT + turn("user", "one")).removesuffix(ENDING), "<|start|>user\ntwo"] == oracle.calls


@pytest.mark.parametrize("segmenting", [True, False])
async def test_who_leaves_takes_nothing_from_the_others(segmenting: bool) -> None:
    oracle = Oracle()
    made = await checked(oracle) if segmenting else make(oracle)
    oracle.gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    waiters = [loop.create_task(made.tokenize(CHAT, add_special=True)) for _ in range(3)]
    await turns()
    waiters[0].cancel()  # this waiter was the first: it caused the call
    await turns()
    oracle.gate.set()

    assert pack(oracle.ids(CHAT, True)) == await waiters[1] == await waiters[2]
    with contextlib.suppress(asyncio.CancelledError):
        await waiters[0]
    assert waiters[0].cancelled()
    assert len(oracle.calls) == 1


async def test_failure_reaches_all_who_wait_and_is_forgotten() -> None:
    def fail(content: Content, ids: list[int]) -> list[int]:
        raise BackendError("gone")

    oracle = Oracle()
    made = await checked(oracle)
    oracle.spoil = fail
    answers = await asyncio.gather(
        *(made.tokenize(CHAT, add_special=True) for _ in range(3)), return_exceptions=True
    )
    assert [BackendError] * 3 == [type(answer) for answer in answers]

    oracle.spoil = None
    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)


async def test_work_that_is_stopped_fails_those_who_wait() -> None:
    oracle = Oracle()
    made = await checked(oracle)
    oracle.gate = asyncio.Event()
    waiter = asyncio.gather(made.tokenize(CHAT, add_special=True))
    await turns()
    for task in list(_tasks):
        task.cancel()

    with pytest.raises(BackendError, match="stopped"):
        await waiter


# --- bounds and bad answers ---------------------------------------------------------------------


async def test_cache_stays_within_its_limit_and_drops_the_oldest() -> None:
    oracle = Oracle()
    made = await checked(oracle, cache_bytes=8000)
    for i in range(50):
        await made.tokenize(turn("user", f"{i} " + "word " * 30), add_special=False)
        assert made._cache.size_bytes <= 8000
    assert made._cache.size_bytes > 4000
    oracle.calls.clear()

    await made.tokenize(turn("user", "49 " + "word " * 30), add_special=False)
    assert oracle.calls == []
    await made.tokenize(turn("user", "0 " + "word " * 30), add_special=False)
    assert len(oracle.calls) == 1


async def test_text_larger_than_the_cache_is_tokenized_all_the_same() -> None:
    oracle = Oracle()
    made = await checked(oracle, cache_bytes=300)

    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)
    assert made._cache.size_bytes <= 300


def _one_special_lost(content: Content, ids: list[int]) -> list[int]:
    return [i for at, i in enumerate(ids) if i != END or at % 2]


def _one_special_too_many(content: Content, ids: list[int]) -> list[int]:
    return [*ids, END]


def _does_not_start_with_its_special(content: Content, ids: list[int]) -> list[int]:
    return [999, *ids]


@pytest.mark.parametrize(
    "spoil", [_one_special_lost, _one_special_too_many, _does_not_start_with_its_special]
)
async def test_answer_not_in_segments_is_neither_used_nor_kept(
    spoil: Callable[[Content, list[int]], list[int]],
) -> None:
    """Only the call without add_special lies: the fallback is a call for the whole text."""
    oracle = Oracle()
    made = await checked(oracle)

    async def call(content: Content, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = await oracle(content, add_special=add_special, parse_special=parse_special)
        return ids if add_special else spoil(content, ids)

    made._call = call
    text = turn("a", "b") + turn("c", "d") + turn("e", "f")

    assert pack(oracle.ids(text, True)) == await made.tokenize(text, add_special=True)
    assert [text.removesuffix(ENDING), text] == oracle.calls
    assert made._cache.size_bytes == 0


# --- the proof ----------------------------------------------------------------------------------

PARTS = [*SPECIALS, "<|", "|>", "<", "s>", "start", " ", "  ", "\n", "a", "bc", "def", "é", "漢字"]


@settings(deadline=None)
@given(
    first=st.lists(st.sampled_from(PARTS), max_size=25),
    second=st.lists(st.sampled_from(PARTS), max_size=25),
    add_special=st.booleans(),
)
@example(first=[], second=[], add_special=True)
@example(first=["<", "<s>", "s>"], second=["</s>", "</s>"], add_special=False)
def test_segments_give_the_ids_of_the_whole(
    first: list[str], second: list[str], add_special: bool
) -> None:
    """The second text continues the first, so that it meets a half-full cache."""

    async def compare() -> None:
        oracle = Oracle(tail=(EOS,))
        made = await checked(oracle)
        for text in ("".join(first), "".join(first + second)):
            expected = oracle.ids(text, add_special)
            assert expected == unpack(await made.tokenize(text, add_special=add_special))
        assert made.segmenting

    asyncio.run(compare())


async def test_nothing_is_cut_before_the_check() -> None:
    oracle = Oracle()
    made = make(oracle)

    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)
    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)
    assert not made.segmenting
    assert oracle.calls == [CHAT]


async def test_special_that_strips_to_its_left_is_given_up_alone() -> None:
    oracle = Oracle(strips_left=frozenset({"<|end|>"}))
    made = make(oracle)

    assert await made.self_check() is None
    assert set(SPECIALS) - {"<|end|>"} == made.specials
    text = turn("user", "what follows is stripped  \n") * 3
    assert pack(oracle.ids(text, True)) == await made.tokenize(text, add_special=True)


async def test_specials_that_can_share_characters_are_given_up() -> None:
    """The engine takes the longer token in "<ab>cd]", wherever it begins."""
    oracle = Oracle(specials={**SPECIALS, "<ab>": 5, "b>cd]": 6, "b>": 7})
    made = make(oracle)

    assert await made.self_check() is None
    assert set(SPECIALS) == made.specials
    text = "x<ab>cd]<s><ab>b>y"
    assert pack(oracle.ids(text, True)) == await made.tokenize(text, add_special=True)


async def test_special_that_begins_like_another_is_told_apart() -> None:
    oracle = Oracle(specials={"<x>": 5, "<x>y": 6})
    made = await checked(oracle)

    assert pack([6, 5]) == await made.tokenize("<x>y<x>", add_special=False)
    assert oracle.calls == ["<x>y<x>"]  # no second call for the whole text
    assert made.specials == {"<x>", "<x>y"}


async def test_no_special_survives() -> None:
    oracle = Oracle(strips_left=frozenset(SPECIALS))
    made = make(oracle)

    assert "no special token" in (await made.self_check() or "")
    assert not made.segmenting
    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)


async def test_ids_that_depend_on_context_turn_segmenting_off() -> None:
    def by_length(content: Content, ids: list[int]) -> list[int]:
        return [*ids, 7777] if isinstance(content, str) and len(content) > 150 else ids

    oracle = Oracle(spoil=by_length)
    made = make(oracle)

    assert "add_special adds other tokens" in (await made.self_check() or "")
    assert not made.segmenting
    assert pack([*oracle.ids(CHAT, True), 7777]) == await made.tokenize(CHAT, add_special=True)


async def test_framing_that_cannot_be_told_turns_segmenting_off() -> None:
    oracle = Oracle(spoil=lambda content, ids: [] if content == "a" else ids)

    assert "add_special" in (await make(oracle).self_check() or "")


async def test_server_that_minds_mixed_arrays_is_asked_one_by_one() -> None:
    oracle = Oracle(takes_arrays=False)
    made = make(oracle)

    assert await made.self_check() is None
    assert made.segmenting
    assert await discover_specials(TEMPLATE, "<s>", "</s>", oracle) == SPECIALS


# --- discovery ----------------------------------------------------------------------------------


async def test_discovery_finds_control_tokens_and_no_others() -> None:
    oracle = Oracle(user_defined={"<tool_call>": 8})
    template = TEMPLATE + "{{ '<tool_call>' }}{{ '<not_one>' }}{{ 'abc' }}{{ '###' }}"

    assert await discover_specials(template, "<s>", "</s>", oracle) == SPECIALS
    assert len(oracle.calls) == 2


def test_candidates_are_found_in_all_spellings() -> None:
    template = (
        "{{ '<｜User｜>' + x }}[INST] {{ \"[/INST]\" }}<start_of_turn>user</start>"
        "{{'<|im_start|>' + message['role'] + '\\n'}}<<SYS>>{% if m['role'] == 'user' %}'@@'"
    )
    expected = {"<｜User｜>", "[INST]", "[/INST]", "<start_of_turn>", "<|im_start|>", "<<SYS>>"}

    found = candidates(template, "<bos>", "")
    assert expected | {"<bos>", "</start>", "@@"} <= set(found)
    assert not {"", "role", "user"} & set(found)


def test_candidates_are_bounded_and_keep_bos_and_eos() -> None:
    template = " ".join(f"<|x{i}|>" for i in range(500))

    found = candidates(template, "<bos>", "<eos>")
    assert len(found) == special_tokens.MAX_CANDIDATES
    assert found[:3] == ["<bos>", "<eos>", "<|x0|>"]


# --- what the engine reports --------------------------------------------------------------------


async def test_confirmed_disagreement_ends_segmenting_for_good() -> None:
    oracle = Oracle()
    made = await checked(oracle)
    await made.tokenize(CHAT, add_special=True)
    oracle.strips_left = frozenset({"<|end|>"})  # as if the check had missed it
    text = CHAT + turn("user", "white space  ")

    reason = await made.disagreed(text, add_special=True)

    assert "segmenting" in (reason or "")
    assert not made.segmenting
    assert pack(oracle.ids(text, True)) == await made.tokenize(text, add_special=True)


async def test_disagreement_is_confirmed_after_the_cache_forgot() -> None:
    """One call for a long run hides the ids of its segments by themselves."""
    oracle = Oracle()
    made = await checked(oracle)
    oracle.strips_left = frozenset({"<|end|>"})
    text = turn("user", "white space  ")

    assert pack(oracle.ids(text, True)) == await made.tokenize(text, add_special=True)
    assert "segmenting" in (await made.disagreed(text, add_special=True) or "")


async def test_ids_that_arrive_after_a_part_was_dropped_are_not_kept() -> None:
    oracle = Oracle()
    made = await checked(oracle)
    oracle.gate = asyncio.Event()
    waiter = asyncio.get_running_loop().create_task(made.tokenize("<s>x", add_special=False))
    await turns()
    waiter.cancel()
    made._void()
    oracle.gate.set()
    await turns()

    assert made._cache.size_bytes == 0


async def test_who_waits_while_a_part_is_dropped_gets_the_right_ids() -> None:
    oracle = Oracle()
    made = await checked(oracle)
    oracle.gate = asyncio.Event()
    waiter = asyncio.get_running_loop().create_task(made.tokenize(CHAT, add_special=True))
    await turns()
    oracle.strips_left = frozenset({"<|end|>"})
    made._cutter = None
    made._void()
    oracle.gate.set()

    assert pack(oracle.ids(CHAT, True)) == await waiter
    assert len(oracle.calls) == 2


async def test_backend_that_tokenizes_anew_empties_the_cache() -> None:
    oracle = Oracle()
    made = make(oracle)
    await made.tokenize("abc", add_special=False)
    oracle.words["abc"] = 9999

    assert "cache" in (await made.disagreed("abc", add_special=False) or "")
    assert pack([9999]) == await made.tokenize("abc", add_special=False)


# --- a tokenizer in this process ----------------------------------------------------------------


async def test_a_short_text_is_encoded_at_once() -> None:
    """Work of microseconds starts no task: a short chat pays for each task."""
    oracle = Oracle()
    made = make(oracle)
    assert await made.self_check(LocalTokenizer(lambda text: oracle.ids(text, False))) is None
    oracle.calls.clear()
    text = "<|im_start|>user\nsomething new<|im_end|>"
    expected = oracle.ids(text, True)
    made._spawn = unwanted

    assert unpack(await made.tokenize(text, add_special=True)) == expected
    assert oracle.calls == []


def unwanted(coro: Coroutine[Any, Any, None], *, name: str) -> None:
    coro.close()
    raise AssertionError(f"a task was started: {name}")


async def test_local_tokenizer_that_agrees_replaces_the_call() -> None:
    oracle = Oracle()
    made = make(oracle)
    assert await made.self_check(LocalTokenizer(lambda text: oracle.ids(text, False))) is None
    oracle.calls.clear()

    assert pack(oracle.ids(CHAT, True)) == await made.tokenize(CHAT, add_special=True)
    assert made.uses_local
    assert oracle.calls == []


async def test_local_tokenizer_that_differs_is_refused() -> None:
    oracle, other = Oracle(), Oracle()
    made = make(oracle)

    def encode(text: str) -> list[int]:
        return oracle.ids(text, False) if "漢" not in text else other.ids(text, False)

    assert await made.self_check(LocalTokenizer(encode)) is None
    assert made.segmenting
    assert not made.uses_local


def wrong_where_rare(oracle: Oracle) -> LocalTokenizer:
    """Return a local tokenizer that makes other ids of texts with the word "rare"."""

    def encode(text: str) -> list[int]:
        ids = oracle.ids(text, False)
        return [0 if i >= 100 else i for i in ids] if "rare" in text else ids

    return LocalTokenizer(encode)


async def test_an_odd_text_costs_only_itself() -> None:
    oracle = Oracle()
    made = make(oracle)
    await made.self_check(wrong_where_rare(oracle))
    text = "<s>rare<|end|>"
    expected = pack(oracle.ids(text, False))
    assert expected != await made.tokenize(text, add_special=False)

    reason = await made.disagreed(text, add_special=False)

    assert "kept" in (reason or "")
    assert made.uses_local
    assert expected == await made.tokenize(text, add_special=False)
    oracle.calls.clear()
    longer = text + "<s>other<|end|>"
    assert pack(oracle.ids(longer, False)) == await made.tokenize(longer, add_special=False)
    assert oracle.calls == []


async def test_differing_local_tokenizer_is_dropped_the_cut_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "MAX_ODD_TEXTS", 0)
    oracle = Oracle()
    made = make(oracle)
    await made.self_check(wrong_where_rare(oracle))
    assert made.uses_local

    reason = await made.disagreed("<s>rare<|end|>", add_special=False)

    assert "local" in (reason or "")
    assert (made.uses_local, made.segmenting) == (False, True)
    expected = pack(oracle.ids("<s>rare<|end|>", False))
    assert expected == await made.tokenize("<s>rare<|end|>", add_special=False)


def _gguf(*values: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


GGUF = _gguf(
    _text("general.name") + struct.pack("<I", 8) + _text("x"),
    _text("tokenizer.ggml.model") + struct.pack("<I", 8) + _text("gpt2"),
    _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b"),
    _text("tokenizer.ggml.token_type") + struct.pack("<IIQii", 9, 5, 2, 1, 3),
    _text("tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, True),
)


@pytest.mark.parametrize("size", range(0, len(GGUF), 7))
def test_cut_gguf_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF[:size])

    with pytest.raises(LocalTokenizerError):
        load_local(path)


@pytest.mark.parametrize(
    "value",
    [
        struct.pack("<I", 13),  # no such type
        struct.pack("<IIQ", 9, 9, 1),  # an array of arrays
        struct.pack("<IIQ", 9, 5, 1 << 60),  # longer than any file
        struct.pack("<IQ", 8, 1 << 60),
    ],
)
def test_odd_gguf_values_are_refused(tmp_path: Path, value: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_gguf(_text("k") + value))

    with pytest.raises(LocalTokenizerError):
        load_local(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(LocalTokenizerError, match=r"tokenizer\.json"):
        load_local(tmp_path)
    with pytest.raises(LocalTokenizerError, match="read"):
        load_local(tmp_path / "missing.gguf")
