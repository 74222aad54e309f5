#include "trainer/resume.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fail.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/files.h"
#include "model/checkpoint/json.h"

// --- finding -----------------------------------------------------------------------------------------------

static char *copy_of(const char *path) {
  char *copy = strdup(path);
  if (!copy) fail("out of host memory for the path %s", path);
  return copy;
}

static char *find_checkpoint(const Options *o, FolderCheck check) {
  bool automatic = !strcmp(o->resume, "auto");
  if (automatic && !o->save) fail("--resume auto looks for checkpoints in --save DIR; give that too");
  bool any;
  const char *directory = automatic ? o->save : o->resume;
  char *found = checkpoint_newest(directory, check, &any);
  if (!found && any) fail("--resume: no checkpoint in %s is intact; delete them to begin anew", directory);
  if (found || automatic) return found;
  checkpoint_require_intact(o->resume, check, true);
  return copy_of(o->resume);
}

void resume_find(Options *o) {
  FolderCheck check = o->plan || o->fit ? CHECK_LENGTHS : CHECK_ALL;
  if (!o->save && (o->save_every || o->keep)) fail("--save-every and --keep need --save DIR");
  if (o->resume) o->origin = find_checkpoint(o, check);
  if (o->origin) {
    o->resumed_from = checkpoint_trainer_state(o->origin);
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(o->resumed_from, "step");
    if (!json_is_whole(step)) fail("%s/trainer_state.json has no step", o->origin);
    o->first_step = (int64_t)step->valuedouble;
  } else if (o->init) {
    checkpoint_require_intact(o->init, check, false);
    o->origin = copy_of(o->init);
  }
}

// --- settings ----------------------------------------------------------------------------------------------

static void put_whole(cJSON *settings, const char *name, int64_t value) {
  char text[32];
  snprintf(text, sizeof text, "%lld", (long long)value);
  cJSON_AddStringToObject(settings, name, text);
}

static void put_number(cJSON *settings, const char *name, double value) {
  char text[40];
  snprintf(text, sizeof text, "%.17g", value);
  cJSON_AddStringToObject(settings, name, text);
}

cJSON *resume_settings(const Options *o) {
  cJSON *s = cJSON_CreateObject();
  put_whole(s, "seed", (int64_t)o->seed);
  put_whole(s, "batch", o->batch);
  put_whole(s, "seq-len", o->seq_len);
  put_whole(s, "total-batch", o->total_batch);
  put_whole(s, "steps", o->steps);
  cJSON_AddStringToObject(s, "schedule", schedule_name(o->schedule.kind));
  put_number(s, "lr", o->schedule.peak);
  put_number(s, "min-lr", o->schedule.floor);
  put_whole(s, "warmup", o->schedule.warmup_steps);
  put_number(s, "beta1", o->beta1);
  put_number(s, "beta2", o->beta2);
  put_number(s, "epsilon", o->epsilon);
  put_number(s, "weight-decay", o->weight_decay);
  put_number(s, "grad-clip", o->max_grad_norm);
  put_number(s, "val-fraction", o->val_fraction);
  cJSON_AddStringToObject(s, o->mode == LCE_FUSED ? "fused-lce" : "materialized-logits", "");
  if (o->mode == LCE_FUSED) put_whole(s, "lce-chunk", o->lce_chunk);
  put_number(s, "label-smoothing", o->label_smoothing);
  put_number(s, "z-loss", o->z_loss);
  if (o->lce_filter > 0) put_number(s, "lce-filter", o->lce_filter);
  if (o->metrics) cJSON_AddStringToObject(s, "metrics", "");
  cJSON_AddStringToObject(s, "recompute", recompute_name(o->recompute));
  return s;
}

// And what follows from the machine where it is not given: taken up where a GPU's run goes on on a GPU.
static cJSON *all_settings(const Options *o) {
  cJSON *s = resume_settings(o);
  cJSON_AddStringToObject(s, "dtype", dtype_name(o->dtype));
  cJSON_AddStringToObject(s, "grad-dtype", dtype_name(o->dtypes.grad));
  cJSON_AddStringToObject(s, "moment-dtype", dtype_name(o->dtypes.moment));
  if (o->dtype == DTYPE_BF16)
    cJSON_AddStringToObject(s, o->dtypes.master ? "master-weights" : "no-master-weights", "");
  return s;
}

// --- the state ---------------------------------------------------------------------------------------------

static void put_loss(cJSON *json, const char *name, double value) {
  cJSON_AddItemToObject(json, name, isnan(value) ? cJSON_CreateNull() : cJSON_CreateNumber(value));
}

static cJSON *paths(const char **list, int64_t count) {
  return cJSON_CreateStringArray(list, (int)count);
}

cJSON *resume_write(const Options *o, const RunState *state) {
  cJSON *json = cJSON_CreateObject();
  cJSON_AddNumberToObject(json, "step", (double)state->step);
  cJSON_AddStringToObject(json, "device", o->on_cuda ? "cuda" : "cpu");
  put_loss(json, "first_loss", state->first_loss);
  put_loss(json, "last_loss", state->last_loss);
  put_loss(json, "val_loss", state->val_loss);
  cJSON_AddItemToObject(json, "settings", all_settings(o));
  cJSON_AddStringToObject(json, "data", state->data);
  cJSON_AddItemToObject(json, "data_paths", paths(o->data, o->data_count));
  cJSON_AddItemToObject(json, "val_data_paths", paths(o->val_data, o->val_data_count));
  return json;
}

static const char *text_of(const cJSON *item) {
  return cJSON_IsString(item) ? item->valuestring : NULL;
}

static double loss_of(const cJSON *json, const char *name) {
  const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);
  return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static void compare(const Options *o, const cJSON *then) {
  cJSON *now = all_settings(o);
  const cJSON *item;
  cJSON_ArrayForEach(item, now) {
    const char *before = text_of(cJSON_GetObjectItemCaseSensitive(then, item->string));
    if (!before)
      warn("--%s is new since %s was saved: the run goes on, but not as it would have", item->string,
           o->origin);
    else if (strcmp(before, item->valuestring))
      warn("--%s was %s when %s was saved and is %s now: the run goes on, but not as it would have",
           item->string, before, o->origin, item->valuestring);
  }
  const char *filter = text_of(cJSON_GetObjectItemCaseSensitive(then, "lce-filter"));
  if (filter && o->lce_filter == 0) // then it is no setting, and was not met above
    warn("--lce-filter was %s when %s was saved and is 0 now: the run goes on, but not as it would have",
         filter, o->origin);
  if (cJSON_GetObjectItemCaseSensitive(then, "metrics") && !o->metrics)
    warn("--metrics was given when %s was saved and is not now: the log goes on without", o->origin);
  cJSON_Delete(now);
}

RunState resume_read(const Options *o, const char *data) {
  const cJSON *json = o->resumed_from;
  const char *before = text_of(cJSON_GetObjectItemCaseSensitive(json, "data"));
  if (!o->eval_only) compare(o, cJSON_GetObjectItemCaseSensitive(json, "settings"));
  if (!o->eval_only && before && strcmp(before, data))
    warn("the data were \"%s\" when %s was saved and are \"%s\" now: the run goes on, but not as it would "
         "have",
         before, o->origin, data);
  return (RunState){.step = o->first_step,
                    .first_loss = loss_of(json, "first_loss"),
                    .last_loss = loss_of(json, "last_loss"),
                    .val_loss = loss_of(json, "val_loss"),
                    .data = data};
}
