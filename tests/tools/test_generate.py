#!/usr/bin/env python3
"""tools/generate: texts repeat, characters stay whole, Ctrl-C and a reader that stops end it; refusals."""
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TEXT, TINY, TOOLS, TRAIN, Process, main, need, once, run, train, write  # noqa: E402

GOLDEN = ROOT / "tests/golden"
DIGITS = GOLDEN / "llama"  # its 61 tokens are bytes
GENERATE = [sys.executable, ROOT / "tools/generate", "--device", "cpu"]


def text(model, *words, **how):
    return run(*GENERATE, "--init", model, *words, **{"LCE_TRAIN": str(TRAIN), **how})


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
    command = shlex.join(map(str, [*GENERATE, "--init", DIGITS, *words, "--prompt", "-"]))
    assert run("sh", "-c", "printf 12+3 | " + command, LCE_TRAIN=str(TRAIN)).ok().out == first
    assert "20 tokens" in text(DIGITS, *words, "--go-on").ok().err
    # The same ids from the program that draws them, whose last sample ends as its text.
    ids = run(TOOLS / "generate_ids", "--device", "cpu", "--init", DIGITS, "--prompt", "49 50,43, 51", *words[2:]).ok().out
    assert "12+3" + bytes(map(int, ids.split())).decode() + "\n" == first


def test_characters_stay_whole(folder):
    prompt = ["--prompt", "a\x1b[2J é€😀", "--tokens", "1", "--temperature", "0"]
    text(trained(folder)[0], *prompt).ok("a\x1b[2J é€😀")
    text(trained(folder)[0], *prompt, terminal=True).ok("a\\x1B[2J é€😀")
    need("tokenizers")
    text(trained(folder)[1], *prompt).ok("<|begin_of_text|>a\x1b[2J é€😀")
    text(trained(folder)[1], *prompt, terminal=True).ok("<|begin_of_text|>a\\x1B[2J é€😀")


def test_what_stands_before_a_prompt(folder):
    need("tokenizers")
    model, bos = shutil.copytree(trained(folder)[1], folder / "model"), "<|begin_of_text|>"
    data = json.loads((model / "tokenizer.json").read_text())
    single = data["post_processor"]["processors"][-1]["single"]
    assert single[0]["SpecialToken"]["id"] == bos
    single.append({"SpecialToken": {"id": bos, "type_id": 0}})  # what it puts after a text is no part of a prompt
    write(model / "tokenizer.json", data)
    for says, options, prompt, begins in (
            (None, [], "ab", bos + "ab"), (None, [], bos + "ab", bos + "ab"), (None, ["--bos", "no"], "ab", "ab"), (True, [], "ab", bos + "ab"),
            (False, [], "ab", "ab"), (False, [], bos + "ab", bos + "ab"), (False, ["--bos", "yes"], "ab", bos + "ab")):
        write(model / "tokenizer_config.json", {} if says is None else {"add_bos_token": says})
        out = text(model, "--prompt", prompt, "--tokens", "1", "--temperature", "0", *options).ok().out
        assert out.startswith(begins) and out.count(bos) == begins.count(bos), (says, options, out)


def test_pieces_make_the_whole_text(folder):
    need("tokenizers")
    from trained_tokenizers import llama2
    loader = importlib.machinery.SourceFileLoader("generate", str(ROOT / "tools/generate"))
    generate = importlib.util.module_from_spec(importlib.util.spec_from_loader("generate", loader))
    loader.exec_module(generate)
    like_llama2 = llama2(["a b c abcdeo"])
    like_llama2.post_processor = None
    like_llama2.save(str(folder / "tokenizer.json"))
    texts = [bytes.fromhex(row["text"]) for row in json.loads((GOLDEN / "tokenizers/texts.json").read_text())]
    for path in (GOLDEN / "tokenizers/gpt2/tokenizer.json", GOLDEN / "tokenizers/llama3/tokenizer.json", folder / "tokenizer.json"):
        vocabulary = generate.Tokens(str(path))
        for whole in texts:
            ids = vocabulary.encode(whole)
            decoded = vocabulary.tokenizer.decode(ids, skip_special_tokens=False).encode()
            parts = list(vocabulary.pieces(ids))
            assert b"".join(parts) == decoded and whole.strip() in decoded, (path, whole, parts)
            assert all("\uFFFD" not in part.decode() for part in parts), parts  # fails on half a character
    parts = list(vocabulary.pieces([like_llama2.token_to_id("<0xE2>")] * 100))  # no character: it does not wait for ever
    assert len(parts) > 1 and b"".join(parts) == "\uFFFD".encode() * 100, parts


def test_it_ends_with_its_program(folder):
    for group in False, True:  # a terminal's Ctrl-C goes to both, kill to one
        process = Process(*GENERATE, "--init", DIGITS, "--tokens", "100000000", "--go-on", LCE_TRAIN=str(TRAIN))
        process.wait_for("\n")
        child, = map(int, pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        for pid in [process.pid, child][:1 + group]:
            os.kill(pid, signal.SIGINT)
        output = process.finish()
        assert output.status == -signal.SIGINT and not output.err and not os.path.exists(f"/proc/{child}"), output
    command = shlex.join(map(str, [*GENERATE, "--init", DIGITS, "--prompt", "12+3", "--tokens", "100000000", "--go-on"]))
    output = run("sh", "-c", command + " | head -c 4", LCE_TRAIN=str(TRAIN)).ok()
    assert output.out == "12+3" and not output.err, output


def test_refusals(folder):
    text(DIGITS, "--prompt", "").refused("--prompt: give at least one character")
    text(DIGITS, "--prompt", "12a").refused("--prompt: token 2 is 97 and the vocabulary has 61", "tokenizer")
    text(DIGITS, "--tokens", "x").refused("--tokens x: give a whole number")
    text(DIGITS, "--prompt").refused("--prompt: expected one argument")
    text(DIGITS, "--prompt", "1", LCE_TRAIN=str(folder / "train")).refused(f"there is no {folder}/tools/generate_ids: build it with make")
    run(*GENERATE, LCE_TRAIN=str(TRAIN)).refused("--init DIR")
    ids = [TOOLS / "generate_ids", "--device", "cpu", "--init", DIGITS]
    for wrong in ([], ["--prompt", "12+3"], ["--prompt", "1,,-2"], ["--prompt", "-"]):
        run(*ids, *wrong).refused("--prompt: give ids such as 15496,995")
    run(*ids, "--prompt", "1,61").refused("--prompt: token 1 is 61 and the vocabulary has 61")
    run(*ids, "--prompt", "9223372036854775808").refused("--prompt: token 0 is 9223372036854775807 and")
    # Without the package a tokenizer.json cannot be read, and none can be read that is none.
    (folder / "tokenizers.py").write_text("raise ImportError")
    text(trained(folder)[1], PYTHONPATH=str(folder)).refused("tokenizer.json needs the Python package tokenizers", "-m pip install tokenizers")
    need("tokenizers")
    text(DIGITS, "--tokenizer", folder).refused("is no tokenizer.json", "tokenizer.json")
    text(trained(folder)[1], "--prompt", "\udcff").refused("--prompt: the text is not UTF-8 at byte 0")
    # A tokenizer that is there and cannot be read is no reason to take bytes for tokens.
    for name, make, part in (("link", lambda path: path.symlink_to("nowhere"), "is no tokenizer.json"), ("folder", os.mkdir, "is no tokenizer.json")):
        model = shutil.copytree(DIGITS, folder / name)
        make(model / "tokenizer.json")
        text(model).refused(part)
    for name in "vocab.json", "tokenizer.model":
        model = shutil.copytree(DIGITS, folder / name)
        (model / name).write_text("{}")
        text(model).refused(f"has {name} and no tokenizer.json")
    panics = shutil.copytree(trained(folder)[1], folder / "panics") / "tokenizer.json"
    whole = json.loads(panics.read_text())
    for part, what in (({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails on the prompt"),
                       ({"decoder": {"type": "Strip", "content": "1", "start": 0, "stop": 99}}, "cannot decode its tokens")):
        write(panics, whole | part)
        output = text(panics.parent, "--prompt", "1").fails(f"tokenizer.json {what}: ")
        assert output.status == 1 and "Traceback" not in output.err, output


def test_what_a_shell_may_do(folder):
    text(DIGITS, "--version").ok("lce.c")
    text(DIGITS, "--usage").ok("Usage: ")
    command = shlex.join(map(str, [*GENERATE, "--init", DIGITS, "--prompt"]))
    run("sh", "-c", command + " - <&-", LCE_TRAIN=str(TRAIN)).refused("--prompt: give at least one character")
    run("sh", "-c", command + " - 0>/dev/null", LCE_TRAIN=str(TRAIN)).refused("cannot read standard input: Bad file descriptor")
    run("sh", "-c", command + " 12+3 <&-", LCE_TRAIN=str(TRAIN)).ok("12+3")
    run("sh", "-c", command + " 12+3 >&-", LCE_TRAIN=str(TRAIN)).refused("standard output is closed")


main(globals())
