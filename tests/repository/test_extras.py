"""Extras: without one, the part that needs it says so, and all others work."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from router.assembly.backends import StartError
from router.assembly.router import build
from router.base.certificates import end_of
from router.config.schema import parse
from router.tools.cli import main
from router.tools.doctor.cold import of_cold
from router.tools.doctor.environment import unusable_parts
from router.tools.doctor.hosts import of_hosts
from tests.support.paths import ROOT

FLEET = "fleet: {redis: 'redis://127.0.0.1:1', insecure: true, listen: '127.0.0.1:0'}\n"
NEEDS = "pip install 'kvferry[fleet]'"
# Packages of extras: nothing that every install starts may import them.
OPTIONAL = ("redis", "cryptography", "obstore", "opentelemetry", "matplotlib", "xllamacpp")


def test_packages_of_extras_are_no_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = " ".join(project["dependencies"])
    assert not [name for name in OPTIONAL if name in needed]
    assert {"cold", "demo", "fleet", "otel"} <= project["optional-dependencies"].keys()


def test_modules_of_a_router_load_without_extras() -> None:
    """Also where a fleet has peers and no Redis."""
    gone = "; ".join(f"sys.modules[{name!r}] = None" for name in OPTIONAL)
    program = f"import sys; {gone}; import router.assembly.router, router.tools.cli"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("redis", "redis.asyncio", "cryptography", "obstore", "router.hosts.directory"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "router.tools.fleet.certificate", raising=False)


@pytest.mark.usefixtures("without")
async def test_redis_without_its_package_is_refused_at_the_start() -> None:
    with pytest.raises(StartError, match=r"kvferry\[fleet\]"):
        async with build(parse(FLEET, "test")):
            pass


@pytest.mark.usefixtures("without")
async def test_doctor_without_redis_says_what_to_install() -> None:
    config = parse(FLEET, "test")
    assert [lack.message for lack in unusable_parts(config)] == [f"needs `{NEEDS}`"]
    assert NEEDS in [finding.do for finding in await of_hosts(config, [])]


@pytest.mark.usefixtures("without")
async def test_a_bucket_without_its_package_is_refused() -> None:
    config = parse("backends: [{url: 'http://127.0.0.1:9'}]\ncold: 's3://b'", "test")
    with pytest.raises(StartError, match=r"kvferry\[cold\]"):
        async with build(config):
            pass
    assert [finding.what for finding in await of_cold(config)] == [
        "cold.url needs `pip install 'kvferry[cold]'`"
    ]


@pytest.mark.usefixtures("without")
def test_certificate_without_its_package_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "certificate", "a", "--directory", str(tmp_path)]) == 2
    assert NEEDS in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"kvferry\[fleet\]"):
        end_of(tmp_path / "host.pem")
