"""What fewer bits, zeros and blocks cost: perplexity of a small model on text that it has not seen.

    python -m benchmarks.compression [--steps N] [--out FILE]

A Llama shape of 0.9 M parameters over bytes learns Shakespeare; `offload.compress` writes it in
each way, and `offload.perplexity` reads 8 KiB of the end of the text, which was held back. Small
models lose more than large ones: this compares ways, it does not say what a large model loses.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import offload
from offload.train.text import Corpus, load_corpus

SEQUENCE, BATCH, SCORED = 128, 8, 8 << 10
WAYS: dict[str, dict[str, Any]] = {
    "bf16, as it was trained": {},
    "int8": {"storage": "int8"},
    "int4": {"storage": "int4"},
    "nf4": {"storage": "nf4"},
    "30 % pruned": {"prune": "30%"},
    "50 % pruned": {"prune": "50%"},
    "2:4 pruned": {"prune": "2:4"},
    "2:4 pruned, int4": {"prune": "2:4", "storage": "int4"},
    "3 of 4 blocks": {"layers": [0, 1, 3]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    corpus = load_corpus("shakespeare", 0.05, SEQUENCE)
    lines = [
        f"{given.steps} steps of {BATCH} x {SEQUENCE} bytes, groups of 64, the head as it is; "
        f"{SCORED} bytes held back, windows of {SEQUENCE}, stride {SEQUENCE // 2}.\n",
        "| weights | MB | perplexity per byte |", "| --- | ---: | ---: |",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "trained"
        _train(corpus, given.steps).bfloat16().save_pretrained(trained)
        for number, (name, keys) in enumerate(WAYS.items()):
            made = Path(folder) / str(number)
            source = trained if not keys else made
            if keys:
                offload.compress(trained, made, **keys)
            size = (source / "model.safetensors").stat().st_size / 1e6
            lines.append(f"| {name} | {size:.1f} | {_perplexity(source, corpus):.3f} |")
            print(lines[-1], flush=True)
    if given.out is not None:
        given.out.write_text("# Compression\n\n" + "\n".join(lines) + "\n")


def _train(corpus: Corpus, steps: int) -> Any:
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    text = torch.from_numpy(corpus.training.astype("int64"))
    for step in range(steps):
        starts = torch.randint(len(text) - SEQUENCE, (BATCH,)).tolist()
        batch = torch.stack([text[start : start + SEQUENCE] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return model


def _perplexity(folder: Path, corpus: Corpus) -> float:
    model = offload.dispatch(offload.open_pretrained(folder))
    with offload.dispatched(model):
        tokens = torch.from_numpy(corpus.validation[:SCORED].astype("int64"))
        return offload.perplexity(
            model, tokens, window=SEQUENCE, stride=SEQUENCE // 2, batch=16
        ).value


if __name__ == "__main__":
    main()
