"""Converts a DeepSpeed configuration: for `offload migrate`, and as the start of
`offload.deepspeed`.

file or dict -> every key looked up in `keys` -> an offload configuration, what each key became,
                                                 warnings, a schedule, the sizes of batches
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from offload.config import OffloadConfig
from offload.config.file import dump_yaml
from offload.config.paths import StrPath, path_of
from offload.config.suggestions import suggestion
from offload.deepspeed.keys import ALSO, FILLED, HARMLESS, IGNORED, MAPPED, UNSUPPORTED, Key, read
from offload.deepspeed.schedules import Schedule
from offload.process import bounded_json
from offload.tiers.errors import ConfigError

AUTO = "auto"
TRAIN, MICRO, STEPS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip
_DEFAULT_SUB_GROUP = 10**9
_DEFAULT = "DeepSpeed's default"
_SCHEDULE = "scheduler.params"
_TIER_OF = {"cpu": "host", "nvme": "nvme"}
_TYPES = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd",
          "muon": "muon"}  # fmt: skip
_NUMBERS = {key.becomes for key in MAPPED["optimizer.params"].values()}
# Defaults of DeepSpeed's classes; offload's may differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
    "muon": {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "adamw_lr": 3e-4,
             "adamw_betas": [0.9, 0.95], "adamw_eps": 1e-10, "adamw_weight_decay": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Batches:
    """Samples per step of all ranks, samples per pass of one rank, and passes per step."""

    train: int
    micro: int
    steps: int

    @classmethod
    def of(cls, train: int | None, micro: int | None, steps: int | None, ranks: int) -> Batches:
        """Derive the missing sizes from the given ones. Raise ConfigError if they contradict each
        other, or none is given."""
        if train is None and micro is None:
            raise ConfigError(f"{TRAIN}: missing; set it or {MICRO}")
        if micro is None:
            assert train is not None, "just looked at"
            micro = train // ((steps or 1) * ranks)
        if steps is None:
            steps = 1 if train is None else train // (micro * ranks) if micro else 0
        sizes = cls(micro * steps * ranks if train is None else train, micro, steps)
        if min(sizes.train, micro, steps) < 1 or sizes.train != micro * steps * ranks:
            raise ConfigError(
                f"{TRAIN}: {sizes.train} is not {MICRO}: {micro} x {STEPS}: {steps} x {ranks} "
                f"rank{'s' * (ranks != 1)}; remove one of them"
            )
        return sizes


@dataclass
class Migration:
    """The result of migrating a file."""

    values: dict[str, Any] = field(default_factory=dict)  # the configuration of offload
    warnings: list[str] = field(default_factory=list)
    for_loops: list[str] = field(default_factory=list)  # tasks of a user's own loop
    unfilled: list[str] = field(default_factory=list)  # keys that transformers' Trainer fills in
    ignored: list[str] = field(default_factory=list)  # keys
    schedule: Schedule | None = None
    has_optimizer: bool = False
    batches: Batches | None = None  # where the file has them
    said: dict[str, Any] = field(default_factory=dict)  # every key that the file gave: its value
    notes: list[str] = field(default_factory=list)  # what became of the mapped keys

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value in the file; `default` if it is absent or auto."""
        value = self.said.get(key)
        return default if value is None or value == AUTO else value

    def is_on(self, section: str) -> bool:
        """Whether a section counts: fp16 and bf16 may be off."""
        return section not in ("fp16", "bf16") or bool(self.said[section].get("enabled", False))

    def set(self, path: str, value: Any, note: str | None = None) -> None:
        """Set one key of offload, `section.key`, to a value."""
        *sections, name = path.split(".")
        inner = self.values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
        if note is not None:
            self.notes.append(f"{path}: {_shown(value)} -- {note}")

    @property
    def printed_schedule(self) -> Schedule | None:
        """The scheduler that a loop creates in code; Trainer has its own."""
        return None if self.unfilled else self.schedule

    @property
    def config(self) -> OffloadConfig:
        return OffloadConfig.load(self.values)

    def to_yaml(self, source: str) -> str:
        """Return the configuration as YAML, and behind it what became of the keys of the file."""
        lines = [f"# From {source}, by `offload migrate`.", dump_yaml(self.values)]
        lines += ["# What became of each key:", *(f"# {text}" for text in self.notes), ""]
        if self.printed_schedule is not None:
            lines.append("# The scheduler, for your loop:")
            lines += [f"#   {line}".rstrip() for line in self.printed_schedule.code().splitlines()]
        return "\n".join(lines).rstrip("\n") + "\n"


# ---------------------------------------------------------------- reading
def read_ds_config(source: StrPath | Mapping[str, Any]) -> dict[str, Any]:
    """Read a JSON file, or a dict. Raise PathError or ConfigError."""
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    path = path_of(source, "config")
    config = bounded_json.read_named(path, "a configuration of DeepSpeed")
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(config).__name__}")
    return config


def migrate(source: Mapping[str, Any], ranks: int | None = None) -> Migration:
    """Migrate a DeepSpeed configuration to one of offload, for `ranks` ranks (None: unknown).

    Raise ConfigError naming every key that is unknown, not supported or of a wrong type.
    """
    made = Migration()
    problems: list[str] = []
    old = source.get("zero_optimization")
    if isinstance(old, bool):  # as in DeepSpeed's first tutorials
        source = {**source, "zero_optimization": {"stage": int(old)}}
    _look_up("", source, made, problems)
    batches = partial(_batches, ranks=ranks)
    for step in (_precision, _zero, _placement, _optimizer, _schedule, _clipping, batches):
        try:
            step(made)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    if made.ignored:
        made.warnings.append(f"ignored: {', '.join(made.ignored)}")
    own = made.get("offload", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"offload: expected keys and values, found {own!r}")
    for name, value in own.items():
        inner = made.values.get(name)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            inner.update(value)
        else:
            made.values[name] = value
    made.config  # noqa: B018 - raises ConfigError for numbers that cannot work
    return made


def _look_up(section: str, values: Mapping[str, Any], made: Migration, problems: list[str]) -> None:
    mapped, ignored = MAPPED[section], IGNORED.get(section, ())
    unsupported = UNSUPPORTED.get(section, ())
    inner = {
        path.rpartition(".")[2] for path in MAPPED if path and path.rpartition(".")[0] == section
    }
    for given, value in values.items():
        name = given.removeprefix("stage3_") if section == "zero_optimization" else given
        path = f"{section}.{given}".lstrip(".")
        canonical = f"{section}.{name}".lstrip(".")
        canonical = ALSO.get(canonical, canonical)
        name = canonical.rpartition(".")[2]
        if name in inner:
            is_auto = value == AUTO and "." in canonical  # sections at the top are never auto
            if not isinstance(value, Mapping) and value is not None and not is_auto:
                problems.append(f"{canonical}: expected keys and values, found {value!r}")
                continue
            made.said[canonical] = value
            if isinstance(value, Mapping) and canonical != _SCHEDULE:
                _look_up(canonical, value, made, problems)
        elif name in mapped:
            problems += filter(None, [_take(path, canonical, mapped[name], value, made)])
        elif name not in ignored and name not in unsupported:
            hint = suggestion(name, [*mapped, *ignored, *inner]).partition(" allowed:")[0]
            problems.append(f"{path}: unknown key{hint.rstrip(';')}")
        elif not made.is_on(section) or _asks_for_nothing(canonical, value):
            continue
        elif name in unsupported:
            problems.append(f"{path}: {_shown(value)} is not supported")
        else:
            made.ignored.append(path)


def _take(path: str, canonical: str, key: Key, value: Any, made: Migration) -> str | None:
    """Migrate one key; return an error message, if any."""
    if canonical in made.said and made.said[canonical] != value:
        return f"{path}: given twice, by another name as well; remove one"
    if value == AUTO and canonical in FILLED:
        made.unfilled.append(path)
    if value not in (None, AUTO):
        try:
            value = read(key.kind, value)
        except ValueError as error:
            return f"{path}: {error}, found {value!r}"
        if key.becomes:
            made.notes.append(f"{path}: {_shown(value)} -> {key.becomes}")
    made.said[canonical] = value
    return None


def _asks_for_nothing(path: str, value: Any) -> bool:
    """Whether a value has no effect in DeepSpeed."""
    if value is None or value == AUTO:
        return True
    if path in HARMLESS:
        return bool(value == HARMLESS[path])
    if isinstance(value, Mapping):
        return not (value["enabled"] if "enabled" in value else any(value.values()))
    return not value


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and value < 1e16:
        return str(int(value))
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------- several keys together
def _precision(made: Migration) -> None:
    fp16, bf16 = made.get("fp16.enabled", False), made.get("bf16.enabled", False)
    if fp16 and bf16:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; set one of them to false")
    autos = [each for each in ("fp16.enabled", "bf16.enabled") if each in made.unfilled]
    if autos and not (fp16 or bf16):
        if "bf16.enabled" in autos and made.get("bf16.check_grad_overflow", True):
            made.set("skip_nonfinite", True, "DeepSpeed's default of bf16.check_grad_overflow")
        scale = [f"fp16.{name}" for name in MAPPED["fp16"] if name != "enabled"]
        made.ignored += [each for each in scale if "fp16.enabled" in autos and made.get(each)]
        return
    made.unfilled = [each for each in made.unfilled if each not in autos]  # the other one is true
    made.set("precision", "fp16" if fp16 else "bf16" if bf16 else "fp32")
    if fp16:
        _loss_scale(made)
    if bf16:
        check = made.get("bf16.check_grad_overflow")
        said = None if check is not None else "DeepSpeed's default of bf16.check_grad_overflow"
        made.set("skip_nonfinite", True if check is None else check, said)
        if made.get("bf16.bf16_master_weights_and_grads"):
            made.set("optimizer.master", "none")
        if made.get("bf16.bf16_optimizer_states"):
            made.set("optimizer.states", "bf16")


def _loss_scale(made: Migration) -> None:
    fixed = made.get("fp16.loss_scale", 0)
    if fixed < 0:
        raise ConfigError(f"fp16.loss_scale: {fixed} is below 0")
    if fixed:
        made.set("loss_scale.initial", float(fixed))
        made.set("loss_scale.min", float(fixed))
        made.set("loss_scale.growth_interval", 10**9, "a fixed scale does not grow")
        return
    made.set("loss_scale.initial", float(2 ** made.get("fp16.initial_scale_power", 16)))
    made.set("loss_scale.growth_interval", made.get("fp16.loss_scale_window", 1000))
    made.set("loss_scale.min", float(made.get("fp16.min_loss_scale", 1)))


def _zero(made: Migration) -> None:
    stage = made.get("zero_optimization.stage", 0)
    made.set("zero.stage", stage, None if "zero_optimization" in made.said else _DEFAULT)
    form = made.get("communication_data_type")
    if form is not None:
        made.set("zero.reduce_dtype", form.lower())
    group = made.get("zero_optimization.zero_hpz_partition_size", 1)
    if group > 1 and stage > 0:
        made.set("zero.shard_group", group)
        made.warnings.append(
            f"zero_optimization.zero_hpz_partition_size: {group}: zero.shard_group shards all "
            f"states among {group} ranks, so each rank holds more of them than with hpZ"
        )
    group = made.get("zero_optimization.mics_shard_size", -1)
    if group > 0 and stage > 0:
        made.set("zero.shard_group", int(group))


def _placement(made: Migration) -> None:
    zero = "zero_optimization"
    stage = made.get(f"{zero}.stage", 0)
    param = made.get(f"{zero}.offload_param.device", "none").lower()
    optimizer = made.get(f"{zero}.offload_optimizer.device", "none").lower()
    for device, where in ((param, "offload_param"), (optimizer, "offload_optimizer")):
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(f"{zero}.{where}.device: {device!r} is none of none, cpu, nvme")
    if param != "none" and stage < 3:
        made.warnings.append(
            f"{zero}.offload_param: DeepSpeed ignores it below stage 3; here all stages follow it"
        )
    if optimizer != "none" and stage == 0:
        made.warnings.append(
            f"{zero}.offload_optimizer: DeepSpeed ignores it at stage 0; here all stages follow it"
        )
    if param != "none":
        made.set("placement.parameters", _TIER_OF[param])
    if optimizer == "cpu":
        made.set("placement.gradients", "host", "DeepSpeed keeps them beside the optimizer")
    if optimizer != "none":
        made.set("placement.optimizer", _split(made, _TIER_OF[optimizer]))
    _nvme_paths(made, param, optimizer)
    chunk = made.get(f"{zero}.sub_group_size", _DEFAULT_SUB_GROUP)
    if chunk and chunk < _DEFAULT_SUB_GROUP:
        made.set("optimizer.chunk", max(1, round(chunk / 1024)) * 1024)
    if made.get(f"{zero}.prefetch_bucket_size") == 0:
        made.set("prefetch", 0)
    if made.get("activation_checkpointing.cpu_checkpointing"):
        made.set("placement.activations.tier", "host")


def _split(made: Migration, tier: str) -> str | dict[str, str]:
    ratio = made.get("zero_optimization.offload_optimizer.ratio", 1.0)
    if not 0 <= ratio <= 1:
        raise ConfigError(f"zero_optimization.offload_optimizer.ratio: {ratio} is not in 0..1")
    if ratio in (0, 1):
        return tier if ratio else "device"
    share = round(ratio * 100, 10)
    return {"device": f"{round(100 - share, 10):g}%", tier: f"{share:g}%"}


def _nvme_paths(made: Migration, param: str, optimizer: str) -> None:
    paths = []
    for device, where in ((param, "offload_param"), (optimizer, "offload_optimizer")):
        if device == "nvme":
            path = made.get(f"zero_optimization.{where}.nvme_path")
            if path is None:
                raise ConfigError(
                    f"zero_optimization.{where}.nvme_path: missing; device: nvme needs it"
                )
            paths.append(path)
    if paths:
        made.set("nvme.paths", list(dict.fromkeys(paths)))


def _optimizer(made: Migration) -> None:
    section = made.said.get("optimizer")
    if section is None:
        made.notes.append(
            "no optimizer section: OffloadTrainer takes it from TrainingArguments (optim, "
            "learning_rate, ...)" if made.unfilled else
            "no optimizer section: DeepSpeed takes the one that your program makes, and so does "
            "offload.deepspeed; in a loop of your own write it under optimizer:"
        )  # fmt: skip
        return
    made.has_optimizer = True
    given = made.get("optimizer.type")
    if given is None:
        raise ConfigError("optimizer.type: missing")
    kind = _TYPES.get(given.lower())
    if kind is None:
        names = ("Adam", "AdamW", "Lion", "Adagrad", "SGD", "Muon")
        raise ConfigError(
            f"optimizer.type: {given} has no rule here; use one of {', '.join(names)}"
        )
    params = {
        name: made.said.get(f"optimizer.params.{name}") for name in MAPPED["optimizer.params"]
    }
    if given.lower() == "adam" and params["adam_w_mode"] is False:
        kind = "adam"
    made.set("optimizer.type", kind)
    if kind == "muon":
        params = _muon_params(params)
    elif unused := [name for name in ("muon_lr", "adam_lr") if params[name] not in (None, AUTO)]:
        raise ConfigError(f"optimizer.params.{unused[0]}: only Muon has it; remove it")
    numbers = dict(_DEFAULTS[kind])
    if params["torch_adam"] is True and kind == "adamw":
        numbers["weight_decay"] = 0.01
    for name, value in params.items():
        if value == AUTO:
            numbers.pop(name, None)
        elif value is not None and f"optimizer.{name.removeprefix('adamw_')}" in _NUMBERS:
            numbers[name] = list(value) if name.endswith("betas") else value
    for name, value in numbers.items():
        absent = f"optimizer.params.{name.removeprefix('adamw_')}" not in made.said
        made.set(f"optimizer.{name}", value, _DEFAULT if absent else None)


def _muon_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return Muon's numbers and AdamW's, which have other names here, from those of both."""
    lr, decay = params.pop("lr"), params.pop("weight_decay")
    rest = {name: params.pop(name) for name in ("betas", "eps")}
    muon, adam = params.pop("muon_lr"), params.pop("adam_lr")
    rest |= {"lr": lr if adam is None else adam, "weight_decay": decay}
    params |= {"lr": lr if muon is None else muon, "weight_decay": decay}
    return params | {f"adamw_{name}": value for name, value in rest.items()}


def _schedule(made: Migration) -> None:
    section = made.said.get("scheduler")
    if section is None:
        return
    kind = made.get("scheduler.type")
    if kind is None:
        raise ConfigError("scheduler.type: missing")
    params: Any = made.said.get(_SCHEDULE) or {}
    autos = [_SCHEDULE] if params == AUTO else [
        f"{_SCHEDULE}.{name}" for name, value in params.items() if value == AUTO
    ]  # fmt: skip
    made.unfilled += autos
    if autos:
        return
    made.schedule = Schedule.of(kind, params)
    if not made.unfilled:
        made.for_loops.append(
            f"scheduler.type: {kind}: not a key of offload; the code below makes it in your loop, "
            "where it is stepped after optimizer.step()"
        )


def _clipping(made: Migration) -> None:
    if made.said.get("gradient_clipping") == AUTO:
        return
    limit = made.get("gradient_clipping")
    if limit is None:
        made.set("clip_grad_norm", 1.0, "DeepSpeed's default since 0.19; 0 before")
    elif limit < 0:
        raise ConfigError(f"gradient_clipping: {limit} is below 0")
    elif limit:
        made.set("clip_grad_norm", float(limit))


def _batches(made: Migration, ranks: int | None) -> None:
    train, micro, steps = (made.get(name) for name in (TRAIN, MICRO, STEPS))
    if made.unfilled or (train is None and micro is None):
        if steps is not None:
            made.set("gradient_accumulation_steps", max(1, steps))
        return
    if ranks is None:
        if train and micro and steps:
            ranks = max(1, train // (micro * steps))
        else:
            ranks = 1
            if train is not None and (micro or steps):
                made.warnings.append(
                    f"{TRAIN}: {train}: taken for one rank; say how many there are with --ranks"
                )
    made.batches = Batches.of(train, micro, steps, ranks)
    made.set("gradient_accumulation_steps", made.batches.steps)
    if made.batches.steps > 1:
        made.for_loops.append(
            f"{STEPS}: {made.batches.steps}: in a loop of your own divide the loss by it, and step "
            "after as many passes; offload.deepspeed does both"
        )
