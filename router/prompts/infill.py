"""The prompt of `/infill`: prefix, suffix and extra chunks, put together as llama-server does.

The rule is `format_prompt_infill` (server-common.cpp, b11434). It depends on the model and on flags
of the server. Both are learned from the server's answers to two small requests of the probe.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from router.base.tokens import EMPTY, Tokens, count, head, join, tail, unpack
from router.llama.replies import InfillAnswer
from router.llama.wire import INFILL_PROBES, InfillPrompt

PlainCall = Callable[[str], Awaitable[Tokens]]  # special tokens in the text stay text
SpecialCall = Callable[[str], Awaitable[Tokens]]  # special tokens in the text are parsed
TextCall = Callable[[list[int]], Awaitable[str]]

_REPOSITORY, _CURRENT_FILE = "myproject\n", "filename\n"
_SNIPPET = "\n\n--- snippet ---\n\n"  # before a chunk, if the model has no separator token
_DEFAULT_BATCH = 2048  # llama-server's default of `-b`
_LARGEST_BATCH = 1 << 16


class InfillRule(Struct, frozen=True):
    """The part of the rule that depends on model and server; a token that is EMPTY: has none.

    `quarter`: a quarter of the server's `-b`; prefix and suffix are cut to three and one of them.
    `is_sure`: an answer has confirmed `quarter`.
    """

    prefix: Tokens
    suffix: Tokens
    middle: Tokens
    repository: Tokens = EMPTY
    separator: Tokens = EMPTY
    bos: Tokens = EMPTY
    suffix_first: bool = False  # `--spm-infill`
    n_ctx: int = 0
    quarter: int = _DEFAULT_BATCH // 4
    is_sure: bool = False


class _Parts(Struct, frozen=True):
    prefix: Tokens
    suffix: Tokens
    prompt: Tokens
    extra: Tokens


async def infill_tokens(
    rule: InfillRule, source: InfillPrompt, plain: PlainCall, special: SpecialCall
) -> Tokens:
    """Return the ids that the server will see. Raises BackendError."""
    return _together(rule, await _parts(rule, source, plain, special))


async def _parts(
    rule: InfillRule, source: InfillPrompt, plain: PlainCall, special: SpecialCall
) -> _Parts:
    extra: list[Awaitable[Tokens]] = []
    if rule.repository:
        extra += [_known(rule.repository), plain(_REPOSITORY)]
    for name, text in source.extra:
        if rule.separator:
            extra += [_known(rule.separator), plain(name + "\n")]
        else:
            extra.append(plain(_SNIPPET))
        extra.append(plain(text))
    if rule.separator:
        extra += [_known(rule.separator), plain(_CURRENT_FILE)]
    # At once: where the backend tokenizes, one round trip instead of one for each chunk.
    prefix, suffix, prompt, *chunks = await asyncio.gather(
        plain(source.prefix), plain(source.suffix), special(source.prompt), *extra
    )
    return _Parts(prefix, suffix, prompt, join(chunks))


async def _known(tokens: Tokens) -> Tokens:
    return tokens


def _together(rule: InfillRule, parts: _Parts) -> Tokens:
    n_suffix = max(0, rule.quarter - (2 + count(parts.prompt)))
    cut = max(0, count(parts.prefix) - 3 * rule.quarter)
    before = join([rule.prefix, tail(parts.prefix, cut), parts.prompt])
    behind = join([rule.suffix, head(parts.suffix, n_suffix)])
    first, second = (behind, before) if rule.suffix_first else (before, behind)
    dropped = max(0, count(parts.extra) - _room_for_extra(rule))
    return join([tail(parts.extra, dropped), rule.bos, first, second, rule.middle])


def _room_for_extra(rule: InfillRule) -> int:
    # The server's `-n` is -1 unless set, and counts twice.
    return max(0, rule.n_ctx - 4 * rule.quarter + 2)


async def corrected(
    rule: InfillRule, source: InfillPrompt, reported: int, plain: PlainCall, special: SpecialCall
) -> InfillRule | None:
    """Return the rule that explains a prompt of `reported` tokens by another `-b`; None: no rule.

    The same rule, if it explains them: another answer has corrected it since the prompt was read.
    A `-b` that an answer has confirmed is not doubted: the rule itself is wrong then.
    """
    parts = await _parts(rule, source, plain, special)
    if count(_together(rule, parts)) == reported:
        return rule
    if rule.is_sure:
        return None
    # The length rises with the quarter, up to where nothing is cut or the room for extra ends.
    low, high = 0, _LARGEST_BATCH // 4
    if parts.extra:
        high = min(high, max(0, rule.n_ctx + 2 - count(parts.extra)) // 4)
    while low < high:
        middle = (low + high) // 2
        if count(_together(replace(rule, quarter=middle), parts)) < reported:
            low = middle + 1
        else:
            high = middle
    found = replace(rule, quarter=low, is_sure=True)
    return found if count(_together(found, parts)) == reported else None


async def learn_rule(
    answers: Sequence[InfillAnswer],
    bos: str,
    n_ctx: int,
    plain: PlainCall,
    special: SpecialCall,
    text_of: TextCall,
) -> InfillRule | None:
    """Return the rule that explains all answers to `INFILL_PROBES`; None if there is none.

    `bos` is the text of the token at the beginning of each prompt. Raises BackendError.
    """
    if len(answers) != len(INFILL_PROBES):
        return None
    rule = await _read(answers[0].prompt, bos, n_ctx, special)
    if rule is None:
        return None
    for source, answer in zip(INFILL_PROBES, answers, strict=True):
        ids = await infill_tokens(rule, source, plain, special)
        if count(ids) != answer.n_tokens:
            return None
        if (await text_of(unpack(ids))).strip() != answer.prompt.strip():
            return None
    return rule


async def _read(text: str, bos: str, n_ctx: int, special: SpecialCall) -> InfillRule | None:
    """Find the tokens of the rule in the server's text of the first probe."""
    probe = INFILL_PROBES[0]
    at, behind = text.find(probe.prefix), text.find(probe.suffix)
    if at < 0 or behind < 0:
        return None
    suffix_first = behind < at
    first, second = sorted(((at, probe.prefix), (behind, probe.suffix)))
    opening = text[: first[0]]
    between = text[first[0] + len(first[1]) : second[0]]
    closing = text[second[0] + len(second[1]) :]
    repository, separator = "", ""
    if _REPOSITORY in opening:
        repository, _, opening = opening.rpartition(_REPOSITORY)
    if _CURRENT_FILE in opening:
        separator, _, opening = opening.rpartition(_CURRENT_FILE)
    has_bos = bool(bos) and opening.startswith(bos)
    opening = opening.removeprefix(bos) if has_bos else opening
    names = [
        *((between, opening) if suffix_first else (opening, between)),
        *(closing, repository, separator, bos if has_bos else ""),
    ]
    # White space around a name is of a text: some tokenizers put a space before each.
    ids = [await special(name.strip()) if name.strip() else EMPTY for name in names]
    # A name that is not one token is no special token, or one that the text does not tell.
    if any(count(one) != 1 for one in ids[:3]) or any(count(one) > 1 for one in ids):
        return None
    prefix, suffix, middle, *others = ids
    return InfillRule(
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        repository=others[0],
        separator=others[1],
        bos=others[2],
        suffix_first=suffix_first,
        n_ctx=n_ctx,
    )
