"""The address of a client behind a trusted proxy, as `Forwarded` or `X-Forwarded-For` name it.

Each proxy appends the address that it was reached from, so the last address that is no trusted
proxy's is the client's. What stands before it anyone may have written (RFC 7239 section 8.1).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address

Network = IPv4Network | IPv6Network

_FOR = re.compile(r'(?:^|[;,\s])for="?([^",;\s]+)"?', re.IGNORECASE)
_WITH_PORT = re.compile(r"\[([^\]]+)\](?::\d+)?|([0-9.]+)(?::\d+)?")


def sender_of(
    remote: str | None,
    forwarded: Sequence[str],
    x_forwarded_for: Sequence[str],
    trusted: Sequence[Network],
) -> str | None:
    """Return the address of the client, or what a proxy calls it. None: it is not known.

    `remote`: of the connection; None or "" at a Unix socket. The others: values of the headers.
    """
    here = remote or ""
    if trusted and _is_trusted(here, trusted):
        for named in reversed([*_named(forwarded, x_forwarded_for)]):
            if not _is_trusted(named, trusted):
                return named
    return here or None


def _named(forwarded: Sequence[str], x_forwarded_for: Sequence[str]) -> Iterator[str]:
    """Yield the addresses that the headers name, the client's first.

    Of both, `X-Forwarded-For` counts: most proxies write it, and pass on the other.
    """
    if x_forwarded_for:
        yield from _bare(one.strip() for value in x_forwarded_for for one in value.split(","))
    else:
        yield from _bare(match[1] for value in forwarded for match in _FOR.finditer(value))


def _bare(addresses: Iterable[str]) -> Iterator[str]:
    """Yield the addresses without port and brackets."""
    for address in addresses:
        matched = _WITH_PORT.fullmatch(address)
        yield (matched[1] or matched[2]) if matched else address


def _is_trusted(name: str, trusted: Sequence[Network]) -> bool:
    """Return whether an address is a trusted proxy's. A Unix socket ("") is, if any is."""
    if not name:
        return True
    try:
        address = ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return any(address in network for network in trusted)
