"""Panels and dashboards in Grafana's JSON model, as far as kvferry's dashboards need it.

The JSON has the keys of Grafana's own export, less those that Grafana fills in at import.
This module names no metric of a panel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

from dashboards.source.queries import SHARE

Json = dict[str, Any]

GRID_COLUMNS = 24
_SCHEMA_VERSION = 39  # of Grafana 10.3; later versions migrate the JSON when they load it
_DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


class Kind(StrEnum):
    """Grafana's names for the types of panels."""

    LINES = "timeseries"
    NUMBER = "stat"
    GAUGE = "gauge"
    HEATMAP = "heatmap"
    TABLE = "table"


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are pairs of PromQL and legend; `unit` is a Grafana unit.

    `levels` has the colour from each value on, ascending; `base` is the colour below the first.
    """

    title: str
    description: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 8
    height: int = 8
    stacked: bool = False
    base: str = "green"
    levels: Mapping[float, str] = field(default_factory=dict)
    lowest: float | None = 0
    highest: float | None = None


def share_gauge(
    title: str,
    description: str,
    queries: Sequence[tuple[str, str]],
    levels: Mapping[float, str],
    width: int = 6,
) -> Panel:
    """Return a gauge from 0 to 1: the share of a resource that is in use."""
    return Panel(title, description, queries, SHARE, Kind.GAUGE, width, 6, levels=levels, highest=1)


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: rows by title, each with its panels from left to right."""

    uid: str
    title: str
    description: str
    rows: Mapping[str, Sequence[Panel]]


def dashboard_json(dashboard: Dashboard) -> Json:
    """Return the dashboard as the JSON that Grafana imports."""
    ids, panels, y = count(1), [], 0
    for title, row in dashboard.rows.items():
        at = {"h": 1, "w": GRID_COLUMNS, "x": 0, "y": y}
        panels.append(
            {"id": next(ids), "type": "row", "title": title, "gridPos": at, "collapsed": False}
            | {"panels": []}
        )
        x, y, height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > GRID_COLUMNS:
                x, y, height = 0, y + height, 0
            at = {"h": panel.height, "w": panel.width, "x": x, "y": y}
            panels.append({"id": next(ids), "gridPos": at, **_panel_json(panel)})
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["kvferry"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one cross-hair for all panels
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _VARIABLES},
        "annotations": {"list": []},
        "links": [_OTHERS],
        "panels": panels,
    }


_VARIABLES: list[Json] = [
    {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
    },
    {
        "name": "backend",
        "label": "Backend",
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": "label_values(kvferry_backend_up, backend)",
        "query": {"query": "label_values(kvferry_backend_up, backend)", "refId": "backend"},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    },
]
_OTHERS: Json = {
    "type": "dashboards",
    "title": "kvferry",
    "tags": ["kvferry"],
    "asDropdown": True,
    "keepTime": True,
    "includeVars": True,
}


def _panel_json(panel: Panel) -> Json:
    instant = panel.kind is Kind.TABLE
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _DATASOURCE,
            "editorMode": "code",
            "expr": expr,
            "legendFormat": legend,
            "range": not instant,
            "instant": instant,
            "format": {Kind.TABLE: "table", Kind.HEATMAP: "heatmap"}.get(panel.kind, "time_series"),
        }
        for number, (expr, legend) in enumerate(panel.queries)
    ]
    steps: list[Json] = [{"color": panel.base, "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.levels.items()]
    defaults: Json = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "palette-classic" if panel.kind is Kind.LINES else "thresholds"},
        "custom": _custom(panel),
        "mappings": [],
    }
    if panel.lowest is not None:
        defaults["min"] = panel.lowest
    if panel.highest is not None:
        defaults["max"] = panel.highest
    made: Json = {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }
    if panel.kind is Kind.TABLE:
        made["transformations"] = [
            {"id": "organize", "options": {"excludeByName": dict.fromkeys(_NO_COLUMNS, True)}}
        ]
    return made


_NO_COLUMNS = ("Time", "Value", "__name__", "instance", "job")


def _custom(panel: Panel) -> Json:
    if panel.kind is not Kind.LINES:
        return {}
    return {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.stacked else 10,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if panel.levels else "off"},
    }


_REDUCE: Json = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[Kind, Json] = {
    Kind.LINES: {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    Kind.NUMBER: {
        "reduceOptions": _REDUCE,
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
        "justifyMode": "auto",
        "orientation": "auto",
    },
    Kind.GAUGE: {
        "reduceOptions": _REDUCE,
        "showThresholdLabels": False,
        "showThresholdMarkers": True,
        "orientation": "auto",
    },
    Kind.HEATMAP: {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64, "reverse": False},
        "yAxis": {"axisPlacement": "left", "unit": "s"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
    },
    Kind.TABLE: {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}},
}
