#!/usr/bin/env python3
"""tools/bench_lce: losses of trained states, plans, tiles dropped as M0 says, every rung, and refusals."""
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TOOLS, keep, main, need, need_ranks, once, run, train, write_shard  # noqa: E402

SMALL = "--tokens 20 --hidden-size 8 --vocab 500 --chunk 20 --repeat 1".split()
MODEL = ("--device cpu --vocab 300 --hidden-size 16 --intermediate-size 24 --num-layers 2 --num-attention-heads 2 "
         "--max-position-embeddings 64 --seq-len 16 --batch 2 --sample-every 0 --data {} --save {} ")


def bench(*words, **how):
    return run(TOOLS / "bench_lce", *words, **how)


def rows(*words, **how):
    """The lines of --json, by name."""
    lines = [json.loads(line) for line in bench("--json", *words, **how).ok().out.splitlines()]
    return {line.get("name", line["event"]): line for line in lines}


@once
def files():
    """A folder with two models, gpt2 and llama, and text."""
    folder = pathlib.Path(keep.name)
    corpus, text = folder / "corpus", folder / "sequence"
    corpus.write_text("abc of a corpus, " * 200)
    text.write_text("sixteen and one, ")  # 16 targets
    for name, model in (("gpt2", "gpt2-tiny"), ("llama", "llama-tiny --untie-word-embeddings")):
        train(MODEL.format(corpus, folder / name) + f"--steps 20 --model {model}").ok()
    return folder


def test_trained_states(folder):
    at = files()
    for model in "gpt2", "llama":
        evaluated = run(TOOLS / "evaluate", "--device", "cpu", "--init", at / model, "--seq-len", 16, "--val-data", at / "sequence").ok()
        want = float(evaluated.out.split("validation loss ")[1].split()[0])
        state = ["--checkpoint", at / model, "--data", at / "sequence", "--seq-len", 16, "--tokens", 16, "--chunk", 5, "--repeat", 1]
        found = rows(*state)
        assert found["loss"]["targets"] == 16 and abs(found["loss"]["loss"] - want) < 2e-4, (found, want)
        assert (found["fused, chunk 5"]["hidden_size"], found["fused, chunk 5"]["vocab_size"]) == (16, 300)
        bench(*state).ok(": N 16, H 16, V 300\n", f"  loss {found['loss']['loss']:.4f} over 16 targets: fused, chunk 5\n", "three plain GEMMs")
    (at / "llama" / "tokenizer.json").write_text("{}")  # its tokens are not bytes
    warned = bench("--checkpoint", at / "llama", "--data", at / "corpus", "--seq-len", 16, "--tokens", 16, "--repeat", 1).ok()
    assert "corpus is read byte by byte, though " in warned.err, warned


def test_sampled_tiles(folder):
    at = files()
    for state in (["--checkpoint", at / "gpt2", "--data", at / "corpus", "--seq-len", 16, "--tokens", 37],  # which no sequence divides
                  ["--tokens", 37, "--hidden-size", 8, "--vocab", 500]):
        found = rows(*state, "--chunk", "37,8", "--sample", "1e-30,1e6", "--terms", "--repeat", 1)
        for name, dropped in (("M0 1e-30, chunk {}", 0), ("M0 1e+06, chunk {}", 1)):
            for chunk in 37, 8:
                row = found[name.format(chunk)]
                assert row["dropped_tiles"] == dropped and (row["dropped_mass"] > 0) == dropped, row
        assert "dropped_tiles" in found["+ sampling"]
        assert found["+ z-loss"]["term"] == "z-loss" and "base_seconds" in found["+ z-loss"]


def test_codes(folder):
    words = "--tokens 40 --hidden-size 32 --vocab 500 --chunk 40,16 --repeat 1 --fp8".split()
    found, planned = rows(*words), rows(*words, "--plan")
    for chunk in 40, 16:
        row = found[f"fused, chunk {chunk}, fp8"]
        assert row["ratio"] > 0, row
        assert row["layer_bytes"] == planned[f"fused, chunk {chunk}, fp8"]["layer_bytes"] > found[f"fused, chunk {chunk}"]["layer_bytes"]
    state = "--checkpoint", files() / "gpt2", "--data", files() / "corpus", "--seq-len", 16, "--tokens", 64, "--repeat", 1
    losses = [float(loss) for loss in re.findall(r"loss (.*) over 64 targets", bench(*state, "--fp8").ok().out)]
    assert len(losses) == 2 and abs(losses[1] / losses[0] - 1) < 2e-3, losses


def test_a_plan_is_what_a_run_holds(folder):
    planned, run_ = rows(*SMALL, "--materialized", "--terms", "--plan"), rows(*SMALL, "--materialized", "--terms")
    assert list(planned) == list(run_) and "materialized" in run_
    for name, row in planned.items():
        assert {**run_[name], **row} == run_[name], (row, run_[name])
        assert "seconds" not in row and row["ledger_bytes"] > row["layer_bytes"] > 0 < row["loss_alone_bytes"]
        assert run_[name]["seconds"] > 0 and run_[name]["ratio"] > 0
    # 19.57 GiB of logits at the size of pytorch/pytorch#124480, on a GPU that need not be here.
    size = "--plan --device cuda --tokens 81920 --hidden-size 4096 --vocab 128256 --materialized --chunk 4096".split()
    whole = rows(*size)["materialized"]
    assert 19.56 < whole["layer_bytes"] / 2**30 < 19.58 and whole["dtype"] == "bf16"
    assert rows(*size, "--dtype", "fp32")["materialized"]["layer_bytes"] > 1.99 * whole["layer_bytes"]
    bench(*size).ok("plan for cuda", "fused, chunk 4096", "GiB")


def test_the_ladder(folder):
    found = rows(*SMALL, "--ladder", "--materialized")
    reference = found.pop("materialized")
    assert reference["mode"] == "materialized" and "rung" not in reference and reference["ratio"] > 0
    assert [row["rung"] for row in found.values()] == [1, 2, 3, 4, 5, 7]  # the sixth is for Hopper
    assert all(row["seconds"] > 0 and row["floor_seconds"] > 0 and row["layer_bytes"] > 0 for row in found.values())
    assert [row["gemms"] for row in found.values()] == [3, 4, 3, 3, 3, 3]
    wide = rows(*"--device cpu --tokens 20 --hidden-size 256 --vocab 500 --chunk 20 --repeat 1 --ladder".split())
    for row in wide.values():
        assert 0.999 < row["certain_error"] < 1.001 if row["rung"] < 4 else 0 < row["certain_error"] < 1e-4, row
        assert all(0 < row[name] < 2e-6 for name in ("loss_error", "dx_error", "dweight_error")), row
    bench(*SMALL, "--ladder").ok("1 materialized fp32 logits", "7 linear_cross_entropy", "errors: loss")


def test_ranks(folder):
    need_ranks()
    found = rows(*SMALL, ranks=2)
    assert found["split, chunk 20"]["ranks"] == 2 and found["split, chunk 20"]["base_seconds"] > 0


def test_refusals(folder):
    at = files()
    model, corpus = at / "gpt2", at / "corpus"
    train(MODEL.format(corpus, folder / "capped") + "--steps 1 --model llama-tiny --logit-softcap 30").ok()
    write_shard(folder / "other.bin", [5000] * 40)
    state = ["--checkpoint", model, "--data", corpus]
    for part, *words in (
            ("the model has its own sizes", *state, "--vocab", 300), ("the model has its own sizes", *state, "--hidden-size", 16),
            ("--checkpoint needs --data PATH: the model reads it to make x\n", "--checkpoint", model),
            ("--data needs --checkpoint DIR: without a model x is random\n", "--data", corpus),
            ("--seq-len needs --checkpoint DIR: without a model x is random\n", "--seq-len", 16),
            ("missing/config.json does not exist; name a directory", "--checkpoint", folder / "missing", "--data", corpus),
            ("cannot read ", "--checkpoint", model, "--data", folder / "missing"),
            ("--seq-len 65 is longer than the 64 positions of ", *state, "--seq-len", 65),
            ("sequence has 1 sequences of 16 tokens, and 17 tokens need 2: lower --tokens or name more --data\n",
             "--checkpoint", model, "--data", at / "sequence", "--seq-len", 16, "--tokens", 17),
            ("capped has a logit soft-cap, which is timed only as one of --terms", "--checkpoint", folder / "capped", "--data", corpus),
            ("has id 5000 and the vocabulary has 300", "--checkpoint", model, "--data", folder / "other.bin"),
            ("--sample 0: give a number from 1e-30", "--sample", "1,0"), ("--sample one: give a number", "--sample", "one"),
            ("--sample: give at most 32\n", "--sample", ",".join("1" * 33)), ("--chunk 0: give a whole number", "--chunk", "8,0"),
            ("the CPU computes in fp32 only", "--dtype", "bf16"), ("a plan computes nothing", "--plan", "--ladder"),
            ("the ladder has seven rungs", "--ladder", "--terms"), ("--device cuda: ", "--device", "cuda"),
            ("a smaller --chunk or, with --checkpoint, a shorter --seq-len\n",
             "--plan", "--json", "--tokens", 2**31 - 1, "--hidden-size", 2**31 - 1),
            ("materialized needs ", "--json", "--tokens", 2**20, "--vocab", 2**22, "--chunk", 64, "--materialized")):
        refused = bench(*words).refused(part)
        assert not refused.out, refused


def test_refused_attention(_):
    for part, *words in (("--num-attention-heads 3 is no multiple of --num-key-value-heads 2", "--num-attention-heads", 3, "--num-key-value-heads", 2),
                         ("--head-dim 257: give a whole number from 1 to 256", "--head-dim", 257),
                         ("give a smaller --batch or --seq-len", "--seq-len", 2**31 - 1)):
        assert not run(TOOLS / "bench_attention", *words).refused(part).out


def test_attention_beside_pytorch(_):
    need("torch")
    beside = run(sys.executable, ROOT / "tools/bench_attention.py", "--device", "cpu", "--rounds", 1, "--json", "--shapes", "2x32x4x2x8")
    ours, theirs = map(json.loads, beside.ok().out.splitlines())
    assert (ours["peer"], theirs["peer"], theirs["both"]) == ("lce.c", "PyTorch", 1) and min(ours["forward"], ours["backward"]) > 0


main(globals())
