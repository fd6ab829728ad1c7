"""Modes of speculative decoding in which the engine makes its draft tokens, and the folder of a draft model.

ngram        the draft is what followed the last tokens of a text where they occurred in it before
draft_model  a small model of the same vocabulary continues the text
eagle3       a head that was trained for the model continues the text from the model's hidden states
"""

from __future__ import annotations

NGRAM, DRAFT_MODEL, EAGLE3 = "ngram", "draft_model", "eagle3"
# Modes that need a second model.
WITH_MODEL = (DRAFT_MODEL, EAGLE3)
# Folder of that model in an engine's folder.
DRAFT = "draft"
# Most and fewest tokens of the text's end that are searched for.
LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2
