"""Chat templates: a conversation as the one text that a model's makers trained it on.

Owns the Jinja sandbox and the helpers that public templates use. Knows nothing of tokens: that message text never
becomes a control token is tokenizer.py's care. Start at `ChatTemplate.render`.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime


class ChatTemplate:
    """A model's own Jinja template, rendered in a sandbox with the helpers that public templates use."""

    def __init__(self, source: str, named: Mapping[str, str]):
        self._named = named
        try:
            self._template = jinja_environment().from_string(source)
        except Exception as error:  # Jinja's own, Python's where it compiles the template, recursion
            raise ValueError(f"the model's chat template is not valid: {one_line(error)}") from error

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool, open_end: bool, mark: str) -> str:
        """The text of a conversation. open_end: cut after the last message. mark: a character not used in messages."""
        if not messages:
            raise ValueError("the conversation has no messages: give at least one")
        text = self._render(messages, add_generation_prompt)
        if not open_end:
            return text
        # Searching for the last message's text could find an earlier copy of it, or one that was trimmed.
        # What follows the mark in a second rendering is what follows the message.
        _, found, rest = self._render(mark_end(messages, mark), add_generation_prompt).rpartition(mark)
        if not found or not text.endswith(rest):
            raise ValueError("the last message cannot be continued: the chat template does not show it as it is")
        return text.removesuffix(rest)

    def _render(self, messages: Sequence[Mapping], add_generation_prompt: bool) -> str:
        import jinja2
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, tools=None,
                                         documents=None, **self._named)
        except Exception as error:  # a template is a program, it can fail in any way
            # What raise_exception says, or the name of an unknown function, or else.
            does = "refuses" if isinstance(error, jinja2.TemplateError) else "failed on"
            raise ValueError(f"the model's chat template {does} this conversation: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def map_texts(value, change: Callable[[str], str]):
    """A copy of a JSON value with every text in it changed. Keys, roles and types that are plain words are no text:
    they are names that a template goes by."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key if is_name(key) else change(key):
                item if key in ("role", "type") and is_name(item) else map_texts(item, change)
                for key, item in value.items()}
    return [map_texts(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def is_name(value: object) -> bool:
    return not isinstance(value, str) or value.isidentifier()


def mark_end(messages: Sequence[Mapping], mark: str) -> list[Mapping]:
    content = messages[-1].get("content")
    if isinstance(content, str):
        content += mark
    elif isinstance(content, Sequence) and content and isinstance(content[-1], Mapping) and (
            isinstance(content[-1].get("text"), str)):
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise ValueError("the last message has no text to continue")
    return [*messages[:-1], {**messages[-1], "content": content}]


def jinja_environment():
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks for training what the assistant says; here it changes nothing."""
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(text: str):
        raise jinja2.TemplateError(text)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=["jinja2.ext.loopcontrols", Generation])
    made.filters["tojson"] = tojson  # Jinja's own escapes for HTML
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
