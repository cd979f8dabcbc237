"""Quantizes the frozen weights of a whole group to 8 or 4 bits (a `swap.Quantizer`)."""

from dataclasses import dataclass

import numpy as np
import torch

from offload.kernels.bits import DTYPE_OF, array_of
from offload.kernels.cpu.quantization import dequantize_weights, quantize_weights
from offload.kernels.floats import Float, Runner, serial
from offload.kernels.gpu import triton_dequantize as device_kernels
from offload.kernels.weight_formats import WeightFormat
from offload.tiers.accelerator import is_accelerator
from offload.tiers.errors import UnsupportedError
from offload.zero.groups.layout import QuantizedLayout, QuantizedPart

_SHARED_NUMEL = 1 << 20


@dataclass(frozen=True)
class WeightQuantizer:
    """Quantizes one group's buffer, as `layout` places it. `run` shares ranges of groups of
    elements (tens to hundreds) among threads; their distribution changes no bit."""

    layout: QuantizedLayout
    kind: Float  # of the values in a slot
    run: Runner = serial

    def runner(self, part: QuantizedPart) -> Runner:
        """Return the runner for a parameter: small ones are not worth waking a thread for."""
        return self.run if part.spec.numel >= _SHARED_NUMEL else serial

    def stored_nbytes(self, nbytes: int) -> int:
        if nbytes != self.layout.nbytes:
            raise ValueError(f"a group of {self.layout.nbytes} bytes, got {nbytes} of them")
        return self.layout.stored_nbytes

    def quantize(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        end = 0
        for part in self.layout.parts:
            stored[end : part.stored.start].zero_()
            end = part.stored.stop
            self._check(part, values[part.values])
            self._store(part, values[part.values], stored[part.stored])
        stored[end:].zero_()

    def update(self, values: torch.Tensor, stored: torch.Tensor) -> None:
        for part in self.layout.parts:
            self._check(part, values[part.values])
        for part in self.layout.parts:
            now, kept = values[part.values], stored[part.stored]
            was = torch.empty_like(now)
            self._load(part, kept, was)
            if not torch.equal(now, was):
                self._store(part, now, kept)

    def dequantize(self, stored: torch.Tensor, values: torch.Tensor) -> None:
        end = 0
        for part in self.layout.parts:
            values[end : part.values.start].zero_()
            end = part.values.stop
            self._load(part, stored[part.stored], values[part.values])
        values[end:].zero_()

    def _check(self, part: QuantizedPart, values: torch.Tensor) -> None:
        """Raise UnsupportedError for values that are not finite: elements that share a scale with
        one would be lost, too."""
        if part.weights is None or not part.spec.numel:
            return
        if not all(end.isfinite() for end in values.view(DTYPE_OF[self.kind]).aminmax()):
            wider = ", or set precision: bf16, which holds larger numbers"
            raise UnsupportedError(
                f"{part.spec.name} has values that are infinite or NaN in "
                f"{self.kind.name.lower()}, which cannot be stored in {part.weights.name}; add it "
                f"to storage.skip{wider if self.kind is Float.FP16 else ''}"
            )

    def _store(self, part: QuantizedPart, values: torch.Tensor, stored: torch.Tensor) -> None:
        """Store one parameter; both arguments are its own bytes, in host memory."""
        if part.weights is None:
            stored.copy_(values)
            return
        words, codes, rest = split_codes(stored, part.weights, part.spec.numel)
        for padding in rest:
            padding.zero_()
        arrays = array_of(values, self.kind), words.numpy().view(np.uint32), codes.numpy()
        quantize_weights(*arrays, part.weights, self.kind, self.runner(part))

    def _load(self, part: QuantizedPart, stored: torch.Tensor, values: torch.Tensor) -> None:
        """The reverse of `_store`."""
        if part.weights is None:
            values.copy_(stored)
            return
        words, codes, _ = split_codes(stored, part.weights, part.spec.numel)
        if is_accelerator(values.device):
            typed = values.view(DTYPE_OF[self.kind])
            device_kernels.dequantize_weights(words, codes, typed, part.weights)
            return
        arrays = words.numpy().view(np.uint32), codes.numpy(), array_of(values, self.kind)
        dequantize_weights(*arrays, part.weights, self.kind, self.runner(part))


def split_codes(
    stored: torch.Tensor, weights: WeightFormat, numel: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return words (int32) and codes of a stored parameter, and the padding behind each."""
    first, end = weights.scales_nbytes(numel), 4 * (numel // weights.group_size)
    codes = stored[first : first + weights.codes_nbytes(numel)]
    return stored[:end].view(torch.int32), codes, (stored[end:first], stored[first + len(codes) :])
