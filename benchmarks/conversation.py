"""Questions to prompts, by the target's own tokenizer and chat template, as the service renders them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.system import Ask
from service.chat_template import ChatTemplate
from service.tokenizer import Tokenizer


class Prompter:
    """Renders conversations for systems that take token ids."""

    def __init__(self, model_folder: Path) -> None:
        """Raises ValueError if the folder has no tokenizer or no chat template."""
        self._tokenizer = Tokenizer.load(model_folder)
        template = ChatTemplate.load(model_folder)
        if template is None:
            raise ValueError(f"{model_folder} has no chat template; questions are chats and need one")
        self._template = template

    def ask(self, users: Sequence[str], answers: Sequence[Sequence[int]], *, num_tokens: int, seed: int) -> Ask:
        """The turn that the last of `users` opens, behind earlier turns and the token ids that answered them."""
        messages = []
        for index, user in enumerate(users):
            messages.append({"role": "user", "content": user})
            if index < len(answers):
                messages.append({"role": "assistant", "content": self._tokenizer.decode(answers[index])})
        protected = [{**message, "content": self._tokenizer.protect(message["content"])} for message in messages]
        token_ids = self._tokenizer.encode_rendered(self._template.render(protected))
        return Ask(messages=messages, token_ids=token_ids, num_tokens=num_tokens, seed=seed)
