# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, SIM108 - what is fixed at compile time is written so in Triton
"""The sequences of `kernels.rules` as Triton functions: one fp32 element in, one out.

Line by line what that docstring says; fused operations only where it writes fma. Constants come in
its order, as c0, c1, ..., and states as m, v, x.
"""

import triton
import triton.language as tl

from offload.kernels.rules import Rule

ADAM = tl.constexpr(int(Rule.ADAM))
LION = tl.constexpr(int(Rule.LION))
ADAGRAD = tl.constexpr(int(Rule.ADAGRAD))
SGD = tl.constexpr(int(Rule.SGD))
MUON = tl.constexpr(int(Rule.MUON))


@triton.jit
def adam(g, p, m, v, x, C1, B2, C2, R, E, D, A, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr):
    """(p, m, v, x)"""
    if DECOUPLED:
        p = p * D
    else:
        g = tl.fma(D, p, g)
    m = tl.fma(C1, g, tl.fma(-C1, m, m))
    v = tl.fma(C2 * g, g, B2 * v)
    if AMSGRAD:
        x = tl.where(x > v, x, v)  # tl.maximum treats NaN and -0 in its own way
    else:
        x = v
    t = tl.fma(tl.sqrt_rn(x), R, E)
    p = tl.fma(A, tl.div_rn(m, t), p)
    return p, m, v, x


@triton.jit
def lion(g, p, m, C1, C2, D, A):
    """(p, m)"""
    p = p * D
    t = tl.fma(C1, g, tl.fma(-C1, m, m))
    u = tl.where(t > 0.0, 1.0, tl.where(t < 0.0, -1.0, t))
    p = tl.fma(A, u, p)
    m = tl.fma(C2, g, tl.fma(-C2, m, m))
    return p, m


@triton.jit
def adagrad(g, p, s, W, E, A):
    """(p, s)"""
    g = tl.fma(W, p, g)
    s = tl.fma(g, g, s)
    p = tl.fma(A, tl.div_rn(g, tl.sqrt_rn(s) + E), p)
    return p, s


@triton.jit
def sgd(g, p, b, W, M, K, A, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    """(p, b)"""
    g = tl.fma(W, p, g)
    if MOMENTUM:
        b = tl.fma(M, b, K * g)
        if NESTEROV:
            g = tl.fma(M, b, g)
        else:
            g = b
    p = tl.fma(A, g, p)
    return p, b


@triton.jit
def muon(g, p, m, K1, B1, K2, B2, D, A, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    """(p, m)"""
    if MOMENTUM:
        m = tl.fma(K1, g - m, tl.fma(B1, g, tl.fma(-B1, m, m)))
        if NESTEROV:
            g = tl.fma(K2, m - g, tl.fma(B2, m, tl.fma(-B2, g, g)))
        else:
            g = m
    p = tl.fma(A, g, p * D)
    return p, m


@triton.jit
def apply(
    g, p, m, v, x, c1, c2, c3, c4, c5, c6, c7,
    RULE: tl.constexpr, FLAG: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """(p, m, v, x) after the rule; g is scaled already. FLAG: of the scalars.

    States that the rule does not have come back as they were.
    """
    if RULE == ADAM:
        p, m, v, x = adam(g, p, m, v, x, c1, c2, c3, c4, c5, c6, c7, FLAG, STATES == 3)
    elif RULE == LION:
        p, m = lion(g, p, m, c1, c2, c3, c4)
    elif RULE == ADAGRAD:
        p, m = adagrad(g, p, m, c1, c2, c3)
    elif RULE == SGD:
        p, m = sgd(g, p, m, c1, c2, c3, c4, STATES == 1, FLAG)
    elif RULE == MUON:
        p, m = muon(g, p, m, c1, c2, c3, c4, c5, c6, STATES == 1, FLAG)
    else:
        tl.static_assert(False, "a rule without a function here")
    return p, m, v, x
