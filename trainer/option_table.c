#include "trainer/option_table.h"

#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "kernels/base/alloc.h"
#include "kernels/base/fail.h"
#include "kernels/base/text.h"

// --- values ------------------------------------------------------------------------------------------------

// The length of the word at `list`; *next is the one after it, in "a, b or c".
static size_t word_length(const char *list, const char **next) {
  size_t length = strcspn(list, ", ");
  *next = list + length + strspn(list + length, ", ");
  if (!strncmp(*next, "or ", 3)) *next += 3;
  return length;
}

// The place of a word in a list; -1: absent.
static int place_in(const char *list, const char *text, size_t length) {
  int place = 0;
  for (const char *word = list, *next; *word; word = next, place++)
    if (word_length(word, &next) == length && !strncmp(word, text, length)) return place;
  return -1;
}

static void store(const Option *o, void *field, int64_t value) {
  if (o->size == sizeof(bool))
    *(bool *)field = value != 0;
  else if (o->size == sizeof(int))
    *(int *)field = (int)value;
  else
    *(int64_t *)field = value;
}

static bool set_integer(const Option *o, void *field, const char *text, Reason *reason) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10), min = (int64_t)o->min,
            max = o->max > 0 ? (int64_t)o->max : INT64_MAX;
  if (errno || end == text || *end || value < min || value > max)
    return refuse(reason, "give a whole number from %lld to %lld", min, max);
  store(o, field, value);
  return true;
}

static bool set_number(const Option *o, double *field, const char *text, Reason *reason) {
  char *end;
  errno = 0;
  double value = strtod(text, &end);
  if (errno || end == text || *end || !(value >= o->min && value <= o->max))
    return refuse(reason, "give a number from %g to %g", o->min, o->max);
  *field = value;
  return true;
}

// The place of a choice; the bits of a set.
static bool set_words(const Option *o, void *field, const char *text, Reason *reason) {
  bool several = o->type == OPTION_SET;
  int64_t value = 0;
  for (const char *word = text, *end; word; word = *end ? end + 1 : NULL) {
    end = word + (several ? strcspn(word, ",") : strlen(word));
    int place = place_in(o->choices, word, (size_t)(end - word));
    if (place < 0)
      return refuse(reason, "give %s%s%s", several ? "one or more of " : "", o->choices,
                    several ? ", with commas between them" : "");
    value |= several ? 1 << place : place;
  }
  store(o, field, value);
  return true;
}

static int64_t stored(const Option *o, const void *field) {
  return o->size == sizeof(bool)  ? *(const bool *)field
         : o->size == sizeof(int) ? *(const int *)field
                                  : *(const int64_t *)field;
}

bool option_try_set(const Option *o, void *values, const char *text, Reason *reason) {
  void *field = (char *)values + o->offset;
  if (o->type == OPTION_INTEGER) return set_integer(o, field, text, reason);
  if (o->type == OPTION_NUMBER) return set_number(o, field, text, reason);
  if (o->type == OPTION_CHOICE || o->type == OPTION_SET) return set_words(o, field, text, reason);
  if (o->type == OPTION_FLAG) store(o, field, (int64_t)o->min);
  if (o->type == OPTION_TEXT) *(const char **)field = text;
  if (o->type == OPTION_LIST) arrput(*(const char ***)field, text);
  return true;
}

void option_set(const Option *o, void *values, const char *text) {
  Reason reason;
  if (!option_try_set(o, values, text, &reason)) fail("--%s %s: %s", o->name, text, reason.text);
}

double option_number(const Option *o, const void *values) {
  const void *field = (const char *)values + o->offset;
  return o->type == OPTION_NUMBER ? *(const double *)field : (double)stored(o, field);
}

bool option_text(const Option *o, const void *values, char text[64]) {
  const void *field = (const char *)values + o->offset;
  int64_t value = o->type == OPTION_NUMBER ? 0 : stored(o, field);
  size_t length = 0, at = 0;
  *text = 0;
  if (o->type == OPTION_FLAG) return value == (int64_t)o->min;
  if (o->type == OPTION_INTEGER) snprintf(text, 64, "%lld", (long long)value);
  if (o->type == OPTION_NUMBER) snprintf(text, 64, "%s", text_number(option_number(o, values)).text);
  if (o->type != OPTION_CHOICE && o->type != OPTION_SET) return true;
  int place = 0;
  for (const char *word = o->choices, *next; *word; word = next, place++) {
    length = word_length(word, &next);
    if (o->type == OPTION_SET ? value >> place & 1 : value == place)
      at += (size_t)snprintf(text + at, 64 - at, "%s%.*s", at ? "," : "", (int)length, word);
  }
  return true;
}

int option_row(const Option *rows, const char *name) {
  for (int i = 0; rows[i].type != OPTION_END; i++)
    if (rows[i].name && !strcmp(rows[i].name, name)) return i;
  return -1;
}

// --- options that exclude each other -----------------------------------------------------------------------

static bool excludes(const Option *a, const Option *b) {
  return a->excludes && place_in(a->excludes, b->name, strlen(b->name)) >= 0;
}

// 0 is "none" of a number and of a choice.
static bool in_force(const Option *o, const void *values) {
  bool counts = o->type == OPTION_NUMBER || o->type == OPTION_INTEGER || o->type == OPTION_CHOICE;
  return !counts || option_number(o, values) != 0;
}

int option_excluded_by(const Option *rows, const void *values, const bool *given, int row) {
  const Option *o = &rows[row];
  for (int i = 0; rows[i].type != OPTION_END; i++) {
    const Option *other = &rows[i];
    bool same = o->size && o->size == other->size && o->offset == other->offset;
    if (i == row || !given[i] || !(same || in_force(other, values))) continue;
    if (same || excludes(o, other) || excludes(other, o)) return i;
  }
  return -1;
}

bool option_needs_met(const Option *rows, const void *values, int row) {
  const char *needs = rows[row].needs;
  if (!needs) return true;
  char name[32], now[64];
  size_t length = strcspn(needs, " ");
  snprintf(name, sizeof name, "%.*s", (int)length, needs);
  const Option *needed = &rows[option_row(rows, name)];
  if (needed->type == OPTION_TEXT) return *(const char *const *)((const char *)values + needed->offset);
  if (needed->type == OPTION_INTEGER || !needs[length]) return option_number(needed, values) != 0;
  option_text(needed, values, now);
  return !strcmp(now, needs + length + 1);
}

void option_require_needs(const Option *rows, const void *values, int row) {
  const Option *o = &rows[row];
  char now[64];
  bool in_use = option_text(o, values, now) && (!o->initial || strcmp(now, o->initial));
  if (in_use && !option_needs_met(rows, values, row))
    fail("--%s %s: add --%s", o->name, o->because, o->needs);
}

static void check_exclusions(const Option *rows, const void *values, const bool *given) {
  for (int i = 0; rows[i].type != OPTION_END; i++) {
    int other = given[i] && in_force(&rows[i], values) ? option_excluded_by(rows, values, given, i) : -1;
    if (other < 0) continue;
    const Option *by = excludes(&rows[i], &rows[other]) ? &rows[i] : &rows[other];
    fail("--%s and --%s exclude each other%s%s; give one of them", rows[i].name, rows[other].name,
         by->why ? ": " : "", by->why ? by->why : "");
  }
}

// --- the command line --------------------------------------------------------------------------------------

enum { USAGE = 999, FIRST_KEY = 1000 }; // of argp: no letter's, so that no option has a short form

typedef struct {
  const OptionTable *table;
  void *values;
  bool *given;
} Parsing;

// The option whose name begins or ends a word that is no option, or whose help has the word; or NULL.
static const char *likely(const Option *rows, const char *word) {
  for (const Option *o = rows; o->type != OPTION_END; o++) {
    size_t length = strlen(word), own = o->name ? strlen(o->name) : length + 1;
    bool begins = own <= length && !strncmp(word, o->name, own) && strchr("-", word[own]);
    bool ends = own < length && !strcmp(word + length - own, o->name) && word[length - own - 1] == '-';
    if (begins || ends) return o->name;
  }
  char words[64];
  snprintf(words, sizeof words, "%s", word);
  for (char *at = words; (at = strchr(at, '-'));) *at = ' ';
  for (const Option *o = rows; o->type != OPTION_END; o++)
    if (o->name && strcasestr(o->help, words)) return o->name;
  return NULL;
}

// Fails with the reason why argp does not take a word.
static void refuse_word(const Option *rows, const struct argp_state *state) {
  const char *word = state->argv[state->next - 1],
             *next = state->next < state->argc ? state->argv[state->next] : "";
  if (*next == '-' && next[1] != '-') word = next; // of several letters, which argp has not passed
  char name[64];
  snprintf(name, sizeof name, "%s", word + strspn(word, "-"));
  name[strcspn(name, "=")] = 0;
  for (char *at = name; (at = strchr(at, '_'));) *at = '-';
  int count = 0, row = option_row(rows, name);
  for (int i = 0; rows[i].type != OPTION_END && row < 0; i++)
    count += rows[i].name && !strncmp(rows[i].name, name, strlen(name));
  if (row >= 0 && rows[row].type == OPTION_FLAG) fail("%s: --%s takes no value", word, name);
  if (row >= 0) fail("%s: give a value, --%s %s", word, name, rows[row].argument);
  const char *meant = count || strlen(name) < 3 ? NULL : likely(rows, name);
  fail("%s %s%s%s; --help lists the options", word,
       count > 1 ? "is how several options begin" : "is not an option", meant ? ": try --" : "",
       meant ? meant : "");
}

static error_t parse_one(int key, char *text, struct argp_state *state) {
  const Parsing *p = state->input;
  if (key == ARGP_KEY_ERROR) refuse_word(p->table->rows, state);
  if (key == '?' || key == 'h' || key == USAGE) {
    argp_help(state->root_argp, stdout, key == USAGE ? ARGP_HELP_USAGE : ARGP_HELP_STD_HELP, state->name);
    exit(0);
  }
  if (key == 'V') exit(puts(argp_program_version) < 0);
  if (key == ARGP_KEY_ARG)
    fail("'%s' is not an option; %s, and --help lists the rest", text, p->table->stray);
  if (key < FIRST_KEY || key >= FIRST_KEY + OPTION_ROWS_MAX) return ARGP_ERR_UNKNOWN;
  const Option *o = &p->table->rows[key - FIRST_KEY];
  const char *next = state->next < state->argc ? state->argv[state->next] : "";
  if (o->bare && !text) { // "--name WORD" and "--name", where argp knows "--name=WORD" alone
    bool word = place_in(o->choices, next, strlen(next)) >= 0;
    state->next += word;
    text = (char *)(uintptr_t)(word ? next : o->bare);
  }
  option_set(o, p->values, text);
  p->given[key - FIRST_KEY] = true;
  return 0;
}

static const Option *shown; // by --help, whose functions get no input

// "(default ...)" behind what an option does.
static char *help_text(int key, const char *text, void *input) {
  const char *initial =
      key >= FIRST_KEY && key < FIRST_KEY + OPTION_ROWS_MAX ? shown[key - FIRST_KEY].initial : NULL;
  return initial ? text_format("%s (default %s)", text, initial) : (char *)(uintptr_t)text;
}

void option_table_parse(const OptionTable *table, void *values, bool *given, int argc, char **argv) {
  // argp's own are silent where its errors are.
  const struct argp_option standard[] = {{"help", '?', 0, 0, "Give this help list", -1},
                                         {NULL, 'h', 0, OPTION_ALIAS, NULL, 0},
                                         {"usage", USAGE, 0, 0, "Give a short usage message", -1},
                                         {"version", 'V', 0, 0, "Print program version", -1}};
  struct argp_option options[OPTION_ROWS_MAX + 5] = {{0}};
  Parsing parsing = {table, values, given};
  int i = 0;
  shown = table->rows;
  output_check_at_exit();
  for (const Option *o = table->rows; o->type != OPTION_END; o++, i++) {
    if (i == OPTION_ROWS_MAX) fail("internal: more than %d options", OPTION_ROWS_MAX);
    int optional = o->bare ? OPTION_ARG_OPTIONAL : 0;
    options[i] =
        (struct argp_option){o->name, o->name ? FIRST_KEY + i : 0, o->argument, optional, o->help, 0};
    if (o->initial) option_set(o, values, o->initial);
  }
  memcpy(&options[i], standard, sizeof standard);
  const struct argp argp = {options, parse_one, .doc = table->doc, .help_filter = help_text};
  error_t error = argp_parse(&argp, argc, argv, ARGP_NO_ERRS | ARGP_NO_HELP, NULL, &parsing);
  if (error) fail("cannot read the command line: %s", strerror(error));
  check_exclusions(table->rows, values, given);
}
