#!/usr/bin/env python3
"""Makes token shards for ./train from text, JSON lines, Parquet or conversations.

    tools/prepare_data.py corpus/ --tokenizer gpt2/ --out shards
    tools/prepare_data.py 'web/*.parquet' --field text --train-tokenizer 32000 --out shards
    tools/prepare_data.py chats.jsonl --chat --tokenizer Llama-3.2-1B-Instruct/ --out sft
    ./train --data 'shards/train_*.bin' --val-data 'shards/val_*.bin' --tokenizer shards ...

Hugging Face's `tokenizers` encode, on all cores. Out come llm.c's shards (uint16, or uint32 where ids are
larger), each document whole in one of train and val and closed by the end-of-text token; next to each shard
its documents' ends for --pack documents (x.ends for x.bin, see data/source.h); the tokenizer;
generation_config.json with that token; and manifest.json, which says what is in them. In conversations
(--chat) only what the assistant says is learned: a mask (x.mask), one bit a token, marks what counts.
`transformers` renders them, with their tools and documents. Names of special tokens in a text are ordinary
text. A file may be compressed by gzip. A run that fails leaves what an earlier one made, since all is written
in a hidden folder and moved at the end.

Needs: pip install tokenizers numpy; for Parquet also pyarrow, for --chat also transformers jinja2.
"""
import argparse
import codecs
import collections
import glob
import gzip
import hashlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import time
import zlib

SHARD_FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic, version
MASK_MAGIC, ENDS_MAGIC, HEADER_INTS = (20261120, 1), (20261121, 1), 256
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<|im_end|>"]

# What a conversation looks like when neither the tokenizer nor the user says: a heading for every message,
# the end-of-text token after every answer.
SIMPLE_TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else '\n\n' }}### {{ message['role'] | capitalize }}:\n"
    "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
    "{{ '\n\n### Assistant:\n' if add_generation_prompt else '' }}")

PART_BYTES = 4 << 20  # of a file, read at a time
PIECE_BYTES = 1 << 18  # likewise where a document is of many lines: a thread tokenizes each
BATCH_CHARS = 1 << 24  # tokenized at a time, by all threads
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10, 1 << 30  # for a record

# No text has these noncharacters. CONTROL stands before each special token that is meant, and PLAIN, while a
# template is rendered, before each that a message only mentions.
CONTROL, PLAIN = "\ufdd0", "\ufdd1"
INVALID = re.compile(f"[\ud800-\udfff{CONTROL}{PLAIN}]")
# How files begin that are no text, what they are, and what makes text of them.
UNREADABLE = [(b"\x28\xb5\x2f\xfd", "compressed by Zstandard", "unzstd"), (b"\xfd7zXZ\0", "compressed by xz", "unxz"),
              *((b"BZh%d1AY" % level, "compressed by bzip2", "bunzip2") for level in range(1, 10)),
              *((mark, "UTF-16", "iconv -f UTF-16 -t UTF-8") for mark in (b"\xff\xfe", b"\xfe\xff"))]

# What is written to --out; in a folder with a manifest of ours these names are ours.
OUTPUTS = re.compile(r"(train|val)_\d{6}\.(bin|mask|ends)|tokenizer\.json|tokenizer_config\.json|generation_config\.json"
                     r"|special_tokens_map\.json|chat_template\.jinja|manifest\.json|\.prepare_data\.partial")
STAGING, FORMAT = ".prepare_data.partial", "lce.c shards"


def fail(sentence):
    sys.exit("prepare_data.py: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence))


def require(module, purpose, member=None):
    try:
        found = __import__(module, fromlist=["_"])
        return getattr(found, member) if member else found
    except (ImportError, AttributeError) as error:
        package = module.split(".")[0]
        fail(f"{purpose} needs the Python package {package}: pip install -U {package} ({str(error).splitlines()[0]})")


def count(number, noun):
    return f"{number:,} {noun}{'s' * (number != 1)}"


def parse_json(text, name, kind=dict):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
    if not isinstance(value, kind):
        raise ValueError(f"{name} is no JSON {'object' if kind == dict else 'array'}")
    return value


def read_settings(path):
    return parse_json(pathlib.Path(path).read_text(encoding="utf-8"), path) if os.path.exists(path) else {}


def write_settings(path, settings):
    pathlib.Path(path).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


# --- files and their parts ----------------------------------------------------------------------------------

BAD_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def kind_of(path, options):
    suffix = os.path.splitext(re.sub(r"\.gz$", "", path.lower()))[1]
    return KINDS.get(suffix, "text") if options.format == "auto" else options.format


def find_files(options):
    for name in options.inputs:
        if os.path.isdir(name):
            found = sorted(os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files if file[0] != ".")
        else:
            found = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
        every = list(filter(os.path.isfile, found))
        found = [path for path in every if not (os.path.isdir(name) and is_binary(path, options))]
        if not found:
            fail(f"there is no file {name}")
        if len(found) < len(every):
            print(f"{count(len(every) - len(found), 'file')} of {name} left out: empty or binary", file=sys.stderr)
        yield from found


def open_text(path):
    """The file, and what decompresses it or the file again."""
    raw = open(path, "rb")
    start = raw.peek(8)
    for mark, what, remedy in UNREADABLE:
        if start.startswith(mark):
            raise ValueError(f"{path} is {what}; make UTF-8 text of it first: {remedy}")
    return raw, gzip.GzipFile(fileobj=raw) if start.startswith(b"\x1f\x8b") else raw


def is_binary(path, options):
    """Or empty."""
    if kind_of(path, options) == "parquet":
        return os.path.getsize(path) == 0
    try:
        start = open_text(path)[1].read(1 << 13)
    except (ValueError, *BAD_GZIP):
        return True
    return not start or b"\0" in start


def lines_of(path, piece, document, anywhere):
    """A file's lines, at least `piece` bytes at a time, how many of its bytes are read, and whether that ends a
    document, of at least `document` bytes but for the last. Cuts stand before a letter or digit, unless they may stand
    anywhere; see Tokens.can_be_cut."""
    lines, size, left = [], 0, document
    try:
        raw, file = open_text(path)
        with raw:
            for line in file:
                if size >= min(piece, left) and (anywhere or line[:4].decode(errors="replace")[:1].isalnum()):
                    left -= size
                    yield lines, raw.tell(), left <= 0
                    lines, size, left = [], 0, left if left > 0 else document
                lines.append(line)
                size += len(line)
            yield lines, raw.tell(), True
    except BAD_GZIP as error:
        raise ValueError(f"{path} is no gzip file that can be read: {error}") from None


# Bytes that are no UTF-8 become half of a surrogate pair, which `valid` replaces and counts.
codecs.register_error("half a pair", lambda error: ("\ud800", error.end))


def parts_of(path, options):
    """A file, a part at a time: how many of its bytes are read, whether a document ends there, and pairs (place, item). An
    item is a row of Parquet (a dict), a line of JSON (bytes), or plain text (a str)."""
    kind, size, at = kind_of(path, options), os.path.getsize(path), 0
    if kind == "parquet":
        yield from row_groups(path, size, options)
        return
    by_line = kind == "jsonl" or options.document == "line"
    document = max(1 << 14, min(PART_BYTES, size // 100)) if options.document == "stretch" and not by_line else sys.maxsize
    for lines, done, ends in lines_of(path, PART_BYTES if by_line else options.piece_bytes, document, by_line):
        items = []
        for data in lines if by_line else [b"".join(lines)]:
            place, at = f"{path}, byte {at}", at + len(data)
            data = data.removesuffix(b"\n") if by_line else data
            item = data if kind == "jsonl" else data.decode("utf-8", errors="half a pair")
            if item.strip() or not by_line:
                items.append((place, item))
        yield done, ends, items


def row_groups(path, size, options):
    columns = [options.messages_field, "prompt", "completion", "tools", "documents"] if options.chat else [options.field]
    parquet = require("pyarrow.parquet", "reading Parquet")
    try:
        file = parquet.ParquetFile(path)
        known = [column for column in columns if column in file.schema_arrow.names]
        if not known:
            fail(f"{path} has no column {columns[0]}; it has {', '.join(file.schema_arrow.names)}")
        for group in range(file.num_row_groups):
            rows = enumerate(file.read_row_group(group, columns=known).to_pylist())
            yield size * (group + 1) // file.num_row_groups, False, [(f"{path}, row {n} of row group {group}", row) for n, row in rows]
    except Exception as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None


# --- documents: text, and of a conversation the spans that count --------------------------------------------

def require_text(value, what):
    if not isinstance(value, str):
        raise ValueError(f"the {what} is {value!r:.40}, which is no text")
    return value


def field_of(record, name, option):
    if name not in record:
        raise ValueError(f"the record has no field {name}; it has {', '.join(sorted(record))}: name one with {option}")
    return record[name]


def each_text(value, change):
    """The value with each text in it changed."""
    if isinstance(value, dict):
        return {change(name): each_text(member, change) for name, member in value.items()}
    if isinstance(value, list):
        return [each_text(member, change) for member in value]
    return change(value) if isinstance(value, str) else value


def text_of(item, options):
    if isinstance(item, dict):
        item = require_text(field_of(item, options.field, "--field") or "", options.field)
    return item, None


def message_text(record, options):
    """What a tokenizer is trained on: the messages without their template."""
    return "\n".join(message.get("content", "") for message in messages_of(record, options)[0]), None


def messages_of(record, options):
    """The messages, and the number of those that are only a prompt."""
    if isinstance(record, str):
        raise ValueError("this is plain text; conversations come as JSON lines or Parquet")
    if options.messages_field not in record and "prompt" in record and "completion" in record:
        parts = [[{"role": role, "content": record[name]}] if isinstance(record[name], str) else record[name]
                 for role, name in (("user", "prompt"), ("assistant", "completion"))]
    else:
        parts = [[], field_of(record, options.messages_field, "--messages-field")]
    if not all(isinstance(part, list) and all(isinstance(message, dict) for message in part) for part in parts):
        raise ValueError("the conversation is no list of messages with role and content")
    roles = {"human": "user", "gpt": "assistant"}  # as ShareGPT writes them: from and value
    messages = [{"role": roles.get(m["from"], m["from"]), "content": m.get("value")}
                if isinstance(m.get("from"), str) else m for m in parts[0] + parts[1]]
    messages = [{name: value for name, value in m.items() if value is not None} for m in messages]  # as transformers
    for number, message in enumerate(messages):
        for name in ("role", "content"):
            if name not in message and name == "content" and message.get("tool_calls"):
                continue
            require_text(message.get(name), f"{name} of message {number}")
    return messages, len(parts[0])


class Chat:
    """Conversations as text, by a chat template as transformers renders it."""

    def __init__(self, options, tokens):
        os.environ.update(TRANSFORMERS_VERBOSITY="error", TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
        self.unreadable = require("jinja2", "a chat template").TemplateSyntaxError
        self.by_transformers = require("transformers.utils.chat_template_utils", "a chat template", "render_jinja_template")
        templates = tokens.template or SIMPLE_TEMPLATE
        try:
            self.templates = ({entry["name"]: entry["template"] for entry in templates} if isinstance(templates, list)
                              else {"default": templates})
            if not isinstance(self.templates["default"], str):
                raise TypeError("it is no text")
        except (KeyError, TypeError) as error:
            fail(f"the chat template cannot be read ({type(error).__name__}: {error})")
        self.special = {name: token for name, token in tokens.special.items() if token}
        self.special.setdefault("eos_token", tokens.end_of_text)
        self.named, names = tokens.named, tokens.named.pattern
        self.written = re.compile(f"{PLAIN}(?:{names})?|{names}")

    def render(self, messages, before_answer, more):
        """The text, and the spans in {% generation %} if the template has it."""
        template = self.templates["tool_use" if more["tools"] and "tool_use" in self.templates else "default"]
        tagged = re.search(r"{%[-+]?\s*generation\b", template) is not None
        old, pages = resource.getrlimit(resource.RLIMIT_AS), int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limits = [pages * resource.getpagesize() + TEMPLATE_BYTES, *(limit for limit in old if limit >= 0)]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), old[1]))
        try:
            texts, spans = self.by_transformers([messages], chat_template=template, return_assistant_tokens_mask=tagged,
                                                add_generation_prompt=before_answer, **more, **self.special)
        except self.unreadable as error:
            fail(f"the chat template cannot be read ({type(error).__name__}: {error})")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)
        if len(texts[0]) > BATCH_CHARS:
            raise ValueError(f"the chat template makes more than {BATCH_CHARS:,} characters of it")
        return texts[0], spans[0] if tagged else None

    def text_of(self, record, options):
        """The conversation up to its last answer, and the spans of what the assistant says: {% generation %}, or
        what a message of its adds to the text before it. Of prompt and completion only the latter counts."""
        messages, prompt = messages_of(record, options)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= prompt]
        if not answers:
            return "", []
        more = {name: record.get(name) or None for name in ("tools", "documents")}
        for name, value in more.items():
            if isinstance(value, str):
                more[name] = parse_json(value, f"the field {name}", list)
            elif not isinstance(value, (list, type(None))):
                raise ValueError(f"the field {name} is {value!r:.40}, which is no list")
        messages, more = each_text([messages[:answers[-1] + 1], more], lambda text: self.named.sub(PLAIN + r"\g<0>", text))
        text, spans = self.render(messages, False, more)
        if spans is not None:
            start = len(self.render(messages[:prompt], False, more)[0]) if prompt else 0
            spans = [span for span in spans if start <= span[0] < span[1]]
        else:
            spans, done = [], ""
            for i in answers:
                before, after = self.render(messages[:i], True, more)[0], self.render(messages[:i + 1], False, more)[0]
                if not before.startswith(done) or not after.startswith(before) or not text.startswith(after):
                    raise ValueError("the chat template changes earlier messages when later ones come, so what the "
                                     "assistant said cannot be separated from the rest; give a --chat-template that has it in "
                                     "{% generation %}")
                spans.append((len(before), len(after)))
                done = after
        # Special tokens that the template writes are meant.
        bounds = [0, *(bound for span in spans for bound in span), len(text)]
        parts = [self.written.sub(lambda m: m[0][1:] if m[0][0] == PLAIN else CONTROL + m[0], text[start:end])
                 for start, end in zip(bounds, bounds[1:])]
        bounds = [sum(map(len, parts[:i])) for i in range(1, len(parts))]
        return "".join(parts), list(zip(bounds[::2], bounds[1::2]))


def documents_of(items, read, options, report):
    """Each a text with the spans that count. U+FFFD replaces what is no character, which no tokenizer takes."""
    def valid(text):
        text, replaced = INVALID.subn("\ufffd", text)
        report["replaced"] += replaced
        return text

    for place, item in items:
        signal.alarm(TEMPLATE_SECONDS)
        try:
            if isinstance(item, bytes):
                if item.lstrip()[:1] == b"[":
                    raise ValueError("this is a JSON array; write one record a line, as jq -c '.[]' does")
                item = parse_json(item, "this line")
            text, spans = read(each_text(item, valid) if options.chat else item, options)
            text = text if options.chat else valid(text)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        except MemoryError:
            raise ValueError(f"{place}: the chat template takes more than {TEMPLATE_BYTES >> 30} GiB of memory") from None
        except Exception as error:
            raise ValueError(f"{place}: the chat template fails ({type(error).__name__}: {error})") from None
        finally:
            signal.alarm(0)
        report["unanswered"] += options.chat and not text
        if text:
            yield text, spans


# --- shards -------------------------------------------------------------------------------------------------

class Shards:
    """A split's tokens, which of them count and which end a document, in files of at most shard_tokens."""

    def __init__(self, path, tokens, options):
        self.path, self.end, self.size, self.masked = path, tokens.manifest["end_of_text_id"], options.shard_tokens, options.chat
        self.files = [(".bin", "id", SHARD_FORMATS[tokens.dtype]), (".ends", "ends", ENDS_MAGIC)]
        self.files += [(".mask", "counts", MASK_MAGIC)] * self.masked
        self.type = numpy.dtype([("id", tokens.dtype), ("counts", bool), ("ends", bool)])
        self.parts, self.waiting = [], 0
        self.made = {"documents": 0, "tokens": 0, "counted_tokens": 0, "shards": []}

    def add(self, ids, counts, closes):
        """A piece's tokens, and whether they count. With masks, an end of text that is added does not."""
        added = closes and (not ids or ids[-1] != self.end)
        part = numpy.zeros(len(ids) + added, self.type)
        part["id"] = ids + [self.end] * added
        part["counts"][:len(ids)], part["counts"][len(ids):] = counts, not self.masked
        part["ends"][-1:] = closes
        self.parts.append(part)
        self.waiting += len(part)
        self.made["documents"] += closes
        if self.waiting >= self.size:
            self.write(self.size)

    def write(self, least=1):
        """The full shards of what waits; with `least` 1 all of it."""
        every = numpy.concatenate(self.parts or [numpy.zeros(0, self.type)])
        while len(every) >= least:
            shard, every = every[:self.size], every[self.size:]
            path, counted = f"{self.path}_{len(self.made['shards']):06d}", int(shard["counts"].sum())
            for suffix, field, magic in self.files:
                header, values = numpy.zeros(HEADER_INTS, "<i4"), shard[field]
                header[:3] = *magic, len(shard)
                with open(path + suffix, "wb") as file:
                    header.tofile(file)
                    (numpy.packbits(values, bitorder="little") if values.dtype == bool else values).tofile(file)
            self.made["shards"].append({"file": os.path.basename(path) + ".bin", "tokens": len(shard), "counted_tokens": counted})
            self.made["tokens"] += len(shard)
            self.made["counted_tokens"] += counted
        self.parts, self.waiting = [every], len(every)


def split_of(options, *place):
    """The split of a document: a function of its place alone."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "little") < options.val_fraction * 2**64 else "train"


def make_shards(files, options, tokens, folder):
    shards = {split: Shards(os.path.join(folder, split), tokens, options) for split in ("train", "val")}
    read = Chat(options, tokens).text_of if options.chat else text_of
    # In the batch: a text, its spans, its split, whether it opens and closes a document.
    report, batch, chars, number = collections.Counter(), [], 0, 0
    before, total, start = 0, sum(map(os.path.getsize, files)), time.monotonic()

    def encode(done):
        for (text, spans, split, _, closes), (ids, counts) in zip(batch, tokens.encode(batch)):
            shards[split].add(ids, counts, closes)
            report["named"] += len(tokens.named.findall(text)) - text.count(CONTROL)  # but those that are meant
            report["endless"] += spans is not None and not any(id in tokens.stops for id, c in zip(ids, counts) if c)
        batch.clear()
        made, speed = sum(s.made["tokens"] + s.waiting for s in shards.values()), done / (time.monotonic() - start + 1e-9)
        print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {made:,} tokens, {speed / 1e6:.1f} MB/s", file=sys.stderr, flush=True)

    for path in files:
        cut, opens = kind_of(path, options) == "text" and options.document != "line", True
        for done, ends, items in parts_of(path, options):
            for n, (text, spans) in enumerate(documents_of(items, read, options, report)):
                place, closes = (number,) if cut and options.document == "file" else (number, n), ends or not cut
                batch.append((text, spans, split_of(options, *place), opens, closes))
                opens = closes
                chars += len(text)
                if chars > BATCH_CHARS:
                    encode(before + done)
                    chars = 0
            number += ends or not cut
        before += os.path.getsize(path)
    encode(total)
    for split in shards.values():
        split.write()
    return shards, report


# --- tokenizers ---------------------------------------------------------------------------------------------

def train_tokenizer(files, options, path):
    tokenizer = tokenizers.ByteLevelBPETokenizer(trim_offsets=True)
    before = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence([
        before.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated"),
        before.ByteLevel(add_prefix_space=False, use_regex=False)])

    def texts():
        left, read = options.tokenizer_sample, message_text if options.chat else text_of
        for _, _, items in (part for path in files for part in parts_of(path, options)):
            for text, _ in documents_of(items, read, options, collections.Counter()):
                left -= len(text)
                yield text
            if left < 0:
                return

    print(f"training a tokenizer of {options.train_tokenizer:,} tokens ...", file=sys.stderr)
    tokenizer.train_from_iterator(texts(), vocab_size=options.train_tokenizer, min_frequency=0,
                                  special_tokens=[END_OF_TEXT_NAMES[0]], show_progress=sys.stderr.isatty())
    made = tokenizer.get_vocab_size()
    if made < options.train_tokenizer:
        print(f"the text has pairs for a vocabulary of {made:,} only, not {options.train_tokenizer:,}", file=sys.stderr)
    tokenizer.save(path)


class Tokens:
    """The tokenizer, put into `folder`, and what is known about its special tokens."""

    def __init__(self, options, files, folder):
        path, source, file = os.path.join(folder, "tokenizer.json"), folder, "tokenizer.json"
        if options.tokenizer is None:
            train_tokenizer(files, options, path)
        else:
            source, file = (options.tokenizer, file) if os.path.isdir(options.tokenizer) else os.path.split(options.tokenizer)
            if not os.path.isfile(os.path.join(source, file)):
                fail(f"there is no {os.path.join(source, file)}; --tokenizer names a tokenizer.json or a directory with one")
            shutil.copyfile(os.path.join(source, file), path)
            for name in ("special_tokens_map.json", "chat_template.jinja"):
                if os.path.exists(os.path.join(source, name)):
                    shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:
            fail(f"{options.tokenizer} is no tokenizer.json: {error}")
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"

        settings = read_settings(os.path.join(source, "tokenizer_config.json")) or {"tokenizer_class": "PreTrainedTokenizerFast"}
        self.special = {}
        for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
            value = settings.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            self.special[name] = value if isinstance(value, str) else ""
        wanted = [options.end_of_text] if options.end_of_text else [self.special["eos_token"], *END_OF_TEXT_NAMES]
        self.end_of_text = next((name for name in wanted if name in vocabulary), None)
        if not self.end_of_text:
            fail(f"the tokenizer has no token {' or '.join(filter(None, wanted))}; name what ends a text with --end-of-text")
        self.template = settings.get("chat_template")
        jinja = options.chat_template or os.path.join(source, "chat_template.jinja")
        if options.chat_template or os.path.exists(jinja):
            self.template = pathlib.Path(jinja).read_text(encoding="utf-8")
        # Say what ends a text to whoever reads the folder: a checkpoint takes these files along.
        generation = read_settings(os.path.join(source, "generation_config.json"))
        for name, known, key, value in [("tokenizer_config.json", settings, "eos_token", self.end_of_text),
                                        ("generation_config.json", generation, "eos_token_id", vocabulary[self.end_of_text])]:
            if options.end_of_text or known.get(key) is None:
                known[key] = value
            write_settings(os.path.join(folder, name), known)
        stops = generation["eos_token_id"]
        self.stops = {vocabulary[self.end_of_text], *(stops if isinstance(stops, list) else [stops])}
        # What is put around a text.
        self.around = [], []
        if options.special_tokens and not options.chat:
            encoding = self.encodings(["x"], True)[0]
            own = [i for i, special in enumerate(encoding.special_tokens_mask) if not special] or [0]
            self.around = encoding.ids[:own[0]], encoding.ids[own[-1] + 1:]
        if not self.can_be_cut():
            options.piece_bytes = sys.maxsize
        # Special tokens get names that no text has, in vocabulary and merges, too.
        data, control = json.loads(self.tokenizer.to_str()), set()
        data["post_processor"] = None  # it trims offsets, and adds what `around` has
        if not options.parse_special:
            names = {self.end_of_text, *self.special.values()}
            control = {token["content"] for token in data["added_tokens"]
                       if len(token["content"]) > 1 and (token["special"] or token["content"] in names)}
            merges = data["model"].get("merges", [])
            data["model"]["merges"] = [pair for pair in merges if not {*pair, "".join(pair)} & control]
            data = each_text(data, lambda name: CONTROL + name if name in control else name)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
        except Exception as error:
            fail(f"the tokenizer's special tokens cannot be told from text ({error}); give --parse-special")
        self.named = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        self.manifest = {"file": "tokenizer.json", "sha256": digest, "vocab_size": self.vocab_size,
                         "end_of_text": self.end_of_text, "end_of_text_id": vocabulary[self.end_of_text]}

    def can_be_cut(self):
        """Whether no token reaches from a newline into a letter or digit after it. Any model then makes the same
        tokens of both sides apart, given a character of the other side."""
        normalizer, ids = self.tokenizer.normalizer, range(self.vocab_size)
        tokens = self.tokenizer.decode_batch([[id] for id in ids], skip_special_tokens=False)
        return ((normalizer is None or normalizer.normalize_str("\nx\n").count("\n") == 2) and
                not any(re.search(r"\n\w", token) for token in tokens))

    def encodings(self, texts, special=False):
        try:
            return self.tokenizer.encode_batch(texts, add_special_tokens=special)
        except Exception as error:
            fail(f"the tokenizer fails on the text: {error}")

    def encode(self, batch):
        """The ids of each piece, and which of them count. Where it is cut, an x stands for the text beyond."""
        texts = [("" if opens else "x\n") + text + ("" if closes else "x") for text, _, _, opens, closes in batch]
        for (text, spans, _, opens, closes), encoding in zip(batch, self.encodings(texts)):
            ids, counts, first, last = encoding.ids, True, 0, len(encoding)
            if spans is not None:  # a token counts with any of its characters
                starts, ends = numpy.array(encoding.offsets).reshape(-1, 2).T
                span_starts, span_ends = numpy.array([*spans, (1 << 62, 1 << 62)]).T
                counts = span_starts[numpy.searchsorted(span_ends, starts, "right")] < ends
            while not opens and first < last and encoding.token_to_chars(first)[0] < 2:
                first += 1
            end = len(text) + (0 if opens else 2)
            while not closes and first < last and encoding.token_to_chars(last - 1)[0] >= end:
                last -= 1
            yield self.around[0] * opens + ids[first:last] + self.around[1] * closes, counts


# --- the output folder --------------------------------------------------------------------------------------

def require_own(options, files):
    """Fails unless all that --out may lose is an earlier run's, and no link and no input."""
    inputs, staging = {os.path.realpath(file) for file in files}, os.path.join(options.out, STAGING)
    try:
        own = os.path.isdir(staging) or read_settings(os.path.join(options.out, "manifest.json")).get("format") == FORMAT
    except ValueError:
        own = False
    for name in sorted(filter(OUTPUTS.fullmatch, os.listdir(options.out))):
        path = os.path.join(options.out, name)
        if os.path.realpath(path) in inputs:
            fail(f"{path} is an input, and an output would be written there; name another --out")
        if not own or os.path.islink(path) or os.path.isdir(path) != (name == STAGING):
            fail(f"{path} is not of an earlier run of this program and would be replaced; name another --out")


def publish(staging, out):
    """Moves what was made into place, the manifest last, and removes what only an earlier run had."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on it is done, or not begun
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    made = sorted(os.listdir(staging), key=lambda name: (name == "manifest.json", name))
    for name in made:
        if name == "manifest.json":
            for old in set(filter(OUTPUTS.fullmatch, os.listdir(out))) - {STAGING, *made}:
                os.remove(os.path.join(out, old))
        os.replace(os.path.join(staging, name), os.path.join(out, name))


# --- the whole ----------------------------------------------------------------------------------------------

def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("inputs", nargs="+", help="files, directories or globs: .txt and others, .jsonl, .parquet")
    add("--out", required=True, help="the folder for shards, tokenizer and manifest")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="a tokenizer.json, or a directory with one (and tokenizer_config.json)")
    which.add_argument("--train-tokenizer", type=int, metavar="V", help="train a byte-level BPE of V tokens, split as Llama 3's")
    add("--tokenizer-sample", type=int, default=1 << 30, metavar="CHARS", help="characters to train it on (2^30)")
    add("--format", choices=["auto", "text", "jsonl", "parquet"], default="auto", help="of the inputs (by suffix)")
    add("--field", default="text", help="where the text is in JSON lines and Parquet (text)")
    add("--document", choices=["file", "stretch", "line"], default="file", help="what a document is in plain text "
        "(file); a stretch is a hundredth of a file, from 16 KiB to 4 MiB")
    add("--end-of-text", metavar="TOKEN", help="what ends a document (the tokenizer's eos_token)")
    add("--special-tokens", action="store_true", help="add what the tokenizer puts around a text, such as a BOS")
    add("--parse-special", action="store_true", help="the names of special tokens in a text are these tokens, not text")
    add("--chat", action="store_true", help="the records are conversations, of which the answers are learned")
    add("--messages-field", default="messages", help="where the messages are (messages)")
    add("--chat-template", metavar="FILE", help="a Jinja template (tokenizer_config.json's, or a simple one)")
    add("--val-fraction", type=float, default=0.01, metavar="SHARE", help="of documents, for validation (0.01)")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens of a shard (100,000,000)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (all cores)")
    options = parser.parse_args()
    for name, least, most in [("val_fraction", 0, 0.999999), ("shard_tokens", 1, 2**31 - 1), ("workers", 1, 4096),
                              ("train_tokenizer", 257, 2**20)]:
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            fail(f"--{name.replace('_', '-')} {value}: give {least} to {most}")
    if not options.out:
        fail("--out: the path is empty")
    options.piece_bytes = PIECE_BYTES
    return options


def prepare(options, staging):
    def too_slow(*_):
        raise ValueError(f"it takes more than {TEMPLATE_SECONDS} seconds")

    global numpy, tokenizers  # --help needs neither
    os.environ.update(RAYON_NUM_THREADS=str(options.workers), TOKENIZERS_PARALLELISM="true")
    numpy, tokenizers = require("numpy", "writing shards"), require("tokenizers", "making tokens")
    signal.signal(signal.SIGALRM, too_slow)
    files = list(find_files(options))
    os.makedirs(options.out, exist_ok=True)
    require_own(options, files)
    shutil.rmtree(staging, ignore_errors=True)
    os.mkdir(staging)
    tokens = Tokens(options, files, staging)
    shards, report = make_shards(files, options, tokens, staging)
    made = {split: s.made for split, s in shards.items() if s.made["tokens"]}
    if "train" not in made:
        fail(f"there is no {'message of the assistant' if options.chat else 'text'} in " + ", ".join(options.inputs))
    inputs = [{"file": file, "bytes": os.path.getsize(file)} for file in files]
    write_settings(os.path.join(staging, "manifest.json"), {
        "format": FORMAT, "version": 1, "dtype": tokens.dtype, "masked": options.chat, "tokenizer": tokens.manifest,
        "splits": made, "inputs": inputs, "arguments": sys.argv[1:]})
    for split, m in made.items():
        counted = f", of which {m['counted_tokens']:,} count" if options.chat else ""
        print(f"{split}: {count(m['documents'], 'document')}, {count(m['tokens'], 'token')}{counted}, "
              f"{count(len(m['shards']), 'shard')}")
    if options.val_fraction > 0 and "val" not in made:
        print("no document was drawn for validation: there are few; raise --val-fraction, cut files with --document stretch or "
              "line, or prepare others for it")
    for name, noun, what in [
            ("replaced", "invalid character", "replaced by U+FFFD"),
            ("unanswered", "conversation", "without a message of the assistant left out"),
            ("named", "name", "of special tokens in the text are ordinary text; with --parse-special they are these tokens"),
            ("endless", "conversation", "where no stop token is learned, so that the model does not learn to stop; give a "
             "--chat-template that ends each answer with {{ eos_token }}")]:
        if report[name]:
            print(f"{count(report[name], noun)} {what}")
    model = f"--vocab {tokens.vocab_size}"
    if options.chat:
        known = options.tokenizer and os.path.exists(os.path.join(options.tokenizer, "config.json"))
        model = f"--init {options.tokenizer if known else 'MODEL'} --pack documents"
    print(f"./train {model} --data '{options.out}/train_*.bin'"
          + (f" --val-data '{options.out}/val_*.bin'" if "val" in made else "") + f" --tokenizer {options.out}")


def main():
    """A child makes everything, so that an interrupt waits for no library; the parent moves it into place."""
    options = parse_options()
    staging, worker = os.path.join(options.out, STAGING), 0
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        worker = os.fork()
        if not worker:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            return prepare(options, staging)
        status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        if status < 0:
            fail(f"ended by {signal.Signals(-status).name}, as where memory runs out")
        if status == 0:
            publish(staging, options.out)
        sys.exit(status)
    except OSError as error:
        fail(f"{error.filename or options.out}: {error.strerror or error}")
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        if worker:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
        fail(f"interrupted; {options.out} is as it was")
    finally:
        if worker:
            shutil.rmtree(staging, ignore_errors=True)


if __name__ == "__main__":
    main()
