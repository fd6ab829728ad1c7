"""Worker process of a scoring job: runs batches of requests on one model, which is on the device as a whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import write_json
from trtpipe.engines.hf.tokenizer import read_tokenizer
from trtpipe.engines.process import Progress, serve_worker
from trtpipe.engines.reference.attention import Span
from trtpipe.engines.reference.devices import find_device, named_memory_errors
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.weights import load_all

# Most tokens and requests of a batch, since its KV cache and activations are in memory at the same time.
BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}
BATCH_REQUESTS = 64
TOKENS_PER_BLOCK = 64
Asked = dict[str, Any]


def work(spec: Asked, progress: Progress) -> None:
    """Run a job of `scoring.answer`; `spec` has its arguments as plain values. Writes `out`."""
    asked = json.loads(Path(spec["asked"]).read_text(encoding="utf-8"))
    pairs, prompts = asked["continuations"], asked["generations"]
    device, where = find_device(spec["device"]), ["reading the model"]
    most = BATCH_TOKENS[device.type]
    scored = batches([len(one["context"]) + len(one["tokens"]) for one in pairs], most)
    told = batches([len(one["prompt"]) + one["max_tokens"] for one in prompts], most)
    done = 0

    def count(finished: int) -> None:
        nonlocal done
        done += finished
        progress(done, len(pairs) + len(prompts))

    with torch.inference_mode(), named_memory_errors(device, where, "use --device cpu, or shorter documents"):
        source = open_model(Path(spec["model"]), device)
        every = [batch for group in (scored, told) for batch in group]
        model = Model(
            source.config,
            load_all(source),
            max_positions=max(length for batch in every for _, length in batch),
            num_blocks=max(sum(blocks(length) for _, length in batch) for batch in every),
            tokens_per_block=TOKENS_PER_BLOCK,
        )
        where[0] = "scoring the tasks"
        likelihoods, texts = [0.0] * len(pairs), [""] * len(prompts)
        for batch in scored:
            score(model, pairs, batch, likelihoods)
            count(len(batch))
        if prompts:
            tokenizer = read_tokenizer(Path(spec["tokenizer"]))
            for batch in told:
                generate(model, prompts, batch, texts, tokenizer.decode, frozenset(spec["ends"]))
                count(len(batch))
        model.close()
    if not all(map(math.isfinite, likelihoods)):
        raise InputDataError(
            f"{spec['model']} gives numbers that are not finite",
            why="its weights or scales are damaged, or too large for its type",
            remedy="make the folder again",
        )
    write_json(Path(spec["out"]), {"likelihoods": likelihoods, "texts": texts})


Batch = list[tuple[int, int]]


def batches(lengths: Sequence[int], most: int) -> list[Batch]:
    """(index, length) of all requests, in batches of similar lengths. A batch of several requests has at most `most`
    tokens."""
    out: list[Batch] = []
    total = 0
    for length, index in sorted((length, index) for index, length in enumerate(lengths)):
        if not out or total + length > most or len(out[-1]) == BATCH_REQUESTS:
            out.append([])
            total = 0
        out[-1].append((index, length))
        total += length
    return out


def blocks(length: int) -> int:
    """Blocks of the KV cache for `length` tokens."""
    return -(-length // TOKENS_PER_BLOCK)


def _places(batch: Batch) -> Iterator[tuple[int, range]]:
    """Index and cache blocks of each request of a batch."""
    first = 0
    for index, length in batch:
        yield index, range(first, first + blocks(length))
        first += blocks(length)


def score(model: Model, pairs: Sequence[Asked], batch: Batch, out: list[float]) -> None:
    """Write the log-likelihoods of a batch's continuations, in nats, into `out`."""
    spans = [
        Span([*pairs[index]["context"], *pairs[index]["tokens"]][:-1], 0, place, len(pairs[index]["tokens"]))
        for index, place in _places(batch)
    ]
    logits, end = model.forward(spans), 0
    for index, _ in batch:
        tokens = pairs[index]["tokens"]
        rows, end = logits[end : end + len(tokens)], end + len(tokens)
        chosen = torch.tensor(tokens, device=rows.device)[:, None]
        out[index] = float(rows.float().log_softmax(-1).gather(1, chosen).double().sum())


def generate(
    model: Model, prompts: Sequence[Asked], batch: Batch, out: list[str], decode: Callable[[list[int]], str],
    ends: frozenset[int],
) -> None:  # fmt: skip
    """Write the greedy answers of a batch into `out`."""
    # Sorted by length of prompt, since a span of one token must come before longer spans.
    live = sorted(_places(batch), key=lambda one: len(prompts[one[0]]["prompt"]))
    spans = [Span(prompts[index]["prompt"], 0, place, 1) for index, place in live]
    said: dict[int, list[int]] = {index: [] for index, _ in live}
    while live:
        drawn = model.forward(spans).argmax(-1).tolist()
        going = []
        for (index, place), token in zip(live, drawn, strict=True):
            asked, tokens = prompts[index], said[index]
            if token not in ends:
                tokens.append(token)
                out[index] = decode(tokens)
                found = [at for text in asked["until"] if (at := out[index].find(text)) >= 0]
                if found:
                    out[index] = out[index][: min(found)]
                elif len(tokens) < asked["max_tokens"]:
                    going.append((index, place))
        live = going
        spans = [
            Span(said[index][-1:], len(prompts[index]["prompt"]) + len(said[index]) - 1, place, 1)
            for index, place in live
        ]


if __name__ == "__main__":
    serve_worker(work)
