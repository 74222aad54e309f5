// The command line as a table: a row says what an option is called, what it takes, where its value goes and
// which values it may have. One parser (argp) reads any such table; --help comes from it too.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/base/fail.h"

typedef enum {
  OPTION_END,
  OPTION_GROUP,   // a heading of --help: its text is `help`
  OPTION_FLAG,    // takes no value and writes `min` into a bool, int or enum
  OPTION_INTEGER, // a whole number: int or int64_t
  OPTION_NUMBER,  // a double
  OPTION_CHOICE,  // one of the words of `choices`: writes its place in the list into an enum
  OPTION_SET,     // some of them, with commas between: writes a bit of each place into an unsigned
  OPTION_TEXT,    // const char *, the argument itself
  OPTION_LIST     // const char **, an array of stb_ds.h, which the caller frees: may be given several times
} OptionType;

typedef struct {
  OptionType type;
  const char *name;     // without "--"
  const char *argument; // what --help calls the value
  const char *help;
  size_t offset, size;        // of the field in the struct of values
  double min, max;            // of numbers; a whole number's max of 0: INT64_MAX
  const char *choices;        // "cosine, linear or constant"
  const char *bare;           // of a choice: the word that the option alone means; NULL: it needs one
  const char *initial;        // the value when not given, shown in --help; NULL: the field stays as it is
  unsigned flags;             // the program's own
  const char *excludes, *why; // "log, save": options that cannot be given with this one, and why not
  // Required option, and why: "save DIR", "recompute layer", "recompute" (not "none").
  const char *needs, *because;
} Option;

enum { OPTION_ROWS_MAX = 128 };

typedef struct {
  const Option *rows; // up to one of OPTION_END
  const char *doc;    // stands above the options in --help; the part after a \v stands below
  const char *stray;  // "paths are given with --data PATH": the advice for a word that is no option
} OptionTable;

// Writes the initial values and those of the command line into the struct `values`, and sets given[row] of
// every option that is given. An unknown option or a wrong value ends the program with a sentence, and so do
// two options that exclude each other: flags that write the same field, and those that a row `excludes`,
// unless a number of the two is 0 or a choice its first.
void option_table_parse(const OptionTable *table, void *values, bool *given, int argc, char **argv);

// One value as from the command line. option_try_set: or false with a reason, "give a number from 1 to 9".
void option_set(const Option *option, void *values, const char *text);
bool option_try_set(const Option *option, void *values, const char *text, Reason *reason);
// The value as the command line would have it ("" for a flag): option_set reads it back bit for bit. False
// for a flag whose value is not set. Not for texts and lists. option_number: a choice's place.
bool option_text(const Option *option, const void *values, char text[64]);
double option_number(const Option *option, const void *values);

int option_row(const Option *rows, const char *name); // -1: none is called so
// True if a row's required option is given: a text, a number that is not 0, a choice's word or any but its
// first. The second fails if not, unless the row's option has its initial value.
bool option_needs_met(const Option *rows, const void *values, int row);
void option_require_needs(const Option *rows, const void *values, int row);
// The first given option that excludes rows[row], or -1.
int option_excluded_by(const Option *rows, const void *values, const bool *given, int row);
