"""The table of keys in docs/deepspeed.md, made of `offload.deepspeed.keys`.

python -m tests.deepspeed.key_page      # writes it anew
"""

from collections.abc import Iterator
from pathlib import Path

from offload.deepspeed.keys import ALSO, MAPPED, Key

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed.md"
BEGIN = "<!-- keys: python -m tests.deepspeed.key_page -->"
END = "<!-- keys end -->"


def line(path: str, key: Key) -> str:
    names = ", ".join(
        f"`{name}`" for name in (path, *(n for n, also in ALSO.items() if also == path))
    )
    return f"| {names} | {f'`{key.becomes}`' if key.becomes else ''} | {key.note} |"


def table() -> Iterator[str]:
    yield from ("| key | becomes | |", "|---|---|---|")
    for section, keys in MAPPED.items():
        yield from (line(f"{section}.{name}".lstrip("."), key) for name, key in keys.items())


def with_table(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return "\n".join([head + BEGIN, "", *table(), "", END + tail])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
