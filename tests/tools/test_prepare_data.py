#!/usr/bin/env python3
"""tools/prepare_data.py: its shards against `tokenizers` and `transformers`, masks, refusals, and ./train on what it made."""
import gzip
import importlib.util
import json
import os
import pathlib
import random
import shlex
import signal
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TEXT, TINY, TRAIN, Process, files_in, main, need, run, train, wait_until, write  # noqa: E402

try:
    import numpy
    from tokenizers import AddedToken, Regex, Tokenizer, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Split
    from trained_tokenizers import llama2, trained
except ImportError as missing:
    print(f"1..1\nok 1 # SKIP {missing}: pip install tokenizers numpy")
    sys.exit(0)

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
GPT2, LLAMA3 = (ROOT / "tests/golden/tokenizers" / name for name in ("gpt2", "llama3"))
TOKENIZERS = {name: Tokenizer.from_file(str(name / "tokenizer.json")) for name in (GPT2, LLAMA3)}
PROGRAM, END, SPECIAL = ROOT / "tools/prepare_data.py", "<|endoftext|>", ["<|im_start|>", "<|im_end|>", "<|end|>", "<s>"]


def prepare(path, options, out, tokenizer=GPT2, program=PROGRAM, packages=PROGRAM.parent):
    """Runs the program in the folder that --out is in."""
    named = [] if "--train-tokenizer" in options else ["--tokenizer", tokenizer]
    return run(sys.executable, program, path, "--out", out, *named, *shlex.split(options), cwd=out.parent, PYTHONPATH=str(packages))


def shards(path, options, out, *how, says=""):
    """What the program makes of a file, as read_shards gives it."""
    done = prepare(path, f"--val-fraction 0 {options}", out, *how).ok(says)
    assert done.err.count("bad.jsonl, line ") == 2 * ("named above" in says), done
    return read_shards(out)


def read_shards(folder, split="train"):
    """The manifest and, of a split's documents, the ids and, with masks, whether each counts."""
    manifest = json.loads((folder / "manifest.json").read_text())
    made = manifest["splits"][split]

    def column(suffix, dtype, *magic):
        for shard in made["shards"]:
            size, data = shard["tokens"], (folder / shard["file"]).with_suffix(suffix).read_bytes()
            values = numpy.frombuffer(data[1024:], dtype)
            assert data[:1024] == struct.pack("<256i", *magic, size, *[0] * 253), data[:1024]
            assert len(values) == (size if suffix == ".bin" else (size + 7) // 8)
            yield from (values if suffix == ".bin" else numpy.unpackbits(values, bitorder="little")[:size]).tolist()
    tokens = [*column(".bin", *{"uint16": ("<u2", 20240520, 1), "uint32": ("<u4", 20240801, 7)}[manifest["dtype"]])]
    after = [0] + [i + 1 for i, ends in enumerate(column(".ends", "u1", 20261121, 1)) if ends]
    counts = [*column(".mask", "u1", 20261120, 1)] if manifest["masked"] else [1] * len(tokens)
    assert (made["documents"], made["counted_tokens"]) == (len(after) - 1, sum(counts)) and after[-1] == len(tokens), made
    return manifest, *([values[first:last] for first, last in zip(after, after[1:])] for values in (tokens, counts))


def prose(seed, words):
    draw = random.Random(seed)
    parts = ["word", "naïve", "don't", "12345", "x+y", "  two", "\n", "\n\n", "\r\n", "\t", ".\n", "世界", "?!\n", "a\n b", "end "]
    return "".join(draw.choice(parts) + draw.choice(["", " ", " ", "\n"]) for _ in range(words))


def chat(*messages, **more):
    return {"messages": messages, **more}


def test_a_file_is_what_its_text_is(folder):
    text, out = prose(1, 160000), folder / "out"
    path = write(folder / "whole.txt", text)
    for name, end in (GPT2, END), (LLAMA3, "<|end_of_text|>"):
        want = TOKENIZERS[name].encode(text, add_special_tokens=False).ids + [TOKENIZERS[name].token_to_id(end)]
        for workers in 1, 3:
            manifest, documents, _ = shards(path, f"--workers {workers} --shard-tokens 100000 --val-fraction 0.45", out, name)  # draws none
            assert documents == [want] and manifest["tokenizer"]["end_of_text_id"] == want[-1]
            assert len(manifest["splits"]["train"]["shards"]) == -(-len(want) // 100000)
    # A part held back: together as many documents' tokens as before, each stretch closed; the same each time.
    options = "--document stretch --val-fraction 0.2"
    both = [[sum(part, []) for part in (shards(path, options, out)[1], read_shards(out, "val")[1])] for _ in range(2)]
    assert both[0] == both[1] and 0.1 < len(both[0][1]) / len(both[0][0]) < 0.4
    assert sum(len(TOKENIZERS[GPT2].decode(part)) for part in both[0]) == len(text)


def test_cuts_change_no_tokens(folder):
    o200k = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+")
    text = "".join(prose(seed, 300) + end for seed in range(20) for end in ("\nThe", ".\n/x", "\n\n\nA", "\n5", "e\u0301\n世", "\n\u3000"))
    lines, one_line = text.split("\n"), normalizers.Sequence([normalizers.Strip(), normalizers.Replace("\n", " ")])
    path, record = write(folder / "words.txt", text), write(folder / "words.jsonl", {"text": text})
    small = write(folder / "small_pieces.py", "import prepare_data\nprepare_data.PIECE_CHARS = 70\nprepare_data.main()\n")
    for number, tokenizer in enumerate([
            llama2(lines), trained(lines, Metaspace(prepend_scheme="first", split=False)), trained(lines, Metaspace()),
            trained(lines, Metaspace(prepend_scheme="first"), unigram=True), trained(lines, ByteLevel(add_prefix_space=True)),
            trained([text], Split(o200k, "isolated"), ByteLevel(False, use_regex=False)),  # with tokens of several newlines
            trained([text], ByteLevel(False, use_regex=False)),  # this and the next have tokens across lines, and are not cut
            trained(lines, Metaspace(), unigram=True, normalizer=one_line)]):
        tokenizer.save(str(folder / "own.json"))
        for file, options, want, bos in [(path, "--special-tokens", tokenizer.encode(text).ids, [1]),
                                         (record, "", tokenizer.encode(text, add_special_tokens=False).ids + [2], [])]:
            manifest, documents, _ = shards(file, f"--end-of-text '</s>' {options}", folder / "out", folder / "own.json", small)
            assert documents == [want] and manifest["bos"] == bos, number


DOCUMENTS = [prose(seed, 3 + seed % 40) or "x" for seed in range(300)]
LINES = [text.replace("\n", " ").replace("\r", " ") for text in DOCUMENTS]
RECORDS = [{"body": text, "other": 1} for text in DOCUMENTS] + [{"body": ""}, {"body": None}]
NAMES = f"a{END} b <s>\nc{END}"
# An input and what it holds (None: it is there), options, its documents' texts or ids, what is said.
INPUTS = [
    ("records.jsonl", RECORDS, "--field body", DOCUMENTS, ""), ("files", None, "", DOCUMENTS[:9], "1 file left out: no text"),
    ("records.jsonl.gz", gzip.compress(b"\n\n".join(json.dumps(record).encode() for record in RECORDS)), "--field body", DOCUMENTS, ""),
    ("array.json", json.dumps(RECORDS, indent=1), "--field body", DOCUMENTS, ""),
    ("lines.txt", "\n".join(LINES) + "\n\n", "--document line", [line for line in LINES if line.strip()], ""),
    ("a.txt.gz", gzip.compress(DOCUMENTS[7].encode()), "", [DOCUMENTS[7]], ""), ("mark.txt", b"\xef\xbb\xbfa word", "", ["a word"], ""),
    ("mark.jsonl", b'\xef\xbb\xbf{"text": "2024-01-01"}', "", ["2024-01-01"], ""),
    ("table.csv", 'n,text\n1,007\n2,"a ""b""\nc"\n', "", ["007", 'a "b"\nc'], ""),
    ("halves.jsonl", '{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n', "", ["a\ufffd b", "\U0001f600"], "1 invalid character replaced by U+FFFD"),
    ("bytes.txt", b"a \xff b \xef\xbf\xbd" + b" x" * 20, "", ["a \ufffd b \ufffd" + " x" * 20], "1 invalid character replaced by U+FFFD"),
    ("bad.jsonl", '{"text": "good"}\n{"text"\n7\n', "--skip-bad", ["good"], "2 records left out, named above"),
    ("names.txt", NAMES, "", [NAMES], "2 names of special tokens in the text are ordinary text"),
    ("names.txt", NAMES, "--parse-special", [TOKENIZERS[GPT2].encode(NAMES).ids], ""),
    ("some.txt", "some text", "--tokenizer large.json", [TOKENIZERS[GPT2].encode("some text").ids + [70000]], "./train --vocab 70001 "),
    ("table.parquet", None, "", DOCUMENTS, ""), ("arrow/data-00000-of-00001.arrow", None, "", LINES, ""),
]


def test_inputs(folder):
    plain = Tokenizer.from_str(TOKENIZERS[GPT2].to_str())
    plain.encode_special_tokens, end = True, [plain.token_to_id(END)]
    for name, held in [("binary", b"a\0b"), ("empty", ""), (".git/config", "hidden"), *((f"{n}.txt", DOCUMENTS[n]) for n in range(9))]:
        write(folder / "files" / name, held)
    if importlib.util.find_spec("datasets"):
        import datasets
        datasets.Dataset.from_dict({"text": DOCUMENTS, "n": range(300)}).to_parquet(str(folder / "table.parquet"), batch_size=37)
        datasets.Dataset.from_dict({"text": LINES}).save_to_disk(folder / "arrow")
    write(folder / "large.json", plain.to_str().replace('"id":400', '"id":70000').replace('"vocab":{', f'"vocab":{{"{END}":70000,'))
    for name, held, options, texts, says in INPUTS:
        path = folder / name if held is None else write(folder / name, held)
        path.exists() or need("datasets")
        documents = shards(path, options, folder / "out", says=says)[1]
        assert documents == [plain.encode(text).ids + end if isinstance(text, str) else text for text in texts], (path, options)


def test_a_vocabulary_of_its_own(folder):
    own = folder / "own"
    prepare(write(folder / "words.txt", prose(3, 40000)), "--train-tokenizer 300 --document stretch --val-fraction 0.3", own).ok("1 shard\n")
    manifest, documents, _ = read_shards(own)
    assert manifest["tokenizer"]["vocab_size"] == 300 and max(map(max, documents)) < 300 and read_shards(own, "val")[1]
    train(TINY + f"--data {own} --steps 2 --sample-every 2 --sample-tokens 5 --save {folder}/model").ok("llm.c shards, uint16")
    for made in files_in(own), files_in(folder / "model"):
        assert json.loads(made["generation_config.json"])["eos_token_id"] == manifest["tokenizer"]["end_of_text_id"]
        assert json.loads(made["tokenizer_config.json"])["eos_token"] == END


CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{{ '<|im_start|>assistant\n' if add_generation_prompt }}")
PHI3 = ("{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}")
THINK = CHATML.replace("assistant\n' if", "assistant\n<think>' if")
PARTS = "{% if messages[0].content is string %}{{ 1 / 0 }}{% endif %}" + CHATML.replace("m.content", "m.content[0].text")
MARKED = ("{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for d in documents or [] %}<{{ d.text }}>{% endfor %}"
          "{{ date }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
          "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endgeneration %}"
          "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}")
NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": MARKED}, {"name": "short", "template": PHI3}]
Q, A, B, S = ({"role": role, "content": text} for role, text in [("user", "Q"), ("assistant", "A"), ("assistant", "B"), ("system", "S")])
SIMPLE, OPEN_PHI3 = "### User:\nQ\n\n### Assistant:\n", "<|user|>\nQ<|end|>\n<|assistant|>\n"
OPEN, OPEN_MARKED = (f"<|im_start|>user\nQ<|im_end|>{between}<|im_start|>assistant\n" for between in ("\n", ""))
ONE, SECOND, SYSTEM = f"{OPEN}[A<|im_end|>\n]{END}", f"{OPEN}A<|im_end|>\n{OPEN}[B<|im_end|>\n]{END}", "<|im_start|>system\nS<|im_end|>\n"
FLAGS = {"weight": 0}, {"train": False}, {"trainable": 0}, {"loss": 0}, {"loss_mask": 0}
TOOL, CALL, R = {"name": "f", "parameters": {}}, {"name": "f", "arguments": {"x": "1", "y": None}}, {"role": "tool", "content": "R"}
TOOLS, CALLING = [{"type": "function", "function": TOOL}], {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}
CALLED = (f'<s>{json.dumps(TOOLS[0])}{OPEN_MARKED}[{json.dumps(CALLING["tool_calls"])}<|im_end|>]<|im_start|>tool\nR<|im_end|>'
          f"<|im_start|>assistant\n[A<|im_end|>]{END}")
PAIR = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
# Template, options, the tokens that end a text, and records with their text, in which brackets are around what is learned.
CHATS = [
    (None, "", [END, "<s>"], [(chat(Q, A, Q), f"{SIMPLE}[A{END}]")]),
    (None, "--end-of-text '<|im_end|>'", ["<|im_end|>"], [(chat(Q, A), f"{SIMPLE}[A<|im_end|>]")]),
    (CHATML, "--end-of-text '<|im_end|>'", ["<|im_end|>"], [(chat(Q, A), f"{OPEN}[A<|im_end|>\n]<|im_end|>")]),
    (CHATML, "--chat-template phi3", [END, "<s>"], [(chat(Q, A), f"{OPEN_PHI3}[A<|end|>\n{END}]")]),
    (PHI3, "", [END, "<|end|>", "<s>"], [(chat(Q, A, Q, B), f"{OPEN_PHI3}[A<|end|>\n]{OPEN_PHI3}[B<|end|>\n{END}]")]),
    *[(template, "", [END, "<|im_end|>", "<s>"], [(chat(Q, A), ONE)]) for template in (THINK, PARTS)],
    (CHATML, "", [END, "<|im_end|>", "<s>"], [
        (chat(S, Q, A, Q, B), SYSTEM + ONE.removesuffix(END) + ONE.replace("A", "B")), (chat(Q, A, system="S"), SYSTEM + ONE),
        (chat(Q, A | {"content": [{"type": "text", "text": "A"}]}), ONE), ({"conversations": PAIR}, ONE),
        *[(chat(Q, A | flag, Q, B), SECOND) for flag in FLAGS], (chat(Q, A | {"weight": 1}, Q, B | {"weight": 0}), ONE),
        ({"prompt": "Q", "completion": "A"}, f"Q[A{END}]"), ({"prompt": "Q", "completion": [A]}, ONE),
        ({"prompt": [Q, A, Q], "completion": [B]}, SECOND), (chat(Q, A | {"content": "<|im_end|>x"}), ONE.replace("A", "<|im_end|>x"))]),
    (MARKED, "", [END, "<|im_end|>", "<s>"], [
        *[(chat(Q, A | flag, Q, B), f"<s>{OPEN_MARKED}A<|im_end|>{OPEN_MARKED}[B<|im_end|>]{END}") for flag in FLAGS],
        (chat(Q, A, chat_template_kwargs={"date": "May"}, documents=[{"text": "D"}]), f"<s><D>May{OPEN_MARKED}[A<|im_end|>]{END}")]),
    (NAMED, "", [END, "<|im_end|>", "<s>"], [
        (chat(Q, CALLING, R, A, tools=TOOLS), CALLED), (chat(Q, CALLING | {"content": None}, R, A, tools=json.dumps(TOOLS)), CALLED),
        (chat(Q, {"role": "assistant", "function_call": CALL}, R | {"role": "function"}, A, functions=[TOOL]), CALLED),
        ({"conversations": [PAIR[0], {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "R"}, PAIR[1]],
          "tools": TOOLS}, CALLED),
        (chat(Q, A, chat_template_kwargs={"chat_template": "short"}), f"{OPEN_PHI3}[A<|end|>\n{END}]")]),
]


def instruct(folder, template, base=TOKENIZERS[GPT2], **kind):
    """GPT-2's tokenizer, or another, with special tokens and a chat template, as transformers reads it."""
    need("transformers", "jinja2")
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer.from_str(base.to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True, **{"normalized": False, **kind}) for name in [*SPECIAL, END]])
    tokenizer.post_processor = None if kind else tokenizer.post_processor  # transformers would add one to the file
    write(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": END, "chat_template": template})
    tokenizer.save(str(folder / "tokenizer.json"))
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_conversations(folder):
    out, path, _ = folder / "out", folder / "chats.jsonl", write(folder / "phi3", PHI3)
    for number, (template, options, stops, rows) in enumerate(CHATS):
        own = folder / str(number)
        tokenizer = instruct(own, template)
        write(own / "special_tokens_map.json", {"eos_token": END})  # which would contradict another --end-of-text
        write(own / "generation_config.json", {"eos_token_id": tokenizer.convert_tokens_to_ids("<s>")})
        manifest, *columns = shards(write(path, [record for record, _ in rows]), f"--chat {options}", out, own)
        got = ["".join(("[%s]" if counts else "%s") % tokenizer.decode([id]) for id, counts in zip(*document)).replace("][", "")
               for document in zip(*columns)]
        assert got == [text for _, text in rows] and manifest["bos"] == [], (got, rows)
        made, saved = files_in(out), tokenizer.from_pretrained(out)
        ids = json.loads(made["generation_config.json"])["eos_token_id"]
        assert numpy.ravel(ids).tolist() == tokenizer.convert_tokens_to_ids(stops) and saved.eos_token == stops[0], (ids, saved.eos_token)
        assert not template or saved.chat_template == (PHI3 if "--chat-template" in options else tokenizer.chat_template)
        assert made["tokenizer.json"] == files_in(own)["tokenizer.json"] and "special_tokens_map.json" not in made


def test_conversations_are_as_transformers_has_them(folder):
    """Ids, and names of special tokens that stay text; masks, if the template has marks or TRL has it with marks."""
    out, texts, trl = folder / "out", prose(4, 4000).split("\n"), importlib.util.find_spec("trl")
    cases = [(*case, template, template) for case in [
        (TOKENIZERS[LLAMA3], {}), (llama2(texts), {}), (llama2(texts), {"normalized": True}), (TOKENIZERS[GPT2], {"single_word": True}),
        (trained(texts, ByteLevel(add_prefix_space=True)), {"rstrip": True})] for template in (CHATML, MARKED)]
    for path in [pathlib.Path(trl.origin).parent / "chat_templates" / name for name in ("llama3", "phi3", "qwen3", "gemma")] if trl else []:
        cases.append((TOKENIZERS[GPT2], {}, *(pathlib.Path(f"{path}{end}.jinja").read_text() for end in ("", "_training"))))
    for number, (tokenizer, kind, template, training) in enumerate(cases):
        own = folder / str(number)
        reference = instruct(own, template, tokenizer, **kind)
        for name, how in ("", {"return_assistant_tokens_mask": "endgeneration" in training}), (" <|im_end|>x<s>", {"sanitize_control_tokens": True}):
            chats = [[m | {"content": prose(seed + turn, 6).strip("x ") + name * (seed % 3 > 0)} for turn in range(seed % 2 + 1) for m in (Q, A)]
                     for seed in range(12)]
            manifest, *columns = shards(write(folder / "chats.jsonl", [chat(*messages) for messages in chats]), "--chat", out, own)
            assert manifest["bos"] == [] and (out / "tokenizer.json").read_bytes() == (own / "tokenizer.json").read_bytes()
            for messages, ids, counts in zip(chats, *columns):
                want = reference.apply_chat_template(messages, chat_template=training, return_dict=True, **how)
                size = len(want["input_ids"])
                assert ids[:size] == want["input_ids"] and len(ids) - size in (0, 1), (number, template, messages)
                assert counts[:size] == want.get("assistant_masks", counts[:size]), (number, messages)


def test_tables_of_conversations(folder):
    need("datasets")
    import datasets
    tokenizer, path, string = instruct(folder / "own", NAMED), folder / "table.parquet", datasets.Value("string")
    table = [chat(Q | {"tool_calls": None}, A | {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                  tools=json.dumps(TOOLS)) for arguments in ({"x": "1"}, {"y": "2", "z": None})]
    calls = [{"function": {"name": string, "arguments": datasets.Json()}}]
    features = datasets.Features({"tools": string, "messages": [{"role": string, "content": string, "tool_calls": calls}]})
    for features, second in (None, '{"y": "2"}'), (features, '{"y": "2", "z": null}'):
        datasets.Dataset.from_list(table, features=features).to_parquet(str(path))
        text = tokenizer.decode(sum(shards(path, "--chat", folder / "out", folder / "own")[1], []))
        assert text.count('"arguments": {"x": "1"}}') == text.count(f'"arguments": {second}}}') == 1, text


# A zip, a tar, 7z, lz4, bzip2, xz and zstd; UTF-16 with a mark, without, and without a NUL; a compressed binary.
NO_TEXT = [b"PK\3\4\x14\0\0\0\x08\0text", b"a.txt" + bytes(95) + b"0000644\0", b"7z\xbc\xaf\x27\x1c\0\x04", b"\x04\x22\x4d\x18d@\xa7\x05\0\0\x80text",
           b"BZh91AY&SY\xc5\x7f\0\0\x01\x81", b"\xfd7zXZ\0\0\x04text", b"\x28\xb5\x2f\xfd\x04\x21\0\0text", "text".encode("utf-16"),
           "text".encode("utf-16-le"), "".join(chr(0x4E01 + i) for i in range(200)).encode("utf-16-le"), gzip.compress(b"a\0b")]
ENDLESS, STUCK, BPE = "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3, "{{ 9**(9**9) }}", {"type": "BPE", "merges": []}
LONG = chat(Q, A | {"content": "A long one."}, Q, B)
UNIGRAM = json.loads(trained(prose(1, 999).split("\n"), Metaspace(), unigram=True).to_str())
# A text, or a record for --chat (None: no such file), options or an option with what its file holds, a part of the sentence.
WRONG = [
    (None, "", "there is no file"), ("", "", "there is no text in"), ("text", "--val-fraction 1", "--val-fraction 1.0: give 0 to 0.999999"),
    ("text", "--shard-tokens 0", "--shard-tokens 0: give 1 to"), ("text", "--train-tokenizer 300 --tokenizer x", "give --tokenizer or --train-tokenizer"),
    ("text", "--out pipe", "pipe: File exists"), ("text", "--end-of-text '<|no|>'", "has no token <|no|>"),
    ("text", "--tokenizer nowhere", "names a tokenizer.json or a directory with one"), ("text", "--tokenizer ''", "names a tokenizer.json"),
    ("text", "--tokenizer damaged", "tokenizer_config.json is no JSON object"), ("text", "--tokenizer pipe", "is no regular file"),
    *[("text", ("--tokenizer", tokenizer), part) for tokenizer, part in [
        ({"model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "?"}, "added_tokens": []}, "the tokenizer fails on the text: "),
        ({"model": BPE | {"vocab": {"a": 0}}}, "name one with --end-of-text"), ("text", "is no tokenizer that can be used"),
        ({"model": BPE | {"vocab": {"a": 0, "</s>": 4000000000}}}, "has the id 4000000000"),
        ({"model": BPE | {"vocab": {"</s>": 0}}, "pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails on the text: chunk size")]],
    (f"{NAMES} </s>", ("--tokenizer", UNIGRAM), "special tokens of their names in plain text; give --parse-special"),
    *[(held, "", "no UTF-8 text; make UTF-8 text of it first") for held in NO_TEXT], (gzip.compress(b"text" * 99)[:-9], "", ".txt cannot be read: "),
    ('{"text": "good"}\n{"text"\n', "", ".jsonl, line 2: it cannot be read or rendered (JSON"),
    ('{"text": ' + "[" * 100000 + "]" * 100000 + "}\n", "", ".jsonl, line 1: it cannot be read"),
    ('{"text": 5}', "", "line 1: the record has no text text; it has text"),
    ('{"body\\u001b": "text"}', "", "the record has no text text; it has body\\x1b: name one with --field"),
    ({"body\x1b": "text"}, "", "has no field messages; it has body\\x1b: name one with --messages-field"),
    ("text", "--chat", "is plain text; conversations come as"), ({"messages": "hello"}, "", "is no list of messages"),
    *[(record, "", "there is no message of the assistant in") for record in (chat(Q), chat(Q, A | {"weight": 0}))],
    (chat(Q, A | {"weight": 0.5}), "", "line 1: the weight of message 1 is 0.5"),
    *[(chat(Q, A, **{name: "x"}), "", f"line 1: the field {name} ") for name in ("chosen", "images", "weight", "label")],
    *[(chat(Q, A, tools=tools), "", f"the field tools is {tools}, which is no list") for tools in (5, "{}")],
    *[(chat(Q, A | {"content": content}), "", f"line 1: the content of message 1 is {content}, which is no text")
      for content in (None, [1], [{"type": "image"}], {"a": 1}, 5)],
    (chat(Q, A, chat_template_kwargs={"chat_template": "x"}), "", "there is no chat template x; there is default"),
    *[(LONG, f"--chat-template {name}", "give a regular file") for name in ("nowhere", "pipe", "/dev/zero")],
    *[(LONG, ("--chat-template", template), part) for template, part in [
        (ENDLESS, "(TimeoutError: it takes more than 10 seconds)"), ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ 1 / 0 }}", "division by zero"), ("{% for %}", "TemplateSyntaxError"),
        ("{% set a = namespace(x='x' * 10**8) %}{% for i in range(99) %}{{ a.x }}{% endfor %}", "line 1: it cannot be read or rendered (MemoryError"),
        ("{% for m in messages %}{{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}", "changes earlier messages")]],
]


def test_one_sentence_when_it_goes_wrong(folder):
    write(folder / "damaged/tokenizer.json", TOKENIZERS[GPT2].to_str())
    write(folder / "damaged/tokenizer_config.json", "{")
    os.mkfifo(folder / "pipe")
    for number, (held, options, part) in enumerate(WRONG):
        if not isinstance(options, str):
            options = f"{options[0]} {write(folder / f'given{number}', options[1])}"
        if isinstance(held, dict):
            need("transformers", "jinja2")
            options = options + " --chat"
        name = f"input{number}{'.jsonl' if str(held)[:1] == '{' else '.txt'}"
        path = folder / name if held is None else write(folder / name, held)
        done = prepare(path, options, folder / "wrong").fails(part)
        said = [line for line in done.err.splitlines() if line.startswith("prepare_data.py: ")]
        assert done.status in (1, 2) and len(said) == 1 and "Traceback" not in done.err, str(done)
        assert not (folder / "wrong/manifest.json").exists()
    write(folder / "packages/transformers.py", "raise ImportError('none here')\n")
    prepare(write(folder / "one.jsonl", LONG), "--chat", folder / "out", packages=folder / "packages").fails(
        "a Python package is missing (none here): pip install -U tokenizers numpy; for --chat also transformers jinja2")


def test_runs_that_end_early(folder):
    """They leave what there was, and no process; a second run at the same time is refused."""
    out, good = folder / "out", write(folder / "good.txt", prose(9, 3000))
    shards(good, "--shard-tokens 1000", out)
    notes = write(out / "train_notes.txt", "mine")
    before = files_in(out)
    prepare(write(folder / "late.jsonl", [{"text": "good"}] * 100 + [{"body": "bad"}]), "", out).fails("late.jsonl, line 101: ")
    need("transformers", "jinja2")
    words = [sys.executable, PROGRAM, write(folder / "one.jsonl", LONG), "--chat", "--tokenizer", GPT2, "--out", out, "--chat-template"]
    for template, sign in (ENDLESS, signal.SIGINT), (STUCK, signal.SIGINT), (STUCK, signal.SIGTERM), (STUCK, signal.SIGKILL):
        running = Process(*words, write(folder / "template", template))
        children = pathlib.Path(f"/proc/{running.pid}/task/{running.pid}/children")
        wait_until(children.read_text)
        time.sleep(0.5)
        workers = children.read_text().split()
        prepare(good, "", out).fails(f"another run writes to {out}")
        os.kill(running.pid, sign)
        done = running.finish()
        assert done.status == (-sign if sign == signal.SIGKILL else 1) and ("interrupted" in done.err) == (sign != signal.SIGKILL), done
        wait_until(lambda: not any(os.path.exists(f"/proc/{worker}") for worker in workers))
        assert files_in(out) == before
    # A run that ends well replaces all of the earlier run's and nothing else.
    shards(notes, "", out)
    assert files_in(out).keys() == {"generation_config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json",
                                    "train_000000.bin", "train_000000.ends", "train_notes.txt"}


def test_only_its_own_is_replaced(folder):
    text, linked = write(folder / "plain.txt", "some text\n"), folder / "linked"
    for name, content in [("tokenizer.json", "{}"), ("train_000007.bin", "mine"), ("manifest.json", '{"text": "an input"}\n')]:
        foreign = write(folder / name[:5] / name, content)
        for path, options in (text, "--train-tokenizer 300"), (text, ""), (foreign, ""):
            prepare(path, options, foreign.parent).fails("would be replaced, and is an input or not of an earlier run")
            assert files_in(foreign.parent) == {name: content.encode()}
    shards(text, "", linked)
    prepare(linked / "manifest.json", "", linked).fails("would be replaced, and is an input or not of an earlier run")
    (linked / "val_000000.bin").symlink_to(write(folder / "kept.json", "mine"))
    prepare(text, "", linked).fails("not of an earlier run")
    assert (folder / "kept.json").read_text() == "mine"


def test_the_model_stops_as_it_was_trained(folder):
    base, sft, saved = folder / "started/latest", folder / "sft", folder / "run"
    train(f"{TINY} --vocab 420 --steps 1 --sample-every 0 --data {TEXT} --save {folder}/started").ok()
    tokenizer = instruct(base, SIMPLE)
    write(base / "special_tokens_map.json", {"eos_token": END})
    write(folder / "chatml", CHATML)
    chats = [chat(Q | {"content": f"Say {n}."}, A | {"content": "It is " + n * 2}) for n in "abcdefgh"] * 4
    prepare(write(folder / "chats.jsonl", chats), "--chat --chat-template chatml --val-fraction 0", sft, base).ok(
        f"./train --init {base} --pack documents --data")
    done = train("--device cpu --batch 8 --seq-len 64 --pack documents --steps 60 --lr 1e-2 --sample-every 0 --val-fraction 0 "
                 f"--init {base} --data {sft} --save {saved}").ok()
    assert "left out" not in done.out and f"{base} has another chat template: checkpoints get that of" in done.err and "eos_token_id" in done.err, done
    for name in "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json":
        assert (saved / name).read_bytes() == (sft / name).read_bytes()
    prompt = tokenizer.from_pretrained(saved).apply_chat_template(chats[2]["messages"][:1], tokenize=False, add_generation_prompt=True)
    done = run(sys.executable, ROOT / "tools/generate", "--init", saved, "--device", "cpu", "--prompt", prompt,
               "--temperature", 0, "--tokens", 60, LCE_TRAIN=str(TRAIN)).ok()
    assert done.out.startswith(prompt) and done.out.rstrip().endswith("<|im_end|>") and len(done.out) < len(prompt) + 60, done.out


main(globals(), 1)
