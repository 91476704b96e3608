"""Conversation: the messages so far; and talk, which reads questions from the terminal or from a script.

If the input is not a terminal, every line is a question and every answer ends with a newline, for scripts.
"""

import sys
from collections.abc import Iterator
from typing import TextIO

from faser.cli.chat.answerer import Answerer, Message
from faser.errors import FaserError

PROG = "faser chat"


class Conversation:
    """The messages so far. A question whose answer failed is forgotten; a stopped answer is kept."""

    def __init__(self, answerer: Answerer, *, system_prompt: str | None = None) -> None:
        self._answerer = answerer
        self._initial: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages = list(self._initial)

    def reset(self) -> None:
        self.messages = list(self._initial)

    def ask(self, question: str, out: TextIO) -> bool:
        """Print the answer to a question as it arrives. False: it failed, and stderr has the reason."""
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        pieces = self._answerer.answer(messages)
        try:
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True, file=out)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=out)
        except FaserError as error:
            print(f"{PROG}: {error}", file=sys.stderr)
            return False
        finally:
            pieces.close()
        print(file=out)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return True


def talk(conversation: Conversation, source: TextIO, out: TextIO) -> int:
    """Answer each line of the input; returns the exit status: 1 if a question of a script failed."""
    interactive = source.isatty()
    failed = False
    for line in _typed() if interactive else source:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/reset":
                conversation.reset()
            case command if command.startswith("/") and interactive:
                print(f"{PROG}: unknown command {command}; known are /reset and /exit", file=sys.stderr)
            case question:
                failed |= not conversation.ask(question, out)
    return 1 if failed and not interactive else 0


def _typed() -> Iterator[str]:
    """Lines from the terminal, with editing and history. Ctrl-C drops a line, Ctrl-D ends the input."""
    import readline  # importing it changes input(), so only a terminal imports it

    readline.set_auto_history(True)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
