"""`offload.open_pretrained` of a GGUF file: transformers' own `from_pretrained(gguf_file=...)` is
the reference, to the bit."""

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from tests.outside.pretrained_cases import assert_all_uses_equal
from tests.outside.zoo import transformers

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.usefixtures("quiet_transformers")
TYPES = gguf.GGMLQuantizationType
LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, TOKENS, EXPERTS = 2, 256, 512, 4, 2, 64, 4
# Where the scales (fp16) of blocks are: random bytes there may be NaN.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def codes(shape: tuple[int, ...], name: str, random: np.random.Generator) -> Any:
    """Weights of a type, as blocks of random bytes if gguf cannot quantize to it."""
    if name not in SCALES:
        return gguf.quants.quantize(random.normal(0, 0.05, shape).astype(np.float32), TYPES[name])
    numel, nbytes = gguf.GGML_QUANT_SIZES[TYPES[name]]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // numel, nbytes), dtype=np.uint8)
    for at in SCALES[name]:
        scale = random.uniform(1e-4, 1e-3, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def shapes_of(arch: str, experts: bool) -> dict[str, tuple[int, ...]]:
    head = WIDTH // HEADS
    tensors: dict[str, tuple[int, ...]] = {
        "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (WIDTH, WIDTH),
        "attn_k": (KV_HEADS * head, WIDTH), "attn_v": (KV_HEADS * head, WIDTH),
        "attn_output": (WIDTH, WIDTH),
    }  # fmt: skip
    mlp = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    if experts:
        tensors |= {f"ffn_{w}_exps": (EXPERTS, *shape) for w, shape in mlp.items()}
        tensors["ffn_gate_inp"] = (EXPERTS, WIDTH)
    else:
        tensors |= {f"ffn_{w}": shape for w, shape in mlp.items()}
    if arch == "qwen2moe":
        tensors |= {f"ffn_{w}_shexp": shape for w, shape in mlp.items()}
        tensors["ffn_gate_inp_shexp"] = (WIDTH,)
    if arch.startswith("gemma"):
        tensors |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        tensors |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    made = {f"blk.{i}.{n}.weight": s for i in range(LAYERS) for n, s in tensors.items()}
    if arch.startswith("qwen2"):
        sizes = {"q": WIDTH, "k": KV_HEADS * head, "v": KV_HEADS * head}
        made |= {f"blk.{i}.attn_{n}.bias": (s,) for i in range(LAYERS) for n, s in sizes.items()}
    made |= {"token_embd.weight": (TOKENS, WIDTH), "output_norm.weight": (WIDTH,)}
    return made if arch.startswith("gemma") else made | {"output.weight": (TOKENS, WIDTH)}


def written(
    path: Path, arch: str = "llama", kind: str = "F32", *, experts: bool = False, parts: int = 1
) -> Path:
    experts |= arch.endswith("moe")
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(TOKENS)
    writer.add_uint16("split.count", parts)
    if experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
        writer.add_expert_shared_feed_forward_length(HIDDEN)
    writer.add_token_list([f"t{i}" for i in range(TOKENS)])
    for name, shape in shapes_of(arch, experts).items():
        plain = len(shape) == 1 or "ffn_gate_inp" in name
        of = "F32" if plain else kind
        raw = random.normal(1, 0.1, shape).astype(np.float32) if plain else codes(shape, of, random)
        writer.add_tensor(name, raw, raw_dtype=TYPES[of])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CASES = [
    *(("llama", kind) for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", *SCALES)),
    ("qwen2", "Q8_0"), ("qwen3", "Q4_K"), ("gemma2", "Q6_K"), ("gemma3", "Q8_0"),
    ("qwen2moe", "Q4_K"), ("qwen3moe", "Q8_0"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_every_use_of_a_file_equals_transformers(
    arch: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = written(tmp_path / "model.gguf", arch, kind)
    sizes: dict[str, int] = {}  # that transformers does not take from a header
    if arch.startswith("qwen3"):
        sizes["head_dim"] = WIDTH // HEADS
    if arch.endswith("moe"):
        sizes["moe_intermediate_size"] = HIDDEN
    if arch == "qwen2moe":
        sizes["shared_expert_intermediate_size"] = HIDDEN
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=dtype, **sizes
    )
    assert_all_uses_equal(plain, path, tmp_path, dtype, **sizes)
    model: Any = offload.open_pretrained(path, dtype=dtype, **sizes)
    ours, others = model.config.to_dict(), plain.config.to_dict()
    assert others.pop("quantization_config")["quant_method"] == "gguf"
    assert ours.pop("_name_or_path") == f"{others.pop('_name_or_path')}/model.gguf"
    assert ours == others
    assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def changed(of: str, at: int, code: str, value: int, raw: bytes) -> bytes:
    """Another number `at` bytes behind the name `of` in a file."""
    start = raw.index(of.encode()) + len(of) + at
    return raw[:start] + struct.pack(code, value) + raw[start + struct.calcsize(code) :]


QUERY, LIST = "blk.0.attn_q.weight", "tokenizer.ggml.tokens"
HEADS_KEY = b"llama.attention.head_count"
DAMAGES: dict[str, tuple[Any, str]] = {
    "cut in the data": (lambda raw: raw[:-1], "is outside"),
    "cut in the header": (lambda raw: raw[:100], "its header needs"),
    "empty": (lambda raw: b"", "empty"),
    "another file": (lambda raw: b"PK" + raw[2:], "does not begin with GGUF"),
    "big-endian": (partial(changed, "GGUF", 0, ">I", 3), "big-endian"),
    "old": (partial(changed, "GGUF", 0, "<I", 1), "version 1"),
    "many tensors": (partial(changed, "GGUF", 4, "<Q", 1 << 60), f"{1 << 60} tensors"),
    "many keys": (partial(changed, "GGUF", 12, "<Q", 1 << 60), f"{1 << 60} keys"),
    "long key": (partial(changed, "GGUF", 20, "<Q", 1 << 60), "its header needs"),
    "long array": (partial(changed, LIST, 8, "<Q", 1 << 60), f"{1 << 60} elements"),
    "arrays in arrays": (partial(changed, LIST, 4, "<I", 9), "value of the type 9"),
    "a type of values": (partial(changed, LIST, 0, "<I", 77), "value of the type 77"),
    "no architecture": (lambda raw: raw.replace(b"general.arch", b"general.xxxx"), "architecture"),
    "a key twice": (lambda raw: raw.replace(b"llama.attention.key_length", HEADS_KEY), "twice"),
    "a name twice": (lambda raw: raw.replace(b"blk.1.attn_q.w", b"blk.0.attn_q.w"), "twice"),
    "no UTF-8": (lambda raw: raw.replace(b"blk.1.attn_q.w", b"\xff" * 14), "can.t decode"),
    "dimensions": (partial(changed, QUERY, 0, "<I", 9), "9 dimensions"),
    "columns": (partial(changed, QUERY, 4, "<Q", 33), "blocks of 32"),
    "no rows": (partial(changed, QUERY, 12, "<Q", 0), "of the shape"),
    "too many rows": (partial(changed, QUERY, 12, "<Q", 1 << 60), "of the shape"),
    "many rows": (partial(changed, QUERY, 12, "<Q", 1 << 30), "is outside"),
    "more rows": (partial(changed, QUERY, 12, "<Q", 512), "in another tensor"),
    "type": (partial(changed, QUERY, 20, "<I", 99), "type 99"),
    "offset outside": (partial(changed, QUERY, 24, "<Q", 1 << 50), "is outside"),
    "offset": (partial(changed, QUERY, 24, "<Q", 8), "not aligned"),
    "layers": (partial(changed, "llama.block_count", 4, "<I", 1 << 31), f"{1 << 31}"),
    "fewer rows": (partial(changed, QUERY, 12, "<Q", 128), "does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_says_what_is_wrong(damage: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", kind="Q8_0")
    change, said = DAMAGES[damage]
    path.write_bytes(change(path.read_bytes()))
    kind = offload.errors.ConfigError if damage == "layers" else offload.errors.CheckpointError
    with pytest.raises(kind, match=f"model.gguf .*{said}|model.gguf: .*{said}"):
        offload.open_pretrained(path)


def test_what_transformers_would_initialise_at_random_is_refused(tmp_path: Path) -> None:
    refused = offload.errors.UnsupportedError
    with pytest.raises(refused, match=r"'mamba9'.* reads .*gemma2.*llama"):
        offload.open_pretrained(written(tmp_path / "unknown.gguf", "mamba9"))
    mixtral = written(tmp_path / "mixtral.gguf", "llama", experts=True)
    with pytest.raises(refused, match=r"no place for .*ffn_gate_exps"):
        offload.open_pretrained(mixtral)
    part = written(tmp_path / "a-00001-of-00003.gguf", parts=3)
    with pytest.raises(refused, match="one of 3 parts"):
        offload.open_pretrained(part)
