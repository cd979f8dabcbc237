"""Converts a DeepSpeed configuration: for `offload migrate`, and as the start of
`offload.deepspeed`.

file or dict -> every key looked up in `keys` -> a configuration of ours, a note per key, warnings,
                                                 a schedule, the sizes of batches
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.config import OffloadConfig
from offload.config.file import dump_yaml
from offload.config.paths import StrPath, path_of
from offload.config.remedies import suggestion
from offload.deepspeed.keys import OTHERS, SECTIONS, Fate, Key, read
from offload.deepspeed.schedules import FILLED, KINDS, Schedule
from offload.process import bounded_json
from offload.tiers.errors import ConfigError

AUTO = "auto"
TRAIN, MICRO, STEPS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
)  # fmt: skip
_DEFAULT_SUB_GROUP = 10**9
_DEFAULT = "DeepSpeed's default"
_USUAL_SCALE = {
    "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1,
}  # fmt: skip
_TIER_OF = {"cpu": "host", "nvme": "nvme"}
_TYPES = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "adagrad": "adagrad", "sgd": "sgd"}
_NUMBERS = {key.becomes for key in SECTIONS["optimizer.params"]}
# Defaults of DeepSpeed's classes; offload's may differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0},
}


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
        found = cls(micro * steps * ranks if train is None else train, micro, steps)
        if min(found.train, micro, steps) < 1 or found.train != micro * steps * ranks:
            raise ConfigError(
                f"{TRAIN}: {found.train} is not {MICRO}: {micro} x {STEPS}: {steps} x {ranks} "
                f"rank{'s' * (ranks != 1)}; remove one of them"
            )
        return found


@dataclass
class Migration:
    """The result of migrating a file."""

    values: dict[str, Any] = field(default_factory=dict)  # the configuration of offload
    warnings: list[str] = field(default_factory=list)
    for_loops: list[str] = field(default_factory=list)  # tasks of a user's own loop
    autos: dict[str, Key] = field(default_factory=dict)  # filled in by transformers' Trainer
    filled: list[str] = field(default_factory=list)  # notes on these
    schedule: Schedule | None = None
    has_optimizer: bool = False
    batches: Batches | None = None  # where the file has them
    said: dict[str, Any] = field(default_factory=dict)  # every key that the file gave: its value
    notes: list[str] = field(default_factory=list)  # what became of the other keys

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value in the file; `default` if it is absent or auto."""
        value = self.said.get(key)
        return default if value is None or value == AUTO else value

    def is_on(self, section: str) -> bool:
        """Whether fp16 or bf16 is on, or may be."""
        on = {name: self.said.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
        return bool(on[section]) and not (on[section] == AUTO and True in on.values())

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
    def unfilled(self) -> list[str]:
        """The keys that are left to transformers' Trainer; if there are any, the file is its."""
        of_schedule = [] if self.schedule is None else self.schedule.unfilled
        return [*self.autos, *(f"scheduler.params.{name}" for name in of_schedule)]

    @property
    def printed_schedule(self) -> Schedule | None:
        """The scheduler that a loop creates in code; Trainer has some of its own."""
        return None if self.unfilled else self.schedule

    @property
    def trainer_arguments(self) -> dict[str, Any]:
        """The TrainingArguments that say what the file says of batches and of the schedule, which
        Trainer's own loop follows."""
        micro, steps = self.get(MICRO), self.get(STEPS)
        if self.batches is not None:
            micro, steps = self.batches.micro, self.batches.steps
        found: dict[str, Any] = {"per_device_train_batch_size": micro, STEPS: steps}
        if self.schedule is not None:
            found |= {
                "lr_scheduler_type": KINDS[self.schedule.type].trainers,
                "warmup_steps": self.schedule.params.get("warmup_num_steps"),
                "max_steps": self.schedule.params.get("total_num_steps"),
            }
        return {name: value for name, value in found.items() if value not in (None, AUTO)}

    @property
    def config(self) -> OffloadConfig:
        return OffloadConfig.load(self.values)

    def to_yaml(self, source: str) -> str:
        """Return the configuration as YAML, and behind it a comment for each key of the file."""
        lines = [f"# From {source}, by `offload migrate`."]
        if self.unfilled:
            lines.append("# For OffloadTrainer: what is not here comes from TrainingArguments.")
        lines.append(dump_yaml(self.values))
        for title, texts in (
            ("What became of each key", self.notes),
            ("Filled in from TrainingArguments", self.filled),
        ):
            lines += [f"# {title}:", *(f"# {text}" for text in texts), ""] if texts else []
        if self.printed_schedule is not None:
            lines.append("# The scheduler, for your loop:")
            lines += [f"#   {line}".rstrip() for line in self.printed_schedule.code().splitlines()]
        return "\n".join(lines).rstrip("\n") + "\n"


def _is_split(value: Mapping[str, Any]) -> bool:
    return set(value) <= {"device", "host", "nvme"} and all(
        isinstance(share, str) and share.endswith("%") for share in value.values()
    )


# ---------------------------------------------------------------- reading
def read_ds_config(source: StrPath | Mapping[str, Any]) -> dict[str, Any]:
    """Read a JSON file, or a dict. Raise PathError or ConfigError."""
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    path = path_of(source, "config")
    found = bounded_json.read_named(path, "a configuration of DeepSpeed")
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(found).__name__}")
    return found


def migrate(source: Mapping[str, Any], ranks: int | None = None) -> Migration:
    """Migrate a DeepSpeed configuration to one of offload, for `ranks` ranks (None: unknown).

    Raise ConfigError naming every key that is unknown, refused or of a wrong type.
    """
    made = Migration()
    problems: list[str] = []
    old = source.get("zero_optimization")
    if isinstance(old, bool):  # as in DeepSpeed's first tutorials
        source = {**source, "zero_optimization": {"stage": int(old)}}
    made.said |= {
        name: source[name] for name in ("fp16", "bf16") if isinstance(source.get(name), Mapping)
    }
    _look_up("", source, made, problems)
    for step in (_precision, _zero, _placement, _optimizer, _schedule, _clipping):
        try:
            step(made)
        except ConfigError as error:
            problems.append(str(error))
    try:
        _batches(made, ranks)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    own = made.get("offload", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"offload: expected keys and values, found {own!r}")
    _lay_over(made.values, own)
    made.config  # noqa: B018 - raises ConfigError for numbers that cannot work
    return made


def _lay_over(values: dict[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        inner = values.get(name)
        if isinstance(value, Mapping) and isinstance(inner, dict) and not _is_split(value):
            _lay_over(inner, value)
        else:
            values[name] = value


def _look_up(section: str, values: Mapping[str, Any], made: Migration, problems: list[str]) -> None:
    keys = [*SECTIONS[section], *(OTHERS if not section else ())]
    table = {name: key for key in keys for name in (key.name, *key.also)}
    if section == "zero_optimization":
        table |= {f"stage3_{name}": key for name, key in table.items()}
    inner = {name.rpartition(".")[2]: name for name in SECTIONS if name
             and name.rpartition(".")[0] == section}  # fmt: skip
    for name, value in values.items():
        path = f"{section}.{name}".lstrip(".")
        is_mapping = isinstance(value, Mapping)
        if name in inner and is_mapping:
            made.said[path] = value
            _look_up(path, value, made, problems)
        elif path == "scheduler.params" and is_mapping:
            made.said[path] = value
        elif name in inner and value is not None and (name not in table or value != AUTO):
            problems.append(f"{path}: expected keys and values, found {value!r}")
        elif name in table:
            problems += filter(None, [_take(section, path, table[name], value, made)])
        elif name not in inner:
            hint = suggestion(name, [*table, *inner]).partition(" allowed:")[0].rstrip(";")
            problems.append(f"{path}: unknown key{hint}")


def _take(section: str, path: str, key: Key, value: Any, made: Migration) -> str | None:
    """Migrate one key; return an error message, if any."""
    off = [name for name in ("fp16", "bf16") if not made.is_on(name)]
    is_off = section in off and key.name != "enabled"
    canonical = f"{section}.{key.name}".lstrip(".")
    if canonical in made.said and made.said[canonical] != value:
        return f"{path}: given twice, by another name as well; remove one"
    said = f"{path}: {_shown(value)}"
    note = f" -- {section} is off" if is_off else _note(key, value)
    if value is None or (value == AUTO and key.fate is not Fate.MAPPED):
        made.notes.append(said + note)
        return None
    if value == AUTO:
        made.said[canonical] = AUTO
        if key.filled and key.becomes != "prefetch":
            made.autos[canonical] = key
            made.filled.append(f"{path}: auto -- {key.filled}")
        else:
            made.notes.append(f"{path}: auto -- its default")
        return None
    try:
        value = read(key.kind, value)
    except ValueError as error:
        return f"{path}: {error}, found {value!r}"
    made.said[canonical] = value
    if key.fate is Fate.MAPPED:
        made.notes.append(f"{said} -> {key.becomes}{note}" if key.becomes else said + note)
        return None
    asks = not _is_harmless(key, value) and not is_off
    if key.fate is Fate.REFUSED and asks:
        return f"{path}: {_shown(value)} is not supported: {key.note}"
    if key.fate is Fate.WARNED and asks and _enabled(made, section) != AUTO:
        made.warnings.append(f"{said}: {key.note}")
    made.notes.append(said + note)
    return None


def _note(key: Key, value: Any) -> str:
    """Return the note of the table on the key; empty if the value has no effect."""
    asks_for_nothing = key.fate in (Fate.WARNED, Fate.REFUSED) and _is_harmless(key, value)
    if asks_for_nothing or not key.note or (value is False and key.note.startswith("true:")):
        return ""
    return f" -- {key.note}"


def _enabled(made: Migration, section: str) -> Any:
    """Return the value of `enabled` in the section, if it is fp16 or bf16."""
    return made.said[section].get("enabled", False) if section in ("fp16", "bf16") else None


def _is_harmless(key: Key, value: Any) -> bool:
    if any(value == each and type(value) is type(each) for each in key.harmless):
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        return any(value == each for each in key.harmless if not isinstance(each, bool))
    off = {"enabled": False} in key.harmless
    return off and isinstance(value, Mapping) and not value.get("enabled", False)


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and value < 1e16:
        return str(int(value))
    try:
        found = json.dumps(value)
    except (TypeError, ValueError):
        found = str(value)
    found = " ".join(found.split())
    return found if len(found) <= 60 else f"{found[:57]}..."


# ---------------------------------------------------------------- several keys together
def _precision(made: Migration) -> None:
    fp16, bf16 = made.get("fp16.enabled", False), made.get("bf16.enabled", False)
    if fp16 and bf16:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; set one of them to false")
    if AUTO in (made.said.get("fp16.enabled"), made.said.get("bf16.enabled")) and not (
        fp16 or bf16
    ):
        if made.said.get("bf16.enabled") == AUTO and made.get("bf16.check_grad_overflow", True):
            made.set("skip_nonfinite", True, "DeepSpeed's default of bf16.check_grad_overflow")
        left_out = [
            f"fp16.{name}"
            for name, usual in _USUAL_SCALE.items()
            if made.get(f"fp16.{name}", usual) != usual
        ]
        if made.said.get("fp16.enabled") == AUTO and left_out:
            made.warnings.append(
                f"{', '.join(left_out)}: left out, as fp16.enabled is auto; with fp16=True write "
                "precision: fp16 and the loss_scale section as well"
            )
        return
    for name in ("fp16.enabled", "bf16.enabled"):
        made.autos.pop(name, None)  # the other one is true
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
    if "fp16.hysteresis" not in made.said:
        made.warnings.append(
            "fp16.hysteresis: absent is 2 in DeepSpeed; the scale is halved at the first overflow "
            "here, so fewer steps are skipped at the start"
        )


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
        names = ("Adam", "AdamW", "Lion", "Adagrad", "SGD")
        raise ConfigError(
            f"optimizer.type: {given} has no rule here; use one of {', '.join(names)}"
        )
    params = {
        key.name: made.said.get(f"optimizer.params.{key.name}")
        for key in SECTIONS["optimizer.params"]
    }
    if given.lower() == "adam" and params["adam_w_mode"] is False:
        kind = "adam"
    made.set("optimizer.type", kind)
    numbers = dict(_DEFAULTS[kind])
    if params["torch_adam"] is True and kind == "adamw":
        numbers["weight_decay"] = 0.01
    for name, value in params.items():
        if value == AUTO:
            numbers.pop(name, None)
        elif value is not None and f"optimizer.{name}" in _NUMBERS:
            numbers[name] = list(value) if name == "betas" else value
    for name, value in numbers.items():
        absent = f"optimizer.params.{name}" not in made.said
        made.set(f"optimizer.{name}", value, _DEFAULT if absent else None)


def _schedule(made: Migration) -> None:
    section = made.said.get("scheduler")
    if section is None:
        return
    kind = made.get("scheduler.type")
    if kind is None:
        raise ConfigError("scheduler.type: missing")
    params: Any = made.said.get("scheduler.params")
    if params == AUTO:
        known = KINDS[kind].parameters if kind in KINDS else {}
        params = {name: AUTO for name in FILLED if name in known}
    made.schedule = schedule = Schedule.of(kind, params or {})
    if made.printed_schedule is None:
        _leave_to_trainer(made, schedule)
        return
    for name in params or {}:
        made.notes.append(f"scheduler.params.{name}: {_shown(params[name])} -- in the code below")
    made.for_loops.append(
        f"scheduler.type: {kind}: no key of ours; the code below makes it in your loop, where it "
        "is stepped after optimizer.step()"
    )


def _leave_to_trainer(made: Migration, schedule: Schedule) -> None:
    made.filled.append(
        f"scheduler.type: {schedule.type} -- lr_scheduler_type: {KINDS[schedule.type].trainers}, "
        "with learning_rate, warmup_steps and max_steps"
    )
    made.notes = [text for text in made.notes if not text.startswith("scheduler.type")]
    peak = schedule.params.get("warmup_max_lr")
    if isinstance(peak, int | float):
        made.set("optimizer.lr", float(peak), f"scheduler.params.warmup_max_lr: {_shown(peak)}")


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
    if not _follow(made, train, micro, steps):
        if steps is not None:
            made.set("gradient_accumulation_steps", max(1, steps))
        if train is not None and train % (ranks or 1):
            raise ConfigError(f"{TRAIN}: {train} cannot be divided by {ranks} ranks")
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
    if made.batches.steps > 1 and not made.unfilled:
        made.for_loops.append(
            f"{STEPS}: {made.batches.steps}: in a loop of your own divide the loss by it, and step "
            "after as many passes; offload.deepspeed does both"
        )


def _follow(made: Migration, train: int | None, micro: int | None, steps: int | None) -> bool:
    """Whether the sizes of batches follow from those in the file: train_batch_size is the batch per
    rank x accumulation x ranks. The arguments set the sizes that Trainer's file leaves open."""
    if made.unfilled:
        return sum(each is not None for each in (train, micro, steps)) > 1
    return train is not None or micro is not None
