"""Many clients at once."""

import asyncio

import openai

from tests.api.server import serving
from tests.fake_engine import FakeEngine, saying

NUM_CLIENTS = 200


def test_200_simultaneous_streams_get_their_own_answers() -> None:
    engine = FakeEngine(lambda request: saying(bytes(request.prompt_token_ids).decode() * 2)(request))
    engine.step_s = 0.02

    async def ask(client: openai.AsyncOpenAI, name: str) -> bool:
        text = ""
        async for chunk in await client.completions.create(model="tiny", prompt=name, max_tokens=100, stream=True):
            text += chunk.choices[0].text
        return text == name * 2

    async def crowd(url: str) -> list[bool]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as client:
            return await asyncio.gather(*(ask(client, f"<{number}>") for number in range(NUM_CLIENTS)))

    with serving(engine) as url:
        assert all(asyncio.run(crowd(url)))
    assert engine.num_open == 0
    assert not engine.aborted
