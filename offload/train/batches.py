"""The batches of a run, for training steps and for the validation loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload.config import OffloadConfig
from offload.memory.tier_manager import compute_device
from offload.train.text import Batcher, load_corpus

_VALIDATION_STREAM = 1 << 40  # step numbers no training step reaches

Batch = tuple[Tensor, Tensor]  # inputs and targets, both BS


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
        corpus = load_corpus(train.text, train.validation, train.sequence)
        training = Batcher(corpus.training, train.batch, train.sequence, config.seed)
        validation = None
        if len(corpus.validation) > train.sequence and train.evaluate_batches:
            validation = Batcher(corpus.validation, train.batch, train.sequence, config.seed)
        return cls(training, validation, compute_device(config), rank, size)

    def train_at(self, step: int, micro_step: int) -> Batch:
        # N ranks see in one pass what one rank sees in N
        return self._on_device(*self.training.at(step, micro_step * self.size + self.rank))

    def validation_at(self, index: int) -> Batch:
        assert self.validation is not None
        return self._on_device(*self.validation.at(_VALIDATION_STREAM, index))

    def _on_device(self, tokens: Tensor, targets: Tensor) -> Batch:
        return tokens.to(self.device), targets.to(self.device)
