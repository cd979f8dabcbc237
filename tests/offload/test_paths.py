"""Every public function that takes a path takes str, Path and any other os.PathLike.

The functions are found by walking what is public, so that a new one has to have its call here.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.checkpoint
import offload.loggers
from offload.config import OffloadConfig
from offload.errors import ConfigError, OffloadError

API = Path(__file__).parents[2] / "docs/api.md"
BESIDE_IT = (  # what the page on programming does not list
    *(f"offload.{name}" for name in offload.__all__),
    *(f"offload.checkpoint.{name}" for name in offload.checkpoint.__all__),
    *(f"offload.loggers.{name}" for name in vars(offload.loggers) if name.endswith("Logger")),
    "offload.runs.recording.Recording", "offload.deepspeed.utils.zero_to_fp32",
)  # fmt: skip
NAMES = re.compile(r"(path|folder|file|directory|out|source|destination)|.*_(dir|path|folder|file)")
THEIRS = {  # arguments of that name that are no path, or are the other library's to convert
    "offload.integrations.transformers.OffloadMixin.save_model(output_dir)",
    "offload.integrations.transformers.OffloadTrainer.save_model(output_dir)",
}


class OwnPath(os.PathLike[str]):
    """A path by its protocol alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __fspath__(self) -> str:
        return self._text


# ---------------------------------------------------------------- what is public
def public() -> Iterator[str]:
    yield from re.findall(r"^::: ([\w.]+)$", API.read_text(), re.M)
    yield from BESIDE_IT


def resolved(name: str) -> Any:
    """A module, or what it has by that name; skips without the other library."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not error.name.startswith("offload"):
            pytest.skip(f"needs {error.name}")
    above, _, last = name.rpartition(".")
    return getattr(resolved(above), last)


def functions(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Of a module those that it defines, of a class its public methods."""
    found = resolved(name)
    if inspect.ismodule(found):
        for inner, value in vars(found).items():
            if inspect.isfunction(value) and value.__module__ == name and inner[0] != "_":
                yield f"{name}.{inner}", value
    elif inspect.isclass(found) and not issubclass(found, Exception):
        for inner, value in inspect.getmembers(found, callable):
            ours = (getattr(value, "__module__", "") or "").startswith("offload")
            if ours and (inner == "__init__" or inner[0] != "_"):
                yield f"{name}.{inner}", value
    elif inspect.isfunction(found):
        yield name, found


class _Known(dict[str, Any]):
    """Names of a module; what it imports for type checkers only stands for any object."""

    def __missing__(self, name: str) -> Any:
        return Path if name == "Path" else _Anything


class _Anything:
    def __class_getitem__(cls, key: Any) -> Any:
        return cls


@cache
def path_arguments(name: str) -> list[tuple[str, Any]]:
    """`function(argument)` and its type, of every argument that is a path."""
    found = []
    for function, value in functions(name):
        wrapped = inspect.unwrap(getattr(value, "__func__", value))
        known = _Known(vars(builtins) | getattr(wrapped, "__globals__", {}))
        for argument, text in inspect.get_annotations(wrapped).items():
            hint = eval(text, {}, known) if isinstance(text, str) else text
            kinds = [hint, *typing.get_args(hint)]
            says = any("Path" in str(kind) for kind in kinds)
            if argument != "return" and (says or (NAMES.fullmatch(argument) and str in kinds)):
                found.append((f"{function}({argument})", hint))
    return [each for each in found if each[0] not in THEIRS]


@pytest.mark.parametrize("name", sorted(set(public())))
def test_every_path_is_annotated_as_any_path_and_has_a_call(name: str) -> None:
    for argument, hint in path_arguments(name):
        kinds = typing.get_args(hint)
        assert str in kinds, f"{argument}: {hint}: write StrPath"
        assert os.PathLike[str] in kinds, f"{argument}: {hint}: write StrPath"
        assert argument.removeprefix("offload.") in CALLS, f"{argument} has no call below"


# ---------------------------------------------------------------- a call of each
class Given:
    """Makes a path what a caller gives: of the argument `only`, or of every one."""

    def __init__(self, kind: Callable[[Any], Any], only: str | None = None) -> None:
        self._kind, self._only = kind, only

    def __call__(self, argument: str, path: Path) -> Any:
        return self._kind(path) if self._only in (None, argument) else path


Call = Callable[[Given, Path], Any]
CALLS: dict[str, Call] = {}
CONFIG = {"device": "cpu", "budget": {"host": "64MiB"}, "placement": {"parameters": "host"}}


def gives(*arguments: str) -> Callable[[Call], Call]:
    """What a call gives paths to."""

    def note(call: Call) -> Call:
        CALLS.update(dict.fromkeys(arguments, call))
        return call

    return note


def a_config(folder: Path) -> Path:
    path = folder / "offload.yaml"
    path.write_text(OffloadConfig.load(CONFIG).to_yaml())
    return path


def an_engine(**more: Any) -> Any:
    torch.manual_seed(0)
    return offload.initialize(nn.Linear(2, 2), CONFIG, **more)


def some_weights(folder: Path) -> Path:
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, path)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@gives("OffloadConfig.load(source)")
def load_config(given: Given, folder: Path) -> Any:
    return OffloadConfig.load(given("OffloadConfig.load(source)", a_config(folder))).budget.host


@gives("initialize(config)")
def initialize_config(given: Given, folder: Path) -> Any:
    with offload.initialize(nn.Linear(2, 2), given("initialize(config)", a_config(folder))) as it:
        return it.config.budget.host


@gives("initialize(weights)", "Engine.__init__(weights)")
def initialize_weights(given: Given, folder: Path) -> Any:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    weights = given("initialize(weights)", some_weights(folder))
    with offload.initialize(model, CONFIG, weights=weights) as engine:
        return [value.tolist() for value in engine.module.state_dict().values()]


@gives("initialize(run_folder)")
def initialize_run_folder(given: Given, folder: Path) -> Any:
    an_engine(run_folder=given("initialize(run_folder)", folder / "run")).close()
    return names_in(folder / "run")


@gives("dispatch(config)")
def dispatch_config(given: Given, folder: Path) -> Any:
    model = offload.dispatch(nn.Linear(2, 2), given("dispatch(config)", a_config(folder)))
    with offload.dispatched(model) as found:
        return found.config.budget.host


@gives("dispatch(weights)", "Dispatched.__init__(weights)")
def dispatch_weights(given: Given, folder: Path) -> Any:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    offload.dispatch(model, CONFIG, weights=given("dispatch(weights)", some_weights(folder)))
    with offload.dispatched(model):
        return model(torch.ones(2)).tolist()


@gives("Engine.save_checkpoint(path)", "checkpoint.save(path)", "checkpoint.save_behind(path)")
def save(given: Given, folder: Path) -> Any:
    from offload.checkpoint.engine.background import BackgroundSaves

    saves = BackgroundSaves()
    with an_engine() as engine:
        engine.save_checkpoint(given("Engine.save_checkpoint(path)", folder / "a"), wait=False)
        engine.checkpoint_saved()
        offload.checkpoint.save(engine, given("checkpoint.save(path)", folder / "b"))
        behind = given("checkpoint.save_behind(path)", folder / "c")
        offload.checkpoint.save_behind(engine, behind, None, saves, lambda: None)
        saves.wait()
    return [names_in(folder / name) for name in "ab"]


@gives("Engine.load_checkpoint(path)", "checkpoint.load(path)")
def load(given: Given, folder: Path) -> Any:
    saved = folder / "saved"
    with an_engine() as engine:
        engine.save_checkpoint(saved, state={"epoch": 3})
        first = engine.load_checkpoint(given("Engine.load_checkpoint(path)", saved))
        return first, offload.checkpoint.load(engine, given("checkpoint.load(path)", saved))


@gives("checkpoint.step_path(folder)", "checkpoint.latest(folder)", "checkpoint.prune(folder)")
def steps(given: Given, folder: Path) -> Any:
    with an_engine() as engine:
        for step in (1, 2):
            path = offload.checkpoint.step_path(given("checkpoint.step_path(folder)", folder), step)
            offload.checkpoint.save(engine, path)
    found = offload.checkpoint.latest(given("checkpoint.latest(folder)", folder))
    gone = offload.checkpoint.prune(given("checkpoint.prune(folder)", folder), keep_last=1)
    return found and found.name, [each.name for each in gone]


@gives("runs.recording.Recording.write(path)")
def record(given: Given, folder: Path) -> Any:
    with an_engine() as engine:
        with engine.record() as recording:
            engine.module(torch.ones(2)).sum().backward()
            engine.optimizer.step()
        recording.write(given("runs.recording.Recording.write(path)", folder / "trace.json"))
    return names_in(folder)


@gives(
    "loggers.CSVLogger.__init__(path)", "loggers.JSONLinesLogger.__init__(path)",
    "loggers.TensorBoardLogger.__init__(folder)",
)  # fmt: skip
def log(given: Given, folder: Path) -> Any:
    csv = given("loggers.CSVLogger.__init__(path)", folder / "a.csv")
    lines = given("loggers.JSONLinesLogger.__init__(path)", folder / "a.jsonl")
    curves = given("loggers.TensorBoardLogger.__init__(folder)", folder / "curves")
    for logger in (offload.loggers.CSVLogger(csv), offload.loggers.JSONLinesLogger(lines)):
        logger.log({"loss": 1.0}, 1)
        logger.close()
    found = names_in(folder)
    offload.loggers.TensorBoardLogger(curves).close()
    return found, names_in(folder)


DS_CONFIG = """{"train_micro_batch_size_per_gpu": 1, "offload": {"budget": {"host": "64MiB"}},
"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}"""


def a_ds_engine(folder: Path, argument: str, given: Given) -> Any:
    import offload.deepspeed

    path = folder / "ds.json"
    path.write_text(DS_CONFIG)
    config = {argument: given(f"deepspeed.initialize({argument})", path)}
    return offload.deepspeed.initialize(model=nn.Linear(2, 2), **config)[0]


@gives("deepspeed.initialize(config)", "deepspeed.initialize(config_params)")
def ds_config(given: Given, folder: Path) -> Any:
    rates = []
    for argument in ("config", "config_params"):
        engine = a_ds_engine(folder, argument, given)
        rates += engine.get_lr()
        engine.destroy()
    return rates


_DS = "deepspeed.DeepSpeedEngine"


@gives(
    f"{_DS}.save_checkpoint(save_dir)", f"{_DS}.save_16bit_model(save_dir)",
    f"{_DS}.load_checkpoint(load_dir)",
)  # fmt: skip
def ds_files(given: Given, folder: Path) -> Any:
    engine = a_ds_engine(folder, "config", Given(Path))
    try:
        engine.save_checkpoint(given(f"{_DS}.save_checkpoint(save_dir)", folder / "a"), tag="one")
        engine.save_16bit_model(given(f"{_DS}.save_16bit_model(save_dir)", folder / "b"))
        engine.load_checkpoint(given(f"{_DS}.load_checkpoint(load_dir)", folder / "a"))
    finally:
        engine.destroy()
    return [names_in(folder / name) for name in "ab"]


_FILES = "deepspeed.utils.zero_to_fp32"


@gives(
    f"{_FILES}.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir)",
    f"{_FILES}.convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir)",
    f"{_FILES}.convert_zero_checkpoint_to_fp32_state_dict(output_dir)",
    f"{_FILES}.load_state_dict_from_zero_checkpoint(checkpoint_dir)",
)
def zero_to_fp32(given: Given, folder: Path) -> Any:
    from offload.deepspeed.utils import zero_to_fp32 as files

    saved = folder / "saved"
    engine = a_ds_engine(folder, "config", Given(Path))
    engine.save_checkpoint(saved, tag="one")
    engine.destroy()
    name = f"{_FILES}.convert_zero_checkpoint_to_fp32_state_dict"
    out = given(f"{name}(output_dir)", folder / "out")
    files.convert_zero_checkpoint_to_fp32_state_dict(given(f"{name}(checkpoint_dir)", saved), out)
    name = f"{_FILES}.load_state_dict_from_zero_checkpoint(checkpoint_dir)"
    model = files.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), given(name, saved))
    name = f"{_FILES}.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir)"
    found = files.get_fp32_state_dict_from_zero_checkpoint(given(name, saved))
    return names_in(folder / "out"), sorted(found), sorted(model.state_dict())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with one block; `TINY` for the calls."""
    import transformers

    TINY.append(tmp_path_factory.mktemp("model") / "tiny")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(TINY[-1])
    return TINY[-1]


TINY: list[Path] = []


@gives("open_pretrained(folder)", "from_pretrained(folder)", "from_pretrained(run_folder)")
def open_pretrained(given: Given, folder: Path) -> Any:
    model = offload.open_pretrained(given("open_pretrained(folder)", TINY[-1]))
    run = given("from_pretrained(run_folder)", folder / "run")
    here = given("from_pretrained(folder)", TINY[-1])
    with offload.from_pretrained(here, CONFIG, run_folder=run) as engine:
        return type(model).__name__, type(engine.module).__name__, names_in(folder / "run")


@gives("compress(source)", "compress(out)")
def compress(given: Given, folder: Path) -> Any:
    out = given("compress(out)", folder / "out")
    offload.compress(given("compress(source)", TINY[-1]), out, storage="int4", group_size=32)
    return names_in(folder / "out")


_TRAINER = "integrations.transformers"


@gives(f"{_TRAINER}.OffloadTrainer.__init__(offload)", f"{_TRAINER}.OffloadMixin.__init__(offload)")
def trainer(given: Given, folder: Path) -> Any:
    import transformers

    from offload.integrations.transformers import OffloadTrainer

    model = transformers.GPT2LMHeadModel.from_pretrained(TINY[-1])
    args = transformers.TrainingArguments(str(folder), use_cpu=True, report_to=[])
    config = given(f"{_TRAINER}.OffloadTrainer.__init__(offload)", a_config(folder))
    with OffloadTrainer(model, args, offload=config).engine as engine:
        return engine.config.budget.host


_ACCELERATOR = "integrations.accelerate.OffloadAccelerator"


@gives(
    f"{_ACCELERATOR}.save_state(output_dir)", f"{_ACCELERATOR}.load_state(input_dir)",
    f"{_ACCELERATOR}.save_model(save_directory)",
)  # fmt: skip
def accelerate(given: Given, folder: Path) -> Any:
    from offload.integrations.accelerate import OffloadAccelerator

    accelerator = OffloadAccelerator(cpu=True)
    with an_engine() as engine:
        model, _ = accelerator.prepare(engine.module, engine.optimizer)
        accelerator.save_state(given(f"{_ACCELERATOR}.save_state(output_dir)", folder / "a"))
        accelerator.load_state(given(f"{_ACCELERATOR}.load_state(input_dir)", folder / "a"))
        out = given(f"{_ACCELERATOR}.save_model(save_directory)", folder / "b")
        accelerator.save_model(model, out)
    return names_in(folder / "a"), names_in(folder / "b")


_LIGHTNING = "integrations.lightning"


@gives(
    *(f"{_LIGHTNING}.OffloadStrategy.__init__({argument})" for argument in ("config", "weights")),
    f"{_LIGHTNING}.consolidate(folder)", f"{_LIGHTNING}.consolidate(file)",
)  # fmt: skip
def lightning(given: Given, folder: Path) -> Any:
    from offload.integrations import lightning as module

    name, path = f"{_LIGHTNING}.OffloadStrategy.__init__", a_config(folder)
    config, weights = (given(f"{name}({each})", path) for each in ("config", "weights"))
    module.OffloadStrategy(config, weights=weights)
    saved = given(f"{_LIGHTNING}.consolidate(folder)", folder / "saved")
    module.consolidate(saved, given(f"{_LIGHTNING}.consolidate(file)", folder / "out.ckpt"))


# ---------------------------------------------------------------- what comes of them
ALIASES = {  # what another call's argument goes to
    "Engine.__init__(weights)": "initialize(weights)",
    "Dispatched.__init__(weights)": "dispatch(weights)",
    f"{_TRAINER}.OffloadMixin.__init__(offload)": f"{_TRAINER}.OffloadTrainer.__init__(offload)",
}


def needs(call: Call) -> None:
    if call is lightning:
        pytest.importorskip("lightning")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("call", dict.fromkeys(CALLS.values()), ids=lambda call: call.__name__)
def test_text_and_every_kind_of_path_do_the_same(call: Call, tmp_path: Path) -> None:
    needs(call)
    found: list[str] = []
    for number, kind in enumerate((str, Path, lambda path: OwnPath(str(path)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            found.append(repr(call(Given(kind), folder)))
        except OffloadError as error:
            found.append(f"{type(error)}: {error}".replace(str(folder), "FOLDER"))
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("argument", sorted(CALLS.keys() - ALIASES.keys()))
def test_bytes_are_refused_by_the_name_of_the_argument(argument: str, tmp_path: Path) -> None:
    call = CALLS[argument]
    needs(call)
    with pytest.raises(ConfigError, match="found bytes"):
        call(Given(os.fsencode, argument), tmp_path)
