"""Index of what this host holds, by prefix hash: other hosts know prompts by their hashes alone.

Follows the slots and the snapshots a little at a time: hashing what was found on disk may take
seconds in all. Until then a quote is of what was hashed so far.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.base.prefix_hash import BLOCK, STEP, PrefixHasher, in_directory
from router.base.tokens import EMPTY, Tokens, common_prefix, count, head
from router.base.types import Namespace, SlotId, Snapshot, SnapshotId, Tenant
from router.core.fleet.fleet import Fleet
from router.core.model.slots import Phase
from router.core.model.tenancy import model_of, tenant_of

_AT_ONCE = 64 * 1024  # tokens hashed in one go, in about 2 ms
_PER_BLOCK = BLOCK // STEP


@dataclass(slots=True)
class _Entry:
    """A held prefix: how many contents begin with it, and the tokens of one of them."""

    contents: int
    tokens: Tokens


_NOTHING = _Entry(0, EMPTY)


@dataclass(slots=True)
class _Held:
    """A content that is in the index: the key of its tokens, its tokens, all its hashes."""

    namespace: tuple[str, Tenant]
    tokens: Tokens
    hashes: list[bytes]


class HeldPrefixes:
    """The index of this host. `added` and `removed` are hashes since they were last taken."""

    def __init__(self, fleet: Fleet, secret: bytes, facts_of: Callable[[Namespace], str]) -> None:
        """Start empty. `facts_of`: the part of a namespace that is equal on all hosts."""
        self._fleet = fleet
        self._secret = secret
        self._facts_of = facts_of
        self._entries: dict[bytes, _Entry] = {}
        self._held: dict[SlotId | SnapshotId, _Held] = {}
        self._slots: set[SlotId] = set()  # of `_held`
        self._hashers: dict[tuple[str, Tenant], PrefixHasher] = {}
        self._due: deque[Snapshot] = deque()
        self.added: dict[bytes, None] = {}
        self.removed: dict[bytes, None] = {}
        fleet.catalog.watch = self._changed
        for snapshot, _, _ in fleet.catalog.snapshots():
            self._due.append(snapshot)

    def __len__(self) -> int:
        return len(self._entries)

    def all(self) -> list[bytes]:
        """Return the hashes of everything that is held."""
        return list(self._entries)

    def hashes(self, namespace: Namespace, tenant: Tenant, tokens: Tokens) -> list[bytes]:
        """Return the hashes of a prompt of a namespace and tenant."""
        return self._hasher((self._facts_of(namespace), tenant)).hashes(tokens)

    def longest(self, hashes: Sequence[bytes]) -> Tokens:
        """Return the longest held tokens that a prompt with these hashes begins with.

        Of a content that ends before the next hash would come, all is taken to be in the prompt.
        """
        found, at = _NOTHING, -1
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
        n_tokens = (at + 1) * STEP
        if count(found.tokens) - n_tokens < STEP:
            return found.tokens
        return head(found.tokens, n_tokens)

    def refresh(self) -> bool:
        """Take in some of the changes; return whether there are more."""
        done = self._take_slots()
        while self._due and done < _AT_ONCE:
            snapshot = self._due.popleft()
            if snapshot.id in self._fleet.catalog:
                namespace = self._facts_of(model_of(snapshot.namespace))
                key = namespace, tenant_of(snapshot.namespace)
                self._hold(snapshot.id, key, snapshot.tokens)
                done += len(snapshot)
        return bool(self._due)

    def take_news(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that came and those that went since the last call."""
        news = list(self.added), list(self.removed)
        self.added, self.removed = {}, {}
        return news

    def _changed(self, snapshot: Snapshot, added: bool) -> None:
        if added:
            self._due.append(snapshot)
        else:
            self._drop(snapshot.id)

    def _take_slots(self) -> int:
        """Take in the slots that changed; return the number of tokens hashed."""
        done = 0
        fleet, here = self._fleet, set[SlotId]()
        for backend, info in fleet.infos.items():
            if not info.is_managed:
                continue
            facts = self._facts_of(info.namespace)
            for slot in fleet.slots.of(backend):
                here.add(slot.id)
                idle = slot.phase is Phase.IDLE
                tokens = slot.resident.tokens if idle else slot.pending
                key = facts, slot.offered_tenant
                before = self._held.get(slot.id)
                if before is None or before.tokens is not tokens or before.namespace != key:
                    done += self._hold(slot.id, key, tokens)
        for slot_id in self._slots - here:
            self._drop(slot_id)
        self._slots = here
        return done

    def _hold(self, content: SlotId | SnapshotId, key: tuple[str, Tenant], tokens: Tokens) -> int:
        """Put a content into the index in place of what it was; return the tokens hashed."""
        before = self._held.get(content)
        known: list[bytes] = []
        if before is not None and before.namespace == key and isinstance(content, SlotId):
            known = before.hashes[: common_prefix(before.tokens, tokens) // STEP]
        hashes = self._hasher(key).hashes(tokens, known)
        for at in in_directory(len(hashes)):
            self._enter(hashes[at], tokens, (at + 1) * STEP)
        if before is not None:  # after the new ones: what both have is not news
            self._leave(before)
        kept = hashes if isinstance(content, SlotId) else _only_directory(hashes)
        self._held[content] = _Held(key, tokens, kept)
        return count(tokens) - len(known) * STEP

    def _enter(self, name: bytes, tokens: Tokens, n_tokens: int) -> None:
        entry = self._entries.get(name)
        if entry is None:
            self._entries[name] = _Entry(1, tokens)
            self.added[name] = None
            self.removed.pop(name, None)
            return
        entry.contents += 1
        if count(tokens) - n_tokens < STEP:  # ends here: see `longest`
            entry.tokens = tokens

    def _drop(self, content: SlotId | SnapshotId) -> None:
        if (before := self._held.pop(content, None)) is not None:
            self._leave(before)

    def _leave(self, held: _Held) -> None:
        n_hashes = count(held.tokens) // STEP
        whole = len(held.hashes) == n_hashes
        for at, index in enumerate(in_directory(n_hashes)):
            name = held.hashes[index if whole else at]
            entry = self._entries[name]
            entry.contents -= 1
            if not entry.contents:
                del self._entries[name]
                self.added.pop(name, None)
                self.removed[name] = None

    def _hasher(self, key: tuple[str, Tenant]) -> PrefixHasher:
        if key not in self._hashers:
            self._hashers[key] = PrefixHasher(self._secret, *key)
        return self._hashers[key]


def _only_directory(hashes: list[bytes]) -> list[bytes]:
    return [hashes[at] for at in in_directory(len(hashes))]
