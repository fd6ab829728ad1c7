"""Greedy tokens of tiny adapters by PEFT's own generate in float32, for tests/golden/lora.json.

`python -m tests.support.peft_tokens` in an environment that also has PEFT (0.21.2 was used) prints the file. PEFT is no
dependency of the tests: their tokens must be equal to these.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.unit.engines.reference.test_lora import PROMPTS, Case, greedy


def main() -> None:
    import torch
    from peft import PeftModel  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder), "llama", ("q", "k", "v", "o", "gate", "up", "down"))
        tokens = []
        for source in case.sources:
            with torch.no_grad():
                model = PeftModel.from_pretrained(case.model, str(source)).eval()
                tokens.append([greedy(model, prompt) for prompt in PROMPTS])
                case.model = model.unload()
    json.dump({"prompts": PROMPTS, "tokens": tokens}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
