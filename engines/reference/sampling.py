"""Sampling of tokens from logits by TensorRT-LLM's rules, for all requests of a step at once.

Two rules are OpenAI's and vLLM's instead: presence and frequency penalties count the output's tokens alone, not the
prompt's, and min_tokens holds for stop words too.

A greedy request without other options costs one argmax. For other requests bias, temperature, penalties and bans are
applied in TensorRT-LLM's order, then the masks of guides. The token is the first of the sorted candidates whose
cumulative probability reaches u * top_p, u uniform in (0, 1). So top_p cuts the tail exactly at its mass, within top_k
if that is set.

u is a function of seed and output position alone. It does not depend on other requests or on preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trtpipe.engines.engine_process.request import DEAD_END, Finish, FloatArray, IntArray, Request
from trtpipe.engines.reference.grammars import Follower, mask

# TensorRT-LLM's limit of top_k, and the number of candidates that are sorted first without a top_k.
MAX_TOP_K = 1024
# Widths of the partial sort. A request's width depends on the request alone, so that other requests of the batch
# cannot change the order of equal logits at the edge.
_FEW = 64
# Not infinity, so that a row with all tokens banned still gives a token.
_BANNED = -3e38
_WORD = (1 << 64) - 1
# Rows of logits that are converted to float32 at a time.
_ROWS = 256


class Sampler:
    """Sampling state of one request: resolved settings, and counts of its tokens."""

    def __init__(self, request: Request, follower: Follower | None = None) -> None:
        """`follower` tracks the grammar of the request's guide; None without a guide."""
        self.request = request
        self.follower = follower
        params = request.sampling
        self.end_id = request.end_id if request.end_id is not None and request.end_id >= 0 else None
        self.min_tokens = params.min_tokens or 0
        # Tokens that end the request by themselves: a model's further end tokens are stop words of one token.
        self._ends = [word[0] for word in request.stop_words if len(word) == 1]
        if self.end_id is not None:
            self._ends.append(self.end_id)
        self.temperature = 1.0 if params.temperature is None else params.temperature
        self.top_k = max(params.top_k or 0, 0)
        top_p = params.top_p or 0.0
        self.greedy = self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and top_p <= 0)
        self.top_p = top_p if 0 < top_p < 1 else 1.0
        if self.temperature == 0:
            self.temperature = 1.0
        self.repetition = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.presence = params.presence_penalty or 0.0
        self.frequency = params.frequency_penalty or 0.0
        self.penalised = self.repetition != 1 or self.presence != 0 or self.frequency != 0
        self.seed = params.seed or 0
        # Token -> occurrences in the output; 0 for tokens of the prompt only. Used for penalties only.
        self.counts: dict[int, int] = dict.fromkeys(request.prompt, 0) if self.penalised else {}
        self.generated: list[int] = []
        # Without these options the next token is the argmax of the raw logits.
        changed = self.penalised or request.bad_words or request.embedding_bias is not None or follower is not None
        self._plain = self.greedy and not changed

    @property
    def raw_argmax(self) -> bool:
        """Whether the next token is the argmax of the raw logits."""
        return self._plain and (not self._ends or len(self.generated) >= self.min_tokens)

    def accept(self, token: int) -> Finish | None:
        """Append a drawn token to the output, except end_id. Return why it ends the request, or None."""
        # A guide takes precedence over min_tokens: it may allow no token but the end.
        if self.follower is not None:
            self.follower.accept(token)
            if self.follower.refusal == DEAD_END:
                return "refused"
        long_enough = len(self.generated) >= self.min_tokens or self.follower is not None
        if token == self.end_id and long_enough:
            return "end_id"
        self.generated.append(token)
        if self.penalised:
            self.counts[token] = self.counts.get(token, 0) + 1
        if len(self.generated) >= self.min_tokens and any(_ends_in(self.generated, w) for w in self.request.stop_words):
            return "stop_words"
        if self.follower is not None and self.follower.complete:
            return "stop_words"
        return "length" if len(self.generated) >= self.request.max_tokens else None

    def banned(self) -> list[int]:
        """Tokens that must not come next."""
        out = list(self._ends) if len(self.generated) < self.min_tokens else []
        for word in self.request.bad_words:
            if word and self._follows(word[:-1]):
                out.append(word[-1])
        return out

    def uniform(self) -> float:
        """Random number u for the next token, in (0, 1)."""
        bits = _mix((_mix(self.seed & _WORD) + len(self.generated)) & _WORD)
        return ((bits >> 12) + 0.5) / (1 << 52)

    def _follows(self, start: Sequence[int]) -> bool:
        """Whether prompt + output ends in `start`."""
        count = len(start)
        tail = self.generated[-count:] if count else []
        missing = count - len(tail)
        if missing:
            tail = [*self.request.prompt[-missing:], *tail]
        return tail == list(start)


def choose(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of each request. `logits` is [requests, vocab_size] of any float type and is not changed."""
    special = [row for row, sampler in enumerate(samplers) if not sampler.raw_argmax]
    tokens: list[int] = []
    if len(special) < len(samplers):
        tokens = logits.max(dim=-1).indices.tolist()
    if not special:
        return tokens
    chosen = [samplers[row] for row in special]
    adjusted = _adjust(logits[special].float(), chosen)
    followers = [(row, sampler.follower) for row, sampler in enumerate(chosen) if sampler.follower is not None]
    if followers:
        mask(adjusted, followers)
    best = adjusted.argmax(dim=-1).tolist()
    result = dict(zip(special, best, strict=True))
    drawing = [index for index, sampler in enumerate(chosen) if not sampler.greedy]
    if drawing:
        drawn = _draw(adjusted[drawing] if len(drawing) < len(chosen) else adjusted, [chosen[i] for i in drawing])
        result.update((special[index], token) for index, token in zip(drawing, drawn, strict=True))
    for row, _ in followers:
        if adjusted[row, result[special[row]]] == -torch.inf:  # a draw at the very end, by rounding
            result[special[row]] = best[row]
    return [result[row] if row in result else tokens[row] for row in range(len(samplers))]


def log_probs(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """Log softmax of each row's token; `logits` is [len(tokens), vocab_size]."""
    wide = logits.float()
    picked = wide.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).squeeze(1)
    out: list[float] = (picked - wide.logsumexp(dim=-1)).tolist()
    return out


def prompt_log_probs(logits: torch.Tensor, tokens: Sequence[int]) -> tuple[FloatArray, IntArray]:
    """Log softmax [2, n] of each row's token and of its likeliest token, and the likeliest tokens [n]; `logits` is
    [n, vocab_size]."""
    values = np.empty((2, len(tokens)), dtype=np.float32)
    likeliest = np.empty(len(tokens), dtype=np.int32)
    for first in range(0, len(tokens), _ROWS):
        place = slice(first, min(first + _ROWS, len(tokens)))
        wide = logits[place].float()
        best, where = wide.max(dim=-1)
        given = wide.gather(1, torch.tensor(tokens[place], device=logits.device)[:, None]).squeeze(1)
        values[:, place] = (torch.stack((given, best)) - wide.logsumexp(dim=-1)).cpu().numpy()
        likeliest[place] = where.cpu().numpy()
    return values, likeliest


def _adjust(logits: torch.Tensor, samplers: Sequence[Sampler]) -> torch.Tensor:
    """Bias, temperature, penalties and bans applied in place to [requests, vocab_size] float32."""
    for row, sampler in enumerate(samplers):
        if sampler.request.embedding_bias is not None:
            # A copy, since torch warns of a read-only array.
            logits[row] += torch.tensor(np.array(sampler.request.embedding_bias), device=logits.device).float()
    if any(sampler.temperature != 1 for sampler in samplers):
        logits /= torch.tensor([sampler.temperature for sampler in samplers], device=logits.device)[:, None]
    penalised = [(row, sampler) for row, sampler in enumerate(samplers) if sampler.counts]
    if penalised:
        _penalise(logits, penalised)
    rows: list[int] = []
    columns: list[int] = []
    for row, sampler in enumerate(samplers):
        for token in sampler.banned():
            rows.append(row)
            columns.append(token)
    if rows:
        logits[rows, columns] = _BANNED
    return logits.clamp_(min=_BANNED)


def _penalise(logits: torch.Tensor, penalised: Sequence[tuple[int, Sampler]]) -> None:
    """Apply penalties for all requests together, to the logits of tokens that have occurred."""
    sizes = [len(sampler.counts) for _, sampler in penalised]
    rows = np.repeat([row for row, _ in penalised], sizes)
    columns = np.concatenate([np.fromiter(s.counts.keys(), np.int64, len(s.counts)) for _, s in penalised])
    counts = np.concatenate([np.fromiter(s.counts.values(), np.float32, len(s.counts)) for _, s in penalised])
    settings = np.array([(s.repetition, s.presence, s.frequency) for _, s in penalised], dtype=np.float32)
    device = logits.device
    repetition, presence, frequency = torch.from_numpy(np.repeat(settings, sizes, axis=0)).to(device).unbind(dim=1)
    where = (torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device))
    seen = torch.from_numpy(counts).to(device)
    values = logits[where]
    values = torch.where(values < 0, values * repetition, values / repetition)
    logits[where] = values - presence * (seen > 0) - frequency * seen


def _draw(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Draw one token per row by the inverse distribution function over the candidates, most likely first."""
    out = [0] * len(samplers)
    few = [row for row, sampler in enumerate(samplers) if 0 < sampler.top_k <= _FEW]
    many = [row for row, sampler in enumerate(samplers) if not 0 < sampler.top_k <= _FEW]
    for rows, width in ((few, _FEW), (many, MAX_TOP_K)):
        if rows:
            tokens = _pick(logits[rows], [samplers[row] for row in rows], min(width, logits.shape[1]))
            for row, token in zip(rows, tokens, strict=True):
                out[row] = token
    return out


def _pick(logits: torch.Tensor, samplers: Sequence[Sampler], width: int) -> list[int]:
    """Draw for each row among its `width` likeliest tokens; without a top_k, u may select a token beyond them."""
    values, candidates = logits.topk(width, dim=-1)
    peak = values[:, :1]
    device = logits.device
    limits = torch.tensor([min(sampler.top_k or width, width) for sampler in samplers], device=device)[:, None]
    weights = (values - peak).double().exp_().masked_fill_(torch.arange(width, device=device) >= limits, 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].clone()
    unlimited = [row for row, sampler in enumerate(samplers) if not sampler.top_k]
    if width < logits.shape[1] and unlimited:
        total[unlimited] = (logits[unlimited] - peak[unlimited]).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    draws = torch.tensor([s.uniform() * s.top_p for s in samplers], dtype=torch.float64, device=device)
    targets = draws[:, None] * total
    place = torch.searchsorted(cumulative, targets)
    tokens: list[int] = candidates.gather(1, torch.minimum(place, limits - 1)).squeeze(1).tolist()
    ends = place.squeeze(1).tolist()
    beyond = [row for row in unlimited if ends[row] >= width]
    if width < logits.shape[1] and beyond:
        # Sorting all tokens is slow and seldom needed. The likeliest tokens are excluded and not sorted again, since
        # equal logits might change their order.
        rest, order = logits[beyond].scatter(1, candidates[beyond], -torch.inf).sort(dim=-1, descending=True)
        tail = (rest - peak[beyond]).double().exp_().cumsum(dim=-1)
        place = torch.searchsorted(tail, targets[beyond] - cumulative[beyond, -1:])
        last = rest.shape[1] - width - 1
        for row, token in zip(beyond, order.gather(1, place.clamp(max=last)).squeeze(1).tolist(), strict=True):
            tokens[row] = token
    return tokens


def _ends_in(tokens: list[int], word: tuple[int, ...]) -> bool:
    return bool(word) and len(word) <= len(tokens) and tuple(tokens[-len(word) :]) == word


def _mix(value: int) -> int:
    """Finaliser of SplitMix64: neighbouring inputs give unrelated 64-bit outputs."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
