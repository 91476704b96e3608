"""Hold two conversations at once: `python examples/chat.py [MODEL]`."""

import sys

from faser import LLM, SamplingParams

conversations = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for output in llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=64)):
        answer = output.outputs[0]
        print(answer.text)
        if answer.speculation is not None:
            print(f"  ({answer.speculation.accepted} of {len(answer.token_ids)} tokens came from drafts)")
