"""The Kubernetes files are valid, and agree with each other and with kvferry's configuration."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from router.config.schema import Config, parse
from router.config.values import url_address
from router.hosts.credentials import AUTHORITY, CERTIFICATE, KEY, SECRET
from tests.support.paths import ROOT

Json = dict[str, Any]
FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION: Json = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
# The oldest release with sidecars (init containers that go on), and the newest that is known here.
RELEASES = ("1.29", "1.34")

OBJECTS: list[Json] = [
    found
    for name in KUSTOMIZATION["resources"]
    for found in yaml.safe_load_all((FOLDER / name).read_text())
]


def one(kind: str, name: str) -> Json:
    (found,) = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


POD: Json = one("StatefulSet", "kvferry")["spec"]["template"]["spec"]
CONTAINERS: dict[str, Json] = {
    container["name"]: container for container in POD["initContainers"] + POD["containers"]
}


def config() -> Config:
    return parse((FOLDER / "kvferry.yaml").read_text(), "kvferry.yaml")


def flags() -> dict[str, str]:
    args = CONTAINERS["llama-server"]["args"]
    return dict(zip(args, [*args[1:], ""], strict=True))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("found", OBJECTS, ids=lambda o: f"{o['kind']}-{o['metadata']['name']}")
def test_every_object_fits_the_api(found: Json, release: str) -> None:
    kubernetes_validate.validate(found, release, strict=True)


def test_every_file_is_applied() -> None:
    there = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "kvferry.yaml"}

    assert set(KUSTOMIZATION["resources"]) == there


def test_kvferry_finds_its_server_and_its_files() -> None:
    (backend,) = config().backends
    where = url_address(backend.url)

    assert (where.host, str(where.port)) == (flags()["--host"], flags()["--port"])
    assert str(backend.kv_dir) == flags()["--slot-save-path"]
    mounted = [
        {m["mountPath"]: m.get("subPath") for m in CONTAINERS[name]["volumeMounts"]}
        for name in ("llama-server", "kvferry")
    ]
    assert mounted[0]["/kv"] == mounted[1]["/kv"] == "state"
    assert set(mounted[0]) <= set(mounted[1])


def test_pods_find_each_other_and_the_directory() -> None:
    fleet = config().fleet
    assert fleet.listen is not None
    (peer,) = fleet.peers
    hosts, valkey = one("Service", "kvferry-hosts"), one("Service", "valkey")

    assert url_address(peer).host == hosts["metadata"]["name"]
    assert hosts["spec"]["clusterIP"] == "None"
    assert hosts["spec"]["publishNotReadyAddresses"] is True
    assert {port["port"] for port in hosts["spec"]["ports"]} >= {url_address(peer).port}
    assert fleet.listen.port == url_address(peer).port
    assert fleet.redis == f"redis://valkey:{valkey['spec']['ports'][0]['port']}"


def test_ports_are_those_of_the_configuration() -> None:
    settings = config()
    assert settings.admin.listen is not None
    assert settings.fleet.listen is not None
    found = {port["name"]: port["containerPort"] for port in CONTAINERS["kvferry"]["ports"]}

    assert found == {
        "http": settings.listen.port,
        "peers": settings.fleet.listen.port,
        "metrics": settings.admin.listen.port,
    }


def test_credentials_are_what_kvferry_reads() -> None:
    secrets = {secret["name"]: secret["files"] for secret in KUSTOMIZATION["secretGenerator"]}
    mounts = {m["name"]: m["mountPath"] for m in CONTAINERS["kvferry"]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}

    names = {file.rpartition("/")[2] for file in secrets["kvferry-fleet"]}
    assert names == {AUTHORITY, CERTIFICATE, KEY, SECRET}
    assert str(config().fleet.credentials) == mounts["fleet"]
    assert volumes["fleet"]["secret"]["secretName"] == "kvferry-fleet"
    assert "fleet/" in (FOLDER / ".gitignore").read_text()
    (variable,) = CONTAINERS["kvferry"]["env"]
    assert variable["name"] == config().admin.token_env
    assert variable["valueFrom"]["secretKeyRef"]["name"] in secrets


def test_a_pod_has_time_to_save_its_slots() -> None:
    assert config().shutdown_grace_s < POD["terminationGracePeriodSeconds"]


def test_only_pods_reach_the_peers_and_the_directory() -> None:
    pods = {"podSelector": {"matchLabels": {"app": "kvferry"}}}
    for policy, port in (("kvferry", "peers"), ("valkey", "redis")):
        rules = one("NetworkPolicy", policy)["spec"]["ingress"]
        (rule,) = [r for r in rules if {"port": port} in r["ports"]]
        assert rule["from"] == [pods]


def test_an_eviction_takes_one_pod_at_a_time() -> None:
    budget = one("PodDisruptionBudget", "kvferry")["spec"]

    assert budget["maxUnavailable"] == 1
    labels = one("StatefulSet", "kvferry")["spec"]["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
