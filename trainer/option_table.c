#include "trainer/option_table.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stb/stb_ds.h>

#include "kernels/base/alloc.h"

// --- values ------------------------------------------------------------------------------------------------

static int word_index(const char *const *words, const char *word, size_t length) {
  for (int i = 0; words[i]; i++)
    if (strlen(words[i]) == length && !strncmp(words[i], word, length)) return i;
  return -1;
}

static bool has_word(const char *const *words, const char *word) {
  return word_index(words, word, strlen(word)) >= 0;
}

// Names the value: "FILE", or the words whose bits are set: "cpu|cuda", "weights,gradients" of a set.
static Text value_words(const Option *o, unsigned which) {
  Text all = text_of("%s", o->argument ? o->argument : "");
  const char *between = o->type == OPTION_SET ? "," : "|";
  for (int i = 0; o->words[i]; i++)
    if (which >> i & 1) all = text_of("%s%s%s", all.text, *all.text ? between : "", o->words[i]);
  return all;
}

static bool is_number(const Option *o) {
  return o->type == OPTION_INTEGER || o->type == OPTION_NUMBER;
}

static bool set_number(const Option *o, void *field, const char *text, Reason *reason) {
  bool whole = o->type == OPTION_INTEGER;
  char *end;
  errno = 0;
  int64_t integer = whole ? strtoll(text, &end, 10) : 0;
  double number = whole ? 0 : strtod(text, &end);
  bool within =
      whole ? integer >= (int64_t)o->min && integer <= (int64_t)o->max : number >= o->min && number <= o->max;
  if (errno || end == text || *end || !within)
    return refuse(reason, "give a %snumber from %.15g to %.15g", whole ? "whole " : "", o->min, o->max);
  memcpy(field, whole ? (const void *)&integer : &number, o->size);
  return true;
}

static bool set_words(const Option *o, void *field, const char *text, Reason *reason) {
  bool several = o->type == OPTION_SET;
  int value = 0;
  for (const char *word = text, *end; word; word = *end ? end + 1 : NULL) {
    end = word + (several ? strcspn(word, ",") : strlen(word));
    int index = word_index(o->words, word, (size_t)(end - word));
    if (index < 0)
      return refuse(reason, several ? "give one or more of %s" : "give %s", value_words(o, ~0u).text);
    value |= several ? 1 << index : index;
  }
  memcpy(field, &value, o->size);
  return true;
}

bool option_set(const Option *o, void *values, const char *text, Reason *reason) {
  void *field = (char *)values + o->offset;
  const int64_t flag = (int64_t)o->min;
  if (is_number(o)) return set_number(o, field, text, reason);
  if (o->words[0]) return set_words(o, field, text, reason);
  if (o->type == OPTION_FLAG) memcpy(field, &flag, o->size);
  if (o->type == OPTION_TEXT) *(const char **)field = text;
  if (o->type == OPTION_LIST) arrput(*(const char ***)field, text);
  return true;
}

// Reads the bits of the field: a bool's, an int's, an int64_t's, a double's or a pointer's, little-endian.
static int64_t bits_of(const Option *o, const void *values) {
  int64_t bits = 0;
  memcpy(&bits, (const char *)values + o->offset, o->size);
  return o->size == sizeof(int) ? (int)bits : bits;
}

Text option_text(const Option *o, const void *values) {
  const void *field = (const char *)values + o->offset;
  int64_t bits = bits_of(o, values);
  if (o->type == OPTION_FLAG) return text_of("%s", bits == (int64_t)o->min ? o->bare : "");
  if (o->type == OPTION_INTEGER) return text_of("%lld", (long long)bits);
  if (o->type == OPTION_NUMBER) return text_number(*(const double *)field);
  return value_words(o, o->type == OPTION_CHOICE ? 1u << bits : (unsigned)bits);
}

const Option *option_find(const Option *rows, const char *name) {
  for (const Option *o = rows; o->type != OPTION_END; o++)
    if (o->name && !strcmp(o->name, name)) return o;
  return NULL;
}

// --- options together --------------------------------------------------------------------------------------

// False for an initial value, and for a 0 that means "none": such an option asks for nothing.
static bool in_use(const Option *o, const void *values) {
  Text now = option_text(o, values);
  if (o->initial && !strcmp(now.text, o->initial)) return false;
  return !is_number(o) || o->min < 0 || strtod(now.text, NULL) != 0;
}

bool option_possible(const Option *rows, const void *values, const bool *given, const Option *o,
                     Reason *reason) {
  const Option *needed = o->needs ? option_find(rows, o->needs) : NULL;
  if (needed && bits_of(needed, values) < o->at_least)
    return refuse(reason, "--%s needs --%s %s%s", o->name, needed->name,
                  value_words(needed, ~0u << o->at_least).text, o->because);
  for (const Option *b = rows; b->type != OPTION_END; b++) {
    if (!given[b - rows] || b == o) continue;
    bool same_field = b->size == o->size && b->offset == o->offset;
    const char *why = has_word(o->excludes, b->name) ? o->why : NULL;
    if (has_word(b->excludes, o->name)) why = b->why;
    if (same_field || (why && in_use(b, values)))
      return refuse(reason, "--%s and --%s exclude each other%s; give one of them", o->name, b->name,
                    why ? why : "");
  }
  return true;
}

void option_require_possible(const Option *rows, const void *values, const bool *given) {
  Reason reason;
  for (const Option *o = rows; o->type != OPTION_END; o++)
    if (given[o - rows] && in_use(o, values) && !option_possible(rows, values, given, o, &reason))
      fail("%s", reason.text);
}

// --- --help ------------------------------------------------------------------------------------------------

enum { HELP_COLUMN = 28, HELP_WIDTH = 79 };

// Prints words from column `indent` on; the line has `at` columns already.
static void print_wrapped(int at, int indent, const char *text) {
  if (at > 0 && at + 2 > indent) at = printf("\n") - 1;
  at += printf("%*s", indent - at, "");
  for (int length; *text; text += length + (int)strspn(text + length, " ")) {
    length = (int)strcspn(text, " ");
    if (at + 1 + length > HELP_WIDTH) at = printf("\n%*s", indent, "") - 1;
    at += printf("%s%.*s", at > indent ? " " : "", length, text);
  }
  printf("\n");
}

// "  --min-lr=FRACTION     Final rate, as a fraction of --lr [0 to 1; default 0.1]"
static void print_option(const Option *o) {
  Text takes = value_words(o, ~0u), values = {""};
  if (is_number(o)) values = text_of(o->max > 1e5 ? "%g or more" : "%g to %g", o->min, o->max);
  if (o->initial) values = text_of("%s%sdefault %s", values.text, *values.text ? "; " : "", o->initial);
  char *help = text_format(*values.text ? "%s [%s]" : "%s", o->help, values.text);
  int at = printf(!*takes.text ? "  --%s" : o->bare ? "  --%s[=%s]" : "  --%s=%s", o->name, takes.text);
  print_wrapped(at, HELP_COLUMN, help);
  free(help);
}

static _Noreturn void print_help(const OptionTable *table) {
  printf("Usage: %s [OPTION...]\n", program_invocation_short_name);
  print_wrapped(0, 0, table->doc);
  for (const Option *o = table->rows; o->type != OPTION_END; o++) {
    if (o->type == OPTION_GROUP) printf("\n"), print_wrapped(0, 1, o->help);
    if (o->name) print_option(o);
  }
  printf("\n  -h, --help                Print this\n  -V, --version             Print the version\n%s",
         table->examples ? table->examples : "");
  exit(0);
}

// --- the command line --------------------------------------------------------------------------------------

// "--seq_len=16" has the name "seq-len".
static Text name_in(const char *word) {
  Text name = text_of("%s", word + strspn(word, "-"));
  name.text[strcspn(name.text, "=")] = 0;
  for (char *at = name.text; (at = strchr(at, '_'));) *at = '-';
  return name;
}

// The option that the word names in full, or by a beginning that no other has.
static const Option *named_option(const Option *rows, const char *word, const char *name) {
  static const char see[] = "--help lists the options";
  const Option *named = option_find(rows, name), *begun = NULL;
  const char *meant = NULL; // by another name, or the longest one in the word
  int count = 0;
  if (named && word[1] == '-') return named;
  for (const Option *o = rows; o->type != OPTION_END; o++) {
    bool also = has_word(o->also, name);
    if (also && !o->name) fail("%s is not an option: %s; %s", word, o->help, see);
    if (also || (o->name && strstr(name, o->name) && (!meant || strlen(o->name) > strlen(meant))))
      meant = o->name;
    if (o->name && !strncmp(o->name, name, strlen(name))) begun = o, count++;
  }
  if (count == 1 && word[1] == '-') return begun;
  if (count > 1 && !named) fail("%s is how several options begin; %s", word, see);
  fail("%s is not an option%s%s; %s", word, meant ? ": try --" : "", meant ? meant : "", see);
}

// The value of an option without a "=": the word after it, or what the option alone means.
static const char *next_value(const Option *rows, const Option *o, const char *word, const char *next) {
  if (o->bare && !(next && has_word(o->words, next))) return o->bare;
  bool option = next && !strncmp(next, "--", 2) && option_find(rows, name_in(next).text);
  if (!next || option)
    fail("%s: give a value, --%s %s%s%s", word, o->name, value_words(o, ~0u).text, option ? ", before " : "",
         option ? next : "");
  return next;
}

void option_table_parse(const OptionTable *table, void *values, bool *given, int argc, char **argv) {
  static const char *const help[] = {"help", "usage", "h", "?", NULL};
  static const char *const version[] = {"version", "V", NULL};
  const Option *rows = table->rows;
  Reason reason;
  output_check_at_exit();
  for (const Option *o = rows; o->type != OPTION_END; o++)
    if (o->initial) option_set(o, values, o->initial, &reason);
  for (int i = 1; i < argc; i++) {
    const char *word = argv[i], *equals = strchr(word, '='), *value = equals ? equals + 1 : NULL;
    Text name = name_in(word);
    if (*word != '-') fail("'%s' is not an option; %s, and --help lists the rest", word, table->stray);
    if (has_word(version, name.text)) exit(puts("lce.c 0.1") < 0);
    if (has_word(help, name.text)) print_help(table);
    const Option *o = named_option(rows, word, name.text);
    if (o->type == OPTION_FLAG && value) fail("%s: --%s takes no value", word, o->name);
    if (!value) value = next_value(rows, o, word, argv[i + 1]);
    if (value == argv[i + 1]) i++;
    if (!option_set(o, values, value, &reason)) fail("--%s %s: %s", o->name, value, reason.text);
    if (given) given[o - rows] = true;
  }
}
