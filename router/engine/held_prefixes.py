"""Index of what this host holds, by prefix hash: other hosts know prompts by their hashes alone.

Follows the slots and the snapshots a little at a time: hashing what was found on disk may take
seconds in all. Until then a quote is of what was hashed so far.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from router.base.prefix_hash import BLOCK, STEP, PrefixHasher, indexed
from router.base.tokens import EMPTY, TokenPieces, Tokens, common_prefix, count, head
from router.base.types import Namespace, SlotId, Snapshot, SnapshotId, Tenant
from router.core.hosts.handout import handouts
from router.core.inventory.inventory import Inventory
from router.core.model.plan import Handout, Offered
from router.core.model.slots import Phase
from router.core.model.tenancy import model_of, tenant_of

_AT_ONCE = 64 * 1024  # tokens hashed in one go, in about 2 ms
_PER_BLOCK = BLOCK // STEP
_REFINED = 8  # contents of which is looked how much of a block they share


Content = SlotId | SnapshotId


@dataclass(slots=True)
class _Entry:
    """A held prefix: the contents that begin with it, and one of them that ends there."""

    contents: set[Content]
    ending: Content | None = None


@dataclass(slots=True)
class _Held:
    """A content that is in the index: the key of its tokens, its tokens, its hashes.

    Of a snapshot only the hashes that are in the index: `_names`.
    """

    namespace: tuple[str, Tenant]
    pieces: TokenPieces
    hashes: list[bytes]

    @property
    def tokens(self) -> Tokens:
        return self.pieces.tokens


class HeldPrefixes:
    """The index of this host."""

    def __init__(
        self,
        inventory: Inventory,
        secret: bytes,
        facts_of: Callable[[Namespace], str],
        is_same: Callable[[Namespace, Namespace], bool],
    ) -> None:
        """Start empty. `facts_of`: the part of a namespace that is equal on all hosts.

        `is_same`: whether two namespaces have the same KV.
        """
        self._is_same = is_same
        self._models: tuple[int, list[Namespace]] = 0, []  # of snapshots, by number of namespaces
        self._inventory = inventory
        self._secret = secret
        self._facts_of = facts_of
        self._entries: dict[bytes, _Entry] = {}
        self._held: dict[Content, _Held] = {}
        self._slots: set[SlotId] = set()  # of `_held`
        self._hashers: dict[tuple[str, Tenant], PrefixHasher] = {}
        self._due: deque[Snapshot] = deque()
        inventory.catalog.watch = self._changed
        for snapshot, _, _ in inventory.catalog.snapshots():
            self._due.append(snapshot)

    def __len__(self) -> int:
        return len(self._entries)

    def hashes(self, namespace: Namespace, tenant: Tenant, tokens: Tokens) -> list[bytes]:
        """Return the hashes of a prompt of a namespace and tenant."""
        return self._hasher((self._facts_of(namespace), tenant)).hashes(tokens)

    def longest(self, hashes: Sequence[bytes]) -> Tokens:
        """Return the longest held tokens that a prompt with these hashes begins with.

        Of a content that ends before the next hash would come, all is taken to be in the prompt.
        """
        found, at = None, -1
        for index in range(_PER_BLOCK - 1, len(hashes), _PER_BLOCK):
            entry = self._entries.get(hashes[index])
            if entry is None:
                break
            found, at = entry, index
        for index in range(at + 1, min(at + _PER_BLOCK, len(hashes))):
            entry = self._entries.get(hashes[index])
            if entry is None:
                break
            found, at = entry, index
        if found is None:
            return EMPTY
        if found.ending is not None:
            return self._held[found.ending].tokens
        return max((self._up_to(one, hashes, at) for one in self._some(found)), key=count)

    def _some(self, found: _Entry) -> Iterator[_Held]:
        return (self._held[one] for one in islice(found.contents, _REFINED))

    def _up_to(self, held: _Held, hashes: Sequence[bytes], at: int) -> Tokens:
        """Return the tokens shared beyond the last equal block hash."""
        n = at + 1
        beginning = head(held.tokens, (n + _PER_BLOCK - 1) * STEP)
        own = self._hasher(held.namespace).hashes(beginning, hashes[:n])
        while n < min(len(own), len(hashes)) and own[n] == hashes[n]:
            n += 1
        return head(held.tokens, n * STEP)

    def handouts(
        self,
        tokens: Tokens,
        namespace: Namespace,
        tenant: Tenant,
        n_prompt: int,
        now: float,
        *,
        saved: bool = False,
    ) -> list[Handout]:
        """Return the offers for a prompt that begins with `tokens`.

        See `handout.py`.

        `namespace`: of its model there. `saved`: only what is a snapshot.
        """
        if not tokens:
            return []
        here = {one.info.namespace for one in self._inventory.up.values()}
        models = [one for one in here.union(self._stored()) if self._is_same(one, namespace)]
        found = handouts(self._inventory, models, tenant, tokens, n_prompt, now, saved=saved)
        hasher = self._hasher((self._facts_of(namespace), tenant))
        return [
            replace(one, offered=replace(one.offered, digest=hasher.digest(one.whole)))
            if one.whole
            else one
            for one in found
        ]

    def is_of_use(
        self, offered: Offered, namespace: Namespace, tenant: Tenant, tokens: Tokens
    ) -> bool:
        """Return whether a prompt begins with an offered state, where it has to with all of it."""
        if not offered.digest:
            return True
        hasher = self._hasher((self._facts_of(namespace), tenant))
        return hasher.digest(head(tokens, offered.n_tokens)) == offered.digest

    def _stored(self) -> list[Namespace]:
        """Return the models of all snapshots, as far as their number tells that they changed.

        Each tenant has namespaces, and a quote has no time to go through ten thousand.
        """
        namespaces = self._inventory.catalog.namespaces()
        if self._models[0] != len(namespaces):
            self._models = len(namespaces), list({model_of(one): None for one in namespaces})
        return self._models[1]

    def refresh(self) -> bool:
        """Take in some of the changes; return whether there are more."""
        done = self._take_slots()
        while self._due and done < _AT_ONCE:
            snapshot = self._due.popleft()
            if snapshot.id in self._inventory.catalog:
                namespace = self._facts_of(model_of(snapshot.namespace))
                key = namespace, tenant_of(snapshot.namespace)
                self._hold(snapshot.id, key, snapshot.pieces)
                done += len(snapshot)
        return bool(self._due)

    def _changed(self, snapshot: Snapshot, added: bool) -> None:
        if added:
            self._due.append(snapshot)
        else:
            self._drop(snapshot.id)

    def _take_slots(self) -> int:
        """Take in the slots that changed; return the number of tokens hashed."""
        done = 0
        inventory, here = self._inventory, set[SlotId]()
        for backend, info in ((one.id, one.info) for one in inventory.up.values()):
            if not info.is_managed:
                continue
            facts = self._facts_of(info.namespace)
            for slot in inventory.slots.of(backend):
                here.add(slot.id)
                idle = slot.phase is Phase.IDLE
                tokens = slot.content.resident.tokens if idle else slot.work.pending
                key = facts, slot.offered_tenant
                before = self._held.get(slot.id)
                if before is None or before.tokens is not tokens or before.namespace != key:
                    done += self._hold(slot.id, key, TokenPieces(tokens))
        for slot_id in self._slots - here:
            self._drop(slot_id)
        self._slots = here
        return done

    def _hold(self, content: Content, key: tuple[str, Tenant], pieces: TokenPieces) -> int:
        """Put a content into the index in place of what it was; return the tokens hashed."""
        before, tokens = self._held.get(content), pieces.tokens
        is_slot, known = isinstance(content, SlotId), list[bytes]()
        if before is not None and before.namespace == key and is_slot:
            known = before.hashes[: common_prefix(before.tokens, tokens) // STEP]
        hashes = self._hasher(key).hashes(tokens, known)
        names = _indexed(hashes)
        for name in names:
            self._enter(name, content)
        if before is not None:
            for name in set(_names(before)).difference(names):
                self._leave(name, content)
            self._ends_no_more(before, content)
        self._held[content] = _Held(key, pieces, hashes if is_slot else names)
        if names:
            self._entries[names[-1]].ending = content
        return count(tokens) - len(known) * STEP

    def _enter(self, name: bytes, content: Content) -> None:
        if (entry := self._entries.get(name)) is not None:
            entry.contents.add(content)
            return
        self._entries[name] = _Entry({content})

    def _leave(self, name: bytes, content: Content) -> None:
        entry = self._entries[name]
        entry.contents.discard(content)
        if entry.contents:
            return
        del self._entries[name]

    def _ends_no_more(self, held: _Held, content: Content) -> None:
        """Note that a content is no longer what it was: another one may end at the same hash."""
        last = held.hashes[-1] if held.hashes else b""
        entry = self._entries.get(last)
        if entry is None or entry.ending != content:
            return
        others = (one for one in entry.contents if one != content)
        entry.ending = next((one for one in others if self._held[one].hashes[-1] == last), None)

    def _drop(self, content: Content) -> None:
        if (before := self._held.pop(content, None)) is not None:
            self._ends_no_more(before, content)
            for name in _names(before):
                self._leave(name, content)

    def _hasher(self, key: tuple[str, Tenant]) -> PrefixHasher:
        if key not in self._hashers:
            self._hashers[key] = PrefixHasher(self._secret, *key)
        return self._hashers[key]


def _names(held: _Held) -> list[bytes]:
    """Return the hashes of a content that are in the index."""
    whole = len(held.hashes) == held.pieces.n_tokens // STEP
    return _indexed(held.hashes) if whole else held.hashes


def _indexed(hashes: list[bytes]) -> list[bytes]:
    return [hashes[at] for at in indexed(len(hashes))]
