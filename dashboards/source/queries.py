"""PromQL that panels have in common, and Grafana's names for their units."""

TOKENS_PER_S = "suffix: tok/s"
SHARE = "percentunit"
# Much of what some panel shows is a rate; of the chosen backends where the metric has the label.
PER_S = "[$__rate_interval]"
CHOSEN = 'backend=~"$backend"'
# Python's metrics of a process have the same names in every program.
THE_ROUTERS = "and on (job, instance) kvferry_build_info"


def rate(metric: str, by: str = "", matching: str = "") -> str:
    """A counter's rate, summed over what is not in `by`."""
    chosen = f"{{{matching}}}" if matching else ""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{chosen}{PER_S}))"


def total(metric: str, matching: str = "") -> str:
    """What a counter has gone up by in the time that is looked at."""
    chosen = f"{{{matching}}}" if matching else ""
    return f"sum(increase({metric}{chosen}[$__range]))"


def quantile(q: float, histogram: str, by: str = "") -> str:
    """A quantile of a histogram, by labels."""
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', f'le, {by}' if by else 'le')})"
