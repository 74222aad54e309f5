#!/usr/bin/env python3
"""Makes the golden models in this directory, or compares ./train with transformers and torch.

  make_golden.py                 writes NAME/ for each model: a checkpoint as transformers saves it, tokens.bin (an
                                 llm.c shard) and expected.safetensors: logits, loss, every gradient, and the losses,
                                 gradient norms and weights of 10 AdamW steps, all in fp32 on the CPU; and how far
                                 off transformers' own passes in bf16 are
  make_golden.py --live ./train  trains each model here and there, and compares: weights, the validation loss
                                 of what was saved, what --dump writes
  make_golden.py --live ./train --checkpoint DIR --shard FILE
                                 compares the loss of a saved model over the beginning of a shard

Made with torch 2.15.0 and transformers 5.23.0; phi3 and olmo2 with 2.11.0 and 5.17.0. Everything is drawn from fixed seeds.
"""
import argparse, json, math, pathlib, shutil, struct, subprocess, sys, tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, MistralConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen3Config
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

HERE = pathlib.Path(__file__).resolve().parent
VOCAB, BATCH, SEQ, STEPS = 61, 3, 16, 10
DRAWS, NUDGE = 64, 2**-8
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
CLIP = 1.0


def llama(config=LlamaConfig, **changes):
    sizes = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(config(**{**sizes, **changes}))


# After Llama: a third of its size, but wider heads.
SMALL = dict(hidden_size=12, intermediate_size=20)


def gpt2(**changes):
    sizes = dict(vocab_size=VOCAB, n_embd=20, n_layer=2, n_head=4, n_positions=24, resid_pdrop=0, embd_pdrop=0,
                 attn_pdrop=0, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **changes}))


LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=40)

LINEAR = dict(rope_type="linear", rope_theta=1000.0, factor=3.0)

PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)  # 6 of a head's 8 elements

# name: model, dtype on disk, largest shard
MODELS = {
    "llama": (lambda: llama(tie_word_embeddings=False), torch.float32, "5GB"),
    "llama-tied": (lambda: llama(tie_word_embeddings=True, head_dim=8, num_key_value_heads=1, attention_bias=True,
                                 mlp_bias=True, rope_parameters=LLAMA3), torch.bfloat16, "10KB"),
    "gpt2": (lambda: gpt2(), torch.float32, "5GB"),
    "gpt2-bare": (lambda: gpt2(tie_word_embeddings=False, n_inner=52), torch.float16, "5GB"),
    "mistral": (lambda: llama(MistralConfig, **SMALL, head_dim=8, sliding_window=SEQ, rope_parameters=LINEAR), torch.float32, "5GB"),
    "qwen2": (lambda: llama(Qwen2Config, **{**SMALL, "hidden_size": 16}), torch.float32, "5GB"),
    "qwen3": (lambda: llama(Qwen3Config, **SMALL, head_dim=10, tie_word_embeddings=True), torch.bfloat16, "5GB"),
    "phi3": (lambda: llama(Phi3Config, **{**SMALL, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
                           pad_token_id=None, rope_parameters=PARTIAL), torch.bfloat16, "5GB"),
    # With a bias, whose gradient passes through the norm after it.
    "olmo2": (lambda: llama(Olmo2Config, **SMALL, head_dim=10, attention_bias=True, pad_token_id=None),
              torch.bfloat16, "5GB"),
}


def draw(model, seed):
    """Weights that make every path matter, exact in the dtype they are stored as."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        scale = 1 / math.sqrt(min(p.shape)) if p.dim() == 2 else 0.3
        with torch.no_grad():
            p.copy_(torch.randn(p.shape, generator=generator) * scale)
            if p.dim() == 1 and name.endswith("weight"):
                p.add_(1)


def save_bare(model, folder):
    """Writes what the first GPT-2 files held: no prefix, the causal mask among the weights."""
    tensors = {k.removeprefix("transformer."): v.clone() for k, v in model.state_dict().items()}
    for layer in range(model.config.n_layer):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24, dtype=torch.uint8)
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SHARDS = {20240520: (1, "H"), 20240801: (7, "I")}  # magic: version, token


def write_shard(path, tokens, magic=20240520):
    version, kind = SHARDS[magic]
    header = [magic, version, len(tokens)] + [0] * 253
    path.write_bytes(struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}{kind}", *tokens))


def read_shard(path, most=1 << 31):
    with open(path, "rb") as file:
        magic, _, count = struct.unpack("<3i", file.read(1024)[:12])
        count, kind = min(count, most), SHARDS[magic][1]
        return torch.tensor(struct.unpack(f"<{count}{kind}", file.read(count * struct.calcsize(kind))))


def windows(path):
    """BATCH windows of SEQ + 1 tokens: all of them in every step, so their order does not matter."""
    tokens = read_shard(path).view(BATCH, SEQ + 1)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens, targets):
    logits = model(input_ids=tokens).logits.float()
    return torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1)), logits


def optimizer_for(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([dict(params=matrices), dict(params=vectors, weight_decay=0.0)], **ADAMW)


def train(model, tokens, targets):
    optimizer, losses, norms = optimizer_for(model), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = loss_of(model, tokens, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def load(folder, dtype=torch.float32):
    """Loads in this dtype: .to(dtype) after loading would round RoPE's frequencies, too."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def one_pass(model, tokens, targets):
    model.zero_grad()
    loss, logits = loss_of(model, tokens, targets)
    loss.backward()
    tensors = {"logits": logits.detach(), "loss": loss.detach().view(1)}
    return tensors | {"grad." + k: p.grad.clone() for k, p in model.named_parameters()}


def errors_in_bf16(folder, stored, generator):
    """Measures how far transformers' passes in bf16 are off those in fp32: of every tensor |error| / |values|, and its largest
    error over its largest value; [DRAWS, 2] each.

    One pass is one draw of rounding errors: by luck it may be half or twice as far off as the next. So all but the first
    have their weights nudged by up to NUDGE of their size, half a spacing of bf16 or a whole one, and rounded to the dtype
    they are stored as: models as hard as the first, where all roundings differ. Each pass is compared with one in fp32
    of the same weights, not rounded to bf16.
    """
    exact, rounded = load(folder), load(folder, torch.bfloat16)
    tokens, targets = windows(folder / "tokens.bin")
    first = [p.detach().clone() for p in exact.parameters()]
    errors = {}
    for draw in range(DRAWS):
        with torch.no_grad():
            for p, q, w in zip(exact.parameters(), rounded.parameters(), first, strict=True):
                nudge = NUDGE * (2 * torch.rand(w.shape, generator=generator) - 1) if draw else 0
                q.copy_(p.copy_((w * (1 + nudge)).to(stored)))
        want, got = one_pass(exact, tokens, targets), one_pass(rounded, tokens, targets)
        for k, w in want.items():
            off = got[k].double() - w.double()
            errors.setdefault(k, []).append([off.norm() / w.double().norm(), off.abs().max() / w.double().abs().max()])
    return {k: torch.tensor(e) for k, e in errors.items()}


def root_mean_square(errors):
    return errors.square().mean(0).sqrt()


def print_spread(name, errors):
    """Compares each pass in bf16 with all others, as tests/model/test_golden.c does for ours."""
    e = torch.stack(list(errors.values()), 1)  # [DRAWS, tensors, 2]
    ratios = e / ((e.square().sum(0) - e.square()) / (DRAWS - 1)).sqrt()
    worst, whole = ratios.flatten(1).max(1).values, root_mean_square(ratios[:, :, 0].T)
    print(f"{name}: passes in bf16 against the root mean square of the others: the worst tensor of a pass "
          f"{worst.median():.2f} times (median), {worst.quantile(0.95):.2f} (95%), {worst.max():.2f} (all), "
          f"all its tensors together {whole.median():.2f}, {whole.quantile(0.95):.2f}, {whole.max():.2f}")


def make(name, index):
    build, dtype, shard = MODELS[name]
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    model = build()
    draw(model, 1000 + index)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    if name == "gpt2-bare":
        save_bare(model, folder)
    generator = torch.Generator().manual_seed(index)
    write_shard(folder / "tokens.bin", torch.randint(VOCAB, (BATCH * (SEQ + 1),), generator=generator).tolist())

    model = load(folder)
    tokens, targets = windows(folder / "tokens.bin")
    expected = one_pass(model, tokens, targets)
    losses, norms = train(model, tokens, targets)
    expected |= {"after." + k: p.detach() for k, p in model.named_parameters()}
    expected |= {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
    errors = errors_in_bf16(folder, dtype, generator)
    print_spread(name, errors)
    expected |= {"bf16." + k: root_mean_square(e).float() for k, e in errors.items()}
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")


def run(program, *options, device="cpu"):
    command = [str(program), "--device", device, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def check(what, got, most):
    print(f"  {what:55} {got:.1e}  (at most {most:.0e})")
    if not got <= most:
        sys.exit(f"{what}: too far off")


def stream_loss(model, stream, width):
    """--val-data is read from end to end: every token but the first is predicted."""
    device = next(model.parameters()).device
    with torch.no_grad():
        sums = [torch.nn.functional.cross_entropy(model(input_ids=w[None, :-1]).logits[0].float(), w[1:], reduction="sum").item()
                for w in (stream[i:i + width + 1].to(device) for i in range(0, len(stream) - 1, width))]
    return sum(sums) / (len(stream) - 1)


def compare_checkpoint(folder, shard, program, device):
    """The model in fp32 here, and there on `device`, whose GEMMs may be in bf16."""
    model = load(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    width = min(model.config.max_position_embeddings, 128 if device == "cpu" else 1024)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        stream = read_shard(shard, 64 * width + 1)
        write_shard(scratch / "tokens.bin", stream.tolist(), 20240801)
        run(pathlib.Path(program).parent / "tools" / "evaluate", "--init", folder, "--val-data", scratch / "tokens.bin",
            "--batch", 1, "--seq-len", width, "--log", scratch / "log.jsonl", device=device)
        ours = json.loads((scratch / "log.jsonl").read_text().splitlines()[-1])["val_loss"]
    theirs = stream_loss(model, stream, width)
    print(f"{folder}, loss of {len(stream) - 1:,} tokens: {ours:.5f}, in transformers {theirs:.5f}")
    check("difference", abs(ours - theirs), 1e-4 if device == "cpu" else 3e-3)


def compare(name, program):
    print(name)
    folder = HERE / name
    shard = folder / "tokens.bin"
    tokens, targets = windows(shard)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        common = ["--data", shard, "--val-data", shutil.copy(shard, scratch), "--batch", BATCH, "--seq-len", SEQ,
                  "--sample-every", 0]
        run(program, "--init", folder, "--steps", STEPS, "--schedule", "constant", "--warmup", 0, "--lr", ADAMW["lr"],
            "--epsilon", ADAMW["eps"], "--weight-decay", ADAMW["weight_decay"], "--grad-clip", CLIP, "--eval-batches", 0,
            "--save", scratch / "trained", "--log", scratch / "log.jsonl", *common)
        log = [json.loads(line) for line in open(scratch / "log.jsonl")]
        trained, model = load(scratch / "trained"), load(folder)
        train(model, tokens, targets)
        ours = dict(trained.named_parameters())
        check("weights after 10 steps", max(relative(ours[k], p) for k, p in model.named_parameters()), 2e-5)
        theirs = stream_loss(trained, read_shard(shard), SEQ)
        check("validation loss in transformers", abs(log[-1]["val_loss"] - theirs), 1e-5)
        run(program, "--init", folder, "--steps", 1, "--data-order", "sequential", "--val-fraction", 0, "--dump", scratch / "dump",
            *common[:2], *common[4:])
        first = load_file(scratch / "dump/first-step/first_step.safetensors")
        stream = read_shard(shard)[:BATCH * SEQ + 1]
        want = one_pass(load(folder), stream[:-1].view(BATCH, SEQ), stream[1:].view(BATCH, SEQ))
        assert torch.equal(first["tokens"].view(-1), stream[:-1]) and torch.equal(first["targets"].view(-1), stream[1:])
        check("loss of --dump", abs(first["loss"].mean().item() / want["loss"].item() - 1), 2e-5)
        check("gradients of --dump", max(relative(first[k], g) for k, g in want.items() if k.startswith("grad.")), 2e-5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", metavar="TRAIN", help="the trainer to compare")
    parser.add_argument("--checkpoint", metavar="DIR", help="the saved model to compare instead")
    parser.add_argument("--shard", metavar="FILE", help="tokens for it")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the trainer evaluates it (cpu)")
    parser.add_argument("names", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.checkpoint:
        compare_checkpoint(arguments.checkpoint, arguments.shard, arguments.live, arguments.device)
        sys.exit()
    torch.set_num_threads(1)
    for number, model_name in enumerate(MODELS):
        if model_name in arguments.names:
            compare(model_name, arguments.live) if arguments.live else make(model_name, number)
