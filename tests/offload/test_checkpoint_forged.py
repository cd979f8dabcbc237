"""A manifest that was made up, with right hashes, is refused before anything is loaded, where it
names other files, another model, or numbers that nothing can train with."""

from __future__ import annotations

import functools
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.checkpoint.foreign.exporting import export
from offload.checkpoint.format import manifest
from offload.checkpoint.format.checked_files import BlockHashes
from offload.checkpoint.format.reader import CheckpointReader
from offload.errors import CheckpointError
from tests.offload.engine_cases import HOST, TinyLM, config, flip_bit, seeded
from tests.offload.engine_states import assert_same_bits, states_of

pytestmark = pytest.mark.sample(4)

Content = dict[str, Any]


def keys_of(folder: Path, **keys: Any) -> dict[str, Any]:
    return config(folder, HOST, **{"precision": "bf16", **keys})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offload.Engine]:
    keys = keys_of(tmp_path_factory.mktemp("swap"))
    with offload.initialize(seeded(TinyLM, 5), keys) as engine:
        yield engine
    untouched.cache_clear()


def numbers_of(engine: offload.Engine) -> list[dict[str, Any]]:
    return [dict(group) for group in engine.optimizer.param_groups]


@contextmanager
def in_time() -> Iterator[None]:
    """Interrupt a call that hangs."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 30)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def untouched(engine: offload.Engine) -> dict[str, Tensor]:
    """Its states as they were at first, or after `load`: nothing else here changes them."""
    return states_of(engine)


def load(engine: offload.Engine, path: Path) -> None:
    untouched.cache_clear()
    engine.load_checkpoint(path)


def refusal(engine: offload.Engine, path: Path) -> str:
    """The message of the error, which left the engine as it was."""
    before, numbers = untouched(engine), numbers_of(engine)
    with in_time(), pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path)
    assert_same_bits(states_of(engine), before)
    assert repr(numbers_of(engine)) == repr(numbers)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def signed(content: Content) -> str:
    return json.dumps({**content, "xxh3": manifest._digest(content)})


def edited(saved: Path, change: Callable[[Content], object]) -> None:
    path = saved / "manifest.json"
    content = json.loads(path.read_text())
    del content["xxh3"]
    change(content)
    path.write_text(signed(content))


def numbers(content: Content) -> dict[str, Any]:
    numbers: dict[str, Any] = content["optimizer"]["param_groups"][0]["numbers"]
    return numbers


def params(content: Content) -> list[str]:
    names: list[str] = content["optimizer"]["param_groups"][0]["params"]
    return names


def buffers_file(content: Content) -> Content:
    entry: Content = content["files"]["buffers.safetensors"]
    return entry


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda m: params(m).append("nothing.weight"), "or other parameters in one of them"),
        (lambda m: params(m).pop(), "or other parameters in one of them"),
        (lambda m: m["parameters"].pop(), "is not in it"),
        (lambda m: m["parameters"][0].update(names=[]), "in group"),
        (lambda m: m["parameters"][0].update(dtype="I64"), "parameters.0.dtype"),
        (lambda m: m["parameters"][0].update(group=-1), "parameters.0.group"),
        (lambda m: m["parameters"][0].update(steps=-1), "parameters.0.steps"),
        (lambda m: m["parameters"][0].update(shape=[-37, -32]), "parameters.0.shape"),
        (lambda m: m["parameters"][0].update(shape=[1 << 62] * 9), "has shape (46"),
        (lambda m: m["buffers"].append({"name": "b", "dtype": "F4", "shape": []}), "buffers."),
        (lambda m: m["optimizer"]["fields"].pop("exp_avg"), "has the optimizer states"),
        (lambda m: m["optimizer"]["fields"].update(low="F32"), "has the optimizer states"),
        (lambda m: m["optimizer"].pop("fields"), "optimizer.fields"),
        (lambda m: m.update(steps_taken=-1), "steps_taken"),
        (lambda m: m.update(loss_scale={"scale": 2.0, "good_steps": 0}), "a loss scale"),
        (lambda m: m.update(loss_scale={"scale": float("nan"), "good_steps": 0}), "loss_scale"),
        (lambda m: m.update(novelty=1), "novelty"),
        (lambda m: m.update(format="other"), "not the manifest of a checkpoint of offload"),
        (lambda m: m["groups"][2].update(parameters="other"), "no file other"),
        (lambda m: numbers(m).update(params=[]), "hold params"),
        (lambda m: numbers(m).update(lr="evil"), "could not convert string"),
        (lambda m: numbers(m).update(lr=-1.0), "lr: expected 0 or more, got -1.0"),
        (lambda m: numbers(m).update(lr=float("nan")), "lr: expected a finite number"),
        (lambda m: numbers(m).update(lr=10**400), "too large"),
        (lambda m: numbers(m).update(betas=[0.9]), "unpack"),
        (lambda m: numbers(m).update(betas=[0.9, 1.0]), "beta2: expected 0 <= beta2 < 1"),
        (lambda m: numbers(m).update(maximize="no"), "maximize"),
        (lambda m: numbers(m).update(amsgrad=True), "max_exp_avg_sq"),
        (lambda m: numbers(m).update(momentum=0.9), "momentum"),
        (lambda m: numbers(m).pop("eps"), "lacks eps"),
        *((lambda m, v=version: m.update(version=v), "format version")
          for version in (0, "1", True, 10**30)),
        (lambda m: buffers_file(m).update(sections=[]), "and hashes for 0"),
        (lambda m: m["files"]["parameters/001.safetensors"]["sections"].pop(), "and hashes for"),
        (lambda m: buffers_file(m)["sections"][0].update(nbytes=-1), "nbytes"),
        (lambda m: buffers_file(m).update(nbytes=1 << 70), "nbytes"),
        (lambda m: m["files"].update({"a\0b": buffers_file(m)}), "is no file of a checkpoint"),
        (lambda m: m["files"].update({"parameters/../000.safetensors": buffers_file(m)}),
         "lies outside of the folder"),
        (lambda m: m["files"].update({"manifest.json": buffers_file(m)}), "is no file"),
        (lambda m: m["files"].clear(), "no file"),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_fit_together_the_files_or_the_engine_is_refused(
    engine: offload.Engine, saved: Path, change: Callable[[Content], object], fragment: str
) -> None:
    edited(saved, change)
    assert fragment in refusal(engine, saved)


def forge_header(saved: Path, name: str, change: Callable[[Content], object]) -> None:
    """Another header of the same length, and the hash that it needs."""
    path = saved / name
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    replaced = change(header)
    text = replaced if isinstance(replaced, str) else json.dumps(header, separators=(",", ":"))
    new = len(text).to_bytes(8, "little") + text.encode()
    raw = new + raw[8 + length :]
    path.write_bytes(raw)

    def sign(content: Content) -> None:
        file, end = content["files"][name], 0
        file["nbytes"] = len(raw)
        file["sections"][0]["nbytes"] = len(new)
        for section in file["sections"]:
            hashes = BlockHashes(f"{content['generation']}/{name}", end)
            hashes.update(memoryview(raw)[end : end + section["nbytes"]])
            end += section["nbytes"]
            section["xxh3"] = hashes.text()

    edited(saved, sign)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update({"norm.weight": 3}),
        lambda h: h["norm.weight"].pop("dtype"),
        lambda h: h["norm.weight"].update(shape=[32.0]),
        lambda h: h["norm.weight"].update(data_offsets=["a", "b"]),
        lambda h: h["norm.weight"].update(
            data_offsets=[float(x) for x in h["norm.weight"]["data_offsets"]]
        ),
        lambda h: h["norm.weight"].update(data_offsets=[-64, 0]),
        lambda h: "[" * 50_000,
        lambda h: "{}",
    ],
)
def test_a_forged_header_is_refused(
    engine: offload.Engine, saved: Path, change: Callable[[Content], object]
) -> None:
    groups = json.loads((saved / "manifest.json").read_text())["groups"]
    names = [group["parameters"] for group in groups]
    name = next(each for each in names if b'"norm.weight"' in (saved / each).read_bytes())
    forge_header(saved, name, change)
    assert name in refusal(engine, saved)


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "offload checkpoint", "version": 3, "groups": ' + "[" * 100_000,
        "[" * 100_000,
        '{"format": "offload checkpoint", "version": 3, "steps_taken": ' + "9" * 5000 + "}",
        '"offload checkpoint"',
        "",
        "NaN",
    ],
    ids=["deep", "deeper", "digits", "string", "empty", "nan"],
)
def test_json_that_is_no_manifest_is_refused(
    engine: offload.Engine, saved: Path, text: str
) -> None:
    (saved / "manifest.json").write_text(text)
    assert "manifest.json" in refusal(engine, saved)


@pytest.mark.parametrize("name", ["manifest.json", "buffers.safetensors"])
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo, os.mkdir, lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
        lambda path: os.symlink(path, path), lambda path: None,
    ],
    ids=["fifo", "folder", "socket", "loop", "nothing"],
)  # fmt: skip
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    engine: offload.Engine, saved: Path, name: str, make: Callable[[Path], None]
) -> None:
    (saved / name).unlink()
    make(saved / name)
    assert name in refusal(engine, saved)


def everyone(engine: offload.Engine, saved: Path, out: Path) -> dict[str, Callable[[], object]]:
    """All readers of a checkpoint, by name."""
    from offload.integrations.loaded_weights import load_checkpoint_weights

    def verify() -> None:
        with CheckpointReader(saved) as reader:
            reader.check(contents=True)

    return {
        "load": lambda: load(engine, saved),
        "verify": verify,
        "weights=": lambda: offload.initialize(seeded(TinyLM), keys_of(out), weights=saved),
        "dispatch": lambda: offload.dispatch(seeded(TinyLM), keys_of(out), weights=saved),
        "export": lambda: export(saved, out / "out.safetensors"),
        "weights alone": lambda: load_checkpoint_weights(engine, saved),
    }


def test_weights_alone_of_a_larger_model_are_refused(tmp_path: Path) -> None:
    from offload.integrations.loaded_weights import load_checkpoint_weights

    def layers(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))

    with offload.initialize(layers(3), {}) as larger:
        larger.save_checkpoint(tmp_path / "saved")
    smaller = layers(2)
    before = {name: value.clone() for name, value in smaller.state_dict().items()}
    with offload.initialize(smaller, {}) as engine:
        with pytest.raises(CheckpointError, match=r"2\.bias, 2\.weight, .* of another model"):
            load_checkpoint_weights(engine, tmp_path / "saved")
        assert all(torch.equal(before[name], v) for name, v in smaller.state_dict().items())


@pytest.mark.parametrize("name", ["parameters/000.safetensors", "parameters", "manifest.json"])
def test_a_link_is_not_followed_by_any_reader_of_a_checkpoint(
    engine: offload.Engine, saved: Path, tmp_path: Path, name: str
) -> None:
    """Also where it leads to the very bytes that were there."""
    (saved / name).rename(tmp_path / "elsewhere")
    (saved / name).symlink_to(tmp_path / "elsewhere")
    for read in everyone(engine, saved, tmp_path).values():
        with pytest.raises(CheckpointError, match=rf"{name}.* is a link .*`cp -rL`") as caught:
            read()
        assert str(caught.value).count("; ") == 1  # no second remedy
    linked = tmp_path / "linked"
    (saved / name).unlink()
    (tmp_path / "elsewhere").rename(saved / name)
    linked.symlink_to(saved)  # the folder's own name is the user's
    load(engine, linked)


def test_a_flipped_bit_is_seen_by_every_reader(
    engine: offload.Engine, original: Path, saved: Path, tmp_path: Path
) -> None:
    flip_bit(saved / "parameters/000.safetensors")
    for read in everyone(engine, saved, tmp_path).values():
        with pytest.raises(CheckpointError, match=r"000\.safetensors is damaged"):
            read()
    load(engine, original)  # the load was half-way


def test_a_manifest_of_gigabytes_is_not_read(engine: offload.Engine, saved: Path) -> None:
    os.truncate(saved / "manifest.json", 1 << 40)
    assert "no manifest has more than" in refusal(engine, saved)


def test_numbers_that_a_schedule_has_added_are_taken_over(tmp_path: Path) -> None:
    """Those that this engine's param groups do not have yet, too."""
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path)) as engine:
        group = engine.optimizer.param_groups[0]
        group.update(initial_lr=0.5, note="warm", lr=1, betas=[0.5, 0.75], maximize=0, nothing=None)
        engine.save_checkpoint(tmp_path / "saved")
    with offload.initialize(seeded(TinyLM), keys_of(tmp_path)) as engine:
        load(engine, tmp_path / "saved")
        group = engine.optimizer.param_groups[0]
        assert (group["initial_lr"], group["note"], group["lr"]) == (0.5, "warm", 1)
        assert (group["betas"], group["maximize"], group["nothing"]) == ((0.5, 0.75), 0, None)
