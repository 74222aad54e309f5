// The loader: which tokens stand in which batch.
#include "data/loader.h"
#include "kernels/base/random.h"
#include "tests/data_files.h"

#include <stb/stb_ds.h>

// A training batch of rank 0 of 1 without micro-steps.
static int64_t train_batch(const Loader *loader, int64_t step, int32_t *tokens, int32_t *targets) {
  return loader_train_batch(loader, step, 0, 1, tokens, targets, NULL);
}

static Loader open_loader(const Source *source, double validation_fraction, int64_t batch, int64_t seq_len,
                          uint64_t seed) {
  return loader_create((LoaderOptions){.source = source,
                                       .validation_fraction = validation_fraction,
                                       .batch = batch,
                                       .seq_len = seq_len,
                                       .seed = seed});
}

// A whole row of a counting source: consecutive tokens, targets one further. Returns its first position.
static int64_t assert_row(const int32_t *tokens, const int32_t *targets, int64_t seq_len) {
  for (int64_t t = 0; t < seq_len; t++) {
    assert_int_equal(tokens[t], tokens[0] + t);
    assert_int_equal(targets[t], tokens[t] + 1);
  }
  return tokens[0];
}

// Rows that begin at first, first + step, ...
static void assert_rows(const int32_t *tokens, const int32_t *targets, int64_t rows, int64_t seq_len,
                        int64_t first, int64_t step) {
  for (int64_t row = 0; row < rows; row++)
    assert_int_equal(assert_row(tokens + row * seq_len, targets + row * seq_len, seq_len),
                     first + row * step);
}

static void assert_padding(const int32_t *tokens, const int32_t *targets, int64_t from, int64_t to) {
  for (int64_t i = from; i < to; i++) assert_true(tokens[i] == 0 && targets[i] == IGNORED_TARGET);
}

// Marks the positions of a row's window, which none before it had.
static void mark_row(char *seen, const int32_t *tokens, const int32_t *targets, int64_t seq_len) {
  int64_t first = assert_row(tokens, targets, seq_len);
  for (int64_t p = first; p <= first + seq_len; p++) assert_int_equal(seen[p]++, 0);
}

static void mark_inputs(char *seen, const int32_t *tokens, const int32_t *targets, int64_t seq_len) {
  int64_t first = assert_row(tokens, targets, seq_len);
  for (int64_t p = first; p < first + seq_len; p++) assert_int_equal(seen[p]++, 0);
}

TEST(no_position_is_trained_on_twice_or_validated) {
  enum { B = 4 };
  const int64_t lengths[] = {1, 3, 7, 16}, sizes[] = {34, 35, 100, 257, 1000};
  const double fractions[] = {0, 0.01, 0.05, 0.3, 0.99};
  for (int i = 0; i < 5 * 4 * 5; i++) {
    int64_t size = sizes[i / 20], T = lengths[i / 5 % 4], n = size / (T + 1), unseen = 0;
    Source *source = open_counting("counting.bin", size);
    Loader loader = open_loader(source, fractions[i % 5], 1, T, 7),
           wide = open_loader(source, fractions[i % 5], B, T, 7);
    int64_t held_back = llround(fractions[i % 5] * (double)n);
    if (fractions[i % 5] > 0) held_back = held_back < 1 ? 1 : held_back < n ? held_back : n - 1;
    assert_int_equal(loader.validation_windows, held_back);
    assert_int_equal(loader.train_windows, n - held_back);
    assert_int_equal(wide.validation_batches, (held_back + B - 1) / B);
    char *seen = calloc((size_t)size, 1);
    int32_t tokens[B * 16], targets[B * 16];
    for (int64_t w = 0; w < loader.train_windows; w++) {
      assert_int_equal(train_batch(&loader, w, tokens, targets), T);
      mark_row(seen, tokens, targets, T);
    }
    for (int64_t b = 0; b <= wide.validation_batches; b++) { // the last one is padded, the next one padding
      int64_t counted = loader_validation_batch(&wide, b, 0, tokens, targets, NULL);
      for (int64_t at = 0; at < counted; at += T) mark_row(seen, tokens + at, targets + at, T);
      assert_padding(tokens, targets, counted, B * T);
    }
    for (int64_t p = 0; p < size; p++) unseen += !seen[p];
    assert_int_equal(unseen, size % (T + 1));
    free(seen);
    source_close(source);
  }
}

// The first positions of `count` training windows from number 0, in batches of B.
static void collect(const Loader *loader, int64_t count, int64_t *firsts) {
  int64_t B = loader->options.batch, T = loader->options.seq_len;
  int32_t *tokens = malloc((size_t)(B * T) * sizeof *tokens),
          *targets = malloc((size_t)(B * T) * sizeof *targets);
  for (int64_t i = 0; i < count; i++) {
    if (i % B == 0) assert_int_equal(train_batch(loader, i / B, tokens, targets), B * T);
    firsts[i] = assert_row(tokens + i % B * T, targets + i % B * T, T);
  }
  free(tokens);
  free(targets);
}

static int compare_values(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

TEST(every_epoch_is_another_permutation) {
  enum { EPOCHS = 4, WINDOWS = 42 }; // 50 windows of 5 tokens, 8 held back; batches of 5 straddle the epochs
  Source *source = open_counting("counting.bin", 253);
  int64_t firsts[2][EPOCHS * WINDOWS], sorted[EPOCHS][WINDOWS];
  for (uint64_t seed = 0; seed < 2; seed++) {
    Loader loader = open_loader(source, 0.16, 5, 4, seed);
    assert_int_equal(loader.train_windows, WINDOWS);
    assert_int_equal(loader.validation_windows, 8);
    assert_int_equal(loader.validation_batches, 2);
    collect(&loader, EPOCHS * WINDOWS, firsts[seed]);
    for (int e = 0; e < EPOCHS; e++) {
      memcpy(sorted[e], firsts[seed] + e * WINDOWS, sizeof sorted[e]);
      qsort(sorted[e], WINDOWS, sizeof sorted[e][0], compare_values);
      for (int i = 1; i < WINDOWS; i++) assert_int_not_equal(sorted[e][i], sorted[e][i - 1]);
      assert_memory_equal(sorted[e], sorted[0], sizeof sorted[0]);
      for (int other = 0; other < e; other++)
        assert_memory_not_equal(firsts[seed] + e * WINDOWS, firsts[seed] + other * WINDOWS, sizeof sorted[0]);
    }
  }
  assert_memory_not_equal(firsts[0], firsts[1], sizeof firsts[0]);
  // The windows held back do not depend on the seed: both seeds trained on the same ones.
  qsort(firsts[0], WINDOWS, sizeof firsts[0][0], compare_values);
  assert_memory_equal(firsts[0], sorted[0], sizeof sorted[0]);
  source_close(source);
}

TEST(the_order_has_no_history_and_does_not_change) {
  Source *source = open_counting("counting.bin", 1000);
  Loader loader = open_loader(source, 0.05, 3, 9, 1337), again = open_loader(source, 0.05, 3, 9, 1337);
  int32_t tokens[3 * 9], targets[3 * 9], later[3 * 9], later_targets[3 * 9];
  train_batch(&loader, 17, tokens, targets);
  for (int64_t step = 0; step <= 17; step++) train_batch(&again, step, later, later_targets);
  assert_memory_equal(tokens, later, sizeof tokens);
  assert_memory_equal(targets, later_targets, sizeof targets);
  // These very windows: a checkpoint resumed under a newer program must meet the data it would have met.
  const int64_t known[] = {620, 410, 810, 800, 190, 670, 630, 440};
  int64_t firsts[8];
  collect(&loader, 8, firsts);
  for (int i = 0; i < 8; i++) assert_int_equal(firsts[i], known[i]);
  train_batch(&loader, INT64_C(1) << 50, tokens, targets);
  for (int row = 0; row < 3; row++) assert_row(tokens + row * 9, targets + row * 9, 9);
  source_close(source);
}

TEST(ranks_and_micro_steps_share_one_order) {
  enum { B = 2, M = 3, R = 4, T = 5, STEPS = 7, ROW = B * T };
  Source *source = open_counting("counting.bin", 611);
  Loader loader = open_loader(source, 0.1, B, T, 3), wide = open_loader(source, 0.1, B * M * R, T, 3);
  for (int64_t step = 0; step < STEPS; step++) {
    int32_t all[M * R * ROW], all_targets[M * R * ROW];
    assert_int_equal(train_batch(&wide, step, all, all_targets), M * R * ROW);
    for (int64_t i = 0; i < M * R; i++) {
      int32_t tokens[ROW], targets[ROW];
      assert_int_equal(loader_train_batch(&loader, step, i, M * R, tokens, targets, NULL), ROW);
      assert_memory_equal(tokens, all + i * ROW, sizeof tokens);
      assert_memory_equal(targets, all_targets + i * ROW, sizeof targets);
    }
  }
  source_close(source);
}

TEST(a_validation_source_is_predicted_once_throughout) {
  enum { B = 3, T = 4 };
  Source *source = open_counting("counting.bin", 50);
  for (int64_t count = 2; count <= 40; count++) {
    Source *own = open_counting("own.bin", count);
    Loader loader = loader_create((LoaderOptions){
        .source = source, .validation_source = own, .validation_fraction = 0.5, .batch = B, .seq_len = T});
    assert_int_equal(loader.train_windows, 10);
    assert_int_equal(loader.validation_windows, (count - 1 + T - 1) / T);
    int64_t next = 1;
    for (int64_t index = 0; index < loader.validation_batches + 2; index++) {
      int32_t tokens[B * T], targets[B * T];
      int64_t counted = loader_validation_batch(&loader, index, 0, tokens, targets, NULL);
      assert_int_equal(counted > 0, index < loader.validation_batches);
      for (int64_t i = 0; i < counted; i++) {
        assert_int_equal(targets[i], next++);
        assert_int_equal(tokens[i], targets[i] - 1);
      }
      assert_padding(tokens, targets, counted, B * T);
    }
    assert_int_equal(next, count);
    // Some of the batches: windows spread evenly over all, in order.
    for (int64_t batches = 1; batches < loader.validation_batches; batches++)
      for (int64_t row = 0, rows = batches * B, windows = loader.validation_windows; row < rows; row++) {
        int32_t tokens[B * T], targets[B * T];
        loader_validation_batch(&loader, row / B, batches, tokens, targets, NULL);
        int64_t window = tokens[row % B * T] / T, middle = (2 * row + 1) * windows / (2 * rows);
        assert_true(window >= middle - 1 && window <= middle + 1);
        assert_int_equal(tokens[row % B * T], window * T);
      }
    source_close(own);
  }
  source_close(source);
}

TEST(the_smallest_sources_suffice_and_smaller_ones_do_not) {
  Source *one = open_counting("one.bin", 9), *two = open_counting("two.bin", 16);
  LoaderOptions options = {.source = one, .batch = 2, .seq_len = 8, .seed = 0};
  Loader loader = loader_create(options);
  assert_int_equal(loader.train_windows, 1);
  assert_int_equal(loader.validation_batches, 0);
  int32_t tokens[16], targets[16];
  for (int64_t step = 0; step < 3; step++) {
    assert_int_equal(train_batch(&loader, step, tokens, targets), 16);
    assert_rows(tokens, targets, 2, 8, 0, 0);
  }
  options.validation_fraction = 0.05;
  ASSERT_FAILS(loader_create(options), "one.bin holds 9 tokens", "one training and one validation window",
               "8 + 1", "needs 18", "--val-data");
  options.source = two;
  options.seq_len = 7;
  loader = loader_create(options);
  assert_true(loader.train_windows == 1 && loader.validation_windows == 1);
  options.seq_len = 8;
  ASSERT_FAILS(loader_create(options), "two.bin holds 16 tokens", "needs 18");
  options.seq_len = 16;
  options.validation_fraction = 0;
  ASSERT_FAILS(loader_create(options), "two.bin holds 16 tokens", "one window of --seq-len 16", "needs 17");
  write_shard32("single.bin", (const uint32_t[]){0}, 1);
  Source *single = open_one("single.bin", 16);
  options.seq_len = 7;
  options.validation_source = single;
  ASSERT_FAILS(loader_create(options), "single.bin holds 1 token", "at least 2", "--val-data");
  source_close(single);
  source_close(two);
  source_close(one);
}

TEST(the_description_names_the_data) {
  Source *source = open_counting("counting.bin", 20000);
  Loader loader = open_loader(source, 0.05, 1, 9, 0);
  char line[256];
  loader_describe(&loader, line, sizeof line);
  assert_string_equal(
      line, "llm.c shards, uint32, 1 file, 20,000 tokens; 1,900 training and 100 validation windows "
            "of 9; checksum 3789884e");
  char small[8];
  loader_describe(&loader, small, sizeof small);
  assert_string_equal(small, "llm.c s");
  source_close(source);
}

// One token, early, late or of the validation data, changes the checksum; of long data a sample is read.
TEST(the_checksum_shows_changed_data) {
  const int32_t many = 10 << 20;
  const long places[] = {0, many / 2, many - 1};
  write_sparse_shard16("many.bin", many);
  write_sparse_shard16("few.bin", 100);
  char before[256], after[256];
  for (int i = 0; i < 4; i++) {
    for (int changed = 0; changed < 2; changed++) {
      if (changed) put_token16(i < 3 ? "many.bin" : "few.bin", i < 3 ? places[i] / 4096 * 4096 : 50, 7);
      Source *source = open_one("many.bin", 50257), *val_source = open_one("few.bin", 50257);
      Loader loader = loader_create(
          (LoaderOptions){.source = source, .validation_source = val_source, .batch = 1, .seq_len = 9});
      loader_describe(&loader, changed ? after : before, sizeof before);
      source_close(source);
      source_close(val_source);
    }
    assert_string_not_equal(before, after);
    assert_int_equal(strlen(before), strlen(after));
  }
}

// Rank r reads B rows of T tokens from (s R + r) B T on, in step s; held back is the file's end.
TEST(sequential_windows_overlap_by_a_token) {
  enum { T = 7, B = 2, RANKS = 3, STEPS = 2 };
  Source *source = open_counting("counting.bin", 141); // 20 windows and the last one's target
  LoaderOptions options = {.source = source,
                           .validation_fraction = 0.2,
                           .batch = B,
                           .seq_len = T,
                           .seed = 7,
                           .order = ORDER_SEQUENTIAL};
  Loader loader = loader_create(options);
  assert_int_equal(loader.train_windows, 16);
  assert_int_equal(loader.validation_windows, 4);
  int32_t tokens[B * T], targets[B * T];
  for (int64_t i = 0; i < STEPS * RANKS; i++) {
    assert_int_equal(loader_train_batch(&loader, i / RANKS, i % RANKS, RANKS, tokens, targets, NULL), B * T);
    assert_rows(tokens, targets, B, T, i * B * T, T);
  }
  assert_int_equal(train_batch(&loader, 8, tokens, targets), B * T);
  assert_rows(tokens, targets, B, T, 0, T); // the second epoch is as the first
  for (int64_t i = 0; i < 2; i++) {
    assert_int_equal(loader_validation_batch(&loader, i, 0, tokens, targets, NULL), B * T);
    assert_rows(tokens, targets, B, T, (16 + i * B) * T, T);
  }
  source_close(source);
  options.source = source = open_counting("counting.bin", 7);
  ASSERT_FAILS(loader_create(options), "needs 15");
  options.validation_fraction = 0;
  ASSERT_FAILS(loader_create(options), "holds 7 tokens and one window of --seq-len 7 + 1 tokens needs 8");
  source_close(source);
}

// A pass that goes on, in sequential order with another T, has every token once; then the next one begins.
TEST(a_pass_goes_on_where_it_was) {
  enum { COUNT = 613, MOST = 16, STEP = 7 };
  Source *source = open_counting("counting.bin", COUNT);
  for (int i = 0; i < 600; i++) {
    bool shuffled = i % 3 == 0;
    DataPlace place = {i % 5, 0};
    char seen[COUNT] = {0}, order[2][256];
    int64_t T = 0, next = 0, read = 0, tokens_read = 0;
    for (int part = 0; part < 2; part++) {
      if (!part || !shuffled) T = 1 + (int64_t)(random_bits(1, (uint64_t)part, (uint64_t)i) % MOST);
      Loader loader = loader_create((LoaderOptions){.source = source,
                                                    .batch = 1,
                                                    .seq_len = T,
                                                    .seed = 3,
                                                    .order = shuffled ? ORDER_SHUFFLED : ORDER_SEQUENTIAL});
      loader_describe_order(&loader, order[part], sizeof order[part]);
      place.tokens += shuffled ? i % T : 0; // an earlier version may have had another T
      loader_start(&loader, STEP, place);
      int64_t windows = 0, stop = (int64_t)(random_bits(2, 0, (uint64_t)i) % (uint64_t)loader.train_windows);
      for (; (part || windows < stop) && loader_place(&loader, STEP + windows, 1).pass == i % 5; windows++) {
        int32_t tokens[MOST], targets[MOST];
        train_batch(&loader, STEP + windows, tokens, targets);
        mark_inputs(seen, tokens, targets, T);
        if (!shuffled) assert_int_equal(tokens[0], next);
        next = tokens[0] + T;
      }
      place = loader_place(&loader, STEP + windows, 1);
      read += windows, tokens_read += windows * T;
      if (!part) assert_true(place.pass == i % 5 && place.tokens == windows * T);
      if (part) assert_true(place.pass == i % 5 + 1 && place.tokens == 0);
      if (part) assert_true(shuffled ? read == loader.train_windows : COUNT - 1 - tokens_read < 2 * T);
    }
    assert_string_equal(order[0], order[1]);
  }
  source_close(source);
}

// Documents of drawn lengths, many of 1 and 2 tokens and some longer than a window, in tokens that count up.
static Source *open_documents(int64_t count, int64_t longest, int64_t *tokens) {
  uint8_t bits[4096] = {0};
  *tokens = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t length =
        1 + (int64_t)(random_bits(3, (uint64_t)longest, (uint64_t)i) % (uint64_t)(i % 3 ? longest : 3));
    *tokens += length;
    bits[(*tokens - 1) / 8] |= (uint8_t)(1 << (*tokens - 1) % 8);
  }
  write_shard("packed.ends", 20261121, 1, (int32_t)*tokens, bits, (size_t)(*tokens + 7) / 8);
  return open_counting("packed.bin", *tokens);
}

// Checks a row against the ends, and marks the inputs it holds; returns how many.
static int64_t check_packed_row(const int64_t *ends, const int32_t *tokens, const int32_t *targets,
                                const int32_t *before, const int32_t *after, int64_t T, char *seen) {
  int64_t filled = 0;
  while (filled < T && targets[filled] != IGNORED_TARGET) filled++;
  for (int64_t t = filled; t < T; t++)
    assert_true(tokens[t] == 0 && targets[t] == IGNORED_TARGET && before[t] == 0 && after[t] == 0);
  for (int64_t t = 0; t < filled; t++) {
    int64_t end = 0; // of the token's document
    while (ends[end] <= tokens[t]) end++;
    assert_int_equal(targets[t], tokens[t] + 1);
    assert_true(targets[t] < ends[end]);
    assert_int_equal(seen[tokens[t]]++, 0);
    // A document, or the piece of it, begins where it says, and follows the one before.
    assert_true(before[t] ? before[t] == before[t - 1] + 1 && tokens[t] == tokens[t - 1] + 1
                          : t == 0 || after[t - 1] == 0);
    assert_true(after[t] ? t + 1 < filled && after[t + 1] == after[t] - 1 && before[t + 1] : true);
    int64_t start = end ? ends[end - 1] : 0;
    if (!before[t])
      assert_int_equal((tokens[t] - start) % T, 0); // only documents of more than T pairs are cut
    if (!after[t]) assert_true(targets[t] == ends[end] - 1 || (tokens[t] + 1 - start) % T == 0);
  }
  return filled;
}

TEST(packed_windows_hold_every_pair_once) {
  enum { B = 3, MAX_T = 70 };
  static const int64_t lengths[] = {1, 2, 16, 63, 64, MAX_T}, longest[] = {10, 40, 150};
  for (int k = 0; k < 3; k++)
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
      int64_t count = 100, T = lengths[l], sizes;
      Source *source = open_documents(count, longest[k], &sizes);
      int64_t *ends = source_document_ends(source, -1);
      assert_int_equal(arrlen(ends), count);
      assert_int_equal(ends[count - 1], sizes);
      source_pack(source, T, -1);
      const Packing *packing = &source->packing;
      Loader loader = open_loader(source, 0.2, B, T, 5), again = open_loader(source, 0.2, 1, T, 5);
      int32_t tokens[B * MAX_T], targets[B * MAX_T], documents[2 * B * MAX_T], same[B * MAX_T];
      char *seen = calloc((size_t)sizes, 1);
      int64_t pairs = 0, counted = 0;
      for (int64_t i = 0; i < loader.validation_batches; i++) {
        counted += loader_validation_batch(&loader, i, 0, tokens, targets, documents);
        for (int64_t n = 0; n < B; n++)
          pairs += check_packed_row(ends, tokens + n * T, targets + n * T, documents + n * T,
                                    documents + (B + n) * T, T, seen);
      }
      assert_true(pairs > 0);
      for (int64_t i = 0; i < loader.train_windows; i++) { // an epoch, window by window
        counted += loader_train_batch(&again, i, 0, 1, tokens, targets, documents);
        pairs += check_packed_row(ends, tokens, targets, documents, documents + T, T, seen);
        train_batch(&loader, i / B, same, targets); // as a row of any batch, from any step on
        assert_memory_equal(same + i % B * T, tokens, (size_t)T * sizeof *same);
      }
      assert_int_equal(pairs, sizes - count); // no document's last token is an input
      assert_int_equal(pairs, packing->pairs);
      assert_int_equal(counted, pairs);
      int half_empty = 0; // windows: of two, one would not have been begun
      for (int64_t w = 0; w < packing->windows; w++) {
        int64_t filled = 0;
        for (int64_t p = packing->starts[w]; p < packing->starts[w + 1]; p++)
          filled += packing->pieces[p].length;
        half_empty += 2 * filled <= T;
      }
      assert_in_range(half_empty, 0, 1);
      free(seen);
      arrfree(ends);
      source_close(source);
    }
}

// Best fit, the longest first: 7+3 and 6+2+2 fill windows of 10.
TEST(documents_fit_best) {
  enum { T = 10, COUNT = 5 };
  static const int pairs[COUNT] = {2, 3, 7, 2, 6};
  uint32_t tokens[COUNT * (T + 1)];
  int32_t n = 0;
  for (int i = 0; i < COUNT; i++)
    for (int k = 0; k <= pairs[i]; k++) tokens[n++] = k == pairs[i] ? 99 : (uint32_t)i;
  write_shard32("fits.bin", tokens, n);
  Source *source = open_one("fits.bin", 100);
  ASSERT_FAILS(source_pack(source, T, -1), "fits.bin does not say where documents end", "--end-of-text");
  source_pack(source, T, 99);
  const Packing *packing = &source->packing;
  assert_int_equal(packing->windows, 2);
  assert_int_equal(packing->documents, COUNT);
  assert_int_equal(packing->pairs, 2 * T);
  static const int of_window[2][3] = {{3, 7}, {2, 2, 6}}; // in the order of the stream
  for (int64_t w = 0, i = 0; w < 2; w++) {
    assert_int_equal(packing->starts[w], i);
    for (int k = 0; k < 3 && of_window[w][k]; k++)
      assert_int_equal(packing->pieces[i++].length, of_window[w][k]);
    assert_int_equal(packing->starts[w + 1], i);
  }
  char line[256];
  loader_describe(&(Loader){.options = {.source = source, .seq_len = T}, .train_windows = 2}, line,
                  sizeof line);
  assert_non_null(
      strstr(line, "2 training and 0 validation windows of 10, packed from 5 documents with 0.00% padding"));
  source_close(source);
  source = open_one("fits.bin", 100);
  source_pack(source, 64, 99);
  ASSERT_FAILS(open_loader(source, 0.1, 1, 64, 0), "fits.bin holds 5 documents",
               "fits into 1 window of --seq-len 64", "one training and one validation window",
               "name more data");
  source_close(source);
  write_shard32("ones.bin", (const uint32_t[]){9, 9, 9}, 3);
  source = open_one("ones.bin", 10);
  source_pack(source, T, 9);
  assert_int_equal(source->packing.windows, 0);
  ASSERT_FAILS(open_loader(source, 0, 1, T, 0), "ones.bin holds 3 documents", "0 windows");
  source_close(source);
}

TEST_MAIN(tests_run("loader", make_temp_dir, remove_temp_dir))
