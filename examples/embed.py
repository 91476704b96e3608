"""Rank three texts by how well they fit a question: `python examples/embed.py [MODEL]`."""

import sys

from faser import LLM

question = "Where do llamas live?"
documents = ["Llamas live in the Andes.", "The central bank raised its rates.", "A llama is a pack animal."]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    vector = llm.embed(question)[0].outputs
    print(f"{vector.hidden_size} numbers, the first ones {vector.embedding[:3]}")
    scored = zip(llm.score(question, documents), documents, strict=True)
    for found, document in sorted(scored, key=lambda pair: -pair[0].outputs.score):
        print(f"{found.outputs.score:.3f} {document!r}")
