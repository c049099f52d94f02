"""Who may import whom, what may happen at import, how long a file may be.

docs/architecture.md explains the layers; this keeps them.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROUTER = ROOT / "router"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROUTER.rglob("*.py"))
}

BASE = {"router.types", "router.errors", "router.tokens", "router.frozen"}
# What a decision may be made of: no clock, no chance, no loop, no file, no log.
CORE_STDLIB = {
    "collections",
    "dataclasses",
    "enum",
    "typing",
    "bisect",
    "heapq",
    "itertools",
    "math",
}
# layer: prefixes of modules of ours that it may import
LAYERS: dict[str, set[str]] = {
    "router.frozen": set(),
    "router.types": {"router.tokens", "router.frozen"},
    "router.errors": {"router.types"},
    "router.tokens": set(),
    "router.ports": {"router.types", "router.tokens", "router.errors"},
    "router.keys": set(),
    "router.explain": {
        "router.types",
        "router.terminal",
        "router.console.client",
    },
    "router.tasks": set(),
    "router.terminal": set(),
    "router.turnstile": {"router.ports"},
    "router.core": BASE | {"router.core"},
    "router.kvfile": BASE | {"router.kvfile"},
    # Says its version to others.
    "router.adapters.tracing": BASE | {"router", "router.ports", "router.adapters"},
    "router.adapters": BASE | {"router.ports", "router.kvfile", "router.tasks", "router.adapters"},
    # To keep a decision: its data.
    "router.adapters.journal": BASE | {"router.core.plan"},
    "router.watching": BASE | {"router.ports"},
    "router.placing": BASE | {"router.core", "router.ports", "router.watching"},
    "router.transfers": BASE | {"router.core", "router.ports"},
    "router.engine": BASE
    | {"router.core", "router.ports", "router.tasks", "router.transfers", "router.watching"}
    | {"router.placing", "router.turnstile"},
    "router.web": BASE
    | {"router.engine", "router.ports", "router.adapters", "router.web"}
    # Sizes and times in a query are written as in the configuration.
    | {"router.config_load", "router.config_values", "router.keys", "router.turnstile"}
    # To show a decision, and the fleet as it is: their data.
    | {"router.core.plan", "router.core.catalog", "router.core.jobs"}
    | {"router.core.queue", "router.core.slots", "router.core.tenancy"},
    # Asks a router over HTTP, like anybody else.
    "router.console": {"router.console", "router.terminal"},
    # One enum: the names of the policies are said once.
    "router.config": {
        "router.types",
        "router.core.policy",
        "router.config_auth",
        "router.config_edge",
        "router.config_load",
        "router.config_values",
    },
    "router.config_edge": {"router.config_load", "router.config_values"},
    "router.config_start": {
        "router.adapters.local_tokenizer",
        "router.adapters.tracing",
        "router.config",
        "router.config_load",
        "router.tls",
    },
    "router.config_summary": {
        "router.config",
        "router.config_load",
        "router.config_start",
        "router.config_values",
        "router.core.policy",
        "router.tls",
    },
    "router.config_parts": {"router.types", "router.config", "router.core", "router.web"},
    "router.config_changes": {
        "router.types",
        "router.config",
        "router.config_values",
        "router.core.policy",
    },
    "router.config_auth": {"router.config_load", "router.config_values", "router.keys"},
    "router.config_load": {"router.config_values"},
    "router.config_values": set(),
    "router.logs": {"router.config"},
    "router.tls": set(),
    "router.vocabularies": BASE | {"router.adapters", "router.config", "router.tasks"},
    # One backend: what is made for it, and how it ends.
    "router.backends": BASE
    | {"router.adapters", "router.config", "router.core.policy", "router.engine", "router.tasks"},
    "router.reload": BASE
    | {"router.backends", "router.config", "router.config_changes", "router.ports"},
    # The scheduler as it is, and everything else made up; the command reads sizes and times.
    "router.simulate": BASE
    | {"router.core", "router.simulate", "router.config_values", "router.terminal"},
}
# These put things together and may know all.
BUILDERS = ("router.main", "router.cli", "router.demo", "router.doctor", "router.__main__")
MAX_LINES = 420

# Modules without a test file of their own name, and what tests them instead.
TESTED_ELSEWHERE = {
    "router": "a docstring",
    "router.types": "data; used by every test",
    "router.ports": "protocols; mypy",
    "router.main": "tests/fleet.py builds every router with it",
    "router.core.scheduler": "tests/core/test_scheduler_machine.py",
    "router.core.planner": "tests/core/test_scheduler_machine.py, tests/web/test_storm.py",
    "router.core.fleet": "data; tests/core/test_planner.py",
    "router.core.ask": "tests/core/test_planner.py",
    "router.core.candidates": "tests/core/test_planner.py",
    "router.core.later": "tests/core/test_planner.py",
    "router.core.displacement": "tests/core/test_planner.py",
    "router.core.baseline": "tests/core/test_planner_policies.py",
    "router.core.gauges": "tests/adapters/test_telemetry.py; metrics of every router",
    "router.core.account": "tests/web/test_storm.py, to the token",
    "router.core.state": "tests/core: the scheduler's tests",
    "router.core.effects": "data; the scheduler's tests",
    "router.core.events": "data; the scheduler's tests",
    "router.core.jobs": "data; the scheduler's tests",
    "router.core.steps": "the scheduler's tests",
    "router.core.grants": "the scheduler's tests",
    "router.core.endings": "the scheduler's tests",
    "router.core.attach": "the scheduler's tests",
    "router.core.background": "the scheduler's tests",
    "router.core.plan": "data; tests/core/test_planner.py",
    "router.core.policy": "data; tests/core/test_planner.py",
    "router.backends": "tests/test_reload.py, tests/web/test_operations.py",
    "router.config_changes": "tests/test_reload.py",
    "router.config_parts": "tests/test_reload.py; every test with a router",
    "router.logs": "tests/test_reload.py, tests/test_cli.py",
    "router.vocabularies": "tests/test_reload.py; every test with a router",
    "router.config_start": "tests/test_doctor_findings.py, tests/test_cli.py, tests/test_tls.py",
    "router.config_edge": "tests/test_config.py, tests/web/test_limits.py",
    "router.config_load": "tests/test_config.py",
    "router.config_summary": "tests/test_config.py",
    "router.config_values": "tests/test_config.py",
    "router.kvfile.head": "tests/test_kvfile.py",
    "router.kvfile.layout": "tests/test_kvfile.py",
    "router.kvfile.blocks": "tests/test_kvfile.py",
    "router.kvfile.rewrite": "tests/test_kvfile_rewrite.py",
    "router.adapters.engine_metrics": "tests/adapters/test_telemetry.py",
    "router.adapters.clock": "two lines",
    "router.adapters.http1": "tests/adapters/test_llama_client.py",
    "router.adapters.anthropic_wire": "tests/test_conversions.py",
    "router.adapters.responses_wire": "tests/test_conversions.py",
    "router.adapters.reply_readers": "tests/test_llama_reply.py",
    "router.adapters.journal": "tests/web/test_live.py",
    "router.adapters.kv_copy": "tests/test_kvfile_rewrite.py, tests/test_kv_store.py",
    "router.adapters.kv_files": "tests/test_kv_store.py",
    "router.adapters.local_tokenizer": "tests/test_tokenizer.py",
    "router.adapters.specials": "tests/test_tokenizer.py",
    "router.adapters.segments": "tests/test_tokenizer.py",
    "router.doctor_facts": "tests/test_doctor.py",
    "router.doctor_fleet": "tests/test_doctor.py",
    "router.terminal": "tests/test_cli.py, tests/test_doctor.py",
    "router.demo.chat": "tests/test_demo.py",
    "router.demo.conversation": "tests/test_demo.py",
    "router.demo.table": "tests/test_demo.py",
    "router.web.settings": "data; tests/test_reload.py",
    "router.console.client": "tests/console/test_operate.py",
    "router.web.plans": "tests/web/test_admin.py, tests/web/test_requests.py",
    "router.web.app": "tests/web: test_transparency.py, test_forbidden.py, test_bad_input.py",
    "router.web.completions": "tests/web: test_faults.py, test_cancellation.py",
    "router.web.replies": "tests/web/test_bad_input.py",
    "router.web.listener": "tests/web/test_limits.py",
    "router.web.own": "tests/web/test_operators.py, tests/test_openapi.py",
    "router.web.strict": "tests/web/test_smuggling.py",
    "router.web.directory": "tests/web/test_bad_input.py, two models",
    "router.demo.model": "downloads a model; the demo's own tests",
    "router.simulate.asks": "data; tests/simulate/test_simulator.py",
    "router.simulate.fleet": "data; tests/simulate/test_simulator.py",
    "router.simulate.hardware": "data; tests/simulate/test_server.py",
    "router.simulate.losses": "tests/simulate/test_simulator.py",
    "router.simulate.measure": "data; tests/simulate/test_simulator.py, test_experiment.py",
    "router.demo.prebuilt": "runs in every test with a real server",
}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, also inside functions; `from a import b` may mean a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def layer_of(module: str) -> str | None:
    matches = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return max(matches, key=len, default=None)


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in allowed)


@pytest.mark.parametrize("module", MODULES)
def test_layers(module: str) -> None:
    layer = layer_of(module)
    if layer is None:
        assert module == "router" or module.startswith(BUILDERS), f"{module} belongs to no layer"
        return
    ours = {name for name in imports(MODULES[module]) if name.split(".")[0] == "router"}

    assert {name for name in ours if not within(name, LAYERS[layer])} == set()


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("router.core")])
def test_core_is_pure(module: str) -> None:
    """Told what happened, it answers what to do: nothing else gets in, and nothing waits."""
    others = {name.split(".")[0] for name in imports(MODULES[module])} - {"router"}
    tree = ast.parse(MODULES[module].read_text())

    assert others <= CORE_STDLIB
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.AsyncFunctionDef | ast.Await)]


@pytest.mark.parametrize("module", MODULES)
def test_files_are_short(module: str) -> None:
    path = MODULES[module]
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_they_are_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_text()))


@pytest.mark.parametrize("module", [m for m in MODULES if m != "router.tasks"])
def test_tasks_are_spawned_by_name(module: str) -> None:
    """A task of a TaskGroup has an owner already; one of the loop has not."""
    calls = [
        node.attr
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute)
        and (isinstance(node.value, ast.Call) or ast.unparse(node.value) in ("asyncio", "loop"))
    ]
    assert not {"create_task", "ensure_future"} & set(calls)


def test_every_module_is_tested_somewhere() -> None:
    """By a file of its name, or it stands in TESTED_ELSEWHERE with the reason."""
    names = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}
    tested = {module for module in MODULES if module.rpartition(".")[2] in names}
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}

    assert set(MODULES) - tested - packages - set(TESTED_ELSEWHERE) == set()
    assert {name for name in TESTED_ELSEWHERE if name not in MODULES} == set()


CHECK = """
import asyncio, sys, threading

async def main():
    import importlib
    from prometheus_client import REGISTRY
    before = {name for metric in REGISTRY.collect() for name in [metric.name]}
    threads = threading.active_count()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    assert not tasks, tasks
    assert threading.active_count() == threads, threading.enumerate()
    after = {metric.name for metric in REGISTRY.collect()}
    assert after == before, after - before

asyncio.run(main())
"""


def test_importing_starts_nothing() -> None:
    """No task, thread or metric comes into being because somebody imported a module."""
    # The prebuilt server is a program; importing it is running it.
    names = [name for name in MODULES if not name.endswith(("__main__", "demo.prebuilt"))]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
