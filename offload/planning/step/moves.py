"""The bytes that an action of a step moves over each link."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planning.step.program import Action


@dataclass(slots=True)
class Bytes:
    """The bytes over each link, the requests to nvme, and the bytes decoded for computing."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    to_host: int = 0
    requests: int = 0
    decoded: int = 0

    def from_nvme(self, nbytes: int, requests: int) -> None:
        self.read += nbytes
        self.requests += requests

    def to_nvme(self, nbytes: int, requests: int) -> None:
        self.written += nbytes
        self.requests += requests

    def add(self, other: Bytes) -> None:
        self.read += other.read
        self.written += other.written
        self.to_device += other.to_device
        self.to_host += other.to_host
        self.requests += other.requests
        self.decoded += other.decoded


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parameters that an action requests, for its own group or ahead."""

    group: int
    read_nbytes: int
    to_device_nbytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """An action with all bytes that it moves; `fetches` has those of parameters by group."""

    action: Action
    nbytes: Bytes
    fetches: tuple[Fetch, ...] = ()
