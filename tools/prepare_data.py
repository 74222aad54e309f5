#!/usr/bin/env python3
"""Makes token shards for ./train from text, JSON lines, Parquet or conversations.

    tools/prepare_data.py corpus/ --tokenizer gpt2/ --out shards
    tools/prepare_data.py 'web/*.parquet' --field text --train-tokenizer 32000 --out shards
    tools/prepare_data.py chats.jsonl --chat --tokenizer Llama-3.2-1B-Instruct/ --out sft
    ./train --data 'shards/train_*.bin' --val-data 'shards/val_*.bin' --tokenizer shards ...

Tokens are made by Hugging Face's `tokenizers`, in as many processes as there are cores. Out come llm.c's shards
(uint16, or uint32 where ids are larger), each document whole in one of train and val and closed by the end-of-text
token; next to each shard its documents' ends for --pack documents (x.ends for x.bin, see data/source.h); the tokenizer;
generation_config.json with that token; and manifest.json, which says what is in them. In conversations (--chat) only what
the assistant says is learned: a mask next to each shard (x.mask for x.bin), one bit a token, marks what counts.

Needs: pip install tokenizers numpy; for Parquet also pyarrow, for chat templates also jinja2.
"""
import argparse
import collections
import contextlib
import glob
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import shutil
import sys
import time

try:
    import numpy
    import tokenizers
except ImportError:  # main says so; --help needs neither
    pass

SHARD_FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic, version
MASK_MAGIC, ENDS_MAGIC, BITS_VERSION = 20261120, 20261121, 1
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

ITEM_BYTES = 4 << 20  # of a file, handed to a worker at a time
PIECE_BYTES = 1 << 18  # of a document, tokenized at a time


def fail(sentence):
    sys.exit("prepare_data.py: " + sentence)


def require(module, purpose):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        fail(f"{purpose} needs the Python package {module.split('.')[0]}: pip install {module.split('.')[0]}")


def write_whole(path, *parts):
    """A file that has its name only once it is whole."""
    with open(path + ".partial", "wb") as file:
        file.writelines(parts)
    os.replace(path + ".partial", path)


def read_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def read_settings(path):
    """The object in a JSON file; an empty one where there is no file."""
    try:
        settings = json.loads(read_text(path)) if os.path.exists(path) else {}
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is no JSON object")
    return settings


# --- files and their parts ----------------------------------------------------------------------------------

def kind_of(path, given):
    if given != "auto":
        return given
    suffix = os.path.splitext(path)[1].lower()
    return {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(suffix, "text")


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
        if os.path.isdir(name):
            found = sorted(os.path.join(folder, file) for folder, _, names in os.walk(name) for file in names
                           if is_wanted(os.path.join(folder, file), given))
        elif os.path.exists(name):
            found = [name]
        else:
            found = sorted(glob.glob(name, recursive=True))
        if not found:
            fail(f"there is no file {name}")
        files += [file for file in found if os.path.isfile(file)]
    return files


# A part of a file: bytes, or row groups of Parquet; `size` in bytes. A document may continue in the next item, and has
# ended when `closes`. `split` is set where the item has one split for all it holds.
Item = collections.namedtuple("Item", "number path kind start end size split closes")


def find_cut(text, at, newline, anywhere):
    """The first place after `at` where text can be cut: after a newline and, unless `anywhere`, so that the tokens stay
    the same. No tokenizer's piece reaches from a lone newline into the line after it."""
    while (at := text.find(newline, at) + 1) > 0:
        if anywhere or (text[at - 2:at - 1].strip() and text[at:at + 1].strip()):
            return at
    return len(text)


def pieces(text, step, newline, anywhere=False):
    """(start, end) of pieces of at least `step` of a str, or of bytes."""
    start = 0
    while start < len(text):
        end = find_cut(text, start + step, newline, anywhere)
        yield start, end
        start = end


def split_of(options, *place):
    """The split of a document: a function of its place alone."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "little") < options.val_fraction * 2**64 else "train"


def parquet_file(path):
    parquet = require("pyarrow.parquet", "reading Parquet")
    try:
        return parquet.ParquetFile(path)
    except Exception as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None


def items_of(files, options):
    """The parts of all files, in order."""
    number = 0
    for path in files:
        kind, size = kind_of(path, options.format), os.path.getsize(path)
        one_document = kind == "text" and options.document == "file"
        stretches = kind == "text" and options.document == "stretch"
        if kind == "parquet":
            groups = parquet_file(path).num_row_groups
            spans = [(group, group + 1, size // groups) for group in range(groups)]
        elif size:
            step = max(1 << 14, min(ITEM_BYTES, size // 100)) if stretches else ITEM_BYTES
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                spans = [(start, end, end - start) for start, end in pieces(data, step, b"\n", not (one_document or stretches))]
        else:
            spans = []
        split = split_of(options, number) if one_document else None
        for i, span in enumerate(spans):
            closes = not one_document or i + 1 == len(spans)
            yield Item(number + i, path, kind, *span, split, closes)
        number += len(spans)


# --- documents ----------------------------------------------------------------------------------------------

def read_item(item):
    with open(item.path, "rb") as file:
        file.seek(item.start)
        return file.read(item.end - item.start)


def records_of(item, columns):
    """The objects of JSON lines or of a Parquet row group."""
    if item.kind == "parquet":
        file = parquet_file(item.path)
        known = [column for column in columns if column in file.schema_arrow.names]
        if not known:
            raise ValueError(f"{item.path} has no column {columns[0]}; it has {', '.join(file.schema_arrow.names)}")
        yield from file.read_row_group(item.start, columns=known).to_pylist()
        return
    at = item.start
    for line in read_item(item).split(b"\n"):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{item.path}, byte {at}: this line is no JSON ({error})")
            if not isinstance(record, dict):
                raise ValueError(f"{item.path}, byte {at}: this line is no JSON object")
            yield record
        at += len(line) + 1


def field_of(record, name, item):
    if name not in record:
        raise ValueError(f"{item.path} has no field {name}; it has {', '.join(sorted(record))}: name one with --field")
    return record[name]


def plain_documents(item, options, report):
    """Documents: segments of text, each with whether it counts, and whether an end-of-text token follows."""
    def text_of(record):
        text = field_of(record, options.field, item)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{item.path} has a record whose {options.field} is {text!r:.40}, which is no text: name another with --field")
        return text

    if item.kind != "text":
        texts = filter(None, map(text_of, records_of(item, [options.field])))
    else:
        data = read_item(item)
        text = data.decode("utf-8", errors="replace")
        report["replaced"] += text.count("\ufffd") - data.count("\ufffd".encode())
        texts = filter(str.strip, text.split("\n")) if options.document == "line" else [text]
    for text in texts:
        yield [(text[start:end], True) for start, end in pieces(text, PIECE_BYTES, "\n")], item.closes


class Chat:
    """Conversations as text, by a chat template as Hugging Face has them."""

    def __init__(self, options, tokens):
        sandbox = require("jinja2.sandbox", "a chat template")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                            extensions=["jinja2.ext.loopcontrols"])

        def raise_exception(message):
            raise ValueError(f"the chat template refuses a conversation: {message}")

        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = time.strftime
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        # These marks delimit what the assistant said for other programs; here that follows from the messages.
        source = read_text(options.chat_template) if options.chat_template else tokens.template or SIMPLE_TEMPLATE
        source = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", source)
        try:
            self.template = environment.from_string(source)
        except Exception as error:
            fail(f"the chat template cannot be read: {error}")
        self.failures = TypeError, KeyError, require("jinja2", "a chat template").TemplateError  # of messages that are none
        self.special = {name: token_text(tokens.settings.get(name)) or "" for name in
                        ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.special["eos_token"] = self.special["eos_token"] or tokens.end_of_text

    def render(self, messages, prompt):
        return self.template.render(messages=messages, add_generation_prompt=prompt, **self.special)

    def segments(self, messages):
        """What the assistant says counts: what a message of its adds to the text before it."""
        segments, done = [], ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:i], True)
            after = self.render(messages[:i + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise ValueError("the chat template changes earlier messages when later ones come, so what the "
                                 "assistant said cannot be separated from the rest; give another with --chat-template")
            segments += [(before[len(done):], False), (after[len(before):], True)]
            done = after
        return [(text, counts) for text, counts in segments if text]


def chat_fields(options):
    return [options.messages_field, "prompt", "completion"]


def messages_of(record, options, item):
    if options.messages_field not in record and "prompt" in record and "completion" in record:
        messages = [{"role": "user", "content": record["prompt"]},
                    {"role": "assistant", "content": record["completion"]}]
    else:
        messages = field_of(record, options.messages_field, item)
    # As ShareGPT writes them: from and value.
    roles = {"human": "user", "gpt": "assistant"}
    return [{"role": roles.get(m["from"], m["from"]), "content": m["value"]} if "from" in m else m for m in messages]


def chat_documents(item, options, chat, report):
    if item.kind == "text":
        raise ValueError(f"{item.path} is plain text; conversations come as JSON lines or Parquet")
    for record in records_of(item, chat_fields(options)):
        try:
            segments = chat.segments(messages_of(record, options, item))
        except chat.failures as error:
            raise ValueError(f"{item.path} has a conversation that is no list of messages with role and content "
                             f"({type(error).__name__}: {error})")
        if segments:
            yield segments, True
        else:
            report["without_answer"] += 1


# --- workers ------------------------------------------------------------------------------------------------

WORKER = None  # in a process of the pool: the options, the Tokens, and the Chat with --chat


def start_worker(options, tokens):
    global WORKER
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    WORKER = options, tokens, Chat(options, tokens) if options.chat else None


def run_worker(item):
    """The item, (ids, whether each counts, whether it ends a document) of either split, and the counts of what was met."""
    options, tokens, chat = WORKER
    encode = getattr(tokens.tokenizer, "encode_batch_fast", tokens.tokenizer.encode_batch)
    report, out = collections.Counter(), {"train": ([], [], []), "val": ([], [], [])}
    documents = chat_documents(item, options, chat, report) if chat else plain_documents(item, options, report)
    for number, (segments, closes) in enumerate(documents):
        split = item.split or split_of(options, item.number, number)
        report[split] += closes
        ids, counts, ends = out[split]
        start = len(ids)
        encodings = encode([text for text, _ in segments], add_special_tokens=options.special_tokens and not chat)
        for (_, counted), encoding in zip(segments, encodings):
            ids += encoding.ids
            counts += [counted] * len(encoding)
        if closes and (len(ids) == start or ids[-1] != tokens.end_of_text_id):
            ids.append(tokens.end_of_text_id)
            counts.append(False)
        ends += [False] * (len(ids) - len(ends))
        if closes:
            ends[-1] = True
    return item, {split: (numpy.array(ids, numpy.uint32), numpy.array(counts if chat else [], bool), numpy.array(ends, bool))
                  for split, (ids, counts, ends) in out.items()}, report


# --- shards -------------------------------------------------------------------------------------------------

def header(*values):
    ints = numpy.zeros(HEADER_INTS, "<i4")
    ints[:len(values)] = values
    return ints.tobytes()


class Shards:
    """Writes one split's tokens into files of at most shard_tokens. A file has its name when it is whole."""

    def __init__(self, folder, split, dtype, shard_tokens, masked):
        self.folder, self.split, self.dtype, self.max, self.masked = folder, split, dtype, shard_tokens, masked
        self.file, self.count, self.mask, self.ends, self.shards = None, 0, [], [], []
        self.tokens = self.counted = 0

    def add(self, tokens, counts, ends):
        while len(tokens):
            if not self.file:
                self.path = os.path.join(self.folder, f"{self.split}_{len(self.shards):06d}.bin")
                self.file = open(self.path + ".partial", "wb")
                self.file.write(header(*SHARD_FORMATS[self.dtype], 0))
            room = self.max - self.count
            self.file.write(tokens[:room].astype(self.dtype))
            self.mask.append(counts[:room])
            self.ends.append(ends[:room])
            self.count += len(tokens[:room])
            tokens, counts, ends = tokens[room:], counts[room:], ends[room:]
            if self.count == self.max:
                self.close()

    def write_bits(self, suffix, magic, bits):
        write_whole(self.path[:-len(".bin")] + suffix, header(magic, BITS_VERSION, self.count),
                    numpy.packbits(bits, bitorder="little"))

    def close(self):
        if not self.file:
            return
        self.file.seek(0)
        self.file.write(header(*SHARD_FORMATS[self.dtype], self.count))
        self.file.close()
        counted = self.count
        if self.masked:
            bits = numpy.concatenate(self.mask)
            counted = int(bits.sum())
            self.write_bits(".mask", MASK_MAGIC, bits)
        self.write_bits(".ends", ENDS_MAGIC, numpy.concatenate(self.ends))
        os.replace(self.path + ".partial", self.path)
        self.shards.append({"file": os.path.basename(self.path), "tokens": self.count, "counted_tokens": counted})
        self.tokens += self.count
        self.counted += counted
        self.file, self.count, self.mask, self.ends = None, 0, [], []


def show_progress(start, done, total, tokens, end=""):
    """Bytes, tokens and speed since `start` on standard error; a terminal shows it in place of the line before."""
    share = f"{100 * done / total:.0f}% of {total / 1e6:.1f} MB" if total else "nothing"
    rate = done / max(time.time() - start, 1e-9) / 1e6
    terminal = sys.stderr.isatty()
    print(("\r\033[K" if terminal else "") + f"{share}, {tokens:,} tokens, {rate:.1f} MB/s",
          end=end if terminal else "\n", file=sys.stderr, flush=True)


# --- tokenizers ---------------------------------------------------------------------------------------------

def train_tokenizer(files, options, path):
    tokenizer = tokenizers.ByteLevelBPETokenizer(trim_offsets=True)
    before = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence([
        before.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated"),
        before.ByteLevel(add_prefix_space=False, use_regex=False)])

    def texts():
        left = options.tokenizer_sample
        for item in items_of(files, options):
            if options.chat:
                some = (message["content"] for record in records_of(item, chat_fields(options))
                        for message in messages_of(record, options, item))
            else:
                some = (text for segments, _ in plain_documents(item, options, collections.Counter())
                        for text, _ in segments)
            for text in some:
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


def token_text(value):
    return value["content"] if isinstance(value, dict) else value


class Tokens:
    """The tokenizer in the output folder, and what is known about its special tokens."""

    def __init__(self, options, files):
        self.path = os.path.join(options.out, "tokenizer.json")
        self.settings, self.generation, self.template = {"tokenizer_class": "PreTrainedTokenizerFast"}, {}, None
        if options.train_tokenizer:
            train_tokenizer(files, options, self.path)
        else:
            self.copy(options.tokenizer)
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
        self.write_end(options.end_of_text)

    def write_end(self, given):
        """Says what ends a text to whoever reads the folder: a checkpoint takes these files along."""
        for name, settings, key, value in [("tokenizer_config.json", self.settings, "eos_token", self.end_of_text),
                                           ("generation_config.json", self.generation, "eos_token_id", self.end_of_text_id)]:
            if given or settings.get(key) is None:
                settings[key] = value
            write_whole(os.path.join(os.path.dirname(self.path), name), (json.dumps(settings, indent=1) + "\n").encode())

    def copy(self, source):
        folder, file = os.path.split(source)
        if os.path.isdir(source):
            folder, file = source, "tokenizer.json"
        if not os.path.isfile(os.path.join(folder, file)):
            fail(f"there is no {os.path.join(folder, file)}; --tokenizer names a tokenizer.json or a directory with one")
        for name in (file, "special_tokens_map.json", "chat_template.jinja"):
            copy = os.path.join(os.path.dirname(self.path), "tokenizer.json" if name == file else name)
            with contextlib.suppress(FileNotFoundError, shutil.SameFileError):
                shutil.copyfile(os.path.join(folder, name), copy)
        settings, generation, jinja = (os.path.join(folder, name) for name in
                                       ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"))
        self.settings, self.generation = read_settings(settings) or self.settings, read_settings(generation)
        template = self.settings.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        self.template = read_text(jinja) if os.path.exists(jinja) else template

    def manifest(self):
        with open(self.path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        return {"file": os.path.basename(self.path), "sha256": digest, "vocab_size": self.vocab_size,
                "end_of_text": self.end_of_text, "end_of_text_id": self.end_of_text_id}


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
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    options = parser.parse_args()
    for good, sentence in [
        (0 <= options.val_fraction < 1, f"--val-fraction {options.val_fraction}: give a share from 0 to below 1"),
        (1 <= options.shard_tokens < 2**31, f"--shard-tokens {options.shard_tokens}: a shard holds from 1 to {2**31 - 1} tokens"),
        (options.workers >= 1, f"--workers {options.workers}: at least one process is needed"),
        (not options.train_tokenizer or options.train_tokenizer >= 257,
         f"--train-tokenizer {options.train_tokenizer}: 256 bytes and the end of text make 257 tokens at least"),
    ]:
        if not good:
            fail(sentence)
    return options


def make_shards(files, options, tokens):
    shards = {split: Shards(options.out, split, tokens.dtype, options.shard_tokens, options.chat) for split in ("train", "val")}
    old = [os.path.join(options.out, name) for name in os.listdir(options.out)
           if re.fullmatch(r"(train|val)_\d{6}\.(bin|mask|ends)(\.partial)?", name)]
    for path in {os.path.realpath(path) for path in old} & {os.path.realpath(file) for file in files}:
        fail(f"{path} is an input, and a shard would be written there; name another --out")
    for path in old:
        os.remove(path)
    totals, done, total = collections.Counter(), 0, sum(os.path.getsize(file) for file in files)
    start, shown = time.time(), 0
    if options.chat:
        Chat(options, tokens)  # a template that cannot be read is said once, here
    with multiprocessing.Pool(options.workers, start_worker, (options, tokens)) as pool:
        for item, parts, report in pool.imap(run_worker, list(items_of(files, options))):
            for split, arrays in parts.items():
                shards[split].add(*arrays)
                totals["tokens"] += len(arrays[0])
            totals.update(report)
            done += item.size
            if time.time() - shown > (0.2 if sys.stderr.isatty() else 10):
                shown = time.time()
                show_progress(start, done, total, totals["tokens"])
    show_progress(start, done, total, totals["tokens"], end="\n")
    for split in shards.values():
        split.close()
    return shards, totals


def write_manifest(files, options, tokens, shards, totals):
    manifest = {
        "format": "lce.c shards", "version": 1, "dtype": tokens.dtype, "masked": options.chat, "tokenizer": tokens.manifest(),
        "splits": {split: {"documents": totals[split], "tokens": s.tokens, "counted_tokens": s.counted,
                           "shards": s.shards} for split, s in shards.items() if s.shards},
        "inputs": [{"file": file, "bytes": os.path.getsize(file)} for file in files],
        "arguments": sys.argv[1:],
    }
    write_whole(os.path.join(options.out, "manifest.json"), (json.dumps(manifest, indent=1) + "\n").encode())


def prepare(options):
    files = find_files(options.inputs, options.format)
    os.makedirs(options.out, exist_ok=True)
    tokens = Tokens(options, files)
    shards, totals = make_shards(files, options, tokens)
    if not shards["train"].tokens:
        fail(f"there is no {'message of the assistant' if options.chat else 'text'} in " + ", ".join(options.inputs))
    write_manifest(files, options, tokens, shards, totals)
    for split, s in shards.items():
        counted = f", of which {s.counted:,} count" if options.chat else ""
        print(f"{split}: {totals[split]:,} documents, {s.tokens:,} tokens{counted}, {len(s.shards)} shards")
    if options.val_fraction > 0 and not shards["val"].tokens:
        print("no document was drawn for validation: there are few; raise --val-fraction, cut files with --document stretch or "
              "line, or prepare others for it")
    if totals["replaced"]:
        print(f"{totals['replaced']:,} characters were no UTF-8 and became U+FFFD")
    if totals["without_answer"]:
        print(f"{totals['without_answer']:,} conversations have no message of the assistant and were left out")
    print(f"./train --vocab {tokens.vocab_size} --data '{options.out}/train_*.bin'"
          + (f" --val-data '{options.out}/val_*.bin'" if shards["val"].tokens else "") + f" --tokenizer {options.out}")


def main():
    options = parse_options()
    require("numpy", "writing shards")
    require("tokenizers", "making tokens")
    try:
        prepare(options)
    except OSError as error:
        fail(f"{error.filename or options.out}: {error.strerror or error}")
    except ValueError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
