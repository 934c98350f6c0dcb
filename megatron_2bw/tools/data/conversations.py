"""Conversations and instructions to token ids with their targets marked, for --task
sft.

Invariant: a conversation is one sequence of int32: a target is stored as its id, any
other token as ~id, which is negative. So the loss mask cannot be separated from its
tokens, and the first token, which nothing predicts, is always negative. A token is a
target if its last character is the assistant's.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import numpy

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.data.encoder import Document
from megatron_2bw.tools.data.records import Turn, chat, prompts_and_answers, tools_of

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it

_LEAVE_OUT = "leave out what masks this message"
_MARK = (
    "put {% generation %} and {% endgeneration %} around the assistant's text in the "
    "template"
)

# whether the model learns the character that ends at each place of a text
Learned = list[bool]


@dataclass(frozen=True)
class Conversations:
    """The encoder of --task sft. `tokenizer`: a fast one of transformers; `name`: for
    --tokenizer-model."""

    tokenizer: Any
    name: str
    dtype = numpy.int32

    @staticmethod
    def encode(taken: list[numpy.ndarray]) -> list[Document]:
        """Each conversation is a document of one sequence."""
        return [(words, [len(words)]) for words in taken]

    def take(self, record: dict) -> tuple[int, numpy.ndarray]:
        """The bytes and the stored sequence of a record. ValueError for a bad one,
        UserError for an unfit tokenizer."""
        turns = chat(record)
        plain = turns is None
        if plain:
            text, learned = self._joined(prompts_and_answers(record))
        else:
            text, learned = self._rendered(turns, tools_of(record))
        size = len(text.encode())  # ValueError for half of a surrogate pair
        # A chat template has the special tokens already; a plain text gets those that
        # it would get at inference.
        encoded = self.tokenizer(
            text,
            add_special_tokens=plain,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        ids = list(encoded["input_ids"])
        target = [learned[end] for _, end in encoded["offset_mapping"]]
        target[:1] = [False]
        if not any(target):
            raise ValueError("it has no text of the assistant, so nothing to learn")
        if plain:  # the model learns where to stop
            eos = self.tokenizer.eos_token_id
            if ids[-1] != eos:
                ids.append(eos)
                target.append(True)
            target[-1] = True
        words = numpy.array(ids, numpy.int32)
        return size, numpy.where(target, words, ~words)

    @cached_property
    def _special(self) -> list[str]:
        tokens = self.tokenizer.added_tokens_decoder.values()
        return [str(token) for token in tokens if token.special]

    def _check(self, content: object) -> None:
        text = json.dumps(content, ensure_ascii=False, default=str)
        for token in self._special:
            if token in text:
                raise ValueError(f"a text spells out the special token {token}")

    def _joined(self, pairs: list[tuple[str, str]]) -> tuple[str, Learned]:
        """The text of prompts and answers. An answer ends with eos; the last one's is
        left out, since some tokenizers add it."""
        self._check(pairs)
        eos = self.tokenizer.eos_token
        text = ""
        learned = [False]
        for prompt, answer in pairs:
            answer += eos
            text += prompt + answer
            learned += [False] * len(prompt) + [True] * len(answer)
        return text.removesuffix(eos), learned

    def _render(
        self, messages: list[dict], tools: list | None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """The text of the chat template, and what it marks as the assistant's; None if
        it has no marks. With `prompt` it ends with the start of an answer."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise UserError(
                f"--tokenizer-model {self.name}: it has no chat template: "
                "give a chat model's, or put a chat_template.jinja into its folder"
            ) from None
        if tools and "tools" not in template:
            raise ValueError(
                "the chat template does not show tools: give another template, or leave them out"
            )
        marked = bool(_MARKED.search(template))
        try:
            texts, spans = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # of jinja2, or of the template's own code
            reason = str(error) or type(error).__name__
            raise ValueError(f"the chat template refuses it: {reason}") from error
        return texts[0], spans[0] if marked else None

    def _rendered(self, turns: list[Turn], tools: list | None) -> tuple[str, Learned]:
        """The text of the chat template."""
        messages = [turn.message for turn in turns]
        self._check([messages, tools])
        text, marks = self._render(messages, tools)
        marked = marks is not None
        learned = [False] * (len(text) + 1)
        for start, end in marks or ():
            learned[start + 1 : end + 1] = [True] * (end - start)
        for number, turn in enumerate(turns):
            # it has no target, or the template's
            if turn.message["role"] != "assistant" or turn.learned == marked:
                continue
            before, _ = self._render(messages[:number], tools, prompt=not marked)
            after, _ = self._render(messages[: number + 1], tools)
            if not (text.startswith(after) and after.startswith(before)):
                remedy = _LEAVE_OUT if marked else _MARK
                raise ValueError(
                    f"the chat template renders messages 1 to {number + 1} in another "
                    f"way when others follow: {remedy}"
                )
            size = len(after) - len(before)
            learned[len(before) + 1 : len(after) + 1] = [turn.learned] * size
        _check_calls(turns, text, learned)
        return text, learned


def _check_calls(turns: list[Turn], text: str, learned: Learned) -> None:
    """A ValueError if the text has no call of a function that a message has."""
    targets = "".join(compress(text, learned[1:]))
    for turn in turns:
        for call in turn.message.get("tool_calls", ()):
            name = call["function"]["name"]
            if name not in (targets if turn.learned else text):
                raise ValueError(
                    f"the chat template does not show the call of {name}: give another template"
                )
