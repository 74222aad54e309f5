#!/usr/bin/env python3
"""Makes token shards for ./train from text, JSON lines, Parquet or conversations.

    tools/prepare_data.py corpus/ --tokenizer gpt2/ --out shards
    tools/prepare_data.py 'web/*.parquet' --field text --train-tokenizer 32000 --out shards
    tools/prepare_data.py chats.jsonl --chat --tokenizer Llama-3.2-1B-Instruct/ --out sft
    ./train --data 'shards/train_*.bin' --val-data 'shards/val_*.bin' --tokenizer shards ...

Tokens are made by Hugging Face's `tokenizers`, on all cores. Out come llm.c's shards
(uint16, or uint32 where ids are larger), each document whole in one of train and val and closed by the end-of-text
token; next to each shard its documents' ends for --pack documents (x.ends for x.bin, see data/source.h); the tokenizer;
generation_config.json with that token; and manifest.json, which says what is in them. In conversations (--chat) only what
the assistant says is learned: a mask next to each shard (x.mask for x.bin), one bit a token, marks what counts. All is
written in a hidden folder in --out and moved from it at the end, so a run that fails leaves what an earlier one made.

Needs: pip install tokenizers numpy; for Parquet also pyarrow, for chat templates also jinja2.
"""
import argparse
import collections
import glob
import hashlib
import json
import mmap
import os
import re
import shutil
import signal
import sys
import time

try:
    import numpy
    import tokenizers
except ImportError:  # main says so; --help needs neither
    pass

SHARD_FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic, version
MASK_MAGIC, ENDS_MAGIC = (20261120, 1), (20261121, 1)
HEADER_INTS = 256

LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<|im_end|>"]

# What a conversation looks like when neither the tokenizer nor the user says: a heading for every message, the
# end-of-text token after every answer.
SIMPLE_TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else '\n\n' }}### {{ message['role'] | capitalize }}:\n"
    "{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
    "{{ '\n\n### Assistant:\n' if add_generation_prompt else '' }}")

ITEM_BYTES = 4 << 20  # of a file, read at a time
PIECE_BYTES = 1 << 18  # of a document, tokenized by a thread
BATCH_CHARS = 1 << 24  # tokenized at a time, by all threads
TEMPLATE_SECONDS = 10

# What is written to --out; in a folder with a manifest of ours these names are ours.
OUTPUTS = re.compile(r"(train|val)_\d{6}\.(bin|mask|ends)|tokenizer\.json|tokenizer_config\.json|generation_config\.json"
                     r"|special_tokens_map\.json|chat_template\.jinja|manifest\.json")
STAGING, FORMAT = ".prepare_data.partial", "lce.c shards"


def fail(sentence):
    sys.exit("prepare_data.py: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence))


def require(module, purpose):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        fail(f"{purpose} needs the Python package {module.split('.')[0]}: pip install {module.split('.')[0]}")


def read_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def parse_json(text, place):
    """The object in a text; `place` begins the sentence about anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no JSON object")
    return value


def read_settings(path):
    return parse_json(read_text(path), path) if os.path.exists(path) else {}


def write_settings(path, settings):
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(settings, indent=1) + "\n")


# --- files and their parts ----------------------------------------------------------------------------------

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def kind_of(path, given):
    return KINDS.get(os.path.splitext(path)[1].lower(), "text") if given == "auto" else given


def is_wanted(path, given):
    """Whether a file that lies in a directory is data: no hidden, empty or binary one."""
    if os.path.basename(path).startswith(".") or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(1 << 13)
    return bool(start) and (kind_of(path, given) == "parquet" or b"\0" not in start)


def find_files(inputs, given):
    files = []
    for name in inputs:
        found = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
        if os.path.isdir(name):
            found = sorted(os.path.join(folder, file) for folder, _, names in os.walk(name) for file in names
                           if is_wanted(os.path.join(folder, file), given))
        if not found:
            fail(f"there is no file {name}")
        files += filter(os.path.isfile, found)
    return files


def pieces(text, step, newline, anywhere=False):
    """(start, end) of pieces of at least `step` of a str, or of bytes, each cut after a newline and, unless `anywhere`, so
    that the tokens stay the same: no tokenizer's piece reaches from a lone newline into the line after it."""
    start = 0
    while start < len(text):
        end = start + step
        while (end := text.find(newline, end) + 1) > 0:
            if anywhere or (text[end - 2:end - 1].strip() and text[end:end + 1].strip()):
                break
        end = end or len(text)
        yield start, end
        start = end


# A part of a file: bytes from `start` on, or the records of a row group of Parquet; `size` in bytes.
Part = collections.namedtuple("Part", "path kind start data size")


def parts_of(path, options):
    kind, size = kind_of(path, options.format), os.path.getsize(path)
    if kind == "parquet":
        parquet, columns = require("pyarrow.parquet", "reading Parquet"), columns_of(options)
        try:
            file = parquet.ParquetFile(path)
        except Exception as error:
            raise ValueError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None
        known = [column for column in columns if column in file.schema_arrow.names]
        if not known:
            raise ValueError(f"{path} has no column {columns[0]}; it has {', '.join(file.schema_arrow.names)}")
        for group in range(file.num_row_groups):
            yield Part(path, kind, group, file.read_row_group(group, columns=known).to_pylist(), size // file.num_row_groups)
    elif size:
        step = max(1 << 14, min(ITEM_BYTES, size // 100)) if options.document == "stretch" and kind == "text" else ITEM_BYTES
        anywhere = kind == "jsonl" or options.document == "line"
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start, end in pieces(data, step, b"\n", anywhere):
                yield Part(path, kind, start, data[start:end], end - start)


def split_of(options, *place):
    """The split of a document: a function of its place alone."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "little") < options.val_fraction * 2**64 else "train"


# --- documents: segments of text, each with whether it counts ---------------------------------------------------

def columns_of(options):
    return [options.messages_field, "prompt", "completion"] if options.chat else [options.field]


def records_of(part):
    """The objects of JSON lines or of a Parquet row group, each after its place."""
    if part.kind == "parquet":
        for number, record in enumerate(part.data):
            yield f"{part.path}, row {number} of row group {part.start}", record
        return
    at = part.start
    for line in part.data.split(b"\n"):
        if line.strip():
            place = f"{part.path}, byte {at}"
            yield place, parse_json(line, place + ": this line")
        at += len(line) + 1


def field_of(record, name, place):
    if name not in record:
        raise ValueError(f"{place}: the record has no field {name}; it has {', '.join(sorted(record))}: name one with --field")
    return record[name]


def require_text(value, what, place):
    if not isinstance(value, str):
        raise ValueError(f"{place}: the {what} is {value!r:.40}, which is no text")
    return value


def plain_texts(part, options, report):
    if part.kind != "text":
        for place, record in records_of(part):
            if text := field_of(record, options.field, place):
                yield require_text(text, options.field, place)
        return
    text = part.data.decode("utf-8", errors="replace")
    report["replaced"] += text.count("\ufffd") - part.data.count("\ufffd".encode())
    yield from filter(str.strip, text.split("\n")) if options.document == "line" else [text]


def messages_of(record, options, place):
    if options.messages_field not in record and "prompt" in record and "completion" in record:
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]
    else:
        messages = field_of(record, options.messages_field, place)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{place}: the conversation is no list of messages with role and content")
    roles = {"human": "user", "gpt": "assistant"}  # as ShareGPT writes them: from and value
    messages = [{"role": roles.get(m["from"], m["from"]), "content": m.get("value")}
                if isinstance(m.get("from"), str) else m for m in messages]
    for number, message in enumerate(messages):
        for name in ("role", "content"):
            require_text(message.get(name), f"{name} of message {number}", place)
    return messages


def conversations(part, options):
    if part.kind == "text":
        raise ValueError(f"{part.path} is plain text; conversations come as JSON lines or Parquet")
    for place, record in records_of(part):
        yield place, messages_of(record, options, place)


class Chat:
    """Conversations as text, by a chat template as Hugging Face has them."""

    def __init__(self, options, tokens):
        sandbox = require("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                            extensions=["jinja2.ext.loopcontrols"])

        def refuse(message="the conversation is refused", *_):
            raise ValueError(message)

        environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        # These marks delimit what the assistant said for other programs; here that follows from the messages.
        source = read_text(options.chat_template) if options.chat_template else tokens.template or SIMPLE_TEMPLATE
        try:
            self.template = environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source))
        except Exception as error:
            fail(f"the chat template cannot be read: {error}")
        self.special = {name: token_text(tokens.settings.get(name)) or "" for name in
                        ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.special["eos_token"] = self.special["eos_token"] or tokens.end_of_text
        signal.signal(signal.SIGALRM, lambda *_: refuse(f"it takes more than {TEMPLATE_SECONDS} seconds"))

    def render(self, messages, prompt, place):
        signal.alarm(TEMPLATE_SECONDS)
        try:
            return self.template.render(messages=messages, add_generation_prompt=prompt, **self.special)
        except Exception as error:
            raise ValueError(f"{place}: the chat template fails on the conversation ({type(error).__name__}: {error})") from None
        finally:
            signal.alarm(0)

    def segments(self, messages, place):
        """What the assistant says counts: what a message of its adds to the text before it."""
        segments, done = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self.render(messages[:i], True, place), self.render(messages[:i + 1], False, place)
            if not before.startswith(done) or not after.startswith(before):
                raise ValueError(f"{place}: the chat template changes earlier messages when later ones come, so what the "
                                 "assistant said cannot be separated from the rest; give another with --chat-template")
            segments += [(before[len(done):], False), (after[len(before):], True)]
            done = after
        return [(text, counts) for text, counts in segments if text]


def documents_of(part, options, chat, report):
    """Each a list of segments. JSON may hold halves of surrogate pairs, which no tokenizer takes: they are replaced."""
    if chat:
        documents = (chat.segments(messages, place) for place, messages in conversations(part, options))
    else:
        documents = ([(text[start:end], True) for start, end in pieces(text, PIECE_BYTES, "\n")]
                     for text in plain_texts(part, options, report))
    for document in documents:
        report["without_answer"] += not document
        if document:
            yield [(well_formed(text, report), counts) for text, counts in document]


def well_formed(text, report):
    text, replaced = re.subn("[\ud800-\udfff]", "\ufffd", text)
    report["replaced"] += replaced
    return text


# --- shards -------------------------------------------------------------------------------------------------

def write_ints(path, magic, values):
    """256 integers of a header, with how many values follow, then the values."""
    with open(path, "wb") as file:
        numpy.array([*magic, len(values)] + [0] * (HEADER_INTS - 3), "<i4").tofile(file)
        (numpy.packbits(values, bitorder="little") if values.dtype == bool else values).tofile(file)


class Shards:
    """One split's tokens, with which of them count and which end a document, in files of at most shard_tokens."""

    def __init__(self, folder, split, tokens, options):
        self.folder, self.split, self.tokenizer, self.options = folder, split, tokens, options
        self.type = numpy.dtype([("id", {"uint16": "<u2", "uint32": "<u4"}[tokens.dtype]), ("counts", bool), ("ends", bool)])
        self.waiting, self.parts, self.shards = 0, [], []
        self.tokens = self.counted = self.documents = 0

    def add(self, lists, counts, closes):
        """Tokens of segments, and whether each segment counts. The end of a text that a document lacks does not."""
        end, ids = self.tokenizer.end_of_text_id, [id for ids in lists for id in ids]
        added = closes and (not ids or ids[-1] != end)
        part = numpy.zeros(len(ids) + added, self.type)
        part["id"] = ids + [end] * added
        part["counts"] = numpy.repeat([*counts, False], [*map(len, lists), added])
        part["ends"][-1:] = closes
        self.parts.append(part)
        self.waiting += len(part)
        self.tokens += len(part)
        self.documents += closes
        if self.waiting >= self.options.shard_tokens:
            self.write(self.options.shard_tokens)

    def write(self, least=1):
        """The full shards of what waits; with `least` 1 all of it."""
        every, size, chat = numpy.concatenate(self.parts or [numpy.zeros(0, self.type)]), self.options.shard_tokens, self.options.chat
        while len(every) >= least:
            shard, every = every[:size], every[size:]
            name = f"{self.split}_{len(self.shards):06d}"
            for suffix, field, magic in [(".bin", "id", SHARD_FORMATS[self.tokenizer.dtype]), (".ends", "ends", ENDS_MAGIC),
                                         *[(".mask", "counts", MASK_MAGIC)] * chat]:
                write_ints(os.path.join(self.folder, name + suffix), magic, shard[field])
            counted = int(shard["counts"].sum()) if chat else len(shard)
            self.shards.append({"file": name + ".bin", "tokens": len(shard), "counted_tokens": counted})
            self.counted += counted
        self.parts, self.waiting = [every], len(every)


def make_shards(files, options, tokens, folder):
    shards = {split: Shards(folder, split, tokens, options) for split in ("train", "val")}
    report, batch, chars, number = collections.Counter(), [], 0, 0  # batch: (segments, split, whether the document ends)
    chat, done, total = Chat(options, tokens) if options.chat else None, 0, sum(map(os.path.getsize, files))
    start = shown = time.time()

    def encode():
        texts = [text for segments, *_ in batch for text, _ in segments]
        encodings = iter(tokens.tokenizer.encode_batch(texts, add_special_tokens=options.special_tokens and not chat))
        for segments, split, closes in batch:
            shards[split].add([next(encodings).ids for _ in segments], [counts for _, counts in segments], closes)
        batch.clear()

    def show(now):
        share = f"{100 * done / total:.0f}% of {total / 1e6:.1f} MB" if total else "nothing"
        made = sum(split.tokens for split in shards.values())
        print(f"{share}, {made:,} tokens, {done / max(now - start, 1e-9) / 1e6:.1f} MB/s", file=sys.stderr, flush=True)

    for path in files:
        first, whole = number, kind_of(path, options.format) == "text" and options.document == "file"
        for number, part in enumerate(parts_of(path, options), first + 1):
            closes = not whole or part.start + part.size == os.path.getsize(path)
            for n, segments in enumerate(documents_of(part, options, chat, report)):
                batch.append((segments, split_of(options, first) if whole else split_of(options, number - 1, n), closes))
                chars += sum(len(text) for text, _ in segments)
                if chars > BATCH_CHARS:
                    encode()
                    chars = 0
            done += part.size
            if time.time() - shown > 10:
                shown = time.time()
                show(shown)
    encode()
    for split in shards.values():
        split.write()
    show(time.time())
    return shards, report


# --- tokenizers ---------------------------------------------------------------------------------------------

def train_tokenizer(files, options, path):
    tokenizer = tokenizers.ByteLevelBPETokenizer(trim_offsets=True)
    before = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence([
        before.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated"),
        before.ByteLevel(add_prefix_space=False, use_regex=False)])

    def texts():
        left, report = options.tokenizer_sample, collections.Counter()
        for part in (part for path in files for part in parts_of(path, options)):
            if options.chat:
                some = (message["content"] for _, messages in conversations(part, options) for message in messages)
            else:
                some = (text for segments in documents_of(part, options, None, report) for text, _ in segments)
            for text in some:
                left -= len(text)
                yield well_formed(text, report)
            if left < 0:
                return

    print(f"training a tokenizer of {options.train_tokenizer:,} tokens ...", file=sys.stderr)
    tokenizer.train_from_iterator(texts(), vocab_size=options.train_tokenizer, min_frequency=0,
                                  special_tokens=[END_OF_TEXT_NAMES[0]], show_progress=sys.stderr.isatty())
    made = tokenizer.get_vocab_size()
    if made < options.train_tokenizer:
        print(f"the text has pairs for a vocabulary of {made:,} only, not {options.train_tokenizer:,}", file=sys.stderr)
    tokenizer.save(path)


def token_text(value):
    return value.get("content") if isinstance(value, dict) else value


class Tokens:
    """The tokenizer, put into `folder`, and what is known about its special tokens."""

    def __init__(self, options, files, folder):
        self.path, self.template = os.path.join(folder, "tokenizer.json"), None
        self.settings, generation = {"tokenizer_class": "PreTrainedTokenizerFast"}, {}
        if options.tokenizer:
            generation = self.copy(options.tokenizer, folder)
        else:
            train_tokenizer(files, options, self.path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(self.path)
        except Exception as error:
            fail(f"{options.tokenizer} is no tokenizer.json: {error}")
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"
        wanted = [options.end_of_text] if options.end_of_text else [token_text(self.settings.get("eos_token"))] + END_OF_TEXT_NAMES
        self.end_of_text = next((name for name in wanted if name in vocabulary), None)
        if not self.end_of_text:
            fail(f"the tokenizer has no token {' or '.join(filter(None, wanted))}; name what ends a text with --end-of-text")
        self.end_of_text_id = vocabulary[self.end_of_text]
        # Say what ends a text to whoever reads the folder: a checkpoint takes these files along.
        for name, settings, key, value in [("tokenizer_config.json", self.settings, "eos_token", self.end_of_text),
                                           ("generation_config.json", generation, "eos_token_id", self.end_of_text_id)]:
            if options.end_of_text or settings.get(key) is None:
                settings[key] = value
            write_settings(os.path.join(folder, name), settings)

    def copy(self, source, folder):
        source, file = (source, "tokenizer.json") if os.path.isdir(source) else os.path.split(source)
        if not os.path.isfile(os.path.join(source, file)):
            fail(f"there is no {os.path.join(source, file)}; --tokenizer names a tokenizer.json or a directory with one")
        shutil.copyfile(os.path.join(source, file), self.path)
        for name in ("special_tokens_map.json", "chat_template.jinja"):
            if os.path.exists(os.path.join(source, name)):
                shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
        self.settings = read_settings(os.path.join(source, "tokenizer_config.json")) or self.settings
        jinja, self.template = os.path.join(source, "chat_template.jinja"), self.settings.get("chat_template")
        if isinstance(self.template, list):
            self.template = {entry["name"]: entry["template"] for entry in self.template}.get("default")
        self.template = read_text(jinja) if os.path.exists(jinja) else self.template
        return read_settings(os.path.join(source, "generation_config.json"))

    def manifest(self):
        with open(self.path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        return {"file": os.path.basename(self.path), "sha256": digest, "vocab_size": self.vocab_size,
                "end_of_text": self.end_of_text, "end_of_text_id": self.end_of_text_id}


# --- the output folder --------------------------------------------------------------------------------------

def require_own(options, files):
    """Fails unless all that may be replaced or removed in --out is an earlier run's, and no link and no input."""
    inputs, manifest = {os.path.realpath(file) for file in files}, os.path.join(options.out, "manifest.json")
    try:
        own = os.path.isdir(os.path.join(options.out, STAGING)) or read_settings(manifest).get("format") == FORMAT
    except ValueError:
        own = False
    for name in sorted(os.listdir(options.out)):
        path = os.path.join(options.out, name)
        if name == STAGING and (os.path.islink(path) or not os.path.isdir(path)):
            fail(f"{path} is in the way; remove it or name another --out")
        if not OUTPUTS.fullmatch(name):
            continue
        if os.path.realpath(path) in inputs:
            fail(f"{path} is an input, and an output would be written there; name another --out")
        if os.path.islink(path) or not os.path.isfile(path) or not own:
            fail(f"{path} is not of an earlier run of this program and would be replaced; name another --out")


def publish(staging, out):
    """Moves what was made into place, the manifest last, and removes what only an earlier run had."""
    made = sorted(os.listdir(staging), key=lambda name: (name == "manifest.json", name))
    for name in made:
        if name == "manifest.json":
            for old in filter(OUTPUTS.fullmatch, set(os.listdir(out)) - set(made)):
                os.remove(os.path.join(out, old))
        os.replace(os.path.join(staging, name), os.path.join(out, name))


# --- the whole ----------------------------------------------------------------------------------------------

def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="files, directories or globs: .txt and others, .jsonl, .parquet")
    parser.add_argument("--out", required=True, help="the folder for shards, tokenizer and manifest")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="a tokenizer.json, or a directory with one (and tokenizer_config.json)")
    which.add_argument("--train-tokenizer", type=int, metavar="V", help="train a byte-level BPE of V tokens on the text, split as Llama 3's")
    parser.add_argument("--tokenizer-sample", type=int, default=1 << 30, metavar="CHARS", help="characters of text to train it on (2^30)")
    parser.add_argument("--format", choices=["auto", "text", "jsonl", "parquet"], default="auto", help="format of the inputs (by suffix)")
    parser.add_argument("--field", default="text", help="where the text is in JSON lines and Parquet (text)")
    parser.add_argument("--document", choices=["file", "stretch", "line"], default="file", help="what a document is in plain text (file); a stretch is a hundredth of a file, from 16 KiB to 4 MiB")
    parser.add_argument("--end-of-text", metavar="TOKEN", help="what ends a document (the tokenizer's eos_token)")
    parser.add_argument("--special-tokens", action="store_true", help="add what the tokenizer puts around a text, such as a BOS")
    parser.add_argument("--chat", action="store_true", help="the records are conversations, of which the answers are learned")
    parser.add_argument("--messages-field", default="messages", help="where the messages are (messages)")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template (tokenizer_config.json's, or a simple one)")
    parser.add_argument("--val-fraction", type=float, default=0.01, metavar="SHARE", help="share of the documents held back for validation (0.01)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens of a shard (100,000,000)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (all cores)")
    options = parser.parse_args()
    for good, sentence in [
        (options.out and options.tokenizer != "", "--out and --tokenizer: a path is empty"),
        (0 <= options.val_fraction < 1, f"--val-fraction {options.val_fraction}: give a share from 0 to below 1"),
        (1 <= options.shard_tokens < 2**31, f"--shard-tokens {options.shard_tokens}: a shard holds from 1 to {2**31 - 1} tokens"),
        (options.workers >= 1, f"--workers {options.workers}: at least one thread is needed"),
        (options.tokenizer or options.train_tokenizer >= 257,
         f"--train-tokenizer {options.train_tokenizer}: 256 bytes and the end of text make 257 tokens at least"),
    ]:
        if not good:
            fail(sentence)
    os.environ.update(RAYON_NUM_THREADS=str(options.workers), TOKENIZERS_PARALLELISM="true")
    return options


def manifest_of(files, options, tokens, shards):
    return {
        "format": FORMAT, "version": 1, "dtype": tokens.dtype, "masked": options.chat, "tokenizer": tokens.manifest(),
        "splits": {split: {"documents": s.documents, "tokens": s.tokens, "counted_tokens": s.counted,
                           "shards": s.shards} for split, s in shards.items() if s.shards},
        "inputs": [{"file": file, "bytes": os.path.getsize(file)} for file in files],
        "arguments": sys.argv[1:],
    }


def prepare(options, staging):
    files = find_files(options.inputs, options.format)
    os.makedirs(options.out, exist_ok=True)
    require_own(options, files)
    shutil.rmtree(staging, ignore_errors=True)
    os.mkdir(staging)
    tokens = Tokens(options, files, staging)
    shards, report = make_shards(files, options, tokens, staging)
    if not shards["train"].tokens:
        fail(f"there is no {'message of the assistant' if options.chat else 'text'} in " + ", ".join(options.inputs))
    write_settings(os.path.join(staging, "manifest.json"), manifest_of(files, options, tokens, shards))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on it is done, or not begun
    publish(staging, options.out)
    for split, s in shards.items():
        counted = f", of which {s.counted:,} count" if options.chat else ""
        print(f"{split}: {s.documents:,} documents, {s.tokens:,} tokens{counted}, {len(s.shards)} shards")
    if options.val_fraction > 0 and not shards["val"].tokens:
        print("no document was drawn for validation: there are few; raise --val-fraction, cut files with --document stretch or "
              "line, or prepare others for it")
    if report["replaced"]:
        print(f"{report['replaced']:,} characters were no UTF-8 and became U+FFFD")
    if report["without_answer"]:
        print(f"{report['without_answer']:,} conversations have no message of the assistant and were left out")
    print(f"./train --vocab {tokens.vocab_size} --data '{options.out}/train_*.bin'"
          + (f" --val-data '{options.out}/val_*.bin'" if shards["val"].tokens else "") + f" --tokenizer {options.out}")


def main():
    options = parse_options()
    require("numpy", "writing shards")
    require("tokenizers", "making tokens")
    staging = os.path.join(options.out, STAGING)
    try:
        prepare(options, staging)
    except OSError as error:
        fail(f"{error.filename or options.out}: {error.strerror or error}")
    except ValueError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"interrupted; {options.out} is as it was")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


if __name__ == "__main__":
    main()
