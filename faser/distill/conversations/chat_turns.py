"""ChatTurns: where the user's turn begins and ends in a model's chat template.

A model that was trained on whole conversations continues a prompt that ends where the user's turn begins with a
question of its own (arXiv 2406.08464). Knows no engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from faser.api.requests.chat_template import ChatTemplate
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ModelError, RequestError

_MARK = "\ue000question\ue001"  # no template treats private characters in a way of its own


class ChatTurns:
    """The turns of one model. Raises ModelError for a model without a chat template, or with one that hides turns.

    question_ends: ids of the tokens that end a question. stop_texts: texts that do, where no token does.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        source = tokenizer.chat_template
        if isinstance(source, Mapping):
            source = source.get("default")
        if not isinstance(source, str):
            raise ModelError(
                "the model has no chat template, so it cannot be asked for questions: give one with "
                "--chat-template, or text to learn from with --from-traffic"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        before, found, after = self._render([{"role": "user", "content": _MARK}]).partition(_MARK)
        if not found:
            raise ModelError("the chat template leaves out what a user says; give another with --chat-template")
        first = tokenizer.encode(after, add_special_tokens=False)[:1]
        special = [each for each in first if tokenizer.is_special(each)]
        self.question_ends = tuple(sorted({*eos_token_ids, *special}))
        # Without a token that ends the turn, the first line that the template writes after it does.
        self.stop_texts = () if special else tuple(filter(None, [after.strip().partition("\n")[0]]))
        self._before, self._after = before, after

    def question_prompt(self, beginning: str) -> list[int]:
        """The tokens that a question continues. beginning: its first words; may be empty."""
        return self._tokenizer.encode(self._before + beginning, add_special_tokens=False)

    def answer_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that the answer to a conversation continues. Raises RequestError if the template refuses."""
        return self._tokenizer.encode(self._render(messages), add_special_tokens=False)

    def question_of(self, prompt: Sequence[int]) -> str:
        """The user's text in the prompt of a conversation of one turn."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return text.removeprefix(self._before).removesuffix(self._after)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(
                messages, add_generation_prompt=True, continue_final_message=False, extra={}
            )
        except RequestError as error:
            raise RequestError(f"the model's chat template refuses a conversation: {error}") from None
