"""A folder of torch.distributed.checkpoint that somebody made up runs nothing, takes no memory, and
ends with a typed error."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import CheckpointError, OffloadError
from offload.integrations.dcp_import import import_dcp
from offload.integrations.dcp_reader import SafeReader
from tests.offload.forged_dcp import (
    DATA,
    Call,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    archive,
    edited,
    first_index,
    replaced,
    saved,
    tensor_pickle,
)
from tests.offload.test_checkpoint_forged import in_time

pytestmark = pytest.mark.sample(4)

NAME = "model.a.weight"
LR = "optim.param_groups.0.lr"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("original") / "dcp")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "dcp"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loaded(folder: Path) -> dict[str, Any]:
    """Everything in it, by `dcp.load`."""
    found = {
        "model": {"a.weight": torch.zeros(4, 3), "count": torch.tensor(0)},
        "optim": {"param_groups": [{"lr": 0.0}]},
    }
    dcp.load(found, storage_reader=SafeReader(folder))
    return found


def refusal(folder: Path) -> str:
    """The message with which both readers end: there is one class of errors, and no output."""
    out = folder.parent / "out"
    with in_time(), pytest.raises(CheckpointError) as caught:
        import_dcp(folder, out, kind="adamw")
    assert not out.exists()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    with in_time(), pytest.raises((CheckpointError, dcp.CheckpointException)) as other:
        loaded(folder)
    if isinstance(other.value, dcp.CheckpointException):
        assert {type(e) for e, _ in other.value.failures.values()} == {CheckpointError}
    return message


def test_the_whole_folder_is_read(folder: Path) -> None:
    found = loaded(folder)
    assert found["model"]["a.weight"].tolist()[3] == [9.0, 10.0, 11.0]
    assert found["optim"]["param_groups"][0]["lr"] == 0.1
    import_dcp(folder, folder.parent / "out", kind="adamw")


# ---------------------------------------------------------------------------- what would be run
def touching(flag: Path) -> Call:
    return Call(os.mkdir, (str(flag),))


def in_metadata(folder: Path, bomb: Call, protocol: int) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(bomb, protocol))


def in_planner_data(folder: Path, bomb: Call, protocol: int) -> None:
    edited(folder, lambda m: m.planner_data.update({NAME: bomb}))


def in_a_path(folder: Path, bomb: Call, protocol: int) -> None:
    edited(folder, lambda m: m.planner_data.update({NAME: ("model", bomb)}))


def in_a_size(folder: Path, bomb: Call, protocol: int) -> None:
    edited(folder, lambda m: setattr(m.state_dict_metadata[NAME], "size", bomb))


def in_an_index(folder: Path, bomb: Call, protocol: int) -> None:
    def change(metadata: Metadata) -> None:
        index = first_index(metadata, NAME)
        object.__setattr__(index, "index", bomb)
        object.__setattr__(index, "offset", bomb)

    edited(folder, change)


def in_an_object(folder: Path, bomb: Call, protocol: int) -> None:
    buffer = io.BytesIO()
    torch.save(bomb, buffer, pickle_protocol=protocol)
    replaced(folder, LR, buffer.getvalue())


def in_a_list(folder: Path, bomb: Call, protocol: int) -> None:
    replaced(folder, LR, archive(pickle.dumps([1, (2, {"a": bomb})], protocol)))


def in_a_tensor(folder: Path, bomb: Call, protocol: int) -> None:
    replaced(folder, NAME, archive(pickle.dumps(bomb, protocol)))


def as_a_plain_pickle(folder: Path, bomb: Call, protocol: int) -> None:
    replaced(folder, LR, pickle.dumps(bomb, protocol))


PLACES = [
    in_metadata, in_planner_data, in_a_path, in_a_size, in_an_index, in_an_object, in_a_list,
    in_a_tensor, as_a_plain_pickle,
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", PLACES)
def test_a_call_in_a_pickle_is_not_made(
    folder: Path, place: Callable[[Path, Call, int], None], protocol: int
) -> None:
    flag = folder.parent / "run"
    place(folder, touching(flag), protocol)
    refusal(folder)
    assert not flag.exists()


@pytest.mark.parametrize("place", [in_metadata, in_an_object])
def test_torchs_own_reader_makes_it(folder: Path, place: Callable[[Path, Call, int], None]) -> None:
    """So SECURITY.md says: if this fails, torch has become safe, and that page is wrong."""
    flag = folder.parent / "run"
    place(folder, touching(flag), 4)
    with suppress(dcp.CheckpointException):
        dcp.load({"optim": {"param_groups": [{"lr": 0.0}]}}, checkpoint_id=folder)
    assert flag.exists()


BY_HAND = {
    "global": b"cos\nmkdir\n(Vrun\ntR.",
    "inst": b"(Vrun\nios\nmkdir\n.",
    "obj": b"(cos\nmkdir\nVrun\no.",
    "newobj": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x03run\x85\x81.",
    "build of a class": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93}\x8c\x01aK\x01sb.",
    "call of a call": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93)R)R.",
    "getattr": b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x02os\x8c\x06system\x86R.",
    "dotted": b"\x80\x04\x8c\x02os\x8c\x0bpath.exists\x93\x8c\x03run\x85R.",
    "dotted in torch": b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",
    "nothing": b"",
    "no stop": b"\x80\x04K\x01",
    "append to a number": b"\x80\x04K\x01K\x02a.",
    "unknown opcode": b"\x80\x04\xff.",
    "no utf-8": b"\x80\x04\x8c\x02\xff\xfe.",
    "a number": b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("where", ["metadata", "tensor"])
@pytest.mark.parametrize("raw", BY_HAND.values(), ids=BY_HAND)
def test_a_pickle_by_hand_is_refused(
    folder: Path, raw: bytes, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)  # where it would make a folder
    if where == "metadata":
        (folder / ".metadata").write_bytes(raw)
    else:
        replaced(folder, NAME, archive(raw))
    refusal(folder)
    assert not (folder.parent / "run").exists()


# ---------------------------------------------------------------------------- what it says
def tensor(metadata: Metadata, name: str = NAME) -> Any:
    return metadata.state_dict_metadata[name]


def moved(**changes: Any) -> Callable[[Metadata], None]:
    """Another place for the weights."""

    def change(metadata: Metadata) -> None:
        index = first_index(metadata, NAME)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = dataclasses.replace(info, **changes)

    return change


def parts(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Metadata], None]:
    """Other parts, all of one place."""

    def change(metadata: Metadata) -> None:
        tensor(metadata).chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]
        info = metadata.storage_data[first_index(metadata, NAME)]
        for offsets, _ in boxes:
            metadata.storage_data[MetadataIndex(NAME, torch.Size(offsets))] = info

    return change


LIES: dict[str, Callable[[Metadata], Any]] = {
    "a file above": moved(relative_path=f"../dcp/{DATA}"),
    "an absolute file": moved(relative_path="/etc/passwd"),
    "a file below": moved(relative_path=f"sub/{DATA}"),
    "the folder": moved(relative_path="."),
    "no file": moved(relative_path="missing.distcp"),
    "an empty name": moved(relative_path=""),
    "a NUL": moved(relative_path="a\0b"),
    "a long name": moved(relative_path="a" * 5000),
    "a number as a name": moved(relative_path=7),
    "the metadata": moved(relative_path=".metadata"),
    "a negative offset": moved(offset=-1),
    "an offset of a text": moved(offset="0"),
    "an offset beyond": moved(offset=1 << 40),
    "a huge length": moved(length=1 << 50),
    "a length of nothing": moved(length=0),
    "a length of True": moved(length=True),
    "transforms": moved(transform_descriptors=["zstd"]),
    "no places": lambda m: m.storage_data.clear(),
    "places of None": lambda m: setattr(m, "storage_data", None),
    "a place of a text": lambda m: m.storage_data.update({first_index(m, NAME): "x"}),
    "no tensors": lambda m: m.state_dict_metadata.clear(),
    "tensors of a list": lambda m: setattr(m, "state_dict_metadata", []),
    "a tensor of None": lambda m: m.state_dict_metadata.update({NAME: None}),
    "a name of a number": lambda m: m.state_dict_metadata.update({7: tensor(m)}),
    "no parts": lambda m: tensor(m).chunks.clear(),
    "parts of None": lambda m: setattr(tensor(m), "chunks", None),
    "a part twice": parts(((0, 0), (4, 3)), ((0, 0), (4, 3))),
    "a part outside": parts(((1, 0), (4, 3))),
    "parts that share bytes": parts(((0, 0), (2, 3)), ((2, 0), (2, 3))),
    "a part of more dimensions": parts(((0, 0, 0), (4, 3, 1))),
    "half of it": parts(((0, 0), (2, 3))),
    "another shape": lambda m: setattr(tensor(m), "size", torch.Size((3, 4))),
    "exabytes": lambda m: setattr(tensor(m), "size", torch.Size((1 << 59, 3))),
    "a size of a list": lambda m: setattr(tensor(m), "size", [4, 3]),
    "a size of None": lambda m: setattr(tensor(m), "size", None),
    "another dtype": lambda m: setattr(tensor(m).properties, "dtype", torch.bfloat16),
    "a dtype of a text": lambda m: setattr(tensor(m).properties, "dtype", "float32"),
    "no properties": lambda m: setattr(tensor(m), "properties", None),
    "a path of nothing": lambda m: m.planner_data.update({NAME: ()}),
    "a path of a text": lambda m: m.planner_data.update({NAME: "model"}),
    "a path of a list of exabytes": lambda m: m.planner_data.update({NAME: ("m", 1 << 59)}),
    "a path of None": lambda m: m.planner_data.update({NAME: ("m", None)}),
    "a long path": lambda m: m.planner_data.update({NAME: ("m",) * 1000}),
    "another class": lambda m: pickle.dumps(tensor(m)),
    "a dict": lambda m: pickle.dumps(vars(m)),
    "a model's name for numbers": lambda m: m.planner_data.update({LR: ("model", "lr")}),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_metadata_that_does_not_fit_the_files_is_refused(
    folder: Path, lie: Callable[[Metadata], Any]
) -> None:
    edited(folder, lie)
    with in_time(), pytest.raises(OffloadError):
        import_dcp(folder, folder.parent / "out", kind="adamw")
    assert not (folder.parent / "out").exists()


FLOATS = {"data/0": bytes(48)}
ARCHIVES: dict[str, bytes] = {
    "nothing": b"",
    "no zip": b"PK" * 50,
    "an end alone": b"PK\x05\x06" + bytes(18),
    "a directory elsewhere": b"PK\x05\x06" + bytes(8) + b"\xff" * 8 + bytes(2),
    "no storage": archive(tensor_pickle()),
    "a short storage": archive(tensor_pickle(), {"data/0": bytes(44)}),
    "a storage elsewhere": archive(tensor_pickle(key="../data.pkl"), FLOATS),
    "a storage of another class": archive(tensor_pickle(kind=dict), FLOATS),
    "another shape": archive(tensor_pickle(shape=(3, 4), strides=(4, 1)), FLOATS),
    "another dtype": archive(tensor_pickle(kind=torch.IntStorage), FLOATS),
    "beyond the storage": archive(tensor_pickle(offset=1), FLOATS),
    "a negative offset": archive(tensor_pickle(offset=-1), FLOATS),
    "negative strides": archive(tensor_pickle(strides=(-3, -1)), FLOATS),
    "strides of exabytes": archive(tensor_pickle(strides=(1 << 50, 1)), FLOATS),
    "of one byte": archive(tensor_pickle(shape=(1 << 40, 1 << 18), strides=(0, 0)), FLOATS),
    "a shape of texts": archive(tensor_pickle(shape=("4", "3")), FLOATS),
    "a shape of a number": archive(tensor_pickle(shape=12), FLOATS),
    "fewer strides": archive(tensor_pickle(strides=(1,)), FLOATS),
    "a sparse tensor": archive(tensor_pickle(call="_rebuild_sparse_tensor"), FLOATS),
    "a quantised tensor": archive(tensor_pickle(call="_rebuild_qtensor"), FLOATS),
}  # fmt: skip


@pytest.mark.parametrize("raw", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_is_not_what_the_metadata_says_is_refused(folder: Path, raw: bytes) -> None:
    replaced(folder, NAME, raw)
    refusal(folder)


def test_an_archive_as_torch_writes_it_is_read_all_the_same(folder: Path) -> None:
    """The same by hand: what the others are refused for is what was changed."""
    replaced(folder, NAME, archive(tensor_pickle(), {"data/0": b"\0\0\x80?" * 12}))
    assert loaded(folder)["model"]["a.weight"].tolist() == [[1.0] * 3] * 4


@pytest.mark.parametrize("name", [".metadata", DATA])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "outside", "empty", "missing"])
def test_files_that_are_no_files_are_refused_and_not_waited_for(
    folder: Path, name: str, kind: str
) -> None:
    path = folder / name
    outside = path.rename(folder.parent / "outside")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("loop", "outside"):
        path.symlink_to({"loop": path, "outside": outside}[kind])
    elif kind == "empty":
        path.touch()
    refusal(folder)


@pytest.mark.parametrize("name", [".metadata", DATA])
def test_a_file_of_a_terabyte_is_not_read(folder: Path, name: str) -> None:
    os.truncate(folder / name, 1 << 40)
    if name == DATA:  # whose parts are where they were
        import_dcp(folder, folder.parent / "out", kind="adamw")
    else:
        assert "more than the 67,108,864 that are read" in refusal(folder)


# ---------------------------------------------------------------------------- at random
def survives(folder: Path) -> None:
    """Read whole, or refused: nothing else."""
    out = folder.parent / "random"
    with in_time():
        try:
            import_dcp(folder, out, kind="adamw")
        except OffloadError:
            assert not out.exists()
        else:
            shutil.rmtree(out)


def at_random(long: bool) -> settings:
    return settings(max_examples=120 if long else 40, deadline=None)


CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 14), st.binary(max_size=9)), min_size=1, max_size=3
)


@pytest.mark.parametrize("name", [".metadata", DATA])
def test_bytes_at_random(folder: Path, original: Path, name: str, long: bool) -> None:
    @at_random(long)
    @given(changes=CHANGES)
    def check(changes: list[tuple[int, bytes]]) -> None:
        raw = bytearray((original / name).read_bytes())
        for place, content in changes:
            at = place % len(raw)
            raw[at : at + len(content)] = content
        (folder / name).write_bytes(raw)
        survives(folder)

    check()


OPS = st.sampled_from([
    b"(", b")", b"]", b"}", b"N", b"\x88", b"K\x01", b"\x8c\x01a", b"\x85", b"\x86", b"t", b"a",
    b"e", b"s", b"u", b"\x94", b"h\x00", b"h\x01", b"\x93", b"R", b"\x81", b"b", b"Q", b"0",
    b"\x8c\x05torch\x8c\x04Size\x93", b"\x8c\x02os\x8c\x06system\x93", b"q\x02", b"\x92",
])  # fmt: skip


def test_programs_at_random(folder: Path, long: bool) -> None:
    @at_random(long)
    @given(ops=st.lists(OPS, max_size=30))
    def check(ops: list[bytes]) -> None:
        raw = b"\x80\x04" + b"".join(ops) + b"."
        (folder / ".metadata").write_bytes(raw)
        survives(folder)
        edited_back = archive(raw)
        (folder / DATA).write_bytes(edited_back)
        survives(folder)

    check()
