#!/usr/bin/env python3
"""Makes the tokenizers of this folder and what Hugging Face's `tokenizers` says about them.

gpt2/ and llama3/ are byte-level BPEs with the settings of the published ones, trained on the text below and so
small enough to be kept here. texts.json holds texts, their ids by both, and what the ids decode to.

    pip install tokenizers==0.23.3 && tests/golden/tokenizers/make.py

With --check FILE it only writes texts.json for another tokenizer.json, to compare with:
    tests/golden/tokenizers/make.py --check tokenizer.json >texts.json
"""
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")

PROSE = """The loss of a token needs no other token, so the layer walks them in chunks; it's what they've done,
isn't it? We'll see: 1 22 333 4444 55555 numbers, 3.14159 and 2024-05-20, at 12:34:56.
    for (int i = 0; i < n; i++) { sum += x[i] * w[i]; }\t// a comment\r\n
if __name__ == "__main__":\n\n\n\tprint("Grüße aus Köln, où est l'été? ¿Qué tal? Привет, мир! こんにちは世界。 안녕하세요 שלום")
السلام عليكم ورحمة الله ۱۲۳۴ ٣٤٥ हिन्दी १२३ ภาษาไทย ไม่มีช่องว่าง 中文没有空格 emoji 👩‍👩‍👧‍👦 🇩🇪 ✌🏽
"""

TEXTS = [
    "", " ", "  ", "\n", "a", " a", "a ", "Hello world", "Hello, world!", "  two  spaces  ", "tab\tand\nnewline\r\n",
    "trailing   ", "\n\n\n", " \n ", "   \n\n  x", "don't can't WON'T I'LL they've he'd SHE'S ſ's 'ſ", "x'S y'T z'RE",
    "1234567890", "12 345 6789", "v1.2.3-rc4", "٣٤٥٦٧ ۱۲۳۴۵", "½ ² Ⅷ ①②③", "snake_case CamelCase kebab-case",
    "!!!???...", "a!b?c", " (parens) [brackets] {braces}", "https://example.org/a?b=c&d=%20#e", "日本語のテキスト", "中文没有空格",
    "Привет, как дела?", "שלום עולם", "مرحبا بالعالم", "ไม่มีช่องว่าง", "नमस्ते दुनिया", "naïve café Zürich", "e\u0301 combining",
    "👩‍👩‍👧‍👦 family", "🇩🇪🇫🇷", "\u00a0nbsp\u00a0", "\u2003em space", "\u3000ideographic", "zero\u200bwidth", "\ufeffbom",
    "\u0085next line", "a\u2028b\u2029c", "\x00\x01\x7f", "\U0001d54f math", "<|endoftext|>", "a<|endoftext|>b",
    "<|endoftext|><|endoftext|>", " <|endoftext|> ", "<|endoftext", "<|end<|endoftext|>", "<|begin_of_text|>x",
    "<|eot_id|>\n\n<|eot_id|>", "<|start|> <|startle|>", "            indented", "\t\tif (x)\n\t\t\treturn;\n", PROSE, PROSE[::-1],
]


def random_texts():
    """Characters from everywhere, seeded."""
    draw = random.Random(7)
    ranges = [(0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF),
              (0x900, 0x97F), (0x2000, 0x206F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)]
    for _ in range(60):
        yield "".join(chr(draw.randint(*draw.choice(ranges))) for _ in range(draw.randint(1, 60)))
    for _ in range(40):
        yield "".join(draw.choice("aab  \n\r\t'sStT19.,!é") for _ in range(draw.randint(1, 40)))


def train(pre_tokenizer, special, vocab_size, whole_words=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, min_frequency=1,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([PROSE] * 2 + [text for text in TEXTS if "<|" not in text], trainer)
    data = json.loads(tokenizer.to_str())
    if whole_words:
        # A token that no merge makes: ignore_merges alone finds it.
        data["model"]["ignore_merges"] = True
        data["model"]["vocab"]["\u0120unmergeable"] = len(data["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_special_tokens(special)
    return tokenizer


def make():
    gpt2 = train(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"], 400)
    llama3 = train(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|startle|>", "<|eot_id|>",
         AddedToken("two words", special=False, normalized=False)], 420, whole_words=True)
    begin = llama3.token_to_id("<|begin_of_text|>")
    llama3.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)])])
    return {"gpt2": gpt2, "llama3": llama3}


def answers(tokenizers):
    rows = []
    for text in TEXTS + [" unmergeable things", "two words, twowords, two  words"] + list(random_texts()):
        row = {"text": text.encode().hex()}
        for name, tokenizer in tokenizers.items():
            ids = tokenizer.encode(text).ids
            row[name] = {"ids": ids, "plain": tokenizer.encode(text, add_special_tokens=False).ids,
                         "decoded": tokenizer.decode(ids, skip_special_tokens=False).encode().hex()}
        rows.append(row)
    return rows


def main():
    if len(sys.argv) > 2 and sys.argv[1] == "--check":
        json.dump(answers({"other": Tokenizer.from_file(sys.argv[2])}), sys.stdout)
        return
    here = os.path.dirname(os.path.abspath(__file__))
    tokenizers = make()
    for name, tokenizer in tokenizers.items():
        os.makedirs(os.path.join(here, name), exist_ok=True)
        with open(os.path.join(here, name, "tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump(json.loads(tokenizer.to_str()), file, ensure_ascii=True, indent=None, separators=(",", ":"))
            file.write("\n")
    with open(os.path.join(here, "texts.json"), "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in answers(tokenizers)) + "\n]\n")


main()
