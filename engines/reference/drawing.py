"""Drawing of the tokens of a step from its logits, those after accepted draft tokens included."""

from __future__ import annotations

import torch

from trtpipe.engines.engine_process.request import Finish, Output
from trtpipe.engines.reference.flight import Flight
from trtpipe.engines.reference.sampling import choose, log_probs
from trtpipe.engines.reference.scheduler import Sequence


class Drawn:
    """Tokens that a sequence gets in one step.

    row    row of the logits after its last token; those after its draft tokens follow
    draft  draft tokens that were computed after its last token
    """

    def __init__(self, sequence: Sequence, flight: Flight, row: int, draft: list[int]) -> None:
        self.sequence, self.flight, self.row, self.draft = sequence, flight, row, draft
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish: Finish | None = None
        self.accepted = 0

    def output(self, logits: torch.Tensor) -> Output:
        """Its output; called before the sequence has the tokens."""
        generation, follower = None, self.flight.sampler.follower
        if self.sequence.request.return_generation_logits:
            generation = logits[self.row : self.row + len(self.tokens)].float().cpu().numpy()
        return self.flight.output(
            self.sequence,
            self.tokens,
            finish=self.finish,
            refusal=follower.refusal if follower is not None and self.finish == "refused" else "",
            log_probs=self.log_probs,
            generation_logits=generation,
        )


def draw(logits: torch.Tensor, drawing: list[Drawn]) -> None:
    """Draw the next token of every sequence, and another one as long as the token drawn is the draft's."""
    going, place = drawing, 0
    while going:
        rows = [one.row + place for one in going]
        _draw_one(logits if len(rows) == len(logits) else logits[rows], going)
        going = [
            one
            for one in going
            if one.finish is None and place < len(one.draft) and one.tokens[place] == one.draft[place]
        ]
        for one in going:
            one.accepted += 1
        place += 1


def _draw_one(logits: torch.Tensor, drawing: list[Drawn]) -> None:
    """Draw a token for each of `drawing` from its row of `logits`."""
    with torch.inference_mode():
        tokens = choose(logits, [one.flight.sampler for one in drawing])
        scored = [row for row, one in enumerate(drawing) if one.sequence.request.return_log_probs]
        scores: dict[int, float] = {}
        if scored:
            values = log_probs(logits[scored], [tokens[row] for row in scored])
            scores = dict(zip(scored, values, strict=True))
    for row, (one, token) in enumerate(zip(drawing, tokens, strict=True)):
        one.finish = one.flight.sampler.accept(token)
        follower = one.flight.sampler.follower
        if follower is not None and follower.refusal and one.finish is None:
            one.finish = "refused"
        if one.finish in ("end_id", "refused"):
            continue
        one.tokens.append(token)
        if row in scores:
            one.flight.cum_log_prob += scores[row]
            one.log_probs.append(scores[row])
