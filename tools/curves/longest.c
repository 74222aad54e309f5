#include "tools/curves/longest.h"

#include <stdio.h>

#include "base/text.h"
#include "tools/curves/table.h"
#include "trainer/plan.h"

int longest_plan(const Experiment *e, Longest all[LONGEST_MAX]) {
  const double given = (double)e->memory / 0x1p30, usual[] = {24, 48, 80};
  int count = 0;
  for (int k = 0; k < (given > 0 ? 1 : 3); k++)
    for (int i = 0; i < 4; i++) {
      Longest *l = &all[count++];
      *l = (Longest){.memory_gib = given > 0 ? given : usual[k], .offload = i / 2, .mode = i % 2};
      Options o = *e->options;
      o.dtypes.offload = l->offload ? OFFLOAD_PARAMETERS | OFFLOAD_ACTIVATIONS : 0;
      l->seq_len = plan_largest_seq_len(&o, e->device, (LceMode)l->mode, bytes_from_gib(l->memory_gib));
      o = plan_with_shape(&o, e->device, o.batch, l->seq_len ? l->seq_len : 1);
      Ledger plan = plan_run(&o, e->device, (LceMode)l->mode);
      l->planned_bytes = plan.peak;
      l->host_bytes = ledger_host_bytes(&plan);
    }
  return count;
}

static Text tokens_cell(int64_t seq_len) {
  return seq_len ? text_grouped(seq_len) : (Text){"none"};
}

void longest_print(const Experiment *e, const Longest *all, int count) {
  const Options *o = e->options;
  printf("the longest sequence of %s at --batch %lld, planned\n", o->model.name, (long long)o->batch);
  printf("  %8s  %-12s %12s %14s %7s  %s\n", "memory", "offloaded", "fused", "materialized", "ratio",
         "on the host, fused");
  for (const Longest *fused = all; fused < all + count; fused += 2) {
    const Longest *logits = fused + 1;
    Label ratio = {"-"};
    if (logits->seq_len) ratio = label("%.2f", (double)fused->seq_len / (double)logits->seq_len);
    printf("  %4g GiB  %-12s %12s %14s %7s  %s\n", fused->memory_gib, fused->offload ? "all" : "nothing",
           tokens_cell(fused->seq_len).text, tokens_cell(logits->seq_len).text, ratio.text,
           fused->seq_len && fused->host_bytes ? text_bytes(fused->host_bytes).text : "-");
  }
}

void longest_write(const Longest *all, int count, const Curve *settings, const char *path) {
  static const char *const choices[] = {"nothing", "all", NULL};
  const Column columns[] = {{COLUMN(Longest, memory_gib), .number = true},
                            {.name = "offloaded", .offset = offsetof(Longest, offload), .values = choices},
                            {COLUMN(Longest, mode), .values = MODE_NAMES},
                            {COLUMN(Longest, seq_len), .optional = true},
                            {COLUMN(Longest, planned_bytes)},
                            {COLUMN(Longest, host_bytes), .optional = true}};
  Table table = {"longest sequences", columns, sizeof columns / sizeof *columns, sizeof *all};
  table_write(&table, path, settings->settings, all, count);
}
