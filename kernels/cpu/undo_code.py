"""The code of an undoable step (`undo`): what it holds, and how long it is.

For each element it has a byte,

    bits 0-3   the difference of m, -7 .. 7, plus 7; 15: escaped
    bits 4-6   the difference of v, -3 .. 3, plus 3; 7: escaped
    bit 7      p is not x: escaped. With an fp32 master also if the weight is not p, rounded

and escaped values are words, in the order of the vectors; of one vector first p (with an fp32
master, then the weight), then m, then v. It is an int32 array of these parts, together 1.375 bytes
per element and 8 KiB at least:

    differences   a byte per element, in whole blocks of BLOCK
    words         escaped values, in slabs of SLAB words
    links         the first slab of every SECTION elements, and that which follows each slab, or -1
    taken         one word: how many slabs were asked for

Sections take slabs as they need them from those of the whole array, since escaped values come in
heaps: the first gradients of a word after a long time leave no trace of its old m. A block begins
only if all its old values would fit into the section's slab.
"""

from collections.abc import Sequence

from offload.kernels.rules import Rule, StateFormat
from offload.kernels.variants import Variant

SECTION = 1 << 16  # elements; a runner is given a number of sections
BLOCK = 128  # elements
SLAB = 2048  # words
FIELDS = (0, 15), (4, 7), (7, 1)  # of m, v and p: the lowest bit, and what means escaped
_SPARE = 2  # slabs per section, beside the first one of each
_WORD_NBYTES = 4


def can_undo(variant: Variant) -> bool:
    """Whether such steps can be undone: those of Adam and AdamW without amsgrad, with fp32 states
    and a weight that is not rounded stochastically."""
    kept = variant.states is StateFormat.FP32 and not variant.rounds_weight
    return kept and variant.rule is Rule.ADAM and variant.state_count == 2


def code_numel(numel: int) -> int:
    """The length of the code of `numel` elements, in words of four bytes."""
    return sum(lengths(numel))


def codes_nbytes(numel: int, steps: int) -> int:
    """The most bytes of the codes of `numel` elements that are stepped in so many pieces."""
    # each piece more may have a block and a section more that are not full, with their own parts
    more = BLOCK // _WORD_NBYTES + SLAB + 3
    return _WORD_NBYTES * (code_numel(numel) + (steps - 1) * more)


def lengths(numel: int) -> Sequence[int]:
    """The words of each part of a code."""
    sections = -(-numel // SECTION)
    slabs = sections + numel * _SPARE // SECTION
    return -(-numel // BLOCK) * BLOCK // _WORD_NBYTES, slabs * SLAB, sections + slabs, 1
