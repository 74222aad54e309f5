// Models: published sizes, where tensors lie, rotary angles, first values, and sizes that are refused.
#include "model/model.h"
#include "model/shards.h"
#include "tests/harness.h"

static const ParameterDtypes all_fp32 = {.weight = DTYPE_F32, .grad = DTYPE_F32, .moment = DTYPE_F32};

static ModelConfig small(const char *preset) {
  ModelConfig c = model_preset(preset);
  c.vocab_size = 301;
  c.num_hidden_layers = 2;
  c.max_position_embeddings = 40;
  return c;
}

TEST(test_family_names) {
  char names[256] = "";
  for (int f = 0; f < FAMILY_COUNT; f++) {
    const char *name = model_families[f].model_type;
    assert_int_equal(model_families[f].config.family, f);
    strcat(strcat(names, f + 1 == FAMILY_COUNT ? " and " : f ? ", " : ""), name);
  }
  assert_string_equal(names, FAMILY_NAMES);
}

// Every preset is complete, its name is in the list that messages show, and its size is the published one.
HARNESS_TEST(test_presets) {
  static const struct {
    const char *preset;
    int64_t parameters;
  } published[] = {{"gpt2-124m", 124439808},   {"gpt2-350m", 354823168},   {"gpt2-774m", 774030080},
                   {"gpt2-1558m", 1557611200}, {"llama-1b", 1235814400},   {"llama-3b", 3212749824},
                   {"llama-8b", 8030261248},   {"mistral-7b", 7248023552}, {"qwen3-0.6b", 596049920},
                   {"qwen3-1.7b", 1720574976}, {"qwen3-4b", 4022468096},   {"olmo2-1b", 1484916736},
                   {"olmo2-7b", 7298617344}};
  enum { PUBLISHED = sizeof published / sizeof *published, TINY = 2 };
  char names[256];
  strcpy(names, model_preset_names(""));
  int found = 0, tiny = 0;
  for (char *name = strtok(names, ", "); name; name = strtok(NULL, ", ")) {
    ModelConfig config = model_preset(name);
    model_config_check(&config);
    assert_string_equal(config.name, name);
    assert_true(model_preset_learning_rate(name) > 0 && model_preset_learning_rate(name) < 0.01);
    assert_in_range(model_default_seq_len(&config), 1, config.max_position_embeddings);
    int i = 0;
    while (i < PUBLISHED && strcmp(published[i].preset, name)) i++;
    if (strstr(name, "-tiny")) {
      tiny++;
    } else {
      if (i == PUBLISHED) fail_msg("the number of parameters of preset %s is not in `published`", name);
      assert_int_equal(model_parameter_count(&config), published[i].parameters);
      found++;
    }
  }
  assert_true(found == PUBLISHED && tiny == TINY);
  ModelConfig small = model_preset("llama-1b");
  small.hidden_size = 511;
  assert_int_equal(model_default_seq_len(&small), 256);
  small.hidden_size = 512;
  assert_int_equal(model_default_seq_len(&small), 2048);
  assert_fails(h, "no model preset is called 'gpt5'; there are gpt2-tiny, gpt2-124m", model_preset("gpt5"));
}

// F, K and D follow a change of width or heads, where the family has it so and they are not given.
HARNESS_TEST(test_resized_presets) {
  static const struct {
    const char *preset;
    int64_t hidden, heads;
    ModelConfig given;
    int64_t want[3];
  } cases[] = {{"gpt2-tiny", 128, 4, {.intermediate_size = 7}, {512, 4, 32}}, // unchanged
               {"gpt2-tiny", 96, 2, {.head_dim = 0}, {384, 2, 48}},
               {"gpt2-tiny", 96, 2, {.intermediate_size = 7, .num_key_value_heads = 1}, {512, 4, 48}},
               {"llama-tiny", 96, 2, {.head_dim = 0}, {384, 2, 48}}, // its F and K are its own
               {"llama-tiny", 96, 2, {.head_dim = 5}, {384, 2, 32}},
               {"qwen3-0.6b", 512, 2, {.head_dim = 0}, {3072, 8, 128}}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ModelConfig c = model_preset(cases[i].preset);
    c.hidden_size = cases[i].hidden;
    c.num_attention_heads = cases[i].heads;
    model_resize(&c, &cases[i].given);
    const int64_t *want = cases[i].want;
    if (c.intermediate_size != want[0] || c.num_key_value_heads != want[1] || c.head_dim != want[2])
      fail_msg("case %zu: F %lld, K %lld, D %lld", i, (long long)c.intermediate_size,
               (long long)c.num_key_value_heads, (long long)c.head_dim);
  }
  ModelConfig c = model_preset("llama-tiny");
  c.hidden_size = 97;
  assert_fails(h, "97 does not divide into 4 heads", model_resize(&c, &(ModelConfig){.head_dim = 0}));
}

// GPT-2 small: 85.0M weights in the layers, 38.6M in the head. Qwen3 0.6B: heads twice as wide as the stream.
TEST(test_flops) {
  ModelConfig gpt2 = model_preset("gpt2-124m"), qwen = model_preset("qwen3-0.6b");
  double layer = 768.0 * 2304 + 768 * 768 + 2 * 768 * 3072;
  double want = 6 * (12 * layer + 50257.0 * 768) + 6.0 * 12 * 1024 * 768;
  assert_true(fabs(model_flops_per_token(&gpt2, 1024) / want - 1) < 1e-12);
  layer = 1024.0 * 2048 * 2 + 1024.0 * 1024 * 2 + 3 * 1024.0 * 3072;
  want = 6 * (28 * layer + 151936.0 * 1024) + 6.0 * 28 * 512 * 2048;
  assert_true(fabs(model_flops_per_token(&qwen, 512) / want - 1) < 1e-12);
}

// The head is alone in its group; matrices are decayed, vectors are not; tensors fill groups without overlap.
HARNESS_TEST(test_groups) {
  static const char *const presets[] = {"gpt2-tiny", "llama-tiny"};
  for (int i = 0; i < 4; i++) {
    ModelConfig config = small(presets[i / 2]);
    config.tie_word_embeddings = i % 2;
    config.hidden_size = 4 * config.head_dim;
    Model model;
    model_create(&model, &config, h->backend, all_fp32, 40);
    const ParameterSet *p = &model.parameters;
    const Weight *packed = &model.layers[1].qkv.weight;
    assert_int_equal(((uintptr_t)packed->value.data | (uintptr_t)packed->grad.data) % MEMORY_ALIGNMENT, 0);
    int64_t end[GROUP_COUNT] = {0};
    for (int64_t k = 0; k < p->count; k++) {
      const Parameter *t = &p->items[k];
      bool head = t->value.data == model.head.value.data;
      ParameterGroup matrices = strpbrk(t->name, "0123456789") ? GROUP_MATRICES : GROUP_EMBEDDINGS;
      assert_int_equal(t->group, head ? GROUP_HEAD : t->rank == 2 ? matrices : GROUP_VECTORS);
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

// At zero 2 a rank makes the gradients of two layers at a time, and keeps its part of their sums.
TEST(test_sharded_roles) {
  ModelConfig config = small("llama-tiny");
  config.num_hidden_layers = 5;
  Backend *plan = plan_backend_create(ON_CPU, DTYPE_F32);
  plan->ranks = 2;
  Model model;
  ParameterDtypes dtypes = all_fp32;
  dtypes.zero = 2;
  model_create(&model, &config, plan, dtypes, 40);
  const ParameterSet *p = &model.parameters;
  const int64_t *n = p->group_elements;
  size_t rest = (size_t)(n[GROUP_EMBEDDINGS] + n[GROUP_VECTORS]);
  size_t made = (size_t)(n[GROUP_HEAD] + 2 * p->sharding.layer) + rest;
  size_t summed = ((size_t)n[GROUP_MATRICES] + rest) / 2;
  const size_t *now = plan->memory.ledger.now;
  assert_int_equal(now[MEMORY_GRADIENTS], memory_padded(4 * made) + memory_padded(4 * summed));
  assert_int_equal(now[MEMORY_MOMENTS], 2 * memory_padded(2 * (size_t)(n[0] + n[1] + n[2] + n[3])));
  model_destroy(&model);
  backend_destroy(plan);
}

// A layer above BUCKET_BYTES is cut into equal buckets, so that none reaches into the next layer; slices align.
TEST(test_buckets_of_a_layer) {
  enum { RANKS = 3 };
  ModelConfig config = small("llama-tiny");
  config.hidden_size = 1024, config.num_attention_heads = config.num_key_value_heads = 16;
  config.head_dim = 64, config.intermediate_size = 2730, config.num_hidden_layers = 2;
  for (int muon = 0; muon < 2; muon++) {
    Backend *plan = plan_backend_create(ON_CPU, DTYPE_F32);
    plan->ranks = RANKS;
    Model model;
    ParameterDtypes dtypes = all_fp32;
    dtypes.zero = muon ? 1 : 2, dtypes.optimizer = muon ? OPTIMIZER_MUON : OPTIMIZER_ADAMW;
    model_create(&model, &config, plan, dtypes, 40);
    const ParameterSet *p = &model.parameters;
    int64_t layer = p->sharding.layer, bucket = p->bucket[GROUP_MATRICES];
    assert_true(layer / (RANKS * MEMORY_ALIGNMENT / 2) %
                ceil_div(4 * layer, BUCKET_BYTES)); // not equal as yet
    assert_in_range(bucket, BUCKET_BYTES / 4 / 4, BUCKET_BYTES / 4);
    assert_int_equal(layer % bucket, 0);
    assert_int_equal(bucket % (RANKS * MEMORY_ALIGNMENT / 2), 0);
    model_destroy(&model);
    backend_destroy(plan);
  }
}

static void assert_close(double got, double want, double relative) {
  if (!(fabs(got - want) <= relative * fabs(want))) fail_msg("%.9g, should be %.9g", got, want);
}

// Llama 3.2 1B (theta 500000, D 64, factor 32): i = 16 is 500000^-0.5, which turns 8192 / (2 pi 707.1068) =
// 1.843848 times: kept 0.281283, so (0.281283 + 0.718717 / 32) / 707.1068. From i = 18 on: 32 times slower.
HARNESS_TEST(test_rope_table) {
  ModelConfig config = model_preset("llama-1b");
  config.vocab_size = 5;
  config.num_hidden_layers = 1;
  config.hidden_size = config.intermediate_size = 4;
  enum { POSITIONS = 5003, HALF = 32 };
  Model model;
  size_t tables = h->backend->memory.ledger.now[MEMORY_TABLES];
  model_create(&model, &config, h->backend, all_fp32, POSITIONS);
  // And the gradients' sum of squares.
  assert_int_equal(h->backend->memory.ledger.now[MEMORY_TABLES] - tables,
                   memory_padded(2 * POSITIONS * HALF * sizeof(float)) + memory_padded(sizeof(float)));
  double *table = values_of(h, model.rope_angles);
  float inv_freq[HALF];
  rope_frequencies(&config, inv_freq);
  assert_close(inv_freq[14], pow(500000, -28.0 / 64), 1e-6);
  assert_close(inv_freq[16], 4.295568e-4, 1e-6);
  assert_close(inv_freq[18], pow(500000, -36.0 / 64) / 32, 1e-6);
  assert_string_equal(tensor_text(model.rope_angles).text, "fp32 [5003, 64]");
  for (int t = 0; t < POSITIONS; t++)
    for (int i = 0; i < HALF; i++) {
      double angle = (double)((float)t * inv_freq[i]); // rounded to fp32, as in transformers
      assert_true(table[t * 2 * HALF + i] == (double)(float)cos(angle));
      assert_true(table[t * 2 * HALF + HALF + i] == (double)(float)sin(angle));
    }
  model_destroy(&model);
}

// Mean and standard deviation within 5 standard errors; 68.27% lie within one deviation, 95.45% within two.
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

HARNESS_TEST(test_first_values) {
  check_first_values(h, "gpt2-tiny", 0.02 / sqrt(2 * 2));
  check_first_values(h, "llama-tiny", 0.02);
}

// One seed gives one set of bits; another seed gives other bits. No tensor repeats another's draws.
HARNESS_TEST(test_seeds) {
  static const uint64_t seeds[] = {7, 7, 8};
  ModelConfig config = small("llama-tiny");
  config.tie_word_embeddings = false; // no group is empty
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
HARNESS_TEST(test_master_weights) {
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

enum { PARTS = 3 };
static Model parts[PARTS];
static ParameterGroup gathered; // the group whose first moments are tested

static void gather_parts(Backend *backend, const Collective *a) {
  for (int part = 0; part < PARTS; part++) {
    const char *mine = parts[0].parameters.state[0][gathered].data;
    const char *theirs = parts[part].parameters.state[0][gathered].data;
    memcpy((char *)a->out.data + (size_t)part * tensor_bytes(a->x), theirs + ((char *)a->x.data - mine),
           tensor_bytes(a->x));
  }
}

// The address of an element of a group: buckets are cut from the end, and each into a slice for each rank.
static float *element_of(ParameterGroup group, int64_t element) {
  const ParameterSet *p = &parts[0].parameters;
  int64_t total = p->group_elements[group], bucket = p->bucket[group];
  int64_t end = total - (total - 1 - element) / bucket * bucket, first = end > bucket ? end - bucket : 0;
  int64_t slice = (end - first) / PARTS, part = (element - first) / slice;
  return (float *)parts[part].parameters.state[0][group].data + first / PARTS + (element - first) % slice;
}

// Elements [first, stop) of a parameter are written by all ranks, and read; no other one changes.
static void check_range(Backend *backend, const Parameter *t, int64_t first, int64_t stop) {
  static float values[4096], read[4096];
  ParameterGroup g = gathered = t->group;
  for (int64_t i = first; i < stop; i++) values[i - first] = (float)(1 + i);
  int64_t changed = 0;
  for (int part = 0; part < PARTS; part++) {
    const ParameterSet *p = &parts[part].parameters;
    Tensor x = p->state[0][g];
    memset(x.data, 0, tensor_bytes(x));
    shards_write(p, backend, p->state[0], t, first, stop - first, values);
    for (int64_t i = 0; i < tensor_count(x); i++) changed += ((float *)x.data)[i] != 0;
  }
  assert_int_equal(changed, stop - first);
  for (int64_t i = first; i < stop; i++) assert_true(*element_of(g, t->offset + i) == (float)(1 + i));
  memset(read, 0, sizeof read);
  shards_read(&parts[0].parameters, backend, parts[0].parameters.state[0], t, first, stop - first, read);
  assert_memory_equal(read, values, (size_t)(stop - first) * sizeof *read);
}

// The first moments of a model over PARTS ranks; `bucket` elements a bucket, but for a split head.
static void make_parts(Backend *b, const ModelConfig *config, bool split, int64_t bucket) {
  ParameterDtypes dtypes = all_fp32;
  dtypes.zero = 1, dtypes.vocab_parallel = split;
  for (b->ranks = PARTS, b->rank = PARTS; b->rank-- > 0;) {
    Model *m = &parts[b->rank];
    model_create(m, config, b, dtypes, 16);
    for (int g = split; g < GROUP_COUNT; g++) m->parameters.bucket[g] = bucket;
  }
  b->rank = 0;
}

// Ranges that begin and end at and beside every slice's end, with buckets of a few hundred elements; and in a
// split head that is gathered in pieces.
HARNESS_TEST(test_shards_of_every_range) {
  Backend *b = h->backend;
  ModelConfig config = small("llama-tiny");
  config.vocab_size = 90, config.hidden_size = 24, config.intermediate_size = 40, config.head_dim = 8;
  config.num_attention_heads = 3, config.num_key_value_heads = 1, config.tie_word_embeddings = false;
  const BackendOps *real = b->ops;
  BackendOps ops = *real;
  ops.all_gather = gather_parts;
  b->ops = &ops;
  const ParameterSet *p = &parts[0].parameters;
  for (int split = 0; split < 2; split++) {
    make_parts(b, &config, split, (split ? 1 : 5) * PARTS * 128);
    for (const Parameter *t = p->items; t < p->items + p->count; t++)
      for (int64_t i = 0, n = parameter_elements(t), ends = 3 * (n / 128 + 2); i < ends * ends; i++) {
        int64_t a = i / ends, z = i % ends, first = a / 3 * 128 + a % 3 - 1, stop = z / 3 * 128 + z % 3 - 1;
        if (first >= 0 && first < stop && stop <= n) check_range(b, t, first, stop);
      }
    for (int part = 0; part < PARTS; part++) model_destroy(&parts[part]);
  }
  config.vocab_size = 400000;
  make_parts(b, &config, true, PARTS * 128);
  for (int part = 0; part < PARTS - 1; part++) {
    int64_t end = part * p->group_elements[GROUP_HEAD] / PARTS + BUCKET_BYTES / 4 / PARTS; // of a piece
    check_range(b, &p->items[p->count - 1], end - 2, end + 2);
  }
  for (int part = 0; part < PARTS; part++) model_destroy(&parts[part]);
  b->ops = real, b->ranks = 1;
}

// With an odd H a rank's rows of a split head are a multiple of 128: of 256 the third rank of three has none.
HARNESS_TEST(test_a_head_that_cannot_be_split) {
  ModelConfig config = small("llama-tiny");
  config.vocab_size = 256, config.hidden_size = 33, config.tie_word_embeddings = false;
  Backend *plan = plan_backend_create(ON_CPU, DTYPE_F32);
  plan->ranks = 3, plan->rank = 2;
  ParameterDtypes dtypes = all_fp32;
  dtypes.zero = 1, dtypes.vocab_parallel = true;
  Model model;
  assert_fails(h, "a vocabulary of 256, in parts of 128, cannot be split over 3 ranks",
               model_create(&model, &config, plan, dtypes, 40));
  config.vocab_size++;
  model_create(&model, &config, plan, dtypes, 40);
  assert_int_equal(model.parameters.sharding.head_rows.size, 1);
  model_destroy(&model);
  backend_destroy(plan);
}

TEST(test_impossible_sizes) {
  ModelConfig c = {0};
  static const char *const names[] = {
      "vocab_size",          "hidden_size",         "intermediate_size", "num_hidden_layers",
      "num_attention_heads", "num_key_value_heads", "head_dim",          "max_position_embeddings"};
  int64_t *const sizes[] = {
      &c.vocab_size,          &c.hidden_size,         &c.intermediate_size, &c.num_hidden_layers,
      &c.num_attention_heads, &c.num_key_value_heads, &c.head_dim,          &c.max_position_embeddings};
  static const int64_t values[] = {0, -1, (int64_t)INT32_MAX + 1};
  for (int i = 0; i < 3 * 8; i++) {
    c = model_preset("llama-tiny");
    int64_t value = *sizes[i / 3] = values[i % 3];
    char sentence[96];
    snprintf(sentence, sizeof sentence, "a model cannot have %s %lld; give a whole number from 1",
             names[i / 3], (long long)value);
    Reason reason = {""};
    if (model_config_possible(&c, &reason) || !strstr(reason.text, sentence))
      fail_msg("\"%s\" is not \"%s\"", reason.text, sentence);
  }
}

// Which the options have refused before; a caller of the library may not have.
HARNESS_TEST(test_models_that_cannot_be_created) {
  ModelConfig config = model_preset("gpt2-tiny");
  Model model;
  assert_fails(h, "--seq-len 1025 is longer than the 1024 positions of gpt2-tiny",
               model_create(&model, &config, h->backend, all_fp32, 1025));
  config.num_attention_heads = 3;
  assert_fails(h, "3 attention heads cannot share 4 key/value heads",
               model_create(&model, &config, h->backend, all_fp32, 16));
}

TEST_MAIN(run_on_backend("cpu"))
