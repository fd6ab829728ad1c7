"""Modes of speculative decoding in which an engine makes draft tokens by itself, and the place of a draft model.

ngram        the last tokens of a text are looked for earlier in it; what followed them there is the draft
draft_model  a small model of the same vocabulary continues the text
eagle3       a head that was trained for the model continues the text from the model's hidden states
"""

from __future__ import annotations

NGRAM, DRAFT_MODEL, EAGLE3 = "ngram", "draft_model", "eagle3"
# Those that need a model.
WITH_MODEL = (DRAFT_MODEL, EAGLE3)
# Folder of that model in an engine's folder.
DRAFT = "draft"
# Most tokens of the text's end that are looked for, and the fewest.
LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
