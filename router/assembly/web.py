"""The last stage of a router: the handler of all requests."""

import asyncio
from dataclasses import dataclass

from router.assembly.hosts import Hosts
from router.assembly.in_force import InForce
from router.assembly.parts import Parts, Watched
from router.assembly.reload import Reload
from router.base.clock import wall_now
from router.base.ports import Tracing
from router.base.types import ColdStatus, Tenant
from router.config.schema import Config
from router.store.cold.tier import ColdTier
from router.telemetry.backend_metrics import BackendMetrics
from router.telemetry.hosts_metrics import FetchMetrics
from router.web.admin.actions import OperatorActions
from router.web.admin.live import Live
from router.web.admin.page import load_page
from router.web.admin.prompts import PromptRoutes
from router.web.admin.requests import Requests
from router.web.admin.routes import OwnRoutes
from router.web.admin.servers import ServerRoutes
from router.web.admin.snapshots import Snapshots
from router.web.admin.state_json import picture_of, survey
from router.web.admin.status import StatusRoutes
from router.web.admin.table import own_routes
from router.web.api.completions import Completions
from router.web.api.elsewhere import Elsewhere
from router.web.api.monitors import MonitorRoutes
from router.web.api.passing import Passing
from router.web.api.reports import Reports
from router.web.api.sending import Sender
from router.web.api.suspects import Suspects
from router.web.app import App, OtherHosts
from router.web.fleet.asking import Asking
from router.web.fleet.cold import ColdHolder, FromCold
from router.web.fleet.fetching import Fetching
from router.web.fleet.forwarding import Forwarding
from router.web.fleet.handing_out import HandingOut
from router.web.fleet.peer_routes import PeerRoutes
from router.web.fleet.purging import Purging
from router.web.server.inbound import Bodies
from router.web.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Stages:
    """What the stages before have made."""

    config: Config
    parts: Parts
    watched: Watched
    in_force: InForce
    reload: Reload
    hosts: Hosts | None
    cold: ColdTier | None
    tracing: Tracing | None

    def cold_status(self) -> ColdStatus | None:
        """Return the state of the cold tier; None: there is none."""
        return None if self.cold is None else self.cold.status()

    def purging(self) -> Purging:
        """Return what deletes all of a tenant."""
        hosts, parts = self.hosts, self.parts
        peers = None if hosts is None else hosts.peers
        return Purging(parts.engine, parts.store, parts.memories, self.cold, peers)


def live_of(made: Stages) -> Live:
    """Return the live page's events."""
    parts, selection, hosts = made.parts, made.watched.selection, made.hosts
    engine, catalog = parts.engine, parts.engine.state.inventory.catalog
    view = None if hosts is None else hosts.view
    return Live(
        lambda: picture_of(engine, selection, parts.clock.now(), view, made.cold_status()),
        catalog.__len__,
        lambda: survey(catalog.snapshots()),
        parts.decision_log.recent,
        parts.tasks.spawn,
        wall_now,
        parts.guard.may_read,
    )


async def app_of(made: Stages, live: Live) -> App:
    """Return the handler of all requests."""
    parts, selection, settings = made.parts, made.watched.selection, made.in_force.settings
    engine, keys, hosts = parts.engine, made.in_force.keys, made.hosts
    suspects, bodies = Suspects(parts.clock.now), Bodies(settings)
    others: OtherHosts | None = None
    elsewhere = Elsewhere(engine)
    cold = None if made.cold is None else ColdHolder(made.cold, parts.clock.now)
    store, now = parts.store, parts.clock.now
    purging = made.purging()
    if hosts is not None or cold is not None:
        fetch_metrics = FetchMetrics(parts.registry)
        client = None if hosts is None else hosts.credentials.client
        peer_of = (lambda _: None) if hosts is None else hosts.peers.by_key
        in_cold = None if cold is None else cold.found
        fetching = Fetching(peer_of, in_cold, engine, store, client, fetch_metrics, now)
        parts.memories.append(lambda tenant: fetching.stop(Tenant(tenant)))
        if hosts is not None:
            parts.tasks.supervise(purging.hear, name="purges of other hosts")
            await purging.until_heard()
        if hosts is None:
            elsewhere = FromCold(engine, fetching, parts.decision_log)
        else:
            handing_out = HandingOut(engine, store, hosts.held, fetch_metrics, now)
            elsewhere = Forwarding(
                hosts.name,
                hosts.peers,
                Asking(hosts.peers, hosts.held, fetching, handing_out, hosts.metrics),
                fetching,
                hosts.held,
                engine,
                selection,
                keys,
                settings,
                parts.throttle,
                parts.decision_log,
                hosts.metrics,
                suspects,
            )
            routes = PeerRoutes(hosts.hello, engine, selection, fetching, handing_out, purging)
            others = OtherHosts(hosts.name, routes, hosts.metrics)
    reports = Reports(engine, selection.monitors, parts.tasks.spawn)
    sender = Sender(engine, selection, suspects, settings, parts.throttle, reports)
    completions = Completions(
        engine, selection, sender, settings, keys, suspects, elsewhere, made.tracing
    )
    return App(
        keys,
        completions,
        Passing(selection, settings, parts.throttle, elsewhere),
        MonitorRoutes(engine, selection, keys, settings),
        await _own_routes(made, completions, live, bodies, settings, purging),
        parts.decision_log,
        parts.telemetry,
        settings,
        bodies,
        parts.throttle,
        others,
    )


async def _own_routes(
    made: Stages,
    completions: Completions,
    live: Live,
    bodies: Bodies,
    settings: Settings,
    purging: Purging,
) -> OwnRoutes:
    parts, selection, guard = made.parts, made.watched.selection, made.parts.guard
    engine, now = parts.engine, parts.clock.now
    status = StatusRoutes(
        engine,
        selection,
        parts.registry,
        BackendMetrics(parts.clients, parts.registry),
        now,
        None if made.hosts is None else made.hosts.view,
        made.cold_status,
    )
    shows = made.config.diagnostics.show_content
    return own_routes(
        guard,
        status,
        OperatorActions(guard, selection, made.watched.backends, made.reload),
        ServerRoutes(engine, guard, parts.on_demand.supervisor, now),
        Snapshots(engine, guard, now, wall_now, purging, bodies),
        Requests(parts.decision_log, selection, shows, parts.usage),
        PromptRoutes(engine, selection, completions, bodies, guard, settings, made.in_force.keys),
        live,
        await asyncio.to_thread(load_page),
    )
