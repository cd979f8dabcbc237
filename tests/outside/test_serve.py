"""`offload serve`: requests of many clients in one batch, over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.config import OffloadConfig
from offload.errors import ConfigError, UnsupportedError
from tests.outside.test_generate import tokenizer
from tests.outside.zoo import NAMES, build

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

from offload.integrations.transformers.batched_generation import Batch, End, Sequence  # noqa: E402
from offload.integrations.transformers.openai_server import _Text, serve, token_choice  # noqa: E402

CONTEXT = 12000
GREEDY = token_choice(0, None)
PROMPTS = [[3 + (n * 31 + i * 7) % 300 for i in range(1 + n % 23)] for n in range(64)]


def spread(model: Any) -> Any:
    """Give `model` weights that make distinct tokens likely."""
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        if param.ndim > 1:
            param.data.normal_(0, 0.2, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders") / "tiny"
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=320, max_position_embeddings=CONTEXT, bos_token_id=0,
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    spread(transformers.LlamaForCausalLM(config)).save_pretrained(path)
    own = tokenizer()
    own.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    own.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def generated(model: Any, ids: list[int], new: int, **keys: Any) -> list[int]:
    prompt = torch.tensor([ids])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, use_cache=True,
            **(keys or GREEDY),
        )  # fmt: skip
    return out[0, len(ids) :].tolist()


class Served:
    """A process of `offload serve`, all weights on nvme."""

    def __init__(self, folder: Path, swap: Path, *words: str) -> None:
        keys = (f"nvme.paths=[{swap}]", "placement.parameters=nvme", "budget.nvme=64MiB",
                "budget.host=4MiB", "device=cpu")  # fmt: skip
        options = [word for key in keys for word in ("-o", key)]
        command = [sys.executable, "-m", "offload", "serve", str(folder), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *options, *words], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"at (http://127.0.0.1:\d+)/v1", line):
                self.url = found[1]
                return
        raise AssertionError("".join(said))

    def post(self, path: str = "/v1/completions", **body: Any) -> Any:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextmanager
def serving(folder: Path, swap: Path, *words: str) -> Iterator[Served]:
    served = Served(folder, swap, *words)
    try:
        yield served
    finally:
        served.process.kill()
        served.process.communicate()


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(folder, tmp_path_factory.mktemp("swap"), "--batch", "24") as each:
        yield each


def until(true: Any) -> None:
    """Wait until `true()`, half a minute at most."""
    for _ in range(600):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


# ---------------------------------------------------------------- what comes back
def test_64_clients_get_what_each_gets_alone(served: Served, folder: Path, plain: Any) -> None:
    own = transformers.AutoTokenizer.from_pretrained(folder)
    before = served.descriptors()

    async def ask(api: Any, number: int) -> tuple[str, int, str]:
        keys = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": 5 + number % 17}
        if number % 2:
            got = await api.completions.create(**keys, temperature=0)
            return got.choices[0].text, got.usage.completion_tokens, got.choices[0].finish_reason
        text, reason, usage = "", "", None
        keys["stream_options"] = {"include_usage": True}
        async for event in await api.completions.create(**keys, temperature=0, stream=True):
            usage = event.usage
            for choice in event.choices:
                text, reason = text + choice.text, choice.finish_reason or reason
        return text, usage.completion_tokens, reason

    async def all_at_once() -> list[tuple[str, int, str]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-") as api:
            return await asyncio.gather(*(ask(api, number) for number in range(64)))

    for number, got in enumerate(asyncio.run(all_at_once())):
        tokens = generated(plain, PROMPTS[number], 5 + number % 17)
        text = own.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert got == (text, len(tokens), "stop" if tokens[-1] == 1 else "length"), number
    until(lambda: served.descriptors() <= before)


def test_a_chat_with_its_template_seed_and_stop(served: Served, folder: Path, plain: Any) -> None:
    own = transformers.AutoTokenizer.from_pretrained(folder)
    ids = own("<user>to be")["input_ids"]
    tokens = generated(plain, ids, 9, do_sample=True, temperature=0.7, top_p=0.9)
    text = own.decode(tokens, skip_special_tokens=True)
    keys = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "to be"}]}],
        "max_completion_tokens": 9, "seed": 5, "temperature": 0.7, "top_p": 0.9, "user": "me",
        "n": 1, "logprobs": None,
    }  # fmt: skip
    got = served.post("/v1/chat/completions", **keys).json()
    assert got["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert got["usage"] == {
        "prompt_tokens": len(ids), "completion_tokens": 9, "total_tokens": len(ids) + 9
    }  # fmt: skip
    stop = text[3:5]
    got = served.post("/v1/chat/completions", **keys, stop=["never there", stop]).json()
    assert got["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert got["choices"][0]["finish_reason"] == "stop"
    events = served.post("/v1/chat/completions", **keys, stop=stop, stream=True).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("content", "") for delta in deltas) == text[: text.index(stop)]


def test_what_is_wrong_or_would_be_ignored_is_refused_by_name(served: Served) -> None:
    for status, said, body in (
        (404, "'tiny' is", {"model": "other", "prompt": "a"}),
        (400, "n: 2", {"prompt": "a", "n": 2}),
        (400, "logprobs: 0", {"prompt": "a", "logprobs": 0}),
        (400, "logit_bias", {"prompt": "a", "logit_bias": {"1": 2}}),
        (400, "tools", {"prompt": "a", "tools": [{}]}),
        (400, "unheard", {"prompt": "a", "unheard": 1}),
        (400, "max_tokens", {"prompt": "a", "max_tokens": 0}),
        (400, "temperature", {"prompt": "a", "temperature": "0"}),
        (400, "top_p", {"prompt": "a", "top_p": 0}),
        (400, "prompt", {}),
        (400, "no tokens", {"prompt": ""}),
        (400, "token 320", {"prompt": [320]}),
        (400, f"{CONTEXT:,}", {"prompt": "a", "max_tokens": CONTEXT}),
        (400, f"{CONTEXT:,}", {"prompt": "e " * CONTEXT}),
        (500, "not finite", {"prompt": "a", "temperature": 1e-40}),
        (413, "the request has more", {"prompt": "a" * (2 << 20)}),
    ):
        got = served.post(**body)
        assert (got.status_code, said in got.json()["error"]["message"]) == (status, True), got.text
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    got = served.post("/v1/chat/completions", messages=[image])
    assert got.status_code == 400
    assert "parts of text" in got.text
    url = f"{served.url}/v1/completions"
    for status, data, kind in ((400, b"{", "json"), (400, b"[]", "json"), (415, b"{}", "plain")):
        got = httpx.post(url, content=data, headers={"Content-Type": f"application/{kind}"})
        assert got.status_code == status
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{served.url}/nothing").json()["error"]["message"].startswith("Not Found")


def test_characters_that_some_tokenizers_have_as_bytes_come_whole() -> None:
    """They decode a run of bytes as a whole, and strip a space from what comes first."""
    from tokenizers import Tokenizer, decoders, models

    words = ["<unk>", "</s>", "\u2581be", *(f"<0x{octet:02X}>" for octet in range(256))]
    own = Tokenizer(models.BPE({w: at for at, w in enumerate(words)}, [], byte_fallback=True))
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
    own.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    own.add_special_tokens(["</s>"])
    asked = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>")
    for said in ("日本 be日本", " be😀🌍日", "é be be"):
        octets = said.replace(" be", "\1\2").encode()  # a special token before each word
        text = _Text(asked, ["never" * 100_000])
        pieces = [text.add(octet if octet in (1, 2) else octet + 3) for octet in octets]
        assert ("".join(pieces) + text.rest()).strip() == said.strip()


# ---------------------------------------------------------------- clients and servers that leave
def test_clients_and_the_server_may_leave_at_any_time(folder: Path, tmp_path: Path) -> None:
    endless = Path(shutil.copytree(folder, tmp_path / "tiny"))
    settings = json.loads((endless / "generation_config.json").read_text())
    (endless / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": None}))
    swap = tmp_path / "swap"
    swap.mkdir()
    said = [{"role": "user", "content": "to be"}]
    long = {"messages": said, "max_tokens": CONTEXT - 100, "temperature": 0, "stream": True}
    with serving(endless, swap, "--batch", "1", "--queue", "1") as served:
        first, waiting = httpx.Client(timeout=60), httpx.Client(timeout=60)
        url = f"{served.url}/v1/chat/completions"
        with first.stream("POST", url, json=long) as one, waiting.stream("POST", url, json=long):
            lines = one.iter_lines()  # closes the response when it is dropped
            next(lines)
            full = served.post(prompt="a", max_tokens=1)
            assert full.status_code == 503
            assert int(full.headers["Retry-After"]) >= 1
            assert "wait already" in full.json()["error"]["message"]
        first.close()
        waiting.close()
        until(lambda: served.post(prompt="a", max_tokens=1).status_code == 200)
        with httpx.stream("POST", url, json=long, timeout=60) as last:
            lines = last.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            left = [line for line in lines if line]
        assert "the server is stopping" in left[-1]
        assert served.process.wait(30) == 0
        assert served.process.stderr is not None
        assert served.process.stderr.read() == "stopped\n"
    assert not list(swap.iterdir())


# ---------------------------------------------------------------- the batch alone
def run(batch: Batch, prompts: list[list[int]], new: int) -> list[tuple[list[int], End]]:
    heard: list[list[Any]] = [[] for _ in prompts]
    ended = threading.Semaphore(0)

    def hear(number: int, event: Any) -> None:
        heard[number].append(event)
        if isinstance(event, End):
            ended.release()

    for number, ids in enumerate(prompts):
        options = {"max_new_tokens": new, "min_new_tokens": new, **GREEDY}
        batch.submit(
            Sequence(torch.tensor([ids]), options, lambda event, n=number: hear(n, event))  # type: ignore[misc]
        )
    for _ in prompts:
        assert ended.acquire(timeout=60)
    return [(each[:-1], each[-1]) for each in heard]


REFUSED = pytest.mark.sample("llama", "gemma3_text", "gpt_oss", "bloom", "mamba", "nemotron")


@REFUSED
@pytest.mark.parametrize("model_type", sorted(NAMES))
def test_every_architecture_has_its_own_tokens_or_is_refused(model_type: str) -> None:
    try:
        model = spread(build(model_type))
        prompts = [[token % 61 + 3 for token in ids] for ids in PROMPTS[3:8]]
        expected = [generated(model, ids, 6, min_new_tokens=6, **GREEDY) for ids in prompts]
    except Exception as error:  # noqa: BLE001 - whatever keeps the library from generating
        pytest.skip(f"{type(error).__name__}: {error}".split("\n")[0][:90])
    try:
        batch = Batch(model, size=3, waiting=9, tokens=1000)
    except UnsupportedError:
        assert model.config._attn_implementation != "offload_packed"
        return
    with closing(batch):
        assert [tokens for tokens, _ in run(batch, prompts, 6)] == expected


@pytest.mark.parametrize("kv", [None, "nvme"])
def test_caches_stay_within_their_tokens_and_failures_within_their_pass(
    kv: str | None, folder: Path, plain: Any, tmp_path: Path
) -> None:
    """Sequences that do not fit wait again, and go on with the tokens they had."""
    prompts = PROMPTS[10:18]
    expected = [generated(plain, ids, 20, min_new_tokens=20, **GREEDY) for ids in prompts]
    model = offload.dispatch(
        offload.open_pretrained(folder),
        {"device": "cpu", "budget": {"host": "4MiB", "nvme": "64MiB"},
         "nvme": {"paths": [str(tmp_path)]}, "placement": {"parameters": "nvme", "kv": kv}},
    )  # fmt: skip
    sizes: list[int] = []
    with offload.dispatched(model) as owner:
        batch = Batch(model, size=8, waiting=8, tokens=90, keep=owner.keep_cache)
        with closing(batch):
            model.register_forward_pre_hook(
                lambda *_: sizes.append(sum(row.length for row in batch._rows))
            )
            assert [tokens for tokens, _ in run(batch, prompts, 20)] == expected
            assert 45 < max(sizes) <= 90

            def fail(*_: Any) -> None:
                hook.remove()
                raise OSError(5, "a disk's")

            hook = model.model.layers[1].register_forward_pre_hook(fail)
            assert isinstance(run(batch, prompts[:1], 20)[0][1].error, OSError)
            assert [tokens for tokens, _ in run(batch, prompts, 20)] == expected
        owner.check_integrity()
        held = [tier.by_class.get("kv", 0) for tier in owner.report().tiers.values()]
        assert not any(held)


def test_an_address_in_use_is_one_line(folder: Path, served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"--port {port}: Address already in use"):
        serve(folder, OffloadConfig(), host="127.0.0.1", port=port, size=1, waiting=1)
