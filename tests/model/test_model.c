// What a model is: names and shapes as Hugging Face has them, published sizes, where the tensors lie, the
// rotary frequencies, first values, and configurations that are refused. tests/model/test_transformer.c has it
// compute.
#include "data/file.h"
#include "model/model.h"
#include "tests/harness.h"
#include "tests/reference_model.h"

static const ParameterDtypes all_fp32 = {.weight = DTYPE_F32, .grad = DTYPE_F32, .moment = DTYPE_F32};

static ModelConfig small(const char *preset) {
  ModelConfig c = model_preset(preset);
  c.vocab_size = 301;
  c.num_hidden_layers = 2;
  c.max_position_embeddings = 40;
  return c;
}

static int open_cpu(void **state) {
  *state = harness_open("cpu");
  return *state == NULL;
}

static int close_cpu(void **state) {
  harness_close(*state);
  return 0;
}

// --- names, shapes, counts ---------------------------------------------------------------------------------

// The state_dicts of transformers' GPT2LMHeadModel with n_embd 128, n_layer 2, vocab_size 301, n_positions 40, where Conv1D
// weights are [in, out]; and of LlamaForCausalLM with hidden_size 128, intermediate_size 384, 4 heads of 32 over 2 key/value
// heads, 2 layers, vocab_size 301. Every layer has the tensors of layer 0. A tied lm_head, the last, has none of its own.
#define LAYER(l)                                                                                             \
  "transformer.h." l ".ln_1.weight 128 0 transformer.h." l ".ln_1.bias 128 0 "                               \
  "transformer.h." l ".attn.c_attn.weight 128 384 transformer.h." l ".attn.c_attn.bias 384 0 "               \
  "transformer.h." l ".attn.c_proj.weight 128 128 transformer.h." l ".attn.c_proj.bias 128 0 "               \
  "transformer.h." l ".ln_2.weight 128 0 transformer.h." l ".ln_2.bias 128 0 "                               \
  "transformer.h." l ".mlp.c_fc.weight 128 512 transformer.h." l ".mlp.c_fc.bias 512 0 "                     \
  "transformer.h." l ".mlp.c_proj.weight 512 128 transformer.h." l ".mlp.c_proj.bias 128 0 "
static const char gpt2_names[] = "transformer.wte.weight 301 128 transformer.wpe.weight 40 128 " LAYER("0")
    LAYER("1") "transformer.ln_f.weight 128 0 transformer.ln_f.bias 128 0 lm_head.weight 301 128";
#undef LAYER
#define LAYER(l)                                                                                             \
  "model.layers." l ".self_attn.q_proj.weight 128 128 model.layers." l ".self_attn.k_proj.weight 64 128 "    \
  "model.layers." l ".self_attn.v_proj.weight 64 128 model.layers." l ".self_attn.o_proj.weight 128 128 "    \
  "model.layers." l ".mlp.gate_proj.weight 384 128 model.layers." l ".mlp.up_proj.weight 384 128 "           \
  "model.layers." l ".mlp.down_proj.weight 128 384 model.layers." l ".input_layernorm.weight 128 0 "         \
  "model.layers." l ".post_attention_layernorm.weight 128 0 "
static const char llama_names[] = "model.embed_tokens.weight 301 128 " LAYER("0")
    LAYER("1") "model.norm.weight 128 0 lm_head.weight 301 128";

TEST(test_names) {
  static const char *const presets[] = {"gpt2-tiny", "llama-tiny"}, *const lists[] = {gpt2_names,
                                                                                      llama_names};
  for (int i = 0; i < 4; i++) {
    ModelConfig config = small(presets[i / 2]);
    bool tied = config.tie_word_embeddings = i % 2;
    Model model;
    model_create(&model, &config, ((Harness *)*state)->backend, all_fp32, 40);
    int count = 0, length;
    char name[96];
    long long d0, d1;
    for (const char *at = lists[i / 2]; sscanf(at, "%95s %lld %lld%n", name, &d0, &d1, &length) == 3;
         at += length, count++) {
      const Parameter *p = parameters_find(&model.parameters, name);
      if (tied && !strcmp(name, "lm_head.weight")) {
        assert_null(p);
        break;
      }
      if (!p) fail_msg("there is no %s", name);
      assert_int_equal(p->rank, d1 ? 2 : 1);
      assert_true(p->shape[0] == d0 && p->shape[1] == d1);
      assert_true(tensor_same_shape(p->value, p->grad));
      assert_int_equal(tensor_count(p->value), d0 * (d1 ? d1 : 1));
    }
    assert_int_equal(model.parameters.count, count);
    assert_true((model.head.value.data == model.token_embedding.value.data) == tied);
    assert_true((model.head.grad.data == model.token_embedding.grad.data) == tied);
    model_destroy(&model);
  }
}

// The families' names in help and messages, and those of the PyTorch patch, are those of the table.
TEST(test_family_names) {
  char names[256] = "", patch[256] = "MODELS = (";
  for (int f = 0; f < FAMILY_COUNT; f++) {
    const char *name = model_families[f].model_type;
    assert_int_equal(model_families[f].config.family, f);
    strcat(strcat(names, f + 1 == FAMILY_COUNT ? " and " : f ? ", " : ""), name);
    strcat(strcat(strcat(patch, f ? ", \"" : "\""), name), "\"");
  }
  assert_string_equal(names, FAMILY_NAMES);
  size_t length;
  char *text = file_read("tools/torch/lce/modules.py", &length);
  assert_non_null(strstr(text, strcat(patch, ")\n")));
  free(text);
}

TEST(test_published_sizes) {
  static const struct {
    const char *preset;
    int64_t parameters;
  } published[] = {{"gpt2-124m", 124439808},   {"gpt2-350m", 354823168},   {"gpt2-774m", 774030080},
                   {"gpt2-1558m", 1557611200}, {"llama-1b", 1235814400},   {"llama-3b", 3212749824},
                   {"llama-8b", 8030261248},   {"mistral-7b", 7248023552}, {"qwen3-0.6b", 596049920},
                   {"qwen3-1.7b", 1720574976}, {"qwen3-4b", 4022468096}};
  for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
    ModelConfig config = model_preset(published[i].preset);
    assert_string_equal(config.name, published[i].preset);
    assert_int_equal(model_parameter_count(&config), published[i].parameters);
    // The table agrees with the formula, planned: nothing is allocated.
    Backend *plan = plan_backend_create(ON_CUDA, DTYPE_BF16);
    Model model;
    model_create(&model, &config, plan, all_fp32, 1024);
    int64_t count = 0;
    for (int64_t k = 0; k < model.parameters.count; k++)
      count += tensor_count(model.parameters.items[k].value);
    assert_int_equal(count, published[i].parameters);
    model_destroy(&model);
    backend_destroy(plan);
  }
}

// Every preset is complete, and its name is in the list that messages show.
TEST(test_presets) {
  Harness *h = *state;
  char names[256];
  strcpy(names, model_preset_names(""));
  int count = 0;
  for (char *name = strtok(names, ", "); name; name = strtok(NULL, ", "), count++) {
    ModelConfig config = model_preset(name);
    model_config_check(&config);
    assert_true(model_preset_learning_rate(name) > 0 && model_preset_learning_rate(name) < 0.01);
    assert_true(model_default_seq_len(&config) >= 1);
    assert_true(model_default_seq_len(&config) <= config.max_position_embeddings);
  }
  assert_int_equal(count, 13);
  assert_fails(h, "no model preset is called 'gpt5'; there are gpt2-tiny, gpt2-124m", model_preset("gpt5"));
  assert_fails(h, "no model preset is called ''", model_preset_learning_rate(""));
}

// By hand. GPT-2 small: 85.0M weights in GEMMs of the layers, 38.6M in the head; attention 12 * 1024 * 768. Qwen3 0.6B: its
// heads together, 16 * 128, are twice as wide as the stream.
TEST(test_flops) {
  ModelConfig gpt2 = model_preset("gpt2-124m"), qwen = model_preset("qwen3-0.6b");
  double layer = 768.0 * 2304 + 768 * 768 + 2 * 768 * 3072;
  double want = 6 * (12 * layer + 50257.0 * 768) + 6.0 * 12 * 1024 * 768;
  assert_true(fabs(model_flops_per_token(&gpt2, 1024) / want - 1) < 1e-12);
  layer = 1024.0 * 2048 * 2 + 1024.0 * 1024 * 2 + 3 * 1024.0 * 3072;
  want = 6 * (28 * layer + 151936.0 * 1024) + 6.0 * 28 * 512 * 2048;
  assert_true(fabs(model_flops_per_token(&qwen, 512) / want - 1) < 1e-12);
}

// --- where the tensors lie ---------------------------------------------------------------------------------

// q, k and v one after the other are the matrix of one GEMM; so are gate and up.
TEST(test_packing) {
  Harness *h = *state;
  ModelConfig config = small("llama-tiny");
  config.hidden_size = 11; // the parts are not multiples of anything
  config.head_dim = 6;
  config.intermediate_size = 17;
  Model model;
  model_create(&model, &config, h->backend, all_fp32, 40);
  static const struct {
    const char *name;
    int64_t first; // row
  } parts[] = {{"self_attn.q_proj", 0},
               {"self_attn.k_proj", 24},
               {"self_attn.v_proj", 36},
               {"mlp.gate_proj", 0},
               {"mlp.up_proj", 17}};
  const Layer *layer = &model.layers[1];
  assert_string_equal(tensor_text(layer->qkv.weight.value).text, "fp32 [48, 11]");
  assert_string_equal(tensor_text(layer->up.weight.value).text, "fp32 [34, 11]");
  for (int i = 0; i < 5; i++) {
    char name[96];
    snprintf(name, sizeof name, "model.layers.1.%s.weight", parts[i].name);
    const Weight *view = i < 3 ? &layer->qkv.weight : &layer->up.weight;
    const Parameter *p = parameters_find(&model.parameters, name);
    assert_non_null(p);
    assert_ptr_equal(p->value.data, (float *)view->value.data + parts[i].first * 11);
    assert_ptr_equal(p->grad.data, (float *)view->grad.data + parts[i].first * 11);
    assert_int_equal((uintptr_t)view->value.data % 256, 0);
    assert_int_equal((uintptr_t)view->grad.data % 256, 0);
    assert_true(tensor_same_shape(view->value, view->grad));
  }
  assert_false(tensor_exists(model.layers[0].qkv.bias.value));
  assert_false(tensor_exists(model.position_embedding.value));
  model_destroy(&model);
}

// The head alone is in its group; matrices are decayed, norms and biases are not. Tensors fill their group
// without overlapping.
TEST(test_groups) {
  Harness *h = *state;
  static const char *const presets[] = {"gpt2-tiny", "llama-tiny"};
  for (int i = 0; i < 4; i++) {
    ModelConfig config = small(presets[i / 2]);
    config.tie_word_embeddings = i % 2;
    config.hidden_size = 4 * config.head_dim;
    Model model;
    model_create(&model, &config, h->backend, all_fp32, 40);
    const ParameterSet *p = &model.parameters;
    int64_t end[GROUP_COUNT] = {0};
    for (int64_t k = 0; k < p->count; k++) {
      const Parameter *t = &p->items[k];
      bool head = t->value.data == model.head.value.data;
      assert_int_equal(t->group, head ? GROUP_HEAD : t->rank == 2 ? GROUP_MATRICES : GROUP_VECTORS);
      assert_true(t->offset >= end[t->group]);
      assert_true(t->offset < end[t->group] + MEMORY_ALIGNMENT);
      end[t->group] = t->offset + tensor_count(t->value);
      assert_ptr_equal((float *)p->value[t->group].data + t->offset, t->value.data);
    }
    for (int g = 0; g < GROUP_COUNT; g++) {
      assert_true(end[g] <= p->group_elements[g]);
      assert_int_equal(tensor_count(p->value[g]), p->group_elements[g]);
    }
    model_destroy(&model);
  }
}

// The slabs' bytes stand in the ledger under their roles.
TEST(test_roles) {
  ModelConfig config = small("llama-tiny");
  Backend *plan = plan_backend_create(ON_CPU, DTYPE_BF16);
  size_t before = plan->memory.ledger.total;
  Model model;
  model_create(
      &model, &config, plan,
      (ParameterDtypes){.weight = DTYPE_BF16, .master = true, .grad = DTYPE_BF16, .moment = DTYPE_F32}, 40);
  const int64_t *n = model.parameters.group_elements;
  size_t all = (size_t)(n[0] + n[1] + n[2]), rest = (size_t)(n[1] + n[2]);
  const size_t *now = plan->memory.ledger.now;
  assert_int_equal(now[MEMORY_WEIGHTS], memory_padded(2 * all));
  assert_int_equal(now[MEMORY_MASTER_WEIGHTS], memory_padded(4 * all));
  assert_int_equal(now[MEMORY_GRADIENTS], memory_padded(4 * (size_t)n[0] + 2 * rest)); // the head's: fp32
  assert_int_equal(now[MEMORY_MOMENTS], 2 * memory_padded(4 * all));
  assert_int_equal(now[MEMORY_TABLES], 40 * 32 * sizeof(float)); // the rotary angles
  assert_int_equal(plan->memory.ledger.total - before, now[MEMORY_WEIGHTS] + now[MEMORY_MASTER_WEIGHTS] +
                                                           now[MEMORY_GRADIENTS] + now[MEMORY_MOMENTS] +
                                                           now[MEMORY_TABLES]);
  assert_int_equal(model.head.grad.dtype, DTYPE_F32);
  assert_int_equal(model.layers[0].qkv.weight.grad.dtype, DTYPE_BF16);
  model_destroy(&model);
  backend_destroy(plan);
}

// At zero 2 a rank makes the gradients of two layers at a time, and keeps its part of their sums.
TEST(test_sharded_roles) {
  ModelConfig config = small("llama-tiny");
  config.num_hidden_layers = 5;
  Backend *plan = plan_backend_create(ON_CPU, DTYPE_F32);
  plan->ranks = 2;
  Model model;
  ParameterDtypes dtypes = {.weight = DTYPE_F32, .grad = DTYPE_F32, .moment = DTYPE_F32, .zero = 2};
  model_create(&model, &config, plan, dtypes, 40);
  const ParameterSet *p = &model.parameters;
  const int64_t *n = p->group_elements;
  size_t made =
      (size_t)(n[GROUP_HEAD] + p->sharding.before_layers + 2 * p->sharding.layer + n[GROUP_VECTORS]);
  size_t summed = (size_t)(n[GROUP_MATRICES] + n[GROUP_VECTORS]) / 2;
  const size_t *now = plan->memory.ledger.now;
  assert_int_equal(now[MEMORY_GRADIENTS], memory_padded(4 * made) + memory_padded(4 * summed));
  assert_int_equal(now[MEMORY_MOMENTS], 2 * memory_padded(2 * (size_t)(n[0] + n[1] + n[2])));
  model_destroy(&model);
  backend_destroy(plan);
}

// --- rotary frequencies ------------------------------------------------------------------------------------

static void assert_close(double got, double want, double relative) {
  if (!(fabs(got - want) <= relative * fabs(want))) fail_msg("%.9g, should be %.9g", got, want);
}

// D 8, theta 16: plain frequencies 1, 1/2, 1/4, 1/8. Over a context of 44 they turn 44 f / (2 pi) = 7.002817,
// 3.501409, 1.750704 and 0.875352 times. With bounds 1 and 4: the first is kept; the next two are blended
// with shares (turns - 1) / 3 = 0.8338029 and 0.2502347 of the plain one, the rest of an eighth; the
// last, with less than one turn, becomes an eighth.
//   1/2 (0.8338029 + 0.1661971 / 8) = 0.4272888      1/4 (0.2502347 + 0.7497653 / 8) = 0.0859889
TEST(test_rope_scaling_by_hand) {
  ModelConfig config = model_preset("llama-tiny");
  config.head_dim = 8;
  config.rope_theta = 16;
  float inv_freq[4];
  rope_frequencies(&config, inv_freq);
  for (int i = 0; i < 4; i++) assert_close(inv_freq[i], ldexp(1, -i), 1e-7);
  config.rope_scaling = (RopeScaling){.factor = 8}; // linear
  rope_frequencies(&config, inv_freq);
  for (int i = 0; i < 4; i++) assert_close(inv_freq[i], ldexp(1, -i - 3), 1e-7);
  config.rope_scaling = (RopeScaling){
      .factor = 8, .low_freq_factor = 1, .high_freq_factor = 4, .original_max_position_embeddings = 44};
  rope_frequencies(&config, inv_freq);
  static const double want[] = {1, 0.4272888, 0.0859889, 1.0 / 64};
  for (int i = 0; i < 4; i++) assert_close(inv_freq[i], want[i], 1e-6);
}

// Llama 3.2 1B (theta 500000, D 64, factor 32): i = 16 is 500000^-0.5 = 1/707.1068, which turns
// 8192 / (2 pi 707.1068) = 1.843848 times: kept 0.281283, so (0.281283 + 0.718717 / 32) / 707.1068. The
// frequencies from i = 18 on, with wavelengths beyond 8192, are 32 times slower.
TEST(test_rope_table) {
  Harness *h = *state;
  ModelConfig config = model_preset("llama-1b");
  config.vocab_size = 5;
  config.num_hidden_layers = 1;
  config.hidden_size = config.intermediate_size = 4;
  enum { POSITIONS = 37, HALF = 32 };
  Model model;
  model_create(&model, &config, h->backend, all_fp32, POSITIONS);
  double want[HALF], *table = values_of(h, model.rope_angles);
  float inv_freq[HALF];
  rope_frequencies(&config, inv_freq);
  reference_rotary_frequencies(&config, want);
  assert_close(inv_freq[14], pow(500000, -28.0 / 64), 1e-6);
  assert_close(inv_freq[16], 4.295568e-4, 1e-6);
  assert_close(inv_freq[18], pow(500000, -36.0 / 64) / 32, 1e-6);
  for (int i = 0; i < HALF; i++) assert_close(inv_freq[i], want[i], 1e-6);
  assert_string_equal(tensor_text(model.rope_angles).text, "fp32 [37, 64]");
  for (int t = 0; t < POSITIONS; t++)
    for (int i = 0; i < HALF; i++) {
      // The angle is rounded to fp32: its error is half an epsilon of the angle.
      double angle = t * want[i], allowed = 2e-7 * (1 + angle);
      assert_true(fabs(table[t * 2 * HALF + i] - cos(angle)) <= allowed);
      assert_true(fabs(table[t * 2 * HALF + HALF + i] - sin(angle)) <= allowed);
    }
  model_destroy(&model);
}

// --- first values ------------------------------------------------------------------------------------------

// Mean 0 and the standard deviation within 5 standard errors; 68.27% lie within one deviation, 95.45% within
// two.
static void check_normal(const char *name, const double *values, int64_t count, double stddev) {
  double sum = 0, squares = 0, one = 0, two = 0, n = (double)count;
  for (int64_t i = 0; i < count; i++) {
    sum += values[i];
    squares += values[i] * values[i];
    one += fabs(values[i]) < stddev;
    two += fabs(values[i]) < 2 * stddev;
  }
  double error = 5 / sqrt(n);
  if (fabs(sum / n) > error * stddev) fail_msg("%s: the mean is %g", name, sum / n);
  if (fabs(sqrt(squares / n) / stddev - 1) > error / sqrt(2))
    fail_msg("%s: the standard deviation is %g, should be %g", name, sqrt(squares / n), stddev);
  if (fabs(one / n - 0.6827) > error * 0.4655 || fabs(two / n - 0.9545) > error * 0.2084)
    fail_msg("%s: %g and %g of the values lie within one and two deviations", name, one / n, two / n);
}

static void check_constant(const char *name, const double *values, int64_t count, double want) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] != want)
      fail_msg("%s: element %lld is %g, should be %g", name, (long long)i, values[i], want);
}

static void check_first_values(Harness *h, const char *preset, double residual_stddev) {
  ModelConfig config = small(preset);
  Model model;
  model_create(&model, &config, h->backend, all_fp32, 40);
  parameters_initialize(&model.parameters, h->backend, 42);
  int residual_projections = 0;
  for (int64_t i = 0; i < model.parameters.count; i++) {
    const Parameter *p = &model.parameters.items[i];
    double *values = values_of(h, p->value);
    int64_t count = tensor_count(p->value);
    bool into_residual = strstr(p->name, "attn.c_proj.weight") || strstr(p->name, "mlp.c_proj.weight") ||
                         strstr(p->name, "o_proj.weight") || strstr(p->name, "down_proj.weight");
    residual_projections += into_residual;
    if (p->rank == 2)
      check_normal(p->name, values, count, into_residual ? residual_stddev : 0.02);
    else
      check_constant(p->name, values, count, strstr(p->name, ".bias") ? 0 : 1);
    for (int s = 0; s < OPTIMIZER_STATES; s++)
      check_constant(p->name,
                     values_of(h, tensor_rows(model.parameters.state[s][p->group], p->offset, count)), count,
                     0);
  }
  assert_int_equal(residual_projections, 4);
  model_destroy(&model);
}

TEST(test_first_values) {
  check_first_values(*state, "gpt2-tiny", 0.02 / sqrt(2 * 2));
  check_first_values(*state, "llama-tiny", 0.02);
}

// One seed gives one set of bits; another seed gives other bits. No tensor repeats another's draws.
TEST(test_seeds) {
  Harness *h = *state;
  static const uint64_t seeds[] = {7, 7, 8};
  ModelConfig config = small("llama-tiny");
  Model models[3];
  double *group[3][GROUP_COUNT];
  for (int k = 0; k < 3; k++) {
    model_create(&models[k], &config, h->backend, all_fp32, 40);
    parameters_initialize(&models[k].parameters, h->backend, seeds[k]);
    for (int g = 0; g < GROUP_COUNT; g++) group[k][g] = values_of(h, models[k].parameters.value[g]);
  }
  for (int g = 0; g < GROUP_COUNT; g++) {
    size_t bytes = (size_t)models[0].parameters.group_elements[g] * sizeof(double);
    assert_memory_equal(group[0][g], group[1][g], bytes);
    if (g != GROUP_VECTORS) assert_memory_not_equal(group[0][g], group[2][g], bytes);
  }
  double *a = values_of(h, models[0].layers[0].down.weight.value);
  double *b = values_of(h, models[0].layers[1].down.weight.value), dot = 0;
  int64_t count = tensor_count(models[0].layers[0].down.weight.value);
  for (int64_t i = 0; i < count; i++) dot += a[i] * b[i] / (0.02 * 0.02);
  assert_true(fabs(dot) < 5 * sqrt((double)count));
  for (int k = 0; k < 3; k++) model_destroy(&models[k]);
}

// bf16 weights are the rounded master weights, and those are what an fp32 model begins with.
TEST(test_master_weights) {
  Harness *h = *state;
  ModelConfig config = small("gpt2-tiny");
  Model plain, mixed;
  model_create(&plain, &config, h->backend, all_fp32, 40);
  model_create(
      &mixed, &config, h->backend,
      (ParameterDtypes){.weight = DTYPE_BF16, .master = true, .grad = DTYPE_BF16, .moment = DTYPE_BF16}, 40);
  parameters_initialize(&plain.parameters, h->backend, 3);
  parameters_initialize(&mixed.parameters, h->backend, 3);
  for (int64_t i = 0; i < plain.parameters.count; i++) {
    const Parameter *a = &plain.parameters.items[i], *b = &mixed.parameters.items[i];
    double *want = values_of(h, a->value), *rounded = values_of(h, b->value);
    Tensor master = tensor_rows(mixed.parameters.master[b->group], b->offset, parameter_elements(b));
    check_bitwise_equal(h, a->name, tensor_flat(a->value), master);
    assert_false(tensor_exists(plain.parameters.master[a->group]));
    for (int64_t k = 0; k < tensor_count(a->value); k++)
      assert_true(rounded[k] == bf16_to_f32(bf16_from_f32((float)want[k])));
  }
  model_destroy(&plain);
  model_destroy(&mixed);
}

// --- what is no model --------------------------------------------------------------------------------------

static void check_impossible(Harness *h, const ModelConfig *config, const char *sentence) {
  assert_fails(h, sentence, model_config_check(config));
}

TEST(test_impossible_sizes) {
#define SIZE(member)                                                                                         \
  { #member, offsetof(ModelConfig, member) }
  static const struct {
    const char *name;
    size_t offset;
  } sizes[] = {SIZE(vocab_size),
               SIZE(hidden_size),
               SIZE(intermediate_size),
               SIZE(num_hidden_layers),
               SIZE(num_attention_heads),
               SIZE(num_key_value_heads),
               SIZE(head_dim),
               SIZE(max_position_embeddings)};
  static const int64_t values[] = {0, -1, (int64_t)INT32_MAX + 1};
  for (size_t i = 0; i < 3 * sizeof sizes / sizeof *sizes; i++) {
    ModelConfig c = model_preset("llama-tiny");
    int64_t value = *(int64_t *)((char *)&c + sizes[i / 3].offset) = values[i % 3];
    char sentence[96];
    snprintf(sentence, sizeof sentence, "a model cannot have %s %lld; give a whole number from 1",
             sizes[i / 3].name, (long long)value);
    check_impossible(*state, &c, sentence);
  }
}

TEST(test_impossible_combinations) {
  Harness *h = *state;
  static const struct {
    const char *preset;
    int64_t key_value_heads, head_dim, hidden_size; // 0: the preset's
    double epsilon;
    const char *sentence; // NULL: it is possible
  } cases[] = {
      {"llama-tiny", 3, 0, 0, 0, "4 attention heads cannot share 3 key/value heads evenly"},
      {"llama-tiny", 8, 0, 0, 0, "4 attention heads cannot share 8 key/value heads evenly"},
      {"llama-tiny", 0, 31, 0, 0, "head_dim cannot be 31; choose an even --head-dim"},
      {"llama-tiny", 0, 0, 0, 1e30, "a model cannot have norm_epsilon 1e+30; give a number from 1e-30 to 1"},
      {"gpt2-tiny", 2, 0, 0, 0, "GPT-2 has as many key/value heads as attention heads, not 2 and 4"},
      {"gpt2-tiny", 0, 31, 0, 0, "GPT-2's 4 heads of 31 do not make up a hidden size of 128"},
      {"gpt2-tiny", 0, 31, 124, 0, NULL}}; // odd is fine without rotary positions
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ModelConfig c = model_preset(cases[i].preset);
    if (cases[i].key_value_heads) c.num_key_value_heads = cases[i].key_value_heads;
    if (cases[i].head_dim) c.head_dim = cases[i].head_dim;
    if (cases[i].hidden_size) c.hidden_size = cases[i].hidden_size;
    if (cases[i].epsilon > 0) c.norm_epsilon = cases[i].epsilon;
    if (cases[i].sentence)
      check_impossible(h, &c, cases[i].sentence);
    else
      model_config_check(&c);
  }
  ModelConfig llama = model_preset("llama-tiny"), gpt2 = model_preset("gpt2-tiny");
  Model model;
  assert_fails(h, "--seq-len 1025 is longer than the 1024 positions of gpt2-tiny",
               model_create(&model, &gpt2, h->backend, all_fp32, 1025));
  llama.sliding_window = 16;
  assert_fails(h,
               "--seq-len 17 is longer than the sliding window of 16 tokens through which llama-tiny attends",
               model_create(&model, &llama, h->backend, all_fp32, 17));
  gpt2.num_attention_heads = 3;
  assert_fails(h, "3 attention heads cannot share 4 key/value heads",
               model_create(&model, &gpt2, h->backend, all_fp32, 16));
}

int main(void) {
  return tests_run("model", open_cpu, close_cpu);
}
