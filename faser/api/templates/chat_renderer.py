"""ChatRenderer: checks the messages of a chat and renders them as a prompt, with the model's chat template."""

from collections.abc import Mapping
from typing import Any

from faser.api.protocol.chat import read_messages
from faser.api.templates.chat_template import ChatTemplate, choose_template
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError

_NEUTRAL: tuple[Any, ...] = ("none", [])
_HINTS = ("reasoning_effort",)  # without effect on a model whose template does not use it


class ChatRenderer:
    """The chat template of a server. Rendering has no state, so threads may share it."""

    def __init__(self, tokenizer: Tokenizer, override: str | None) -> None:
        """override: replaces the model's template. Raises ModelError if the template does not compile."""
        self._no_template: RequestError | None = None
        try:
            self._source = (
                override if override is not None else choose_template(tokenizer.chat_template, with_tools=False)
            )
        except RequestError as error:
            self._no_template, self._source = error, ""
        self._template = ChatTemplate(self._source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        template_kwargs: Mapping[str, Any] | None,
        template_fields: Mapping[str, Any],
    ) -> str:
        """The prompt. template_fields: fields of the request that only a template can use; None is absent.

        Raises RequestError: there is no template, it refuses the messages, or does not use a given field.
        """
        if self._no_template is not None:
            raise RequestError(str(self._no_template), param="messages")
        given = {name: value for name, value in template_fields.items() if value is not None}
        for name, value in given.items():
            if name not in self._source and value not in _NEUTRAL and name not in _HINTS:
                raise RequestError(
                    f"`{name}` is not supported: this model's chat template does not use it", param=name
                )
        continues = bool(continue_final_message)
        return self._template.render(
            [self._known_role(message) for message in read_messages(messages)],
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            extra={**(template_kwargs or {}), **given},
        )

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """OpenAI renamed the role system to developer; older templates know only system."""
        if message["role"] != "developer" or "developer" in self._source:
            return message
        return {**message, "role": "system"}
