"""The dashboard of usage: tokens and requests of each tenant."""

from dashboards.source.panels import Dashboard, Kind, Panel
from dashboards.source.queries import TOKENS_PER_S, rate

_COMPUTED = 'kind!="cached"'

USAGE = Dashboard(
    "kvferry-usage",
    "kvferry: usage",
    "What each tenant uses. The sums by day and model are in `kvferry usage`.",
    {
        "Tenants": [
            Panel(
                "Tokens computed",
                "Tokens of prompts and answers that servers computed, by tenant: what counts for "
                "tokens_per_minute and tokens_per_day.",
                [(rate("kvferry_tenant_tokens_total", "tenant", _COMPUTED), "{{tenant}}")],
                TOKENS_PER_S,
                width=12,
            ),
            Panel(
                "Requests",
                "Requests with a key that reached a backend, by tenant.",
                [(rate("kvferry_tenant_requests_total", "tenant"), "{{tenant}}")],
                "reqps",
                width=12,
            ),
            Panel(
                "In the dashboard's time range",
                "Tokens of each tenant by kind.",
                [
                    (
                        "sum by (tenant, kind) (increase(kvferry_tenant_tokens_total[$__range]))",
                        "{{tenant}} {{kind}}",
                    )
                ],
                "short",
                Kind.NUMBER,
                width=12,
            ),
            Panel(
                "Refused",
                "Requests that were refused because of a limit of their tenant, by limit.",
                [(rate("kvferry_tenant_limits_total", "reason"), "{{reason}}")],
                "reqps",
                width=12,
            ),
        ]
    },
)
