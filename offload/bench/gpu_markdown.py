"""The record of a GPU check as Markdown: what was measured where, in tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from offload.bench.gpu_bounds import TO_DEVICE, TO_HOST
from offload.tiers.units import format_bytes

_Json = Mapping[str, Any]


def render(record: _Json) -> str:
    """Markdown of what `gpu_check` wrote as JSON; a part that is not there has no section."""
    sections = [_head(record), _parts(record)]
    results = {part["name"]: part["result"] for part in record["parts"] if part["result"]}
    renderers: tuple[tuple[str, Callable[[_Json], str]], ...] = (
        ("tests", _tests), ("kernels", _kernels), ("copies", _copies),
    )  # fmt: skip
    sections += [draw(results[name]) for name, draw in renderers if name in results]
    sections.append(_steps(record))
    sections.append(_notes(record))
    return "\n\n".join(section for section in sections if section) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; a `|` in a cell is escaped."""
    marks = ["---", *("---:" for _ in headings[1:])]
    lines = [headings, marks, *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _head(record: _Json) -> str:
    hardware = record["hardware"]
    named = [hardware.get("gpu", "GPU unknown")]
    if "gpu_memory_nbytes" in hardware:
        named.append(format_bytes(hardware["gpu_memory_nbytes"]))
    cores, cpu = hardware.get("cores", "?"), hardware.get("cpu", "unknown")
    lines = [
        f"# GPU check: {', '.join(named)}",
        "",
        f"{record['date']}, offload {record['offload']}",
    ]
    lines.append(f"- host: {cores} x {cpu}, {format_bytes(hardware.get('memory_nbytes', 0))}")
    names = ("python", "torch", "cuda", "triton", "kernel")
    versions = [f"{name} {hardware[name]}" for name in names if hardware.get(name)]
    lines.append(f"- software: {', '.join(versions)}")
    if record.get("machine"):
        lines.append(f"- found: {_found(record['machine'])}")
    return "\n".join(lines)


def _found(machine: _Json) -> str:
    sizes = ", ".join(
        f"{format_bytes(machine[key])} {what}" for key, what in (
            ("device_nbytes", "free on the device"), ("host_nbytes", "of RAM to be had"),
            ("disk_nbytes", "of disk free"),
        )
    )  # fmt: skip
    return (
        f"{sizes}; bf16 products {machine['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s, "
        f"optimizer's bus {_gb(machine['bus_bytes_per_s'])} GB/s, "
        f"memory touched first {_gb(machine['touch_bytes_per_s'])} GB/s, "
        f"disk {_gb(machine['disk_read_bytes_per_s'])} read and "
        f"{_gb(machine['disk_write_bytes_per_s'])} write GB/s"
    )


def _parts(record: _Json) -> str:
    rows = [
        (part["name"], part["status"], f"{part['seconds']:.0f}", _first_line(part["note"]))
        for part in record["parts"]
    ]
    return f"## Parts\n{table(('part', 'ended', 's', ''), rows)}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:160] if text.strip() else ""


def _tests(tests: _Json) -> str:
    lines = [
        "## Tests on the device",
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped, "
        f"in {tests['processes']} processes.",
    ]
    lines += [f"- failed: {_cell(text)}" for text in tests["failures"]]
    lines += [f"- broken: {_cell(text)}" for text in tests["broken"]]
    lines += [f"- skipped {count}: {_cell(reason)}" for reason, count in tests["skips"].items()]
    return "\n".join(lines)


def _kernels(record: _Json) -> str:
    rows = {row["name"]: row for row in record["rows"]}
    lines = []
    for ratio in record["ratios"]:
        ours, copy = rows[ratio["of"]]["medians"], rows[ratio["to"]]["medians"]
        lines.append(
            (
                ratio["of"], f"{ours['seconds'] * 1e3:.3f}", _gb(ours["bytes_per_s"], 0),
                _gb(copy["bytes_per_s"], 0), f"{ratio['median']:.3f}", _span(ratio["rounds"]),
            )
        )  # fmt: skip
    headings = ("kernel", "ms", "GB/s", "copy of as many bytes, GB/s", "ratio", "range")
    return f"## Kernels\n{table(headings, lines)}\n\n{'; '.join(record['notes'])}."


def _copies(record: _Json) -> str:
    measured = [row for row in record["rows"] if row["measures"]]
    speeds = [(row["name"], row["measures"]["bytes_per_s"], row["medians"]) for row in measured]
    lines = [
        (name, _gb(medians["bytes_per_s"], 1), _span(rounds, 1e9))
        for name, rounds, medians in speeds
    ]
    headings = ("copy", "GB/s", "range")
    notes = "; ".join(record["notes"])
    return f"## Between host and device\n{table(headings, lines)}\n\n{notes}."


def _steps(record: _Json) -> str:
    """One table for all systems, and the case of each."""
    results = {part["name"]: part["result"] for part in record["parts"]}
    rows, said = [], []
    for step in record["steps"]:
        case = step["case"]
        said.append(_case(step["name"], case, step.get("judged")))
        result, judged = results.get(step["name"]), step.get("judged")
        if not result or not judged:
            rows.append((step["label"], case["shape"]["name"], *("-",) * 8))
            continue
        rows.append(
            (
                step["label"], case["shape"]["name"], f"{judged['seconds']:.2f}",
                _span(result["seconds"]), f"{judged['tokens_per_s']:,.0f}",
                f"{judged['model_flops_per_s'] / 1e12:.0f}",
                _share(judged.get("share_of_roofline")), _share(judged.get("share_of_all_bounds")),
                _gib(result["peak_rss_nbytes"]), _gib(result["peak_device_nbytes"]),
            )
        )  # fmt: skip
    if not rows:
        return ""
    headings = (
        "system", "model", "s/step", "range", "tokens/s", "model TFLOP/s", "of the roofline",
        "of all bounds", "peak host GiB", "peak device GiB",
    )  # fmt: skip
    ratios = [f"- {text}" for text in record.get("ratios", ())]
    return "\n".join(
        ["## Training steps", table(headings, rows), "", *dict.fromkeys(said), *ratios]
    )


def _case(name: str, case: _Json, judged: _Json | None) -> str:
    budget = case["config"]["budget"]
    text = (
        f"- {name}: {case['parameters'] / 1e9:.2f} G parameters, bf16, {case['batch']} x "
        f"{case['sequence']} tokens, activations recomputed, device budget "
        f"{format_bytes(budget['device'])}, host budget {format_bytes(budget['host'])}, "
        f"optimizer on {_places(case['config']['placement']['optimizer'])}"
    )
    if not judged:
        return text
    bounds = ", ".join(f"{what} {s:.2f}" for what, s in sorted(judged["bounds_s"].items()))
    moved = [
        f"{link} {judged[f'{link}, moved per least']:.2f}"
        for link in (TO_DEVICE, TO_HOST)
        if f"{link}, moved per least" in judged
    ]
    text += f"; bounds in s: {bounds}"
    return text + (f"; bytes moved per least possible: {', '.join(moved)}" if moved else "")


def _places(placement: str | _Json) -> str:
    if isinstance(placement, str):
        return placement
    return " and ".join(f"{tier} {share}" for tier, share in placement.items())


def _notes(record: _Json) -> str:
    if not record["notes"]:
        return ""
    return "\n".join(["## Notes", *(f"- {_cell(note)}" for note in record["notes"])])


def _gb(nbytes: float, digits: int = 1) -> str:
    return f"{nbytes / 1e9:.{digits}f}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f}" if nbytes else "-"


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.0%}"


def _span(values: Sequence[float], scale: float = 1.0) -> str:
    """Lowest and highest; nothing where there is but one."""
    if len(values) < 2:
        return ""
    return f"{min(values) / scale:.2f} .. {max(values) / scale:.2f}"
