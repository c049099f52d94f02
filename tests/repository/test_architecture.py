"""Rules: imports between packages, effects of an import, sizes of modules and folders.

docs/architecture.md explains the packages, and these tests enforce its rules. Each test lists all
offenders.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from tests.support.paths import ROOT

ROUTER = ROOT / "router"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROUTER.rglob("*.py"))
}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}

# Other packages that the modules of a package may import. The version is in `router`.
ALLOWED = {
    "router.base": "",
    "router.config": "base core.model",
    "router.core": "base",
    "router.store": "base",
    "router.llama": "base store",
    "router.prompts": "base llama",
    "router.telemetry": "base llama config core",  # it keeps plans, and reads the state
    "router.engine": "base core",
    "router.hosts": "base core.model llama",
    "router.web": "base config core.model engine hosts llama prompts store telemetry",
    "router.servers": "base config",
    "router.assembly": "base config core engine hosts llama prompts servers store telemetry web",
    "router.tools": "base config core engine hosts llama prompts servers store telemetry web"
    " assembly",
}
# Within a package: each folder may import those before it.
ORDERS = (
    (
        "router.core.model",
        "router.core.inventory",
        "router.core.planning",
        "router.core.hosts",
        "router.core.reporting",
        "router.core.execution",
        "router.core.admission",
        "router.core",
    ),
    ("router.store.format", "router.store"),
    ("router.llama", "router.llama.attach"),
    ("router.web.server", "router.web.api", "router.web.fleet", "router.web.admin", "router.web"),
)
# Modules for decisions beside our own: no clock, no chance, no loop, no file, no log.
CORE_STDLIB = {
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "typing",
}
# A soft limit: a longer module says why on its second line, in a comment that names the limit.
MAX_LINES = 600
MAX_ENTRIES = 14  # of `router/`
MAX_MODULES = 14  # of a folder
MAX_TEST_NAME = 60


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str) -> set[str]:
    """Return the modules that a module imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES else base)
    return found


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "router"}


def package_of(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def public_classes() -> Iterator[tuple[str, str]]:
    """Yield each class at the top of a module that other modules may use, with its module."""
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, module


def test_packages_import_only_what_they_may() -> None:
    offenders = []
    for module in set(MODULES) - {"router"}:
        (home,) = [name for name in ALLOWED if is_within(module, name)]
        allowed = [home, *(f"router.{name}" for name in ALLOWED[home].split())]
        for name in ours(module) - {"router"}:
            if not any(is_within(name, package) for package in allowed):
                offenders.append(f"{module} imports {name}")
    assert offenders == []


def test_folders_within_a_package_have_an_order() -> None:
    offenders = []
    for order in ORDERS:
        for module in MODULES:
            if package_of(module) not in order:
                continue
            later = order[order.index(package_of(module)) + 1 :]
            offenders += [
                f"{module} imports {name}" for name in ours(module) if package_of(name) in later
            ]
    assert offenders == []


def _uses(module: str) -> set[str]:
    """Return the names that a module calls or takes: `open`, `os.open`, `path.read_bytes`."""
    found = set[str]()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else "path"
            found |= {f"{owner}.{node.attr}", f".{node.attr}"}
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def test_one_module_decodes_what_others_made() -> None:
    """Elsewhere a failure that nobody thought of would end a loop (ruff bans msgspec's, too)."""
    banned = {"orjson.loads", "json.loads", "pickle.loads", "msgspec.convert"}
    offenders = {module: _uses(module) & banned for module in MODULES}
    del offenders["router.base.decoding"]
    own_files = {"router.prompts.local_tokenizer", "router.tools.bench.compare"}
    assert {m: used for m, used in offenders.items() if used and m not in own_files} == {}


def test_one_module_opens_files_of_the_kv_directory() -> None:
    """It follows no link and waits for no pipe: another process writes that directory."""
    banned = {"open", "os.open", ".read_bytes", ".read_text", ".write_bytes", ".write_text"}
    openers = {m for m in MODULES if is_within(m, "router.store") and _uses(m) & banned}
    # A lock and directories, opened without following a link.
    assert openers == {"router.store.files"}


def test_what_a_terminal_shows_is_asked_over_http() -> None:
    """`kvferry top` and the like import nothing of the router that they ask."""
    offenders = [
        f"{module} imports {name}"
        for module in MODULES
        if is_within(module, "router.tools.console")
        for name in ours(module)
        if not name.startswith(("router.tools.console", "router.tools.terminal", "router.base."))
    ]
    assert offenders == []


def test_core_is_pure() -> None:
    """Facts go into the core and effects come out: it awaits its orders alone, and never looks."""
    offenders = []
    for module in MODULES:
        if not is_within(module, "router.core"):
            continue
        others = {name.split(".")[0] for name in imports(module)} - {"router"} - CORE_STDLIB
        offenders += [f"{module} imports {name}" for name in others]
    assert offenders == []


def test_modules_are_short_or_say_why_not() -> None:
    offenders = []
    for module, path in MODULES.items():
        lines = path.read_text().splitlines()
        if len(lines) > MAX_LINES and f"# over {MAX_LINES} lines:" not in "\n".join(lines[:20]):
            offenders.append(f"{module}: {len(lines)} lines")
    assert offenders == []


def test_folders_are_small() -> None:
    entries = [path.name for path in ROUTER.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ENTRIES
    sizes = {
        package: sum(1 for path in MODULES[package].parent.glob("*.py")) for package in PACKAGES
    }
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES + 1} == {}


def test_modules_say_what_they_are_for() -> None:
    assert [module for module in MODULES if not ast.get_docstring(tree(module))] == []


def test_tasks_are_spawned_by_name() -> None:
    """Tasks of a TaskGroup have an owner already; tasks of the loop have none."""
    offenders = []
    for module in set(MODULES) - {"router.base.tasks"}:
        calls = {
            node.attr
            for node in ast.walk(tree(module))
            if isinstance(node, ast.Attribute)
            and (isinstance(node.value, ast.Call) or ast.unparse(node.value) in ("asyncio", "loop"))
        }
        offenders += [f"{module}: {name}" for name in {"create_task", "ensure_future"} & calls]
    assert offenders == []


def test_tests_mirror_the_tree() -> None:
    """Folders of `router/` have their tests in the folder of the same name."""
    special = {"archs", "bench", "clients", "e2e", "fuzz", "hostile", "repository", "support"}
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {folder.relative_to(ROOT / "tests") for folder in folders}
    strangers = [
        str(name) for name in names if name.parts[0] not in special and not (ROUTER / name).is_dir()
    ]
    untested = [
        str(folder)
        for package in PACKAGES - {"router"}
        if (folder := MODULES[package].parent.relative_to(ROUTER)) not in names
        and not any(folder in name.parents for name in names)
    ]
    assert (strangers, untested) == ([], [])


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
    """Importing a module creates no task, thread or metric."""
    # The prebuilt server is a program; importing it is running it.
    names = [name for name in MODULES if not name.endswith(("__main__", "demo.prebuilt"))]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHECK, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_public_class_name_twice() -> None:
    homes: dict[str, list[str]] = {}
    for name, module in public_classes():
        homes.setdefault(name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_names_of_tests_are_short() -> None:
    """A name says in a list of failures what broke: at most 60 characters (CONTRIBUTING.md)."""
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > MAX_TEST_NAME
    ]
    assert long == []
