"""Infill prompts: the rule is learned from answers, and explains prompts that a server cut."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from router.base.tokens import Tokens, pack, unpack
from router.llama.replies import InfillAnswer
from router.llama.wire import INFILL_PROBES, InfillPrompt
from router.prompts.infill import InfillRule, corrected, infill_tokens, learn_rule
from tests.support.servers.running_router import PATIENCE_S

NAMES = {"<PRE>": 1001, "<SUF>": 1002, "<MID>": 1003, "<REP>": 1004, "<SEP>": 1005, "<s>": 1006}
LONG = "x" * 2000


async def plain(text: str) -> Tokens:
    """One token for each byte."""
    return pack(list(text.encode()))


async def special(text: str) -> Tokens:
    parts = re.split("(<[A-Zs]+>)", text)
    return pack([t for part in parts for t in ([NAMES[part]] if part in NAMES else part.encode())])


async def text_of(ids: list[int]) -> str:
    names = {number: name for name, number in NAMES.items()}
    return "".join(names.get(one) or chr(one) for one in ids)


@dataclass(frozen=True)
class Server:
    """`format_prompt_infill` (server-common.cpp, b11434), line by line."""

    repository: bool = False
    separator: bool = False
    bos: bool = False
    spm: bool = False
    n_batch: int = 2048
    n_ctx: int = 8192

    def ids(self, parts: InfillPrompt) -> list[int]:
        extra: list[int] = []
        if self.repository:
            extra += [NAMES["<REP>"], *b"myproject\n"]
        for name, text in parts.extra:
            if self.separator:
                extra += [NAMES["<SEP>"], *f"{name}\n".encode()]
            else:
                extra += b"\n\n--- snippet ---\n\n"
            extra += text.encode()
        if self.separator:
            extra += [NAMES["<SEP>"], *b"filename\n"]
        prefix, suffix, prompt = (
            list(text.encode()) for text in (parts.prefix, parts.suffix, parts.prompt)
        )
        n_prefix = min(len(prefix), 3 * (self.n_batch // 4))
        n_suffix = min(len(suffix), max(0, self.n_batch // 4 - (2 + len(prompt))))
        n_extra = min(max(0, self.n_ctx - self.n_batch + 2), len(extra))
        prefix = [NAMES["<PRE>"], *prefix[len(prefix) - n_prefix :], *prompt]
        suffix = [NAMES["<SUF>"], *suffix[:n_suffix]]
        first, second = (suffix, prefix) if self.spm else (prefix, suffix)
        bos = [NAMES["<s>"]] if self.bos else []
        return [*extra[len(extra) - n_extra :], *bos, *first, *second, NAMES["<MID>"]]

    async def answers(self) -> list[InfillAnswer]:
        found = [self.ids(parts) for parts in INFILL_PROBES]
        return [InfillAnswer(await text_of(ids), len(ids)) for ids in found]

    async def rule(self) -> InfillRule | None:
        return await learn_rule(await self.answers(), "<s>", self.n_ctx, plain, special, text_of)


SERVERS = [
    Server(),
    Server(bos=True),
    Server(separator=True),
    Server(repository=True, separator=True),
    Server(repository=True, separator=True, bos=True, spm=True),
    Server(spm=True),
]


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(
    "parts",
    [
        *INFILL_PROBES,
        InfillPrompt("", ""),
        InfillPrompt(LONG, LONG, "a prompt"),
        InfillPrompt("a", "b", LONG),
        InfillPrompt("a", "b", extra=(("f", LONG), ("g", LONG), ("h", 3 * LONG))),
    ],
)
async def test_prompts_are_the_servers(server: Server, parts: InfillPrompt) -> None:
    rule = await server.rule()

    assert rule is not None
    assert unpack(await infill_tokens(rule, parts, plain, special)) == server.ids(parts)


async def test_a_batch_is_learned_beside_extra_chunks_that_fit() -> None:
    server = Server(bos=True, n_batch=1024)
    parts = InfillPrompt(LONG, "b", extra=(("f", LONG),))
    rule = await server.rule()
    assert rule is not None

    found = await corrected(rule, parts, len(server.ids(parts)), plain, special)

    assert found is not None
    assert found.quarter * 4 == 1024


async def test_prompt_read_under_the_old_rule_keeps_the_new_one() -> None:
    server = Server(n_batch=1024)
    one, two = InfillPrompt(LONG, "b"), InfillPrompt(LONG + "more", "b")
    rule = await server.rule()
    assert rule is not None
    found = await corrected(rule, one, len(server.ids(one)), plain, special)
    assert found is not None

    assert await corrected(found, two, len(server.ids(two)), plain, special) == found


async def test_a_length_that_no_batch_explains_ends_the_rule() -> None:
    rule = await Server().rule()
    assert rule is not None

    assert await corrected(rule, InfillPrompt("a", "b"), 99, plain, special) is None


def _changed(answers: Sequence[InfillAnswer], old: str, new: str) -> list[InfillAnswer]:
    return [InfillAnswer(one.prompt.replace(old, new), one.n_tokens) for one in answers]


async def test_answers_that_do_not_fit_give_no_rule() -> None:
    good = await Server(separator=True).answers()
    longer = [InfillAnswer(one.prompt, one.n_tokens + 1) for one in good]
    for answers in (
        [],
        good[:1],
        longer,
        _changed(good, "gamma", "other"),
        _changed(good, "<MID>", "no token"),
        _changed(good, "x = 1", "x = 2"),
    ):
        assert await learn_rule(answers, "<s>", 8192, plain, special, text_of) is None


async def test_all_texts_are_asked_for_at_once() -> None:
    """An editor sends up to 16 chunks: one round trip to the backend, not one for each."""
    rule = await Server(separator=True).rule()
    assert rule is not None
    parties = 3 + 2 * 2 + 1  # name and text of each chunk, and the file's name
    everything = asyncio.Barrier(parties)

    async def together(text: str) -> Tokens:
        await everything.wait()
        return await plain(text)

    source = InfillPrompt("a", "b", "c", (("x.py", "one"), ("y.py", "two")))
    async with asyncio.timeout(PATIENCE_S):
        found = await infill_tokens(rule, source, together, together)
    assert found == await infill_tokens(rule, source, plain, special)
