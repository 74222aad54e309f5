#!/usr/bin/env python3
"""Makes token shards for ./train from text, JSON, CSV, Parquet, Arrow or conversations.

    tools/prepare_data.py corpus/ --tokenizer gpt2/ --out shards
    tools/prepare_data.py 'web/*.parquet' --field text --train-tokenizer 32000 --out shards
    tools/prepare_data.py chats.jsonl --chat --tokenizer Llama-3.2-1B-Instruct/ --out sft
    ./train --init Llama-3.2-1B-Instruct --data sft --pack documents --save run

--out gets llm.c's shards: each document whole, in train or in val, and closed by the end-of-text token. x.ends beside x.bin has the
documents' ends (--pack documents; see data/source.h), and with --chat x.mask says which tokens are learned. The tokenizer's files
say what was done (chat template, tokens that end a text), so that a model that ./train saves behaves as it was trained. Files may
be compressed by gzip. A run that fails leaves --out as it was.

Needs: pip install tokenizers numpy; for --chat also transformers jinja2; for Parquet and Arrow also datasets.
"""
import argparse
import collections
import concurrent.futures.process as futures
import csv
import ctypes
import fcntl
import glob
import gzip
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import time

from chat import Chat, messages_of

SHARD_FORMATS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic, version
MASK_MAGIC, ENDS_MAGIC, HEADER_INTS = (20261120, 1), (20261121, 1), 256
LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
END_OF_TEXT_NAMES = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>", "<|im_end|>"]
# For a tokenizer without a chat template: a heading for each message, the end of the text after each answer.
SIMPLE_TEMPLATE = (
    "{% for message in messages %}{{ '' if loop.first else '\n\n' }}### {{ message['role'] | capitalize }}:\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{{ '\n\n### Assistant:\n' if add_generation_prompt else '' }}")
CUT = re.compile(r"\n(?=\w)")  # where a long document is cut
PIECE_CHARS, BATCH_CHARS, BATCH_ITEMS = 1 << 18, 1 << 19, 64  # a worker takes a batch at a time
ITEM_SECONDS, WORKER_BYTES, MOST_IDS = 10, 4 << 30, 2**31 - 1  # limits of a record, of a worker, of a vocabulary
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
FILES = ["tokenizer_config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"]
STAGING, FORMAT = ".prepare_data.partial", "lce.c shards"
# What is written to --out; in a folder with a manifest of ours these names are ours.
OUTPUTS = re.compile("|".join([r"(train|val)_\d{6}\.(bin|mask|ends)", "tokenizer.json", "manifest.json", STAGING, *FILES]))


def count(number, noun):
    return f"{number:,} {noun}{'s' * (number != 1)}"


def read_settings(path):
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON object ({error})") from None


def write_settings(path, settings):
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def kind_of(path, options):
    suffix = os.path.splitext(re.sub(r"\.gz$", "", path.lower()))[1]
    return KINDS.get(suffix, "text") if options.format == "auto" else options.format


def open_text(path):
    """The file, and its text, in which a byte that is no UTF-8 is half of a surrogate pair."""
    raw = open(path, "rb")
    file = gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw
    head = file.peek(1 << 13)[:1 << 13]
    if b"\0" in head or head.decode(errors="replace").count("\ufffd") > len(head) // 8:
        raise UnicodeError("it is no UTF-8 text; make UTF-8 text of it first (gzip alone is decompressed)")
    return raw, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", "\n")


def find_files(options):
    for name in options.inputs:
        found = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
        if os.path.isdir(name):
            found = [str(path) for path in sorted(pathlib.Path(name).rglob("*")) if "/." not in f"/{path.relative_to(name)}"]
        if not any(map(os.path.isfile, found)):
            raise ValueError(f"there is no file {name}")
        yield from filter(os.path.isfile, found)


def without_nulls(value, feature):
    """A struct of Arrow has every member: null is what a record does not have. A value of type Json is as it was."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: without_nulls(member, feature[name]) for name, member in value.items() if member is not None}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return [without_nulls(member, inner) for member in value] if isinstance(value, list) else value


def items_of(path, options):
    """Bytes read so far, where an item is, and the item: plain text with whether it begins and ends a document (a tuple), a record in
    JSON (a str), or a record."""
    kind, size = kind_of(path, options), os.path.getsize(path)
    raw, file = (None, None) if kind in ("parquet", "arrow") else open_text(path)
    if kind == "text" and options.chat:
        raise ValueError("it is plain text; conversations come as JSON, Parquet or Arrow")
    elif kind == "text" and options.document != "line":  # cut before a letter or digit, see Tokens
        stretch, text, opens = options.document == "stretch", "", True
        length = max(1 << 14, min(1 << 22, size // 100)) if stretch else options.piece_chars
        while block := file.read(length):
            text += block
            cut = max((found.end() for found in CUT.finditer(text, len(text) - len(block) - 1)), default=0)
            if cut and length > 0:
                yield raw.tell(), path, (text[:cut], opens, stretch)
                text, opens = text[cut:], stretch
        if text:
            yield size, path, (text, opens, True)
    elif kind in ("text", "jsonl"):
        for number, line in enumerate(file, 1):
            if kind == "jsonl" and line.lstrip().startswith("["):
                for number, record in enumerate(json.loads(line + file.read()), 1):
                    yield size, f"{path}, record {number}", record
            elif line.strip():
                yield raw.tell(), f"{path}, line {number}", line if kind == "jsonl" else (line.removesuffix("\n"), True, True)
    elif kind == "csv":
        csv.field_size_limit(sys.maxsize)
        for number, row in enumerate(csv.DictReader(file, strict=True), 1):
            yield raw.tell(), f"{path}, row {number}", row
    else:
        import datasets
        # Unlike load_dataset this takes a file where ./arrow is a folder that datasets saved.
        rows = datasets.load_dataset_builder(kind, data_files=path).as_streaming_dataset("train")
        features = dict(rows.features or {})
        if not options.chat and options.field in (rows.column_names or []):
            rows = rows.select_columns(options.field)
        for number, row in enumerate(rows, 1):
            yield size, f"{path}, row {number}", without_nulls(row, features)


def all_items(files, options, report):
    before = 0
    for path in files:
        try:
            yield from ((before + done, *item) for done, *item in items_of(path, options))
        except (ImportError, GeneratorExit):
            raise
        except Exception as error:
            if not isinstance(error, UnicodeError) or path in options.inputs:
                raise ValueError(f"{path} cannot be read: {str(error).partition(chr(10))[0] or type(error).__name__}") from None
            report["binary"] += 1  # in a folder
        before += os.path.getsize(path)


class Texts:
    """Reads and encodes plain text, as Chat does conversations. Where it is cut, an x stands for the text beyond."""

    def __init__(self, options, tokens=None):
        self.options, self.tokens = options, tokens

    def read(self, item):
        field = self.options.field
        if isinstance(item, tuple):
            return item
        if self.options.chat:  # to train a tokenizer on
            messages = messages_of(item, self.options.messages_field)[0]
            return "\n".join(message.get("content", "") for message in messages), True, True
        if not isinstance(item.get(field), (str, type(None))) or field not in item:
            raise ValueError(f"the record has no text {field}; it has {', '.join(sorted(item))}: name one with --field")
        return item[field], True, True

    def encode(self, read, report):
        tokens = self.tokens
        texts = [("" if opens else "x\n") + text + ("" if closes else "x") for text, opens, closes in read]
        for (text, opens, closes), encoding in zip(read, tokens.engine.encode_batch(texts, add_special_tokens=False)):
            first, last, end = 0, len(encoding), len(text) + (0 if opens else 2)
            while not opens and first < last and encoding.token_to_chars(first)[0] < 2:
                first += 1
            while not closes and first < last and encoding.token_to_chars(last - 1)[0] >= end:
                last -= 1
            ids, named = encoding.ids[first:last], len(tokens.named.findall(text))
            if named and not tokens.special_ids.isdisjoint(ids):
                raise ValueError("it makes special tokens of their names in plain text; give --parse-special")
            report["named"] += named
            yield tokens.around[0] * opens + ids + tokens.around[1] * closes, True, set()


def begin_worker(its_reader, parent, environment):
    def too_slow(*_):
        raise TimeoutError(f"it takes more than {ITEM_SECONDS} seconds")

    global reader
    reader = its_reader
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent, however that ends
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, too_slow)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (min(WORKER_BYTES, hard % 2**64), hard))  # -1: none


def start_workers(number, reader, **environment):
    """Forks workers, before this process has threads."""
    fork = multiprocessing.get_context("fork")
    workers = futures.ProcessPoolExecutor(number, fork, begin_worker, (reader, os.getpid(), environment))
    workers.submit(int).result()
    return workers


def read_item(item, report):
    """What the reader makes of an item: its text and more. None: it is empty. A str: what is wrong."""
    signal.alarm(ITEM_SECONDS)
    try:
        item = json.loads(item) if isinstance(item, str) else item
        if not isinstance(item, (dict, tuple)):
            raise ValueError("this is no JSON object")
        text, *more = reader.read(item) or [None]
    except Exception as error:
        return str(error) if type(error) is ValueError else f"it cannot be read or rendered ({type(error).__name__}: {error})"
    finally:
        signal.alarm(0)
    text, replaced = re.subn("[\ud800-\udfff]", "\ufffd", text or "")  # which no tokenizer takes
    report["replaced"] += replaced
    return (text, *more) if text else None


def encode_items(items):
    """Of each item its ids, whether they count, and the special tokens that end what is learned; or what read_item says of it."""
    report = collections.Counter()
    read = [read_item(item, report) for item in items]
    try:
        made = iter(list(reader.encode([result for result in read if isinstance(result, tuple)], report)))
    except BaseException as error:  # a panic is no Exception
        raise ValueError(f"the tokenizer fails on the text: {error}") from None
    return [next(made) if isinstance(result, tuple) else result for result in read], report


def encoded(files, options, reader, report):
    """Batches of items in order, what workers make of them, and counts for the report."""
    workers, waiting, batch, chars = start_workers(options.workers, reader), collections.deque(), [], 0
    for entry in itertools.chain(all_items(files, options, report), [None]):  # None: after the last
        if entry:
            batch.append(entry)
            chars += len(entry[2][0] if isinstance(entry[2], tuple) else entry[2])
        if not entry or len(batch) == BATCH_ITEMS or chars > BATCH_CHARS:
            waiting.append((batch, workers.submit(encode_items, [item for *_, item in batch])))
            batch, chars = [], 0
        while waiting and (not entry or len(waiting) > 4 * options.workers):
            done, future = waiting.popleft()
            yield done, *future.result()


class Shards:
    """A split's tokens, which of them count and which end a document, in files of at most shard_tokens."""

    def __init__(self, path, tokens, options):
        self.path, self.end, self.size, self.masked = path, tokens.end_id, options.shard_tokens, options.chat
        self.files = [(".bin", "id", SHARD_FORMATS[tokens.dtype]), (".ends", "ends", ENDS_MAGIC)]
        self.files += [(".mask", "counts", MASK_MAGIC)] * self.masked
        self.type = numpy.dtype([("id", tokens.dtype), ("counts", bool), ("ends", bool)])
        self.parts, self.waiting, self.made = [], 0, {"documents": 0, "tokens": 0, "counted_tokens": 0, "shards": []}

    def add(self, ids, counts, closes):
        """A piece's tokens, and whether they count. With masks, an end of text that is added does not."""
        added = closes and (not ids or ids[-1] != self.end)
        part = numpy.zeros(len(ids) + added, self.type)
        part["id"][:len(ids)], part["id"][len(ids):] = ids, self.end
        part["counts"][:len(ids)], part["counts"][len(ids):] = counts, not self.masked
        part["ends"][-1:] = closes
        self.parts.append(part)
        self.waiting += len(part)
        self.made["documents"] += closes
        if self.waiting >= self.size:
            self.write(self.size)

    def write(self, least=1):
        """Writes the full shards of what waits; with `least` 1 all of it."""
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


def make_shards(files, options, tokens, folder):
    """What was made of each split, the tokens that end what is learned, and counts for the report."""
    shards = {split: Shards(str(folder / split), tokens, options) for split in ("train", "val")}
    total, start, number, stops, report = sum(map(os.path.getsize, files)), time.monotonic(), 0, set(), collections.Counter()
    shown = start
    for batch, results, counts in encoded(files, options, tokens.reader, report):
        report += counts
        for (done, place, item), result in zip(batch, results):
            if isinstance(result, str):
                if not options.skip_bad:
                    raise ValueError(f"{place}: {result} (--skip-bad leaves out what is wrong)")
                print(f"{place}: {result}", file=sys.stderr)
                report["bad"] += 1
            elif result:
                closes, (ids, learned, ends) = not isinstance(item, tuple) or item[2], result
                digest = int.from_bytes(hashlib.blake2b(b"%d" % number, digest_size=8).digest(), "little")
                shards["val" if digest < options.val_fraction * 2**64 else "train"].add(ids, learned, closes)
                number += closes
                stops |= ends
                report["endless"] += options.chat and not ends
            else:
                report["unlearned"] += options.chat
        if batch and time.monotonic() > shown + 1:
            shown, made = time.monotonic(), sum(split.made["tokens"] + split.waiting for split in shards.values())
            speed = done / (shown - start)
            print(f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {count(number, 'document')}, {count(made, 'token')}, "
                  f"{speed / 1e6:.1f} MB/s, {(total - done) / (speed + 1):,.0f} s left", file=sys.stderr, flush=True)
    for split in shards.values():
        split.write()
    return {name: split.made for name, split in shards.items() if split.made["tokens"]}, stops, report


def train_tokenizer(files, options, path):
    """Trains a byte-level BPE."""
    def texts():
        left = options.tokenizer_sample
        for _, place, item in all_items(files, options, collections.Counter()):
            result = read_item(item, collections.Counter())
            if isinstance(result, str) and not options.skip_bad:
                raise ValueError(f"{place}: {result} (--skip-bad leaves out what is wrong)")
            if isinstance(result, tuple) and left > 0:
                left -= len(result[0])
                yield result[0]

    print(f"training a tokenizer of {options.train_tokenizer:,} tokens ...", file=sys.stderr)
    tokenizer, before = tokenizers.ByteLevelBPETokenizer(trim_offsets=True), tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence([before.Split(tokenizers.Regex(LLAMA3_SPLIT), behavior="isolated"),
                                               before.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.train_from_iterator(texts(), vocab_size=options.train_tokenizer, min_frequency=0,
                                  special_tokens=[END_OF_TEXT_NAMES[0]], show_progress=sys.stderr.isatty())
    made = tokenizer.get_vocab_size()
    if made < options.train_tokenizer:
        print(f"the text has pairs for a vocabulary of {made:,} only, not {options.train_tokenizer:,}", file=sys.stderr)
    tokenizer.save(path)


def take_tokenizer(files, options, folder):
    """Puts the tokenizer's files into `folder`."""
    if options.train_tokenizer:  # in a worker, for which an interrupt does not wait
        worker = start_workers(1, Texts(options), TOKENIZERS_PARALLELISM="true")
        worker.submit(train_tokenizer, files, options, str(folder / "tokenizer.json")).result()
        return worker.shutdown()
    source = pathlib.Path(options.tokenizer, *["tokenizer.json"] * os.path.isdir(options.tokenizer))
    for path, copy in [(source, "tokenizer.json"), *((source.parent / name, name) for name in FILES)]:
        if path == source or os.path.lexists(path):
            if not path.is_file():
                raise ValueError(f"{path} is no regular file; --tokenizer names a tokenizer.json or a directory with one")
            shutil.copyfile(path, folder / copy)
    if options.chat and (source.parent / "additional_chat_templates").is_dir():
        shutil.copytree(source.parent / "additional_chat_templates", folder / "additional_chat_templates")


class Tokens:
    """The tokenizer in `folder`, whose files get what this run decides, and what is known of it."""

    def __init__(self, folder, options):
        self.folder, self.config, self.prefix, self.around = folder, folder / "tokenizer_config.json", "", ([], [])
        settings = read_settings(self.config) or {"tokenizer_class": "PreTrainedTokenizerFast"}
        if "added_tokens_decoder" not in settings:  # as transformers reads them
            settings |= read_settings(folder / "special_tokens_map.json")
        given = {key: value.get("content") if isinstance(value, dict) else value
                 for key, value in settings.items() if key.endswith("_token")}
        self.engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary = self.engine.get_vocab()
        wanted = [options.end_of_text] if options.end_of_text else [given.get("eos_token"), *END_OF_TEXT_NAMES]
        self.end = next((name for name in wanted if name in vocabulary), None)
        if not self.end:
            raise ValueError(f"the tokenizer has no token {' or '.join(filter(None, wanted))}; name one with --end-of-text")
        if options.chat:
            tokenizer, settings = self.save_by_transformers(options, len(vocabulary))
            self.engine = tokenizer.backend_tokenizer
            vocabulary = self.engine.get_vocab()
        self.engine.no_padding()
        self.engine.no_truncation()
        self.end_id, self.vocab_size = vocabulary[self.end], max(vocabulary.values()) + 1
        if self.vocab_size > MOST_IDS:
            raise ValueError(f"{options.tokenizer} has the id {self.vocab_size - 1}; it must be below {MOST_IDS}")
        self.dtype = "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        added = [token for token in self.engine.get_added_tokens_decoder().values() if token.special]
        self.special = {name: vocabulary[name] for name in {self.end, *given.values(), *(token.content for token in added)}
                        if name in vocabulary and len(name) > 1}
        names = [] if options.parse_special else map(re.escape, sorted(self.special, key=len, reverse=True))
        self.named, self.special_ids = re.compile("|".join(names) or "(?!)"), set(self.special.values())
        if options.special_tokens or options.chat:
            encoding = self.engine.encode("x")
            own = [i for i, special in enumerate(encoding.special_tokens_mask) if not special] or [0]
            self.prefix = "".join(map(self.engine.id_to_token, encoding.ids[:own[0]]))
            self.around = ([], []) if options.chat else (encoding.ids[:own[0]], encoding.ids[own[-1] + 1:])
        self.reader = Chat(tokenizer, self, options) if options.chat else Texts(options, self)
        if not options.chat:
            self.engine.post_processor, self.engine.encode_special_tokens = None, not options.parse_special
            # Cuts need that no token reaches from a newline into a letter or digit. Any model then makes the same tokens of
            # both sides apart, given a character of the other side.
            texts = self.engine.decode_batch([[id] for id in vocabulary.values()], skip_special_tokens=False)
            kept = not self.engine.normalizer or self.engine.normalizer.normalize_str("\nx\n").count("\n") == 2
            options.piece_chars = PIECE_CHARS if kept and not any(map(CUT.search, texts)) else -1
        write_settings(self.config, settings | {"eos_token": self.end, "add_bos_token": bool(self.around[0])})
        for name in "special_tokens_map.json", "added_tokens.json":  # all of it is in tokenizer_config.json
            (folder / name).unlink(missing_ok=True)

    def save_by_transformers(self, options, size):
        import jinja2  # noqa: F401
        from transformers import PreTrainedTokenizerFast
        tokenizer, path = PreTrainedTokenizerFast.from_pretrained(self.folder), self.folder / "tokenizer.json"
        tokenizer.eos_token, own = self.end, path.read_bytes()
        if options.chat_template:
            tokenizer.chat_template = pathlib.Path(options.chat_template).read_text(encoding="utf-8")
        tokenizer.chat_template = tokenizer.chat_template or SIMPLE_TEMPLATE
        shutil.rmtree(self.folder / "additional_chat_templates", ignore_errors=True)  # ./train copies no folders
        tokenizer.save_pretrained(self.folder, save_jinja_files=isinstance(tokenizer.chat_template, str))
        if len(tokenizer) == size:  # it may write the same tokenizer otherwise, and ./train compares it with the model's
            path.write_bytes(own)
        settings = read_settings(self.config) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # which transformers 4 has, too
        return tokenizer, {key: value for key, value in settings.items() if key not in ("is_local", "local_files_only", "backend")}

    def write_stops(self, stops, options):
        path = self.folder / "generation_config.json"
        generation = read_settings(path)
        known = generation.get("eos_token_id", []) if not options.end_of_text else []
        ids = list(dict.fromkeys([self.end_id, *sorted(stops), *(known if isinstance(known, list) else [known])]))
        write_settings(path, generation | {"eos_token_id": ids if len(ids) > 1 else ids[0]})


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", help="files, directories or globs")
    parser.add_argument("--out", required=True, help="the folder for shards, tokenizer and manifest")
    add = parser.add_argument_group("inputs").add_argument
    add("--format", choices=["auto", "text", "jsonl", "csv", "parquet", "arrow"], default="auto", help="what the files are "
        "(by suffix; JSON is one record a line, or an array)")
    add("--field", default="text", help="where the text is in records (text)")
    add("--document", choices=["file", "stretch", "line"], default="file", help="what a document is in plain text (file); a "
        "stretch is a hundredth of a file, from 16 Ki to 4 Mi characters")
    add("--skip-bad", action="store_true", help="leave out records that are wrong, and name them")
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer", help="a tokenizer.json, or a directory with one (and tokenizer_config.json)")
    add("--train-tokenizer", type=int, metavar="V", help="or train a byte-level BPE of V tokens, split as Llama 3's")
    add("--tokenizer-sample", type=int, default=1 << 30, metavar="CHARS", help="characters to train it on (2^30)")
    add("--end-of-text", metavar="TOKEN", help="what ends a document (the tokenizer's eos_token)")
    add("--special-tokens", action="store_true", help="add what the tokenizer puts around a text, such as a BOS")
    add("--parse-special", action="store_true", help="names of special tokens in a text are these tokens, not text")
    add = parser.add_argument_group("conversations").add_argument
    add("--chat", action="store_true", help="records are conversations, of which the answers are learned")
    add("--messages-field", default="messages", help="where the messages are (messages)")
    add("--chat-template", metavar="FILE", help="a Jinja template (the tokenizer's, or a simple one)")
    add = parser.add_argument_group("shards").add_argument
    add("--val-fraction", type=float, default=0.01, metavar="SHARE", help="of documents, for validation (0.01)")
    add("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens of a shard (100,000,000)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (one for each core)")
    options = parser.parse_args()
    for name, least, most in [("val_fraction", 0, 0.999999), ("shard_tokens", 1, 2**31 - 1), ("workers", 1, 4096),
                              ("train_tokenizer", 257, 2**20)]:
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            parser.error(f"--{name.replace('_', '-')} {value}: give {least} to {most}")
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        parser.error("give --tokenizer or --train-tokenizer")
    if options.chat_template and not (options.chat and os.path.isfile(options.chat_template)):
        parser.error(f"--chat-template {options.chat_template}: give a regular file, and --chat")
    options.piece_chars = PIECE_CHARS
    return options


def prepare(files, options, staging):
    """Makes everything in `staging`; gives lines to print."""
    global numpy, tokenizers
    os.environ.update(RAYON_NUM_THREADS=str(options.workers), TOKENIZERS_PARALLELISM="false", RUST_BACKTRACE="0",
                      HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    import numpy
    import tokenizers
    take_tokenizer(files, options, staging)
    try:
        tokens = Tokens(staging, options)
    except (ValueError, OSError, ImportError, KeyboardInterrupt):
        raise
    except BaseException as error:  # tokenizers has no class for its errors, and a panic is no Exception
        raise ValueError(f"{options.tokenizer} is no tokenizer that can be used ({type(error).__name__}: {error})") from None
    made, stops, report = make_shards(files, options, tokens, staging)
    if "train" not in made:
        raise ValueError(f"there is no {'message of the assistant' if options.chat else 'text'} in {', '.join(options.inputs)}")
    tokens.write_stops(stops, options)
    write_settings(staging / "manifest.json", {
        "format": FORMAT, "version": 1, "dtype": tokens.dtype, "masked": options.chat, "bos": tokens.around[0], "splits": made,
        "tokenizer": {"file": "tokenizer.json", "sha256": hashlib.sha256((staging / "tokenizer.json").read_bytes()).hexdigest(),
                      "vocab_size": tokens.vocab_size, "end_of_text": tokens.end, "end_of_text_id": tokens.end_id},
        "inputs": [{"file": file, "bytes": os.path.getsize(file)} for file in files], "arguments": sys.argv[1:]})
    for split, m in made.items():
        counted = f", of which {m['counted_tokens']:,} count" if options.chat else ""
        yield f"{split}: {count(m['documents'], 'document')}, {count(m['tokens'], 'token')}{counted}, {count(len(m['shards']), 'shard')}"
    if options.val_fraction > 0 and "val" not in made:
        yield "no document was drawn for validation: raise --val-fraction, or cut files with --document stretch or line"
    for name, noun, what in [
            ("binary", "file", "left out: no text"), ("replaced", "invalid character", "replaced by U+FFFD"), ("bad", "record", "left out, named above"),
            ("unlearned", "conversation", "left out: there is nothing to learn in it"),
            ("named", "name", "of special tokens in the text are ordinary text; with --parse-special they are these tokens"),
            ("endless", "conversation", "where no special token ends an answer, so that the model does not learn to stop; give a "
             "--chat-template that ends each answer with {{ eos_token }}")]:
        if report[name]:
            yield f"{count(report[name], noun)} {what}"
    known = options.tokenizer and os.path.exists(os.path.join(options.tokenizer, "config.json"))
    model = f"--init {options.tokenizer if known else 'MODEL'} --pack documents" if options.chat else f"--vocab {tokens.vocab_size}"
    yield f"./train {model} --data {options.out}"


def publish(staging, out):
    """Moves what was made into place, the manifest last, and removes what only an earlier run had."""
    def sync(path):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)

    for number in signal.SIGINT, signal.SIGTERM:  # from here on it is done, or not begun
        signal.signal(number, signal.SIG_IGN)
    made = sorted(os.listdir(staging), key=lambda name: (name == "manifest.json", name))
    for name in made:
        sync(staging / name)
    (out / "manifest.json").unlink(missing_ok=True)  # without which ./train takes no mixture of two runs
    for name in made:
        if name == "manifest.json":
            for old in set(filter(OUTPUTS.fullmatch, os.listdir(out))) - {STAGING, *made}:
                os.remove(out / old)
        os.replace(staging / name, out / name)
    sync(out)


def run(options, out):
    out.mkdir(parents=True, exist_ok=True)
    lock, staging, until = os.open(out, os.O_RDONLY), out / STAGING, time.monotonic() + 2
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise ValueError(f"another run writes to {out}; wait for it, or name another --out") from None
            time.sleep(0.1)  # the workers of a run that has ended may hold it a moment longer
    files = list(find_files(options))
    # What --out may lose is an earlier run's, and no link and no input.
    own, inputs = staging.is_dir() or read_settings(out / "manifest.json").get("format") == FORMAT, set(map(os.path.realpath, files))
    for path in sorted(out / name for name in os.listdir(out) if OUTPUTS.fullmatch(name)):
        if not own or path.is_symlink() or os.path.realpath(path) in inputs:
            raise ValueError(f"{path} would be replaced, and is an input or not of an earlier run; name another --out")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        lines = list(prepare(files, options, staging))
        publish(staging, out)
        print(*lines, sep="\n", flush=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main():
    options, wrong = parse_options(), None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(options, pathlib.Path(options.out))
    except KeyboardInterrupt:
        wrong = f"interrupted; {options.out} is as it was"
    except ImportError as error:
        wrong = f"a Python package is missing ({error}): pip install -U {__doc__[__doc__.index('tokenizers numpy'):].strip()}"
    except futures.BrokenProcessPool:
        wrong = "a worker was ended, as where memory runs out; give fewer --workers"
    except OSError as error:
        wrong = f"{error.filename or options.out}: {error.strerror or error}"
    except (ValueError, MemoryError) as error:
        wrong = str(error) or "there is too little memory"
    if wrong:
        print("prepare_data.py: " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in wrong), file=sys.stderr, flush=True)
    os._exit(1 if wrong else 0)  # without waiting for a worker that is stuck


if __name__ == "__main__":
    main()
