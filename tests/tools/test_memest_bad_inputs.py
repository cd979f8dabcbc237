"""Whatever is wrong with a source, memest says so in one line; what may hold code stays shut."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload.tiers.errors import CheckpointError, ConfigError, PathError
from offload.tools.memest.source.hugging_face import check_configuration
from offload.tools.memest.source.input_files import read_json
from offload.tools.memest.source.read_model import read_model
from offload.tools.memest.source.transformers_models import build_on_meta
from tests.tools.model_files import TINY_LLAMA, entries_of, write_config, write_safetensors


def reason(source: str | Path) -> str:
    """The message of the ConfigError that reading raises; one line."""
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        read_model(str(source))
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 600
    return message


def read_or_refuse(path: Path) -> None:
    """Either a model with parameters, or a reason in one line."""
    refusal = ""
    try:
        assert read_model(str(path)).shape.numel > 0
    except (ConfigError, CheckpointError) as error:
        refusal = str(error)
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": -4096}, "hidden_size is -4096; it must be a whole number"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 40.5}, "hidden_size is 40.5"),
        ({"hidden_size": float("nan")}, "hidden_size is nan"),
        ({"hidden_size": float("inf")}, "hidden_size is inf"),
        ({"vocab_size": 10**30}, "vocab_size is 1000000"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648; it must be a whole number"),
        ({"intermediate_size": 2**31}, "intermediate_size is 2147483648"),
        ({"hidden_size": 2**26, "intermediate_size": 2**26}, "its sizes make 5.4e+16 parameters"),
        ({"model_type": "qwen3_moe", "num_experts": 2**31}, "num_experts is 2147483648"),
        ({"model_type": "qwen3_vl", "text_config": {"hidden_size": 2**40}}, "hidden_size is 1099"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 5000}, "from 1 to 4096"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must"),
        ({"tie_word_embeddings": "yes"}, "transformers cannot build this llama"),
        ({"model_type": None}, "no model_type"),
        ({"model_type": 7}, "model_type is 7"),
        ({"model_type": "x" * 5000}, "is unknown"),
        ({"model_type": "../../etc"}, "is unknown"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is"),
        ({"architectures": [1]}, "architectures is"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in reason(write_config(tmp_path, **changes))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "ends too early"),
        (b'{"model_type": "llama", "hidden_si', "ends too early"),
        (b'{"model_type": "llama",\n"hidden_size": 0x10}', ":2: not valid JSON"),
        (b'{"model_type": "llama", "model_type": "gpt2"}', "'model_type' is given twice"),
        (b"[1, 2]", "it holds a list, not an object"),
        (b"null", "is no model configuration"),
        (b'{"a": 1}', "no model_type"),
        (b"\xff\xfe\x00\x01", "no UTF-8"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"model_type": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"weight_map": {}}', "it has no weight_map"),
        (b'{"weight_map": {"a": "../../secret.safetensors"}}', "there is no such file"),
        (b'{"weight_map": {"a": 3}}', "it has no weight_map"),
        (b'{"weight_map": []}', "it has no weight_map"),
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x7fELF\x02", "no description of a model"),
        (b"\x89HDF\r\n", "HDF5"),
        (b"hello, world", "no description of a model"),
    ],
)
def test_what_is_no_configuration_is_refused(data: bytes, expected: str, tmp_path: Path) -> None:
    is_text = data[:1] in b'{["n\xff' or not data
    path = tmp_path / ("config.json" if is_text else "model")
    path.write_bytes(data)
    assert expected in reason(path)


_REPOSITORY = "somebody/kernels-of-his-own"


@pytest.mark.parametrize(
    "keys",
    [
        {"attn_implementation": _REPOSITORY},
        {"_attn_implementation_internal": f"paged|{_REPOSITORY}"},
        {"attn_implementation": {"": _REPOSITORY}},
        {"_experts_implementation": _REPOSITORY},
        {"attribute_map": {"fast": "_attn_implementation"}, "fast": _REPOSITORY},
        {"use_kernels": True, "kernel_config": {"RMSNorm": f"{_REPOSITORY}:RMSNorm"}},
    ],
)
def test_code_of_a_repository_is_neither_fetched_nor_run(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import hub_kernels

    asked: list[object] = []
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **_: asked.append(args))
    for name in ("plain", "named"):
        (tmp_path / name).mkdir()
    plain = read_model(str(write_config(tmp_path / "plain")))
    named = read_model(str(write_config(tmp_path / "named", **keys)))
    path = tmp_path / "named" / "config.json"
    model: Any = build_on_meta(check_configuration(read_json(path), str(path)))
    assert not asked
    chosen = str(model.config._attn_implementation) + str(model.config._experts_implementation)
    assert _REPOSITORY not in chosen
    assert named.shape == plain.shape
    assert (
        any("neither fetched nor run" in note for note in named.notes)
        or "fast" in keys
        or ("use_kernels" in keys)
    )


def test_a_file_of_many_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(1 << 40)
    assert "too much for a description" in reason(path)


class Bomb:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "executed"))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("protocol", [2, 4, "zip", "torch"])
def test_a_pickle_is_never_opened(name: str, protocol: int | str, tmp_path: Path) -> None:
    path, mark = tmp_path / name, tmp_path / "mark"
    if protocol == "torch":
        torch.save({"weight": Bomb(mark)}, path)
    elif protocol == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", pickle.dumps(Bomb(mark)))
    else:
        path.write_bytes(pickle.dumps({"weight": Bomb(mark)}, protocol=int(protocol)))
    message = reason(path)
    assert "pickle" in message or "zip archive" in message
    assert "convert to safetensors" in message
    assert not mark.exists()


def test_a_folder_of_pickles_says_that_it_has_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    (tmp_path / "modeling_custom.py").write_text("raise SystemExit('executed')")
    message = reason(tmp_path)
    assert "neither config.json nor safetensors" in message
    assert "pytorch_model.bin may hold code and is not opened" in message


def test_paths_that_cannot_be_read_are_path_errors(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for path, expected in [
        (tmp_path / "none.json", "no such file"),
        (loop, "symbolic links"),
        (loop / "config.json", "symbolic links"),
        (tmp_path / "pipe.json", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / ("n" * 5000), "too long"),
        (Path("a\0b"), "no name of a file"),
        (tmp_path / "none.json" / "x", "no such file"),
    ]:
        assert expected in reason(path)
        with pytest.raises(PathError):
            read_model(str(path))


def test_an_empty_folder_and_one_of_other_things_say_so(tmp_path: Path) -> None:
    assert "0 other files" in reason(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert "is a folder" in reason(tmp_path)


def damaged(**changes: Any) -> dict[str, Any]:
    return {"a": {**entries_of({"a": (4, 4)})["a"], **changes}}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (damaged(dtype="BF17"), "a has dtype BF17, which is not known here"),
        (damaged(shape=[4, -4]), "a has shape (4, -4)"),
        ({}, "holds no trainable weights: it is empty"),
        (b"{", "has a damaged header"),
        (
            {"i": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}},
            "no trainable weights: torch.int64",
        ),
    ],
)  # fmt: skip
def test_a_damaged_header_is_named(entries: Any, expected: str, tmp_path: Path) -> None:
    known = isinstance(entries, dict) and all(isinstance(e, dict) for e in entries.values())
    data = None if known and "data_offsets" in json.dumps(entries) else 0
    assert expected in reason(write_safetensors(tmp_path / "m.safetensors", entries, data))


@pytest.mark.parametrize("length", [2**63, 60])
def test_a_header_longer_than_the_file_is_not_allocated(length: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * 40)
    assert "header" in reason(path)


@pytest.mark.parametrize("kept", [0, 9, 300])
def test_a_truncated_file_is_refused(kept: int, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", entries_of({"a": (64,), "b": (64,)}))
    assert kept < path.stat().st_size
    os.truncate(path, kept)
    reason(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def fuzz(long: bool) -> settings:
    return settings(max_examples=150 if long else 40, deadline=None)


def test_any_bytes_are_read_or_refused(tmp_path: Path, long: bool) -> None:
    @fuzz(long)
    @given(st.binary(max_size=200), st.sampled_from(["m", "m.safetensors", "config.json"]))
    def check(content: bytes, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        read_or_refuse(path)

    check()


def test_any_values_are_counted_or_refused(tmp_path: Path, long: bool) -> None:
    @fuzz(long)
    @given(st.dictionaries(st.sampled_from(sorted(TINY_LLAMA)), _JSON, min_size=1, max_size=3))
    def check(changes: dict[str, Any]) -> None:
        if isinstance(changes.get("architectures"), list):
            changes["architectures"] = ["LlamaForCausalLM"]  # others are the library's to judge
        read_or_refuse(write_config(tmp_path, **changes))

    check()


def fails() -> nn.Module:
    raise RuntimeError("no weights\nat all")


def exits() -> nn.Module:
    raise SystemExit(3)


GIVES = SimpleNamespace(
    none=lambda: None, text=lambda: "model", weights=lambda: nn.Linear(4, 4, device="cpu"),
    needs=lambda argument: nn.Linear(argument, argument),
)  # fmt: skip
NOT_CALLABLE = 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GIVES.none", "returned NoneType, not an nn.Module"),
        ("GIVES.text", "returned str"),
        ("fails", "the function failed: RuntimeError: no weights at all"),
        ("exits", "the function failed: SystemExit"),
        ("GIVES.weights", "2 parameters have real memory, the first is weight on cpu"),
        ("GIVES.needs", "missing 1 required positional argument"),
        ("NOT_CALLABLE", "is int, not a function"),
        ("absent", "has no absent"),
        ("fails.__wrapped__", "has no fails.__wrapped__"),
    ],
)
def test_a_function_that_builds_no_model_is_refused(name: str, expected: str) -> None:
    assert expected in reason(f"{__name__}:{name}")


def test_modules_that_cannot_be_imported_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_one.py").write_text("def f(:\n")
    (tmp_path / "broken_two.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "broken_three.py").write_text("raise SystemExit('bye')\n")
    assert "importing it failed: SyntaxError" in reason("broken_one:f")
    assert "no module named 'not_installed_anywhere'" in reason("broken_two:f")
    assert "importing it failed: SystemExit: bye" in reason("broken_three:f")
    assert "no module named 'nowhere_at_all'" in reason("nowhere_at_all:f")
    assert "no such file" in reason("bad name:f")


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b", "gpt2", "Qwen/Qwen2.5-0.5B"])
def test_a_name_of_a_hub_is_answered_with_the_command_that_downloads_it(name: str) -> None:
    assert f"`hf download {name} --local-dir {Path(name).name}`" in reason(name)
