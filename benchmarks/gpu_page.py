"""The record of a GPU check as Markdown: what was measured where, in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu_step import TO_DEVICE, TO_HOST
from offload.bench.copy import COLUMNS as COPY_COLUMNS
from offload.bench.record import Record, Row
from offload.bench.table import (
    Column,
    Grid,
    markdown,
    number,
    plain,
    ratios_of,
    rows_of,
    span,
)
from offload.tiers.units import format_bytes

_Json = Mapping[str, Any]
_KERNEL_COLUMNS = (
    Column("ms", number("seconds", 1e-3, 3)), Column("GB/s", number("bytes_per_s", 1e9, 0)),
)  # fmt: skip
_STEP_COLUMNS = (
    Column("s/step", number("seconds")),
    Column("predicted", number("predicted_s")),
    Column("range", lambda row: span(row.measures.get("seconds", ()))),
    Column("tokens/s", number("tokens_per_s", digits=0)),
    Column("model TFLOP/s", number("model_flops_per_s", 1e12, 0)),
    Column("% of the roofline", number("share_of_roofline", 0.01, 0)),
    Column("% of all bounds", number("share_of_all_bounds", 0.01, 0)),
    Column("peak host GiB", number("peak_rss_nbytes", 2**30, 1)),
    Column("peak device GiB", number("peak_device_nbytes", 2**30, 1)),
)


def render(record: Record) -> str:
    """The findings of `gpu_check` as Markdown; a part that is missing has no section."""
    results = {part["name"]: part["result"] for part in record.details["parts"] if part["result"]}
    renderers: tuple[tuple[str, Callable[[_Json], str]], ...] = (
        ("tests", _tests),
        ("kernels", lambda found: _bench("Kernels", found, _KERNEL_COLUMNS)),
        ("copies", lambda found: _bench("Between host and device", found, COPY_COLUMNS)),
    )
    sections = [_head(record), _parts(record)]
    sections += [draw(results[name]) for name, draw in renderers if name in results]
    sections += [_steps(record), _notes(record)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(record: Record) -> str:
    hardware, details = record.machine, record.details
    named = [hardware.get("gpu", "GPU unknown")]
    if "gpu_memory_nbytes" in hardware:
        named.append(format_bytes(hardware["gpu_memory_nbytes"]))
    cores, cpu = hardware.get("cores", "?"), hardware.get("cpu", "unknown")
    names = ("python", "torch", "cuda", "triton", "kernel")
    versions = [f"{name} {hardware[name]}" for name in names if hardware.get(name)]
    lines = [
        f"# GPU check: {', '.join(named)}",
        "",
        f"{details['date']}, offload {record.to_dict()['offload']}",
        f"- host: {cores} x {cpu}, {format_bytes(hardware.get('memory_nbytes', 0))}",
        f"- software: {', '.join(versions)}",
    ]
    if details.get("machine"):
        lines.append(f"- found: {_found(details['machine'])}")
    return "\n".join(lines)


def _found(machine: _Json) -> str:
    sizes = ", ".join(
        f"{format_bytes(machine[key])} {what}" for key, what in (
            ("device_nbytes", "free on the device"), ("host_nbytes", "of RAM to be had"),
            ("disk_nbytes", "of disk free"),
        )
    )  # fmt: skip
    speeds = ", ".join(
        f"{what} {rate / 1e9:.1f} GB/s" for what, rate in (
            ("optimizer's bus", machine["bus_bytes_per_s"]),
            ("memory touched first", machine["touch_bytes_per_s"]),
            ("disk read", machine["speeds"]["nvme_read_bytes_per_s"]),
            ("written", machine["speeds"]["nvme_write_bytes_per_s"]),
            ("to the device", machine["speeds"]["host_to_device_bytes_per_s"]),
            ("back", machine["speeds"]["device_to_host_bytes_per_s"]),
        )
    )  # fmt: skip
    products = machine["speeds"]["matmul_flops_per_s"]["bf16"]
    return f"{sizes}; bf16 products {products / 1e12:.0f} TFLOP/s, {speeds}"


def _parts(record: Record) -> str:
    rows = [
        (part["name"], part["status"], f"{part['seconds']:.0f}", _first_line(part["note"]))
        for part in record.details["parts"]
    ]
    return f"## Parts\n{markdown(Grid(('part', 'ended', 's', ''), rows))}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:160] if text.strip() else ""


def _tests(tests: _Json) -> str:
    lines = [
        "## Tests on the device",
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped, "
        f"in {tests['processes']} processes.",
    ]
    lines += [f"- failed: {plain(text)}" for text in tests["failures"]]
    lines += [f"- broken: {plain(text)}" for text in tests["broken"]]
    lines += [f"- skipped {count}: {plain(reason)}" for reason, count in tests["skips"].items()]
    return "\n".join(lines)


def _bench(title: str, found: _Json, columns: tuple[Column, ...]) -> str:
    return _tables(title, Record.from_dict(found), columns)


def _tables(title: str, record: Record, columns: tuple[Column, ...]) -> str:
    grids = [rows_of(record, columns), *([ratios_of(record)] if record.ratios else [])]
    tables = "\n\n".join(markdown(grid) for grid in grids)
    notes = "\n\n" + "; ".join(record.notes) + "." if record.bench != "gpu" else ""
    return f"## {title}\n{tables}{notes}"


def _steps(record: Record) -> str:
    """One table for all systems, and the case of each."""
    if not record.details["cases"]:
        return ""
    said = [_case(name, case, record) for name, case in record.details["cases"].items()]
    return "\n".join([_tables("Training steps", record, _STEP_COLUMNS), "", *said])


def _case(name: str, case: _Json, record: Record) -> str:
    budget = case["config"]["budget"]
    text = (
        f"- {name}: {case['numel'] / 1e9:.2f} G parameters, bf16, {case['batch']} x "
        f"{case['config']['train']['sequence']} tokens, activations recomputed, device budget "
        f"{format_bytes(budget['device'])}, host budget {format_bytes(budget['host'])}, "
        f"optimizer on {_places(case['config']['placement'].get('optimizer'))}"
    )
    row = record.measured(case["label"])
    if row is None:
        return text
    return f"{text}; {_bounds(row)}"


def _bounds(row: Row) -> str:
    bounds = {name: value for name, value in row.facts.items() if name.startswith("bound by")}
    text = ", ".join(f"{name}: {value:.2f}" for name, value in bounds.items())
    moved = [
        f"{link} {row.facts[f'{link}, moved per least']:.2f}"
        for link in (TO_DEVICE, TO_HOST)
        if f"{link}, moved per least" in row.facts
    ]
    return text + (f"; bytes moved per least possible: {', '.join(moved)}" if moved else "")


def _places(placement: str | _Json | None) -> str:
    if placement is None:
        return "whichever tier the planner chooses"
    if isinstance(placement, str):
        return placement
    return " and ".join(f"{tier} {share}" for tier, share in placement.items())


def _notes(record: Record) -> str:
    if not record.notes:
        return ""
    return "\n".join(["## Notes", *(f"- {plain(note)}" for note in record.notes)])
