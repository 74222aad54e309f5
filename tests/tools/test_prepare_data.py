#!/usr/bin/env python3
"""tools/prepare_data.py: its shards against `tokenizers` and `transformers`, masks, errors, and ./train on what it made."""
import bz2
import gzip
import json
import lzma
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
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError as missing:
    print(f"1..1\nok 1 # SKIP {missing}: pip install tokenizers numpy")
    sys.exit(0)

try:
    import jinja2  # noqa: F401
    from transformers import PreTrainedTokenizerFast
except ImportError as missing:
    PreTrainedTokenizerFast, NO_CHAT = None, f"{missing}: pip install transformers jinja2"

GPT2, LLAMA3 = (ROOT / "tests/golden/tokenizers" / name for name in ("gpt2", "llama3"))
PROGRAM = ROOT / "tools/prepare_data.py"
END = "<|endoftext|>"
GPT2_TOKENIZER = Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
GPT2_END = GPT2_TOKENIZER.token_to_id(END)


def write(path, held):
    """A file with a text, with bytes, or with what JSON makes of a dict, or of each of a list."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(held, list):
        held = "".join(json.dumps(record) + "\n" for record in held)
    held = json.dumps(held) if isinstance(held, dict) else held
    path.write_bytes(held.encode() if isinstance(held, str) else held)
    return path


def prepare(*arguments):
    return run(sys.executable, PROGRAM, *arguments)


def shards(out, path, *arguments, tokenizer=GPT2, val_fraction=0):
    """What the program makes of a file, as read_shards gives it."""
    prepare(path, "--tokenizer", tokenizer, "--out", out, "--val-fraction", val_fraction, *arguments).ok()
    return read_shards(out)


def need_templates():
    if not PreTrainedTokenizerFast:
        raise Skip(NO_CHAT)


def prepare_with(settings, *arguments):
    """With other settings of its own: what it reads and cuts at a time."""
    return run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r})\nimport prepare_data\n"
               f"vars(prepare_data).update({settings})\nprepare_data.main()", *arguments)


def train(*arguments):
    if not TRAIN.exists():
        raise Skip("there is no ./train")
    return program.train("--device cpu --model llama-tiny --hidden-size 16 --num-layers 1 --num-attention-heads 2 "
                         "--intermediate-size 16 --seq-len 16 --batch 2", *arguments, OMP_NUM_THREADS="2").ok()


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


def encode(text):
    return GPT2_TOKENIZER.encode(text, add_special_tokens=False).ids + [GPT2_END]


def prose(seed, words):
    draw = random.Random(seed)
    parts = ["word", "naïve", "don't", "12345", "x+y", "  two", "\n", "\n\n", "\r\n", "\t", ".\n", "世界", "?!\n", "a\n b", "end "]
    return "".join(draw.choice(parts) + draw.choice(["", " ", " ", "\n"]) for _ in range(words))


def test_a_file_is_what_its_text_is(folder):
    text, out = prose(1, 160000), folder / "out"
    assert len(text.encode()) > 500000
    path = write(folder / "whole.txt", text)
    for name in (GPT2, LLAMA3):
        tokenizer = Tokenizer.from_file(str(name / "tokenizer.json"))
        end = tokenizer.token_to_id(END) or tokenizer.token_to_id("<|end_of_text|>")
        want = tokenizer.encode(text, add_special_tokens=False).ids + [end]
        for workers in (1, 3):
            manifest, tokens, _, ends = shards(out, path, "--workers", workers, "--shard-tokens", 100000, tokenizer=name)
            assert tokens == want
            assert len(manifest["splits"]["train"]["shards"]) == -(-len(want) // 100000)
            assert manifest["tokenizer"]["end_of_text_id"] == end
            assert ends == [len(want) - 1]
    # Of a file that is read in parts only the last ends the document.
    manifest, tokens, _, ends = shards(out, write(folder / "large.txt", "a line\n" * 620000))
    assert tokens.count(GPT2_END) == 1 and ends == [len(tokens) - 1] and manifest["splits"]["train"]["documents"] == 1
    # A part held back: together as many documents' tokens as before, each stretch closed.
    both = [shards(out, path, "--document", "stretch", val_fraction=0.2)[1], read_shards(out, "val")[1]]
    prepare_with("PIECE_BYTES=999", path, "--document", "stretch", "--tokenizer", GPT2, "--out", out, "--val-fraction", 0.2).ok()
    assert both == [read_shards(out)[1], read_shards(out, "val")[1]]
    assert all(both) and 0.1 < len(both[1]) / len(both[0]) < 0.4
    assert sum(len(GPT2_TOKENIZER.decode(part)) for part in both) == len(text)


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


def tokenizers_of(words):
    metaspace, split = pre_tokenizers.Metaspace, pre_tokenizers.Split
    byte_level, o200k = pre_tokenizers.ByteLevel, Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+")
    yield llama2(words)
    yield trained(words, metaspace(prepend_scheme="first", split=False), decoders.Metaspace())
    yield trained(words, metaspace(prepend_scheme="first"), decoders.Metaspace(), unigram=True)
    yield trained(words, metaspace(prepend_scheme="always"), decoders.Metaspace())
    yield trained(words, byte_level(add_prefix_space=True), decoders.ByteLevel())
    yield trained(words, pre_tokenizers.Sequence([split(o200k, "isolated"), byte_level(add_prefix_space=False, use_regex=False)]),
                  decoders.ByteLevel(), whole=True)  # with tokens of several newlines
    # These have tokens across lines, and the program cuts nothing.
    yield trained(words, byte_level(add_prefix_space=False, use_regex=False), decoders.ByteLevel(), whole=True)
    yield trained(words, metaspace(), decoders.Metaspace(), True, normalizers.Sequence([normalizers.Strip(), normalizers.Replace("\n", " ")]))


def test_cuts_change_no_tokens(folder):
    words = "".join(prose(seed, 300) + end for seed in range(20) for end in ("\nThe", ".\n/x", "\n\n\nA", "\n5", "e\u0301\n世", "\n\u3000"))
    path, record = write(folder / "words.txt", words), write(folder / "words.jsonl", {"text": words})
    for number, tokenizer in enumerate(tokenizers_of(words)):
        name = folder / f"{number}.json"
        tokenizer.save(str(name))
        for file, arguments, want in [(path, ["--special-tokens"], tokenizer.encode(words).ids),
                                      (record, [], tokenizer.encode(words, add_special_tokens=False).ids + [2])]:
            done = prepare_with("PART_BYTES=5000, PIECE_BYTES=70", file, "--tokenizer", name, "--out", folder / "out",
                                "--end-of-text", "</s>", "--val-fraction", 0, *arguments).ok()
            manifest, tokens, _, ends = read_shards(folder / "out")
            assert tokens == want and ends == [len(want) - 1], (number, done)


def test_special_tokens_in_a_text_are_text(folder):
    text, out = f"a{END} b <s>\nc\ufdd0{END}", folder / "out"
    path = write(folder / "text.txt", text)
    plain = Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
    plain.encode_special_tokens = True
    clean = text.replace("\ufdd0", "\ufffd")
    _, tokens, *_ = shards(out, path)
    assert tokens == plain.encode(clean).ids + [GPT2_END] and tokens.count(GPT2_END) == 1
    _, tokens, *_ = shards(out, path, "--parse-special")
    assert tokens == GPT2_TOKENIZER.encode(clean).ids and tokens.count(GPT2_END) == 2
    prepare(path, "--train-tokenizer", 300, "--out", out, "--val-fraction", 0).ok()
    assert read_shards(out)[1].count(0) == 1
    # Whose vocabulary and merges have them, too.
    for unigram in (False, True):
        words = "".join(f"{letter}</s> {letter}<s> " for letter in "abcdefgh") * 99 + prose(1, 999)
        tokenizer = trained(words, pre_tokenizers.Metaspace(), decoders.Metaspace(), unigram)
        tokenizer.save(str(folder / "own.json"))
        _, tokens, *_ = shards(out, path, "--end-of-text", "</s>", tokenizer=folder / "own.json")
        assert 1 not in tokens and tokens.count(2) == 1


def test_gzip_is_read(folder):
    text = prose(2, 3000)
    want = shards(folder / "out", write(folder / "a.txt", text))[1]
    for arguments in [[write(folder / "gz/a.txt.gz", gzip.compress(text.encode()))], [folder / "gz"],
                      [write(folder / "b.jsonl.gz", gzip.compress(json.dumps({"text": text}).encode()))]]:
        assert shards(folder / "out", *arguments)[1] == want


def test_a_document_is_in_one_split(folder):
    texts = {f"{i:02}.txt": f"file {i}\n" + prose(i, 40 if i % 5 else 12000) for i in range(40)}
    for name, text in texts.items():
        write(folder / "files" / name, text)
    write(folder / "files/.hidden", "hidden")
    write(folder / "files/binary", b"a\0b")
    write(folder / "files/empty", "")
    found = []
    shards(folder / "out", folder / "files", val_fraction=0.3)
    for split in ("train", "val"):
        manifest, tokens, *_ = read_shards(folder / "out", split)
        parts = GPT2_TOKENIZER.decode(tokens, skip_special_tokens=False).split(END)
        assert parts.pop() == "" and manifest["splits"][split]["documents"] == len(parts) == tokens.count(GPT2_END) > 3
        found += parts
    assert sorted(found) == sorted(texts.values())
    for i in range(40):  # the only record of a file, too
        write(folder / "records" / f"{i}.jsonl", [{"text": f"record {i}"}])
    splits = shards(folder / "out", folder / "records", val_fraction=0.3)[0]["splits"]
    assert min(splits[split]["documents"] for split in ("train", "val")) > 3, splits


DOCUMENTS = [prose(seed, 3 + seed % 40) or "x" for seed in range(300)]
LINES = [text.replace("\n", " ").replace("\r", " ") for text in DOCUMENTS]


def assert_documents(out, path, texts, *arguments):
    manifest, tokens, *_ = shards(out, path, *arguments)
    assert tokens == [id for text in texts for id in encode(text)]
    assert manifest["splits"]["train"]["documents"] == len(texts)


def test_records_are_documents(folder):
    out = folder / "out"
    records = [{"body": text, "other": 1} for text in DOCUMENTS]
    assert_documents(out, write(folder / "records.jsonl", records + [{"body": ""}, {"body": None}]), DOCUMENTS, "--field", "body")
    path = write(folder / "lines.txt", "\n".join(LINES) + "\n\n")
    assert_documents(out, path, [line for line in LINES if line.strip()], "--document", "line")
    # Held back by document, the same ones each time.
    drawn = []
    for _ in range(2):
        shards(out, path, "--document", "line", val_fraction=0.1)
        drawn.append(read_shards(out, "val")[1])
    assert drawn[0] == drawn[1] and 5 < drawn[0].count(GPT2_END) < 90


def test_parquet(folder):
    program.need("pyarrow")
    import pyarrow.parquet
    path = folder / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS, "n": list(range(len(DOCUMENTS)))}), path, row_group_size=37)
    assert_documents(folder / "out", path, DOCUMENTS)
    prepare(path, "--field", "body", "--tokenizer", GPT2, "--out", folder / "out").fails("has no column body; it has text, n")


def test_large_vocabularies_take_uint32(folder):
    data = json.loads((GPT2 / "tokenizer.json").read_text())
    end, vocab = data["added_tokens"][0], data["model"]["vocab"]
    vocab.pop(end["content"], None)
    for i in range(len(vocab), 70000):
        vocab[f"unused{i}"] = i
    end["id"] = 70000
    write(folder / "large/tokenizer.json", data)
    manifest, tokens, *_ = shards(folder / "out", write(folder / "small.txt", "some text\n"), tokenizer=folder / "large")
    assert manifest["dtype"] == "uint32" and tokens[-1] == 70000
    assert manifest["tokenizer"]["vocab_size"] == 70001


def eos_of(folder):
    names = {"generation_config.json": "eos_token_id", "tokenizer_config.json": "eos_token"}
    return tuple(json.loads((folder / name).read_text())[key] for name, key in names.items())


def test_a_trained_tokenizer(folder):
    path, own = write(folder / "train_on.txt", prose(3, 40000)), folder / "own"
    prepare(path, "--train-tokenizer", 300, "--document", "stretch", "--out", own, "--val-fraction", 0.3).ok("1 shard\n")
    manifest, tokens, *_ = read_shards(own)
    assert manifest["tokenizer"]["vocab_size"] == 300 and max(tokens) < 300
    assert read_shards(own, "val")[1]
    ids = Tokenizer.from_file(str(own / "tokenizer.json")).encode("don't").ids
    train("--vocab", 300, "--data", own / "train_*.bin", "--val-data", own / "val_*.bin", "--tokenizer", own,
          "--prompt", ",".join(map(str, ids)), "--steps", 2, "--sample-every", 2, "--sample-tokens", 5, "--save", folder / "model").ok("sample: don't")
    assert eos_of(own) == eos_of(folder / "model") == (manifest["tokenizer"]["end_of_text_id"], END)
    # The folder, manifest and all.
    train("--vocab", 300, "--data", own, "--steps", 1, "--sample-every", 0).ok("llm.c shards, uint16")


CHATS = [
    [("system", "Be brief."), ("user", "How much is 2 + 2?"), ("assistant", "It is 4."), ("user", "Sure?"), ("assistant", "Yes, 4.")],
    [("user", "Name a colour."), ("assistant", "Green")],
    [("user", "Nobody answers.")],
]


def messages(chat):
    return {"messages": [{"role": role, "content": text} for role, text in chat]}


def test_only_answers_count(folder):
    need_templates()
    path = write(folder / "chats.jsonl", [messages(chat) for chat in CHATS])
    done = prepare(path, "--chat", "--tokenizer", GPT2, "--out", folder / "out", "--val-fraction", 0)
    done.ok("1 conversation without a message of the assistant left out", "./train --init MODEL --pack documents --data")
    assert "stop token" not in done.out
    _, tokens, counts, _ = read_shards(folder / "out")
    decoded = "".join(("[%s]" if counts[i] else "%s") % GPT2_TOKENIZER.decode([id], skip_special_tokens=False)
                      for i, id in enumerate(tokens)).replace("][", "")
    assert decoded == (f"### System:\nBe brief.\n\n### User:\nHow much is 2 + 2?\n\n### Assistant:\n[It is 4.{END}"
                       f"]\n\n### User:\nSure?\n\n### Assistant:\n[Yes, 4.{END}]### User:\nName a colour.\n\n"
                       f"### Assistant:\n[Green{END}]"), decoded


LLAMA_TEMPLATE = ("{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|eot_id|>' }}"
                  "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}")


def test_a_chat_template(folder):
    need_templates()
    instruct, out = folder / "instruct", folder / "out"
    write(instruct / "tokenizer_config.json", {"bos_token": {"content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>",
                                               "chat_template": LLAMA_TEMPLATE})
    shutil.copy(LLAMA3 / "tokenizer.json", instruct)
    path = write(folder / "chats.jsonl", [messages(CHATS[0]), {"conversations": 1, "prompt": "Hi", "completion": " Ho "},
                                          {"messages": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "B"}]}])
    manifest, tokens, counts, ends = shards(out, path, "--chat", tokenizer=instruct)
    tokenizer = Tokenizer.from_file(str(instruct / "tokenizer.json"))
    learned = [tokenizer.decode([id], skip_special_tokens=False) for i, id in enumerate(tokens) if counts[i]]
    assert "".join(learned) == "It is 4.<|eot_id|>Yes, 4.<|eot_id|>Ho<|eot_id|>B<|eot_id|>", learned
    starts = [i for i, id in enumerate(tokens) if id == tokenizer.token_to_id("<|begin_of_text|>")]
    assert len(starts) == 3
    assert ends == [i - 1 for i in starts[1:]] + [len(tokens) - 1]  # not after every turn
    assert eos_of(out) == (tokenizer.token_to_id("<|eot_id|>"), "<|eot_id|>")
    assert manifest["splits"]["train"]["counted_tokens"] == len(learned)
    # The end of a text that the template does not write is not learned.
    template = write(folder / "template", "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    _, tokens, counts, _ = shards(out, write(folder / "one.jsonl", messages(CHATS[1])), "--chat", "--chat-template", template)
    asked, said = encode("[Name a colour.]")[:-1], encode("[Green]")
    assert tokens == asked + said and counts == [0] * len(asked) + [1] * (len(said) - 1) + [0], (tokens, counts)


TAGGED = """{{ bos_token }}
{%- if tools %}{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{% endif %}
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
<|start|>assistant
        {%- generation -%}
            {{ '\\n' + (m.content or '') }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|eot_id|> {% endgeneration %}
    {%- else %}
<|start|>{{ m.role }}
{{ m.content }}<|eot_id|>
    {%- endif %}
{%- endfor %}"""
TALK = [{"role": "user", "content": "How much is  1 + 1?"}, {"role": "assistant", "content": "two\n\n"},
        {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": " Yes: 2. "}]
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}


def test_conversations_are_as_transformers_has_them(folder):
    need_templates()
    metaspace = llama2(prose(4, 4000))
    metaspace.add_special_tokens(["<|start|>", "<|eot_id|>"])
    for number, tokenizer in enumerate([Tokenizer.from_file(str(LLAMA3 / "tokenizer.json")), metaspace]):
        own = folder / str(number)
        bos = ["<|begin_of_text|>", "<s>"][number]
        write(own / "tokenizer_config.json", {"bos_token": bos, "eos_token": "<|eot_id|>", "chat_template": TAGGED})
        tokenizer.save(str(own / "tokenizer.json"))
        tokenizer.post_processor = None  # whose offsets leave out spaces, which transformers then masks
        reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="<|eot_id|>")
        untagged = TAGGED.replace("{%- generation -%}", "{%- if true -%}").replace("{% endgeneration %}", "{% endif %}")
        for record, talk, skipped in [
                ({"messages": TALK + TALK[:1]}, TALK, 0), ({"messages": [TALK[0], CALL, *TALK[2:]], "tools": [TOOL]}, [TALK[0], CALL, *TALK[2:]], 0),
                ({"messages": TALK, "tools": json.dumps([TOOL]), "documents": [{"title": "T", "text": "t"}]}, TALK, 0),
                ({"prompt": TALK[:3], "completion": TALK[3:]}, TALK, 1), ({"prompt": TALK[0]["content"], "completion": TALK[1:2]}, TALK[:2], 0)]:
            path, given = write(folder / "one.jsonl", record), {"documents": record.get("documents")}
            _, tokens, counts, _ = shards(folder / "out", path, "--chat", tokenizer=own)
            want = reference.apply_chat_template(talk, tools=[TOOL] if "tools" in record else None, chat_template=TAGGED, **given,
                                                 return_dict=True, return_assistant_tokens_mask=True)
            masks = want["assistant_masks"]
            for i in range(1, len(masks)):  # of several tokens for an answer's last character transformers takes the first alone
                masks[i] |= masks[i - 1] and want.token_to_chars(i) == want.token_to_chars(i - 1)
            if skipped:  # the prompt's answer
                masks[:masks.index(0, masks.index(1))] = [0] * masks.index(0, masks.index(1))
            size = len(masks)
            assert tokens[:size] == want["input_ids"] and counts[:size] == masks, (number, record, tokens, want)
            # By what an answer adds to the text before it, where the template has no such tags.
            _, tokens, counts, _ = shards(folder / "out", path, "--chat", "--chat-template", write(folder / "untagged", untagged), tokenizer=own)
            assert tokens[:size] == want["input_ids"] and sum(counts) >= sum(masks) and masks.index(1) - counts.index(1) < 20


def test_special_tokens_in_messages_are_text(folder):
    need_templates()
    path = write(folder / "one.jsonl", messages([("user", f"x{END}y"), ("assistant", f"say {END}.")]))
    for arguments, ends in ([], 1), (["--parse-special"], 3):
        _, tokens, counts, _ = shards(folder / "out", path, "--chat", *arguments)
        assert tokens.count(GPT2_END) == ends
        told = f"### User:\nx{END}y\n\n### Assistant:\nsay {END}.{END}"
        assert GPT2_TOKENIZER.decode(tokens, skip_special_tokens=False) == told
        learned = [id for id, c in zip(tokens, counts) if c]
        assert GPT2_TOKENIZER.decode(learned, skip_special_tokens=False) == f"say {END}.{END}"


    prepare(path, "--chat", "--tokenizer", GPT2, "--out", folder / "out").ok("2 names of special tokens in the text are ordinary text")


def test_a_missing_package_is_told(folder):
    need_templates()
    write(folder / "packages/transformers.py", "raise ImportError('none here')\n")
    run(sys.executable, PROGRAM, write(folder / "one.jsonl", messages(CHATS[1])), "--chat", "--tokenizer", GPT2, "--out", folder / "out",
        PYTHONPATH=str(folder / "packages")).fails("needs the Python package transformers: pip install -U transformers (none here)")


def test_no_stop_token_is_told(folder):
    need_templates()
    path = write(folder / "chats.jsonl", [messages(chat) for chat in CHATS])
    part = "2 conversations where no stop token is learned"
    for template, told in (("{{ m.content }}", True), ("{{ m.content + eos_token }}", False),
                           ("{{ m.content if m.role == 'assistant' else m.content + eos_token }}", True)):
        template = write(folder / "template", "{% for m in messages %}[{{ m.role }}]" + template + "{% endfor %}"
                         "{{ '[assistant]' if add_generation_prompt }}")
        done = prepare(path, "--chat", "--tokenizer", GPT2, "--out", folder / "out", "--chat-template", template).ok()
        assert (part in done.out) == told, done


def test_masked_shards_train(folder):
    need_templates()
    chats = [messages([("user", prose(seed, 20)), ("assistant", f"answer {seed}")]) for seed in range(60)]
    shards(folder / "many", write(folder / "many.jsonl", chats), "--chat")
    job = ["--vocab", 401, "--data", folder / "many", "--steps", 3, "--sample-every", 0]
    train(*job, "--pack", "documents").ok("packed from 60 documents")
    train(*job, "--log", folder / "log")
    counted = program.column(program.read_log(folder / "log"), "tokens", "step")
    assert len(counted) == 3 and min(counted) < 32, counted


TEMPLATES = {
    "endless": "{% for i in range(9999) %}" * 3 + "{% endfor %}" * 3,
    "refuses": "{{ raise_exception('no system message') }}",
    "divides": "{{ 1 / 0 }}",
    "strips": "{{ messages[0]['content'].strop() }}",
    "broken": "{% for %}",
    "grows": "{% set a = namespace(x='x' * 10**8) %}{% for i in range(99) %}{{ a.x }}{% endfor %}",
    "repeats": "{{ 'x' * 3 * 10**7 }}",
    "shortens": "{% for m in messages %}{{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}",  # earlier answers
}
# Input (None: no such file; bytes: text, or JSON lines after a brace), options, a part of the sentence.
WRONG = [
    (None, [], "there is no file"),
    (b"text", ["--tokenizer", "FOLDER/nowhere"], "names a tokenizer.json or a directory with one"),
    (b"text", ["--tokenizer", ""], "names a tokenizer.json or a directory with one"),
    (b"text", ["--tokenizer", "FOLDER/words.json"], "the tokenizer fails on the text: "),
    (b"text", ["--tokenizer", "FOLDER/text"], "is no tokenizer.json"),
    (b"text", ["--tokenizer", "FOLDER/bare.json"], "name what ends a text with --end-of-text"),
    (b"text", ["--end-of-text", "<|no|>"], "has no token <|no|>"),
    (b"text", ["--chat"], "is plain text; conversations come as"),
    (b"text", ["--val-fraction", 1], "--val-fraction 1.0: give 0 to 0.999999"),
    (b"text", ["--shard-tokens", 0], "--shard-tokens 0: give 1 to"),
    (b"text", ["--tokenizer", "FOLDER/damaged"], "damaged/tokenizer_config.json is no JSON ("),
    (b"text", ["--out", "FOLDER/text"], "text: File exists"),
    *[(b'{"messages": []}\n', ["--chat", "--tokenizer", "FOLDER/" + name], "the chat template cannot be read")
      for name in ("list", "number")],
    (b'{"text": "good"}\n{"text"\n', [], "input.jsonl, byte 17: this line is no JSON"),
    (b'{"text": ' + b"[" * 100000 + b"]" * 100000 + b"}\n", [], "input.jsonl, byte 0: this line is no JSON"),
    ({"body\x1b": "text"}, [], "input.jsonl, byte 0: the record has no field text; it has body\\x1b: name one with --field"),
    ({"body\x1b": "text"}, ["--chat"], "has no field messages; it has body\\x1b: name one with --messages-field"),
    (b'[\n{"text": "x"}\n]\n', ["--format", "jsonl"], "input.txt, byte 0: this is a JSON array; write one record a line"),
    *[(held, [], f"input.txt is {what}; make UTF-8 text of it first: {remedy}") for held, what, remedy in [
        (bz2.compress(b"text"), "compressed by bzip2", "bunzip2"), (lzma.compress(b"text"), "compressed by xz", "unxz"),
        (b"\x28\xb5\x2f\xfdtext", "compressed by Zstandard", "unzstd"), ("text".encode("utf-16"), "UTF-16", "iconv"),
        (b"\xfe\xff\0t", "UTF-16", "iconv")]],
    (gzip.compress(b"text" * 99)[:-9], [], "input.txt is no gzip file that can be read"),
    (b"", [], "there is no text in"),
    ({"text": 5}, [], "input.jsonl, byte 0: the text is 5, which is no text"),
    ({"messages": [{"role": "user", "content": "?"}]}, ["--chat"], "there is no message of the assistant in"),
    ({"messages": "hello"}, ["--chat"], "is no list of messages"),
    *[({**messages(CHATS[1]), "tools": tools}, ["--chat"], f"input.jsonl, byte 0: the field tools {part}")
      for tools, part in ((5, "is 5, which is no list"), ("{", "is no JSON ("), ("{}", "is no JSON array"))],
    *[({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]}, ["--chat"],
       f"input.jsonl, byte 0: the content of message 1 is {content}, which is no text") for content in (None, [1], {"a": 1}, 5)],
    *[(messages(CHATS[0]), ["--chat", "--chat-template", "FOLDER/" + template], part) for template, part in [
        ("strips", "input.jsonl, byte 0: the chat template fails"), ("endless", "it takes more than 10 seconds"),
        ("refuses", "no system message"), ("divides", "division by zero"), ("nowhere", "No such file or directory"),
        ("broken", "the chat template cannot be read"),
        ("grows", "input.jsonl, byte 0: the chat template takes more than 1 GiB of memory"), ("repeats", "more than 16,777,216 characters"),
        ("shortens", "changes earlier messages")]],
]


def test_one_sentence_when_it_goes_wrong(folder):
    write(folder / "text", "text")
    write(folder / "bare.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    write(folder / "words.json", {"model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "?"}, "added_tokens": []})
    write(folder / "damaged/tokenizer_config.json", "{")
    shutil.copy(GPT2 / "tokenizer.json", folder / "damaged")
    for name, settings in ("list", {"chat_template": [1], "eos_token": [2]}), ("number", {"chat_template": 5, "eos_token": 2}):
        write(folder / name / "tokenizer_config.json", settings)
        shutil.copy(GPT2 / "tokenizer.json", folder / name)
    for name, template in TEMPLATES.items():
        write(folder / name, template)
    runs = [(["--tokenizer", GPT2, *options], held, part) for held, options, part in WRONG]
    runs += [(["--train-tokenizer", size], b"text", f"--train-tokenizer {size}: give 257 to") for size in (5, 0, 10**9)]
    if not PreTrainedTokenizerFast:
        runs = [r for r in runs if "--chat" not in r[0] or "plain text" in r[2]]
    for number, (arguments, held, part) in enumerate(runs):
        lines = isinstance(held, dict) or (held or b"")[:1] == b"{"
        path = folder / str(number) / ("input.jsonl" if lines else "input.txt")
        if held is not None:
            write(path, held)
        arguments = [str(argument).replace("FOLDER", str(folder)) for argument in arguments]
        done = prepare("--out", folder / "wrong", path, *arguments).fails(part)
        said = [line for line in done.err.splitlines() if line.startswith("prepare_data.py: ")]
        assert done.status == 1 and len(said) == 1 and part in said[0] and "Traceback" not in done.err, done
        assert not (folder / "wrong/manifest.json").exists()


def snapshot(folder):
    """Each name with what it holds, or where it links to."""
    return {path.name: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in sorted(folder.iterdir())}


def interrupt(sign, *arguments, **environment):
    """Starts the program and sends it SIGINT soon after the file `sign` is there."""
    running = subprocess.Popen([sys.executable, PROGRAM, *arguments], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, **environment},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in a background job
    while not sign.exists():
        assert running.poll() is None, running.stderr.read()
        time.sleep(0.05)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    said = running.communicate()[1]
    assert running.returncode == 1 and said.count("\n") == 1 and "interrupted" in said, said


def test_a_failed_run_keeps_what_was_there(folder):
    need_templates()
    out = folder / "again"
    shards(out, write(folder / "good.txt", prose(9, 3000)), "--shard-tokens", 1000)
    notes = write(out / "train_notes.txt", "mine")
    before = snapshot(out)
    prepare(write(folder / "late.jsonl", [{"text": "good"}] * 100 + [{"body": "bad"}]), "--tokenizer", GPT2, "--out", out).fails()
    chat = [write(folder / "one.jsonl", messages(CHATS[1])), "--chat", "--tokenizer", GPT2, "--out", out]
    endless = write(folder / "slow", TEMPLATES["endless"])
    interrupt(out / ".prepare_data.partial/generation_config.json", *chat, "--chat-template", endless)
    stuck = write(folder / "stuck", "{{ 9**(9**9) }}")  # in one operation, which no signal handler interrupts
    interrupt(out / ".prepare_data.partial/generation_config.json", *chat, "--chat-template", stuck)
    # While packages are loaded, too.
    started = folder / "started"
    write(folder / "packages/numpy.py", f"import time\nopen({str(started)!r}, 'w')\ntime.sleep(60)\n")
    interrupt(started, *chat, PYTHONPATH=str(folder / "packages"))
    assert snapshot(out) == before
    # A run that ends well replaces all of the earlier run's and nothing else.
    shards(out, notes)
    assert sorted(snapshot(out)) == ["generation_config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json",
                                     "train_000000.bin", "train_000000.ends", "train_notes.txt"]


def test_only_its_own_is_replaced(folder):
    text = write(folder / "plain.txt", "some text\n")
    for number, (name, content) in enumerate([("tokenizer.json", "{}"), ("generation_config.json", "{}"), ("train_000007.bin", "mine"),
                                              ("manifest.json", '{"text": "an input"}\n')]):
        foreign = write(folder / str(number) / name, content)
        for arguments in [text, "--train-tokenizer", 300], [text, "--tokenizer", GPT2], [foreign, "--tokenizer", GPT2]:
            why = "is an input" if arguments[0] == foreign else "is not of an earlier run"
            prepare(*arguments, "--out", foreign.parent).fails(why)
            assert snapshot(foreign.parent) == {name: content.encode()}
    linked, kept = folder / "linked", write(folder / "kept.json", "mine")
    shards(linked, text)
    (linked / "tokenizer.json").unlink()
    (linked / "tokenizer.json").symlink_to(kept)
    before = snapshot(linked)
    prepare(text, "--tokenizer", GPT2, "--out", linked).fails("is not of an earlier run")
    assert snapshot(linked) == before and kept.read_text() == "mine"


def test_what_is_no_utf8_is_replaced(folder):
    path = write(folder / "halves.jsonl", '{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    assert_documents(folder / "out", path, ["a\ufffd b", "\U0001f600"])
    prepare(path, "--tokenizer", GPT2, "--out", folder / "out", "--val-fraction", 0).ok("1 invalid character replaced by U+FFFD")
    path = write(folder / "bytes.txt", b"a \xff b \xe4\xb8 c \xef\xbf\xbd")
    assert_documents(folder / "out", path, ["a \ufffd b \ufffd c \ufffd"])
    prepare(path, "--tokenizer", GPT2, "--out", folder / "out", "--val-fraction", 0).ok("2 invalid characters replaced by U+FFFD")


main(globals(), 1)
