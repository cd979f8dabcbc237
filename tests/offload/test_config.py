"""What the configuration accepts, and the text of every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.config import OffloadConfig
from offload.config.fields import Percent
from offload.config.optimizer import KINDS
from offload.errors import ConfigError, PathError
from offload.tiers.placement import Placement
from offload.tiers.tier import Tier
from offload.tiers.units import parse_percent


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes) -> Path:
        path = Path("run.yaml")
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_file


def message(source: Any, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.load(source, overrides or [])
    text = str(caught.value)
    for jargon in ("pydantic", "http", "Input should", "validation error", "Traceback"):
        assert jargon not in text
    assert len(text.splitlines()) <= 10
    return text


def test_the_whole_documented_shape_is_read(write: Any) -> None:
    config = OffloadConfig.load(
        write(
            """
device: cpu
precision: bf16
budget: {device: 8GiB, host: 80%, nvme: 100GB}
nvme: {paths: [/mnt/a, /mnt/b], backend: threads, threads: 4}
placement:
  parameters: nvme
  gradients: host
  optimizer: {host: 40%, nvme: 60%}
  activations: {tier: device, checkpoint: true}
optimizer: {type: adamw, lr: 3e-4, betas: [0.9, 0.95], weight_decay: 0.1, master: split}
clip_grad_norm: 1
prefetch: 0
groups: {blocks: [Block]}
zero: {stage: 3}
"""
        )
    )
    assert config.budget.device == 8 << 30
    assert config.budget.host == Percent(0.8)
    assert config.budget.nvme == 100 * 1000**3
    assert config.nvme.paths == ("/mnt/a", "/mnt/b")
    assert config.placement.parameters == Placement.on(Tier.NVME)
    assert config.placement.optimizer is not None
    assert config.placement.optimizer.shares == ((Tier.HOST, 0.4), (Tier.NVME, 0.6))
    assert config.optimizer.lr == 3e-4
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.clip_grad_norm == 1.0
    assert config.prefetch == 0


def test_every_key_is_optional(write: Any) -> None:
    assert OffloadConfig.load(write("")) == OffloadConfig.load({}) == OffloadConfig()
    assert OffloadConfig.load(write("# nothing\n")) == OffloadConfig()


@pytest.mark.parametrize(
    ("precision", "master", "skips"),
    [("fp32", "none", False), ("bf16", "split", False), ("fp16", "fp32", True)],
)
def test_auto_is_resolved_by_precision(precision: str, master: str, skips: bool) -> None:
    config = OffloadConfig.load({"precision": precision})
    assert (config.master, config.skips_nonfinite) == (master, skips)
    assert (config.scaling is not None) == (precision == "fp16")
    assert config.resolved().optimizer.master == master
    assert config.resolved().optimizer.chunk == 1 << 20


@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adagrad", "SGD"])
def test_numbers_that_are_left_out_are_torchs(name: str) -> None:
    import torch

    made = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1))])
    numbers = OffloadConfig.load({"optimizer": {"type": name.lower()}}).optimizer.numbers
    assert numbers == {key: made.defaults[key] for key in numbers}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_null_number_is_the_optimizers_default(write: Any, kind: str) -> None:
    nulls = "".join(f", {key}: null" for key in KINDS[kind].defaults)
    config = OffloadConfig.load(write(f"optimizer: {{type: {kind}{nulls}}}"))
    assert config == OffloadConfig.load({"optimizer": {"type": kind}})
    assert config.optimizer.numbers == KINDS[kind].defaults
    assert OffloadConfig.load(write(config.to_yaml())) == config


@pytest.mark.parametrize(
    ("host", "nvme"),
    [
        ("33.333333333333%", "66.666666666667%"),
        ("33.33333333333333%", "66.66666666666667%"),
        ("0.1%", "99.9%"),
        ("0.00000000001%", "100%"),
        ("99.9999999999%", "0%"),
    ],
)
def test_shares_read_back_equal_to_the_last_digit(write: Any, host: str, nvme: str) -> None:
    config = OffloadConfig.load(
        {"placement": {"optimizer": {"host": host, "nvme": nvme}}, "budget": {"host": host}}
    )
    assert OffloadConfig.load(config.to_dict()) == config
    assert OffloadConfig.load(write(config.to_yaml())) == config


@given(st.floats(0, 1))
def test_every_fraction_reads_back_equal(fraction: float) -> None:
    assert parse_percent(str(Percent(fraction))) == fraction


BAD_VALUES = [
    # file, then fragments the message must hold
    ("optimzer: {lr: 1}", ["run.yaml:1: optimzer: unknown key", "did you mean `optimizer`?"]),
    ("seed: 1\noptimizer:\n  lrr: 3", ["run.yaml:3: optimizer.lrr: unknown key", "`lr`", "betas"]),
    ("loss_scale: {intial: 4}\nprecision: fp16", ["run.yaml:1: loss_scale.intial", "`initial`"]),
    ("seed: 1\nmicro_batches: 1", ["run.yaml:2: micro_batches: unknown key; it was removed"]),
    ("precision: fp8", ["run.yaml:1: precision: 'fp8' is not allowed; allowed: fp32, bf16, fp16"]),
    ("device: gpu", ["device: 'gpu' is not allowed", "auto, cpu, cuda"]),
    ("nvme: {backend: io_uring}", ["nvme.backend: 'io_uring' is not allowed", "threads, libaio"]),
    ("budget: {host: 8Gib2}", ["run.yaml:1: budget.host", "not a size", "8GiB"]),
    ("budget: {host: 8GoB}", ["budget.host: 'GoB' is not a unit of bytes", "GiB"]),
    ("budget: {host: 110%}", ["budget.host: '110%' is over 100%"]),
    ("budget: {host: -5}", ["budget.host", "negative"]),
    ("budget: {host: true}", ["budget.host: True is not a size"]),
    ("budget: 8GiB", ["budget: must be keys and values, found '8GiB'; its keys: device, host"]),
    ("budget:\nseed: 1", ["budget: must be keys and values, found nothing"]),
    ("seed: abc", ["run.yaml:1: seed: must be a valid integer, found 'abc'"]),
    ("seed: true", ["seed: must be a valid integer, found true"]),
    ("seed: -1", ["seed: must be greater than or equal to 0, found -1"]),
    ("seed: 0x1F\nzero: {stage: 4}", ["run.yaml:2: zero.stage: must be less than or equal to 3"]),
    ("optimizer: {lr: .nan}", ["optimizer.lr: must be a finite number"]),
    ("optimizer: {lr: '1e-3'}", ["optimizer.lr: must be a valid number, found '1e-3'"]),
    ("optimizer: {betas: 0.9}", ["optimizer.betas: must be a valid list, found 0.9"]),
    ("optimizer: {betas: [0.9]}", ["optimizer.betas.1: a value is missing"]),
    ("optimizer: {betas: [0.9, 1, 2]}", ["optimizer.betas: ", "at most 2 items", "found"]),
    ("optimizer:\n  betas: [0.9, 1.0]", ["run.yaml:2: optimizer.betas.1: must be less than 1"]),
    (
        "optimizer: {lr: 1e39}",
        ["run.yaml:1: optimizer.lr: must be less than or equal to 1000000000"],
    ),
    ("optimizer: {chunk: 1000}", ["chunk: expected whole number in steps of 1,024 from 1,024"]),
    ("train: {model: {tied: on}}", ["train.model.tied: must be a valid boolean, found 'on'"]),
    ("skip_nonfinite: yes", ["skip_nonfinite: expected true, false or auto; found 'yes'"]),
    (
        "nvme: {threads: 4097}",
        ["threads: expected whole number from 1 to 4,096 or auto; found 4097"],
    ),
    ("nvme: {paths: ['']}", ["nvme.paths.0: ", "at least 1 character"]),
    ("prefetch: deep", ["prefetch: expected whole number from 0 to 4,096 or auto; found 'deep'"]),
    ("placement: disk", ["run.yaml:1: placement: 'disk' is not known; write auto"]),
    ("placement: {parameters: {ssd: 100%}}", ["'ssd' is not a tier"]),
    ("placement: {optimizer: {host: 40%, nvme: 50%}}", ["sum to 90%", "must sum to 100%"]),
    ("placement: {optimizer: {host: 40, nvme: 60}}", ["share of host is 40", "like 40%"]),
    ("placement: {optimizer: 3}", ["expected a tier", "found 3"]),
    (
        "placement: {activations: {tier: disk}}",
        ["'disk' is not allowed; allowed: device, host, nvme"],
    ),
    (
        "precision: fp16\noptimizer:\n  master: split",
        ["run.yaml:3: optimizer.master: split contradicts precision: fp16", "bf16"],
    ),
    ("optimizer: {type: lamb}", ["'lamb' is not allowed", "allowed: adamw"]),
    ("optimizer: {type: sgd, betas: [0.9, 0.9]}", ["betas: sgd has none", "adamw or adam or lion"]),
    ("optimizer: {states: fp8}", ["'fp8' is not allowed", "allowed: fp32, bf16, int8"]),
    ("optimizer:\n  amsgrad: true\n  states: int8", ["run.yaml:2", "contradicts states: int8"]),
    ("optimizer: {type: sgd, nesterov: true}", ["nesterov: true needs momentum above 0"]),
    (
        "precision: bf16\nloss_scale: {initial: 8}",
        ["run.yaml:2: loss_scale: contradicts precision: bf16", "remove loss_scale"],
    ),
    (
        "precision: fp16\nloss_scale:\n  min: 131072",
        ["run.yaml:3: loss_scale.initial: 65536 is below min: 131072"],
    ),
    (
        "precision: fp16\nskip_nonfinite: false",
        ["run.yaml:2: skip_nonfinite: false contradicts precision: fp16"],
    ),
    ("train: {sequence: 4096}", ["train.sequence: 4096 is longer than model.max_sequence: 1024"]),
    ("train: {model: {heads: 7}}", ["train.model.hidden: 384 is not a multiple of heads: 7"]),
    ("train: {model: {hidden: 12, heads: 4}}", ["is odd"]),
    ("train: {model: {heads: 4, kv_heads: 3}}", ["heads: 4 is not a multiple of kv_heads: 3"]),
    ("train: {model: {experts: 1}}", ["experts: must be greater than or equal to 2"]),
    ("train: {model: {experts: 12, experts_per_token: 13}}", ["13 of experts: 12"]),
    ("train: {model: {expert_mlp: 64}}", ["64 is for a mixture of experts; set experts"]),
    ("train: {model: {experts_per_token: 1}}", ["remove experts_per_token"]),
    ("train: {model: {experts: 4, aux_loss: .nan}}", ["aux_loss"]),
    ("train: {model: {experts: 4, aux_loss: -1}}", ["must be greater than or equal to 0"]),
    ("storage: {weights: int3}", ["storage.weights: 'int3'", "allowed: int8, int4, nf4"]),
    ("storage: {}", ["a value is missing"]),
    ("storage: {weights: int4, group_size: 48}", ["group_size"]),
    ("storage: {weights: int4, skip: lm_head}", ["storage.skip: must be a valid list"]),
]

BAD_YAML = [
    ("a:\n\tb: 1", ["run.yaml:2: not valid YAML"]),
    ("seed: 1\na: b: c", ["run.yaml:2: not valid YAML"]),
    ("seed: 1\nseed: 2", ["run.yaml:2: seed: given twice, first on line 1"]),
    ("optimizer: {lr: 1, lr: 2}", ["optimizer.lr: given twice"]),
    ("a: &x [1]\nb: *x", ["run.yaml:2: the alias *x is not supported"]),
    ("a: &x {b: 1}\nc:\n  <<: *x", ["run.yaml:3: the alias *x"]),
    ("seed: !!python/object/apply:os.system [id]", ["run.yaml:1: "]),
    ("seed: !!python/name:os.system x", ["run.yaml:1", "is not supported"]),
    ("seed: 1\n---\nseed: 2", ["run.yaml:2: not valid YAML", "found another document"]),
    ("- 1\n- 2", ["run.yaml:1: expected keys and values, found [1, 2]"]),
    ("precision", ["expected keys and values, found 'precision'"]),
    ("budget: {host", ["run.yaml:1: not valid YAML"]),
    ("nvme:\n  paths: [/a, /tmp/nv{rank}]", ["run.yaml:2: not valid YAML"]),
    ("[" * 5000, ["nested deeper than 32 levels"]),
    ("? [1]\n: 3", ["run.yaml:1: a list or mapping cannot be a key"]),
    ("seed: \x00", ["run.yaml:1: character 0 is not allowed"]),
    (b"seed: \xff\xfe", ["run.yaml: not UTF-8 text (byte 6)"]),
    ("#" * ((1 << 20) + 1), ["too large for a configuration"]),
    ("seed: " + "9" * 5000, ["run.yaml:1"]),
    ("seed: !!int abc", ["run.yaml:1: 'abc' with tag"]),
]


# What newcomers write, and the remedy that the answer holds.
NEWCOMERS = [
    ("budget: {cpu: 8GiB}", ["did you mean `host`?"]),
    ("placement: {kv: {cpu: 50%, nvme: 50%}}", ["did you mean `host`?"]),
    ("placement: cpu", ["for example placement: {parameters: host, optimizer: host}"]),
    ("device: cuda:0", ["did you mean `cuda`?"]),
    ("precision: BF16", ["did you mean `bf16`?"]),
    ("lr: 1e-5", ["did you mean `optimizer.lr`?"]),
    ("grad_norm: 1.0", ["did you mean `clip_grad_norm`?"]),
    ("checkpoint: true", ["did you mean `placement.activations.checkpoint`?"]),
    ("budget: {host: 8}", ["8 is 8 bytes; write the unit, for example 8GiB, or a share"]),
    ("nvme: {paths: [$HOME/x]}",
     ["$HOME is not replaced in a configuration; write the path itself"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fragments"), [*BAD_VALUES, *BAD_YAML, *NEWCOMERS])
def test_a_mistake_is_named_with_file_line_and_key(
    write: Any, text: str | bytes, fragments: list[str]
) -> None:
    said = message(write(text))
    assert said.startswith("run.yaml:")
    for fragment in fragments:
        assert fragment in said, said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"train": {"model": {"hidden": 10**12, "heads": 1}}}, "hidden: must be less than"),
        ({"train": {"model": {"layers": 20_000}}}, "layers: must be less than or equal to 4096"),
        ({"train": {"model": {"vocab": 10**21}}}, "vocab"),
        ({"train": {"batch": 10**18}}, "batch: must be less than or equal to 1048576"),
        ({"budget": {"device": 10**19}}, "10000000000000000000 is more than any machine has"),
        ({"budget": {"device": 1e19}}, "1e+19 is not a size"),
        ({"budget": {"host": "9" * 400}}, "more than any machine has"),
        ({"budget": {"host": "9" * 400 + ".5GiB"}}, "more than any machine has"),
        ({"budget": {"host": "9" * 5000 + "GiB"}}, "more than any machine has"),
        ({"budget": {"host": int("9" * 400)}}, "more than any machine has"),
        ({"budget": {"host": "9" * 400 + "%"}}, "over 100%"),
        ({"nvme": {"paths": ["a\0b"]}}, "has a NUL character"),
        ({"nvme": {"paths": ["~nobody-at-all/swap"]}}, "there is no user 'nobody-at-all' here"),
        ({"train": {"text": "a\0b"}}, "has a NUL character"),
        ({"prefetch": 10**20}, "from 0 to 4,096"),
        ({"optimizer": {"chunk": 1024 * 10**20}}, "to 2^34 or auto"),
        ({"gradient_accumulation_steps": 10**9}, "equal to 65536"),
        *(
            ({"placement": {"activations": {"checkpoint": value}}}, "checkpoint: ")
            for value in ("often", "Selective", "1")
        ),
    ],
)
def test_impossible_values_are_refused_in_one_short_line(keys: dict[str, Any], said: str) -> None:
    text = message(keys)
    assert said in text
    assert "\n" not in text
    assert len(text) < 300


def test_a_file_whose_name_no_file_can_have_is_a_path_error(write: Any) -> None:
    for path in ("a\0b", "n" * 5000):
        with pytest.raises(PathError) as caught:
            OffloadConfig.load(path)
        assert len(str(caught.value)) < 400
    with pytest.raises(ConfigError, match="has 400 digits"):
        OffloadConfig.load(write("budget: {host: " + "9" * 400 + "}"))


def test_several_mistakes_are_listed_in_the_order_of_their_lines(write: Any) -> None:
    said = message(write("seed: x\nprecision: y\nzero: {stage: 9}")).splitlines()
    assert [line.split(": ")[0] for line in said] == ["run.yaml:1", "run.yaml:2", "run.yaml:3"]


def test_an_alias_bomb_is_refused_at_once(write: Any) -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert "alias" in message(write(bomb))


@pytest.mark.parametrize(
    ("text", "seed"), [("010", 10), ("0o10", 8), ("0x10", 16), ("+7", 7), ("!!int 5", 5)]
)
@pytest.mark.parametrize("lr", ["1e-5", "1E-5", "1.0e-5", ".00001", "+1e-5"])
def test_numbers_follow_yaml_1_2(write: Any, text: str, seed: int, lr: str) -> None:
    config = OffloadConfig.load(write(f"seed: {text}\noptimizer: {{lr: {lr}}}"))
    assert (config.seed, config.optimizer.lr) == (seed, 1e-5)


def test_unreadable_files_are_path_errors(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "nothing.yaml", "no such file"), (tmp_path, "a folder")):
        with pytest.raises(PathError, match=reason):
            OffloadConfig.load(path)
    with pytest.raises(PathError, match="not a regular file"):
        OffloadConfig.load("/dev/zero")


def test_overrides_win_and_later_ones_win_over_earlier(write: Any) -> None:
    path = write("optimizer: {lr: 1}\nplacement: auto")
    overrides = [
        "optimizer.lr=1e-5", "optimizer.betas=[0.1, 0.2]", "placement.parameters=nvme",
        "seed=1", "seed=2", "train.text=a=b", "budget.host=1GiB",
    ]  # fmt: skip
    config = OffloadConfig.load(path, overrides)
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-5, (0.1, 0.2))
    assert (config.seed, config.train.text, config.budget.host) == (2, "a=b", 1 << 30)
    assert config.placement.parameters == Placement.on(Tier.NVME)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("optimizer.lr=abc", ["-o optimizer.lr=abc: optimizer.lr: must be a valid number"]),
        ("optimizer.lrr=1", ["-o optimizer.lrr=1: optimizer.lrr: unknown key", "`lr`"]),
        ("seed", ["-o seed: expected key=value"]),
        ("=3", ["-o =3: expected key=value"]),
        ("a..b=3", ["expected key=value"]),
        ("seed={a", ["-o seed={a", "not valid YAML"]),
        ("seed.x=1", ["-o seed.x=1: seed: must be a valid integer"]),
        ("precision=fp16", ["-o precision=fp16: optimizer.master: none contradicts"]),
        ("optimizer={master: split}", ["-o optimizer={master: split}: optimizer.master"]),
    ],
)
def test_a_wrong_override_is_named_itself(write: Any, override: str, fragments: list[str]) -> None:
    said = message(write("optimizer:\n  master: none"), [override])
    for fragment in fragments:
        assert fragment in said, said


def test_a_mapping_from_a_program_may_hold_paths_and_tuples(tmp_path: Path) -> None:
    config = OffloadConfig.load(
        {"nvme": {"paths": (tmp_path,)}, "optimizer": {"betas": (0.1, 0.2)}}
    )
    assert config.nvme.paths == (str(tmp_path),)
    assert message({"sed": 1}).startswith("config: sed: unknown key; did you mean `seed`?")
    assert "expected a path, a mapping" in message(3)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_with_a_config_error(text: str) -> None:
    from offload.config.file import parse_document

    try:
        parse_document(text, "x")
    except ConfigError as error:
        assert str(error).startswith("x:")  # noqa: PT017


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(OffloadConfig.model_fields)), JSON_VALUES, max_size=3)
)
def test_any_values_are_accepted_or_refused_with_a_config_error(values: dict[str, Any]) -> None:
    try:
        OffloadConfig.load(values)
    except ConfigError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("precision", "chunk", "numel"),
    [("fp32", 1024, 1024), ("bf16", 1024, 2048), ("fp16", 5120, 6144)],
)
def test_chunks_are_whole_pages_in_every_precision(precision: str, chunk: int, numel: int) -> None:
    config = OffloadConfig.load({"precision": precision, "optimizer": {"chunk": chunk}})
    assert config.chunk_numel == config.resolved().chunk_numel == numel


def test_fp32_sums_of_16_bit_gradients_are_refused_on_nvme() -> None:
    keys = {"gradient_accumulation_steps": 4, "placement": {"gradients": "nvme"}}
    assert OffloadConfig.load(keys).gradient_accumulation_steps == 4
    with pytest.raises(ConfigError, match=r"contradicts gradient_accumulation_steps: 4 in bf16"):
        OffloadConfig.load({**keys, "precision": "bf16"})


def test_what_depends_on_the_batch_can_be_left_open() -> None:
    config = OffloadConfig.load({"placement": {"activations": {"checkpoint": "auto"}}})
    assert OffloadConfig.load(config.to_dict()) == config
    settled = config.settled()
    assert settled.placement.activations.checkpoint is False
    assert settled.settled() is settled
