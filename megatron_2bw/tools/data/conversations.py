"""Conversations and instructions to token ids with their targets marked, for --task
sft.

Invariant: a conversation is one sequence of int32: a target is stored as its id, any
other token as ~id, which is negative. So the loss mask cannot be separated from its
tokens, and the first token, which nothing predicts, is always negative. A token is a
target if its last character is the assistant's.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import numpy

from megatron_2bw.base.errors import UserError
from megatron_2bw.tools.data.encoder import Document

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that "
    "appropriately completes the request."
)
_PAIRED = ", paired with an input that provides further context"
# of ShareGPT
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_ROLES |= {name: name for name in ("user", "assistant", "system", "tool")}
_MASKS = (
    "weight loss_mask loss train training trainable train_on_turn train_detail".split()
)  # of a message that the model does not learn
_FORMS = "messages, conversations, prompt and completion, or instruction and output"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it

# a message as chat templates take it, and whether the model learns it
Turn = tuple[dict, bool]
Spans = list[tuple[int, int]]  # the first character, and the one after the last


class Conversations:
    """The encoder of --task sft. `tokenizer`: a fast one of transformers; `name`: for
    --tokenizer-model."""

    dtype = numpy.int32

    def __init__(self, tokenizer: Any, name: str):
        self._tokenizer, self._name = tokenizer, name

    @staticmethod
    def encode(taken: list[numpy.ndarray]) -> list[Document]:
        """Each conversation is a document of one sequence."""
        return [(words, [len(words)]) for words in taken]

    def take(self, record: dict) -> tuple[int, numpy.ndarray]:
        """The bytes and the stored sequence of a record. ValueError for a bad one,
        UserError for an unfit tokenizer."""
        turns = _turns(record)
        text, spans = (
            self._joined(_plain(record))
            if turns is None
            else self._rendered(turns, _tools(record))
        )
        size = len(text.encode())  # ValueError for half of a surrogate pair
        # A chat template has the special tokens already; a plain text gets those that
        # it would get at inference.
        found = self._tokenizer(
            text,
            add_special_tokens=turns is None,
            return_offsets_mapping=True,
            truncation=False,
            verbose=False,
        )
        ids = found["input_ids"]
        target = [
            any(start < end <= stop for start, stop in spans)
            for _, end in found["offset_mapping"]
        ]
        target[:1] = [False]
        if not any(target):
            raise ValueError("it has no text of the assistant, so nothing to learn")
        if turns is None:  # the model learns where to stop
            if ids[-1] != self._tokenizer.eos_token_id:
                ids, target = [*ids, self._tokenizer.eos_token_id], [*target, True]
            target[-1] = True
        words = numpy.array(ids, numpy.int32)
        return size, numpy.where(target, words, ~words)

    @cached_property
    def _special(self) -> re.Pattern:
        tokens = [
            str(token)
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.special
        ]
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def _check(self, given: object) -> None:
        if spelled := self._special.search(
            json.dumps(given, ensure_ascii=False, default=str)
        ):
            raise ValueError(f"a text spells out the special token {spelled[0]}")

    def _joined(self, pairs: list[tuple[str, str]]) -> tuple[str, Spans]:
        """The text of prompts and answers, and where the answers are. An answer ends
        with eos; the last one's is left out, since some tokenizers add it."""
        self._check(pairs)
        text, spans, eos = "", [], self._tokenizer.eos_token
        for prompt, answer in pairs:
            start = len(text + prompt)
            text += prompt + answer + eos
            spans.append((start, len(text)))
        return text.removesuffix(eos), spans

    def _render(
        self, messages: list[dict], tools: list[dict] | None, prompts: bool = False
    ) -> tuple[str, Spans, bool]:
        """The text of the chat template; what it marks as the assistant's, and whether
        it has such marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:
            remedy = "give a chat model's, or put a chat_template.jinja into its folder"
            raise UserError(
                f"--tokenizer-model {self._name}: it has no chat template: {remedy}"
            ) from None
        if tools and "tools" not in template:
            raise ValueError(
                "the chat template does not show tools: give another template, or leave them out"
            )
        marked = bool(_MARKED.search(template))
        words = dict(
            tools=tools, chat_template=template, return_assistant_tokens_mask=marked
        )
        words |= {"add_generation_prompt": prompts} | self._tokenizer.special_tokens_map
        try:
            texts, spans = render_jinja_template([messages], **words)
        except Exception as error:  # of jinja2, or of the template's own code
            raise ValueError(
                f"the chat template refuses it: {str(error) or type(error).__name__}"
            ) from error
        return texts[0], spans[0] if marked else [], marked

    def _rendered(
        self, turns: list[Turn], tools: list[dict] | None
    ) -> tuple[str, Spans]:
        """The text of the chat template, and where the assistant's is that the model
        learns."""
        messages = [message for message, _ in turns]
        self._check([messages, tools])
        text, spans, marked = self._render(messages, tools)
        for number, (message, learned) in enumerate(turns):
            # it needs no span, or has the template's
            if message["role"] != "assistant" or learned == marked:
                continue
            start = self._render(messages[:number], tools, prompts=not marked)[0]
            end = self._render(messages[: number + 1], tools)[0]
            if not (text.startswith(end) and end.startswith(start)):
                remedy = (
                    "put {% generation %} and {% endgeneration %} around the "
                    "assistant's text in the template"
                )
                remedy = "leave out what masks this message" if marked else remedy
                begin = (
                    f"the chat template renders messages 1 to {number + 1} in another "
                    "way when others follow"
                )
                raise ValueError(f"{begin}: {remedy}")
            if marked:
                spans = [span for span in spans if not len(start) <= span[0] < len(end)]
            else:
                spans.append((len(start), len(end)))
        shown = "".join(text[start:end] for start, end in spans)
        for message, learned in turns:
            for call in message.get("tool_calls", ()):
                if (name := call["function"]["name"]) not in (
                    shown if learned else text
                ):
                    raise ValueError(
                        f"the chat template does not show the call of {name}: give another template"
                    )
        return text, spans


def _turns(record: dict) -> list[Turn] | None:
    """The messages of a chat; None for a plain form."""
    form = next(
        (key for key in ("messages", "conversations") if record.get(key) is not None),
        None,
    )
    if form is None:
        return None
    if not isinstance(record[form], list):
        raise ValueError(
            f"{form} is {type(record[form]).__name__}, not a list of messages"
        )
    turns = [
        _turn(each, f"{form}[{number}]") for number, each in enumerate(record[form])
    ]
    if not record.get("system"):
        return turns
    first = turns[0][0] if turns else {"role": ""}
    if first["role"] != "system":
        return [({"role": "system", "content": _text(record, "system")}, True), *turns]
    if first["content"] != record["system"]:
        raise ValueError(
            f"system and {form}[0] are different system prompts: leave one out"
        )
    return turns


def _turn(given: Any, where: str) -> Turn:
    """A message with role, content and tool_calls. `where`: for errors."""
    if not isinstance(given, dict) or not (given.get("role") or given.get("from")):
        found = (
            f"has the keys {', '.join(given)}"
            if isinstance(given, dict)
            else f"is {type(given).__name__}"
        )
        raise ValueError(f"{where} {found}: give role and content, or from and value")
    # templates take null for a value
    message = {name: value for name, value in given.items() if value is not None}
    masks = {name: message.pop(name) for name in _MASKS if name in message}
    for name, value in masks.items():
        if value not in (0, 1):
            raise ValueError(
                f"{where}.{name} is {value!r}: give 0 (the model does not learn it) or 1"
            )
    if role := message.pop("from", None):
        if role not in _ROLES:
            raise ValueError(f"{where}.from is {role}: give {', '.join(_ROLES)}")
        message["role"] = _ROLES[role]
        message["function_call" if role == "function_call" else "content"] = (
            message.pop("value", None)
        )
    # the last as OpenAI named it before
    other = {"human": "user", "gpt": "assistant", "function": "tool"}
    message["role"] = other.get(message["role"], message["role"])
    _add_calls(message, where)
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        if bad := [
            part
            for part in content
            if not isinstance(part, dict) or not isinstance(part.get("text"), str)
        ]:
            kind = (
                bad[0].get("type")
                if isinstance(bad[0], dict)
                else type(bad[0]).__name__
            )
            raise ValueError(
                f"{where}.content has a part of the type {kind}: the model learns "
                "parts of text only"
            )
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise ValueError(
            f"{where} has {type(content).__name__} as its content: give a string, or tool_calls"
        )
    return message, all(masks.values())


def _add_calls(message: dict, where: str) -> None:
    """Give the message its calls of functions as chat templates take them: arguments as
    an object, not as JSON."""
    try:
        calls = message.pop("tool_calls", [])
        # one call, or in ShareGPT perhaps several, as JSON
        if "function_call" in message:
            one = _parsed(message.pop("function_call"))
            calls = [*calls, *(one if isinstance(one, list) else [one])]
        made = []
        for call in calls:
            function = call.get("function") or call
            function = {
                "name": function["name"],
                "arguments": _parsed(function["arguments"]),
            }
            made.append({**call, "type": "function", "function": function})
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{where}: a call of a function must have name and arguments, in JSON"
        ) from error
    if made:
        message["tool_calls"] = made


def _parsed(value: Any) -> Any:
    return json.loads(value or "{}") if isinstance(value, str) else value


def _tools(record: dict) -> list[dict] | None:
    """The functions that are described to the model, as chat templates take them."""
    try:
        tools = _parsed(record.get("tools") or record.get("functions") or [])
        return [
            tool if "function" in tool else {"type": "function", "function": tool}
            for tool in tools
        ] or None
    except (ValueError, TypeError) as error:
        raise ValueError("tools must be a list of descriptions in JSON") from error


def _plain(record: dict) -> list[tuple[str, str]]:
    """Prompts and answers of a plain form. Instructions are put into the words of
    Stanford's Alpaca."""
    completion = record.get("completion") is not None and "prompt" in record
    if not completion and (record.get("output") is None or "instruction" not in record):
        raise ValueError(
            f"it has the keys {', '.join(record) or 'none'}: give {_FORMS}"
        )
    for key in ("system", "history", "tools") if completion else ("tools",):
        if record.get(key):
            raise ValueError(
                f"{key} has no effect on this form: give messages, or leave it out"
            )
    if completion:
        return [(_text(record, "prompt"), _text(record, "completion"))]
    paired, more = (
        (_PAIRED, f"\n\n### Input:\n{_text(record, 'input')}")
        if record.get("input")
        else ("", "")
    )
    begin = _text(record, "system") if record.get("system") else _ALPACA.format(paired)
    turns = [
        *(record.get("history") or []),
        (_text(record, "instruction") + more, _text(record, "output")),
    ]
    if not all(
        len(turn) == 2 and isinstance(turn[0], str) and isinstance(turn[1], str)
        for turn in turns
    ):
        raise ValueError(
            "history must be a list of pairs: an instruction and its answer"
        )
    pairs = [
        (f"\n\n### Instruction:\n{question}\n\n### Response:\n", answer)
        for question, answer in turns
    ]
    pairs[0] = (begin + pairs[0][0], pairs[0][1])
    return pairs


def _text(record: dict, key: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f"{key} is {type(record[key]).__name__}, not a string")
    return record[key]
