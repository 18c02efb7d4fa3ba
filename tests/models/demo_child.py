"""Run as a child with OpenBLAS in front: reads {"texts": [...], "question": text} from stdin, prints JSON.

For each text the greedy next token at each of its first 500 positions; for the question the answer's first tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm import generate

from kvd.models.load import load

COUNT = 500


def main() -> None:
    given = json.load(sys.stdin)
    demo = load(Path(sys.argv[1]))
    tops = []
    for text in given["texts"]:
        ids = demo.tokenizer.encode(text, add_special_tokens=False)[:COUNT]
        tops.append(mx.argmax(demo.model(mx.array([ids]))[0], axis=-1).tolist())
    messages = [{"role": "user", "content": given["question"]}]
    prompt = demo.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = generate(demo.model, demo.tokenizer, prompt, max_tokens=8)
    print(json.dumps({"tops": tops, "prompt": prompt, "answer": answer}))


if __name__ == "__main__":
    main()
