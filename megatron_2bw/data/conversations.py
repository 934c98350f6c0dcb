"""Conversations and instructions to token ids with their targets marked, for --task sft.

Invariant: a conversation is one sequence of int32: a target is stored as its id, any other token as ~id, which is
negative. So the loss mask cannot be separated from its tokens, and the first token, which nothing predicts, is always
negative. A token is a target if its last character is the assistant's.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy

from megatron_2bw.data.encoder import Document
from megatron_2bw.errors import UserError

_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n"
)
_PAIRED = ", paired with an input that provides further context"
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it


class Conversations:
    """The encoder of --task sft. `tokenizer`: a fast one of transformers; `name`: for --tokenizer-model."""

    dtype = numpy.int32

    def __init__(self, tokenizer: Any, name: str):
        self._tokenizer, self._name = tokenizer, name

    @staticmethod
    def encode(taken: list[numpy.ndarray]) -> list[Document]:
        """Each conversation is a document of one sequence."""
        return [(words, [len(words)]) for words in taken]

    def take(self, record: dict) -> tuple[int, numpy.ndarray]:
        """The bytes and the stored sequence of a record. ValueError for a bad one, UserError for an unfit tokenizer."""
        messages = _messages(record)
        if messages is None:
            prompt, completion = _plain(record)
            self._check(prompt, completion)
            text, spans = prompt + completion, [(len(prompt), len(prompt + completion))]
        else:
            self._check(*(message.get("content") for message in messages))
            text, spans = self._rendered(messages, record.get("tools"))
        # A chat template has the special tokens already; a plain text gets those that it would get at inference.
        found = self._tokenizer(
            text, add_special_tokens=messages is None, return_offsets_mapping=True, truncation=False, verbose=False
        )
        ids = found["input_ids"]
        target = [any(start < end <= stop for start, stop in spans) for _, end in found["offset_mapping"]]
        target[:1] = [False]
        if not any(target):
            raise ValueError("it has no text of the assistant, so nothing to learn")
        if messages is None:  # the model learns where to stop
            if ids[-1] != self._tokenizer.eos_token_id:
                ids, target = [*ids, self._tokenizer.eos_token_id], [*target, True]
            target[-1] = True
        words = numpy.array(ids, numpy.int32)
        return len(text.encode()), numpy.where(target, words, ~words)

    @cached_property
    def _special(self) -> re.Pattern:
        tokens = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def _check(self, *texts: object) -> None:
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"a text is {type(text).__name__}, not a string")
            if spelled := self._special.search(text):
                raise ValueError(f"a text spells out the special token {spelled[0]}")

    def _rendered(self, messages: list[dict], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The text of the chat template, and where (in characters, without the end) the assistant's is."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:
            remedy = "give a chat model's, or put a chat_template.jinja into its folder"
            raise UserError(f"--tokenizer-model {self._name}: it has no chat template: {remedy}") from None
        marked = bool(_MARKED.search(template))
        words = dict(tools=tools, chat_template=template, return_assistant_tokens_mask=marked)

        def render(count: int, prompts: bool = False) -> tuple[str, list[tuple[int, int]]]:
            own = words | {"add_generation_prompt": prompts} | self._tokenizer.special_tokens_map
            try:
                texts, spans = render_jinja_template([messages[:count]], **own)
            except Exception as error:  # of jinja2, or of the template's own code
                raise ValueError(f"the chat template refuses it: {str(error) or type(error).__name__}") from error
            return texts[0], spans[0] if marked else []

        text, spans = render(len(messages))
        for number, message in enumerate(messages):
            if message.get("role") == "assistant" and not marked:
                start, end = render(number, prompts=True)[0], render(number + 1)[0]
                if not (text.startswith(end) and end.startswith(start)):
                    remedy = "put {% generation %} and {% endgeneration %} around the assistant's text in the template"
                    begin = f"the chat template renders messages 1 to {number + 1} in another way when others follow"
                    raise ValueError(f"{begin}: {remedy}")
                spans.append((len(start), len(end)))
        return text, spans


def _messages(record: dict) -> list[dict] | None:
    """The messages of a chat, each with role and content; None for a plain form."""
    if record.get("messages") is not None:  # templates take a key with null for one that is there
        return [{name: value for name, value in each.items() if value is not None} for each in record["messages"]]
    if record.get("conversations") is not None:
        return [{"role": _SHAREGPT[each["from"]], "content": each["value"]} for each in record["conversations"]]
    return None


def _plain(record: dict) -> tuple[object, object]:
    """Prompt and completion of a plain form. An instruction is put into the words of Stanford's Alpaca."""
    if record.get("completion") is not None and "prompt" in record:
        return record["prompt"], record["completion"]
    if record.get("output") is None or "instruction" not in record:
        raise ValueError(f"it has the keys {', '.join(record) or 'none'}: give {_FORMS}")
    given = record.get("input")
    paired, more = (_PAIRED, "### Input:\n" + given + "\n\n") if given else ("", "")
    return _ALPACA.format(paired=paired) + record["instruction"] + "\n\n" + more + "### Response:\n", record["output"]
