"""sentence-transformers' trainers through an engine: losses, also with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.libraries.rows import PLACEMENTS, Result, adamw, row
from tests.libraries.test_trl import sentences, tokenizer
from tests.offload.engine_cases import assert_same_bits, config, seeded
from tests.outside.trainer_cases import transformers, values_of

st = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
modules = st.sentence_transformer.modules
losses = st.sentence_transformer.losses
pytestmark = pytest.mark.usefixtures("quiet_trainers")

STEPS, COUNT, LABELS = 4, 40, 3
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 8, "learning_rate": 3e-3, "report_to": [],
    "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "seed": 7, "max_grad_norm": 0.5,
    "save_steps": 2,
}  # fmt: skip
BERT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "num_labels": 1,
}  # fmt: skip


def saved(folder: Path, kind: str) -> str:
    """The folder of a tiny model, with its tokenizer."""
    settings = transformers.BertConfig(**BERT)
    seeded(lambda: getattr(transformers, kind)(settings)).save_pretrained(folder / kind)
    tokenizer().save_pretrained(folder / kind)
    return str(folder / kind)


def encoder(folder: Path) -> Any:
    transformer = modules.Transformer(saved(folder, "BertModel"), max_seq_length=16)
    return st.SentenceTransformer(modules=[transformer, modules.Pooling(32, "mean")], device="cpu")


def rows_of(*columns: str, labels: list[Any] | None = None) -> Any:
    generator = torch.Generator().manual_seed(1)
    made = datasets.Dataset.from_dict({c: sentences(COUNT, 4, 9, generator) for c in columns})
    return made if labels is None else made.add_column("label", labels)


Made = Callable[[Path], tuple[Any, Any, Any]]  # folder -> (model, loss, data)


def trained(made: Made, place: str, folder: Path, resume: str | None = None) -> Result:
    """The losses, and the values of the model and of losses beside it."""
    from offload.integrations.transformers import OffloadMixin

    model, loss, data = made(folder)
    name, keys = type(model).__name__, {}
    kind = getattr(st, f"{name}Trainer")
    if place != "plain":
        kind = type("Mixed", (OffloadMixin, kind), {})
        keys["offload"] = config(folder, PLACEMENTS[place])
    args = getattr(st, f"{name}TrainingArguments")(str(folder), **ARGUMENTS)
    trainer = kind(model=model, args=args, train_dataset=data, loss=loss, **keys)
    trainer.train(resume_from_checkpoint=resume)
    found = logged(trainer), everything(trainer)
    if place != "plain":
        trainer.engine.close()
    return found


def logged(trainer: Any) -> list[float]:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses


def everything(trainer: Any) -> dict[str, Tensor]:
    """The values of the model, and of losses beside it."""
    given = trainer.loss if isinstance(trainer.loss, dict) else {"": trainer.loss}
    parts = {"model": trainer.model, **given}
    return {f"{at}.{k}": v for at, part in parts.items() for k, v in values_of(part).items()}


def ranking(model: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model)


LOSSES: dict[str, Callable[[Any], Any]] = {
    "ranking": ranking,
    "matryoshka": lambda model: losses.MatryoshkaLoss(model, ranking(model), [32, 16, 8]),
    "cached": lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
}


def simple(name: str, folder: Path) -> tuple[Any, Any, Any]:
    model = encoder(folder)
    return model, LOSSES[name](model), rows_of("anchor", "positive")


def classified(folder: Path) -> tuple[Any, Any, Any]:
    model = encoder(folder)
    loss = seeded(lambda: losses.SoftmaxLoss(model, 32, LABELS))
    labels = [number % LABELS for number in range(COUNT)]
    return model, loss, rows_of("premise", "hypothesis", labels=labels)


def of_two(folder: Path) -> tuple[Any, Any, Any]:
    model, loss, pairs = classified(folder)
    data = datasets.DatasetDict({"pairs": rows_of("anchor", "positive"), "labelled": pairs})
    return model, {"pairs": ranking(model), "labelled": loss}, data


def guided(folder: Path) -> tuple[Any, Any, Any]:
    model = encoder(folder)
    loss = losses.GISTEmbedLoss(model, encoder(folder), temperature=0.1)
    return model, loss, rows_of("anchor", "positive")


def with_adapters(folder: Path) -> tuple[Any, Any, Any]:
    peft = pytest.importorskip("peft")
    model = encoder(folder)
    lora = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["query", "value"])
    seeded(lambda: model.add_adapter(lora))
    return model, ranking(model), rows_of("anchor", "positive")


def reranker(folder: Path) -> tuple[Any, Any, Any]:
    path = saved(folder, "BertForSequenceClassification")
    model = st.CrossEncoder(path, device="cpu", num_labels=1)
    loss = st.cross_encoder.losses.BinaryCrossEntropyLoss(model)
    return model, loss, rows_of("query", "passage", labels=[float(n % 2) for n in range(COUNT)])


def sparse(folder: Path) -> tuple[Any, Any, Any]:
    sparse = st.sparse_encoder
    path = saved(folder, "BertForMaskedLM")
    parts = [sparse.modules.MLMTransformer(path, max_seq_length=16), sparse.modules.SpladePooling()]
    model = st.SparseEncoder(modules=parts, device="cpu")
    ranking = sparse.losses.SparseMultipleNegativesRankingLoss(model=model)
    loss = sparse.losses.SpladeLoss(model, ranking, 3e-5, query_regularizer_weight=5e-5)
    return model, loss, rows_of("anchor", "positive")


CASES: dict[str, tuple[Any, Made]] = {
    "ranking": (
        row("sentence-transformers", "SentenceTransformerTrainer, MultipleNegativesRankingLoss",
            "BERT"), partial(simple, "ranking")),
    "matryoshka": (
        row("sentence-transformers", "SentenceTransformerTrainer, MatryoshkaLoss", "BERT"),
        partial(simple, "matryoshka")),
    "cached": (
        row("sentence-transformers",
            "SentenceTransformerTrainer, CachedMultipleNegativesRankingLoss (GradCache)", "BERT"),
        partial(simple, "cached")),
    "softmax": (
        row("sentence-transformers", "SentenceTransformerTrainer, SoftmaxLoss: its classifier",
            "BERT"), classified),
    "several": (
        row("sentence-transformers", "SentenceTransformerTrainer, a dict of datasets and losses",
            "BERT"), of_two),
    "guide": (
        row("sentence-transformers", "SentenceTransformerTrainer, GISTEmbedLoss: a guide", "BERT"),
        guided),
    "adapters": (
        row("sentence-transformers", "SentenceTransformerTrainer, `model.add_adapter`",
            "BERT, LoRA"), with_adapters),
    "reranker": (
        row("sentence-transformers", "CrossEncoderTrainer, BinaryCrossEntropyLoss", "BERT"),
        reranker),
    "sparse": (row("sentence-transformers", "SparseEncoderTrainer, SpladeLoss", "BERT"), sparse),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_trainers(case: str, tmp_path: Path) -> None:
    check, made = CASES[case]
    check(partial(trained, made))(tmp_path)


def test_a_loss_with_parameters_resumes(tmp_path: Path) -> None:
    (_, whole), (_, again) = (
        trained(classified, "nvme", tmp_path, resume=saved)
        for saved in (None, str(tmp_path / "checkpoint-2"))
    )
    assert_same_bits(again, whole)
    first = classified(tmp_path)[1].classifier.weight
    assert not torch.equal(whole[".classifier.weight"], first), "it trains"


# --------------------------------------------------------------------------- a loop of one's own
def contrastive(vectors: Tensor) -> Tensor:
    logits = nn.functional.normalize(vectors[::2]) @ nn.functional.normalize(vectors[1::2]).T
    return nn.functional.cross_entropy(logits * 20, torch.arange(len(logits)))


def cached_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """GradCache (Gao et al., 2021): gradients of the vectors first, then each part's backward, here
    inside a backward hook of the loss."""
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        parts = torch.randint(64, (8, 6), generator=generator).split(3)
        with torch.no_grad():
            vectors = torch.cat([model(input_ids=p).pooler_output for p in parts])
        vectors.requires_grad_()
        loss = contrastive(vectors)
        gradients = torch.autograd.grad(loss, vectors)[0].split(3)

        def backward(_: Tensor, parts: Any = parts, gradients: Any = gradients) -> None:
            for part, gradient in zip(parts, gradients, strict=True):
                with torch.enable_grad():
                    product = (model(input_ids=part).pooler_output * gradient).sum()
                product.backward()

        leaf = loss.detach().requires_grad_()
        outer = leaf * 1
        outer.register_hook(backward)
        outer.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@row("PyTorch", "GradCache by hand: a backward inside a backward hook", "BERT")
def test_gradient_cache_by_hand(place: str, folder: Path) -> Result:
    model = seeded(lambda: transformers.BertModel(transformers.BertConfig(**BERT)))
    with adamw(place, folder, model, {"lr": 1e-3, "weight_decay": 0.01}) as optimizer:
        return cached_steps(model, optimizer), values_of(model)
