"""Conversations of three kinds: ordinary questions, several turns about one, and an agent's loop of tool calls.

Owns what the user and the tools say; what the model says comes from the recording or from a server. Everything is
made from fixed sentences and a seed, but for the questions, which are those of a file in Spec-Bench's format.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prompts import load_prompts, take

QUESTIONS, TURNS, AGENT = "questions", "turns", "agent"
KINDS = (QUESTIONS, TURNS, AGENT)
CHAT_CATEGORIES = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("qa", "math_reasoning", "translation"),
)

Message = dict[str, str]

_FOLLOW_UPS = (
    "Say the same in three short sentences.",
    "Now list the main points as bullets, each with an example.",
    "Which of these points matters most, and why?",
    "Rewrite your first answer so that a child of ten understands it.",
)
_AGENT_STEPS = 6
_TOOLS = """You work through a task by calling tools. Answer with one tool call and nothing else, as JSON:
{"tool": "get_order", "arguments": {"order_id": "A-1001", "fields": ["status", "total", "customer"]}}
Tools:
get_order(order_id, fields): reads an order
set_status(order_id, status, reason): changes the status of an order; status is "open", "paid" or "returned"
write_note(order_id, text): adds a note to an order
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """name: unique. replies: what follows each answer of the model, made from that answer; the first opens it."""

    name: str
    opening: tuple[Message, ...]
    replies: tuple[Callable[[str], str], ...]

    @property
    def num_turns(self) -> int:
        return 1 + len(self.replies)


def conversations(kind: str, questions: Path, *, count: int, start: int = 0) -> list[Conversation]:
    """count of them, from number `start` on."""
    if kind == AGENT:
        return [_agent(number) for number in range(start, start + count)]
    prompts = take(load_prompts(questions, CHAT_CATEGORIES), start, count)
    follow_ups = _FOLLOW_UPS if kind == TURNS else ()
    return [
        Conversation(
            name=f"{kind} {number}",
            opening=({"role": "user", "content": prompt.text},),
            replies=tuple(map(_always, follow_ups)),
        )
        for number, prompt in enumerate(prompts, start=start)
    ]


def _always(text: str) -> Callable[[str], str]:
    return lambda _answer: text


def _agent(number: int) -> Conversation:
    """A task over several orders: the tools answer with the fields of the next order, whatever was called."""
    rng = random.Random(number)
    orders = [f"{rng.choice('ABCD')}-{rng.randrange(1000, 9999)}" for _ in range(_AGENT_STEPS)]
    status = rng.choice(("open", "paid", "returned"))
    task = (
        f"For each of the orders {', '.join(orders)}: read it with get_order, then set its status to "
        f'"{status}" with set_status and give the reason.'
    )
    results = [_result(rng, order) for order in orders]
    return Conversation(
        name=f"{AGENT} {number}",
        opening=({"role": "system", "content": _TOOLS}, {"role": "user", "content": task}),
        replies=tuple(_always(result) for result in results[: _AGENT_STEPS - 1]),
    )


def _result(rng: random.Random, order: str) -> str:
    customer = rng.choice(("Ada Berg", "Tom Finch", "Lina Sato", "Omar Reyes"))
    fields = {"order_id": order, "status": "open", "total": rng.randrange(10, 900), "customer": customer}
    return f"Result: {json.dumps({'ok': True, 'order': fields})}\nNext order, please."


def grown(conversation: Conversation, answers: Sequence[str]) -> list[Message]:
    """The messages of the turn that follows these answers."""
    messages = list(conversation.opening)
    for reply, answer in zip(conversation.replies, answers, strict=False):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": reply(answer)})
    return messages
