"""`memest scale`: shards of every rank, bytes, collectives and steps of clusters not at hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.planning.choice.durations import duration
from offload.tiers.errors import StateError
from offload.tiers.ledger import StateClass
from offload.tiers.units import format_bytes
from offload.tools.memest.cli import main
from offload.tools.memest.estimate.scaling import MOST_RANKS, _sizes, check_shards
from offload.tools.memest.show.scale import TABLES
from offload.tools.memest.systems.shapes import FamilyName, model_of, shapes_of
from offload.zero.layout import Layout, ParamShape
from offload.zero.model_shape import GroupShape, ModelShape
from offload.zero.sharding import Sharding

SMALL = ["--layers", "3", "--hidden", "256", "--heads", "4", "--vocab", "512",
         "--batch", "1", "--sequence", "64"]  # fmt: skip
ON = ["--profile", "DGX A100-40"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["scale", *arguments])
    return int(caught.value.code or 0)


def asked(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert run(*SMALL, *ON, "--format", "json", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---------------------------------------------------------------- shards
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 1000, 4096])
def test_the_shards_of_all_ranks_make_the_model(ranks: int) -> None:
    model = model_of(shapes_of(FamilyName.LLAMA)[20])
    found = check_shards(model, Sharding.of(3, None, ranks, 0))
    assert found.numel == model.numel
    assert found.padded_numel % ranks == 0
    assert 0 <= found.padding < 0.5


def test_a_layout_that_loses_elements_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GroupShape("block", (ParamShape(("w",), (5000, 7)),))
    layout = shape.layout

    class Torn(GroupShape):
        @property
        def layout(self) -> Layout:  # type: ignore[override]
            return replace(layout, numel_trainable=layout.numel_trainable // 2, ranks=self.ranks)

    model = ModelShape((Torn("block", shape.params),), ())
    with pytest.raises(StateError, match="w: rank 0 has another part"):
        check_shards(model, Sharding.of(3, None, 1, 0))


# ---------------------------------------------------------------- the answer
def test_every_size_is_there_and_shares_shrink(capsys: Any) -> None:
    found = asked(capsys, "--nodes", "16")
    assert found["schema"] == "memest-scale/1"
    whole, hybrid = found["series"]
    assert [point["ranks"] for point in whole["points"]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [point["ranks"] for point in hybrid["points"]] == [8, 16, 32, 64, 128]
    assert all(point["shards"] == 8 for point in hybrid["points"])
    for name in (StateClass.PARAMETERS, StateClass.OPTIMIZER):
        held = [point["by_class"][name] for point in whole["points"]]
        assert held == sorted(held, reverse=True)
        assert held[3] < held[0] / 7
    assert whole["points"][0]["collectives"] == []
    assert all(0 < point["computing"] <= 1 for point in whole["points"])


def test_collectives_are_counted_as_they_come(capsys: Any) -> None:
    point = asked(capsys, "--nodes", "1")["series"][0]["points"][-1]
    by_name: dict[str, int] = {}
    for call in point["sequence"]:
        by_name[call["name"]] = by_name.get(call["name"], 0) + call["nbytes"]
    assert by_name == {each["name"]: each["nbytes"] for each in point["collectives"]}
    first, last = point["sequence"][0], point["sequence"][-1]
    assert first["name"] == "all-gather of shards in forward"
    assert last["name"] == "reduce-scatter of shards in backward"


def test_a_stage_that_keeps_parameters_gathers_them_once(capsys: Any) -> None:
    found = asked(capsys, "--nodes", "1", "-o", "zero.stage=2")
    assert found["series"][0]["name"] == "ZeRO stage 2"
    names = {call["name"] for call in found["series"][0]["points"][-1]["sequence"]}
    assert names == {"all-gather of shards in update", "reduce-scatter of shards in backward"}


def test_reductions_are_named_by_what_they_are(capsys: Any) -> None:
    scatter = "reduce-scatter of shards in backward"
    reduce = "all-reduce among replicas in backward"
    found = asked(capsys, "--nodes", "2", "-o", "zero.stage=0")["series"]
    assert [each["name"] for each in found[0]["points"][-1]["collectives"]] == [reduce]
    hybrid = asked(capsys, "--nodes", "2")["series"][1]["points"]
    alone, both = ({each["name"]: each for each in p["collectives"]} for p in hybrid)
    assert scatter in alone
    assert reduce not in alone
    assert both[reduce]["count"] == both[scatter]["count"] == alone[scatter]["count"]
    padded = pytest.approx(alone[scatter]["nbytes"], rel=0.02)  # for replicas, too
    assert both[scatter]["nbytes"] == padded


def test_16_bit_gradients_of_whole_copies_come_back_as_fp32_sums(capsys: Any) -> None:
    for precision, sizes in (("fp32", 2), ("bf16", 3)):
        arguments = ["--nodes", "1", "-o", "zero.stage=0", "--precision", precision]
        last = asked(capsys, *arguments)["series"][0]["points"][-1]
        model_nbytes = last["by_class"]["parameters"]
        moved = sum(each["nbytes"] for each in last["collectives"])
        assert moved == pytest.approx(sizes * model_nbytes, rel=0.02)


@pytest.mark.parametrize(
    ("gpus", "nodes", "ranks"),
    [
        (1, 3, [1, 2, 3]),
        (3, 2, [1, 2, 3, 6]),
        (5, 1, [1, 2, 4, 5]),
        (6, 5, [1, 2, 4, 6, 12, 24, 30]),
        (7, 4, [1, 2, 4, 7, 14, 28]),
        (8, 3, [1, 2, 4, 8, 16, 24]),
    ],
)
def test_whole_machines_and_the_most_of_them_are_sizes(
    gpus: int, nodes: int, ranks: list[int]
) -> None:
    assert _sizes(gpus, gpus * nodes) == ranks
    assert _sizes(gpus, MOST_RANKS)[-1] == MOST_RANKS // gpus * gpus


def test_more_gpus_to_a_machine_than_sizes_end_with_the_most_of_them() -> None:
    assert _sizes(5000, MOST_RANKS)[-2:] == [2048, 4096]


def test_a_machine_of_six_has_shard_groups_of_six(capsys: Any) -> None:
    whole, hybrid = asked(capsys, "--gpus", "6", "--nodes", "2")["series"]
    assert [point["ranks"] for point in whole["points"]] == [1, 2, 4, 6, 12]
    assert [(p["shards"], p["replicas"]) for p in hybrid["points"]] == [(6, 1), (6, 2)]


def test_the_page_says_that_it_is_simulated(tmp_path: Path) -> None:
    page = tmp_path / "scale.html"
    assert run(*SMALL, *ON, "--nodes", "4", "--out", str(page)) == 0
    text = page.read_text()
    assert "nothing was measured on such a cluster" in text
    for word in (
        "data sheet",
        "Assumed:",
        "src/graph/tuning.cc",
        "all-gather of shards in forward",
        "32 x 1",
    ):
        assert word in text
    assert "<script" not in text
    assert not re.search(r"https?://", text)


def test_the_page_has_the_numbers_of_the_json(tmp_path: Path, capsys: Any) -> None:
    found = asked(capsys, "--nodes", "2")
    page = tmp_path / "scale.html"
    assert run(*SMALL, *ON, "--nodes", "2", "--out", str(page)) == 0
    text = re.sub(r"<[^>]*>", " ", page.read_text())
    for series in found["series"]:
        assert series["name"] in text
        for point in series["points"]:
            assert duration(point["step_s"]) in text
            assert f"{point['tokens_per_s']:,.0f}" in text
            for nbytes in point["by_class"].values():
                assert format_bytes(nbytes) in text
            for place in point["memory"].values():
                assert place["peak_nbytes"] == sum(place["by_class"].values())
                assert format_bytes(place["peak_nbytes"]) in text


def test_tables_are_printed_and_nothing_in_them_is_cut(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*SMALL, *ON) == 0
    text = capsys.readouterr().out
    assert "simulated" in text
    assert "ZeRO stage 3, shard groups of 8: one step" in text
    assert "--format json" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert len(re.findall(r"^4,096 ", text, re.MULTILINE)) == 4


def test_the_widest_cells_fit_a_terminal_of_80_columns() -> None:
    widest = {
        "ranks": "4,096", "shards": "4,096 x 1", "collectives": "102,300", "fits": "yes",
        "step": "119 min 59 s", "network": "119 min 59 s", "tokens/s": "999,999,999",
        "computing": "100%",
    }  # fmt: skip
    for _, columns in TABLES:
        cells = [widest.get(name, "1023.9 MiB") for name in columns]
        widths = [max(len(name), len(cell)) for name, cell in zip(columns, cells, strict=True)]
        assert sum(widths) + 3 * (len(widths) - 1) <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SMALL, "--gpu", "RTX 4090"], "nothing is known of the network between machines"),
        ([*SMALL, "--gpu", "none"], "nothing is known of the network"),
        ([*SMALL, *ON, "--nodes", "513"], "--nodes 513: 1 to 512 machines of 8 GPUs"),
        ([*SMALL, *ON, "--nodes", "0"], "--nodes 0"),
        (
            [*SMALL, *ON, "--nodes", "1", "-o", "zero.shard_group=3"],
            "3 divides none of the numbers of ranks that are gone through (1, 2, 4, 8)",
        ),
        ([*SMALL, *ON, "-o", "device=cpu"], "scale: device: cpu has no GPUs"),
        ([*SMALL, *ON, "--write", "a.yaml"], "scale: writes no configuration"),
        ([*SMALL, "--profile", "DGX X"], "--profile DGX X"),
        (["--params", "1e9", "-o", "zero.stage=7", *ON], "zero.stage"),
    ],
)
def test_bad_input_is_one_line_and_2(arguments: list[str], said: str, capsys: Any) -> None:
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_a_machine_that_is_not_named_is_refused_unmeasured(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("this machine's speeds were not asked for")

    monkeypatch.setattr("offload.tools.memest.commands.run_estimate.known_speeds", lambda _: None)
    monkeypatch.setattr("offload.tools.memest.commands.run_estimate.machine_speeds", measure)
    assert run(*SMALL) == 2
    assert "--profile 'DGX H100'" in capsys.readouterr().err
