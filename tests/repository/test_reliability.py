"""The table of faults in docs/reliability.md counts the tests that ran."""

import pytest

from tests.reliability import BEGIN, END, HEAD, PAGE, Collector, written

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.fault("killed", "idle")
@pytest.mark.parametrize("n", [1, 2])
def test_two(n, record_property):
    record_property("client", "an answer" if n == 1 else "503")

@pytest.mark.fault("killed", "idle", client="an answer")
def test_bad():
    assert False

@pytest.mark.fault("hung", "idle")
@pytest.mark.fault("hung", "busy")
def test_skipped():
    pytest.skip("not here")

@pytest.fixture
def breaks():
    yield
    assert False

@pytest.mark.fault("killed", "after it passed")
def test_teardown(breaks):
    pass

@pytest.mark.fault("killed", "before it began")
def test_setup(no_such_fixture):
    pass

def test_of_something_else():
    pass
"""


def test_counts_what_ran(pytester: pytest.Pytester) -> None:
    pytester.makeini(
        "[pytest]\nmarkers = fault(what, when, client=None): a row\n"
        "asyncio_default_fixture_loop_scope = function"
    )
    pytester.makepyfile(test_it=TESTS)
    collector = Collector()
    pytester.runpytest_inprocess("-p", "no:cacheprovider", plugins=[collector])

    assert collector.table().removeprefix(HEAD).splitlines() == [
        "| killed | idle | 2 of 3 | an answer; 503 | test_it.py |",
        "| hung | busy | 0 of 0 (1 not run here) |  | test_it.py |",
        "| hung | idle | 0 of 0 (1 not run here) |  | test_it.py |",
        "| killed | after it passed | 0 of 1 |  | test_it.py |",
        "| killed | before it began | 0 of 1 |  | test_it.py |",
    ]


def test_page_has_a_place_for_the_table() -> None:
    page = written(PAGE.read_text(), "rows\n")
    assert f"{BEGIN}\nrows\n{END}" in page
    assert written(page, "rows\n") == page
    with pytest.raises(ValueError, match="has no <!--"):
        written("another page", "rows\n")
