#!/usr/bin/env python3
"""tools/prepare_data.py: its shards against `tokenizers` and `transformers`, masks, refusals, and ./train on what it made."""
import gzip
import importlib.util
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import program  # noqa: E402
from program import ROOT, TRAIN, main, run  # noqa: E402
from tap import Skip  # noqa: E402

try:
    import numpy
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError as missing:
    print(f"1..1\nok 1 # SKIP {missing}: pip install tokenizers numpy")
    sys.exit(0)
try:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    import jinja2  # noqa: F401
    from transformers import PreTrainedTokenizerFast
except ImportError as missing:
    PreTrainedTokenizerFast, NO_CHAT = None, f"{missing}: pip install transformers jinja2"

GPT2, LLAMA3 = (ROOT / "tests/golden/tokenizers" / name for name in ("gpt2", "llama3"))
PROGRAM, END = ROOT / "tools/prepare_data.py", "<|endoftext|>"
GPT2_TOKENIZER = Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
GPT2_END = GPT2_TOKENIZER.token_to_id(END)


def write(path, held):
    """A file with a text, with bytes, or with what JSON makes of a dict, or of each of a list."""
    path.parent.mkdir(exist_ok=True, parents=True)
    held = "".join(json.dumps(record) + "\n" for record in held) if isinstance(held, list) else json.dumps(held) if isinstance(held, dict) else held
    path.write_bytes(held.encode() if isinstance(held, str) else held)
    return path


def prepare(*arguments, **how):
    return run(sys.executable, PROGRAM, *arguments, **how)


def shards(out, path, *arguments, tokenizer=GPT2, val_fraction=0, says=""):
    """What the program makes of a file, as read_shards gives it."""
    prepare(path, "--tokenizer", tokenizer, "--out", out, "--val-fraction", val_fraction, *arguments).ok(says)
    return read_shards(out)


def need_templates():
    if not PreTrainedTokenizerFast:
        raise Skip(NO_CHAT)


def train(*arguments):
    if not TRAIN.exists():
        raise Skip("there is no ./train")
    return program.train("--device cpu", *arguments, OMP_NUM_THREADS="2").ok()


TINY = "--model llama-tiny --hidden-size 16 --num-layers 1 --num-attention-heads 2 --intermediate-size 16 --seq-len 16 --batch 2".split()


def read_shards(folder, split="train"):
    """The manifest and, of a split, the tokens, whether each counts, and the documents' last positions."""
    manifest = json.loads((folder / "manifest.json").read_text())
    dtype, magic = {"uint16": ("<u2", (20240520, 1)), "uint32": ("<u4", (20240801, 7))}[manifest["dtype"]]
    columns = {".bin": (dtype, magic, []), ".ends": ("u1", (20261121, 1), []), ".mask": ("u1", (20261120, 1), [])}
    for shard in manifest["splits"].get(split, {"shards": []})["shards"]:
        size = shard["tokens"]
        for suffix, (dtype, magic, column) in columns.items():
            path = (folder / shard["file"]).with_suffix(suffix)
            assert path.exists() == (suffix != ".mask" or manifest["masked"])
            if path.exists():
                data = path.read_bytes()
                assert data[:1024] == struct.pack("<256i", *magic, size, *[0] * 253), data[:1024]
                values = numpy.frombuffer(data[1024:], dtype)
                assert len(values) == (size if suffix == ".bin" else (size + 7) // 8)
                column += (values if suffix == ".bin" else numpy.unpackbits(values, bitorder="little")[:size]).tolist()
        assert not manifest["masked"] or sum(columns[".mask"][2][-size:]) == shard["counted_tokens"]
    tokens, ends, counts = (column for *_, column in columns.values())
    return manifest, tokens, counts, [i for i, end in enumerate(ends) if end]


def prose(seed, words):
    draw = random.Random(seed)
    parts = ["word", "naïve", "don't", "12345", "x+y", "  two", "\n", "\n\n", "\r\n", "\t", ".\n", "世界", "?!\n", "a\n b", "end "]
    return "".join(draw.choice(parts) + draw.choice(["", " ", " ", "\n"]) for _ in range(words))


def test_a_file_is_what_its_text_is(folder):
    text, out = prose(1, 160000), folder / "out"
    path = write(folder / "whole.txt", text)
    for name in (GPT2, LLAMA3):
        tokenizer = Tokenizer.from_file(str(name / "tokenizer.json"))
        end = tokenizer.token_to_id(END) or tokenizer.token_to_id("<|end_of_text|>")
        want = tokenizer.encode(text, add_special_tokens=False).ids + [end]
        for workers in (1, 3):
            manifest, tokens, _, ends = shards(out, path, "--workers", workers, "--shard-tokens", 100000, tokenizer=name)
            assert tokens == want and ends == [len(want) - 1] and manifest["tokenizer"]["end_of_text_id"] == end
            assert len(manifest["splits"]["train"]["shards"]) == -(-len(want) // 100000)
    # A part held back: together as many documents' tokens as before, each stretch closed; the same each time.
    both = [[shards(out, path, "--document", "stretch", val_fraction=0.2)[1], read_shards(out, "val")[1]] for _ in range(2)]
    assert both[0] == both[1] and 0.1 < len(both[0][1]) / len(both[0][0]) < 0.4
    assert sum(len(GPT2_TOKENIZER.decode(part)) for part in both[0]) == len(text)


def trained(words, pre_tokenizer, decoder, unigram=False, normalizer=None, whole=False, **model):
    """A tokenizer of `words`, which has <s> and </s>."""
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", **model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = (trainers.UnigramTrainer if unigram else trainers.BpeTrainer)(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, **({"unk_token": "<unk>"} if unigram else {}))
    tokenizer.train_from_iterator([words] if whole else words.split("\n"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def llama2(words):
    """As Llama 2's: no pre-tokenizer, an underscore for each space and before the text, bytes of what is unknown."""
    data = json.loads(trained(words, pre_tokenizers.Metaspace(), None, fuse_unk=True).to_str())
    for byte in range(256):
        data["model"]["vocab"][f"<0x{byte:02X}>"] = len(data["model"]["vocab"])
    data["model"]["byte_fallback"], data["pre_tokenizer"] = True, None
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def test_cuts_change_no_tokens(folder):
    metaspace, split, byte_level = pre_tokenizers.Metaspace, pre_tokenizers.Split, pre_tokenizers.ByteLevel
    o200k = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+")
    words = "".join(prose(seed, 300) + end for seed in range(20) for end in ("\nThe", ".\n/x", "\n\n\nA", "\n5", "e\u0301\n世", "\n\u3000"))
    path, record = write(folder / "words.txt", words), write(folder / "words.jsonl", {"text": words})
    for number, tokenizer in enumerate([
            llama2(words), trained(words, metaspace(prepend_scheme="first", split=False), decoders.Metaspace()),
            trained(words, metaspace(prepend_scheme="first"), decoders.Metaspace(), unigram=True),
            trained(words, metaspace(prepend_scheme="always"), decoders.Metaspace()), trained(words, byte_level(add_prefix_space=True), decoders.ByteLevel()),
            trained(words, pre_tokenizers.Sequence([split(o200k, "isolated"), byte_level(add_prefix_space=False, use_regex=False)]),
                    decoders.ByteLevel(), whole=True),  # with tokens of several newlines; the last two have tokens across lines, and are not cut
            trained(words, byte_level(add_prefix_space=False, use_regex=False), decoders.ByteLevel(), whole=True),
            trained(words, metaspace(), decoders.Metaspace(), True, normalizers.Sequence([normalizers.Strip(), normalizers.Replace("\n", " ")]))]):
        tokenizer.save(str(folder / "own.json"))
        for file, arguments, want in [(path, ["--special-tokens"], tokenizer.encode(words).ids),
                                      (record, [], tokenizer.encode(words, add_special_tokens=False).ids + [2])]:
            run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\nimport prepare_data\n"
                "prepare_data.PIECE_CHARS = 70\nprepare_data.main()", file, "--tokenizer", folder / "own.json", "--out", folder / "out",
                "--end-of-text", "</s>", "--val-fraction", 0, *arguments).ok()
            manifest, tokens, _, ends = read_shards(folder / "out")
            assert tokens == want and ends == [len(want) - 1] and manifest["bos"] == [1] * len(arguments), number


def test_special_tokens_in_a_text_are_text(folder):
    text, out = f"a{END} b <s>\nc{END}", folder / "out"
    path, plain = write(folder / "text.txt", text), Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
    plain.encode_special_tokens = True
    assert shards(out, path, says="2 names of special tokens in the text are ordinary text")[1] == plain.encode(text).ids + [GPT2_END]
    assert shards(out, path, "--parse-special")[1] == GPT2_TOKENIZER.encode(text).ids
    # A model that makes them of text is refused where a text has their names.
    trained(prose(1, 999), pre_tokenizers.Metaspace(), decoders.Metaspace(), True).save(str(folder / "own.json"))
    for held, right in (f"{text} </s>", False), ("word", True):
        done = prepare(write(folder / "one.txt", held), "--tokenizer", folder / "own.json", "--end-of-text", "</s>", "--out", out)
        done.ok() if right else done.fails("special tokens of their names in plain text; give --parse-special")


DOCUMENTS = [prose(seed, 3 + seed % 40) or "x" for seed in range(300)]
LINES = [text.replace("\n", " ").replace("\r", " ") for text in DOCUMENTS]


def test_inputs(folder):
    """Each input has these documents."""
    records = [{"body": text, "other": 1} for text in DOCUMENTS] + [{"body": ""}, {"body": None}]
    for name, held in [("binary", b"a\0b"), ("empty", ""), (".git/config", "hidden"), *((f"{n}.txt", text) for n, text in enumerate(DOCUMENTS[:9]))]:
        write(folder / "files" / name, held)
    rows = [  # name, content, options, documents, what is said
        ("records.jsonl", records, ["--field", "body"], DOCUMENTS, ""),
        ("records.jsonl.gz", gzip.compress(b"\n\n".join(json.dumps(r).encode() for r in records)), ["--field", "body"], DOCUMENTS, ""),
        ("array.json", json.dumps(records, indent=1), ["--field", "body"], DOCUMENTS, ""),
        ("lines.txt", "\n".join(LINES) + "\n\n", ["--document", "line"], [line for line in LINES if line.strip()], ""),
        ("mark.txt", b"\xef\xbb\xbfa word", [], ["a word"], ""), ("a.txt.gz", gzip.compress(DOCUMENTS[7].encode()), [], [DOCUMENTS[7]], ""),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "2024-01-01"}', [], ["2024-01-01"], ""), ("table.csv", 'n,text\n1,007\n2,"a ""b""\nc"\n', [], ["007", 'a "b"\nc'], ""),
        ("files", None, [], DOCUMENTS[:9], "1 file left out: no text"),
        ("halves.jsonl", '{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n', [], ["a\ufffd b", "\U0001f600"], "1 invalid character replaced by U+FFFD"),
        ("bytes.txt", b"a \xff b \xef\xbf\xbd" + b" x" * 20, [], ["a \ufffd b \ufffd" + " x" * 20], "1 invalid character replaced by U+FFFD"),
        ("bad.jsonl", '{"text": "good"}\n{"text"\n7\n', ["--skip-bad"], ["good"], "2 records left out, named above")]
    try:
        import datasets
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS, "n": list(range(len(DOCUMENTS)))}), folder / "table.parquet", row_group_size=37)
        datasets.Dataset.from_dict({"text": LINES}).save_to_disk(folder / "arrow")
        rows += [("table.parquet", None, [], DOCUMENTS, ""), (next((folder / "arrow").glob("*.arrow")), None, [], LINES, "")]
    except ImportError as missing:
        print(f"# without tables: {missing}")
    for name, held, arguments, texts, says in rows:
        path = folder / name if held is None else write(folder / name, held)
        manifest, tokens, *_ = shards(folder / "out", path, *arguments, says=says)
        assert tokens == [id for text in texts for id in GPT2_TOKENIZER.encode(text, add_special_tokens=False).ids + [GPT2_END]], path
        assert manifest["splits"]["train"]["documents"] == len(texts), path


def settings_of(folder):
    generation, tokenizer = (json.loads((folder / name).read_text()) for name in ("generation_config.json", "tokenizer_config.json"))
    return generation["eos_token_id"], tokenizer["eos_token"]


def test_vocabularies(folder):
    """Trained ones, and large ones, which take uint32."""
    path, own, data = write(folder / "train_on.txt", prose(3, 40000)), folder / "own", json.loads((GPT2 / "tokenizer.json").read_text())
    prepare(path, "--train-tokenizer", 300, "--document", "stretch", "--out", own, "--val-fraction", 0.3).ok("1 shard\n")
    manifest, tokens, *_ = read_shards(own)
    assert manifest["tokenizer"]["vocab_size"] == 300 and max(tokens) < 300 and read_shards(own, "val")[1]
    train(*TINY, "--vocab", 300, "--data", own, "--steps", 2, "--sample-every", 2, "--sample-tokens", 5, "--save", folder / "model").ok("llm.c shards, uint16")
    assert settings_of(own) == settings_of(folder / "model") == (manifest["tokenizer"]["end_of_text_id"], END)
    data["model"]["vocab"].pop(END, None)
    data["model"]["vocab"].update({f"unused{i}": i for i in range(len(data["model"]["vocab"]), 70000)})
    data["added_tokens"][0]["id"] = 70000
    write(folder / "large/tokenizer.json", data)
    manifest, tokens, *_ = shards(folder / "out", write(folder / "small.txt", "some text\n"), tokenizer=folder / "large")
    assert manifest["dtype"] == "uint32" and tokens[-1] == 70000 and manifest["tokenizer"]["vocab_size"] == 70001


CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{{ '<|im_start|>assistant\n' if add_generation_prompt }}")
PHI3 = ("{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}")
THINK = CHATML.replace("assistant\n' if", "assistant\n<think>' if")
PARTS = CHATML.replace("m.content", "m.content[0].text").replace("{% for m", "{% if messages[0].content is string %}{{ 1 / 0 }}{% endif %}{% for m")
MARKED = ("{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for d in documents or [] %}<{{ d.text }}>{% endfor %}{{ date }}"
          "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
          "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}")
NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": MARKED}, {"name": "short", "template": PHI3}]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<s>"]
SIMPLE = "### User:\nQ\n\n### Assistant:\n"


def says(role, text="{}"):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


Q, A, B, S = ({"role": role, "content": text} for role, text in [("user", "Q"), ("assistant", "A"), ("assistant", "B"), ("system", "S")])
ASKED, ANSWERED = says("user", "Q") + "<|im_start|>assistant\n", "[A<|im_end|>\n]"
TOOL, CALL = {"name": "f", "parameters": {}}, {"name": "f", "arguments": {"x": "1", "y": None}}
TOOLS, CALLS = [{"type": "function", "function": TOOL}], [{"type": "function", "function": CALL}]
CALLED = ('<s>{"type": "function", "function": {"name": "f", "parameters": {}}}<|im_start|>user\nQ<|im_end|><|im_start|>assistant\n'
          '[[{"type": "function", "function": {"name": "f", "arguments": {"x": "1", "y": null}}}]<|im_end|>]<|im_start|>tool\nR<|im_end|>'
          '<|im_start|>assistant\n[A<|im_end|>]')
R = {"role": "tool", "content": "R"}
PAIR = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
# Template, record, options, the text with brackets around what is learned, and the names of the tokens that end a text.
CHATS = [
    (None, {"messages": [Q, A, Q]}, [], SIMPLE + "[A" + END + "]", [END]),
    (CHATML, {"messages": [S, Q, A, Q, B]}, [], says("system", "S") + ASKED + ANSWERED + ASKED + "[B<|im_end|>\n]" + END, [END, "<|im_end|>"]),
    (CHATML, {"messages": [Q, A]}, ["--end-of-text", "<|im_end|>"], ASKED + ANSWERED + "<|im_end|>", ["<|im_end|>"]),
    (CHATML, {"messages": [Q, A]}, ["--chat-template", "FOLDER/phi3"], f"<|user|>\nQ<|end|>\n<|assistant|>\n[A<|end|>\n{END}]", [END]),
    (PHI3, {"messages": [Q, A, Q, B]}, [], f"<|user|>\nQ<|end|>\n<|assistant|>\n[A<|end|>\n]<|user|>\nQ<|end|>\n<|assistant|>\n[B<|end|>\n{END}]", [END, "<|end|>"]),
    (THINK, {"messages": [Q, A]}, [], ASKED + ANSWERED + END, None),
    (PARTS, {"messages": [Q, A]}, [], ASKED + ANSWERED + END, None),
    (CHATML, {"messages": [Q, {"role": "assistant", "content": [{"type": "text", "text": "A"}]}]}, [], ASKED + ANSWERED + END, None),
    *[(template, {"messages": [Q, A | {flag: value}, Q, B]}, [], text, None) for template, text in [
        (CHATML, ASKED + "A<|im_end|>\n" + ASKED + "[B<|im_end|>\n]" + END),
        (MARKED, ("<s>" + ASKED + "A<|im_end|>" + ASKED).replace("\n<|im_start|>", "<|im_start|>") + "[B<|im_end|>]" + END)]
      for flag, value in [("weight", 0), ("train", False), ("trainable", 0), ("loss", 0), ("loss_mask", 0)]],
    (CHATML, {"messages": [Q, A | {"weight": 1}, Q, B | {"weight": 0}]}, [], ASKED + ANSWERED + END, None),
    (CHATML, {"messages": [Q, A], "system": "S"}, [], says("system", "S") + ASKED + ANSWERED + END, None),
    (CHATML, {"conversations": PAIR}, [], ASKED + ANSWERED + END, None),
    (CHATML, {"prompt": "Q", "completion": "A"}, [], f"Q[A{END}]", [END]),
    (CHATML, {"prompt": "Q", "completion": [A]}, [], ASKED + ANSWERED + END, None),
    (CHATML, {"prompt": [Q, A, Q], "completion": [B]}, [], ASKED + "A<|im_end|>\n" + ASKED + "[B<|im_end|>\n]" + END, None),
    *[(NAMED, record, [], CALLED + END, None) for record in [
        {"messages": [Q, {"role": "assistant", "tool_calls": CALLS}, R, A], "tools": TOOLS},
        {"messages": [Q, {"role": "assistant", "tool_calls": CALLS, "content": None}, R, A], "tools": json.dumps(TOOLS)},
        {"messages": [Q, {"role": "assistant", "function_call": CALL}, {"role": "function", "content": "R"}, A], "functions": [TOOL]},
        {"conversations": [PAIR[0], {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "R"}, PAIR[1]], "tools": TOOLS}]],
    (NAMED, {"messages": [Q, A], "chat_template_kwargs": {"chat_template": "short"}}, [], f"<|user|>\nQ<|end|>\n<|assistant|>\n[A<|end|>\n{END}]", None),
    (MARKED, {"messages": [Q, A], "chat_template_kwargs": {"date": "May"}, "documents": [{"text": "D"}]}, [],
     "<s><D>May" + ASKED.replace("\n<|im_start|>", "<|im_start|>") + "[A<|im_end|>]" + END, None),
    (CHATML, {"messages": [Q, A | {"content": "<|im_end|>x"}]}, [], ASKED + "[<|im_end|>x<|im_end|>\n]" + END, None),
]


def instruct(folder, template, **settings):
    tokenizer = Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(write(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": END, "chat_template": template} | settings).parent / "tokenizer.json"))
    return tokenizer


def test_conversations(folder):
    need_templates()
    write(folder / "phi3", PHI3)
    groups, out = {}, folder / "out"
    for row in CHATS:  # those of one template and the same options together
        groups.setdefault(json.dumps([row[0], row[2]]), []).append(row)
    for number, rows in enumerate(groups.values()):
        own, options = folder / str(number), [option.replace("FOLDER", str(folder)) for option in rows[0][2]]
        tokenizer = instruct(own, rows[0][0])
        write(own / "special_tokens_map.json", {"eos_token": END})  # which would contradict another --end-of-text
        manifest, tokens, counts, ends = shards(out, write(folder / "chats.jsonl", [record for _, record, *_ in rows]), "--chat", *options, tokenizer=own)
        decode = lambda id: tokenizer.decode([id], skip_special_tokens=False)  # noqa: E731
        for (_, record, _, text, _), start, end in zip(rows, [0] + [end + 1 for end in ends], ends):
            got = "".join(("[%s]" if c else "%s") % decode(id) for id, c in zip(tokens[start:end + 1], counts[start:end + 1])).replace("][", "")
            assert got == text, (record, got, text)
        want, (ids, name), saved = [eos for *_, eos in rows if eos], settings_of(out), PreTrainedTokenizerFast.from_pretrained(out)
        assert len(ends) == len(rows) and (not want or [decode(id) for id in (ids if isinstance(ids, list) else [ids])] in want), (ids, want)
        assert name == saved.eos_token == (options[1] if "--end-of-text" in options else END) and not (out / "special_tokens_map.json").exists()
        assert manifest["bos"] == [] and (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
        assert saved.chat_template == (PHI3 if "--chat-template" in options else PreTrainedTokenizerFast.from_pretrained(own).chat_template or saved.chat_template)


def test_conversations_are_as_transformers_has_them(folder):
    """Ids, and names of special tokens that stay text; masks, if the template has marks or TRL has it with marks."""
    need_templates()
    words, trl = prose(4, 4000), importlib.util.find_spec("trl")
    cases = [(tokenizer, kind, template, template) for tokenizer, kind in [
        (Tokenizer.from_file(str(LLAMA3 / "tokenizer.json")), {}), (llama2(words), {}), (llama2(words), {"normalized": True}), (GPT2_TOKENIZER, {"single_word": True}),
        (trained(words, pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()), {"rstrip": True})] for template in (CHATML, MARKED)]
    for name in ("llama3", "phi3", "qwen3", "gemma") if trl else ():
        cases.append((GPT2_TOKENIZER, {}, *((pathlib.Path(trl.origin).parent / f"chat_templates/{name}{end}.jinja").read_text() for end in ("", "_training"))))
    for number, (tokenizer, kind, template, training) in enumerate(cases):
        own, tokenizer = folder / str(number), Tokenizer.from_str(tokenizer.to_str())
        tokenizer.add_special_tokens([AddedToken(name, special=True, **{"normalized": False, **kind}) for name in SPECIAL + [END] * (tokenizer.token_to_id(END) is None)])
        tokenizer.post_processor = None if kind else tokenizer.post_processor  # transformers would add one to the file
        tokenizer.save(str(write(own / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": END, "chat_template": template}).parent / "tokenizer.json"))
        reference = PreTrainedTokenizerFast.from_pretrained(own)
        for named in (False, True):
            chats = [[{"role": role, "content": prose(seed + turn, 6).strip("x ") + (" <|im_end|>x<s>" * named if seed % 3 else "")} for turn in range(seed % 2 + 1)
                      for role in ("user", "assistant")] for seed in range(12)]
            _, tokens, counts, ends = shards(folder / "out", write(folder / "chats.jsonl", [{"messages": chat} for chat in chats]), "--chat", tokenizer=own)
            assert (folder / "out/tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
            for chat, start, end in zip(chats, [0] + [end + 1 for end in ends], ends):
                how = {"sanitize_control_tokens": True} if named else {"return_assistant_tokens_mask": "endgeneration" in training}
                want = reference.apply_chat_template(chat, chat_template=training, return_dict=True, **how)
                size = len(want["input_ids"])
                assert tokens[start:start + size] == want["input_ids"] and end + 1 - start - size in (0, 1), (number, template, chat)
                assert counts[start:start + size] == want.get("assistant_masks", counts[start:start + size]), (number, chat)


def test_tables_of_conversations(folder):
    need_templates()
    program.need("datasets")
    import datasets
    import pyarrow.parquet
    instruct(folder / "own", NAMED)
    calls = [[Q, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}] for arguments in ({"x": "1"}, {"y": "2", "z": None})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat, "tools": json.dumps(TOOLS)} for chat in calls]), folder / "structs.parquet")
    string, kind = datasets.Value("string"), datasets.Features
    full = [{"messages": [{"role": m["role"], "content": m.get("content"), "tool_calls": m.get("tool_calls")} for m in chat], "tools": json.dumps(TOOLS)} for chat in calls]
    features = kind({"tools": string, "messages": [{"role": string, "content": string, "tool_calls": [{"function": {"name": string, "arguments": datasets.Json()}}]}]})
    datasets.Dataset.from_list(full, features=features).to_parquet(str(folder / "json.parquet"))
    for name, second in ("structs", '{"y": "2"}'), ("json", '{"y": "2", "z": null}'):
        _, tokens, *_ = shards(folder / "out", folder / f"{name}.parquet", "--chat", tokenizer=folder / "own")
        text = Tokenizer.from_file(str(folder / "own/tokenizer.json")).decode(tokens, skip_special_tokens=False)
        assert text.count('"arguments": {"x": "1"}}') == text.count(f'"arguments": {second}}}') == 1, text


# A zip, a tar, 7z, lz4, bzip2, xz and zstd; UTF-16 with a mark and without; a compressed binary.
NO_TEXT = [b"PK\3\4\x14\0\0\0\x08\0text", b"a.txt" + bytes(95) + b"0000644\0", b"7z\xbc\xaf\x27\x1c\0\x04", b"\x04\x22\x4d\x18d@\xa7\x05\0\0\x80text",
           b"BZh91AY&SY\xc5\x7f\0\0\x01\x81", b"\xfd7zXZ\0\0\x04text", b"\x28\xb5\x2f\xfd\x04\x21\0\0text", "text".encode("utf-16"), "text".encode("utf-16-le"),
           "".join(chr(0x4E00 + i * 37 % 20000) for i in range(200)).encode("utf-16-le"), gzip.compress(b"a\0b")]
TEMPLATES = {"endless": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3, "refuses": "{{ raise_exception('no system message') }}", "divides": "{{ 1 / 0 }}",
             "broken": "{% for %}", "grows": "{% set a = namespace(x='x' * 10**8) %}{% for i in range(99) %}{{ a.x }}{% endfor %}",
             "shortens": "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}"}
LONG = {"messages": [Q, A | {"content": "A long one."}, Q, B]}
# Input (None: no such file; bytes: text, or JSON lines after a brace), options, a part of the sentence.
WRONG = [
    (None, [], "there is no file"), (b"", [], "there is no text in"), (b"text", ["--val-fraction", 1], "--val-fraction 1.0: give 0 to 0.999999"),
    (b"text", ["--shard-tokens", 0], "--shard-tokens 0: give 1 to"), (b"text", ["--train-tokenizer", 300], "give --tokenizer or --train-tokenizer"),
    (b"text", ["--chat"], "is plain text; conversations come as"), (b"text", ["--out", "FOLDER/text"], "text: File exists"),
    *[(b"text", ["--tokenizer", tokenizer], part) for tokenizer, part in [
        ("FOLDER/nowhere", "names a tokenizer.json or a directory with one"), ("", "names a tokenizer.json"), ("FOLDER/words.json", "the tokenizer fails on the text: "),
        ("FOLDER/text", "is no tokenizer that can be used"), ("FOLDER/bare.json", "name one with --end-of-text"), ("FOLDER/damaged", "tokenizer_config.json is no JSON object"),
        ("FOLDER/many.json", "has the id 4000000000"), ("FOLDER/panics.json", "the tokenizer fails on the text: chunk size"), ("FOLDER/pipe", "is no regular file")]],
    (b"text", ["--end-of-text", "<|no|>"], "has no token <|no|>"), *[(held, [], "no UTF-8 text; make UTF-8 text of it first") for held in NO_TEXT],
    (gzip.compress(b"text" * 99)[:-9], [], "input.txt cannot be read: "), (b'{"text": "good"}\n{"text"\n', [], "input.jsonl, line 2: it cannot be read or rendered (JSON"),
    (b'{"text": ' + b"[" * 100000 + b"]" * 100000 + b"}\n", [], "input.jsonl, line 1: it cannot be read"), ({"text": 5}, [], "line 1: the record has no text text; it has text"),
    ({"body\x1b": "text"}, [], "the record has no text text; it has body\\x1b: name one with --field"),
    ({"body\x1b": "text"}, ["--chat"], "has no field messages; it has body\\x1b: name one with --messages-field"),
    ({"messages": [Q]}, ["--chat"], "there is no message of the assistant in"), ({"messages": [Q, A | {"weight": 0}]}, ["--chat"], "there is no message of the assistant in"),
    ({"messages": [Q, A | {"weight": 0.5}]}, ["--chat"], "line 1: the weight of message 1 is 0.5"), ({"messages": "hello"}, ["--chat"], "is no list of messages"),
    *[({"messages": [Q, A], name: "x"}, ["--chat"], f"line 1: the field {name} ") for name in ("chosen", "images", "weight", "label")],
    *[({"messages": [Q, A], "tools": tools}, ["--chat"], part) for tools, part in ((5, "the field tools is 5, which is no list"), ("{}", "is {}, which is no list"))],
    *[({"messages": [Q, {"role": "assistant", "content": content}]}, ["--chat"], f"line 1: the content of message 1 is {content}, which is no text")
      for content in (None, [1], [{"type": "image"}], {"a": 1}, 5)],
    ({"messages": [Q, A], "chat_template_kwargs": {"chat_template": "x"}}, ["--chat"], "there is no chat template x; there is default"),
    *[(LONG, ["--chat", "--chat-template", "FOLDER/" + template], part) for template, part in [
        ("endless", "(TimeoutError: it takes more than 10 seconds)"), ("refuses", "no system message"), ("divides", "division by zero"), ("broken", "TemplateSyntaxError"),
        ("grows", "line 1: it cannot be read or rendered (MemoryError"), ("shortens", "changes earlier messages"), ("nowhere", "give a regular file"), ("pipe", "give a regular file")]],
    (LONG, ["--chat", "--chat-template", "/dev/zero"], "give a regular file"),
]


def test_one_sentence_when_it_goes_wrong(folder):
    write(folder / "text", "text")
    write(folder / "bare.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    write(folder / "words.json", {"model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "?"}, "added_tokens": []})
    write(folder / "many.json", {"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 4000000000}, "merges": []}})
    write(folder / "panics.json", json.loads((GPT2 / "tokenizer.json").read_text()) | {"pre_tokenizer": {"type": "FixedLength", "length": 0}})
    write(folder / "damaged/tokenizer_config.json", "{")
    shutil.copy(GPT2 / "tokenizer.json", folder / "damaged")
    os.mkfifo(folder / "pipe")
    for name, template in TEMPLATES.items():
        write(folder / name, template)
    for number, (held, options, part) in enumerate(WRONG):
        if "--chat" in options and not PreTrainedTokenizerFast:
            continue
        lines = isinstance(held, dict) or (held or b"")[:1] == b"{"
        path = folder / str(number) / ("input.jsonl" if lines else "input.txt")
        if held is not None:
            write(path, held)
        options = [str(option).replace("FOLDER", str(folder)) for option in options]
        done = prepare("--out", folder / "wrong", path, *([] if "--tokenizer" in options else ["--tokenizer", GPT2]), *options).fails(part)
        said = [line for line in done.err.splitlines() if line.startswith("prepare_data.py: ")]
        assert done.status in (1, 2) and len(said) == 1 and "Traceback" not in done.err, str(done)
        assert not (folder / "wrong/manifest.json").exists()
    if PreTrainedTokenizerFast:
        write(folder / "packages/transformers.py", "raise ImportError('none here')\n")
        prepare(write(folder / "one.jsonl", LONG), "--chat", "--tokenizer", GPT2, "--out", folder / "out", PYTHONPATH=str(folder / "packages")).fails(
            "a Python package is missing (none here): pip install -U tokenizers numpy; for --chat also transformers jinja2")


def snapshot(folder):
    """Each name with what it holds, or where it links to."""
    return {path.name: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in sorted(folder.iterdir()) if not path.is_dir()}


def wait_until(condition):
    deadline = program.Deadline(60)
    while not condition():
        assert not deadline.passed()
        time.sleep(0.05)


def test_runs_that_end_early(folder):
    """They leave what there was, and no process; a second run at the same time is refused."""
    out, good = folder / "out", write(folder / "good.txt", prose(9, 3000))
    shards(out, good, "--shard-tokens", 1000)
    notes = write(out / "train_notes.txt", "mine")
    before = snapshot(out)
    prepare(write(folder / "late.jsonl", [{"text": "good"}] * 100 + [{"body": "bad"}]), "--tokenizer", GPT2, "--out", out).fails("late.jsonl, line 101: ")
    need_templates()
    words = [sys.executable, PROGRAM, write(folder / "one.jsonl", LONG), "--chat", "--tokenizer", GPT2, "--out", out, "--chat-template"]
    for template, sign in ("endless", signal.SIGINT), ("stuck", signal.SIGINT), ("stuck", signal.SIGTERM), ("stuck", signal.SIGKILL):
        write(folder / "stuck", "{{ 9**(9**9) }}")
        running = subprocess.Popen([*map(str, words), write(folder / template, TEMPLATES.get(template, "{{ 9**(9**9) }}"))], stderr=subprocess.PIPE, text=True,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in a background job
        child = pathlib.Path(f"/proc/{running.pid}/task/{running.pid}/children")
        wait_until(child.read_text)
        time.sleep(0.5)
        workers = child.read_text().split()
        prepare(good, "--tokenizer", GPT2, "--out", out).fails(f"another run writes to {out}")
        running.send_signal(sign)
        said = running.communicate()[1]
        assert running.returncode == (-sign if sign == signal.SIGKILL else 1) and ("interrupted" in said) == (sign != signal.SIGKILL), said
        wait_until(lambda: not any(os.path.exists(f"/proc/{worker}") for worker in workers))
        assert snapshot(out) == before
    # A run that ends well replaces all of the earlier run's and nothing else.
    shards(out, notes)
    assert sorted(path.name for path in out.iterdir()) == ["generation_config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json",
                                                           "train_000000.bin", "train_000000.ends", "train_notes.txt"]


def test_only_its_own_is_replaced(folder):
    text = write(folder / "plain.txt", "some text\n")
    for name, content in [("tokenizer.json", "{}"), ("train_000007.bin", "mine"), ("manifest.json", '{"text": "an input"}\n')]:
        foreign = write(folder / name[:5] / name, content)
        for arguments in [text, "--train-tokenizer", 300], [text, "--tokenizer", GPT2], [foreign, "--tokenizer", GPT2]:
            prepare(*arguments, "--out", foreign.parent).fails("would be replaced, and is an input or not of an earlier run")
            assert snapshot(foreign.parent) == {name: content.encode()}
    shards(folder / "linked", text)
    (folder / "linked/tokenizer.json").unlink()
    (folder / "linked/tokenizer.json").symlink_to(write(folder / "kept.json", "mine"))
    prepare(text, "--tokenizer", GPT2, "--out", folder / "linked").fails("not of an earlier run")
    assert (folder / "kept.json").read_text() == "mine"


def test_the_model_stops_as_it_was_trained(folder):
    need_templates()
    base = folder / "base"
    instruct(base, SIMPLE)
    write(base / "special_tokens_map.json", {"eos_token": END})
    train(*TINY, "--vocab", 420, "--steps", 1, "--sample-every", 0, "--data", write(folder / "text", "text " * 200), "--save", folder / "started")
    for name in "config.json", "model.safetensors":
        shutil.copy(folder / "started/latest" / name, base)
    chats = [{"messages": [Q | {"content": f"Say {n}."}, A | {"content": "It is " + n * 2}]} for n in "abcdefgh"] * 4
    prepare(write(folder / "chats.jsonl", chats), "--chat", "--tokenizer", base, "--chat-template", write(folder / "chatml", CHATML), "--out", folder / "sft",
            "--val-fraction", 0).ok(f"./train --init {base} --pack documents --data")
    done = train(*"--batch 8 --seq-len 64 --pack documents --steps 60 --lr 1e-2 --sample-every 0 --val-fraction 0".split(), "--init", base,
                 "--data", folder / "sft", "--save", folder / "run")
    assert "left out" not in done.out and f"{base} has another chat template: checkpoints get that of" in done.err and "eos_token_id" in done.err, str(done)
    for name in "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json":
        assert (folder / "run" / name).read_bytes() == (folder / "sft" / name).read_bytes()
    saved = PreTrainedTokenizerFast.from_pretrained(folder / "run")
    prompt = saved.apply_chat_template([Q | {"content": "Say c."}], tokenize=False, add_generation_prompt=True)
    done = run(sys.executable, ROOT / "tools/generate", "--init", folder / "run", "--device", "cpu", "--prompt", prompt,
               "--temperature", 0, "--tokens", 60, LCE_TRAIN=str(TRAIN)).ok()
    assert done.out.startswith(prompt) and done.out.rstrip().endswith("<|im_end|>") and len(done.out) < len(prompt) + 60, done.out


main(globals(), 1)
