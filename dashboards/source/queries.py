"""PromQL that the panels share, and Grafana's names for their units."""

TOKENS_PER_S = "suffix: tok/s"
SHARE = "percentunit"
# The range of every rate, and the filter for metrics that have the label `backend`.
PER_S = "[$__rate_interval]"
CHOSEN = 'backend=~"$backend"'
# Python's process metrics have the same names in every program: keep only kvferry's.
THE_ROUTERS = "and on (job, instance) kvferry_build_info"


def rate(metric: str, by: str = "", matching: str = "") -> str:
    """Return the rate of a counter, summed over all labels but `by`."""
    chosen = f"{{{matching}}}" if matching else ""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{chosen}{PER_S}))"


def total(metric: str, matching: str = "") -> str:
    """Return the increase of a counter in the dashboard's time range."""
    chosen = f"{{{matching}}}" if matching else ""
    return f"sum(increase({metric}{chosen}[$__range]))"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """Return the quantile `q` of a histogram, by the labels in `by`."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"
