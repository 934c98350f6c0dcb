"""The forms of a conversation or an instruction in a dataset, as chat templates take
them.

Invariant: a record that is read has all its texts; a bad one raises ValueError, and
what has no effect on its form is refused.
"""

import json
from typing import Any, NamedTuple

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that "
    "appropriately completes the request."
)
_PAIRED = ", paired with an input that provides further context"
# the last is OpenAI's of before, the others are ShareGPT's
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
_KNOWN = ("user", "assistant", "system", "tool")
_MASKS = (
    "weight loss_mask loss train training trainable train_on_turn train_detail".split()
)  # of a message that the model does not learn
_FORMS = "messages, conversations, prompt and completion, or instruction and output"


class Turn(NamedTuple):
    """A message with role, content and tool_calls, as chat templates take it, and
    whether the model learns it."""

    message: dict
    learned: bool


def chat(record: dict) -> list[Turn] | None:
    """The messages of a chat; None for a plain form."""
    form = "messages" if record.get("messages") is not None else "conversations"
    if record.get(form) is None:
        return None
    turns = []
    for number, entry in enumerate(record[form]):
        try:
            turns.append(_turn(entry))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = error if type(error) is ValueError else repr(error)
            raise ValueError(f"{form}[{number}]: {reason}") from error
    system = record.get("system")
    if not system:
        return turns
    if not turns or turns[0].message["role"] != "system":
        return [_turn({"role": "system", "content": system}), *turns]
    if turns[0].message["content"] != system:
        raise ValueError(
            f"system and {form}[0] are different system prompts: leave one out"
        )
    return turns


def _turn(entry: dict) -> Turn:
    # templates take null for a value
    message = {name: value for name, value in entry.items() if value is not None}
    learned = True
    for name in _MASKS:
        value = message.pop(name, 1)
        if value not in (0, 1):
            raise ValueError(
                f"{name} is {value!r}: give 0 (the model does not learn it) or 1"
            )
        learned = learned and bool(value)
    sender = message.pop("from", None)
    if sender:
        field = "function_call" if sender == "function_call" else "content"
        message[field] = message.pop("value", None)
    role = sender or message.get("role")
    if not role:
        raise ValueError("it has no role: give role and content, or from and value")
    message["role"] = _ROLES.get(role, role)
    if sender and message["role"] not in _KNOWN:
        raise ValueError(f"from is {sender}: give {', '.join(_ROLES)}")
    calls = _calls(message)
    if calls:
        message["tool_calls"] = calls
    content = message.get("content", "" if calls else None)
    if isinstance(content, list):  # parts
        message["content"] = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise ValueError(
            f"it has {type(content).__name__} as its content: give a string, or tool_calls"
        )
    return Turn(message, learned)


def _calls(message: dict) -> list[dict]:
    """The message's calls of functions, which it loses, as chat templates take them:
    arguments as an object, not as JSON."""
    calls = message.pop("tool_calls", [])
    # one call, or in ShareGPT perhaps several, as JSON
    if "function_call" in message:
        one = _parsed(message.pop("function_call"))
        calls = calls + (one if isinstance(one, list) else [one])
    made = []
    for call in calls:
        function = call.get("function") or call
        arguments = _parsed(function["arguments"])
        function = {"name": function["name"], "arguments": arguments}
        made.append({**call, "type": "function", "function": function})
    return made


def _parsed(value: Any) -> Any:
    return json.loads(value or "{}") if isinstance(value, str) else value


def tools_of(record: dict) -> list[dict] | None:
    """The functions that are described to the model, as chat templates take them."""
    tools = []
    try:
        for tool in _parsed(record.get("tools") or record.get("functions") or []):
            if "function" not in tool:
                tool = {"type": "function", "function": tool}
            tools.append(tool)
    except (ValueError, TypeError) as error:
        raise ValueError("tools must be a list of descriptions in JSON") from error
    return tools or None


def prompts_and_answers(record: dict) -> list[tuple[str, str]]:
    """The texts of a plain form. Instructions are put into the words of Stanford's
    Alpaca."""
    completion = record.get("completion") is not None and "prompt" in record
    if not completion and (record.get("output") is None or "instruction" not in record):
        keys = ", ".join(record) or "none"
        raise ValueError(f"it has the keys {keys}: give {_FORMS}")
    for key in ("system", "history", "tools") if completion else ("tools",):
        if record.get(key):
            raise ValueError(
                f"{key} has no effect on this form: give messages, or leave it out"
            )
    if completion:
        turns = [(record["prompt"], record["completion"])]
    else:
        turns = [*(record.get("history") or []), _instruction(record)]
    for turn in turns:
        if list(map(type, turn)) != [str, str]:
            raise ValueError(f"{turn} are not two strings, a prompt and its answer")
    if completion:
        return turns
    begin = record.get("system")
    if not begin:
        begin = _ALPACA.format(_PAIRED if record.get("input") else "")
    pairs = []
    for question, answer in turns:
        prompt = "\n\n### Instruction:\n" + question + "\n\n### Response:\n"
        pairs.append((begin + prompt, answer))
        begin = ""
    return pairs


def _instruction(record: dict) -> tuple[str, str]:
    text = record["instruction"]
    if record.get("input"):
        text += "\n\n### Input:\n" + record["input"]
    return text, record["output"]
