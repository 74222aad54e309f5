#include "data/corpus.h"
#include "base/alloc.h"
#include "base/fail.h"

#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool is_source_tree(const char *directory) {
  char marker[PATH_MAX + 32];
  snprintf(marker, sizeof marker, "%s/data/corpus.h", directory);
  return access(marker, R_OK) == 0;
}

// Writes the root of the checkout into `root`.
static void find_root(char root[PATH_MAX]) {
  ssize_t length = readlink("/proc/self/exe", root, PATH_MAX - 1);
  root[length > 0 ? length : 0] = 0;
  for (char *slash; (slash = strrchr(root, '/'));) {
    *slash = 0;
    if (is_source_tree(root)) return;
  }
  if (!getcwd(root, PATH_MAX) || !is_source_tree(root))
    fail("the built-in corpus is the source tree, and neither the program nor the current directory lies in "
         "one: "
         "name text with --data");
}

static bool is_corpus_file(const char *name, bool is_directory) {
  static const char *const endings[] = {".c", ".h", ".cu", ".cuh", ".py", ".sh", ".md"};
  if (is_directory) return strcmp(name, "runs") != 0;
  if (strcmp(name, "Makefile") == 0 || strcmp(name, "LICENSE") == 0) return true;
  const char *ending = strrchr(name, '.');
  for (size_t i = 0; ending && i < sizeof endings / sizeof *endings; i++)
    if (strcmp(ending, endings[i]) == 0) return true;
  return false;
}

Source *corpus_open(int64_t vocab_size) {
  char root[PATH_MAX], name[PATH_MAX + 32];
  find_root(root);
  snprintf(name, sizeof name, "the source tree %s", root);
  FileList files = {0};
  file_list_add_directory(&files, root, is_corpus_file);
  Source *source = source_open_files(&files, name, vocab_size);
  file_list_free(&files);
  return source;
}

double corpus_entropy(const Source *source) {
  enum { BLOCK = 4096 };
  int64_t vocab_size = source->vocab_size;
  int64_t total = source->tokens < CORPUS_ENTROPY_SAMPLE ? source->tokens : CORPUS_ENTROPY_SAMPLE;
  int64_t *counts = host_alloc(vocab_size, sizeof *counts, "the counts of tokens");
  for (int64_t first = 0; first < total; first += BLOCK) {
    int32_t ids[BLOCK];
    int64_t count = total - first < BLOCK ? total - first : BLOCK;
    source_read(source, first, count, ids);
    for (int64_t i = 0; i < count; i++) counts[ids[i]]++;
  }
  double entropy = 0;
  for (int64_t id = 0; id < vocab_size; id++) {
    double p = (double)counts[id] / (double)total;
    if (p > 0) entropy -= p * log(p);
  }
  free(counts);
  return entropy;
}
