"""Deployment files agree with each other, with the configuration and with a server.

No container is run: a schema, real parsers and a real llama-server check what they can.
"""

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from compose_spec import PyCompose

from router.config.schema import Config, load
from router.config.values import duration, url_address
from router.servers.program import free_port
from router.tools.cli import _config, command_parser
from router.tools.doctor.command import examine
from router.tools.doctor.findings import Level, of_backend
from tests.support.models.tiny_models import tiny_model
from tests.support.paths import ROOT
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import configuration, running

Json = dict[str, Any]
KV_DIR = "/kv"
_VARIABLE = re.compile(r"\$\{(\w+)(?::(-)([^}]*)|:\?[^}]*)\}")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def filled(value: Any) -> Any:
    """Return a value with every variable at its default; MODEL, without a default, is its name."""
    match value:
        case str():
            return _VARIABLE.sub(lambda found: found[3] if found[2] else found[1], value)
        case dict():
            return {key: filled(one) for key, one in value.items()}
        case list():
            return [filled(one) for one in value]
        case _:
            return value


COMPOSE: Json = filled(yaml.safe_load(read("docker-compose.yml")))
SERVICES: dict[str, Json] = COMPOSE["services"]
ROUTER = SERVICES["kvferry"]
LLAMAS = {name: one for name, one in SERVICES.items() if name.startswith(("cuda-", "cpu-"))}
HOSTS = {name: SERVICES[name] for name in ("host-a", "host-b")}
UNIT = "config/systemd/kvferry.service"
LLAMA_UNIT = "config/systemd/llama-server@.service"
DOCKERFILE = read("Dockerfile").replace("\\\n", " ")


def docker() -> Config:
    return load(ROOT / "config" / "docker.yaml")


def flags(command: list[str]) -> dict[str, str]:
    """Return flag to value; "" for a switch."""
    found: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def mounts(service: Json) -> dict[str, str]:
    """Return a service's mounts, target to source."""
    parts = [mount.split(":") for mount in service.get("volumes", [])]
    return {part[1]: part[0] for part in parts}


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction in the last stage of the Dockerfile."""
    stage = DOCKERFILE.rpartition("\nFROM ")[2]
    return re.findall(rf"^{name} (.*)$", stage, re.M)


def unit(name: str) -> dict[str, str]:
    """Return each key of a unit with its last value."""
    return dict(re.findall(r"^(\w+)=(.*)$", read(name), re.M))


# -- docker-compose.yml --------------------------------------------------------------------------


def test_compose_file_is_valid() -> None:
    """Parse with a parser that knows the whole specification."""
    parsed = PyCompose.from_yaml(yaml.safe_dump(COMPOSE))

    assert set(parsed.service_names()) == set(SERVICES)


@pytest.mark.parametrize("profile", ["cuda", "cpu"])
def test_each_backend_is_one_server_of_each_profile(profile: str) -> None:
    servers = [one for one in LLAMAS.values() if one["profiles"] == [profile]]
    aliases = [one["networks"]["default"]["aliases"] for one in servers]
    addresses = [url_address(backend.url) for backend in docker().backends]

    assert sorted(aliases) == sorted([address.host] for address in addresses)
    assert {flags(one["command"])["--port"] for one in servers} == {
        str(address.port) for address in addresses
    }
    assert ("-cuda" in servers[0]["image"]) == (profile == "cuda")


def test_each_gpu_belongs_to_one_server() -> None:
    devices = [
        device
        for one in LLAMAS.values()
        if one["profiles"] == ["cuda"]
        for device in one["deploy"]["resources"]["reservations"]["devices"]
    ]

    assert [device["device_ids"] for device in devices] == [["0"], ["1"]]
    assert all(device["capabilities"] == ["gpu"] for device in devices)
    assert all("deploy" not in one for one in LLAMAS.values() if one["profiles"] == ["cpu"])


def test_state_files_are_in_one_place_and_one_users() -> None:
    (user,) = instructions("USER")
    assert {one["user"] for one in LLAMAS.values()} == {user}
    assert {backend.kv_dir for backend in docker().backends} == {Path(KV_DIR)}
    for one in (*LLAMAS.values(), ROUTER, SERVICES["kv-dir"]):
        assert mounts(one)[KV_DIR] == "kv"
    assert {flags(one["command"])["--slot-save-path"] for one in LLAMAS.values()} == {KV_DIR}
    prepared = shlex.join(SERVICES["kv-dir"]["entrypoint"])
    uid, gid = user.split(":")
    assert prepared == f"install -d -o {uid} -g {gid} -m 0700 {KV_DIR}"
    assert f"--uid {uid} " in DOCKERFILE
    for one in (*LLAMAS.values(), ROUTER):
        assert one["depends_on"]["kv-dir"] == {"condition": "service_completed_successfully"}


def test_the_router_reads_the_model_that_the_servers_run() -> None:
    """Router and servers have the model at the path that the servers report."""
    model = flags(LLAMAS["cpu-0"]["command"])["--model"]

    assert model == "/models/MODEL"
    assert mounts(ROUTER)["/models"] == mounts(LLAMAS["cpu-0"])["/models"]


def test_nothing_is_open_to_other_machines() -> None:
    published = {name: one["ports"] for name, one in SERVICES.items() if "ports" in one}

    assert set(published) == {"kvferry", "host-a", "host-b", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert f"127.0.0.1:8080:{docker().listen.port}" in published["kvferry"]


def test_the_router_has_time_to_stop() -> None:
    assert duration(ROUTER["stop_grace_period"]) > docker().shutdown_grace_s


def test_every_volume_is_there() -> None:
    sources = {source for one in SERVICES.values() for source in mounts(one).values()}
    named = {source for source in sources if "/" not in source}
    bound = {source for source in sources - named if source != "./models"}

    assert named == set(COMPOSE["volumes"])
    assert {source for source in bound if not (ROOT / source).exists()} == set()


def test_prometheus_and_grafana_find_their_files() -> None:
    prometheus, grafana = SERVICES["prometheus"], SERVICES["grafana"]
    folder = ROOT / mounts(prometheus)["/etc/prometheus"]
    scraping = yaml.safe_load((folder / "prometheus.yml").read_text())
    (name,) = scraping["scrape_configs"][0]["file_sd_configs"][0]["files"]
    (found,) = yaml.safe_load((ROOT / mounts(prometheus)[f"/etc/prometheus/{name}"]).read_text())
    assert found == {"targets": [f"kvferry:{docker().listen.port}"]}
    assert (folder / name).exists()  # Docker mounts over a file that is there, or has to make it
    assert all((folder / rules).exists() for rules in scraping["rule_files"])

    provisioning = ROOT / mounts(grafana)["/etc/grafana/provisioning"]
    (source,) = provisioning.glob("datasources/*.y*ml")
    url = yaml.safe_load(source.read_text())["datasources"][0]["url"]
    assert url == "$PROMETHEUS_URL"
    assert grafana["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    (provider,) = provisioning.glob("dashboards/*.y*ml")
    path = yaml.safe_load(provider.read_text())["providers"][0]["options"]["path"]
    boards = list((ROOT / mounts(grafana)[path]).glob("*.json"))
    assert boards
    assert all(json.loads(board.read_text())["title"] for board in boards)


# -- llama-server --------------------------------------------------------------------------------


@asynccontextmanager
async def started(argv: list[str], log: Path) -> AsyncIterator[str]:
    """Yield the URL of a server that is up."""
    url = f"http://127.0.0.1:{flags(argv)['--port']}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*argv, stdout=output, stderr=output)
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                assert process.returncode is None, "it ended"
                try:
                    async with session.get(f"{url}/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_real_server_takes_the_flags_and_doctor_is_silent(
    server_argv: list[str], tmp_path: Path
) -> None:
    kv_dir = tmp_path / "kv"
    kv_dir.mkdir(mode=0o700)
    instead = {
        "--model": str(tiny_model("llama").path),
        "--host": "127.0.0.1",
        "--port": str(free_port()),
        "--slot-save-path": str(kv_dir),
        "--ctx-size": "8192",
    }
    words = [
        word
        for flag, value in (flags(LLAMAS["cuda-0"]["command"]) | instead).items()
        for word in (flag, value)
        if word
    ]
    async with started([*server_argv, *words], tmp_path / "server.log") as url:
        (facts,) = await examine(configuration([("a", url)], kv_dir))
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            metrics = await response.text()

    found = of_backend(facts)
    assert [one for one in found if one.level in (Level.WARNING, Level.ERROR)] == []
    assert found
    assert "llamacpp:" in metrics


def test_all_servers_have_the_same_flags() -> None:
    """State files fit only servers with the same flags."""
    (of_unit,) = re.findall(r"^ExecStart=\S+ (.*)$", read(LLAMA_UNIT), re.M)
    own = ("--model", "--host", "--port", "--slot-save-path")
    known = [flags(one["command"]) for one in LLAMAS.values()] + [flags(shlex.split(of_unit))]
    shared = [{k: v for k, v in one.items() if k not in own} for one in known]

    assert all(one == shared[0] for one in shared)
    assert shared[0]["--cache-ram"] == "0"
    assert set(known[-1]) == set(known[0])


# -- Dockerfile ----------------------------------------------------------------------------------


def test_the_image_is_the_router_and_nothing_else() -> None:
    """User other than root, no compiler, no pip; the configuration is where the command looks."""
    (command,), (entry,) = instructions("CMD"), instructions("ENTRYPOINT")
    words = json.loads(entry) + json.loads(command)
    copied = dict(line.split()[-2:] for line in instructions("COPY"))

    assert words == ["kvferry", "serve", "--config", copied["config/docker.yaml"]]
    assert copied["config/docker.yaml"] in mounts(ROUTER)
    assert instructions("EXPOSE") == [str(docker().listen.port)]
    assert not any("pip" in line or "apt" in line for line in instructions("RUN"))
    assert instructions("USER")[0].split(":")[0] not in ("0", "root")


def test_everything_that_is_copied_reaches_the_builder() -> None:
    allowed = {line[1:] for line in read(".dockerignore").splitlines() if line.startswith("!")}
    lines = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)

    assert {source for line in lines for source in line.split()[:-1]} == allowed
    assert all((ROOT / source).exists() for source in allowed)


async def test_health_check(tmp_path: Path) -> None:
    """Run the check as the image runs it, but for the port."""
    ((_, found),) = re.findall(r"^HEALTHCHECK (.*)CMD (.*)$", DOCKERFILE, re.M)
    program, *arguments = json.loads(found)
    assert program == "python"

    async def code(port: int) -> int:
        told = [word.replace(str(docker().listen.port), str(port)) for word in arguments]
        assert told != arguments
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(sys.executable, *told, stderr=quiet)
        return await process.wait()

    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], tmp_path) as kvferry:
        assert await code(url_address(kvferry.url).port) == 0
    async with running([("a", "http://127.0.0.1:9")], None, wait_for=[]) as kvferry:
        assert await code(url_address(kvferry.url).port) == 1
    assert await code(9) == 1


# -- systemd -------------------------------------------------------------------------------------


def test_units_agree_with_each_other_and_the_configuration() -> None:
    router, llama = unit(UNIT), unit(LLAMA_UNIT)

    assert int(router["TimeoutStopSec"]) > Config.model_fields["shutdown_grace_s"].default
    for key in ("User", "Group", "StateDirectory", "StateDirectoryMode", "UMask"):
        assert router[key] == llama[key]
    save_path = flags(shlex.split(llama["ExecStart"]))["--slot-save-path"]
    assert save_path == f"/var/lib/{router['StateDirectory']}"
    assert f"`kv_dir: {save_path}`" in read(UNIT)
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp"):
        assert router[key] == llama[key] == "yes"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Verify the units with programs that exist here."""
    for name in (UNIT, LLAMA_UNIT):
        text = re.sub(r"^(ExecStart\w*)=\S+", r"\1=/bin/true", read(name), flags=re.M)
        (tmp_path / Path(name).name).write_text(text)
    files = [str(tmp_path / Path(name).name) for name in (UNIT, LLAMA_UNIT)]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")


# -- the profile `hosts` -------------------------------------------------------------------------


def host_config(name: str) -> Config:
    """Return the configuration that the flags of a host mean."""
    return _config(command_parser().parse_args(HOSTS[name]["command"]))


@pytest.mark.parametrize("name", list(HOSTS))
def test_a_host_has_its_own_server_and_files(name: str) -> None:
    config, llama = host_config(name), SERVICES[name.replace("host", "llama")]
    (backend,) = config.backends
    where = url_address(backend.url)
    given = flags(llama["command"])

    assert llama["network_mode"] == f"service:{name}"
    assert (where.host, str(where.port)) == (given["--host"], given["--port"])
    assert str(backend.kv_dir) == given["--slot-save-path"] == KV_DIR
    assert mounts(llama)[KV_DIR] == mounts(HOSTS[name])[KV_DIR]
    assert str(config.fleet.credentials) == f"{mounts_target(name, 'fleet')}/{name}"


def mounts_target(name: str, source: str) -> str:
    """Return where a host has a volume."""
    (found,) = [target for target, volume in mounts(HOSTS[name]).items() if volume == source]
    return found


def test_hosts_know_each_other_and_the_directory() -> None:
    for name in HOSTS:
        fleet = host_config(name).fleet
        assert fleet.listen is not None
        assert [url_address(peer).host for peer in fleet.peers] == list(HOSTS)
        assert {url_address(peer).port for peer in fleet.peers} == {fleet.listen.port}
        assert fleet.redis == "redis://valkey:6379"
        assert HOSTS[name]["hostname"] == name


def test_credentials_are_made_before_the_hosts_start() -> None:
    made = SERVICES["host-files"]
    (script,) = made["command"]

    assert "kvferry fleet certificate" in script
    for name in HOSTS:
        assert name in script
        assert HOSTS[name]["depends_on"]["host-files"]["condition"] == (
            "service_completed_successfully"
        )
