"""Tokenize texts as one backend does, without asking the backend for the same text twice.

Cuts texts at special tokens, caches the ids of the segments and proves that cutting is harmless
for the model. Knows nothing of HTTP, messages or slots: `POST /tokenize` is an argument.

Why a cut is possible: llama.cpp first splits a text at special tokens, then tokenizes each
fragment by itself. A fragment's ids depend only on its text and on what precedes it: a special
token, or the start of the text (`tokenizer_st_partition`, `tokenize` in src/llama-vocab.cpp,
b11434). Therefore "special token + text up to the next one" gives the same ids anywhere, and each
message of a conversation is tokenized once. The exception: a token that strips white space to its
left.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import structlog

from router.base.errors import BackendError
from router.base.ports import Spawn
from router.base.tokens import EMPTY, Tokens, join, pack
from router.base.types import NO_TENANT, Tenant
from router.prompts.local_tokenizer import (
    INLINE_CHARS,
    LocalTokenizer,
    probes_alone,
    probes_together,
)
from router.prompts.special_tokens import (
    Framing,
    TokenizeCall,
    learn_framing,
    overlapping,
    tokenize_all,
    without,
)
from router.prompts.text_segments import Cutter, Segment, key_of, runs

DEFAULT_CACHE_BYTES = 64 << 20
LONG_TEXT = 256 * 1024  # characters; cutting and hashing this much chat text takes 1 ms
LONG_IDS = 64 * 1024  # ids; finding the special tokens among them and packing takes 5 ms
ENTRY_BYTES = 256  # of a cache entry beyond its ids, rounded up (measured: 157 and a short key)
MAX_SEGMENTS = 16 * 1024  # a text with more is tokenized whole: looping over them takes time
MAX_ODD_TEXTS = 8  # texts that the local tokenizer may get wrong before it is dropped
FULL_RECHECKS = 4  # unexplained mismatches that are all rechecked; then only the 8th, 16th, ...

_log = structlog.get_logger(__name__)

Key = str | bytes | tuple[bool | str, str | bytes]
_Future = asyncio.Future[Tokens | None]  # None: the ids did not split
_Work = Callable[[], Awaitable[Mapping[Key, Tokens]]]


class _Cache:
    """An LRU cache of ids, bounded in bytes. Keys are short texts and digests, not prompts."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[Key, Tokens] = OrderedDict()
        self.size_bytes = 0

    def get(self, key: Key) -> Tokens | None:
        tokens = self._entries.get(key)
        if tokens is not None:
            self._entries.move_to_end(key)
        return tokens

    def put(self, key: Key, tokens: Tokens, *, anew: bool = False) -> None:
        """Keep ids for a key that has none, or `anew` whatever it had before."""
        if anew and (old := self._entries.pop(key, None)) is not None:
            self.size_bytes -= len(old) + ENTRY_BYTES
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


async def _survives_cut(call: TokenizeCall, cutter: Cutter, probes: Sequence[str]) -> list[bool]:
    """Return for each probe whether its ids are those of its segments, tokenized singly."""
    cuts = [[segment.text for segment in cutter.cut(probe)] for probe in probes]
    texts = list(dict.fromkeys([*probes, *(text for cut in cuts for text in cut)]))
    ids = dict(zip(texts, await tokenize_all(call, texts), strict=True))
    return [
        ids[probe] == [token for text in cut for token in ids[text]]
        for probe, cut in zip(probes, cuts, strict=True)
    ]


class SegmentTokenizer:
    """Text to ids, as one backend does it; for one event loop. Raises only BackendError.

    Exact from the first call: until `self_check` has proved the cut (and the local tokenizer, if
    given), every text is one full call. `specials` maps strings to ids.
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
        self._cutter: Cutter | None = None  # None: whole texts
        self._framing: Framing | None = None
        self._local: LocalTokenizer | None = None
        self._epoch = 0  # rises when a part is dropped: ids from before are void
        self._unexplained = 0
        self._n_odd_texts = 0
        self.specials: frozenset[str] = frozenset()  # the special tokens that texts are cut at
        self.n_disagreed = 0

    @property
    def segmenting(self) -> bool:
        return self._cutter is not None

    @property
    def uses_local(self) -> bool:
        return self._local is not None

    async def self_check(self, local: LocalTokenizer | None = None) -> str | None:
        """Compare the cut, then `local`, with full calls; use those that agree. Call at attach.

        `try_local` does the second part, at any time.

        Returns the reason why texts are not cut; None if they are. Special tokens that fail by
        themselves are dropped.
        """
        reason = await self._prove_cut()
        if local is not None:
            await self.try_local(local)
        if reason is not None:
            _log.warning("tokenizer_not_segmenting", reason=reason)
        return reason

    async def try_local(self, local: LocalTokenizer) -> None:
        """Use a local tokenizer from now on, if it agrees with full calls. Raises BackendError."""
        if self._framing is None:
            return
        if await self._local_agrees(local):
            self._local = local
        else:
            _log.warning(
                "local_tokenizer_refused", reason="its token ids differ from the backend's"
            )

    async def _prove_cut(self) -> str | None:
        self._framing = await learn_framing(self._call)
        if self._framing is None:
            return "the tokens that add_special adds cannot be told from the text"
        specials = without(self._found, overlapping(self._found))
        probes = [(name, probe) for name in specials for probe in probes_alone(name)]
        bad: set[str] = set()
        for name in specials:
            mine = [probe for owner, probe in probes if owner == name]
            cutter = Cutter({name: specials[name]})
            if not all(await _survives_cut(self._call, cutter, mine)):
                bad.add(name)
        specials = without(specials, bad)
        if not specials:
            return "there is no special token to cut texts at"
        cutter = Cutter(specials)
        texts = probes_together(list(specials))
        for text, ok in zip(texts, await _survives_cut(self._call, cutter, texts), strict=True):
            if not ok:
                return f"probe of {len(text)} characters: segments and full call differ"
        for text, ids in zip(texts, await tokenize_all(self._call, texts), strict=True):
            for add_special in (False, True):
                direct = await self._direct(text, add_special)
                if self._framed([pack(ids)], add_special) != direct:
                    return f"probe of {len(text)} characters: add_special adds other tokens"
        self._cutter, self.specials = cutter, frozenset(specials)
        return None

    async def _local_agrees(self, local: LocalTokenizer) -> bool:
        for text in probes_together(list(self._found)):
            pieces = self._cutter.cut(text) if self._cutter else []
            whole = pack(await local.encode(text))
            parts = [pack(await local.encode(piece.text)) for piece in pieces] or [whole]
            direct = await self._direct(text, add_special=True)
            if not self._framed([whole], True) == self._framed(parts, True) == direct:
                return False
        return True

    async def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a long text has at least; 0 where that is not known."""
        if len(text) <= LONG_TEXT or self._local is None:
            return 0
        return await asyncio.to_thread(self._local.least_tokens, text)

    async def tokenize(self, text: str, *, add_special: bool, tenant: Tenant = NO_TENANT) -> Tokens:
        """Return the ids of `text`, with special tokens parsed.

        `add_special` adds the tokens that the model wants around a text. Each tenant has its own
        cache entries. Cancelling the caller does not stop the work, which goes on for the next
        caller. Raises BackendError; a failure is not cached.
        """
        while True:
            epoch = self._epoch
            tokens = await self._tokenize(text, add_special, tenant)
            if epoch == self._epoch:
                return tokens

    async def _tokenize(self, text: str, add_special: bool, tenant: Tenant) -> Tokens:
        cutter, long = self._cutter, len(text) > LONG_TEXT
        if cutter is not None:
            if long:
                segments = await asyncio.to_thread(cutter.cut, text, tenant)
            else:
                segments = cutter.cut(text, tenant)
            if len(segments) <= MAX_SEGMENTS:
                parts = await self._parts(cutter, segments)
                if parts is not None:
                    return self._framed(parts, add_special)
                # Do not cache an answer that does not split into its segments.
                return await self._direct(text, add_special)
        name = partial(key_of, text, tenant)
        key = (add_special, await asyncio.to_thread(name) if long else name())
        return await self._once(key, partial(self._whole, text, add_special))

    async def tokenize_plain(self, text: str, tenant: Tenant = NO_TENANT) -> Tokens:
        """Return the ids of `text`, in which a special token's name is text like any other.

        The backend tokenizes, once for each text. Raises BackendError; a failure is not cached.
        """
        if not text:
            return EMPTY
        work = partial(self._direct, text, False, parse_special=False)
        return await self._once(("plain", key_of(text, tenant)), work)

    async def _once(self, key: Key, work: Callable[[], Awaitable[Tokens]]) -> Tokens:
        """Return the ids of a whole text: cached, awaited with other callers, or from `work`."""

        async def found() -> Mapping[Key, Tokens]:
            return {key: await work()}

        known = self._known(key)
        if known is None:
            known = self._pending[key] = asyncio.get_running_loop().create_future()
            self._spawn(self._fill({key: known}, found), name="tokenize")
        tokens = await _value(known)
        return EMPTY if tokens is None else tokens

    async def _parts(self, cutter: Cutter, segments: Sequence[Segment]) -> list[Tokens] | None:
        known = [self._known(segment.key) for segment in segments]
        ready = [part for part in known if isinstance(part, bytes)]
        if len(ready) == len(known):
            return ready
        missing: dict[Key, int] = {}
        for index, part in enumerate(known):
            if part is None:
                missing.setdefault(segments[index].key, index)
        found: dict[Key, Tokens | _Future] = {}
        for start, stop in runs(segments, list(missing.values())):
            run = segments[start:stop]
            text = "".join(segment.text for segment in run)
            local = self._local
            if local is not None and len(text) <= INLINE_CHARS:
                # No await here: no caller can be cancelled or ask for the same text meanwhile.
                pieces = self._split(cutter, local.encode_now(text), run)
                if pieces is None:
                    return None
                for segment, piece in zip(run, pieces, strict=True):
                    found[segment.key] = piece
                    self._cache.put(segment.key, piece)
                continue
            owned: dict[Key, _Future] = {}
            for segment in run:
                if missing.get(segment.key, -1) >= start and segment.key not in owned:
                    owned[segment.key] = asyncio.get_running_loop().create_future()
            found.update(owned)
            self._pending.update(owned)
            self._spawn(self._fill(owned, partial(self._run, cutter, run, text)), name="tokenize")
        ready = []
        for segment, part in zip(segments, known, strict=True):
            tokens = await _value(found[segment.key] if part is None else part)
            if tokens is None:
                return None
            ready.append(tokens)
        return ready

    def _known(self, key: Key) -> Tokens | _Future | None:
        tokens = self._cache.get(key)
        return self._pending.get(key) if tokens is None else tokens

    async def _fill(self, owned: Mapping[Key, _Future], work: _Work) -> None:
        """Do `work` and pass its results to all waiting callers.

        Runs as a task of its own, so that the first caller may be cancelled. On every path each
        future of `owned` is done at the end.
        """
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
                    future.exception()  # all callers may be cancelled: nothing to log

    async def _run(self, cutter: Cutter, run: Sequence[Segment], text: str) -> Mapping[Key, Tokens]:
        """Return the ids of each segment from one call; empty if the ids do not split."""
        if self._local is not None:
            ids = await self._local.encode(text)
        else:
            ids = await self._call(text, add_special=False, parse_special=True)
        if len(ids) > LONG_IDS:
            pieces = await asyncio.to_thread(self._split, cutter, ids, run)
        else:
            pieces = self._split(cutter, ids, run)
        if pieces is None:
            return {}
        return {segment.key: piece for segment, piece in zip(run, pieces, strict=True)}

    def _split(
        self, cutter: Cutter, ids: Sequence[int], run: Sequence[Segment]
    ) -> list[Tokens] | None:
        pieces = cutter.split(ids, run)
        if pieces is None:
            _log.warning("tokenizer_answer_not_split", n_segments=len(run), n_tokens=len(ids))
        return pieces

    async def _whole(self, text: str, add_special: bool) -> Tokens:
        if self._local is None:
            return await self._direct(text, add_special)
        return self._framed([await _packed(await self._local.encode(text))], add_special)

    async def _direct(self, text: str, add_special: bool, *, parse_special: bool = True) -> Tokens:
        ids = await self._call(text, add_special=add_special, parse_special=parse_special)
        return await _packed(ids)

    def _framed(self, parts: Sequence[Tokens], add_special: bool) -> Tokens:
        if not add_special or self._framing is None:
            return join(parts)
        head, tail = self._framing
        return join([head, *parts, tail])

    def report(self, expected: int, reported: int) -> bool:
        """Return whether the engine's number of prompt tokens is as expected; count others.

        On False, call `disagreed` with the text, once no request waits for it.
        """
        self.n_disagreed += expected != reported
        return expected == reported

    async def disagreed(
        self, text: str, *, add_special: bool, tenant: Tenant = NO_TENANT
    ) -> str | None:
        """Compare `text` with a full call and drop, for good, the part that made it differ.

        For the first few texts of which the local tokenizer makes other ids, the right ids are
        cached instead. Returns what was wrong. None means that the ids were right and the cause is
        elsewhere (a template that changed, media). Such cases are rechecked less and less often;
        None also means that the check was skipped.
        """
        n = self._unexplained
        if n >= FULL_RECHECKS and n & (n + 1):
            self._unexplained += 1
            return None
        direct = await self._direct(text, add_special)
        if await self._put_right(direct, text, add_special, tenant):
            return "the local tokenizer makes other ids of this text: the backend's are kept"
        reason = None
        while not await self._gives(direct, text, add_special, tenant):
            if self._local is not None:
                self._local, reason = (
                    None,
                    "local tokenizer dropped: its token ids differ from the backend's",
                )
            elif self._cutter is not None:
                self._cutter, self.specials = None, frozenset()
                reason = "segmenting dropped: the segments' ids are not those of the full text"
            else:
                reason = "cache dropped: the backend now tokenizes this text differently"
                self._void()
                break
            self._void()
        if reason is None:
            self._unexplained += 1
        else:
            _log.warning("tokenizer_dropped", reason=reason, n_disagreed=self.n_disagreed)
        return reason

    async def _put_right(
        self, direct: Tokens, text: str, add_special: bool, tenant: Tenant
    ) -> bool:
        """Keep the backend's ids of the segments that the local tokenizer gets wrong.

        False: there are none, they do not explain the difference, or there were too many before.
        """
        local, cutter = self._local, self._cutter
        if local is None or cutter is None or self._n_odd_texts == MAX_ODD_TEXTS:
            return False
        pieces = cutter.cut(text, tenant)
        parts = [pack(ids) for ids in await tokenize_all(self._call, [p.text for p in pieces])]
        if self._framed(parts, add_special) != direct:
            return False
        wrong = [
            (piece.key, part)
            for piece, part in zip(pieces, parts, strict=True)
            if pack(await local.encode(piece.text)) != part
        ]
        for key, part in wrong:
            self._cache.put(key, part, anew=True)
        self._n_odd_texts += bool(wrong)
        return bool(wrong)

    async def _gives(self, direct: Tokens, text: str, add_special: bool, tenant: Tenant) -> bool:
        if await self.tokenize(text, add_special=add_special, tenant=tenant) != direct:
            return False
        if self._cutter is None or self._local is not None:
            return True
        # The bad segment may have been evicted meanwhile: compare each one by itself as well.
        pieces = [segment.text for segment in self._cutter.cut(text)]
        parts = [pack(ids) for ids in await tokenize_all(self._call, pieces)]
        return self._framed(parts, add_special) == direct

    def forget(self) -> None:
        """Forget the ids of all texts."""
        self._cache.clear()

    def _void(self) -> None:
        """Drop all cached ids; callers that wait for some tokenize again."""
        self._epoch += 1
        self.forget()
        self._pending.clear()


async def _value(part: Tokens | _Future) -> Tokens | None:
    # Shielded: other callers may wait for the same future.
    return await asyncio.shield(part) if isinstance(part, asyncio.Future) else part


async def _packed(ids: list[int]) -> Tokens:
    return pack(ids) if len(ids) <= LONG_IDS else await asyncio.to_thread(pack, ids)
