"""The prompts of `faser bench`: questions of a file, or built in, rendered with the model's chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from faser.api.requests.chat_template import ChatTemplate
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError


class Question(NamedTuple):
    """category: the kind of text that its answer is likely to be; empty: unknown."""

    category: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """A rendered question."""

    token_ids: tuple[int, ...]
    category: str = ""


def read_prompts(path: str | None, tokenizer: Tokenizer) -> list[BenchPrompt]:
    """Prompts, each the first turn of a chat. path: a file for read_questions; None: the built-in questions.

    Raises ConfigError for a file without prompts and for a model without a chat template.
    """
    source = tokenizer.chat_template
    if not isinstance(source, str):
        raise ConfigError("this model has no chat template; the prompts of a bench need one")
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def token_ids(text: str) -> tuple[int, ...]:
        rendered = template.render(
            [{"role": "user", "content": text}], add_generation_prompt=True, continue_final_message=False, extra={}
        )
        return tuple(tokenizer.encode(rendered, add_special_tokens=False))

    questions = QUESTIONS if path is None else read_questions(Path(path))
    return [BenchPrompt(token_ids=token_ids(each.text), category=each.category) for each in questions]


def fitting_prompts(prompts: list[BenchPrompt], most_tokens: int | None) -> list[BenchPrompt]:
    """Select the prompts of at most most_tokens tokens. Raises ConfigError if there is none."""
    fitting = [each for each in prompts if most_tokens is None or len(each.token_ids) <= most_tokens]
    if not fitting:
        shortest = min(len(each.token_ids) for each in prompts)
        raise ConfigError(f"--max-prompt-tokens is {most_tokens}; the shortest prompt has {shortest} tokens")
    return fitting


def read_questions(path: Path) -> list[Question]:
    """Questions of a file: JSON lines with "turns" and "category", as in Spec-Bench, or one text per line.

    Raises ConfigError that names the file, and the line that has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts is {path}; it must be text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"--prompts is {path}; it cannot be read: {error.strerror}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts is {path}; it holds no prompt")
    if path.suffix != ".jsonl":
        return [Question("", line) for _, line in numbered]
    return [_question(line, f"--prompts is {path}; its line {number}") for number, line in numbered]


def _question(line: str, named: str) -> Question:
    """named: how a message begins."""
    try:
        record = json.loads(line)
        return Question(str(record.get("category", "")), str(record["turns"][0]))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f'{named} must be JSON such as {{"category": "chat", "turns": ["Hello"]}}') from None


# Six kinds of four, written for FASER.
_CHAT = (
    "My neighbour's dog barks whenever I leave the house. How do I bring this up without a quarrel?",
    "I have three hours in Lisbon between two trains. What should I see on foot, and in which order?",
    "Why does bread go stale faster in the fridge than on the table? Explain it to a curious ten-year-old.",
    "I want to start running but my knees hurt after a kilometre. What would a sensible first month look like?",
)
_CODE = (
    "Write a Python function that merges two sorted lists into one sorted list, with a docstring and three tests.",
    "Write a SQL query that lists the ten customers with the highest total of orders in 2023, given tables "
    "customers(id, name) and orders(id, customer_id, ordered_on, total).",
    "Explain what this does and rewrite it with a comprehension:\n\nresult = []\nfor row in rows:\n    if row:\n"
    "        for cell in row:\n            result.append(cell.strip().lower())",
    "Implement a bounded queue class in Java with put and take, both blocking, using a lock and two conditions.",
)
_MATH = (
    "A train leaves at 9:15 and travels 210 km at 84 km/h. It stops for 12 minutes on the way. When does it "
    "arrive?",
    "A shop lowers a price by 20 % and later raises it by 20 %. Is it back where it was? Show the steps.",
    "Find all x with 2x² - 7x + 3 = 0 and check them by substitution.",
    "I roll two dice. What is the probability that the sum is at least 9? List the cases.",
)
_SUMMARY = (
    "Summarise in two sentences: The harbour town rebuilt its sea wall after the storm of 1953, using "
    "granite from the quarry above the bay. For decades the wall held, but the quarry closed in the "
    "eighties, and repairs since then were made in concrete. Engineers now find that the concrete cracks "
    "where it meets the stone, because the two expand differently in summer. The council must choose "
    "between reopening a part of the quarry, which residents oppose, and replacing the whole wall, which it "
    "cannot pay for.",
    "Give the three main points as a list: Bees do not see red, but they see ultraviolet. Many flowers that "
    "look plainly yellow to us carry ultraviolet marks that lead to the nectar. Experiments with painted "
    "paper flowers showed that bees learn such marks within a dozen visits and keep to them for days. "
    "Birds, in contrast, see red well; this is one reason why flowers that are pollinated by birds are so "
    "often red.",
    "Write a headline and one sentence: After eleven years of work, volunteers have finished the catalogue "
    "of the village archive. It holds nine thousand letters, four hundred maps and a diary of the miller's "
    "wife that covers the flood of 1882 day by day. From Monday on the catalogue can be searched at the "
    "library.",
    "Shorten to a third of its length and keep all numbers: The survey reached 1,204 households, of which 871 "
    "answered. Of those, 38 percent said that they cycle to work at least once a week, up from 29 percent four "
    "years earlier. The rise was largest in the northern districts, where two new bridges opened in 2021.",
)
_REWRITE = (
    "Correct spelling and grammar, and change nothing else: Yesterday me and him has went to the libary, "
    "but it were allready closed so we sitted down on the stares and eated our sandwichs untill the rain "
    "have started.",
    "Repeat this list with the prices raised by 10 %, same format:\n- apples, 2.00 a kilo\n- pears, 3.00 a "
    "kilo\n- plums, 4.50 a kilo\n- cherries, 9.00 a kilo\n- quinces, 2.50 a kilo\n- figs, 12.00 a kilo",
    "Turn this into JSON with the keys name, born, town and trade, one object a person: Anna Berg, born 1871 in "
    "Husum, weaver. Carl Lund, born 1869 in Ribe, cooper. Ida Holm, born 1880 in Husum, teacher. Jens Krog, "
    "born 1875 in Tønder, miller.",
    "Rename the variable total to amount in this function and give me the whole function back:\n\n"
    "def total_of(orders, rate):\n    total = 0\n    for order in orders:\n        total += order.price * "
    "order.count\n    if total > 100:\n        total = total - 10\n    total = total * (1 + rate)\n    "
    "return round(total, 2)",
)
_FACTS = (
    "What is the capital of Australia, and why is it not Sydney?",
    "Translate into German, sentence by sentence: The letter arrived on Tuesday. Nobody opened it before "
    "Friday. By then the offer had lapsed.",
    "Name the planets of the solar system from the Sun outwards, each with one fact.",
    "Who wrote 'Middlemarch', when did it appear, and what is it about?",
)
_KINDS = {"chat": _CHAT, "code": _CODE, "math": _MATH, "summary": _SUMMARY, "rewrite": _REWRITE, "facts": _FACTS}
QUESTIONS = tuple(
    Question(kind, text)
    for row in zip(*_KINDS.values(), strict=True)
    for kind, text in zip(_KINDS, row, strict=True)
)
