// The command line as a table: a row says what an option is called, what it takes, where its value goes and
// which values it may have. One parser reads any such table, and --help prints it.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "kernels/base/fail.h"
#include "kernels/base/text.h"

typedef enum {
  OPTION_END,
  OPTION_GROUP,     // a heading of --help: its text is `help`
  OPTION_ELSEWHERE, // options of other programs, named in `also`, for which `help` says what to do instead
  OPTION_FLAG,      // takes no value and writes `min` into a bool, int or enum
  OPTION_INTEGER,   // int or int64_t
  OPTION_NUMBER,    // double
  OPTION_CHOICE,    // one of `words`: writes its index into an enum
  OPTION_SET,       // several of `words`, with commas between: writes a bit for each into an unsigned
  OPTION_TEXT,      // const char *
  OPTION_LIST       // const char **, an array of stb_ds.h that the caller frees: may be given several times
} OptionType;

enum { OPTION_ROWS_MAX = 128, OPTION_WORDS_MAX = 6 }; // of a list of words, with the NULL that ends it

typedef struct {
  OptionType type;
  const char *name;     // without "--"; NULL: a group, or options elsewhere
  const char *argument; // what --help calls the value
  double min, max;      // of numbers
  const char *words[OPTION_WORDS_MAX];
  size_t offset, size;                          // of the field in the struct of values
  const char *help;                             // --help adds the words or limits and `initial` behind it
  unsigned flags;                               // the program's own
  const char *initial;                          // the value when not given; NULL: the field stays as it is
  const char *bare;                             // the value that the option alone means; NULL: it needs one
  const char *excludes[OPTION_WORDS_MAX], *why; // options that cannot be given with this one, and why not
  const char *also[OPTION_WORDS_MAX];           // what other programs call it
  const char *needs, *because; // the option that this one needs, in a row before it, and why,
  int at_least;                // with this value or more, or this choice or a later one
} Option;

typedef struct {
  const Option *rows;         // up to one of OPTION_END
  const char *doc, *examples; // above the options in --help, and below or NULL
  const char *stray;          // "paths are given with --data PATH": the advice for a word that is no option
} OptionTable;

// Writes the initial values and those of the command line into the struct `values`, and sets given[row], unless
// given is NULL, of every option that is given. A wrong option or value ends the program with a sentence.
// "--name VALUE" takes no VALUE that is an option's name; "--name=VALUE" takes any.
void option_table_parse(const OptionTable *table, void *values, bool *given, int argc, char **argv);

// Writes one value as from the command line, or returns false with a reason, "give a number from 1 to 9".
bool option_set(const Option *option, void *values, const char *text, Reason *reason);
// The value as option_set reads it back, bit for bit; "" for a flag that is not set. Not for texts and lists.
Text option_text(const Option *option, const void *values);

const Option *option_find(const Option *rows, const char *name); // NULL: none is called so

// False with a sentence if a given option excludes this one, or it lacks what it needs. Flags that write the
// same field exclude each other. An initial value, or a 0 that means "none", excludes and needs nothing.
bool option_possible(const Option *rows, const void *values, const bool *given, const Option *option,
                     Reason *reason);
void option_require_possible(const Option *rows, const void *values, const bool *given); // or fails
