"""The table of the router's own routes."""

from collections.abc import Mapping

from router.web.admin.actions import BACKENDS, OperatorActions
from router.web.admin.guard import Guard
from router.web.admin.live import Live
from router.web.admin.page import PREFIX, StaticFile, to_page
from router.web.admin.prompts import WARM, PromptRoutes
from router.web.admin.requests import PATH as REQUESTS
from router.web.admin.requests import USAGE, Requests
from router.web.admin.routes import HEALTH, METRICS, AdminRoute, OwnRoutes
from router.web.admin.servers import PATH as SERVERS
from router.web.admin.servers import ServerRoutes
from router.web.admin.snapshots import PATH as SNAPSHOTS
from router.web.admin.snapshots import Snapshots
from router.web.admin.status import StatusRoutes


def own_routes(
    guard: Guard,
    status: StatusRoutes,
    operations: OperatorActions,
    servers: ServerRoutes,
    snapshots: Snapshots,
    requests: Requests,
    prompts: PromptRoutes,
    live: Live,
    page: Mapping[str, StaticFile],
) -> OwnRoutes:
    """Return the table. `page` has the files of the live page by path."""
    return OwnRoutes(
        [
            AdminRoute("GET", METRICS, status.metrics),
            AdminRoute("GET", HEALTH, status.health),
            AdminRoute("GET", "/kvferry/state", status.state),
            AdminRoute("POST", "/kvferry/plan", prompts.plan),
            AdminRoute("POST", "/kvferry/reload", operations.reload),
            AdminRoute("POST", f"{BACKENDS}{{name}}/{{action}}", operations.backend),
            AdminRoute("GET", SERVERS, servers.all),
            AdminRoute("GET", f"{SERVERS}/{{name}}/log", servers.log),
            AdminRoute("POST", f"{SERVERS}/{{name}}/{{action}}", servers.act),
            AdminRoute("GET", "/running", servers.running),
            AdminRoute("GET", "/unload", servers.unload),
            AdminRoute("POST", "/api/models/unload", servers.unload),
            AdminRoute("POST", "/api/models/unload/{model}", servers.unload_one),
            AdminRoute("GET", "/logs", servers.logs),
            AdminRoute("GET", "/logs/stream", servers.stream),
            AdminRoute("GET", SNAPSHOTS, snapshots.all),
            AdminRoute("POST", f"{SNAPSHOTS}/purge", snapshots.purge),
            AdminRoute("GET", f"{SNAPSHOTS}/{{id}}", snapshots.one),
            AdminRoute("DELETE", f"{SNAPSHOTS}/{{id}}", snapshots.one),
            AdminRoute("GET", REQUESTS, requests.recent),
            AdminRoute("GET", f"{REQUESTS}/{{id}}", requests.one),
            AdminRoute("GET", USAGE, requests.usage),
            AdminRoute("GET", WARM, prompts.kept),
            AdminRoute("POST", WARM, prompts.warm),
            AdminRoute("GET", "/kvferry/events", live.events),
            AdminRoute("GET", PREFIX.rstrip("/"), to_page),
            *(AdminRoute("GET", path, file.answer) for path, file in page.items()),
        ],
        guard,
        status.brief_health,
    )
