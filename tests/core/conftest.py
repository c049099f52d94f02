"""Branch saves are off in tests of other parts of the core: each would add a step to them."""

import pytest

from router.core.execution import preparation


@pytest.fixture(autouse=True)
def _branch_saves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn branch saves off, but for modules that say `BRANCH_SAVES = True`."""
    if not getattr(request.module, "BRANCH_SAVES", False):
        monkeypatch.setattr(preparation, "branch_save_pays", lambda *_: False)
