"""Owners of state: slots and jobs change themselves, and questions change nothing."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.core.model.backend import LeaseHolder, Slot
from router.core.model.jobs import ProbeLoan, RequestJob, SaveJob, SlotWatch
from tests.support.paths import ROOT

JOBS: tuple[Any, ...] = (LeaseHolder, RequestJob, SaveJob, ProbeLoan, SlotWatch)
OWNERS: dict[Any, str] = dict.fromkeys(JOBS, "router/core/model/jobs.py") | dict.fromkeys(
    (Slot, LeaseHolder), "router/core/model/backend.py"
)
# Fields with names that others have as well are left to the review.
COMMON = {
    "id",
    "backend",
    "own",
    "request",
    "plan",
    "phase",
    "tenant",
    "since",
    "waited_s",
    "prefilled",
}
FIELDS = {name for kind in OWNERS for name in kind.__dataclass_fields__} - COMMON
OTHERS = ("self",)
CONTAINERS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "update"),
}
QUESTIONS = ("is_", "has_", "can_", "may_", "must_", "needs_", "wants", "fits", "serves", "holds")


def changers(kind: type) -> set[str]:
    """Return the methods of a class that change it: those that return None or a slot."""
    tree = ast.parse(inspect.getsource(kind))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Constant | ast.Name)
        and ast.unparse(node.returns) in {"None", "'Slot'"}
        and not node.name.startswith("__")
    }


CHANGERS = {name for kind in OWNERS for name in changers(kind)} - {"_check"}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns to or deletes, with the parts of tuples."""
    match node:
        case ast.Assign(targets=found) | ast.Delete(targets=found):
            todo: list[ast.expr] = list(found)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            todo = [target]
        case _:
            return
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Tuple | ast.List):
            todo += one.elts
        else:
            yield one


def field_changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each field that code changes from outside its object."""
    for node in ast.walk(tree):
        changed = list(targets(node))
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in CONTAINERS:
            changed.append(called.value)
        for target in changed:
            at = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(at, ast.Attribute) and not ast.unparse(at.value).endswith(OTHERS):
                yield target.lineno, at.attr


@pytest.mark.parametrize("folder", ["router/core", "router/engine", "router/web", "router/tools"])
def test_slots_and_jobs_change_themselves(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules(folder)
        if str(path.relative_to(ROOT)) not in OWNERS.values()
        for line, name in field_changes(ast.parse(path.read_text()))
        if name in FIELDS
    ]
    assert found == []


def side_effects(function: ast.FunctionDef) -> Iterator[str]:
    """Yield what a function changes beside its own variables."""
    for node in ast.walk(function):
        for target in targets(node):
            if isinstance(target, ast.Attribute | ast.Subscript):
                yield ast.unparse(target)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if node.func.attr in CHANGERS or (
                node.func.attr in CONTAINERS and isinstance(of, ast.Attribute)
            ):
                yield ast.unparse(node.func)


def test_questions_change_nothing() -> None:
    """A function that returns a bool, or has the name of a question, changes no state."""
    found = []
    for path in modules("router/core"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            returns = ast.unparse(node.returns) if node.returns is not None else ""
            if returns == "bool" or node.name.lstrip("_").startswith(QUESTIONS):
                found += [f"{path.name}: {node.name}: {what}" for what in side_effects(node)]
    assert found == []


def test_the_tests_above_can_fail() -> None:
    bad = ast.parse(
        "def is_x(job):\n    job.steps.clear()\n    job.claim, a = 1, 2\n    return True"
    )
    assert {name for _, name in field_changes(bad)} == {"steps", "claim"}
    function = bad.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert set(side_effects(function)) == {"job.steps.clear", "job.claim"}
    assert {"hold", "do", "note_use", "lease"} <= CHANGERS


def test_only_the_engine_reaches_the_state() -> None:
    """Others read `engine.state`, and have no way to tell the scheduler a fact."""
    owners = ("router/core/", "router/engine/", "router/assembly/scheduler")
    found = [
        str(path.relative_to(ROOT))
        for path in modules("router")
        if not str(path.relative_to(ROOT)).startswith(owners)
        and re.search(r"\._scheduler\b|engine\.scheduler\b", path.read_text())
    ]
    assert found == []
