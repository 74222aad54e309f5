"""Conversations as tokens and masks, for tools/prepare_data.py --chat.

transformers renders a conversation with its chat template. The assistant's messages are learned: what the template has in
{% generation %} or, without that, what a message adds to the text before it.
"""
import functools
import importlib.util
import json
import os
import pathlib
import re

GENERATION = re.compile(r"{%[-+]?\s*generation\b")
ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool"}
CONTENT = {"content", "tool_calls", "reasoning_content", "reasoning", "thinking"}  # a message has one of these
FLAGS = {"weight", "train", "trainable", "loss", "loss_mask"}  # of a message; 0: it is not learned
REFUSED = "weight", "chosen", "rejected", "label", "image", "images", "video", "videos", "audio", "audios"  # of a record


def message_of(message, number):
    """A message as transformers has it, from the notations of OpenAI and ShareGPT, and whether its flags let it be learned."""
    message = {{"from": "role", "value": "content"}.get(name, name): value for name, value in message.items() if value is not None}
    calls = json.loads(message.pop("content", "")) if message.get("role") == "function_call" else message.pop("function_call", [])
    if calls:
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    content = message.get("content", "" if CONTENT & message.keys() else None)
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        message["content"] = content = "".join(part["text"] for part in content)
    for name, value in ("role", message.get("role")), ("content", content):
        if not isinstance(value, str):
            raise ValueError(f"the {name} of message {number} is {value!r:.40}, which is no text")
    message["role"], flags = ROLES.get(message["role"], message["role"]), {name: message.pop(name) for name in FLAGS & message.keys()}
    for name, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"the {name} of message {number} is {value!r:.40}: only 0, 1, false and true have a meaning")
    return message, all(flags.values())


def messages_of(record, field):
    """The messages, which of them are learned, and how many are only a prompt."""
    prompt, messages = [], record.get(field, record.get("conversations"))
    if field not in record and "prompt" in record and "completion" in record:
        prompt, messages = ([{"role": role, "content": record[name]}] if isinstance(record[name], str) else record[name]
                            for role, name in (("user", "prompt"), ("assistant", "completion")))
    if messages is None:
        raise ValueError(f"the record has no field {field}; it has {', '.join(sorted(record))}: name one with --messages-field")
    if not all(isinstance(part, list) and all(isinstance(message, dict) for message in part) for part in (prompt, messages)):
        raise ValueError("the conversation is no list of messages with role and content")
    system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    made = [message_of(message, number) for number, message in enumerate(system + prompt + messages)]
    start = len(system + prompt) if prompt else 0
    learned = {i: flag for i, (message, flag) in enumerate(made) if message["role"] == "assistant" and i >= start}
    return [message for message, _ in made], learned, start


def field_of(record, name, kind):
    """A list or dict, which may be written as JSON; an empty one if the field is absent."""
    value = record.get(name) or kind()
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, kind):
        raise ValueError(f"the field {name} is {value!r:.40}, which is no {'list' if kind is list else 'object'}")
    return value


def training_template(template):
    """TRL's template that marks the answers, if TRL is installed and has one for this. Importing TRL would take seconds."""
    trl = not GENERATION.search(template) and importlib.util.find_spec("trl")
    for path in sorted(pathlib.Path(trl.origin).parent.glob("chat_templates/*_training.jinja")) if trl else []:
        plain = path.with_name(path.name.replace("_training", ""))
        if plain.exists() and plain.read_text(encoding="utf-8") == template:
            return path.read_text(encoding="utf-8")
    return template


class Chat:
    """Reads and encodes conversations, with transformers' tokenizer and what is known of it."""

    def __init__(self, tokenizer, tokens, options):
        from transformers.utils.chat_template_utils import mark_control_tokens, render_jinja_template
        self.engine, self.tokens, self.options, self.variables = tokens.engine, tokens, options, tokenizer.special_tokens_map
        self.mark, self.render_jinja, own = mark_control_tokens, render_jinja_template, tokenizer.chat_template
        self.templates = {name: training_template(text) for name, text in (own if isinstance(own, dict) else {"default": own}).items()}
        start, end = self.mark("x", re.compile("x")).split("x")
        self.marked = re.compile(f"{start}({tokens.named.pattern}){end}|[{start}{end}]")

    def render(self, template, messages, more, prompt=False):
        texts, spans = self.render_jinja([messages], chat_template=template, add_generation_prompt=prompt, **self.variables | more,
                                         return_assistant_tokens_mask=GENERATION.search(template) is not None)
        return texts[0], spans[0] if spans else None

    @functools.cache
    def takes_strings(self, template):
        """Some templates show only content that is a list of parts."""
        def shows(content):
            try:
                return "probe" in self.render(template, [{"role": "user", "content": content}], {})[0]
            except TimeoutError:
                raise
            except Exception:
                return False
        return shows("probe") or not shows([{"type": "text", "text": "probe"}])

    def guard(self, value):
        """The value with marks around names of special tokens, which stay text."""
        names = set(self.tokens.named.findall(json.dumps(value, ensure_ascii=False)))
        for name in names:
            if self.tokens.special[name] in self.encode_part(name, True, False)[0]:
                raise ValueError(f"the tokenizer cannot keep {name} as text; remove it, or give --parse-special")
        return self.mark(value, self.tokens.named) if names else value

    def read(self, record):
        """The text up to the last answer, the spans that are learned, and those in them that are not; None: nothing is learned."""
        for name in REFUSED:
            if record.get(name) not in (None, 1):
                raise ValueError(f"the field {name} would change what is learned, which is not supported: remove it")
        field, eos = self.options.messages_field, self.tokens.end
        if field not in record and all(isinstance(record.get(name), str) for name in ("prompt", "completion")):
            prompt, answer = self.tokens.prefix + self.guard(record["prompt"]), self.guard(record["completion"].removesuffix(eos))
            return prompt + answer + eos, [(len(prompt), len(prompt + answer + eos))], []  # as TRL: without a template
        messages, learned, prompt = messages_of(record, field)
        if not any(learned.values()):
            return None
        tools = field_of(record, "tools", list) + [{"type": "function", "function": f} for f in field_of(record, "functions", list)]
        more = field_of(record, "chat_template_kwargs", dict)
        more |= {"tools": tools or None, "documents": field_of(record, "documents", list) or None}
        name = more.pop("chat_template", "tool_use" if tools and "tool_use" in self.templates else "default")
        if name not in self.templates:
            raise ValueError(f"there is no chat template {name}; there is {', '.join(self.templates)}")
        messages = messages[:max(i for i, wanted in learned.items() if wanted) + 1]
        if not self.takes_strings(self.templates[name]):
            messages = [message | {"content": [{"type": "text", "text": message.get("content", "")}]} for message in messages]
        return self.spans_of(self.templates[name], *self.guard([messages, more]), learned, prompt)

    def spans_of(self, template, messages, more, learned, prompt):
        text, spans = self.render(template, messages, more)

        def end_of(count, answer=False):
            """Where the first `count` messages end in the text. After the last message a template may add the end of the text,
            and before an answer what this answer does not have, such as <think>."""
            if count == len(messages):
                return len(text)
            opened = self.render(template, messages[:count], more, True)[0] if answer and count else ""
            if answer and text.startswith(opened):
                return len(opened)
            part = self.render(template, messages[:count], more)[0] if count else ""
            part = part if text.startswith(part) else part.removesuffix(self.tokens.end)
            if not text.startswith(part):
                raise ValueError("the chat template changes earlier messages when later ones come, so that answers cannot be told "
                                 "from the rest; give a --chat-template that has them in {% generation %}")
            return max(len(part), len(os.path.commonprefix([opened, text])))

        if spans is None:
            return text, [(end_of(i, True), end_of(i + 1)) for i, wanted in learned.items() if wanted], []
        off = [(end_of(i), end_of(i + 1)) for i, wanted in learned.items() if not wanted and i < len(messages)]
        return text, spans, [(0, end_of(prompt, True))] * (prompt > 0) + off

    def encode_part(self, text, named, first):
        """Ids and offsets. A newline, where it is a token of its own, keeps a space from being put before a later part."""
        self.engine.encode_special_tokens, before = named, "" if first else "\n"
        newline = self.engine.encode(before, add_special_tokens=False).ids
        encoding = self.engine.encode(before + text, add_special_tokens=False)
        if encoding.ids[:len(newline)] != newline:
            encoding, newline, before = self.engine.encode(text, add_special_tokens=False), [], ""
        self.engine.encode_special_tokens = False
        return encoding.ids[len(newline):], [(max(a - len(before), 0), b - len(before)) for a, b in encoding.offsets[len(newline):]]

    def encode_parts(self, text):
        """Ids and offsets. Marked names are encoded apart, as transformers does with sanitize_control_tokens."""
        parts, at, ids, offsets = [], 0, [], []
        for mark in self.marked.finditer(text):
            parts += [(at, text[at:mark.start()], False), (mark.start(1), mark[1], True)]
            at = mark.end()
        for at, part, named in [*parts, (at, text[at:], False)]:
            made = self.encode_part(part, named, at == 0) if part else ([], [])
            ids += made[0]
            offsets += [(start + at, end + at) for start, end in made[1]]
        return ids, offsets

    def encode(self, read, report):
        """Of each conversation its ids, whether they count, and the special tokens that end what is learned."""
        plain = iter(self.engine.encode_batch([text for text, _, _ in read if not self.marked.search(text)], add_special_tokens=False))
        for text, spans, off in read:
            marks = len(self.marked.findall(text))
            report["named"] += marks
            encoding = None if marks else next(plain)
            ids, offsets = self.encode_parts(text) if marks else (encoding.ids, encoding.offsets)
            yield ids, *self.mask(text, ids, offsets, spans, off)

    def mask(self, text, ids, offsets, spans, off):
        """A token counts with any of its characters, as in transformers."""
        counts, ends, stops = [0] * len(ids), set(), self.tokens.special_ids
        for value, places in (1, spans), (0, off):
            at = 0
            for start, end in places:
                while at < len(ids) and offsets[at][1] <= start:
                    at += 1
                while at < len(ids) and offsets[at][0] < end:
                    counts[at], at = value + (value and offsets[at][1] <= end), at + 1  # 2: with all of its characters
        for last in range(len(ids)):
            if counts[last] and not any(counts[last + 1:last + 2]):  # back to a special token with only spaces after it
                while last and (counts[last] == 1 or ids[last] not in stops and not text[slice(*offsets[last])].strip()):
                    last -= 1
                ends |= {ids[last]} & stops if counts[last] == 2 else set()
        return counts, ends
