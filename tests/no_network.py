"""Tests reach this machine alone: a connection to another one is an error, and fails the test.

Ranks talk to each other over the loopback interface. Connections of C++ (gloo) stay there by name;
`unshare --net` with that interface up is a machine on which the whole suite passes, too.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Any

# "event: host" of each refused call, for the test that made it to fail even if it goes on
refused: list[str] = []

_LOCAL_NAMES = {"", "localhost", os.uname().nodename}
_installed: list[bool] = []


def block() -> None:
    """From here on, in this process and those forked from it. Cannot be undone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_look)


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not event.startswith("socket."):
        return
    if event in ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"):
        address = args[1]
        host = address[0] if isinstance(address, tuple) else None  # else of AF_UNIX
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = args[0]
    else:
        return
    if host is not None and not is_local(host):
        refused.append(f"{event}: {host}")
        raise PermissionError(f"{event} to {host}: tests use this machine alone")


def is_local(host: str | bytes) -> bool:
    """Whether it names this machine, or any of its interfaces (to listen)."""
    name = host.decode(errors="replace") if isinstance(host, bytes) else str(host)
    if name in _LOCAL_NAMES:
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
