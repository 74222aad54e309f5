#include "trainer/resume.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "data/json.h"
#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/integers.h"
#include "kernels/ranks/ranks.h"
#include "model/checkpoint/hf_config.h"
#include "trainer/report.h"

// Some rows are settings only where they have an effect.
static bool has_effect(const Options *o, const char *name) {
  if (!strcmp(name, "lce-chunk")) return o->pass.mode == LCE_FUSED;
  if (!strcmp(name, "master-weights") || !strcmp(name, "no-master-weights"))
    return o->dtypes.weight == DTYPE_BF16;
  if (!strcmp(name, "save-dtype")) return options_given(o, name); // else it follows --dtype
  return true;
}

// Adds the settings of these flags that have an effect, but flags that are not set.
static void add_settings(cJSON *object, const Options *o, unsigned flags) {
  for (const Option *row = options_rows; row->type != OPTION_END; row++) {
    if (!(row->flags & flags) || !has_effect(o, row->name)) continue;
    Text text = option_text(row, o);
    if (*text.text) cJSON_AddStringToObject(object, row->name, text.text);
  }
}

static void take_paths(const char ***list, const Options *o, const char *member) {
  cJSON *item, *paths = cJSON_GetObjectItemCaseSensitive(o->resumed_from, member);
  bool good = !paths || cJSON_IsArray(paths);
  cJSON_ArrayForEach(item, paths) {
    const char *path = json_bytes(item);
    good &= path != NULL;
    if (path) arrput(*list, path);
  }
  if (!good)
    fail("%s/trainer_state.json: %s is no list of paths; name the data with --data and --val-data", o->origin,
         member);
}

// A setting in a checkpoint; NULL: it has none. Older ones have "" for flags, of which --fp8 was one.
static const char *saved_text(const cJSON *settings, const Option *row) {
  const char *text = json_text(settings, row->name);
  return !text || *text ? text : row->type == OPTION_FLAG ? row->bare : "layers";
}

// A setting's value as a message has it, also for a flag that is not set or a checkpoint without the option.
static const char *value_words(const Option *row, const char *text) {
  return text && *text ? text : row->initial ? row->initial : "not set";
}

static _Noreturn void refuse_setting(const Options *o, const Option *row, const Reason *reason) {
  fail("%s/trainer_state.json: the setting %s is wrong: %s; give --%s here, or name another checkpoint",
       o->origin, row->name, reason->text, row->name);
}

static void take_settings(Options *o) {
  const cJSON *settings = json_member(o->resumed_from, "settings");
  bool from_gpu = json_is(o->resumed_from, "device", "cuda"), dtypes_given = false;
  for (int i = 0; options_rows[i].type != OPTION_END; i++) {
    const Option *row = &options_rows[i];
    const char *then = value_words(row, saved_text(settings, row));
    if (o->given[i] && !strcmp(row->name, "optimizer") && strcmp(option_text(row, o).text, then))
      fail("%s holds the state of --optimizer %s, which %s cannot continue; leave out --optimizer, or "
           "give --init in place of --resume to start from the weights alone",
           o->origin, then, option_text(row, o).text);
    unsigned taken = SETTING | OUTPUT_SETTING | (from_gpu ? GPU_SETTING : 0);
    bool open = o->fit && row->flags & FITTED;
    const cJSON *item = row->flags & taken && !o->given[i] && !open ? json_member(settings, row->name) : NULL;
    const char *value = item ? saved_text(settings, row) : NULL;
    Reason reason = {"it is no text"};
    if (item && !value) refuse_setting(o, row, &reason);
    dtypes_given |= row->flags & GPU_SETTING && o->given[i];
    if (!value || !option_possible(options_rows, o, o->given, row, &reason)) continue;
    if (!option_set(row, o, value, &reason)) refuse_setting(o, row, &reason);
    o->given[i] = true;
  }
  o->dtypes_from_gpu = from_gpu && !dtypes_given;
  if (!o->data && !o->val_data) take_paths(&o->val_data, o, "val_data_paths");
  if (!o->data) take_paths(&o->data, o, "data_paths");
}

static char *find_checkpoint(Options *o) {
  bool automatic = !strcmp(o->resume, "auto");
  if (automatic && !o->save)
    fail("--resume auto looks for checkpoints in --save DIR, so give --save as well");
  bool any;
  const char *directory = automatic ? o->save : o->resume;
  bool contents = !o->plan; // a plan reads no weights
  char *found = checkpoint_newest(directory, contents, &any);
  if (!found && any) fail("--resume: no checkpoint in %s is whole; delete them to start over", directory);
  if (found && !o->save) o->save = o->resume; // it goes on where it was
  if (found || automatic) return found;
  checkpoint_require_whole(o->resume, contents);
  return text_format("%s", o->resume);
}

// Without MPI a rank that only plans ends, and the others wait for it.
static void require_same_work(const Options *o) {
  int32_t plans = o->plan, first = plans;
  ranks_broadcast(&first, sizeof first);
  if (first != plans)
    fail("rank 0 %s --plan and this rank %s; give all ranks the same options",
         first ? "has" : "does not have", plans ? "has it" : "does not");
}

void resume_find(Options *o) {
  require_same_work(o);
  if (o->resume && o->init && strcmp(o->resume, "auto"))
    fail("--init begins with the model in %s and --resume with the checkpoint in %s; give one of them, or "
         "--resume auto to begin with --init where --save has no checkpoint yet",
         o->init, o->resume);
  if (o->resume) o->origin = find_checkpoint(o);
  if (o->origin) {
    o->resumed_from = checkpoint_trainer_state(o->origin);
    const cJSON *step = json_member(o->resumed_from, "step");
    if (!json_is_whole(step)) fail("%s/trainer_state.json has no step", o->origin);
    o->first_step = (int64_t)step->valuedouble;
    take_settings(o);
  } else if (o->init) {
    o->origin = text_format("%s", o->init);
    if (!o->plan) checkpoint_require_weights(o->origin);
  }
}

// Writes each member on a line, and deletes the object.
static void print_members(FILE *out, cJSON *json) {
  const cJSON *item;
  cJSON_ArrayForEach(item, json) {
    char *value = json_print(item, false);
    fprintf(out, "\"%s\":%s\n", item->string, value);
    free(value);
  }
  cJSON_Delete(json);
}

// Describes all that ranks must have alike.
static char *describe_run(const Options *o, const char *data) {
  char *description, *config = hf_config_write(&o->model, o->save_dtype, NULL);
  size_t size;
  FILE *out = open_memstream(&description, &size);
  if (!out) fail("out of host memory for a description of the run");
  print_members(out, cJSON_Parse(config));
  cJSON *job =
      log_object((const LogField[]){NUM("first step", o->first_step),
                                    NUM("weights", o->origin ? checkpoint_weights_checksum(o->origin) : 0),
                                    STR("data", data),
                                    STR("prompt", o->prompt),
                                    NUM("save", o->save != NULL),
                                    NUM("dump", o->dump != NULL),
                                    {0}});
  add_settings(job, o, SETTING | GPU_SETTING | OUTPUT_SETTING | SAME);
  print_members(out, job);
  fclose(out);
  free(config);
  return description;
}

void resume_require_same(const Options *o, Backend *backend, const char *data) {
  if (o->ranks == 1) return;
  char *mine = describe_run(o, data);
  int32_t length = (int32_t)strlen(mine), size = length;
  machine_broadcast(backend, &size, sizeof size); // rank 0's
  size = (int32_t)round_up(size + 1, 4);
  char *theirs = host_alloc(size, 1, "what all ranks must have alike");
  memcpy(theirs, mine, (size_t)min_i64(size, length));
  machine_broadcast(backend, theirs, (size_t)size);
  size_t at = 0, line = 0;
  for (; mine[at] && mine[at] == theirs[at]; at++)
    if (mine[at] == '\n') line = at + 1;
  const char *here = mine[line] ? mine + line : "nothing", *there = theirs[line] ? theirs + line : "nothing";
  if (mine[at] != theirs[at])
    fail("all ranks must see the same options, checkpoints and data, and this one has %.*s where rank 0 has "
         "%.*s",
         (int)strcspn(here, "\n"), here, (int)strcspn(there, "\n"), there);
  free(mine);
  free(theirs);
}

static cJSON *paths(const char **list) {
  cJSON *array = cJSON_CreateArray();
  for (int64_t i = 0; i < arrlen(list); i++) cJSON_AddItemToArray(array, json_string(list[i]));
  return array;
}

static cJSON *state_json(const Options *o, const RunState *state, DeviceKind device, int64_t step,
                         const RunData *data) {
  cJSON *settings = cJSON_CreateObject();
  DataPlace at = loader_place(&data->loader, step, o->total_batch / o->seq_len);
  const LogField place[] = {NUM("pass", at.pass), NUM("tokens", at.tokens), STR("order", data->order), {0}};
  add_settings(settings, o, SETTING | GPU_SETTING | OUTPUT_SETTING);
  return log_object((const LogField[]){NUM("step", step),
                                       STR("device", device_name(device)),
                                       NUM("first_loss", state->first_loss),
                                       NUM("last_loss", state->last_loss),
                                       NUM("val_loss", state->val_loss),
                                       NUM("val_step", state->val_step),
                                       NUM("skipped_steps", state->skipped),
                                       {"place", .item = log_object(place)},
                                       {"settings", .item = settings},
                                       STR("data", data->text),
                                       {"data_paths", .item = paths(o->data)},
                                       {"val_data_paths", .item = paths(o->val_data)},
                                       {0}});
}

static double saved_loss(const cJSON *json, const char *name) {
  const cJSON *item = json_member(json, name);
  return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

static void warn_of_changes(const Options *o, const char *data) {
  const cJSON *then = json_member(o->resumed_from, "settings");
  const char *data_then = json_text(o->resumed_from, "data");
  for (const Option *row = options_rows; row->type != OPTION_END; row++) {
    bool opposite = row->type == OPTION_FLAG && !row->min; // of a flag that is compared
    if (!(row->flags & (SETTING | GPU_SETTING)) || opposite || !has_effect(o, row->name)) continue;
    Text text = option_text(row, o);
    const char *before = value_words(row, saved_text(then, row)), *now = value_words(row, text.text);
    if (strcmp(before, now))
      warn("--%s was %s when %s was saved and is %s now: the run continues, but not as it would have",
           row->name, before, o->origin, now);
  }
  if (data_then && strcmp(data_then, data))
    warn("the data were \"%s\" when %s was saved and are \"%s\" now: the run continues, but not as it would "
         "have",
         data_then, o->origin, data);
}

Checkpoints resume_open(const Options *o, Backend *backend, const RunData *data) {
  const cJSON *json = o->resumed_from, *val_step = json_member(json, "val_step"),
              *skipped = json_member(json, "skipped_steps");
  Checkpoints c = {.saved_step = json ? o->first_step : -1,
                   .state = {.first_loss = saved_loss(json, "first_loss"),
                             .last_loss = saved_loss(json, "last_loss"),
                             .val_loss = saved_loss(json, "val_loss"),
                             .val_step = json_is_whole(val_step) ? (int64_t)val_step->valuedouble : -1,
                             .skipped = json_is_whole(skipped) ? (int64_t)skipped->valuedouble : 0}};
  if (json) warn_of_changes(o, data->text);
  if (o->save && ranks_self()->rank == 0) {
    // From the newest whole checkpoint there: those after it are damaged.
    bool newest = o->resumed_from && (!strcmp(o->resume, "auto") || !strcmp(o->resume, o->save));
    const char *tokenizer = o->tokenizer || !*data->prepared.text ? o->tokenizer : data->prepared.text;
    c.store = checkpoint_store_open(o->save, o->origin, tokenizer, o->keep, c.saved_step, newest);
    c.saved_step = c.store.last_step; // -1 if that checkpoint is in another folder
  }
  if (o->save) machine_broadcast(backend, &c.saved_step, sizeof c.saved_step);
  c.store.dtype = o->save_dtype;
  return c;
}

bool resume_save(Checkpoints *c, const Options *o, const Model *model, Backend *backend, int64_t step,
                 const RunData *data) {
  Reason reason;
  cJSON *json = state_json(o, &c->state, backend->device, step, data);
  int32_t saved = checkpoint_save(&c->store, model, backend, step, json, &reason);
  if (!saved) warn("no checkpoint after step %lld: %s", (long long)step, reason.text);
  machine_broadcast(backend, &saved, sizeof saved); // rank 0's counts
  if (saved) c->saved_step = step;
  cJSON_Delete(json);
  return saved;
}
