#include "trainer/options.h"

#include "model/config.h"
#include "trainer/option_rows.h"

#define OPTION_VALUES Options
#define MAX           INT32_MAX
#define MAX_STEPS     ((int64_t)1 << 40)
#define DTYPES        "fp32", "bf16"
#define NEEDS_SAVE    NEEDS("save", 1, "without it nothing is saved")

// clang-format off
// A row stands after the one that it needs; in --help the options used most come first.
const Option options_rows[] = {
  {GROUP("Model (a preset's sizes are the published ones; each can be overridden)")},
  {TEXT("model", "PRESET", preset), "gpt2-tiny, -124m, -350m, -774m, -1558m; llama-tiny, -1b, -3b, -8b; mistral-7b; qwen3-0.6b, "
   "-1.7b, -4b; olmo2-1b, -7b", .initial = "llama-tiny"},
  {INTEGER("vocab", "V", model.vocab_size, 1, MAX), "Vocabulary (default: the shards', else the preset's)"},
  {INTEGER("num-layers", "L", model.num_hidden_layers, 1, MAX_LAYERS), "Transformer blocks", ALSO("layers")},
  {INTEGER("hidden-size", "H", model.hidden_size, 1, MAX), "Width of the residual stream"},
  {INTEGER("intermediate-size", "F", model.intermediate_size, 1, MAX), "Width of the MLP"},
  {INTEGER("num-attention-heads", "Q", model.num_attention_heads, 1, MAX), "Query heads"},
  {INTEGER("num-key-value-heads", "K", model.num_key_value_heads, 1, MAX), "Key/value heads, a divisor of Q"},
  {INTEGER("head-dim", "D", model.head_dim, 1, MAX), "Size of a head (default: H / Q; Qwen3: 128)"},
  {NUMBER("rope-theta", "THETA", model.rope_theta, MIN_ROPE_THETA, MAX_ROPE_THETA), "RoPE base (not GPT-2; default: the model's)", ADAPTS},
  {INTEGER("max-position-embeddings", "P", model.max_position_embeddings, 1, MAX), "Longest input", ADAPTS},
  {FLAG("tie-word-embeddings", model.tie_word_embeddings, true), "The head is the token embedding"},
  {FLAG("untie-word-embeddings", model.tie_word_embeddings, false), "The head has its own matrix"},

  {GROUP("Job")},
  {INTEGER("steps", "N", steps, 0, MAX_STEPS), "Optimizer steps", SETTING, "100"},
  {INTEGER("batch", "B", batch, 1, MAX), "Sequences per micro-batch", SETTING | FITTED, "4"},
  {INTEGER("seq-len", "T", seq_len, 1, MAX), "Tokens per sequence (default: 256 for tiny models, 1024 for GPT-2, else 2048)", SETTING,
   ALSO("block-size", "max-length")},
  {INTEGER("total-batch", "TOKENS", total_batch, 1, MAX_STEPS),
   "Tokens per optimizer step, a multiple of ranks x B x T (the default): gradients accumulate", SETTING},
  {INTEGER("seed", "SEED", seed, 0, 9.22e18), "Seed of weights, data order and samples", SETTING, "1"},

  {GROUP("Optimizer (AdamW or Muon)")},
  {NUMBER("lr", "RATE", lr, 0, 100), "Peak rate (default: the preset's; 2e-5 with --init)", SETTING, ALSO("learning-rate")},
  {INTEGER("warmup", "N", warmup, 0, MAX_STEPS), "Warm-up (default: --steps / 20)", SETTING},
  {CHOICE("schedule", schedule, "cosine", "linear", "constant", "wsd"), "After warm-up; wsd: stable, then linear decay", SETTING, "cosine"},
  {NUMBER("min-lr", "FRACTION", min_lr, 0, 1), "Final rate, as a fraction of --lr", SETTING, "0.1"},
  {NUMBER("decay-share", "FRACTION", decay_share, 0, 1), "Fraction of the steps after the warm-up in which wsd decays", SETTING,
   "0.2", NEEDS("schedule", SCHEDULE_WSD, "others do not decay at the end")},
  {NUMBER("weight-decay", "D", update.weight_decay, 0, 100), "Decoupled; not for norms and biases", SETTING, "0.1", ALSO("wd")},
  {NUMBER("grad-clip", "NORM", max_grad_norm, 0, 1e30), "Largest gradient norm; 0: no clipping", SETTING, "1", ALSO("max-grad-norm")},
  {CHOICE("optimizer", dtypes.optimizer, "adamw", "muon"), "muon: orthogonalized momentum, one moment, for the layers' matrices, and "
   "AdamW for all else, with the same rates and decay", SETTING, "adamw"},
  {NUMBER("momentum", "MU", update.momentum, 0, 0.999999), "Decay of Muon's momentum", SETTING, "0.95",
   NEEDS("optimizer", OPTIMIZER_MUON, "AdamW has --beta1")},
  {NUMBER("beta1", "B", update.beta1, 0, 0.999999), "Decay of the first moment", SETTING, "0.9"},
  {NUMBER("beta2", "B", update.beta2, 0, 0.999999), "Decay of the second moment", SETTING, "0.95"},
  {NUMBER("epsilon", "E", update.epsilon, 1e-30, 1), "Added to the second moment's root", SETTING, "1e-8"},

  {GROUP("LM head + loss")},
  {INTEGER("lce-chunk", "TOKENS", pass.chunk, 1, MAX), "Tokens per chunk at most (default: tokens / 9 on a CPU, at least 112; tokens / 8 "
   "on a GPU, at least 1024; never above 4096)", SETTING | FITTED},
  {FLAG("materialized-logits", pass.mode, LCE_MATERIALIZED), "Store the full logits: the baseline to compare with", SETTING,
   EXCLUDES("chunks and sampling belong to --fused-lce", "lce-chunk", "lce-sample")},
  {FLAG("fused-lce", pass.mode, LCE_FUSED), "Fused, chunked lm_head + cross-entropy (default)", SETTING},
  {NUMBER("lce-sample", "M0", pass.sampling.full_mass, 0, 1e6), "Sample the softmax gradient, without bias: keep a tile (128 tokens x 192 "
   "vocabulary entries) with probability mass / M0, scaled up; 1 drops nine of ten. Gradients stay exact with M0 below 1/32, and on a GPU "
   "other than Hopper or in fp32", SETTING, "0", EXCLUDES("sampling knows only the rows' sums, and metrics need more", "metrics")},
  {NUMBER("label-smoothing", "EPS", pass.terms.label_smoothing, 0, 1),
   "Fraction of each target's weight that is spread over the vocabulary; not used in validation", SETTING, "0"},
  {NUMBER("z-loss", "LAMBDA", pass.terms.z_loss, 0, 1e6), "Train with LAMBDA logsumexp^2 in addition; PaLM has 1e-4", SETTING, "0"},
  {NUMBER("logit-softcap", "C", model.final_logit_softcapping, 0, MAX_SOFTCAP),
   "Logits become C tanh(logit / C), as in Gemma 2; 0: none (default: the model's); not in transformers", ADAPTS},
  {FLAG("metrics", metrics, true), "Log accuracy, entropy and the largest logit", SETTING},

  {GROUP("Data, validation and samples")},
  {LIST("data", "PATH", data), "Text (a byte is a token) or llm.c shards (*.bin): file, directory or glob; may be given again (default: "
   "this source tree). In a directory by tools/prepare_data.py: train_*.bin"},
  {LIST("val-data", "PATH", val_data), "Validation data (default: val_*.bin of such a directory, else a part of --data)",
   EXCLUDES("nothing is held out where there is separate validation data", "val-fraction")},
  {NUMBER("val-fraction", "FRACTION", val_fraction, 0, 0.999), "Validated part of --data", SETTING, "0.05"},
  {INTEGER("eval-every", "N", eval_every, 0, MAX), "Validate every N steps and at the end; 0: only at the end", OUTPUT_SETTING, "50",
   ALSO("eval-steps")},
  {INTEGER("eval-batches", "N", eval_batches, 0, MAX), "Batches per validation, spread evenly over its data; 0: all", OUTPUT_SETTING, "8"},
  {CHOICE("data-order", data_order, "shuffled", "sequential"), "sequential: in file order, sharing a token, as llm.c", SETTING, "shuffled"},
  {CHOICE("pack", pack, "none", "documents"), "documents: windows of whole documents and padding, each document with its own attention and "
   "positions; only longer ones are cut", SETTING, "none", EXCLUDES("packed windows do not follow the files' order", "dump", "data-order")},
  {INTEGER("end-of-text", "ID", end_of_text, -1, MAX), "Token that ends a document; -1: what tools/prepare_data.py recorded, else the end "
   "of a file", SETTING, "-1", NEEDS("pack", PACK_DOCUMENTS, "only packing looks for the ends of documents")},
  {FLAG("other-tokenizer", other_tokenizer, true), "Accept shards of another tokenizer", SETTING},
  {INTEGER("sample-every", "N", sample_every, 0, MAX), "Sample every N steps; 0: off", OUTPUT_SETTING, "100"},
  {TEXT("prompt", "PROMPT", prompt), "Begins samples (default: newline): text if tokens are bytes, else ids (15496,995) or a *.bin shard"},
  {TEXT("tokenizer", "PATH", tokenizer), "tokenizer.json or its folder, for samples and checkpoints (default: the data's, or the model's)"},
  {INTEGER("sample-tokens", "N", generation.max_new_tokens, 1, 1 << 20), "Tokens per sample", SAME, "64"},
  {NUMBER("temperature", "T", generation.sampling.temperature, 0, 100), "Temperature of samples; 0 takes the likeliest token", SAME, "0.8"},
  {INTEGER("top-k", "K", generation.sampling.top_k, 0, MAX), "Draw from the K likeliest; 0: all", SAME, "0"},
  {NUMBER("top-p", "P", generation.sampling.top_p, 1e-9, 1), "Draw from the fewest tokens that together have probability P", SAME, "1"},

  {GROUP("Checkpoints")},
  {TEXT("save", "DIR", save), "Save as DIR/step-..., which transformers opens, too (default: DIR of --resume DIR)", ALSO("output-dir")},
  {INTEGER("save-every", "N", save_every, 0, MAX_STEPS), "Save every N steps and at the end; 0: only at the end", OUTPUT_SETTING, "0",
   NEEDS_SAVE, ALSO("save-steps")},
  {TEXT("resume", "WHERE", resume), "Resume from a checkpoint, or with auto from the newest whole one in --save, if any, with its options "
   "where none are given; ranks, --zero and --vocab-parallel may differ"},
  {TEXT("init", "DIR", init), "Begin with the Hugging Face model in DIR: " FAMILY_NAMES, EXCLUDES("both say what the model is", "model")},
  {INTEGER("keep", "M", keep, 0, MAX), "Keep the newest M checkpoints; 0: all", OUTPUT_SETTING, "0", NEEDS_SAVE},
  {CHOICE("save-dtype", save_dtype, DTYPES), "Type of the saved weights (default: --dtype)", OUTPUT_SETTING, NEEDS_SAVE},

  {GROUP("Machine and memory")},
  {CHOICE("device", device, "auto", "cpu", "cuda"), "auto: the GPU if there is one", .initial = "auto"},
  {CHOICE("dtype", dtypes.weight, DTYPES), "Weights and activations (default: bf16 on cuda)", GPU_SETTING | SAME},
  {CHOICE("recompute", pass.recompute, "none", "elementwise", "mlp", "layer"),
   "What the backward pass computes again instead of storing it", SETTING | FITTED, "none", ALSO("gradient-checkpointing")},
  {INTEGER("recompute-layers", "N", pass.recompute_layers, 0, MAX), "Apply --recompute to the first N layers, and one level less to the "
   "others: faster; 0: to all", SETTING | FITTED, "0", NEEDS("recompute", RECOMPUTE_ELEMENTWISE, "it says in how many layers, not what")},
  {SET("offload", dtypes.offload, "weights", "gradients", "optimizer", "activations"), "Keep these in the host's memory, with commas "
   "between; optimizer: master weights and moments; activations: the layers' inputs, with --recompute layer; slower, with the same bits"},
  {CHOICE("fp8", dtypes.fp8, "none", "all", "layers"), "FP8 (e4m3) GEMMs in the layers, and on Hopper FP8 logits in the fused loss; or "
   "in the layers alone. Less exact; codes take 2 bytes more per weight of one layer and 1 per weight of the head. Needs cuda from Ada "
   "on with bf16 (the CPU emulates it) and sizes that are multiples of 16", SETTING, "none", .bare = "all"},
  {FLAG("no-fp8", dtypes.fp8, FP8_NONE), "Resume without the checkpoint's --fp8"},
  {CHOICE("moment-dtype", dtypes.moment, DTYPES), "Type of the optimizer's moments", GPU_SETTING, "fp32"},
  {CHOICE("grad-dtype", dtypes.grad, DTYPES), "Type of weight gradients (default: --dtype); the head's are fp32", GPU_SETTING},
  {FLAG("master-weights", dtypes.master, true), "Keep fp32 copies of bf16 weights (default)", GPU_SETTING},
  {FLAG("no-master-weights", dtypes.master, false), "No fp32 copies; stochastic rounding", GPU_SETTING},
  {INTEGER("mlp-chunk", "TOKENS", pass.mlp_chunk, 0, MAX), "Compute the MLP in chunks of TOKENS, for long sequences; 0: all at once",
   SETTING | FITTED, "0", NEEDS("recompute", RECOMPUTE_LAYER, "a chunk's activations are dropped, and computed again")},

  {GROUP("Many GPUs (as many ranks as torchrun, mpirun, srun or tools/launch starts; one GPU each)")},
  {CHOICE("zero", dtypes.zero, "0", "1", "2"), "Shard over ranks: 0 nothing, 1 master weights and moments, 2 gradients, too", SAME, "1"},
  {FLAG("vocab-parallel", dtypes.vocab_parallel, true), "Split the head's rows over the ranks: each computes its part of every loss", SAME,
   EXCLUDES("a split head has only the fused mode", "materialized-logits", "compare-modes"),
   NEEDS("zero", 1, "gradients, master weights and moments of the head's rows stay where the rows are")},
  {NUMBER("timeout", "SECONDS", timeout, 1, 1e6), "End the job when no rank has made progress for this many seconds", .initial = "300"},
  {INTEGER("ranks", "N", ranks, 1, 1 << 20), "Plan for N ranks (at most 8 on a host)"},

  {GROUP("Output")},
  {TEXT("log", "FILE", log), "Write JSON lines, the summary last; another run's log is kept as FILE.1. With --plan: each mode's plan"},
  {FLAG("plan", plan, true), "Only print how much memory this run needs, in both modes"},
  {CHOICE("fit", fit, "none", "device", "offload"), "Choose the --batch, --recompute and chunks that fit the device and are fast, where "
   "they are not given; offload: also what to --offload. With --plan the choice is only printed", .initial = "none", .bare = "device"},
  {NUMBER("device-memory", "GIB", device_memory, 1e-6, 1e6), "Pretend the device has GIB of memory; --plan and --fit then need no GPU"},
  {INTEGER("verify-every", "N", verify_every, 0, MAX), "Every N steps run the first micro-batch twice, and end the run if the bits "
   "differ: the device then computes wrongly", OUTPUT_SETTING, "0"},
  {FLAG("compare-modes", compare_modes, true), "Measure both modes after the run and print a table", SAME},
  {FLAG("profile", profile, true), "Print and log a step's time by operations; NVTX ranges for Nsight"},
  {TEXT("timeline", "FILE", timeline),
   "Write the bytes in use over three steps by category, as CSV, waiting for the device each time; an earlier one is kept as FILE.1"},
  {TEXT("dump", "DIR", dump), "Write tokens, losses and gradients of a first step to DIR/first-step"},

  // Other programs' options that none of ours stands for.
  {ELSEWHERE("--dtype takes bf16, the default on a GPU, or fp32", "bf16", "fp16")},
  {ELSEWHERE("nothing is compiled at run time", "compile")},
  {ELSEWHERE("--zero 2 shards all but the weights, and --offload uses the host's memory", "deepspeed", "fsdp")},
  {ELSEWHERE("no layer has dropout", "dropout")},
  {ELSEWHERE("no average of the weights is kept", "ema")},
  {ELSEWHERE("--steps N counts optimizer steps of --total-batch tokens", "epochs", "num-train-epochs")},
  {ELSEWHERE("tools/evaluate --init DIR --val-data PATH evaluates a model", "eval-only")},
  {ELSEWHERE("--total-batch TOKENS sets the tokens per step, over micro-batches", "gradient-accumulation-steps")},
  {ELSEWHERE("all weights are trained", "lora")},
  {ELSEWHERE("--log FILE has every step, and tools/plot_run draws it", "logging-steps", "tensorboard", "wandb")},
  {.type = OPTION_END}};
// clang-format on

const OptionTable options_table = {
    .rows = options_rows,
    .doc = "Trains GPT-2, Llama, Mistral, Qwen, Phi and OLMo in plain C and CUDA. The LM head and the loss "
           "are one fused, chunked operation; --materialized-logits is the baseline.",
    .examples = "\nExamples:\n"
                "  ./train --vocab 128256 --fused-lce\n"
                "  ./train --model llama-8b --seq-len 32768 --batch 1 --device cuda --plan\n"
                "  ./train --model gpt2-124m --data 'train_*.bin' --val-data val.bin --batch 64\n",
    .stray = "paths are given with --data PATH"};
