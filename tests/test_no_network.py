"""Nothing asks another machine for anything: neither what is installed, nor a test."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest

from tests import no_network

ROOT = Path(__file__).parents[1]
INSTALLED = ("offload", "tiers", "swap", "kernels", "zero", "tools")
# What opens connections, or asks others to.
TALKATIVE = {
    "aiohttp", "asyncio.streams", "ftplib", "http", "httpx", "requests", "smtplib", "socket",
    "socketserver", "ssl", "telnetlib", "urllib", "urllib3", "xmlrpc",
}  # fmt: skip
ALLOWED: set[tuple[str, str]] = set()


@pytest.mark.slow
def test_installed_modules_import_nothing_that_connects() -> None:
    imports = set()
    for folder in INSTALLED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if not any(name in text for name in TALKATIVE):
                continue
            for node in ast.walk(ast.parse(text)):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                place = str(path.relative_to(ROOT))
                imports |= {(place, n) for n in names if TALKATIVE & {n, n.partition(".")[0]}}
    assert imports == ALLOWED


def refused() -> list[str]:
    """What was, which this test then does not fail for."""
    calls = list(no_network.refused)
    no_network.refused.clear()
    return calls


@pytest.mark.parametrize("host", ["192.0.2.1", "example.org", "2001:db8::1"])
def test_a_test_that_looks_for_another_machine_is_refused_before_it_does(host: str) -> None:
    with pytest.raises(PermissionError, match="tests use this machine alone"):
        socket.create_connection((host, 80), timeout=1)
    assert refused() == [f"socket.getaddrinfo: {host}"]


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_a_test_that_connects_to_another_machine_is_refused(host: str) -> None:
    with (
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as opened,
        pytest.raises(PermissionError),
    ):
        opened.connect((host, 80))
    assert refused() == [f"socket.connect: {host}"]


def test_ranks_of_this_machine_are_reached() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        socket.create_connection(listening.getsockname(), timeout=60).close()
    assert refused() == []
