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
GPT2, LLAMA3 = (os.path.join(ROOT, "tests", "golden", "tokenizers", name) for name in ("gpt2", "llama3"))
PROGRAM = os.path.join(ROOT, "tools", "prepare_data.py")
END = "<|endoftext|>"
TRAIN = os.path.abspath(os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train")))

try:
    import numpy
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"1..1\nok 1 # SKIP {missing}: pip install tokenizers numpy")
    sys.exit(0)


TEMP = tempfile.mkdtemp(prefix="lce-prepare-")
GPT2_TOKENIZER = Tokenizer.from_file(os.path.join(GPT2, "tokenizer.json"))
GPT2_END = GPT2_TOKENIZER.token_to_id(END)


def temp(*names):
    return os.path.join(TEMP, *names)


def write(name, text):
    os.makedirs(os.path.dirname(temp(name)), exist_ok=True)
    with open(temp(name), "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    return temp(name)


def write_lines(name, records):
    return write(name, "".join(json.dumps(record) + "\n" for record in records))


def prepare(*arguments, expect=0):
    done = subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == expect, f"exit {done.returncode}: {done.stderr}{done.stdout}"
    return done


def shards(out, path, *arguments, tokenizer=GPT2, val_fraction=0):
    """What the program makes of a file: manifest, tokens, and which count."""
    prepare(path, "--tokenizer", tokenizer, "--out", temp(out), "--val-fraction", val_fraction, *arguments)
    return read_shards(temp(out))


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
    path = write("whole.txt", text)
    for folder in (GPT2, LLAMA3):
        tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        end = tokenizer.token_to_id(END) or tokenizer.token_to_id("<|end_of_text|>")
        want = tokenizer.encode(text, add_special_tokens=False).ids + [end]
        for workers in (1, 3):
            manifest, tokens, _ = shards("whole", path, "--workers", workers, "--shard-tokens", 100000, tokenizer=folder)
            assert tokens == want
            assert len(manifest["splits"]["train"]["shards"]) == -(-len(want) // 100000)
            assert manifest["tokenizer"]["end_of_text_id"] == end
            assert read_ends(temp("whole")) == [len(want) - 1]
    # A part held back: together as many documents' tokens as before, each stretch closed.
    both = [shards("whole", path, "--document", "stretch", val_fraction=0.2)[1], read_shards(temp("whole"), "val")[1]]
    assert all(both) and 0.1 < len(both[1]) / len(both[0]) < 0.4
    assert sum(len(GPT2_TOKENIZER.decode(part)) for part in both) == len(text)


def test_a_document_is_in_one_split():
    texts = {f"{i:02}.txt": f"file {i}\n" + prose(i, 40 if i % 5 else 12000) for i in range(40)}
    for name, text in texts.items():
        write(os.path.join("files", name), text)
    found = []
    shards("split", temp("files"), val_fraction=0.3)
    for split in ("train", "val"):
        manifest, tokens, _ = read_shards(temp("split"), split)
        parts = GPT2_TOKENIZER.decode(tokens, skip_special_tokens=False).split(END)
        assert parts.pop() == "" and manifest["splits"][split]["documents"] == len(parts) == tokens.count(GPT2_END) > 3
        found += parts
    assert sorted(found) == sorted(texts.values())


def eos_of(*folder):
    with open(temp(*folder, "generation_config.json"), encoding="utf-8") as file:
        ids = json.load(file)["eos_token_id"]
    with open(temp(*folder, "tokenizer_config.json"), encoding="utf-8") as file:
        return ids, json.load(file)["eos_token"]


DOCUMENTS = [prose(seed, 3 + seed % 40) or "x" for seed in range(300)]
LINES = [text.replace("\n", " ").replace("\r", " ") for text in DOCUMENTS]


def write_table(name):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise Skip(str(missing))
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS, "n": list(range(len(DOCUMENTS)))}), temp(name), row_group_size=37)
    return temp(name)


def assert_documents(path, texts, *arguments):
    manifest, tokens, _ = shards("documents", path, *arguments)
    assert tokens == [id for text in texts for id in GPT2_TOKENIZER.encode(text, add_special_tokens=False).ids + [GPT2_END]]
    assert manifest["splits"]["train"]["documents"] == len(texts)


def test_records_are_documents():
    assert_documents(write_lines("records.jsonl", [{"body": text, "other": 1} for text in DOCUMENTS]), DOCUMENTS, "--field", "body")
    path = write("lines.txt", "\n".join(LINES) + "\n\n")
    assert_documents(path, [line for line in LINES if line.strip()], "--document", "line")
    # Held back by document, the same ones each time.
    drawn = []
    for _ in range(2):
        shards("lines", path, "--document", "line", val_fraction=0.1)
        drawn.append(read_shards(temp("lines"), "val")[1])
    assert drawn[0] == drawn[1] and 5 < drawn[0].count(GPT2_END) < 90


def test_parquet():
    path = write_table("table.parquet")
    assert_documents(path, DOCUMENTS)
    done = prepare(path, "--field", "body", "--tokenizer", GPT2, "--out", temp("parquet"), expect=1)
    assert "has no column body; it has text, n" in done.stderr


def test_large_vocabularies_take_uint32():
    with open(os.path.join(GPT2, "tokenizer.json"), encoding="utf-8") as file:
        data = json.load(file)
    end, vocab = data["added_tokens"][0], data["model"]["vocab"]
    vocab.pop(end["content"], None)
    for i in range(len(vocab), 70000):
        vocab[f"unused{i}"] = i
    end["id"] = 70000
    write("large/tokenizer.json", json.dumps(data))
    manifest, tokens, _ = shards("wide", write("small.txt", "some text\n"), tokenizer=temp("large"))
    assert manifest["dtype"] == "uint32" and tokens[-1] == 70000
    assert manifest["tokenizer"]["vocab_size"] == 70001


def test_a_trained_tokenizer():
    path = write("train_on.txt", prose(3, 40000))
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
    path = write_lines("chats.jsonl", [{"messages": messages(chat)} for chat in CHATS])
    done = prepare(path, "--chat", "--tokenizer", GPT2, "--out", temp("chats"), "--val-fraction", 0)
    assert "1 conversations have no message of the assistant" in done.stdout
    _, tokens, counts = read_shards(temp("chats"))
    decoded = "".join(("[%s]" if counts[i] else "%s") % GPT2_TOKENIZER.decode([id], skip_special_tokens=False)
                      for i, id in enumerate(tokens)).replace("][", "")
    assert decoded == (f"### System:\nBe brief.\n\n### User:\nHow much is 2 + 2?\n\n### Assistant:\n[It is 4.{END}"
                       f"]\n\n### User:\nSure?\n\n### Assistant:\n[Yes, 4.{END}]### User:\nName a colour.\n\n"
                       f"### Assistant:\n[Green{END}]"), decoded


LLAMA_TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|eot_id|>' }}"
                  "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}")


def test_a_chat_template():
    write("instruct/tokenizer_config.json", json.dumps({"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>",
                                                        "chat_template": LLAMA_TEMPLATE}))
    shutil.copy(os.path.join(LLAMA3, "tokenizer.json"), temp("instruct"))
    path = write_lines("chats.jsonl", [{"messages": messages(CHATS[0])}, {"conversations": 1, "prompt": "Hi", "completion": " Ho "},
                                       {"messages": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]}])
    manifest, tokens, counts = shards("sft", path, "--chat", tokenizer=temp("instruct"))
    tokenizer = Tokenizer.from_file(temp("instruct", "tokenizer.json"))
    learned = [tokenizer.decode([id], skip_special_tokens=False) for i, id in enumerate(tokens) if counts[i]]
    assert "".join(learned) == "It is 4.<|eot_id|>Yes, 4.<|eot_id|>Ho<|eot_id|>B<|eot_id|>", learned
    starts = [i for i, id in enumerate(tokens) if id == tokenizer.token_to_id("<|begin_of_text|>")]
    assert len(starts) == 3
    assert read_ends(temp("sft")) == [i - 1 for i in starts[1:]] + [len(tokens) - 1]  # not after every turn
    assert eos_of("sft") == (tokenizer.token_to_id("<|eot_id|>"), "<|eot_id|>")
    assert manifest["splits"]["train"]["counted_tokens"] == len(learned)


def test_masked_shards_train():
    chats = [[("user", prose(seed, 20)), ("assistant", f"answer {seed}")] for seed in range(60)]
    shards("many", write_lines("many.jsonl", [{"messages": messages(chat)} for chat in chats]), "--chat")
    said = train("--vocab", 401, "--data", temp("many"), "--steps", 3, "--sample-every", 0, "--pack", "documents")
    assert "packed from 60 documents" in said, said
    train("--vocab", 401, "--data", temp("many"), "--steps", 3, "--sample-every", 0, "--log", temp("log.jsonl"))
    with open(temp("log.jsonl"), encoding="utf-8") as file:
        steps = [line for line in map(json.loads, file) if line.get("event") == "step" or "grad_norm" in line]
    assert len(steps) == 3 and any(line["tokens"] < 32 for line in steps), steps


TEMPLATES = {
    "endless": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "refuses": "{{ raise_exception('no system message') }}",
    "divides": "{{ 1 / 0 }}",
    "strips": "{{ messages[0]['content'].strop() }}",
    "broken": "{% for %}",
    "shortens": "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}",  # earlier answers
}
# What the input holds (a name: no such file), its suffix, options, and a part of the sentence.
WRONG = [
    ("nowhere", ".txt", [], "there is no file"),
    (b"text", ".txt", ["--tokenizer", temp("nowhere")], "names a tokenizer.json or a directory with one"),
    (b"text", ".txt", ["--tokenizer", temp("text")], "is no tokenizer.json"),
    (b"text", ".txt", ["--tokenizer", temp("bare.json")], "name what ends a text with --end-of-text"),
    (b"text", ".txt", ["--end-of-text", "<|no|>"], "has no token <|no|>"),
    (b"text", ".txt", ["--chat"], "is plain text; conversations come as"),
    (b"text", ".txt", ["--val-fraction", 1], "from 0 to below 1"),
    (b"text", ".txt", ["--shard-tokens", 0], "a shard holds from 1"),
    (b"text", ".txt", ["--tokenizer", temp("damaged")], "damaged/tokenizer_config.json is no JSON ("),
    (b"text", ".txt", ["--out", temp("text")], "text: File exists"),
    (b'{"text": "good"}\n{"text"\n', ".jsonl", [], "input.jsonl, byte 17: this line is no JSON"),
    (b'{"text": ' + b"[" * 100000 + b"]" * 100000 + b"}\n", ".jsonl", [], "input.jsonl, byte 0: this line is no JSON"),
    ({"body\x1b": "text"}, ".jsonl", [], "input.jsonl, byte 0: the record has no field text; it has body\\x1b: name one with --field"),
    ({"body\x1b": "text"}, ".jsonl", ["--chat"], "has no field messages"),
    (b"", ".jsonl", [], "there is no text in"),
    ({"text": 5}, ".jsonl", [], "input.jsonl, byte 0: the text is 5, which is no text"),
    ({"messages": [{"role": "user", "content": "?"}]}, ".jsonl", ["--chat"], "there is no message of the assistant in"),
    ({"messages": "hello"}, ".jsonl", ["--chat"], "is no list of messages"),
    *[({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]}, ".jsonl", ["--chat"],
       f"input.jsonl, byte 0: the content of message 1 is {content}, which is no text") for content in (None, [1], {"a": 1}, 5)],
    *[({"messages": messages(CHATS[0])}, ".jsonl", ["--chat", "--chat-template", temp(template)], part) for template, part in [
        ("strips", "input.jsonl, byte 0: the chat template fails"), ("endless", "it takes more than 10 seconds"),
        ("refuses", "no system message"), ("divides", "division by zero"), ("nowhere", "No such file or directory"),
        ("broken", "the chat template cannot be read"), ("shortens", "changes earlier messages")]],
]


def test_one_sentence_when_it_goes_wrong():
    write("text", "text")
    write("bare.json", json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    write("damaged/tokenizer_config.json", "{")
    shutil.copy(os.path.join(GPT2, "tokenizer.json"), temp("damaged"))
    for name, template in TEMPLATES.items():
        write(name, template)
    runs = [(["--tokenizer", GPT2, *options], held, suffix, part) for held, suffix, options, part in WRONG]
    runs += [(["--train-tokenizer", size], b"text", ".txt", "make 257 tokens at least") for size in (5, 0)]
    for arguments, held, suffix, part in runs:
        path = temp(f"{held}{suffix}") if isinstance(held, str) else write("input" + suffix, held if isinstance(held, bytes) else json.dumps(held))
        done = prepare("--out", temp("wrong"), path, *arguments, expect=1)
        said = [line for line in done.stderr.splitlines() if line.startswith("prepare_data.py: ")]
        assert len(said) == 1 and part in said[0] and "Traceback" not in done.stderr, (arguments, done.stderr)
        assert not os.path.exists(temp("wrong", "manifest.json"))


def snapshot(folder):
    """Each name with what it holds, or where it links to."""
    return {name: os.readlink(path) if os.path.islink(path) else open(path, "rb").read()
            for name in sorted(os.listdir(folder)) for path in [os.path.join(folder, name)]}


def test_a_failed_run_keeps_what_was_there():
    shards("again", write("good.txt", prose(9, 3000)), "--shard-tokens", 1000)
    notes = write("again/train_notes.txt", "mine")
    before = snapshot(temp("again"))
    prepare(write_lines("late.jsonl", [{"text": "good"}] * 100 + [{"body": "bad"}]), "--tokenizer", GPT2, "--out", temp("again"), expect=1)
    chats = write_lines("one.jsonl", [{"messages": messages(CHATS[1])}])
    running = subprocess.Popen([sys.executable, PROGRAM, chats, "--chat", "--tokenizer", GPT2, "--out", temp("again"),
                                "--chat-template", write("slow", TEMPLATES["endless"])], stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in a background job
    while not os.path.exists(temp("again", ".prepare_data.partial", "generation_config.json")):
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    said = running.communicate()[1]
    assert running.returncode == 1 and said.count("\n") == 1 and "interrupted" in said, said
    assert snapshot(temp("again")) == before
    # A run that ends well replaces all of the earlier run's and nothing else.
    shards("again", notes)
    assert sorted(snapshot(temp("again"))) == ["generation_config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json",
                                               "train_000000.bin", "train_000000.ends", "train_notes.txt"]


def test_only_its_own_is_replaced():
    text = write("plain.txt", "some text\n")
    for number, (name, content) in enumerate([("tokenizer.json", "{}"), ("generation_config.json", "{}"), ("train_000007.bin", "mine"),
                                              ("manifest.json", '{"text": "an input"}\n')]):
        foreign, folder = write(f"foreign{number}/{name}", content), temp(f"foreign{number}")
        for arguments in [text, "--train-tokenizer", 300], [text, "--tokenizer", GPT2], [foreign, "--tokenizer", GPT2]:
            done = prepare(*arguments, "--out", folder, expect=1)
            assert ("is an input" if arguments[0] == foreign else "is not of an earlier run") in done.stderr, done.stderr
            assert snapshot(folder) == {name: content.encode()}
    shards("linked", text)
    kept = write("kept.json", "mine")
    os.remove(temp("linked", "tokenizer.json"))
    os.symlink(kept, temp("linked", "tokenizer.json"))
    before = snapshot(temp("linked"))
    prepare(text, "--tokenizer", GPT2, "--out", temp("linked"), expect=1)
    assert snapshot(temp("linked")) == before and open(kept).read() == "mine"


def test_surrogates_are_replaced():
    path = write("halves.jsonl", '{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert_documents(path, ["a\ufffd b", "\U0001f600"])
    done = prepare(path, "--tokenizer", GPT2, "--out", temp("documents"), "--val-fraction", 0)
    assert "1 characters were no UTF-8" in done.stdout


failed = tap.run({name: test for name, test in list(globals().items()) if name.startswith("test_")})
shutil.rmtree(TEMP)
sys.exit(failed > 0)
