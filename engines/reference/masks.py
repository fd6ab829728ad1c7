"""Attention masks, which are added to the scores: 0 for positions that a token attends to, -inf for others."""

from __future__ import annotations

import torch


def prompt_mask(start: int, count: int, window: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """Mask [count, start + count] of `count` tokens from position `start` on. Each attends to the last `window`
    positions up to its own. None where that is plain causal attention.
    """
    length = start + count
    if start == 0 and window >= length:
        return None
    mask = torch.full((count, length), -torch.inf, dtype=dtype, device=device).triu_(start + 1)
    if window < length:
        mask += torch.full_like(mask, -torch.inf).tril_(start - window)
    return mask


def decode_mask(positions: torch.Tensor, length: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Mask [n, 1, 1, length] of single tokens at `positions` [n]. Each attends to the last `window` positions up to its
    own."""
    places, own = torch.arange(length, device=positions.device), positions[:, None]
    hidden = places > own
    if window < length:
        hidden |= places <= own - window
    mask = torch.zeros(len(positions), 1, 1, length, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden[:, None, None], -torch.inf)
