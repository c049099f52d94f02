"""One pair of addresses for all clients, which run one after the other.

The packages are installed by `make test-clients`; without them these tests are skipped.
"""

import os
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.support.clients.pair")

from tests.support.clients.pair import KEY, KEY_VARIABLE, Pair, serving  # noqa: E402 - rewritten first


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark clients' tests as `real`, and let third-party packages emit warnings."""
    for item in items:
        if item.get_closest_marker("client"):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def pair(server_argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start real servers, and a router in front of them."""
    os.environ[KEY_VARIABLE] = KEY
    with serving(server_argv, tmp_path_factory.mktemp("clients")) as found:
        yield found
