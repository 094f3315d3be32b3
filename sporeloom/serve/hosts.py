# SPDX-License-Identifier: Apache-2.0
"""Host and origin names, and the lists of those that a server accepts."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import NamedTuple

from sporeloom.core.errors import ConfigError
from sporeloom.serve.fields import shown

ANY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
WILDCARDS = ("", "0.0.0.0", "::")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9_-][a-z0-9._-]*)(?::(?P<port>\d{1,5}))?", re.I)
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<host>[^/?#@\s]+)", re.I)


class HostPort(NamedTuple):
    """A `Host` header. Names are in lower case, addresses in their shortest form, without brackets."""

    name: str
    port: int | None


def parse_host(text: str) -> HostPort | None:
    """Parse `name`, `name:port` or `[address]:port`; None: something else."""
    match = _HOST.fullmatch(text)
    if not match:
        return None
    name = match["name"].strip("[]").lower().removesuffix(".")
    address = _address(name)
    if match["name"].startswith("[") and not address:
        return None
    return HostPort(str(address or name), int(match["port"]) if match["port"] else None)


def parse_origin(text: str) -> tuple[str, HostPort] | None:
    """Parse scheme and host of an `Origin` header, always with the port; None: it cannot be compared, as `null`."""
    match = _ORIGIN.fullmatch(text)
    host = parse_host(match["host"]) if match else None
    if not match or not host:
        return None
    scheme = match["scheme"].lower()
    return scheme, HostPort(host.name, host.port or DEFAULT_PORTS[scheme])


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


@dataclass(frozen=True)
class AllowedHosts:
    """Hosts that a server accepts.

    Args:
        bound: the address or name it listens on.
        names: further ones, of `--allowed-hosts`: a name, `*.` and a name for all below it, or `*` for all.

    Raises:
        ConfigError: one of the names is none.
    """

    bound: str
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [name for name in self.names if name != ANY and not _is_plain(name)]:
            raise ConfigError(
                f"--allowed-hosts {shown(word)}: write a host name or address alone, without scheme, port or path; "
                "*.example.com stands for all names below example.com, * for all hosts"
                for word in wrong
            )

    def allows(self, host: HostPort) -> bool:
        if any(name == ANY or _matches(name, host.name) for name in self.names):
            return True
        address = _address(host.name)
        if host.name == "localhost" or (address and address.is_loopback):
            return True
        if self.bound in WILDCARDS:  # an address is not a name that somebody else could point here
            return address is not None or host.name == socket.gethostname().lower()
        bound = parse_host(f"[{self.bound}]" if ":" in self.bound else self.bound)
        return bound is not None and host.name == bound.name


def _is_plain(name: str) -> bool:
    host = parse_host(_base(name))
    return host is not None and host.port is None


def _base(name: str) -> str:
    name = name.removeprefix("*.")
    return f"[{name}]" if _address(name) and ":" in name else name


def _matches(allowed: str, name: str) -> bool:
    host = parse_host(_base(allowed))
    assert host
    return name.endswith(f".{host.name}") if allowed.startswith("*.") else name == host.name


@dataclass(frozen=True)
class AllowedOrigins:
    """Web origins that may use a server, besides its own: those of `--allowed-origins`, `*` for all.

    Raises:
        ConfigError: one of them is none.
    """

    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [origin for origin in self.origins if origin != ANY and not parse_origin(origin)]:
            raise ConfigError(
                f"--allowed-origins {shown(word)}: write scheme, host and port alone, as https://chat.example.com or "
                "http://localhost:3000; * stands for all origins"
                for word in wrong
            )

    def allows(self, origin: str) -> bool:
        page = parse_origin(origin)
        return ANY in self.origins or (page is not None and page in map(parse_origin, self.origins))
