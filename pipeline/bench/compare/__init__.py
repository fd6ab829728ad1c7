"""Measurements set side by side, ours and those of other tools.

compare      the comparison; sides matches levels, unlike says what makes them unlike, conditions judges
raw, resample   figures from every request, and what chance could make of them
foreign      AIPerf, GenAI-Perf and vLLM's files as reports like ours (foreign_aiperf, foreign_genai_perf, foreign_vllm)
"""
