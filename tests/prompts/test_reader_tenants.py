"""One reader for each tenant, of whom clients may make up any number by their salts."""

from typing import cast

from router.base.types import Tenant
from router.prompts import reader as readers
from router.prompts.reader import PromptReader, Vocabulary


class _Vocabulary:
    tokenizer = None


def test_only_the_latest_readers_are_kept() -> None:
    reader = PromptReader(cast(Vocabulary, _Vocabulary()))
    first = reader.of(Tenant("alice"))
    for n in range(readers._READERS - 1):
        reader.of(Tenant(f"alice~{n}"))
        assert reader.of(Tenant("alice")) is first
    for n in range(2 * readers._READERS):
        reader.of(Tenant(f"bob~{n}"))
    assert len(reader._others) == readers._READERS
    assert reader.of(Tenant("alice")) is not first
