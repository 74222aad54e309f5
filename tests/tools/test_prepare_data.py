#!/usr/bin/env python3
"""tools/prepare_data.py: its shards against `tokenizers` itself, masks, errors, and ./train on what it made.

Prints TAP, as the other tests do. Skipped where the packages are missing.
"""
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tap  # noqa: E402
from tap import Skip  # noqa: E402
GOLDEN = os.path.join(ROOT, "tests", "golden", "tokenizers")
TRAIN = os.path.abspath(os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train")))

try:
    import numpy
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"1..1\nok 1 # SKIP {missing}: pip install tokenizers numpy")
    sys.exit(0)


class TempDir:
    """A folder that goes away."""

    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="lce-prepare-")

    def __call__(self, *names):
        return os.path.join(self.path, *names)

    def write(self, name, text):
        data = text if isinstance(text, bytes) else text.encode()
        with open(self(name), "wb") as file:
            file.write(data)
        return self(name)

    def lines(self, name, records):
        return self.write(name, "".join(json.dumps(record) + "\n" for record in records))


temp = TempDir()


def prepare(*arguments, expect=0):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "tools", "prepare_data.py"), *map(str, arguments)],
                          capture_output=True, text=True)
    assert done.returncode == expect, f"exit {done.returncode}: {done.stderr}{done.stdout}"
    return done


def train(*arguments):
    if not os.path.exists(TRAIN):
        raise Skip("there is no ./train")
    done = subprocess.run([TRAIN, "--device", "cpu", "--model", "llama-tiny", "--hidden-size", "16", "--num-layers", "1",
                           "--num-attention-heads", "2", "--intermediate-size", "16", "--seq-len", "16", "--batch", "2",
                           *map(str, arguments)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def read_ints(path, dtype):
    with open(path, "rb") as file:
        data = file.read()
    header = struct.unpack("<256i", data[:1024])
    return header, numpy.frombuffer(data[1024:], dtype)


def read_shards(folder, split="train"):
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        manifest = json.load(file)
    dtype = {"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]]
    tokens, counts = [], []
    for shard in manifest["splits"].get(split, {"shards": []})["shards"]:
        path = os.path.join(folder, shard["file"])
        header, values = read_ints(path, dtype)
        assert header[:3] == ((20240520, 1) if dtype == "<u2" else (20240801, 7)) + (len(values),)
        assert shard["tokens"] == len(values)
        tokens += values.tolist()
        if manifest["masked"]:
            header, mask = read_ints(path[:-4] + ".mask", "u1")
            assert header[:3] == (20261120, 1, len(values)) and len(mask) == (len(values) + 7) // 8
            bits = numpy.unpackbits(mask, bitorder="little")[:len(values)]
            assert bits.sum() == shard["counted_tokens"]
            counts += bits.tolist()
    return manifest, tokens, counts


def read_ends(folder):
    """The positions of the documents' last tokens."""
    manifest, tokens, _ = read_shards(folder)
    bits = []
    for shard in manifest["splits"]["train"]["shards"]:
        header, ends = read_ints(os.path.join(folder, shard["file"][:-4] + ".ends"), "u1")
        assert header[:3] == (20261121, 1, shard["tokens"]) and len(ends) == (shard["tokens"] + 7) // 8
        bits += numpy.unpackbits(ends, bitorder="little")[:shard["tokens"]].tolist()
    return [i for i, bit in enumerate(bits) if bit]


def prose(seed, words):
    draw = random.Random(seed)
    parts = ["word", "naïve", "don't", "12345", "x+y", "  two", "\n", "\n\n", "\r\n", "\t", ".\n", "世界", "?!\n", "a\n b", "end "]
    return "".join(draw.choice(parts) + draw.choice(["", " ", " ", "\n"]) for _ in range(words))


def test_a_file_is_what_its_text_is():
    text = prose(1, 160000)
    assert len(text.encode()) > 500000
    path = temp.write("whole.txt", text)
    for name in ("gpt2", "llama3"):
        tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, name, "tokenizer.json"))
        end = tokenizer.token_to_id("<|endoftext|>") or tokenizer.token_to_id("<|end_of_text|>")
        want = tokenizer.encode(text, add_special_tokens=False).ids + [end]
        for workers in (1, 3):
            prepare(path, "--tokenizer", os.path.join(GOLDEN, name), "--out", temp("whole"), "--val-fraction", 0,
                    "--workers", workers, "--shard-tokens", 100000)
            manifest, tokens, _ = read_shards(temp("whole"))
            assert tokens == want
            assert len(manifest["splits"]["train"]["shards"]) == -(-len(want) // 100000)
            assert manifest["tokenizer"]["end_of_text_id"] == end
            assert read_ends(temp("whole")) == [len(want) - 1]
    # A part held back: together as many documents' tokens as before, each stretch closed.
    prepare(path, "--document", "stretch", "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("whole"), "--val-fraction", 0.2)
    tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, "gpt2", "tokenizer.json"))
    both = [read_shards(temp("whole"), split)[1] for split in ("train", "val")]
    assert all(both) and 0.1 < len(both[1]) / len(both[0]) < 0.4
    assert sum(len(tokenizer.decode(part)) for part in both) == len(text)


def test_a_document_is_in_one_split():
    os.makedirs(temp("files"), exist_ok=True)
    texts = {f"{i:02}.txt": f"file {i}\n" + prose(i, 40 if i % 5 else 12000) for i in range(40)}
    for name, text in texts.items():
        temp.write(os.path.join("files", name), text)
    prepare(temp("files"), "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("split"), "--val-fraction", 0.3)
    tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, "gpt2", "tokenizer.json"))
    end, found = tokenizer.token_to_id("<|endoftext|>"), []
    for split in ("train", "val"):
        manifest, tokens, _ = read_shards(temp("split"), split)
        parts = tokenizer.decode(tokens, skip_special_tokens=False).split("<|endoftext|>")
        assert parts.pop() == "" and manifest["splits"][split]["documents"] == len(parts) == tokens.count(end) > 3
        found += parts
    assert sorted(found) == sorted(texts.values())


def eos_of(*folder):
    with open(temp(*folder, "generation_config.json"), encoding="utf-8") as file:
        ids = json.load(file)["eos_token_id"]
    with open(temp(*folder, "tokenizer_config.json"), encoding="utf-8") as file:
        return ids, json.load(file)["eos_token"]


def documents():
    return [prose(seed, 3 + seed % 40) or "x" for seed in range(300)]


def expected(tokenizer, texts):
    end = tokenizer.token_to_id("<|endoftext|>")
    return [id for text in texts for id in tokenizer.encode(text, add_special_tokens=False).ids + [end]]


def test_records_are_documents():
    tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, "gpt2", "tokenizer.json"))
    texts = documents()
    path = temp.lines("records.jsonl", [{"body": text, "other": 1} for text in texts])
    prepare(path, "--field", "body", "--tokenizer", os.path.join(GOLDEN, "gpt2", "tokenizer.json"), "--out", temp("records"),
            "--val-fraction", 0)
    manifest, tokens, _ = read_shards(temp("records"))
    assert tokens == expected(tokenizer, texts)
    assert manifest["splits"]["train"]["documents"] == len(texts)
    lines = [text.replace("\n", " ").replace("\r", " ") for text in texts]
    path = temp.write("lines.txt", "\n".join(lines) + "\n\n")
    prepare(path, "--document", "line", "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("lines"), "--val-fraction", 0)
    assert read_shards(temp("lines"))[1] == expected(tokenizer, [line for line in lines if line.strip()])
    # Held back by document, the same ones each time.
    for _ in range(2):
        prepare(path, "--document", "line", "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("lines"), "--val-fraction", 0.1)
        first = read_shards(temp("lines"), "val")[1]
        assert first == read_shards(temp("lines"), "val")[1] and 5 < first.count(tokenizer.token_to_id("<|endoftext|>")) < 90


def test_parquet():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise Skip(str(missing))
    texts = documents()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": list(range(len(texts)))}), temp("table.parquet"), row_group_size=37)
    prepare(temp("table.parquet"), "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("parquet"), "--val-fraction", 0)
    tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, "gpt2", "tokenizer.json"))
    assert read_shards(temp("parquet"))[1] == expected(tokenizer, texts)
    done = prepare(temp("table.parquet"), "--field", "body", "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("parquet"), expect=1)
    assert "has no column body; it has text, n" in done.stderr


def test_large_vocabularies_take_uint32():
    with open(os.path.join(GOLDEN, "gpt2", "tokenizer.json"), encoding="utf-8") as file:
        data = json.load(file)
    end = data["added_tokens"][0]
    vocab = data["model"]["vocab"]
    vocab.pop(end["content"], None)
    for i in range(len(vocab), 70000):
        vocab[f"unused{i}"] = i
    end["id"] = 70000
    os.makedirs(temp("large"), exist_ok=True)
    temp.write("large/tokenizer.json", json.dumps(data))
    path = temp.write("small.txt", "some text\n")
    prepare(path, "--tokenizer", temp("large"), "--out", temp("wide"), "--val-fraction", 0)
    manifest, tokens, _ = read_shards(temp("wide"))
    assert manifest["dtype"] == "uint32" and tokens[-1] == 70000
    assert manifest["tokenizer"]["vocab_size"] == 70001


def test_a_trained_tokenizer():
    path = temp.write("train_on.txt", prose(3, 40000))
    prepare(path, "--train-tokenizer", 300, "--document", "stretch", "--out", temp("own"), "--val-fraction", 0.3)
    manifest, tokens, _ = read_shards(temp("own"))
    assert manifest["tokenizer"]["vocab_size"] == 300 and max(tokens) < 300
    assert read_shards(temp("own"), "val")[1]
    out = train("--vocab", 300, "--data", temp("own", "train_*.bin"), "--val-data", temp("own", "val_*.bin"), "--tokenizer",
                temp("own"), "--prompt", "don't", "--steps", 2, "--sample-every", 2, "--sample-tokens", 5, "--save", temp("model"))
    assert "sample: don't" in out
    end = manifest["tokenizer"]["end_of_text_id"]
    assert eos_of("own") == eos_of("model") == (end, "<|endoftext|>")
    out = train("--vocab", 300, "--data", temp("own"), "--steps", 1, "--sample-every", 0)  # the folder, manifest and all
    assert "llm.c shards, uint16" in out


CHATS = [
    [("system", "Be brief."), ("user", "How much is 2 + 2?"), ("assistant", "It is 4."), ("user", "Sure?"), ("assistant", "Yes, 4.")],
    [("user", "Name a colour."), ("assistant", "Green")],
    [("user", "Nobody answers.")],
]


def messages(chat):
    return [{"role": role, "content": text} for role, text in chat]


def test_only_answers_count():
    path = temp.lines("chats.jsonl", [{"messages": messages(chat)} for chat in CHATS])
    done = prepare(path, "--chat", "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("chats"), "--val-fraction", 0)
    assert "1 conversations have no message of the assistant" in done.stdout
    _, tokens, counts = read_shards(temp("chats"))
    tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, "gpt2", "tokenizer.json"))
    decoded = "".join(("[%s]" if counts[i] else "%s") % tokenizer.decode([id], skip_special_tokens=False)
                      for i, id in enumerate(tokens)).replace("][", "")
    end = "<|endoftext|>"
    assert decoded == ("### System:\nBe brief.\n\n### User:\nHow much is 2 + 2?\n\n### Assistant:\n[It is 4." + end +
                       "]\n\n### User:\nSure?\n\n### Assistant:\n[Yes, 4." + end + "]### User:\nName a colour.\n\n"
                       "### Assistant:\n[Green" + end + "]"), decoded


LLAMA_TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|eot_id|>' }}"
                  "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}")


def test_a_chat_template():
    os.makedirs(temp("instruct"), exist_ok=True)
    shutil.copy(os.path.join(GOLDEN, "llama3", "tokenizer.json"), temp("instruct"))
    temp.write("instruct/tokenizer_config.json", json.dumps({"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>",
                                                             "chat_template": LLAMA_TEMPLATE}))
    path = temp.lines("chats.jsonl", [{"messages": messages(CHATS[0])}, {"conversations": 1, "prompt": "Hi", "completion": " Ho "},
                                      {"messages": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]}])
    prepare(path, "--chat", "--tokenizer", temp("instruct"), "--out", temp("sft"), "--val-fraction", 0)
    manifest, tokens, counts = read_shards(temp("sft"))
    tokenizer = Tokenizer.from_file(temp("instruct", "tokenizer.json"))
    learned = [tokenizer.decode([id], skip_special_tokens=False) for i, id in enumerate(tokens) if counts[i]]
    assert "".join(learned) == "It is 4.<|eot_id|>Yes, 4.<|eot_id|>Ho<|eot_id|>B<|eot_id|>", learned
    assert tokens.count(tokenizer.token_to_id("<|begin_of_text|>")) == 3
    starts = [i for i, id in enumerate(tokens) if id == tokenizer.token_to_id("<|begin_of_text|>")]
    assert read_ends(temp("sft")) == [i - 1 for i in starts[1:]] + [len(tokens) - 1]  # not after every turn
    assert eos_of("sft") == (tokenizer.token_to_id("<|eot_id|>"), "<|eot_id|>")
    assert manifest["splits"]["train"]["counted_tokens"] == len(learned)
    # A template that shortens earlier answers cannot be split.
    temp.write("bad.jinja", "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}")
    done = prepare(path, "--chat", "--chat-template", temp("bad.jinja"), "--tokenizer", temp("instruct"), "--out", temp("sft"), expect=1)
    assert "changes earlier messages" in done.stderr
    temp.write("bad.jinja", "{% for %}")
    done = prepare(path, "--chat", "--chat-template", temp("bad.jinja"), "--tokenizer", temp("instruct"), "--out", temp("sft"), expect=1)
    assert "the chat template cannot be read" in done.stderr


def test_masked_shards_train():
    path = temp.lines("many.jsonl", [{"messages": messages([("user", prose(seed, 20)), ("assistant", f"answer {seed}")])} for seed in range(60)])
    prepare(path, "--chat", "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("many"), "--val-fraction", 0)
    said = train("--vocab", 401, "--data", temp("many"), "--steps", 3, "--sample-every", 0, "--pack", "documents")
    assert "packed from 60 documents" in said, said
    train("--vocab", 401, "--data", temp("many"), "--steps", 3, "--sample-every", 0, "--log", temp("log.jsonl"))
    with open(temp("log.jsonl"), encoding="utf-8") as file:
        steps = [line for line in map(json.loads, file) if line.get("event") == "step" or "grad_norm" in line]
    assert len(steps) == 3 and any(line["tokens"] < 32 for line in steps), steps


def test_one_sentence_when_it_goes_wrong():
    text = temp.write("text.txt", "text")
    broken = temp.write("broken.jsonl", '{"text": "good"}\n{"text"\n')
    fields = temp.lines("fields.jsonl", [{"body\x1b": "text"}])
    gpt2 = os.path.join(GOLDEN, "gpt2")
    bare = temp.write("bare.json", json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    deep = temp.write("deep.jsonl", '{"text": ' + "[" * 100000 + "]" * 100000 + "}\n")
    chats = temp.lines("chats_here.jsonl", [{"messages": messages(CHATS[1])}])
    endless = temp.write("endless.jinja", "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}")
    refuses = temp.write("refuses.jinja", "{{ raise_exception('no system message') }}")
    divides = temp.write("divides.jinja", "{{ 1 / 0 }}")
    strips = temp.write("strips.jinja", "{{ messages[0]['content'].strop() }}")
    os.makedirs(temp("damaged"))
    shutil.copy(os.path.join(gpt2, "tokenizer.json"), temp("damaged"))
    temp.write("damaged/tokenizer_config.json", "{")
    for arguments, part in [
        ([temp("nowhere.txt"), "--tokenizer", gpt2], "there is no file"),
        ([text, "--tokenizer", temp("nowhere")], "names a tokenizer.json or a directory with one"),
        ([text, "--tokenizer", text], "is no tokenizer.json"),
        ([text, "--tokenizer", bare], "name what ends a text with --end-of-text"),
        ([text, "--tokenizer", gpt2, "--end-of-text", "<|no|>"], "has no token <|no|>"),
        ([broken, "--tokenizer", gpt2], "broken.jsonl, byte 17: this line is no JSON"),
        ([deep, "--tokenizer", gpt2], "deep.jsonl, byte 0: this line is no JSON"),
        ([fields, "--tokenizer", gpt2], "fields.jsonl, byte 0: the record has no field text; it has body\\x1b: name one with --field"),
        ([fields, "--tokenizer", gpt2, "--chat"], "has no field messages"),
        ([text, "--tokenizer", gpt2, "--chat"], "is plain text; conversations come as"),
        ([text, "--train-tokenizer", 5], "make 257 tokens at least"),
        ([text, "--train-tokenizer", 0], "make 257 tokens at least"),
        ([text, "--tokenizer", gpt2, "--val-fraction", 1], "from 0 to below 1"),
        ([text, "--tokenizer", gpt2, "--shard-tokens", 0], "a shard holds from 1"),
        ([temp.write("empty.jsonl", ""), "--tokenizer", gpt2], "there is no text in"),
        ([temp.lines("number.jsonl", [{"text": 5}]), "--tokenizer", gpt2], "number.jsonl, byte 0: the text is 5, which is no text"),
        ([chats, "--tokenizer", gpt2, "--chat", "--chat-template", strips], "chats_here.jsonl, byte 0: the chat template fails"),
        ([chats, "--tokenizer", gpt2, "--chat", "--chat-template", endless], "it takes more than 10 seconds"),
        ([chats, "--tokenizer", gpt2, "--chat", "--chat-template", refuses], "no system message"),
        ([chats, "--tokenizer", gpt2, "--chat", "--chat-template", divides], "division by zero"),
        ([chats, "--tokenizer", gpt2, "--chat", "--chat-template", temp("nowhere")], "No such file or directory"),
        ([text, "--tokenizer", temp("damaged")], "damaged/tokenizer_config.json is no JSON ("),
        ([temp.lines("asks.jsonl", [{"messages": [{"role": "user", "content": "?"}]}]), "--tokenizer", gpt2, "--chat"],
         "there is no message of the assistant in"),
        ([text, "--tokenizer", gpt2, "--out", text], "text.txt: File exists"),
        *([[temp.lines(f"content_{i}.jsonl", [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]}]),
            "--tokenizer", gpt2, "--chat"], f"content_{i}.jsonl, byte 0: the content of message 1 is {content}, which is no text"]
          for i, content in enumerate([None, [1], {"a": 1}, 5])),
        ([temp.lines("loose.jsonl", [{"messages": "hello"}]), "--tokenizer", gpt2, "--chat"], "is no list of messages"),
    ]:
        done = prepare("--out", temp("wrong"), *arguments, expect=1)
        said = [line for line in done.stderr.splitlines() if line.startswith("prepare_data.py: ")]
        assert len(said) == 1 and part in said[0] and "Traceback" not in done.stderr, (arguments, done.stderr)
        assert not os.path.exists(temp("wrong", "manifest.json"))


def snapshot(folder):
    """Each name with what it holds, or where it links to."""
    return {name: os.readlink(path) if os.path.islink(path) else open(path, "rb").read()
            for name in sorted(os.listdir(folder)) for path in [os.path.join(folder, name)]}


def test_a_failed_run_keeps_what_was_there():
    gpt2, text = os.path.join(GOLDEN, "gpt2"), temp.write("good.txt", prose(9, 3000))
    prepare(text, "--tokenizer", gpt2, "--out", temp("again"), "--val-fraction", 0, "--shard-tokens", 1000)
    before, notes = snapshot(temp("again")), temp.write("again/train_notes.txt", "mine")
    before["train_notes.txt"] = b"mine"
    records = temp.lines("late.jsonl", [{"text": "good"}] * 100 + [{"body": "bad"}])
    prepare(records, "--tokenizer", gpt2, "--out", temp("again"), expect=1)
    slow = temp.write("slow.jinja", "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3)
    chats = temp.lines("one.jsonl", [{"messages": messages(CHATS[1])}])
    running = subprocess.Popen([sys.executable, os.path.join(ROOT, "tools", "prepare_data.py"), chats, "--chat", "--tokenizer", gpt2,
                                "--chat-template", slow, "--out", temp("again")], stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in a background job
    while not os.path.exists(temp("again", ".prepare_data.partial", "generation_config.json")):
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    said = running.communicate()[1]
    assert running.returncode == 1 and said.count("\n") == 1 and "interrupted" in said, said
    assert snapshot(temp("again")) == before
    # A run that ends well replaces all of the earlier run's and nothing else.
    prepare(notes, "--tokenizer", gpt2, "--out", temp("again"), "--val-fraction", 0)
    assert sorted(snapshot(temp("again"))) == ["generation_config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json",
                                               "train_000000.bin", "train_000000.ends", "train_notes.txt"]


def test_only_its_own_is_replaced():
    gpt2, text = os.path.join(GOLDEN, "gpt2"), temp.write("plain.txt", "some text\n")
    for number, (name, content) in enumerate([("tokenizer.json", "{}"), ("generation_config.json", "{}"), ("train_000007.bin", "mine"),
                                              ("manifest.json", '{"text": "an input"}\n')]):
        folder = temp(f"foreign{number}")
        os.makedirs(folder)
        foreign = temp.write(f"foreign{number}/{name}", content)
        for arguments in [text, "--train-tokenizer", 300], [text, "--tokenizer", gpt2], [foreign, "--tokenizer", gpt2]:
            done = prepare(*arguments, "--out", folder, expect=1)
            assert ("is an input" if arguments[0] == foreign else "is not of an earlier run") in done.stderr, done.stderr
            assert snapshot(folder) == {name: content.encode()}
    prepare(text, "--tokenizer", gpt2, "--out", temp("linked"), "--val-fraction", 0)
    kept = temp.write("kept.json", "mine")
    os.remove(temp("linked", "tokenizer.json"))
    os.symlink(kept, temp("linked", "tokenizer.json"))
    before = snapshot(temp("linked"))
    prepare(text, "--tokenizer", gpt2, "--out", temp("linked"), expect=1)
    assert snapshot(temp("linked")) == before and open(kept).read() == "mine"


def test_surrogates_are_replaced():
    path = temp.write("halves.jsonl", '{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    done = prepare(path, "--tokenizer", os.path.join(GOLDEN, "gpt2"), "--out", temp("halves"), "--val-fraction", 0)
    assert "1 characters were no UTF-8" in done.stdout
    tokenizer = Tokenizer.from_file(os.path.join(GOLDEN, "gpt2", "tokenizer.json"))
    assert read_shards(temp("halves"))[1] == expected(tokenizer, ["a\ufffd b", "\U0001f600"])


failed = tap.run({name: test for name, test in list(globals().items()) if name.startswith("test_")})
shutil.rmtree(temp.path)
sys.exit(failed > 0)
