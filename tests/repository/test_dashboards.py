"""Dashboards and rules are as their sources say, and use the metrics that exist and all of them.

tests/e2e/test_prometheus.py checks with a real Prometheus that their queries find values.
"""

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.source.files import FOLDER, written
from dashboards.source.panels import GRID_COLUMNS
from router.config.schema import parse
from tests.support.servers.prometheus import SHIPPED, program
from tests.telemetry.test_metrics import PAGE, ROW

Json = dict[str, Any]

DASHBOARDS = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
PANELS = {
    f"{name}: {panel['title']}": panel
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
}
# Metrics that are on no panel, with the reason.
ON_NO_PANEL: dict[str, str] = {
    "kvferry_certificate_end_timestamp_seconds": "the alert KvferryCertificateEnds",
    "kvferry_refused_keys_total": "kvferry_requests_total has them as `unauthorized`",
    "kvferry_tasks": "only a leak of hours moves it; tests/e2e/test_leaks.py asks it",
}
_OURS = re.compile(r"\bkvferry_\w+")


def described() -> dict[str, str]:
    """Return name and type of every metric in docs/metrics.md; test_metrics checks that page."""
    return {name: kind for name, kind, *_ in ROW.findall(PAGE.read_text())}


def used(expr: str) -> set[str]:
    """Return the kvferry metrics that an expression uses."""
    kinds = described()
    found = set()
    for name in _OURS.findall(expr):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        found.add(base if kinds.get(base) == "histogram" else name)
    return found


def queries(panel: Json) -> list[str]:
    return [target["expr"] for target in panel["targets"]]


def rules() -> list[Json]:
    groups = yaml.safe_load((SHIPPED / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, Json]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


# -- dashboards ----------------------------------------------------------------------------------


def test_the_json_is_what_the_source_writes() -> None:
    """Edit the source and run `python -m dashboards.source`; never edit the JSON by hand."""
    sources = dict(written())
    assert {path.name for path in sources} == set(DASHBOARDS)
    assert [path.name for path, text in sources.items() if path.read_text() != text] == []


def test_panels_say_what_they_show() -> None:
    def says(panel: Json) -> bool:
        legends = [target["legendFormat"] for target in panel["targets"]]
        return (
            panel["description"].endswith(".")
            and bool(panel["fieldConfig"]["defaults"]["unit"])
            and bool(queries(panel))
            and all(one["datasource"]["uid"] == "${datasource}" for one in panel["targets"])
            and len(set(legends)) == len(legends)
        )

    assert [name for name, panel in PANELS.items() if not says(panel)] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_panels_lie_side_by_side(dashboard: Json) -> None:
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(box["x"] + box["w"] <= GRID_COLUMNS for box in boxes)
    for a, b in combinations(boxes, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_every_variable_that_is_used_is_there(dashboard: Json) -> None:
    text = json.dumps(dashboard["panels"])
    known = {variable["name"] for variable in dashboard["templating"]["list"]}
    builtin = {"__rate_interval", "__range"}
    assert set(re.findall(r"\$\{?(\w+)", text)) <= known | builtin


def test_dashboards_are_told_apart() -> None:
    for key in ("uid", "title"):
        assert len({dashboard[key] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


def test_every_metric_of_a_panel_exists() -> None:
    known = set(described())
    unknown = {
        name: names
        for name, panel in PANELS.items()
        if (names := set().union(*(used(expr) for expr in queries(panel))) - known)
    }
    assert unknown == {}


def test_every_metric_is_on_a_panel_or_has_a_reason() -> None:
    shown = {name for p in PANELS.values() for expr in queries(p) for name in used(expr)}
    assert set(described()) - shown == set(ON_NO_PANEL)


# -- rules ---------------------------------------------------------------------------------------


def test_every_metric_of_a_rule_exists() -> None:
    names = set().union(*(used(rule["expr"]) for rule in rules()))
    assert names - set(described()) == set()


def test_every_alert_says_what_to_do() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"]["summary"], name
        assert rule["annotations"]["description"].endswith("."), name


def test_every_alert_is_seen_to_fire() -> None:
    """Alerts fire in rules_test.yml, which promtool runs below."""
    text = (SHIPPED / "rules_test.yml").read_text()
    assert set(alerts()) == set(re.findall(r'alertname="(\w+)"\}', text))


@pytest.mark.parametrize(
    "argv",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees(argv: tuple[str, ...]) -> None:
    done = subprocess.run(
        [program("promtool"), *argv], cwd=SHIPPED, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- configuration of Prometheus and Grafana -----------------------------------------------------


def test_prometheus_scrapes_the_default_address() -> None:
    (scrape,) = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())["scrape_configs"]
    default = parse("backends: [{url: 'http://127.0.0.1:1'}]", "test").listen
    assert scrape["job_name"] == "kvferry"  # the alert KvferryDown knows it by this name
    assert scrape["params"] == {"backends": ["1"]}
    (name,) = scrape["file_sd_configs"][0]["files"]
    targets = yaml.safe_load((SHIPPED / name).read_text())
    assert targets == [{"targets": [f"{default.host}:{default.port}"]}]


def test_grafana_is_told_where_everything_is() -> None:
    folder = FOLDER / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/kvferry.yaml").read_text())["providers"]
    text = (FOLDER / "README.md").read_text()
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["url"].removeprefix("$") in text
    assert provider["type"] == "file"
    assert provider["options"]["path"] in text
    assert Path(provider["options"]["path"]).is_absolute()
