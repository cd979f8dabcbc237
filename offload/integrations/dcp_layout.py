"""The names of a model, its optimizer's states and their numbers in a folder of
torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload.checkpoint.foreign.dcp_folder import DcpFolder
from offload.checkpoint.format.composing import group_of
from offload.checkpoint.format.manifest import Manifest, ParameterRecord
from offload.tiers.errors import CheckpointError
from offload.zero.step.records import RecordFormat

_MODEL, _OPTIMIZERS = "model", ("optim", "optimizer")
OTHERWISE = (
    'with the model at hand: dcp.load({"app": EngineState(engine)}, '
    "storage_reader=SafeReader(FOLDER)), then engine.save_checkpoint"
)


@dataclass(frozen=True)
class Layout:
    """Names in the folder: of the model's tensors by name, of a parameter's states by parameter and
    state, of the numbers of param groups by group and key."""

    model: Mapping[str, str]
    states: Mapping[str, Mapping[str, str]]
    groups: Mapping[str, Mapping[str, str]]  # of a list, or one per parameter

    @staticmethod
    def of(folder: DcpFolder) -> Layout:
        """Find the layout of a folder. Raise CheckpointError if it has several models, or none."""
        homes = {
            path[: path.index(_MODEL)] for path in folder.paths.values() if _MODEL in path[:-1]
        }
        homes -= {home for home in homes if any(home[:n] in homes for n in range(len(home)))}
        if len(homes) > 1:
            raise CheckpointError(
                f"{folder.path} has {len(homes)} models, and one is read; {OTHERWISE}"
            )
        model: dict[str, str] = {}
        states: dict[str, dict[str, str]] = {}
        groups: dict[str, dict[str, str]] = {}
        home = next(iter(homes), None)
        for name, path in folder.paths.items():
            if home is None:  # a model's state dict, alone
                if name in folder.tensors:
                    model[".".join(map(str, path))] = name
            elif path[: len(home)] == home and len(path) > len(home) + 1:
                key, rest = path[len(home)], ".".join(map(str, path[len(home) + 1 :]))
                if key == _MODEL and name in folder.tensors:
                    model[rest] = name
                elif key in _OPTIMIZERS:
                    _sort(rest, name, states, groups)
        if not model:
            raise CheckpointError(f"{folder.path} has no tensors of a model; {OTHERWISE}")
        return Layout(model, states, groups)


def _sort(
    rest: str, name: str, states: dict[str, dict[str, str]], groups: dict[str, dict[str, str]]
) -> None:
    """Sort `state.NAME.exp_avg` and `param_groups.0.lr`, flattened by torch or not."""
    kind, _, inner = rest.partition(".")
    owner, _, field = inner.rpartition(".")
    into = {"state": states, "param_groups": groups}.get(kind)
    if into is not None and owner:
        into.setdefault(owner, {})[field] = name


@dataclass(frozen=True)
class Plan:
    manifest: Manifest  # without files
    kept: RecordFormat
    run: Mapping[str, str]  # names of its tensors in the folder


def grouped(manifest: Manifest, records: list[ParameterRecord]) -> Manifest:
    groups = [group_of(record) for record in records]
    return manifest.model_copy(update={"parameters": records, "groups": groups})
