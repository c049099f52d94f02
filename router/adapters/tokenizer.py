"""Text to the ids that one backend will see, without asking it for the same text twice.

Owns the cut at special tokens, the cache of the pieces and the proof that cutting is harmless for
the model at hand. Knows nothing of HTTP, messages or slots: `POST /tokenize` is an argument.

Why a cut is possible: llama.cpp splits a text at special tokens first and tokenizes each fragment
by itself; all that a fragment knows of its surroundings is that a special token or the start of
the text precedes it (`tokenizer_st_partition`, `tokenize` in src/llama-vocab.cpp, b11434). So
"special token + text up to the next one" gives the same ids anywhere, and the messages of a
conversation are tokenized once. The exception: a token that strips white space to its left.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Protocol

import structlog

from router.adapters.local_tokenizer import Encoder, probes_alone, probes_together
from router.errors import BackendError
from router.ports import Spawn
from router.tokens import EMPTY, WIDTH, Tokens, join, pack

DEFAULT_CACHE_BYTES = 64 << 20
LONG_TEXT = 256 * 1024  # characters; cutting and hashing so much chat text takes 1 ms
LONG_IDS = 64 * 1024  # ids; finding the specials among them and packing takes 5 ms
SHORT_KEY = 64  # characters; a text that is no longer than that is its own key
ENTRY_BYTES = (
    256  # what a cache entry costs beyond its ids, rounded up (measured: 157 and a short key)
)
BRIDGE = 256  # characters; re-tokenizing so many known ones is cheaper than one more call
MAX_SEGMENTS = 16 * 1024  # a text with more is tokenized whole: the loop over them is not free
MAX_CANDIDATES = 64
BATCH = 256  # texts in one request
SEPARATOR = -1  # no token; `tokenize_mixed` (server-common.cpp) hands ids through unchecked
FULL_RECHECKS = 4  # unexplained disagreements that are looked into; then only the 8th, 16th, ...

_log = structlog.get_logger(__name__)

Key = str | bytes | tuple[bool, str | bytes]
_Future = asyncio.Future[Tokens | None]  # None: could not be told apart
_Work = Callable[[], Awaitable[Mapping[Key, Tokens]]]
Framing = tuple[list[int], list[int]]
"""What `add_special` puts before and behind the ids of a text: BOS, EOS or SEP, by the model."""


class TokenizeCall(Protocol):
    """The backend's `POST /tokenize`. Raises BackendError and its kin only."""

    async def __call__(
        self, content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]: ...


_LOOKS_SPECIAL = re.compile(
    r"<[|｜][^\s<>{}'\"]{1,48}?[|｜]>|<<[^\s<>{}'\"]{1,24}>>|</?[^\s<>{}'\"=/]{1,48}>"
    r"|\[/?[A-Z_]{1,32}\]"
)
_LITERAL = re.compile(r"'([^'\\\s]{2,48})'|\"([^\"\\\s]{2,48})\"")
# Templates that write '<|' + role + '|>' never spell these; "</s>" is made a control token by
# llama.cpp where a vocabulary happens to have it (Qwen's does).
_OFTEN_UNSPELLED = (
    "</s>",
    *(f"<|{name}|>" for name in ("system", "user", "assistant", "tool", "end", "endoftext")),
)


def candidates(chat_template: str, bos: str, eos: str) -> list[str]:
    """Strings that may be special tokens, the likeliest first, at most MAX_CANDIDATES."""
    spelled = _LOOKS_SPECIAL.findall(chat_template)
    literals = [a or b for a, b in _LITERAL.findall(chat_template)]
    literals = [text for text in literals if not text.replace("_", "").isalnum()]
    found = dict.fromkeys([bos, eos, *spelled, *_OFTEN_UNSPELLED, *literals])
    return [text for text in found if text][:MAX_CANDIDATES]


async def tokenize_all(
    call: TokenizeCall, texts: Sequence[str], *, parse_special: bool = True
) -> list[list[int]]:
    """Each text by itself, many in one request. Raises BackendError.

    A mixed array tokenizes its strings one by one and hands its numbers through, so an id that
    is no token marks the ends. A server that minds it is asked for one text at a time.
    """
    answers: list[list[int]] = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        mixed: list[str | int] = [item for text in batch for item in (text, SEPARATOR)]
        try:
            ids = await call(mixed, add_special=False, parse_special=parse_special)
        except BackendError:
            ids = []
        ends = [i for i, token in enumerate(ids) if token == SEPARATOR]
        if len(ends) == len(batch) and ends[-1] == len(ids) - 1:
            starts = [0, *(end + 1 for end in ends)]
            answers += [ids[a:b] for a, b in zip(starts, ends, strict=False)]
        else:
            answers += [
                await call(text, add_special=False, parse_special=parse_special) for text in batch
            ]
    return answers


async def discover_specials(
    chat_template: str, bos: str, eos: str, call: TokenizeCall
) -> dict[str, int]:
    """The control tokens that `chat_template` is likely to write, with their ids.

    Such a token is one id when specials are parsed and something else when they are not. (Tokens
    of the type "user defined" are one id both ways, as is many a word: they are left out, which
    costs a longer segment and nothing else.) Raises BackendError.
    """
    texts = candidates(chat_template, bos, eos)
    parsed = await tokenize_all(call, texts)
    plain = await tokenize_all(call, texts, parse_special=False)
    return {
        text: ids[0]
        for text, ids, other in zip(texts, parsed, plain, strict=True)
        if len(ids) == 1 and ids != other
    }


def _overlap(a: str, b: str) -> bool:
    return any(a.endswith(b[:n]) for n in range(1, min(len(a), len(b))))


def _without(specials: Mapping[str, int], bad: Iterable[str]) -> dict[str, int]:
    """`specials` less `bad`, and less what is part of a bad one: it must not be cut inside."""
    gone = list(bad)
    return {text: id_ for text, id_ in specials.items() if not any(text in b for b in gone)}


def _overlapping(specials: Iterable[str]) -> set[str]:
    """Those that can share characters in a text: the engine takes the longer, we the first."""
    names = list(specials)
    pairs = [(a, b) for a in names for b in names if a != b and _overlap(a, b)]
    return {name for pair in pairs for name in pair}


@dataclass(frozen=True, slots=True)
class _Segment:
    key: str | bytes
    text: str
    special: int | None  # None: the part before the first special


def _key(text: str) -> str | bytes:
    if len(text) <= SHORT_KEY:
        return text
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _Cutter:
    def __init__(self, specials: Mapping[str, int]) -> None:
        self._ids = dict(specials)
        self.marks = frozenset(specials.values())
        longest_first = sorted(specials, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def cut(self, text: str) -> list[_Segment]:
        """All of `text` in order; no segment is empty."""
        found = [(m.start(), self._ids[m.group()]) for m in self._pattern.finditer(text)]
        heads: list[tuple[int, int | None]] = [*found]
        if text and (not found or found[0][0] > 0):
            heads.insert(0, (0, None))
        ends = [start for start, _ in heads[1:]] + [len(text)] * bool(heads)
        parts = [(text[at:end], id_) for (at, id_), end in zip(heads, ends, strict=True)]
        return [_Segment(_key(part), part, id_) for part, id_ in parts]

    def split(self, ids: Sequence[int], run: Sequence[_Segment]) -> list[Tokens] | None:
        """The ids of each segment of `run`, or None if they do not fall into these segments."""
        starts = [i for i, token in enumerate(ids) if token in self.marks]
        if [ids[i] for i in starts] != [s.special for s in run if s.special is not None]:
            return None
        if run[0].special is None:
            starts.insert(0, 0)
        elif starts[0] != 0:
            return None
        packed = pack(ids)
        ends = [*starts[1:], len(ids)]
        return [Tokens(packed[a * WIDTH : b * WIDTH]) for a, b in zip(starts, ends, strict=True)]


def _runs(segments: Sequence[_Segment], missing: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of `segments` that hold all `missing` ones, each range worth one call.

    Between two missing messages there is nearly always a known "end of turn": a short known gap
    is tokenized again rather than splitting the call in two.
    """
    start = stop = -1
    for index in missing:
        if start >= 0 and sum(len(s.text) for s in segments[stop:index]) > BRIDGE:
            yield start, stop
            start = -1
        if start < 0:
            start = index
        stop = index + 1
    if start >= 0:
        yield start, stop


class _Cache:
    """Least recently used ids, bounded in bytes. Holds short texts and digests, no prompts."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[Key, Tokens] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: Key) -> Tokens | None:
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def put(self, key: Key, tokens: Tokens) -> None:
        cost = len(tokens) + ENTRY_BYTES
        if key in self._entries or cost > self._limit:
            return
        self._entries[key] = tokens
        self.size_bytes += cost
        while self.size_bytes > self._limit:
            _, old = self._entries.popitem(last=False)
            self.size_bytes -= len(old) + ENTRY_BYTES

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0


async def _learn_framing(call: TokenizeCall) -> Framing | None:
    bare = await call("a", add_special=False, parse_special=True)
    framed = await call("a", add_special=True, parse_special=True)
    n = len(bare)
    places = [i for i in range(len(framed) - n + 1) if framed[i : i + n] == bare]
    if not bare or len(places) != 1:
        return None
    return framed[: places[0]], framed[places[0] + n :]


async def _survives_cut(call: TokenizeCall, cutter: _Cutter, probes: Sequence[str]) -> list[bool]:
    """For each probe: are its ids those of its segments, each tokenized by itself?"""
    cuts = [[segment.text for segment in cutter.cut(probe)] for probe in probes]
    texts = list(dict.fromkeys([*probes, *(text for cut in cuts for text in cut)]))
    ids = dict(zip(texts, await tokenize_all(call, texts), strict=True))
    return [
        ids[probe] == [token for text in cut for token in ids[text]]
        for probe, cut in zip(probes, cuts, strict=True)
    ]


class SegmentTokenizer:
    """`ports.Tokenizer` for one backend. One event loop; raises BackendError only.

    Exact from the first call: until `self_check` has proved the cut (and the local tokenizer, if
    one is given), every text is one full call. `specials` maps strings to ids.
    """

    def __init__(
        self,
        call: TokenizeCall,
        specials: Mapping[str, int],
        *,
        spawn: Spawn,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self._call = call
        self._found = dict(specials)
        self._spawn = spawn
        self._cache = _Cache(cache_bytes)
        self._pending: dict[Key, asyncio.Future[Tokens | None]] = {}
        self._cutter: _Cutter | None = None  # None: whole texts
        self._framing: Framing | None = None
        self._local: Encoder | None = None
        self._epoch = 0  # rises when a part is dropped: what was computed before is void
        self._unexplained = 0
        self.specials: frozenset[str] = frozenset()  # those that texts are cut at
        self.n_agreed = 0
        self.n_disagreed = 0

    @property
    def segmenting(self) -> bool:
        return self._cutter is not None

    @property
    def uses_local(self) -> bool:
        return self._local is not None

    @property
    def cache_size_bytes(self) -> int:
        return self._cache.size_bytes

    async def self_check(self, local: Encoder | None = None) -> str | None:
        """Prove the cut, then `local`, against full calls, and use what holds. Call at attach.

        Returns None, or why texts are not cut. Specials that fail by themselves are given up.
        """
        reason = await self._prove_cut()
        if local is not None and self._framing is not None:
            if await self._local_agrees(local):
                self._local = local
            else:
                _log.warning("local_tokenizer_refused", reason="differs from the backend's ids")
        if reason is not None:
            _log.warning("tokenizer_not_segmenting", reason=reason)
        return reason

    async def _prove_cut(self) -> str | None:
        self._framing = await _learn_framing(self._call)
        if self._framing is None:
            return "what add_special adds cannot be told from the text"
        specials = _without(self._found, _overlapping(self._found))
        probes = [(name, probe) for name in specials for probe in probes_alone(name)]
        bad: set[str] = set()
        for name in specials:
            mine = [probe for owner, probe in probes if owner == name]
            cutter = _Cutter({name: specials[name]})
            if not all(await _survives_cut(self._call, cutter, mine)):
                bad.add(name)
        specials = _without(specials, bad)
        if not specials:
            return "no special token that texts could be cut at"
        cutter = _Cutter(specials)
        texts = probes_together(list(specials))
        for text, ok in zip(texts, await _survives_cut(self._call, cutter, texts), strict=True):
            if not ok:
                return f"probe of {len(text)} characters: segments and full call differ"
        for text, ids in zip(texts, await tokenize_all(self._call, texts), strict=True):
            for add_special in (False, True):
                direct = await self._direct(text, add_special)
                if self._framed([pack(ids)], add_special) != direct:
                    return f"probe of {len(text)} characters: what add_special adds differs"
        self._cutter, self.specials = cutter, frozenset(specials)
        return None

    async def _local_agrees(self, local: Encoder) -> bool:
        for text in probes_together(list(self._found)):
            pieces = self._cutter.cut(text) if self._cutter else []
            whole = pack(await local.encode(text))
            parts = [pack(await local.encode(piece.text)) for piece in pieces] or [whole]
            direct = await self._direct(text, add_special=True)
            if not self._framed([whole], True) == self._framed(parts, True) == direct:
                return False
        return True

    async def tokenize(self, text: str, *, add_special: bool) -> Tokens:
        """The ids of `text`, specials parsed. `add_special` adds what the model wants around it.

        A caller that is cancelled stops waiting and nothing else: the work goes on for whoever
        asks next. Raises BackendError; a failure is not remembered.
        """
        while True:
            epoch = self._epoch
            tokens = await self._tokenize(text, add_special)
            if epoch == self._epoch:
                return tokens

    async def _tokenize(self, text: str, add_special: bool) -> Tokens:
        cutter, long = self._cutter, len(text) > LONG_TEXT
        if cutter is not None:
            segments = await asyncio.to_thread(cutter.cut, text) if long else cutter.cut(text)
            if len(segments) <= MAX_SEGMENTS:
                parts = await self._parts(cutter, segments)
                if parts is not None:
                    return self._framed(parts, add_special)
                # An answer that does not fall into its segments is not to be remembered.
                return await self._direct(text, add_special)
        key = (add_special, await asyncio.to_thread(_key, text) if long else _key(text))
        known = self._known(key)
        if known is None:
            known = self._pending[key] = asyncio.get_running_loop().create_future()
            work = partial(self._whole, key, text, add_special)
            self._spawn(self._fill({key: known}, work), name="tokenize")
        tokens = await _value(known)
        return EMPTY if tokens is None else tokens

    async def _parts(self, cutter: _Cutter, segments: Sequence[_Segment]) -> list[Tokens] | None:
        parts: list[Tokens | _Future] = []
        owned: dict[Key, _Future] = {}
        missing: list[int] = []
        for index, segment in enumerate(segments):
            part = self._known(segment.key)
            if part is None:
                part = asyncio.get_running_loop().create_future()
                owned[segment.key] = self._pending[segment.key] = part
                missing.append(index)
            parts.append(part)
        for start, stop in _runs(segments, missing):
            run = segments[start:stop]
            mine: dict[Key, _Future] = {s.key: owned[s.key] for s in run if s.key in owned}
            self._spawn(self._fill(mine, partial(self._run, cutter, run)), name="tokenize")
        ready: list[Tokens] = []
        for part in parts:
            tokens = await _value(part)
            if tokens is None:
                return None
            ready.append(tokens)
        return ready

    def _known(self, key: Key) -> Tokens | _Future | None:
        tokens = self._cache.get(key)
        return self._pending.get(key) if tokens is None else tokens

    async def _fill(self, owned: Mapping[Key, _Future], work: _Work) -> None:
        """Do `work` and hand its results to all who wait. A task of its own, so that whoever
        caused it may leave; on every path each future of `owned` is done at the end."""
        epoch = self._epoch
        failure = BackendError("tokenizing was stopped")
        try:
            values = await work()
            for key, future in owned.items():
                tokens = values.get(key)
                if tokens is not None and epoch == self._epoch:
                    self._cache.put(key, tokens)
                future.set_result(tokens)
        except BackendError as error:
            failure = error
        finally:
            for key, future in owned.items():
                if self._pending.get(key) is future:
                    del self._pending[key]
                if not future.done():
                    future.set_exception(failure)
                    future.exception()  # all who waited may have left: nothing to log

    async def _run(self, cutter: _Cutter, run: Sequence[_Segment]) -> Mapping[Key, Tokens]:
        """The ids of each segment, by one call; nothing if they cannot be told apart."""
        text = "".join(segment.text for segment in run)
        if self._local is not None:
            ids = await self._local.encode(text)
        else:
            ids = await self._call(text, add_special=False, parse_special=True)
        if len(ids) > LONG_IDS:
            pieces = await asyncio.to_thread(cutter.split, ids, run)
        else:
            pieces = cutter.split(ids, run)
        if pieces is None:
            _log.warning("tokenizer_answer_not_split", n_segments=len(run), n_tokens=len(ids))
            return {}
        return {segment.key: piece for segment, piece in zip(run, pieces, strict=True)}

    async def _whole(self, key: Key, text: str, add_special: bool) -> Mapping[Key, Tokens]:
        if self._local is not None:
            return {key: self._framed([pack(await self._local.encode(text))], add_special)}
        return {key: await self._direct(text, add_special)}

    async def _direct(self, text: str, add_special: bool) -> Tokens:
        return pack(await self._call(text, add_special=add_special, parse_special=True))

    def _framed(self, parts: Sequence[Tokens], add_special: bool) -> Tokens:
        if not add_special or self._framing is None:
            return join(parts)
        head, tail = self._framing
        return join([pack(head), *parts, pack(tail)])

    def report(self, expected: int, reported: int) -> bool:
        """Count how many prompt tokens the engine reported against ours. False: they differ;
        call `disagreed` with the text, once it is nobody's turn to wait for it."""
        if expected == reported:
            self.n_agreed += 1
            return True
        self.n_disagreed += 1
        return False

    async def disagreed(self, text: str, *, add_special: bool) -> str | None:
        """Compare `text` with a full call and drop, for good, what made it differ.

        Returns what was dropped and why; None if the ids were right, so that the reason is
        elsewhere (a template that changed, media). Such cases are looked into less and less.
        """
        n = self._unexplained
        if n >= FULL_RECHECKS and n & (n + 1):
            self._unexplained += 1
            return None
        direct = await self._direct(text, add_special)
        reason = None
        while not await self._gives(direct, text, add_special):
            if self._local is not None:
                self._local, reason = None, "local tokenizer dropped: its ids are not the backend's"
            elif self._cutter is not None:
                self._cutter, self.specials = None, frozenset()
                reason = "segmenting dropped: the segments' ids are not those of the full text"
            else:
                reason = "cache dropped: the backend tokenizes this text otherwise than before"
                self._void()
                break
            self._void()
        if reason is None:
            self._unexplained += 1
        else:
            _log.warning("tokenizer_dropped", reason=reason, n_disagreed=self.n_disagreed)
        return reason

    async def _gives(self, direct: Tokens, text: str, add_special: bool) -> bool:
        if await self.tokenize(text, add_special=add_special) != direct:
            return False
        if self._cutter is None or self._local is not None:
            return True
        # The bad piece may have left the cache meanwhile: look at each one by itself as well.
        pieces = [segment.text for segment in self._cutter.cut(text)]
        parts = [pack(ids) for ids in await tokenize_all(self._call, pieces)]
        return self._framed(parts, add_special) == direct

    def _void(self) -> None:
        """Forget all ids; who waits for some tokenizes again."""
        self._epoch += 1
        self._cache.clear()
        self._pending.clear()


async def _value(part: Tokens | _Future) -> Tokens | None:
    # Shielded: the future belongs to all who wait for it.
    return await asyncio.shield(part) if isinstance(part, asyncio.Future) else part
