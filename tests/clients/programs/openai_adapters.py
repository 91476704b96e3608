"""The `openai` package with two LoRA adapters and their model at once. Usage: openai_adapters.py URL MODEL.

The server has the adapters one and two.
"""

import asyncio
import sys

import openai

URL, MODEL = sys.argv[1:]
NAMES = (MODEL, "one", "two")


async def tell(client: openai.AsyncOpenAI, name: str) -> str:
    """Stream an answer, every chunk of which must have the name."""
    stream = await client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "What is the weather in Bern?"}],
        max_tokens=20,
        temperature=0,
        stream=True,
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.model for chunk in chunks} == {name}
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def main() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        alone = [await tell(client, name) for name in NAMES]
        assert len(set(alone)) == len(NAMES), alone
        together = await asyncio.gather(*(tell(client, name) for name in NAMES * 3))
        assert together == alone * 3
        listed = {card.id: card.model_dump() for card in (await client.models.list()).data}
        assert [listed[name]["parent"] for name in NAMES] == [None, MODEL, MODEL]
        try:
            await tell(client, "three")
        except openai.NotFoundError as error:
            assert "'three' not found" in str(error)
        else:
            raise AssertionError("there is no adapter three")


asyncio.run(main())
print("ok")
