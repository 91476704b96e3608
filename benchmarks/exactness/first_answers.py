"""A newcomer's first answers: thirty ordinary questions to the default model, by several sampling defaults.

    python -m benchmarks exactness.first_answers OUT.json [--tries 6] [--tokens 256]

Every arm is an engine of its own with default flags; questions are asked one at a time, with the seeds 0, 1, ….
An answer is sane if it ends by itself within --tokens, repeats no word ten times in a row and no four words five
times, and has no letters but Latin ones. It is right if it is sane and has as many of the expected words as the
question asks for among its first ones; that does not say that the rest is true.
"""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import model_directory
from benchmarks.runner import about, command_line, write_json
from faser import LLM, SamplingParams
from faser.outputs import CompletionOutput

CARD = {"temperature": 0.2, "top_p": 0.9}
ARMS: dict[str, dict[str, float]] = {
    "card": CARD,
    "greedy": {"temperature": 0.0},
    "greedy, repetition_penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, frequency_penalty 0.2": {"temperature": 0.0, "frequency_penalty": 0.2},
}
_IN_A_ROW, _RUN, _MOST_RUNS = 10, 4, 5


@dataclass(frozen=True, slots=True)
class Question:
    """expected: in small letters; a right answer has at least `least` of them among its first `within` words."""

    text: str
    expected: tuple[str, ...]
    least: int = 1
    within: int = 30


_RIVERS = ("danube", "rhine", "thames", "seine", "volga", "loire", "elbe", "rhone", "rhône", "tagus", "ebro")
_MORE_RIVERS = ("dnieper", "don", "po", "oder", "vistula", "tiber", "garonne", "main", "douro", "mosel")
_PLANETS = ("mercury", "venus", "earth", "mars", "jupiter", "saturn", "uranus", "neptune")
_COLOURS = ("red", "orange", "yellow", "green", "blue", "indigo", "violet", "purple")
_FRUIT = (
    "apples",
    "bananas",
    "oranges",
    "grapes",
    "strawberries",
    "mangoes",
    "pears",
    "apple",
    "banana",
    "orange",
)
QUESTIONS = (
    Question("What is the capital of France?", ("paris",)),
    Question("Name three rivers of Europe.", _RIVERS + _MORE_RIVERS, least=3, within=150),
    Question("Write a haiku about the sea.", ("sea", "ocean", "wave", "waves", "tide", "tides", "shore")),
    Question("Explain what a CPU does in one sentence.", ("instructions", "processing", "processes", "executes")),
    Question("Translate 'good morning' into Spanish.", ("buenos",)),
    Question("What is 2 + 2?", ("4", "four")),
    Question("Who wrote Romeo and Juliet?", ("shakespeare",)),
    Question("What colour is the sky on a clear day?", ("blue",)),
    Question("Hello! Who are you?", ("assistant", "ai", "smollm", "chatbot")),
    Question("Write a Python function that adds two numbers.", ("def", "return"), least=2),
    Question("What is the largest planet in our solar system?", ("jupiter",)),
    Question("How many days are there in a week?", ("7", "seven")),
    Question("What is the chemical formula of water?", ("h2o", "h₂o")),
    Question("Name three primary colours.", _COLOURS, least=3),
    Question("What is the opposite of hot?", ("cold",)),
    Question("Who was the first president of the United States?", ("washington",)),
    Question("What is the capital of Japan?", ("tokyo",)),
    Question("Give me three tips for sleeping better.", ("sleep", "bed", "bedtime", "relaxing", "routine")),
    Question("Write one sentence about a cat.", ("cat",)),
    Question("What do bees make?", ("honey",)),
    Question("List five fruits.", _FRUIT, least=3),
    Question("What is photosynthesis?", ("plants", "light", "sunlight")),
    Question("Say hello in French.", ("bonjour", "salut")),
    Question("How do I boil an egg?", ("water", "boil", "boiling", "pot")),
    Question("What is the speed of light?", ("299", "300", "186")),
    Question("Tell me a short joke.", ("why", "what", "knock", "because")),
    Question("Name four planets.", _PLANETS, least=4, within=150),
    Question("What is a prime number?", ("divisible", "divisors", "1", "factors")),
    Question("Summarise the story of Cinderella in two sentences.", ("cinderella",)),
    Question("What is the tallest mountain on Earth?", ("everest",)),
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tries", type=int, default=6, help="of each question (default 6)")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of an answer (default 256)")
    options = parser.parse_args()
    arms = {name: _arm(sampling, options.tries, options.tokens) for name, sampling in ARMS.items()}
    write_json(options.out, {**about("exactness.first_answers"), "rule": __doc__, "arms": arms})
    for name, found in arms.items():
        print(f"{name:<32} {found['sane']:>3} sane, {found['right']:>3} right of {found['answers']}")


def _arm(sampling: dict[str, float], tries: int, num_tokens: int) -> dict[str, Any]:
    """All answers with one set of sampling parameters, and how many of them are sane and right."""
    answers: list[dict[str, Any]] = []
    with LLM(str(model_directory(None))) as model:
        for number in range(tries):
            for question in QUESTIONS:
                params = SamplingParams(**sampling, seed=number, max_tokens=num_tokens)
                (answer,) = model.chat([[{"role": "user", "content": question.text}]], params)
                sample = answer.outputs[0]
                answers.append(_judged(question, sample, number))
    return {
        "sampling": sampling,
        "answers": len(answers),
        "sane": sum(not each["faults"] for each in answers),
        "right": sum(each["right"] for each in answers),
        "first_question_right": sum(each["right"] for each in answers if each["question"] == QUESTIONS[0].text),
        "faults": dict(Counter(fault for each in answers for fault in each["faults"])),
        "said": answers,
    }


def _judged(question: Question, sample: CompletionOutput, seed: int) -> dict[str, Any]:
    found = faults(sample.text, ended=sample.finish_reason == "stop")
    return {
        "question": question.text,
        "seed": seed,
        "faults": found,
        "right": not found and is_right(question, sample.text),
        "text": sample.text,
    }


def faults(text: str, *, ended: bool) -> list[str]:
    """Return the faults of an answer, whatever was asked. ended: it ended by itself."""
    words = re.findall(r"\w+", text.lower())
    found = [] if ended else ["does not end"]
    if not words:
        found.append("is empty")
    rows = [words[i : i + _IN_A_ROW] for i in range(len(words) - _IN_A_ROW + 1)]
    runs = Counter(tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1))
    if any(len(set(row)) == 1 for row in rows) or max(runs.values(), default=0) >= _MOST_RUNS:
        found.append("repeats itself")
    if not all("LATIN" in unicodedata.name(each, "") for each in text if each.isalpha()):
        found.append("has other letters")
    return found


def is_right(question: Question, text: str) -> bool:
    words = re.findall(r"\w+", text.lower())[: question.within]
    return len(set(words).intersection(question.expected)) >= question.least
