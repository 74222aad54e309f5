#!/usr/bin/env python3
"""Runs of ./train that stop and continue: all is bitwise what it would have been."""
import array
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, SIZES, TEXT, TOOLS, TRAIN, column, keep, main, once, read_log, run, same_files, start, tensors, train, write_mask, write_shard  # noqa: E402

# Two micro-batches a step, a clipped gradient, a rate that moves, validation where no checkpoint is.
RUN = ("--device cpu --num-layers 1 " + SIZES + "--batch 2 --total-batch 64 --steps 12 --warmup 3 --grad-clip 0.5 --eval-every 5 "
       f"--eval-batches 2 --sample-every 7 --sample-tokens 3 --data {TEXT} ")
LAST = "step-000012"
STATE = "trainer_state.json"
RESUME = "--device cpu --resume "


# Steps, validations and samples of a log, without what time it took.
def curve(path, first=1):
    timed = ("tokens_per_second", "mfu")
    return [{name: value for name, value in line.items() if name not in timed} for line in read_log(path)
            if line["event"] in ("step", "validation", "sample") and line["step"] >= first]


# The run that the others are compared with.
@once
def straight():
    folder = pathlib.Path(keep.name, "straight")
    train(RUN + f"--save {folder} --save-every 6 --log {folder}.jsonl").ok()
    return folder


def straight_log():
    return straight().with_suffix(".jsonl")


# Steps that were lost and made again stand in the log twice.
def same_losses(path):
    mine, theirs = (dict(zip(column(log, "step", "step"), column(log, "loss"))) for log in (read_log(path), read_log(straight_log())))
    assert mine == theirs, (mine, theirs)


# The settings, the data, and where and how to save come from the checkpoint; the printed command is quoted.
def test_a_resumed_run_equals_an_unbroken_one(folder):
    saved, quoted = folder / "it's \x1b", f"$'{folder}/it\\'s \\x1B'"
    output = train(RUN + "--steps 6 --save-every 3 --keep 1 --save-dtype bf16 --save", saved).ok(
        f"saves    {quoted}\n", f"saved in {quoted} (").out
    assert "nothing is saved" not in output
    losses = re.search(r"\nloss +[\d.]+ at first, [\d.]+ at last; [\d.]+ on", output)[0]
    train("--device cpu --steps 3 --resume", saved).refused("--steps 3: ", "/step-000006 is after step 6 already; give --steps above that")
    train("--device cpu --steps 6 --warmup 9 --resume", saved).ok("after step 6 of 6", losses)  # a warm-up may be longer
    train("--device cpu --steps 12 --resume", saved).ok("after step 6 of 12", f"saves    {quoted}\n")
    assert [path.name for path in saved.glob("step-*")] == [LAST]
    assert tensors(saved / "model.safetensors")["model.norm.weight"].dtype == "BF16"
    train("--device cpu --resume", saved / LAST).ok("\nnothing is saved: no --save\n")
    output = train(RESUME + f"{straight()}/step-000006 --save {folder}/half --log {folder}/log --sample-tokens 3").ok(
        "after step 6 of 12", "step 7  sample")
    assert not output.err
    same_files(straight() / LAST, folder / "half" / LAST)
    assert curve(folder / "log") == curve(straight_log(), 7)
    assert column(read_log(folder / "log"), "step", "step") == [7, 8, 9, 10, 11, 12]
    # A checkpoint has the loss and the step of the newest validation: the last one that of its own weights.
    losses = dict(zip(column(read_log(straight_log()), "step", "validation"), column(read_log(straight_log()), "val_loss")))
    for name, step in (("step-000006", 5), (LAST, 12)):
        state = json.loads((straight() / name / STATE).read_text())
        assert state["val_loss"] == losses[step] and state["val_step"] == step


# Packed windows come from the data and the seed; rounded weights have their master weights beside them.
def test_any_run_resumes(folder):
    train(RUN + f"--pack documents --end-of-text 10 --offload gradients,optimizer --save {folder}/packed --save-every 6").ok()
    train(RESUME + f"{folder}/packed/step-000006 --save {folder}/half --sample-tokens 3").ok()
    same_files(folder / "packed" / LAST, folder / "half" / LAST)
    train(RUN + f"--save {folder}/rounded --save-every 6 --save-dtype bf16").ok()
    train(RESUME + f"{folder}/rounded/step-000006 --save-dtype fp32 --save {folder}/again").ok()
    weights = "model.safetensors"
    assert (straight() / LAST / weights).read_bytes() == (folder / "again" / LAST / weights).read_bytes()
    assert (folder / "rounded" / weights).stat().st_size < 0.6 * (straight() / weights).stat().st_size
    train(f"--device cpu --init {folder}/rounded --data {TEXT} --steps 0 --save {folder}/widened").ok()


# Paths are bytes, and JSON is UTF-8: both stay what they are.
def test_any_path_resumes(folder):
    path = os.fsencode(folder) + b"/gr\xFC\xDF\x1B.txt"
    shutil.copy(ROOT / TEXT, path)
    train(RUN + f"--steps 2 --warmup 1 --save {folder}/saved --log {folder}/log", "--data", os.fsdecode(path)).ok()
    (folder / "saved/step-000002" / STATE).read_text("utf-8")
    (folder / "log").read_text("utf-8")
    assert "the data were" not in train(RESUME + f"{folder}/saved --steps 3").ok().err
    os.remove(path)
    train(RESUME + f"{folder}/saved --steps 3").fails(r"gr\xFC\xDF\x1B.txt: No such file")


# A run resumed with other batches goes on with the next token of the data: in file order with another --seq-len, too.
def test_the_place_in_the_data_is_kept(folder):
    counting = write_shard(folder / "counting.bin", list(range(3000)))

    def first(line):
        """The tokens of the first step, and the run's output."""
        for name in ("dump", "next"):
            shutil.rmtree(folder / name, ignore_errors=True)
        output = train(f"--device cpu --vocab 3000 --sample-every 0 {line} --dump {folder}/dump --save {folder}/next").ok()
        dumped = tensors(folder / "dump/first-step/first_step.safetensors")["tokens"]
        return array.array("i", dumped.bytes).tolist(), output
    job = RUN.replace("--vocab 300 ", "--vocab 3000 ").replace(str(TEXT), str(counting)) + "--sample-every 0 --steps 6 "
    train(job + f"--data-order sequential --save {folder}/file").ok()
    train(job + f"--save {folder}/drawn").ok()
    for options in ("--total-batch 32", "--batch 8 --total-batch 128", "--batch 1 --seq-len 25 --total-batch 25"):
        tokens, output = first(f"--resume {folder}/file --steps 7 {options}")
        assert tokens == list(range(384, 384 + len(tokens))) and "and 384 tokens of pass 1 over the data\n" in output.out, output
        assert "new pass" not in output.err
    shutil.move(folder / "next", folder / "odd")
    tokens, output = first(f"--resume {folder}/odd --steps 8 --batch 2 --seq-len 16 --total-batch 32")
    assert tokens == list(range(409, 441)), output
    rows, _ = first(job + "--batch 25 --total-batch 400")
    state = folder / "drawn" / "step-000006" / STATE
    state.write_text(state.read_text().replace('"crc32":', '"unchecked":'))
    for options in ("--batch 2 --total-batch 32", "--batch 1 --total-batch 16"):
        tokens, output = first(f"--resume {folder}/drawn --steps 7 {options}")
        assert tokens[:16] == rows[-16:] and "and 384 tokens of pass 1" in output.out, output
        state.write_text(state.read_text().replace('"place":', '"unknown":'))  # of an earlier version
    state.write_text(state.read_text().replace('"unknown":', '"place":'))
    for options in ("--seq-len 8", "--seed 2", "--data-order sequential", "--val-fraction 0.5", f"--data {TEXT}"):
        _, output = first(f"--resume {folder}/drawn --steps 7 --batch 2 --total-batch {16 if options == '--seq-len 8' else 32} {options}")
        assert "was saved 384 tokens into pass 1 over " in output.err and "a new pass begins in place of the rest" in output.err and "and 0 tokens of pass 2" in output.out
    state.write_text(re.sub(r'("tokens":\s*)384', r"\g<1>0", state.read_text()))
    assert "and 0 tokens of pass 1 over" in first(f"--resume {folder}/drawn --steps 7 --batch 2 --total-batch 32 --seed 2")[1].out


# A wrong value in a checkpoint is refused with its file's name; a missing one gets no silent default.
def test_wrong_settings_of_a_checkpoint(folder):
    saved = shutil.copytree(straight() / "step-000006", folder / "step-000006")
    state = json.loads((saved / STATE).read_text())
    del state["crc32"]
    for change, says in (({"settings": {"lr": "x"}}, "the setting lr is wrong: give a number from 0 to 100; give --lr here"),
                         ({"settings": {"lr": 0.5}}, "the setting lr is wrong: it is no text"),
                         ({"settings": {"optimizer": "sgd"}}, "the setting optimizer is wrong: give adamw|muon"),
                         ({"settings": {"batch": "0"}}, "the setting batch is wrong: give a whole number from 1"),
                         ({"data_paths": "words"}, "data_paths is no list of paths"), ({"data_paths": [5]}, "data_paths is no list"),
                         ({"place": {}}, "has no pass, tokens and order"), ({"place": {**state["place"], "tokens": -1}}, "has no pass")):
        (saved / STATE).write_text(json.dumps({**state, **change}))
        assert "--lr x" not in train(RESUME + str(saved)).refused(f"{saved}/{STATE}: ", says).err
    (saved / STATE).write_text(json.dumps({**state, "settings": {**state["settings"], "lr": "x"}}))
    train(RESUME + f"{saved} --lr 0.002 --steps 7").ok()
    of_gpu = {**state, "device": "cuda", "settings": {**state["settings"], "dtype": "bf16", "moment-dtype": "bf16"}}
    (saved / STATE).write_text(json.dumps(of_gpu))
    train(RESUME + f"{saved} --steps 7").ok()
    train(RESUME + f"{saved} --steps 7 --dtype bf16").fails("the CPU computes in fp32 only")


# Steps without a target that counts are as if they were not: the same weights as without their data, also resumed.
def test_steps_without_targets_change_nothing(folder):
    every, skipped = [7 if i % 32 == 0 else i * i % 61 for i in range(193)], (0, 5)
    for name, tokens in {"all": every, "some": [token for i, token in enumerate(every) if i // 32 not in skipped]}.items():
        write_shard(folder / f"{name}.bin", tokens)
    write_mask(folder / "all.mask", [(i - 1) // 32 not in skipped for i in range(193)])
    job = RUN + "--total-batch 32 --schedule constant --warmup 0 --val-fraction 0 --data-order sequential --sample-every 0 "
    for name, steps, more in (("all", 6, "--offload gradients,optimizer "), ("some", 4, "")):  # an update may wait beyond an empty step
        options = job.replace(str(TEXT), f"{folder}/{name}.bin") + f"{more}--steps {steps} --save {folder}/{name} --log {folder}/{name}.log "
        output = train(options + "--save-every 3").ok()
        assert ("2 of 6 steps had no target that counts" in output.err) == (name == "all") and output.err.count("lce:") == (name == "all")
    logs = [read_log(folder / f"{name}.log") for name in ("all", "some")]
    assert column(logs[0], "loss") == column(logs[1], "loss") and 0 not in column(logs[0], "loss")
    assert column(logs[0], "tokens") == [0, 32, 32, 32, 32, 0]
    assert all(logs[0][-1][field] == logs[1][-1][field] for field in ("first_loss", "last_loss"))
    for name in ("model.safetensors", "training_state.safetensors"):
        assert (folder / "all/step-000006" / name).read_bytes() == (folder / "some/step-000004" / name).read_bytes(), name
    train(RESUME + f"{folder}/all/step-000003 --save {folder}/half").ok()
    same_files(folder / "all/step-000006", folder / "half/step-000006")
    # The first step of a resumed run can be dumped where it counts.
    train(RESUME + f"{folder}/all/step-000003 --steps 5 --save {folder}/five --dump {folder}/dump").ok()
    train(RESUME + f"{folder}/five --steps 6 --dump {folder}/none").fails("--dump: no target of the first step counts")


# An optimizer's state is its own; its momentum and settings are restored.
def test_the_optimizer_cannot_change(folder):
    train(RUN + f"--optimizer muon --momentum 0.9 --save {folder}/muon --save-every 6").ok()
    assert not train(RESUME + f"{folder}/muon/step-000006 --save {folder}/half --sample-tokens 3").ok().err
    same_files(folder / "muon" / LAST, folder / "half" / LAST)
    for saved, now, then in ((folder / "muon", "adamw", "muon"), (straight(), "muon", "adamw")):
        for steps in "", " --steps 0":
            train(RESUME + f"{saved} --optimizer {now}{steps}").refused(f"of --optimizer {then}, which {now} cannot continue; leave out")
        train(f"--device cpu --init {saved} --optimizer {now} --data {TEXT} --steps 0").ok()
        train(RESUME + f"{saved} --optimizer {then} --steps 13 --save {folder}/more-{then}").ok()
    states = [sum(name.startswith(prefix) for name in tensors(folder / "muon" / LAST / "training_state.safetensors"))
              for prefix in ("m.", "v.")]
    assert states[0] - states[1] == 7, states  # the matrices of a layer


# Numbers keep all their digits, in a checkpoint's settings and in those of the run that resumes it.
def test_numbers_keep_their_digits(folder):
    given = {name: "0.123456789012" for name in ("lr", "min-lr", "beta1", "beta2", "epsilon", "weight-decay", "grad-clip",
                                                 "label-smoothing", "z-loss", "lce-sample", "val-fraction")}
    options = " ".join(f"--{name} {value}" for name, value in given.items())
    train(RUN + options + f" --steps 2 --warmup 0 --save-every 1 --save {folder}/one").ok()
    first = folder / "one/step-000001"
    assert not train(RESUME + f"{first} --save {folder}/two").ok().err
    for saved in first, folder / "two/step-000002":
        settings = json.loads((saved / STATE).read_text())["settings"]
        assert given.items() <= settings.items(), settings
    moved = train(RESUME + f"{first} --beta2 0.123456789013").ok().err
    assert "--beta2 was 0.123456789012 when " in moved and " and is 0.123456789013 now" in moved, moved


def test_differences_are_printed(folder):
    output = train(RESUME + f"{straight()}/step-000006 --lr 0.5 --seed 9007199254740993 --data Makefile --data {TEXT}").ok()
    for part in ("--lr was 0.002 when ", "and is 0.5 now", "--seed was 1 when ", "is 9007199254740993 now", 'the data were "byte-level text, 1 file'):
        assert part in output.err, output
    train(RESUME + f"{straight()} --vocab 301").refused("--vocab is 301")
    train(RESUME + f"{straight()} --batch 3").refused(f"--total-batch 64, as in {straight()}/{LAST}, is not a multiple of the 48 tokens")
    train(RESUME + "tests/golden/llama").refused("tests/golden/llama")
    # Other data have no validation data of before; what follows from the device is no setting.
    train(RUN + f"--steps 3 --val-data Makefile --save {folder}/validated").ok()
    train(RESUME + f"{folder}/validated --steps 4 --data {TEXT} --save {folder}/other").ok()
    state = json.loads((folder / "other/step-000004" / STATE).read_text())
    assert state["val_data_paths"] == [] and state["data_paths"] == [str(TEXT)] and "save-dtype" not in state["settings"]
    # Other data of the same size are noticed.
    text = bytearray((ROOT / TEXT).read_bytes())
    (folder / "data.txt").write_bytes(text)
    train(RUN + f"--steps 3 --data {folder}/data.txt --save {folder}/learned").ok()
    for changed in (False, True):
        text[len(text) // 2] ^= changed
        (folder / "data.txt").write_bytes(text)
        assert changed == ('the data were "byte-level text' in train(RESUME + f"{folder}/learned --steps 3").ok().err)


# Draws go on where they were; an option that excludes a restored one overrides it, with a warning.
def test_sampling_is_resumed(folder):
    train(RUN + f"--lce-sample 50 --save-every 5 --save {folder}/sampled --log {folder}/log").ok()
    line = RESUME + f"{folder}/sampled/step-000005 --sample-tokens 3 "
    assert not train(line + f"--save {folder}/same --log {folder}/log-same").ok("  dropped ").err
    assert curve(folder / "log-same") == curve(folder / "log", 6)
    same_files(folder / "sampled" / LAST, folder / "same" / LAST)
    for other in "--metrics", "--materialized-logits":  # each excludes sampling, one by its row and one by that of --lce-sample
        output = train(line + other).ok()
        assert "--lce-sample was 50 when " in output.err and "  dropped " not in output.out, output


# FP8 is restored, unless it is declined.
def test_fp8_is_resumed_or_declined(folder):
    train(RUN + f"--num-key-value-heads 2 --intermediate-size 32 --fp8 --metrics --save-every 6 --save {folder}/fp8").ok()
    state = folder / "fp8" / "step-000006" / "trainer_state.json"
    for options, restored, changed in (("", "fp8      the layers' GEMMs and the loss's logits", False),
                                       ("--fp8 layers", "fp8      the layers' GEMMs,", True),
                                       ("--fp8 none", "", True), ("--no-fp8", "", True)):
        output = train(RESUME + f"{folder}/fp8/step-000006 {options}").ok()
        assert restored in output.out and ("fp8   " in output.out) == bool(restored), output
        assert ("--fp8 was all when " in output.err) == changed, output
    # When it was a flag it meant the layers alone; a flag that was set had no text.
    older = json.loads(state.read_text())
    del older["crc32"]
    assert older["settings"]["metrics"] == "set"
    older["settings"].update({"fp8": "", "metrics": ""})
    state.write_text(json.dumps(older))
    output = train(RESUME + f"{folder}/fp8/step-000006").ok()
    assert "fp8      the layers' GEMMs," in output.out and not output.err, output


# Each file's CRC-32 is in the state, its own too. A plan reads no weights, and older checkpoints have none.
def test_a_flipped_bit_is_named(folder):
    state = json.loads((straight() / LAST / STATE).read_text())
    names = sorted(path.name for path in (straight() / LAST).iterdir())
    assert sorted(state["crc32"]) == names
    for name in names:
        saved = shutil.copytree(straight(), folder / name, symlinks=True)
        data = bytearray((saved / LAST / name).read_bytes())
        assert name == STATE or state["crc32"][name] == zlib.crc32(data)
        data[data.index(b'"seed":\t"1') + 9 if name == STATE else len(data) // 2] ^= 2
        (saved / LAST / name).write_bytes(data)
        train(RESUME + f"{saved}/{LAST}").refused(f"{LAST}/{name}")
        for line in (f"{TRAIN} --data {TEXT} --steps 0", f"{TOOLS}/evaluate --val-data {TEXT}", f"{TOOLS}/generate_ids --prompt 1 --tokens 1"):
            for at in saved / LAST, saved:  # the second by the links
                output = run(*line.split(), "--device", "cpu", "--init", at)
                if name == "model.safetensors":
                    output.refused(f"{at}/{name} is not as it was written: its CRC-32 has changed; copy the folder again or, where")
                elif name != STATE:
                    output.ok()
    train(RESUME + f"{saved}/{LAST} --plan").ok()
    assert f"{name} is not as it was written" in train(RESUME + f"{saved} --steps 7").ok("after step 6 of 7").err
    del state["crc32"]
    (saved / LAST / STATE).write_text(json.dumps(state))
    train(RESUME + f"{saved}/{LAST}").ok()
    for path in saved.glob("step-*/model.safetensors"):
        path.write_bytes(b"x")
    train(RUN + f"--resume auto --save {saved}").fails("no checkpoint in")


# A job that may be started again begins with a model, and then goes on.
def test_auto_begins_with_a_model(folder):
    job = f"--device cpu --init {straight() / LAST} --resume auto --data {TEXT} --save {folder}/tuned --steps "
    train(job + "1").ok(f"weights  {straight() / LAST}\n")
    train(job + "2").ok(f"resumed  {folder}/tuned/step-000001, after step 1 of 2")
    train(RESUME + f"{folder}/tuned/step-000001 --steps 3 --save {folder}/tuned").fails("step-000002, which is further along than this run")
    train(job.replace("auto", f"{folder}/tuned") + "3").refused("--init begins with the model in ", "give one of them")
    (folder / "tuned/step-000001" / STATE).write_text("{")
    assert "; the weights beside it are not checked" in train(f"--device cpu --init {folder}/tuned/step-000001 --data {TEXT} --steps 0").ok().err
    for step in "step-000002", "step-000001":  # without its state, no run can continue from it
        (folder / "tuned" / step / STATE).unlink()
        train(f"{RUN} --save {folder}/tuned").refused(f"/{step}/{STATE} does not exist; move {step} away")
        (folder / "tuned" / step).rename(folder / step)
    train(f"{RUN} --save {folder}/tuned").ok("saved in")


# A signal ends the run after its step, with a checkpoint. The wish may come at any step.
def test_stopped_runs_save(folder):
    for _ in range(20):  # until the signal comes before its end
        shutil.rmtree(folder / "stopped", ignore_errors=True)
        p = start(RUN + f"--save {folder}/stopped --save-every 6 --log {folder}/log")
        p.wait_for("step 1/")
        os.kill(p.pid, signal.SIGINT)
        output = p.finish()
        assert "saved in" in output.out and output.status in (0, -signal.SIGINT), output
        ended = output.out.partition("stopped after")[2]
        if ended:
            break
    assert ended, "each run ended before the signal"
    # It may soon be killed: it saves before it validates. At these steps it had just done one of both.
    if not ended.startswith((" step 5 ", " step 6 ", " step 10 ")):
        assert 0 < ended.find("saved in") < ended.find("validation loss"), ended
    latest = folder / "stopped/latest"
    for line in (f"--log {folder}/log", ""):  # the second time nothing is left to do but what a killed run leaves
        latest.unlink()
        latest.symlink_to("step-000006")
        output = train(RUN + f"--resume auto --save {folder}/stopped {line}").ok("resumed  ")
        same_files(straight() / LAST, folder / "stopped" / LAST)
        assert os.readlink(latest) == LAST
    assert "after step 12 of 12" in output.out, output
    same_losses(folder / "log")
    p = start(RUN + f"--steps 1000000 --eval-every 0 --eval-batches 0 --save {folder}/all")
    p.wait_for("step 1/")
    os.kill(p.pid, signal.SIGINT)
    ended = p.finish().out.partition("stopped after")[2]
    assert "saved in" in ended and "validation loss" not in ended, ended


# transformers has no soft-cap in these models: what is computed here is said, of an option and of a config.json.
def test_a_softcap_is_said(folder):
    output = train(RUN + f"--logit-softcap 30 --steps 3 --save {folder}/capped").ok()
    assert output.err.count("lce:") == 1 and "--logit-softcap 30 is part of this llama model here alone: transformers" in output.err, output
    stray = f"{folder}/capped/config.json has final_logit_softcapping 30, which this program computes and transformers ignores in a llama model"
    for line in f"{TRAIN} --data {TEXT} --steps 1", f"{TOOLS}/evaluate --val-data {TEXT}":
        line = f"{line} --device cpu --init {folder}/capped"
        assert stray in run(*line.split()).ok().err and "soft" not in run(*line.split(), "--logit-softcap", 0).ok().err


# Options that say when to validate, sample and save are resumed as well; changing one is no warning.
def test_the_rhythm_is_resumed(folder):
    train(RUN + f"--save {folder}/rhythm --save-every 4").ok()
    line = RESUME + f"{folder}/rhythm/step-000004 "
    assert not train(line + f"--save {folder}/same --log {folder}/log").ok("step 7  sample").err
    assert (folder / "same/step-000008").exists() and column(read_log(folder / "log"), "step", "validation") == [5, 10, 12]
    assert not train(line + f"--save-every 3 --eval-every 2 --save {folder}/faster").ok().err
    assert (folder / "faster/step-000009").exists()


# Numbers have no more digits than they need: no shorter form reads back as the same number.
def test_numbers_are_short(folder):
    assert '"beta1":\t"0.9"' in (straight() / LAST / STATE).read_text()
    numbers = []
    json.loads("[" + ",".join(straight_log().read_text().splitlines()) + "]", parse_float=numbers.append)
    shorter = [number for number in numbers for digits in (15, 16)
               if float(text := f"{float(number):.{digits}g}") == float(number) and len(text) < len(number)]
    assert len(numbers) > 50 and not shorter, shorter


# test_checkpoint.c has more of what a folder may be in the way of.
def test_what_cannot_be_saved_is_said(folder):
    run("sh", "-c", f"ulimit -f 39; exec {TRAIN} {RUN} --save {folder}/full --save-every 6").fails(  # 20,000 bytes a file
        "no checkpoint after step 6: cannot write", "File too large; there is no checkpoint of this run yet", "no checkpoint after step 12")
    # A run that has no step left is saved where it was not yet.
    train(RESUME + f"{straight()}/{LAST} --save {folder}/other").ok()
    same_files(folder / "other" / LAST, straight() / LAST)
    # A folder of the last step that is no checkpoint is said before the run, which could not save that step.
    shutil.copytree(straight(), folder / "unmarked", symlinks=True)
    (folder / "unmarked" / LAST / STATE).unlink()
    train(RESUME + f"auto --save {folder}/unmarked").fails(f"{LAST} is passed over", f"{LAST} is left: it has no {STATE} of that step; move it away\n")


straight()
main(globals())
