#include "trainer/options.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "kernels/base/fail.h"
#include "model/checkpoint/hf_config.h"
#include "trainer/option_rows.h"

const char *argp_program_version = "lce.c 0.1";

#define OPTION_VALUES Options
#define MAX           INT32_MAX
#define MAX_STEPS     ((int64_t)1 << 40)
#define DTYPES        "fp32 or bf16"

// clang-format off
const Option options_rows[] = {
    {GROUP("Model (a preset's sizes are the published ones; each can be overridden)")},
    {TEXT("model", "PRESET", preset),
     HELP("gpt2-tiny, -124m, -350m, -774m, -1558m; llama-tiny (default), -1b, -3b, -8b; mistral-7b; "
          "qwen3-0.6b, -1.7b, -4b; olmo2-1b, -7b")},
    {INTEGER("vocab", "V", model.vocab_size, 1, MAX), HELP("Vocabulary size (default the preset's)")},
    {INTEGER("hidden-size", "H", model.hidden_size, 1, MAX), HELP("Width of the residual stream")},
    {INTEGER("intermediate-size", "F", model.intermediate_size, 1, MAX), HELP("Width of the MLP")},
    {INTEGER("num-layers", "L", model.num_hidden_layers, 1, MAX_LAYERS), HELP("Transformer blocks")},
    {INTEGER("num-attention-heads", "Q", model.num_attention_heads, 1, MAX), HELP("Query heads")},
    {INTEGER("num-key-value-heads", "K", model.num_key_value_heads, 1, MAX),
     HELP("Key/value heads (not GPT-2); divides the query heads")},
    {INTEGER("head-dim", "D", model.head_dim, 1, MAX), HELP("Size of a head (default H / Q; Qwen3: 128)")},
    {INTEGER("max-position-embeddings", "P", model.max_position_embeddings, 1, MAX), HELP("Longest sequence")},
    {FLAG("tie-word-embeddings", model.tie_word_embeddings, true), HELP("The head is the token embedding")},
    {FLAG("untie-word-embeddings", model.tie_word_embeddings, false), HELP("The head has its own matrix")},
    {NUMBER("rope-theta", "THETA", model.rope_theta, MIN_ROPE_THETA, MAX_ROPE_THETA),
     HELP("Base of the rotary frequencies (not GPT-2; default the preset's, or what --init says)")},

    {GROUP("Job")},
    {INTEGER("batch", "B", batch, 1, MAX), DEFAULT("4"), .flags = SETTING | FITTED, HELP("Sequences in a micro-batch")},
    {INTEGER("seq-len", "T", seq_len, 1, MAX), .flags = SETTING,
     HELP("Tokens in a sequence (default 256 for tiny models, 1024 for GPT-2, else 2048)")},
    {INTEGER("total-batch", "TOKENS", total_batch, 1, MAX_STEPS), .flags = SETTING,
     HELP("Tokens in an optimizer step, a multiple of ranks x B x T (the default): gradients accumulate")},
    {INTEGER("steps", "N", steps, 0, MAX_STEPS), DEFAULT("100"), .flags = SETTING, HELP("Optimizer steps")},
    {INTEGER("seed", "SEED", seed, 0, 0), DEFAULT("1"), .flags = SETTING, HELP("Of weights and data order")},

    {GROUP("Optimizer (AdamW, or Muon)")},
    {CHOICE("optimizer", "NAME", dtypes.optimizer, "adamw or muon"), DEFAULT("adamw"), .flags = SETTING,
     HELP("adamw, or muon: orthogonalized momentum for the layers' matrices, which then have one moment, and "
          "AdamW for all else; the same rates and decay serve")},
    {NUMBER("lr", "RATE", schedule.peak, 0, 100), .flags = SETTING,
     HELP("Highest learning rate (default the preset's; 2e-5 with --init)")},
    {NUMBER("min-lr", "SHARE", schedule.floor, 0, 1), DEFAULT("0.1"), .flags = SETTING,
     HELP("Share of --lr left at the end, 0 to 1")},
    {INTEGER("warmup", "N", schedule.warmup_steps, 0, MAX_STEPS), .flags = SETTING,
     HELP("Warm-up steps (default a twentieth of --steps)")},
    {CHOICE("schedule", "KIND", schedule.kind, "cosine, linear, constant or wsd"), DEFAULT("cosine"),
     .flags = SETTING, HELP("cosine, linear, constant or wsd")},
    {NUMBER("decay-share", "SHARE", schedule.decay_share, 0, 1), DEFAULT("0.2"), .flags = SETTING,
     NEEDS("schedule wsd", "says when the rate of wsd falls"),
     HELP("wsd: share of the steps after the warm-up in which the rate falls, 0 to 1")},
    {NUMBER("beta1", "B", update.beta1, 0, 0.999999), DEFAULT("0.9"), .flags = SETTING,
     HELP("Decay of the first moment")},
    {NUMBER("beta2", "B", update.beta2, 0, 0.999999), DEFAULT("0.95"), .flags = SETTING,
     HELP("Decay of the second moment")},
    {NUMBER("epsilon", "E", update.epsilon, 1e-30, 1), DEFAULT("1e-8"), .flags = SETTING,
     HELP("Added to the root of the second moment")},
    {NUMBER("momentum", "MU", update.momentum, 0, 0.999999), DEFAULT("0.95"), .flags = SETTING,
     NEEDS("optimizer muon", "is Muon's"), HELP("Decay of Muon's momentum")},
    {NUMBER("weight-decay", "D", update.weight_decay, 0, 100), DEFAULT("0.1"), .flags = SETTING,
     HELP("Decoupled; matrices only, not norms and biases")},
    {NUMBER("grad-clip", "NORM", max_grad_norm, 0, 1e30), DEFAULT("1"), .flags = SETTING,
     HELP("Largest global gradient norm; 0 does not clip")},

    {GROUP("LM head + loss")},
    {FLAG("fused-lce", pass.mode, LCE_FUSED), .flags = SETTING,
     HELP("Fused, chunked lm_head + cross-entropy; gradients in the forward pass (default)")},
    {FLAG("materialized-logits", pass.mode, LCE_MATERIALIZED), .flags = SETTING,
     EXCLUDES("lce-chunk, lce-sample", "chunks and sampling belong to --fused-lce"),
     HELP("Keep the logits of all tokens, to compare with")},
    {INTEGER("lce-chunk", "TOKENS", pass.chunk, 1, MAX), .flags = SETTING | FITTED,
     HELP("Most tokens in a chunk, up to 4096 (default B x T / 9 or 112, the larger; on cuda 1024 or an "
          "eighth); chunks are nearly equal, so that 256 tokens make three of 86")},
    {NUMBER("lce-sample", "M0", pass.sampling.full_mass, 0, 1e6), DEFAULT("0"), .flags = SETTING,
     EXCLUDES("metrics", "sampling knows only the rows' sums, and metrics need more"),
     HELP("Sample the softmax gradient: keep a tile (128 tokens x 192 vocabulary entries) with probability "
          "mass / M0, scaled to leave the expectation unchanged, and skip the rest; 1 skips about nine tiles "
          "of ten; 0 samples nothing. On GPUs other than Hopper, in fp32 on a GPU and with M0 below 1/32 it "
          "would save no time: gradients are exact")},
    {NUMBER("label-smoothing", "EPS", pass.terms.label_smoothing, 0, 1), DEFAULT("0"), .flags = SETTING,
     HELP("Share of every target that is spread over the vocabulary, 0 to 1; validation has none")},
    {NUMBER("z-loss", "LAMBDA", pass.terms.z_loss, 0, 1e6), DEFAULT("0"), .flags = SETTING,
     HELP("Add LAMBDA logsumexp^2 to the training loss, logged apart; PaLM has 1e-4")},
    {NUMBER("logit-softcap", "C", model.final_logit_softcapping, 0, MAX_SOFTCAP),
     HELP("Logits become C tanh(logit / C), as in Gemma 2 (default what --init says, else 0: none)")},
    {FLAG("metrics", metrics, true), .flags = SETTING, HELP("Log accuracy, entropy and largest logit")},

    {GROUP("Data")},
    {LIST("data", "PATH", data),
     HELP("Text (a byte is a token) or llm.c shards (*.bin): file, directory or glob; may be given again "
          "(default: this source tree). Of a directory by tools/prepare_data.py its train_*.bin")},
    {LIST("val-data", "PATH", val_data),
     EXCLUDES("val-fraction", "nothing is held out where there is separate validation data"),
     HELP("Separate validation data (default: val_*.bin of a --data directory by tools/prepare_data.py, else "
          "a held-out part of --data)")},
    {FLAG("other-tokenizer", other_tokenizer, true), .flags = SETTING,
     HELP("Accept shards made with another tokenizer than the one in --init")},
    {CHOICE("data-order", "ORDER", data_order, "shuffled or sequential"), DEFAULT("shuffled"),
     .flags = SETTING, HELP("shuffled, or sequential: windows in file order, one token shared, as in llm.c")},
    {CHOICE("pack", "WHAT", pack, "none or documents"), DEFAULT("none"), .flags = SETTING,
     EXCLUDES("dump, data-order", "packed windows do not follow the files' order"),
     HELP("documents: fill windows with whole documents, each with attention and positions of its own, and "
          "padding; only those longer than --seq-len are cut")},
    {INTEGER("end-of-text", "ID", end_of_text, -1, MAX), DEFAULT("-1"), .flags = SETTING,
     NEEDS("pack documents", "says where documents end, which only --pack documents asks for"),
     HELP("--pack: the token that ends a document; -1: as tools/prepare_data.py wrote, or at files' ends")},
    {NUMBER("val-fraction", "SHARE", val_fraction, 0, 0.999), DEFAULT("0.05"), .flags = SETTING,
     HELP("Part held out for validation, below 1; 0 for none")},
    {INTEGER("eval-every", "N", eval_every, 0, MAX), DEFAULT("50"), .flags = OUTPUT_SETTING,
     HELP("Validate every N steps and at the end; 0 only at the end")},
    {INTEGER("eval-batches", "N", eval_batches, 0, MAX), DEFAULT("8"), .flags = OUTPUT_SETTING,
     HELP("Batches of a validation, spread evenly over all; 0 takes all")},
    {INTEGER("sample-every", "N", sample_every, 0, MAX), DEFAULT("100"), .flags = OUTPUT_SETTING,
     HELP("Show a text sample every N steps; 0 for none")},
    {INTEGER("sample-tokens", "N", generation.max_new_tokens, 1, 1 << 20), DEFAULT("64"), .flags = SAME,
     HELP("Tokens of a sample")},
    {NUMBER("temperature", "T", generation.sampling.temperature, 0, 100), DEFAULT("0.8"), .flags = SAME,
     HELP("Temperature of the samples; 0 takes the likeliest token")},
    {INTEGER("top-k", "K", generation.sampling.top_k, 0, MAX), DEFAULT("0"), .flags = SAME,
     HELP("Samples take one of the K likeliest tokens; 0: of all tokens")},
    {NUMBER("top-p", "P", generation.sampling.top_p, 1e-9, 1), DEFAULT("1"), .flags = SAME,
     HELP("Samples take one of the fewest tokens that together have probability P")},
    {TEXT("tokenizer", "PATH", tokenizer),
     HELP("tokenizer.json, or a folder with one, for samples as text (default the one in --init)")},
    {TEXT("prompt", "PROMPT", prompt),
     HELP("What samples begin with (default a newline): text where a token is a byte, else a shard (*.bin) "
          "or ids such as 15496,995")},

    {GROUP("Checkpoints")},
    {TEXT("init", "DIR", init), EXCLUDES("model", "both say what the model is"),
     HELP("Begin with the Hugging Face model in DIR, in place of --model: " FAMILY_NAMES)},
    {TEXT("save", "DIR", save),
     HELP("Save checkpoints as DIR/step-...; they and DIR open as models in transformers (default with "
          "--resume DIR that DIR, else nothing is saved)")},
    {INTEGER("save-every", "N", save_every, 0, MAX_STEPS), DEFAULT("0"), .flags = OUTPUT_SETTING,
     NEEDS("save DIR", "says when to save, and not where"),
     HELP("Save every N steps and at the end; 0 only at the end")},
    {INTEGER("keep", "M", keep, 0, MAX), DEFAULT("0"), .flags = OUTPUT_SETTING,
     NEEDS("save DIR", "says how many checkpoints to keep, and not where"),
     HELP("Keep the newest M checkpoints; 0 keeps all")},
    {CHOICE("save-dtype", "TYPE", save_dtype, DTYPES), .flags = OUTPUT_SETTING,
     NEEDS("save DIR", "says how to save, and not where"), HELP("fp32 or bf16 weights (default as --dtype)")},
    {TEXT("resume", "WHERE", resume),
     HELP("Resume from a checkpoint, or with auto from the newest whole one in --save, if any, with its "
          "options where none are given; the number of ranks, --zero and --vocab-parallel may differ")},

    {GROUP("Machine and memory")},
    {CHOICE("device", "DEVICE", device, "auto, cpu or cuda"), DEFAULT("auto"),
     HELP("cpu, cuda or auto: the GPU if there is one")},
    {CHOICE("dtype", "TYPE", dtype, DTYPES), .flags = GPU_SETTING | SAME,
     HELP("fp32 or bf16 weights and activations (default bf16 on cuda; the CPU is fp32)")},
    {CHOICE("fp8", "all|layers", dtypes.fp8, "none, all or layers"), BARE("all"), DEFAULT("none"),
     .flags = SETTING,
     HELP("Train with the layers' GEMMs and the fused loss's logits in FP8 (e4m3; cuda from Ada on, in bf16; the "
          "CPU emulates it), or with the layers alone: less exact, 2 bytes more for each weight of one layer and "
          "1 for the head's; sizes are multiples of 16. On GPUs other than Hopper logits stay in bf16")},
    {FLAG("no-fp8", dtypes.fp8, FP8_NONE), HELP("Resume without the checkpoint's --fp8")},
    {CHOICE("grad-dtype", "TYPE", dtypes.grad, DTYPES), .flags = GPU_SETTING,
     HELP("fp32 or bf16 weight gradients (default as --dtype); the head's are fp32")},
    {CHOICE("moment-dtype", "TYPE", dtypes.moment, DTYPES), DEFAULT("fp32"), .flags = GPU_SETTING,
     HELP("fp32 or bf16 optimizer moments")},
    {FLAG("master-weights", dtypes.master, true), .flags = GPU_SETTING,
     HELP("Keep fp32 master weights of bf16 ones (default)")},
    {FLAG("no-master-weights", dtypes.master, false), .flags = GPU_SETTING,
     HELP("Update bf16 weights directly, with stochastic rounding")},
    {CHOICE("recompute", "WHAT", pass.recompute, "none, elementwise, mlp or layer"), DEFAULT("none"),
     .flags = SETTING | FITTED, HELP("Recompute in backward instead of keeping: none, elementwise, mlp or layer")},
    {INTEGER("recompute-layers", "N", pass.recompute_layers, 0, MAX), DEFAULT("0"), .flags = SETTING | FITTED,
     NEEDS("recompute", "says in how many layers to recompute, and not what"),
     HELP("Apply --recompute to the first N layers (0: to all), and one level less to the others: faster")},
    {INTEGER("mlp-chunk", "TOKENS", pass.mlp_chunk, 0, MAX), DEFAULT("0"), .flags = SETTING | FITTED,
     NEEDS("recompute layer", "drops a chunk's activations before the next one"),
     HELP("With --recompute layer: compute the MLP in chunks of so many tokens (0: all), for long texts")},
    {SET("offload", "LIST", dtypes.offload, "weights, gradients, optimizer or activations"),
     HELP("Keep in the host's memory, separated by commas: weights, gradients, optimizer (master weights and "
          "moments), activations (the layers' inputs; with --recompute layer); the same bits, in more time")},

    {GROUP("Many GPUs (as many ranks as torchrun, mpirun, srun or tools/launch starts; one GPU each)")},
    {INTEGER("zero", "LEVEL", dtypes.zero, 0, 2), DEFAULT("1"), .flags = SAME,
     HELP("Sharding over the ranks: 0 nothing, 1 master weights and moments, 2 also gradients")},
    {FLAG("vocab-parallel", dtypes.vocab_parallel, true), .flags = SAME,
     NEEDS("zero 1 or --zero 2",
           "leaves the head's gradients where its rows are, and so its master weights and moments"),
     EXCLUDES("materialized-logits, compare-modes", "a split head has only the fused mode"),
     HELP("Split the head's rows over the ranks: each computes its part of every loss (not with --zero 0)")},
    {NUMBER("timeout", "SECONDS", timeout, 1, 1e6), DEFAULT("300"),
     HELP("End the job when no rank has made progress for so long")},
    {INTEGER("ranks", "N", ranks, 1, 1 << 20), HELP("With --plan or --fit: as if N ranks had been started")},

    {GROUP("Output")},
    {TEXT("log", "FILE", log),
     HELP("Write one JSON object a line, the last the summary; a log of another run is kept as FILE.1. With "
          "--plan: the plan in each mode")},
    {FLAG("plan", plan, true),
     HELP("Only print how much memory this run needs, in both modes; nothing is allocated")},
    {CHOICE("fit", "device|offload", fit, "none, device or offload"), BARE("device"), DEFAULT("none"),
     HELP("Choose the --batch, --recompute and chunks that fit the device and are fast, where they are not given; "
          "offload: also what to --offload. With --plan the choice is only printed")},
    {NUMBER("device-memory", "GIB", device_memory, 1e-6, 1e6),
     HELP("As if the device had no more to give; with --plan or --fit, --device cuda then needs no GPU")},
    {TEXT("dump", "DIR", dump),
     HELP("Write the tokens, losses and gradients of a first step of one micro-batch to DIR/first-step")},
    {FLAG("compare-modes", compare_modes, true), .flags = SAME,
     HELP("Afterwards measure both modes and print the table")},
    {FLAG("profile", profile, true),
     HELP("Print and log a step's time by groups of operations; with NVTX ranges for Nsight Systems")},
    {TEXT("timeline", "FILE", timeline),
     HELP("Write the bytes in use over three steps by category, as CSV; waits for the device each time. An "
          "earlier one is kept as FILE.1")},
    {.type = OPTION_END}};
// clang-format on

bool options_given(const Options *o, const char *name) {
  return o->given[option_row(options_rows, name)];
}

// --- parsing -----------------------------------------------------------------------------------------------

void options_parse(Options *o, const OptionTable *table, int argc, char **argv) {
  // DTYPE_COUNT: not given, until the device is known.
  *o = (Options){.prompt = "\n",
                 .save_dtype = DTYPE_COUNT,
                 .dtype = DTYPE_COUNT,
                 .dtypes = {.grad = DTYPE_COUNT, .master = true}};
  bool given[OPTION_ROWS_MAX] = {false};
  option_table_parse(table, o, given, argc, argv);
  for (int i = 0; table->rows[i].type != OPTION_END; i++)
    if (given[i]) o->given[option_row(options_rows, table->rows[i].name)] = true;
  if (o->val_data || options_given(o, "val-fraction")) return;
  for (int64_t i = 0; i < arrlen(o->data); i++)
    if (manifest_has_validation(o->data[i])) arrput(o->val_data, o->data[i]);
  o->given[option_row(options_rows, "val-data")] = o->val_data != NULL;
}

void options_read(Options *o, int argc, char **argv) {
  static const OptionTable table = {
      .rows = options_rows,
      .doc = "Trains GPT-2, Llama, Mistral, Qwen, Phi and OLMo in plain C and CUDA. LM head and loss are a "
             "fused, chunked linear_cross_entropy; --materialized-logits is there to measure it against.\v"
             "Examples:\n"
             "  ./train --vocab 128256 --fused-lce\n"
             "  ./train --model llama-8b --seq-len 32768 --batch 1 --device cuda --plan\n"
             "  ./train --model gpt2-124m --data 'train_*.bin' --val-data val.bin --batch 64\n",
      .stray = "paths are given with --data PATH"};
  for (int i = 1; i < argc; i++)
    if (!strcmp(argv[i], "--eval-only"))
      fail("--eval-only: a program of its own evaluates a model, tools/evaluate --init DIR --val-data PATH");
  options_parse(o, &table, argc, argv);
  o->trains = true;
}

int64_t options_used_chunk(const Options *o) {
  return lce_used_chunk(o->batch * o->seq_len, o->pass.chunk);
}

// With --compare-modes both modes' plans count the codes, which exist in both.
bool options_fp8_logits(const Options *o) {
  return o->dtypes.fp8 == FP8_ALL && !o->no_sampling && (o->pass.mode == LCE_FUSED || o->compare_modes);
}

const char *options_words(const Options *o, const char *name, char words[64]) {
  option_text(&options_rows[option_row(options_rows, name)], o, words);
  return words;
}

Text options_recompute(const Options *o) {
  char words[64];
  return text_of(o->pass.recompute_layers ? "%s in %lld layers" : "%s", options_words(o, "recompute", words),
                 (long long)o->pass.recompute_layers);
}

void options_free(Options *o) {
  arrfree(o->data);
  arrfree(o->val_data);
  free(o->origin);
  cJSON_Delete(o->resumed_from);
  *o = (Options){0};
}
