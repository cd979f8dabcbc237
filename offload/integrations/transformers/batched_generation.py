"""Continuous batching: sequences join and leave a running batch between two passes.

A pass takes the new tokens of all sequences in one row without padding: all of a prompt, or one
token. The weights, which a pass reads once, are multiplied with all of them together; attention
goes sequence by sequence, each with a cache of its own, as if it were alone (the idea is Orca's
"selective batching", OSDI 2022). So a sequence's numbers depend on the others only where a product
of more rows is rounded in another way.

What a sequence's tokens are chosen by comes from `generate` itself, through its `custom_generate`.
transformers' own continuous batching has one choice for all sequences (no greedy beside sampled
ones, no seeds), drops what processors it does not know, and keeps its cache outside of the tiers.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload.errors import OffloadError, StateError, TierFullError, UnsupportedError

_log = logging.getLogger("offload")
_ATTENTION = "offload_packed"
PROMPT_TOKENS = 2048  # of prompts that one pass takes beside the running sequences; or one prompt
_INSTEAD = "`offload generate` and model.generate work with it"
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class QueueFullError(OffloadError):
    """As many sequences wait as may."""


@dataclass(frozen=True)
class End:
    """The last thing that a sequence hears: `reason` is stop, length or cancelled; or an error."""

    reason: str = ""
    error: Exception | None = None


@dataclass(eq=False)
class Sequence:
    """A prompt [1, length] with `generate`'s arguments for it, max_new_tokens among them.

    `deliver` is called by the batch's thread with each token and then, once, with an End. Set
    `cancelled`, in any thread, and it leaves before the next pass.
    """

    ids: torch.Tensor
    options: Mapping[str, Any]
    deliver: Callable[[int | End], None]
    seed: int | None = None
    cancelled: bool = False
    cache: Cache | None = field(default=None, init=False)  # None: nothing is computed yet
    chosen_by: dict[str, Any] = field(default_factory=dict, init=False)
    generator: torch.Generator | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def choose(self, logits: torch.Tensor) -> End | None:
        """Append a token by its logits [1, vocabulary], as `generate` does; say if it ends."""
        scores = self.chosen_by["logits_processor"](self.ids, logits.to(torch.float32, copy=True))
        config = self.chosen_by["generation_config"]
        if config.do_sample:
            odds = torch.softmax(scores, dim=-1)
            if not bool(odds.isfinite().all()):  # multinomial on a GPU would end all work
                raise OffloadError("the odds of tokens are not finite: raise a low temperature")
            token = torch.multinomial(odds, num_samples=1, generator=self.generator)
        else:
            token = scores.argmax(dim=-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        self.deliver(int(token))
        if not bool(self.chosen_by["stopping_criteria"](self.ids, None).all()):
            return None
        ends = config.eos_token_id
        stops = int(token) in (ends if isinstance(ends, list) else [ends])
        return End("stop" if stops else "length")


@dataclass
class _Packed:
    """The sequences of one pass, as attention needs them."""

    rows: list[tuple[Cache, slice, Any]]  # cache, place in the row, masks
    attention: str  # the model's own
    layer_types: list[str]
    stopping: Callable[[], bool]

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if self.stopping():  # a pass may take a minute
            raise StateError("the server is stopping")
        own = ALL_ATTENTION_FUNCTIONS.get(self.attention)
        own = own or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        outputs = []
        for cache, place, masks in self.rows:
            part = slice(None), slice(None), place
            keys, values = cache.update(key[part], value[part], module.layer_idx)
            if isinstance(masks, dict):
                masks = masks[self.layer_types[module.layer_idx]]
            outputs.append(own(module, query[part], keys, values, masks, *args, **kwargs)[0])
        return torch.cat(outputs, dim=1)


def _attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any,
    packed: _Packed | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if packed is None or attention_mask is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedError(
            f"{type(module).__name__} has masks of its own, or does not get arguments of the "
            f"model's call: several sequences cannot be told apart; {_INSTEAD}"
        )
    return packed.attend(module, query, key, value, *args, **kwargs), None


class Batch:
    """Generates the sequences that are submitted, in a thread of its own, until it is closed.

    `size` sequences at most run at a time, with `tokens` in their caches together; `waiting` more
    may wait. Where caches would outgrow `tokens` the sequence that came last waits again, and
    its tokens are computed anew. `keep(cache)` is called with each new cache.

    Raises UnsupportedError for a model whose sequences cannot be told apart in one row.
    """

    def __init__(
        self, model: Any, *, size: int, waiting: int, tokens: int,
        keep: Callable[[Cache], None] = lambda cache: None,
    ) -> None:  # fmt: skip
        self.model, self.size, self.waiting, self.tokens = model, size, waiting, tokens
        self.failure: Exception | None = None  # of the thread
        self.pass_s = 0.0  # of the last pass
        self._keep = keep
        self._config = copy.copy(model.config.get_text_config(decoder=True))
        self._layer_types = getattr(self._config, "layer_types", None) or []
        self._attention = model.config._attn_implementation
        self._check_model()
        self._config._attn_implementation = self._attention  # a copy's own: masks are made by it
        ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attend)
        model.set_attn_implementation(_ATTENTION)
        self._closing = False
        try:
            self._probe()
        except BaseException:
            model.set_attn_implementation(self._attention)
            raise
        self._most = size  # fewer, where the tiers are full
        self._queue: deque[Sequence] = deque()
        self._rows: list[Sequence] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="offload-batch", daemon=True)
        self._thread.start()

    def _check_model(self) -> None:
        model, name = self.model, type(self.model).__name__
        found = _prepared(model, torch.zeros(1, 1, dtype=torch.long), {"max_new_tokens": 1})
        mode = found["generation_config"].get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise UnsupportedError(
                f"generation_config.json asks for {mode.value}; a batch chooses greedily or samples"
            )
        cache: Any = found.get("past_key_values")
        scaled = str(getattr(self._config, "rope_parameters", None))
        why = ""
        if not model._supports_attention_backend or model.config.is_encoder_decoder:
            why = "its attention is not transformers' AttentionInterface"
        elif type(cache) is not DynamicCache or any(
            type(layer) not in _LAYERS for layer in cache.layers
        ):
            why = "its cache has more than keys and values (a recurrent state)"
        elif "chunked_attention" in self._layer_types:
            why = "it attends in chunks"
        elif "'dynamic'" in scaled or "'longrope'" in scaled:
            why = "its rotary embedding depends on the longest sequence of a batch"
        if why:
            raise UnsupportedError(
                f"{name} cannot compute several sequences in one row: {why}; {_INSTEAD}"
            )

    def _probe(self) -> None:
        """Compute two sequences once: some models are found out by that alone."""
        rows = [Sequence(torch.zeros(1, n, dtype=torch.long), {}, lambda _: None) for n in (1, 2)]
        with torch.inference_mode():
            for row in rows:
                row.ids = row.ids.to(self.model.device)
                self._begin_cache(row)
            self._forward(rows)

    def submit(self, sequence: Sequence) -> None:
        """Let it run as soon as there is room. Raises QueueFullError, StateError once closed."""
        with self._changed:
            if self._closing or self.failure is not None:
                raise StateError("the server is stopping")
            if len(self._queue) >= self.waiting + max(0, self.size - len(self._rows)):
                raise QueueFullError(f"{len(self._queue)} requests wait already; try again later")
            self._queue.append(sequence)
            self._changed.notify()

    def cancel(self, sequence: Sequence) -> None:
        with self._changed:
            sequence.cancelled = True
            self._changed.notify()

    def stop(self) -> None:
        """End all sequences, in the middle of a pass, and take no more. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, wait for the thread, and give the model back as it was."""
        self.stop()
        self._thread.join()
        self.model.set_attn_implementation(self._attention)

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._admit():
                    self._pass()
        except Exception as error:  # noqa: BLE001 - each request gets it
            self.failure = error
        finally:
            with self._changed:
                left, self._queue, self._rows = [*self._rows, *self._queue], deque(), []
                self._closing = True
            for sequence in left:
                sequence.deliver(End(error=self.failure or StateError("the server is stopping")))

    def _admit(self) -> bool:
        """Let sequences leave and join; wait until there are some. False: it is closed."""
        with self._changed:
            while True:
                for cancelled in [each for each in (*self._rows, *self._queue) if each.cancelled]:
                    (self._rows if cancelled in self._rows else self._queue).remove(cancelled)
                    cancelled.deliver(End("cancelled"))
                held = sum(row.length for row in self._rows)
                while held > self.tokens:
                    last = self._rows.pop()
                    last.cache = None
                    held -= last.length
                    self._queue.appendleft(last)
                if not self._rows and not self._queue:
                    self._most = self.size
                prompts = 0
                while self._queue and len(self._rows) < self._most and not self._closing:
                    length = self._queue[0].length
                    if held + length > self.tokens or (
                        prompts and prompts + length > PROMPT_TOKENS
                    ):
                        break
                    held, prompts = held + length, prompts + length
                    self._rows.append(self._queue.popleft())
                if self._closing or self._rows:
                    return not self._closing
                self._changed.wait()

    def _pass(self) -> None:
        """Compute all new tokens, and choose the next one of each sequence."""
        began_s = time.perf_counter()
        try:
            for row in self._rows:
                if row.cache is None:
                    self._prepare(row)
            logits = self._forward(self._rows)
        except TierFullError as error:
            self._make_room(error)
            return
        except Exception as error:  # noqa: BLE001 - each request gets it
            if not self._closing:
                known = isinstance(error, OffloadError | OSError)
                said = str(error) if known else "".join(traceback.format_exception(error))
                _log.error("a pass failed, and with it %d requests: %s", len(self._rows), said)
                self._leave([(row, End(error=error)) for row in self._rows])
            return
        ends = []
        for row, scores in zip(self._rows, logits, strict=True):
            try:
                end = row.choose(scores[None])
            except Exception as error:  # noqa: BLE001 - the request gets it
                end = End(error=error)
            if end is not None:
                ends.append((row, end))
        self._leave(ends)
        self.pass_s = time.perf_counter() - began_s

    def _make_room(self, error: TierFullError) -> None:
        """Begin again with one sequence less, until none runs and none waits."""
        if len(self._rows) == 1:
            self._leave([(self._rows[0], End(error=error))])
            return
        fewer = len(self._rows) - 1
        _log.warning("%d sequences, and not %d, run at a time: %s", fewer, fewer + 1, str(error))
        with self._changed:
            for row in self._rows:
                row.cache = None
            self._queue.appendleft(self._rows.pop())
            self._most = len(self._rows)

    def _leave(self, ends: list[tuple[Sequence, End]]) -> None:
        with self._changed:
            gone = {id(row) for row, _ in ends}
            self._rows = [row for row in self._rows if id(row) not in gone]
        for row, end in ends:
            row.cache = None
            if end.error is not None:
                end.error.__traceback__ = None  # its frames keep caches
            row.deliver(end)

    def _prepare(self, row: Sequence) -> None:
        self._begin_cache(row)
        if not row.chosen_by:  # else it waited again
            row.ids = row.ids.to(self.model.device)
            row.chosen_by = _prepared(self.model, row.ids, row.options)
            row.generator = torch.Generator(self.model.device)
            if row.seed is None:
                row.generator.seed()
            else:
                row.generator.manual_seed(row.seed)

    def _begin_cache(self, row: Sequence) -> None:
        row.cache = DynamicCache(config=self._config)
        self._keep(row.cache)

    def _forward(self, rows: list[Sequence]) -> torch.Tensor:
        """Return logits [rows, vocabulary] of what comes next."""
        device = self.model.device
        new, positions, packed, ends, end = [], [], [], [], 0
        for row in rows:
            assert row.cache is not None
            fed = row.cache.get_seq_length()
            new.append(row.ids[:, fed:])
            positions.append(torch.arange(fed, row.length, device=device)[None])
            begin, end = end, end + row.length - fed
            ends.append(end - 1)
            masks = create_masks_for_generate(
                self._config, torch.empty(*new[-1].shape, 1, dtype=self.model.dtype, device=device),
                None, row.cache, positions[-1],
            )  # fmt: skip
            packed.append((row.cache, slice(begin, end), masks))
        last = torch.tensor(ends, device=device)
        kept = {"logits_to_keep": last} if self.model._supports_logits_to_keep() else {}
        logits: torch.Tensor = self.model(
            input_ids=torch.cat(new, dim=1), position_ids=torch.cat(positions, dim=1),
            use_cache=False, **kept,
            packed=_Packed(packed, self._attention, self._layer_types, lambda: self._closing),
        ).logits[0]  # fmt: skip
        if any(row.cache is None or row.cache.get_seq_length() != row.length for row in rows):
            raise UnsupportedError(
                f"{type(self.model).__name__} has attention of its own, which cannot tell several "
                f"sequences apart; {_INSTEAD}"
            )
        return logits if kept else logits[last]


def _prepared(model: Any, ids: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `generate(ids, **options)` decodes with: its processors, criteria and so on."""
    found: dict[str, Any] = {}

    def decode(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        found.update(given)
        return input_ids

    ids = ids.to(model.device)
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True,
        custom_generate=decode, **options,
    )  # fmt: skip
    return found
