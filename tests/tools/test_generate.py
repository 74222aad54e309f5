#!/usr/bin/env python3
"""tools/generate: the same text for the same seed, wherever the prompt comes from; characters stay whole on a terminal; prompts
that a model cannot continue are refused in one sentence."""
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TEXT, TINY, TOOLS, main, once, run, train  # noqa: E402

GOLDEN = ROOT / "tests/golden"
DIGITS = GOLDEN / "llama"  # its 61 tokens are bytes


def text(model, *words, **how):
    return run(TOOLS / "generate", "--device", "cpu", "--init", model, *words, **how)


@once
def trained(folder):
    """A model of bytes, and one with a tokenizer.json; their texts are noise."""
    train(TINY + f"--steps 1 --data {TEXT} --save {folder}/bytes").ok()
    train(TINY.replace("300", "1600") + f"--steps 1 --data {TEXT} --tokenizer {GOLDEN}/tokenizers/llama3 --save {folder}/tokens").ok()
    return folder / "bytes", folder / "tokens"


def test_texts_repeat(folder):
    words = "--prompt 12+3 --tokens 20 --seed 5".split()
    first = text(DIGITS, *words).ok("12+3").out
    both = text(DIGITS, *words, "--samples", "2", "--go-on").ok().out
    one, other = both.rstrip("\n").split("\n---\n")
    assert one.startswith(first.rstrip("\n")) and other.startswith("12+3") and one != other, both
    assert both != text(DIGITS, *words, "--samples", "2", "--go-on", "--seed", "6").ok().out
    command = shlex.join(map(str, [TOOLS / "generate", "--device", "cpu", "--init", DIGITS, *words, "--prompt", "-"]))
    assert run("sh", "-c", "printf 12+3 | " + command).ok().out == first
    assert "20 tokens" in text(DIGITS, *words, "--go-on").ok().err


def test_characters_stay_whole(folder):
    for model, begin in zip(trained(folder), ("", "<|begin_of_text|>")):
        prompt = ["--prompt", "a\x1b[2J é€😀", "--tokens", "1", "--temperature", "0"]
        text(model, *prompt).ok(begin + "a\x1b[2J é€😀")
        text(model, *prompt, terminal=True).ok(begin + "a\\x1B[2J é€😀")


def test_refusals(folder):
    text(DIGITS, "--prompt", "").refused("--prompt: give at least one character")
    text(DIGITS, "--prompt", "12a").refused("--prompt: token 2 is 97 and the vocabulary has 61", "--tokenizer")
    text(DIGITS, "--tokenizer", folder).refused("cannot open the tokenizer", "tokenizer.json")
    text(trained(folder)[1], "--prompt", "\udcff").refused("--prompt: the text is not UTF-8 at byte 0")
    (folder / "tokenizer.json").write_text('{"model":{"vocab":{"a":0},"merges":[]}}')
    text(DIGITS, "--tokenizer", folder, "--prompt", "a").refused("--prompt: the tokenizer can decode, but not encode")
    run(TOOLS / "generate").refused("--init DIR")


if __name__ == "__main__":
    main(globals())
