"""The table of keys in docs/deepspeed.md, made of `offload.deepspeed.keys`.

python -m tests.deepspeed.key_page      # writes it anew
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offload.deepspeed.keys import OTHERS, SECTIONS, Fate, Key

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
BEGIN = "<!-- keys: python -m tests.deepspeed.key_page -->"
END = "<!-- keys end -->"


def line(section: str, key: Key) -> str:
    names = ", ".join(f"`{name}`" for name in (key.name, *key.also))
    becomes = f"`{key.becomes}`" if key.becomes else ""
    fate = becomes if key.fate is Fate.MAPPED and becomes else key.fate.value
    if key.fate is Fate.MAPPED and not becomes:
        fate = "code"
    return f"| {names} | {fate} | {key.note} |"


def table() -> Iterator[str]:
    for section, keys in SECTIONS.items():
        yield from ("", f"### {f'`{section}`' if section else 'At the top'}")
        if section == "zero_optimization":
            yield from ("With `stage3_` before a name the key is the same.", "")
        yield from ("| key | becomes | |", "|---|---|---|")
        yield from (line(section, key) for key in keys)
    yield from ("", "### Other sections", "| section | | |", "|---|---|---|")
    yield from (line("", key) for key in OTHERS)


def with_table(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, *table(), "", END + tail])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
