"""The rules of `kernels.rules` in vector operations: line by line the sequences documented there.

A rule is emitted in parts, so that a kernel may put other work between them:

    moments      the new states, and what direction it takes
    root         a square root on the way, if there is one
    direction    where the weight goes: m / (sqrt(v) + eps), a sign, or a gradient
    weight       fma(minus step size, direction, p), with p decayed or not

`c` are the scalars' constants in every lane; the gradient g is scaled already.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.kernels.cpu.lanes import Lanes, Value
from offload.kernels.rules import Rule
from offload.kernels.variants import Variant

Values = Sequence[Value]


@dataclass(frozen=True, slots=True)
class RuleLanes:
    """How to emit a rule; `decay` is the index of the constant that p is multiplied by, if any (if
    the flag is set, with `decays_by_flag`).

    moments(vector, variant, c, g, old p, states) -> new states, way
    root(vector, c, way) -> way; where None, there is no root and no division
    direction(vector, way)
    """

    constants: int
    moments: Callable[[Lanes, Variant, Values, Value, Value, Values], tuple[Values, Values]]
    direction: Callable[[Lanes, Values], Value]
    root: Callable[[Lanes, Values, Values], Values] | None = None
    decay: int | None = None
    decays_by_flag: bool = False
    # Root and division take so long that with 8-bit states the weight waits for the second sweep,
    # whose integer work runs meanwhile. They need nothing but the new states.
    weight_last: bool = False

    def weight(
        self, vector: Lanes, variant: Variant, c: Values, p: Value, direction: Value
    ) -> Value:
        """The new p; the last constant is the step size, negative."""
        decays = variant.flag or not self.decays_by_flag
        if self.decay is not None and decays:
            p = vector.mul(p, c[self.decay])
        return vector.fma(c[-1], direction, p)


def adam_moments(
    vector: Lanes, variant: Variant, c: Values, g: Value, p: Value, states: Values
) -> tuple[Values, Values]:
    _, one_minus_beta1, beta2, one_minus_beta2, _, _, decay, _ = c
    m, v = states[:2]
    if not variant.flag:  # decoupled
        g = vector.fma(decay, p, g)
    m = _average(vector, one_minus_beta1, m, g)
    v = vector.fma(vector.mul(one_minus_beta2, g), g, vector.mul(beta2, v))
    if variant.state_count == 2:  # no amsgrad
        return (m, v), (m, v)
    # A NaN in v stays there for good, so the maximum may drop one of its own.
    largest = vector.maximum(states[2], v)
    return (m, v, largest), (m, largest)


def adam_root(vector: Lanes, c: Values, way: Values) -> Values:
    inverse_root, eps = c[4:6]
    return way[0], vector.fma(vector.sqrt(way[1]), inverse_root, eps)


def lion_moments(
    vector: Lanes, variant: Variant, c: Values, g: Value, p: Value, states: Values
) -> tuple[Values, Values]:
    _, one_minus_beta1, one_minus_beta2, _, _ = c
    (m,) = states
    ahead = _average(vector, one_minus_beta1, m, g)
    return (_average(vector, one_minus_beta2, m, g),), (ahead,)


def adagrad_moments(
    vector: Lanes, variant: Variant, c: Values, g: Value, p: Value, states: Values
) -> tuple[Values, Values]:
    g = vector.fma(c[1], p, g)
    total = vector.fma(g, g, states[0])
    return (total,), (g, total)


def adagrad_root(vector: Lanes, c: Values, way: Values) -> Values:
    return way[0], vector.add(vector.sqrt(way[1]), c[2])


def sgd_moments(
    vector: Lanes, variant: Variant, c: Values, g: Value, p: Value, states: Values
) -> tuple[Values, Values]:
    _, weight_decay, momentum, kept, _ = c
    g = vector.fma(weight_decay, p, g)
    if not variant.state_count:  # no momentum
        return (), (g,)
    buffer = vector.fma(momentum, states[0], vector.mul(kept, g))
    # the flag: nesterov
    return (buffer,), (vector.fma(momentum, buffer, g) if variant.flag else buffer,)


def muon_moments(
    vector: Lanes, variant: Variant, c: Values, g: Value, p: Value, states: Values
) -> tuple[Values, Values]:
    if not states:  # the pass that changes weights
        return (), (g,)
    _, k1, b1, k2, b2, _, _ = c
    (old,) = states
    m = vector.fma(k1, vector.add(g, vector.neg(old)), _average(vector, b1, old, g))
    # the flag: nesterov
    ahead = vector.fma(k2, vector.add(m, vector.neg(g)), _average(vector, b2, g, m))
    return (m,), (ahead if variant.flag else m,)


def _quotient(vector: Lanes, way: Values) -> Value:
    return vector.div(*way)


RULES = {
    Rule.ADAM: RuleLanes(
        8, adam_moments, _quotient, adam_root, decay=6, decays_by_flag=True, weight_last=True
    ),
    Rule.LION: RuleLanes(5, lion_moments, lambda vector, way: vector.sign(way[0]), decay=3),
    Rule.ADAGRAD: RuleLanes(4, adagrad_moments, _quotient, adagrad_root),
    Rule.SGD: RuleLanes(5, sgd_moments, lambda _, way: way[0]),
    Rule.MUON: RuleLanes(7, muon_moments, lambda _, way: way[0], decay=5),
}


def _average(vector: Lanes, share: Value, old: Value, new: Value) -> Value:
    """old + share * (new - old), without the difference."""
    return vector.fma(share, new, vector.fma(vector.neg(share), old, old))
