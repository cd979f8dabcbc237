"""MLPs of long sequences, computed some tokens at a time: `placement.activations.tiled_mlp`.

Inside, an MLP is several times as wide as its model: of 131,072 tokens, that of Llama 8B has six
tensors of 3.8 GB in backward. It computes every token alone, so one tile of them may follow the
other (TiledMLP of ALST, Bekman et al., 2025):

    forward    each tile: the MLP's forward, without a graph      its rows of the output
    backward   each tile: the MLP's forward again, its backward   its rows of the input's gradient,
                                                                  fp32 sums of the parameters'

Autograd sees two functions: `_Input` saves what backward needs, then `_Output` computes. So a
checkpoint around a block that ends with its MLP does not compute the MLP again, only its input.
Each parameter gets one gradient per backward pass, rounded once per tile and once as a sum.

An MLP is a module by the name of mlp, feed_forward or ffn. What it draws (dropout), it draws tile
by tile, and again in backward. An MLP that does not compute every token alone is an
UnsupportedError, one of experts a ConfigError. Its first call tries it as it is in eval().
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from offload.tiers.errors import ConfigError, UnsupportedError
from offload.zero.hooks.compilers import uncompiled
from offload.zero.recompute.random_state import RandomState, generators_of, torch_generators

_KEY = "placement.activations.tiled_mlp"
_NAMES = ("mlp", "feed_forward", "ffn")
_OF_EXPERTS = re.compile("expert|router|moe", re.IGNORECASE)
_TRIED = 8  # tokens, on the first call
_Places = list[list[tuple[nn.Module, str]]]  # of each parameter, under all of its names


def tile_mlps(model: nn.Module, tile: int | None) -> Callable[[], None]:
    """Let the MLPs of `model` compute `tile` tokens at a time; None changes nothing. Return a
    function that undoes it. Raises ConfigError, and changes nothing, if there are none, or if one
    is of experts, whose router and loss are for all tokens."""
    if tile is None:
        return lambda: None
    mlps: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _NAMES and not name.startswith(tuple(f"{n}." for n in mlps)):
            mlps[name] = module
    if not mlps:
        kind, names = type(model).__name__, ", ".join(_NAMES)
        raise ConfigError(f"{_KEY}: {kind} has no module by the name of {names}; remove it")
    for name, mlp in mlps.items():
        for path, module in mlp.named_modules():
            packed = any(p.dim() > 2 for p in module._parameters.values() if p is not None)
            if packed or _OF_EXPERTS.search(f"{path} {type(module).__name__}"):
                raise ConfigError(f"{_KEY}: {name} ({type(mlp).__name__}) is of experts; remove it")
    undo = ExitStack()
    for name, mlp in mlps.items():
        own = {key: value for key, value in vars(mlp).items() if key == "forward"}
        undo.callback(vars(mlp).update, own)
        undo.callback(vars(mlp).pop, "forward")
        mlp.forward = TiledMlp(name, mlp, tile)
    return undo.close


class TiledMlp:
    """One MLP's forward, called in the place of its `own`."""

    def __init__(self, name: str, module: nn.Module, tile: int) -> None:
        self.module = module
        self.own: Callable[[Tensor], Any] = module.forward
        self._name, self._tile = name, tile
        self._was_checked = False

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not args[0].dim():
            self._refuse("is called with other arguments than one tensor")
        x: Tensor = args[0]
        if len(_rows(x)) <= self._tile:
            return self.own(x)
        params, places = self._parameters()
        self._check_once(x)
        if torch.is_grad_enabled():
            # a view of a parameter that is away holds its values until the model has returned
            x = _Input.apply(x, self, places, *(param.view_as(param) for param in params))
        return _Output.apply(x, self)

    def tiles(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield tiles of the tokens, which have as many dimensions as `x`, and their rows."""
        rows = _rows(x)
        for start in range(0, len(rows), self._tile):
            where = slice(start, min(start + self._tile, len(rows)))
            yield where, _like(x, rows[where].detach())

    def computed(self, x: Tensor) -> Tensor:
        """Return the output for all tokens."""
        output: Tensor | None = None
        versions = {buffer: buffer._version for buffer in self.module.buffers()}
        for where, tile in self.tiles(x):
            part = self._part(tile)
            if output is None:
                output = part.new_empty(x.shape)
            _rows(output)[where] = _rows(part)
        if versions != {buffer: buffer._version for buffer in self.module.buffers()}:
            self._refuse("changes its buffers")
        assert output is not None, "there is more than one tile"
        return output

    def _part(self, tile: Tensor) -> Tensor:
        part = self.own(tile)
        if not isinstance(part, Tensor) or part.shape != tile.shape:
            self._refuse("returns something else than one tensor of its input's shape")
        if torch.promote_types(part.dtype, tile.dtype) is not tile.dtype:
            self._refuse(f"makes {part.dtype} of {tile.dtype}")  # its gradient would be rounded
        return part

    def _parameters(self) -> tuple[list[nn.Parameter], _Places]:
        """Return each parameter once, and its places. Raise UnsupportedError for hooks of other
        code inside, which would see tiles, and see them again in backward."""
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for path, module in self.module.named_modules():
            hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
            hooks += *module._backward_pre_hooks.values(), *module._backward_hooks.values()
            if path and not all(type(hook).__module__.startswith("offload.") for hook in hooks):
                self._refuse(f"has hooks of other code on its {path}")
            for name, param in module._parameters.items():
                if param is not None and param.is_floating_point():
                    found.setdefault(param, []).append((module, name))
        return list(found), list(found.values())

    @torch.no_grad()
    def _check_once(self, x: Tensor) -> None:
        """Raise UnsupportedError if some tokens' outputs are others beside other tokens. Dropout is
        off meanwhile, and no watch of operations sees it."""
        if self._was_checked or isinstance(x, FakeTensor):
            return
        training = {module: module.training for module in self.module.modules()}
        try:
            with no_dispatch():
                for module in training:
                    module.training = False
                numbers = torch.arange(_TRIED * x.shape[-1], device=x.device).sin().to(x.dtype)
                rows = numbers.view(_TRIED, -1)
                parts = rows, rows[:3], rows[3:]
                whole, *some = (_rows(self._part(_like(x, part))).float() for part in parts)
                difference = (torch.cat(some) - whole).abs().max()
                rows[3] = torch.nan  # it passes what multiplies it by zero, as a new gate does
                spoilt = _rows(self._part(_like(x, rows))).isnan() & ~whole.isnan()
                spoilt[3] = False
                beyond_rounding = difference > whole.abs().max() / 32  # of 16 bits
                is_other = bool(spoilt.any() | beyond_rounding)
        finally:
            for module, was in training.items():
                module.training = was
        if is_other:
            self._refuse("makes a token's output of other tokens, too")
        self._was_checked = True

    def refuse_others(self, output: Tensor, inputs: Sequence[Tensor]) -> None:
        """Raise UnsupportedError if a graph has other leaves than `inputs`: they would get no
        gradient."""
        known = {id(tensor) for tensor in inputs}
        nodes, seen = [output.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable") and id(node.variable) not in known:
                self._refuse("computes with tensors to train that are no parameters of its own")
            nodes += [following for following, _ in node.next_functions]

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedError(
            f"{_KEY}: {self._name} ({type(self.module).__name__}) {why}, and only an MLP that "
            "computes every token alone is computed in tiles; remove it"
        )


class _Input(torch.autograd.Function):
    """Saves the input and the parameters of an MLP. It returns the input; the gradient that comes
    back is that of the MLP's output, through `_Output`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: TiledMlp, places: _Places, *params: Tensor) -> Tensor:
        generators = *generators_of(mlp.module), *torch_generators(x.device).values()
        ctx.mlp, ctx.places, ctx.random = mlp, places, RandomState(generators)
        ctx.autocast = _autocast(x.device.type)
        ctx.save_for_backward(x, *params)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{_KEY}: MLPs in tiles have no second derivative, which "
                "backward(create_graph=True) asks for; remove it"
            )
        mlp: TiledMlp = ctx.mlp
        x, *saved = ctx.saved_tensors
        wants_x, _, _, *wanted = ctx.needs_input_grad
        params = [p.detach().requires_grad_(w) for p, w in zip(saved, wanted, strict=True)]
        trained = [index for index, param in enumerate(params) if param.requires_grad]
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wants_x else None
        sums: list[Tensor | None] = [None] * len(params)
        with torch.enable_grad(), ctx.random.again(), ctx.autocast(), _put(params, ctx.places):
            for where, tile in mlp.tiles(x.detach()):
                tile.requires_grad_(wants_x)
                output = mlp.own(tile)
                given = _rows(upstream)[where].view(output.shape).to(output.dtype)
                inputs = [each for each in (tile, *params) if each.requires_grad]
                if not where.start:
                    mlp.refuse_others(output, inputs)
                gradients = [*torch.autograd.grad(output, inputs, given, allow_unused=True)]
                if of_x is not None:
                    of_tile = gradients.pop(0)
                    _rows(of_x)[where] = 0 if of_tile is None else _rows(of_tile)
                for index in trained:
                    sums[index] = _sum(sums[index], gradients.pop(0))
        for index, total in enumerate(sums):
            sums[index] = None if total is None else total.to(params[index].dtype)  # one at a time
        return of_x, None, None, *sums


class _Output(torch.autograd.Function):
    """What an MLP makes of its input. Its gradient is handed on to `_Input`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mlp: TiledMlp) -> Tensor:
        with _autocast(x.device.type)():
            return mlp.computed(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return upstream, None


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Add to a sum in fp32 (fp64 for fp64), in place. The first part is copied: two parameters may
    have the same tensor as their gradient."""
    if part is None:
        return total
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
    return total.add_(part)


@contextmanager
def _put(params: Sequence[Tensor], places: _Places) -> Iterator[None]:
    """Put tensors in the places of parameters."""
    before = [module._parameters[name] for (module, name), *_ in places]
    try:
        for tensor, own in zip(params, places, strict=True):
            for module, name in own:
                module._parameters[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for param, own in zip(before, places, strict=True):
            for module, name in own:
                module._parameters[name] = param


def _autocast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context as autocast is now, but for its cache: weights that were cast without a
    graph must not be given to what needs one."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled, cache_enabled=False)


def _rows(x: Tensor) -> Tensor:
    """Return tokens as rows of a matrix."""
    return x.reshape(-1, x.shape[-1])


def _like(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows with as many dimensions as `x`."""
    return rows.view(*(1,) * (x.dim() - 2), *rows.shape)
