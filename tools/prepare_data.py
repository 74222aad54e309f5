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
(--chat) only what the assistant says is learned: a mask (x.mask), one bit a token, marks what counts. A run
that fails leaves what an earlier one made, since all is written in a hidden folder and moved at the end.

Needs: pip install tokenizers numpy; for Parquet also pyarrow, for chat templates also jinja2.
"""
import argparse
import codecs
import collections
import glob
import hashlib
import json
import mmap
import os
import pathlib
import re
import shutil
import signal
import sys
import time

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

ITEM_BYTES = 4 << 20  # of a file, read at a time
PIECE_BYTES = 1 << 18  # of a document, tokenized by a thread
BATCH_CHARS = 1 << 24  # tokenized at a time, by all threads
TEMPLATE_SECONDS = 10  # for a record

# What is written to --out; in a folder with a manifest of ours these names are ours.
OUTPUTS = re.compile(r"(train|val)_\d{6}\.(bin|mask|ends)|tokenizer\.json|tokenizer_config\.json|generation_config\.json"
                     r"|special_tokens_map\.json|chat_template\.jinja|manifest\.json|\.prepare_data\.partial")
STAGING, FORMAT = ".prepare_data.partial", "lce.c shards"


def fail(sentence):
    sys.exit("prepare_data.py: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence))


def require(module, purpose):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        fail(f"{purpose} needs the Python package {module.split('.')[0]}: pip install {module.split('.')[0]}")


def count(number, noun):
    return f"{number:,} {noun}{'s' * (number != 1)}"


def parse_json(text, name):
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no JSON object")
    return value


def read_settings(path):
    return parse_json(pathlib.Path(path).read_text(encoding="utf-8"), path) if os.path.exists(path) else {}


def write_settings(path, settings):
    pathlib.Path(path).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


# --- files and their parts ----------------------------------------------------------------------------------

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def kind_of(path, options):
    return KINDS.get(os.path.splitext(path)[1].lower(), "text") if options.format == "auto" else options.format


def find_files(options):
    for name in options.inputs:
        if os.path.isdir(name):
            found = sorted(os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files if file[0] != ".")
        else:
            found = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
        found = [path for path in found if os.path.isfile(path) and not (os.path.isdir(name) and is_binary(path, options))]
        if not found:
            fail(f"there is no file {name}")
        yield from found


def is_binary(path, options):
    """Or empty."""
    with open(path, "rb") as file:
        start = file.read(1 << 13)
    return not start or (kind_of(path, options) != "parquet" and b"\0" in start)


def pieces(text, step, newline, anywhere=False):
    """(start, end) of pieces of at least `step`, each cut after a newline and, unless `anywhere`, so that the
    tokens stay the same: no tokenizer's piece reaches from a lone newline into the line after it."""
    start = 0
    while start < len(text):
        end = start + step
        while (end := text.find(newline, end) + 1) > 0:
            if anywhere or (text[end - 2:end - 1].strip() and text[end:end + 1].strip()):
                break
        end = end or len(text)
        yield start, end
        start = end


# Bytes that are no UTF-8 become half of a surrogate pair, which documents_of replaces and counts.
codecs.register_error("half a pair", lambda error: ("\ud800", error.end))


def parts_of(path, options):
    """A file, a part at a time: its bytes, whether it is the last, and pairs (place, item). An item is a row
    of Parquet (a dict), a line of JSON (bytes), or plain text (a str)."""
    kind, size = kind_of(path, options), os.path.getsize(path)
    by_line = kind == "jsonl" or options.document == "line"

    def items(at, data):
        for item in data.split(b"\n") if by_line else [data]:
            place, at = f"{path}, byte {at}", at + len(item) + 1
            item = item if kind == "jsonl" else item.decode("utf-8", errors="half a pair")
            if item.strip() or not by_line:
                yield place, item

    if kind == "parquet":
        yield from row_groups(path, size, options)
    elif size:
        step = max(1 << 14, min(ITEM_BYTES, size // 100)) if options.document == "stretch" and kind == "text" else ITEM_BYTES
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for start, end in pieces(data, step, b"\n", by_line):
                yield end - start, end == size, items(start, data[start:end])


def row_groups(path, size, options):
    columns = [options.messages_field, "prompt", "completion"] if options.chat else [options.field]
    parquet = require("pyarrow.parquet", "reading Parquet")
    try:
        file = parquet.ParquetFile(path)
        known = [column for column in columns if column in file.schema_arrow.names]
        if not known:
            fail(f"{path} has no column {columns[0]}; it has {', '.join(file.schema_arrow.names)}")
        for group in range(file.num_row_groups):
            rows = enumerate(file.read_row_group(group, columns=known).to_pylist())
            yield size // file.num_row_groups, False, [(f"{path}, row {n} of row group {group}", row) for n, row in rows]
    except Exception as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None


# --- documents: segments of text, each with whether it counts -----------------------------------------------

def require_text(value, what):
    if not isinstance(value, str):
        raise ValueError(f"the {what} is {value!r:.40}, which is no text")
    return value


def field_of(record, name, option):
    if name not in record:
        raise ValueError(f"the record has no field {name}; it has {', '.join(sorted(record))}: name one with {option}")
    return record[name]


def text_segments(item, options):
    if isinstance(item, dict):
        item = require_text(field_of(item, options.field, "--field") or "", options.field)
    return [(item[start:end], True) for start, end in pieces(item, PIECE_BYTES, "\n")]


def message_segments(record, options):
    """What a tokenizer is trained on: the messages without their template."""
    return [(message["content"], True) for message in messages_of(record, options)]


def messages_of(record, options):
    if isinstance(record, str):
        raise ValueError("this is plain text; conversations come as JSON lines or Parquet")
    if options.messages_field not in record and "prompt" in record and "completion" in record:
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["completion"]}]
    else:
        messages = field_of(record, options.messages_field, "--messages-field")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("the conversation is no list of messages with role and content")
    roles = {"human": "user", "gpt": "assistant"}  # as ShareGPT writes them: from and value
    messages = [{"role": roles.get(m["from"], m["from"]), "content": m.get("value")}
                if isinstance(m.get("from"), str) else m for m in messages]
    for number, message in enumerate(messages):
        for name in ("role", "content"):
            require_text(message.get(name), f"{name} of message {number}")
    return messages


class Chat:
    """Conversations as text, by a chat template as Hugging Face has them."""

    def __init__(self, options, tokens):
        def refuse(message="the conversation is refused"):
            raise ValueError(f"the chat template says: {message}")

        sandbox = require("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                            extensions=["jinja2.ext.loopcontrols"])
        environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        source = tokens.template
        try:
            if isinstance(source, list):
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            source = source or SIMPLE_TEMPLATE
            # These marks of what the assistant said are not needed here.
            self.template = environment.from_string(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source))
        except Exception as error:
            fail(f"the chat template cannot be read ({type(error).__name__}: {error})")
        self.special = {**tokens.special, "eos_token": tokens.special["eos_token"] or tokens.end_of_text}

    def segments(self, record, options):
        """What the assistant says counts: what a message of its adds to the text before it."""
        segments, done, messages = [], "", messages_of(record, options)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.template.render(messages=messages[:i], add_generation_prompt=True, **self.special)
                after = self.template.render(messages=messages[:i + 1], add_generation_prompt=False, **self.special)
                if not before.startswith(done) or not after.startswith(before):
                    raise ValueError("the chat template changes earlier messages when later ones come, so what the "
                                     "assistant said cannot be separated from the rest; give another with --chat-template")
                segments += [(before[len(done):], False), (after[len(before):], True)]
                done = after
        return [(text, counts) for text, counts in segments if text]


def documents_of(items, segments_of, options, report):
    """Each a list of segments, without halves of surrogate pairs, which no tokenizer takes."""
    for place, item in items:
        signal.alarm(TEMPLATE_SECONDS)
        try:
            segments = segments_of(parse_json(item, "this line") if isinstance(item, bytes) else item, options)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        except Exception as error:
            raise ValueError(f"{place}: the chat template fails ({type(error).__name__}: {error})") from None
        finally:
            signal.alarm(0)
        for i, (text, counts) in enumerate(segments):
            text, replaced = re.subn("[\ud800-\udfff]", "\ufffd", text)
            segments[i], report["replaced"] = (text, counts), report["replaced"] + replaced
        report["left out"] += not segments
        if segments:
            yield segments


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
        """A segment's tokens, and whether they count. With masks, an end of text that is added does not."""
        added = closes and (not ids or ids[-1] != self.end)
        part = numpy.zeros(len(ids) + added, self.type)
        part["id"] = ids + [self.end] * added
        part["counts"] = counts
        if closes:
            part["counts"][-1] &= not added or not self.masked
            part["ends"][-1] = True
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
    segments_of = Chat(options, tokens).segments if options.chat else text_segments
    report, batch, chars, number = collections.Counter(), [], 0, 0  # batch: (text, split, whether it counts, and ends a document)
    done, total, start = 0, sum(map(os.path.getsize, files)), time.monotonic()

    def encode():
        texts = [text for text, *_ in batch]
        try:
            encodings = tokens.tokenizer.encode_batch(texts, add_special_tokens=options.special_tokens and not options.chat)
        except Exception as error:
            fail(f"the tokenizer fails on the text: {error}")
        for (_, split, counts, closes), encoding in zip(batch, encodings):
            shards[split].add(encoding.ids, counts, closes)
        batch.clear()
        made, speed = sum(s.made["tokens"] + s.waiting for s in shards.values()), done / (time.monotonic() - start + 1e-9)
        print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {made:,} tokens, {speed / 1e6:.1f} MB/s", file=sys.stderr, flush=True)

    for path in files:
        whole, first = kind_of(path, options) == "text" and options.document == "file", number
        for size, last, items in parts_of(path, options):
            for n, segments in enumerate(documents_of(items, segments_of, options, report)):
                split, closes = split_of(options, first) if whole else split_of(options, number, n), last or not whole
                batch += [(text, split, counts, False) for text, counts in segments[:-1]]
                batch.append((segments[-1][0], split, segments[-1][1], closes))
                chars += sum(len(text) for text, _ in segments)
                if chars > BATCH_CHARS:
                    encode()
                    chars = 0
            number, done = number + 1, done + size
    encode()
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
        left, segments_of = options.tokenizer_sample, message_segments if options.chat else text_segments
        for _, _, items in (part for path in files for part in parts_of(path, options)):
            for segments in documents_of(items, segments_of, options, collections.Counter()):
                left -= sum(len(text) for text, _ in segments)
                yield from (text for text, _ in segments)
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
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
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
        digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
        self.manifest = {"file": "tokenizer.json", "sha256": digest, "vocab_size": self.vocab_size,
                         "end_of_text": self.end_of_text, "end_of_text_id": vocabulary[self.end_of_text]}


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
    add("--chat", action="store_true", help="the records are conversations, of which the answers are learned")
    add("--messages-field", default="messages", help="where the messages are (messages)")
    add("--chat-template", metavar="FILE", help="a Jinja template (tokenizer_config.json's, or a simple one)")
    add("--val-fraction", type=float, default=0.01, metavar="SHARE", help="of documents, for validation (0.01)")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens of a shard (100,000,000)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="threads (all cores)")
    options = parser.parse_args()
    for name, least, most in [("val_fraction", 0, 0.999999), ("shard_tokens", 1, 2**31 - 1), ("workers", 1, 4096),
                              ("train_tokenizer", 257, 2**31 - 1)]:
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            fail(f"--{name.replace('_', '-')} {value}: give {least} to {most}")
    if not options.out:
        fail("--out: the path is empty")
    return options


def prepare(options, staging):
    def too_slow(*_):
        raise ValueError(f"it takes more than {TEMPLATE_SECONDS} seconds")

    global numpy, tokenizers  # here, where an interrupt is caught; --help needs neither
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
    publish(staging, options.out)
    for split, m in made.items():
        counted = f", of which {m['counted_tokens']:,} count" if options.chat else ""
        print(f"{split}: {count(m['documents'], 'document')}, {count(m['tokens'], 'token')}{counted}, "
              f"{count(len(m['shards']), 'shard')}")
    if options.val_fraction > 0 and "val" not in made:
        print("no document was drawn for validation: there are few; raise --val-fraction, cut files with --document stretch or "
              "line, or prepare others for it")
    if report["replaced"]:
        print(f"{count(report['replaced'], 'invalid character')} replaced by U+FFFD")
    if report["left out"] and options.chat:
        print(f"{count(report['left out'], 'conversation')} without a message of the assistant left out")
    print(f"./train --vocab {tokens.vocab_size} --data '{options.out}/train_*.bin'"
          + (f" --val-data '{options.out}/val_*.bin'" if "val" in made else "") + f" --tokenizer {options.out}")


def main():
    options = parse_options()
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
