#!/usr/bin/env python3
"""Tries patch_transformers on every causal language model of transformers, small and freshly initialised.

One line a class: right (loss and gradients as before), refused or not built (with the reason), or WRONG; then
the counts. Exits with 1 where one is wrong. Class names as arguments: these alone.
"""
import collections
import copy
import signal
import sys
import warnings

import torch
import transformers
from lce import patch_transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

SMALL = dict(vocab_size=160, decoder_vocab_size=160, vocab_size_per_layer_input=160, hidden_size=64, n_embd=64, d_model=64,
             dim=64, embedding_size=64, embedding_dim=64, intermediate_size=96, ffn_hidden_size=96,
             expert_ffn_hidden_size=32, moe_intermediate_size=32, shared_expert_intermediate_size=32, n_inner=96, ffn_dim=96,
             num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, encoder_layers=2, decoder_layers=2,
             num_attention_heads=4, n_head=4, n_heads=4, num_heads=8, num_key_value_heads=2, encoder_attention_heads=4,
             decoder_attention_heads=4, head_dim=16, qk_rope_head_dim=16, qk_nope_head_dim=16, qk_head_dim=32, v_head_dim=16,
             q_lora_rank=16, kv_lora_rank=16, rotary_dim=16, mamba_n_heads=4, mamba_d_head=32, mamba_d_ssm=128,
             max_position_embeddings=64, n_positions=64, num_experts=4, num_local_experts=4, n_routed_experts=4,
             n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, num_expert_group=1, pad_token_id=0,
             bos_token_id=1, eos_token_id=2)


def shrink(config):
    """Small sizes in place of the class's; a list for each layer is cut, and configurations inside likewise."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif name in SMALL and isinstance(value, int) and value > SMALL[name] or name.endswith("token_id") and value:
            setattr(config, name, SMALL.get(name, 0))
        elif value is None and name in ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts",
                                        "num_experts_per_tok"):
            setattr(config, name, SMALL[name])
        elif name in ("layer_types", "mlp_layer_types") and value:
            setattr(config, name, value[:1] + value[-1:])
    if hasattr(config, "kv_lora_rank"):  # latent attention: as many heads of keys
        config.num_key_value_heads = SMALL["num_attention_heads"]
    return config


def small_model(name):
    cls = getattr(transformers, name)
    config = shrink(cls.config_class())
    config.use_cache = False
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > 3e7:
        raise ValueError(f"has {size:,} parameters even so")
    torch.manual_seed(1)
    return cls(config).eval()


def too_slow(*_):
    raise TimeoutError("takes more than 60 s")


def loss_and_gradients(model, ids, labels):
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def verdict(name):
    ids = torch.randint(5, 150, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    signal.setitimer(signal.ITIMER_PROF, 60)
    try:
        model = small_model(name)
        want = loss_and_gradients(model, ids, labels)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        patch_transformers(model)
    except TypeError as error:
        return "refused", str(error)
    try:
        got = loss_and_gradients(model, ids, labels)
        off = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in zip(got, want, strict=True))
        return ("right", f"off by {off:.0e}") if off < 1e-3 else ("WRONG", f"off by {off:.0e}")
    except TimeoutError as error:
        return "not built", f"in time: {error}"
    except Exception as error:
        return "WRONG", f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, too_slow)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    counts = collections.Counter()
    for name in sys.argv[1:] or sorted({n for names in NAMES.values() for n in ([names] if isinstance(names, str) else names)}):
        kind, why = verdict(name)
        counts[kind] += 1
        print(f"{name:40} {kind:10} {' '.join(why.split())[:160]}", flush=True)
    print(f"transformers {transformers.__version__}: {', '.join(f'{n} {kind}' for kind, n in sorted(counts.items()))}")
    sys.exit(counts["WRONG"] > 0)
