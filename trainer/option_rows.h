// Short forms for the rows of an option table, after `#define OPTION_VALUES Settings` (the struct of values):
// {INTEGER("steps", "N", steps, 0, 100), DEFAULT("20"), HELP("...")}.
#pragma once

#include "trainer/option_table.h"

#define OPTION_FIELD(field)                                                                                  \
  .offset = offsetof(OPTION_VALUES, field), .size = sizeof((OPTION_VALUES *)0)->field

#define GROUP(title)             OPTION_GROUP, .help = title
#define FLAG(name, field, value) OPTION_FLAG, name, OPTION_FIELD(field), .min = value
#define INTEGER(name, argument, field, from, to)                                                             \
  OPTION_INTEGER, name, argument, OPTION_FIELD(field), .min = from, .max = to
#define NUMBER(name, argument, field, from, to)                                                              \
  OPTION_NUMBER, name, argument, OPTION_FIELD(field), .min = from, .max = to
#define CHOICE(name, argument, field, words)                                                                 \
  OPTION_CHOICE, name, argument, OPTION_FIELD(field), .choices = words
#define SET(name, argument, field, words) OPTION_SET, name, argument, OPTION_FIELD(field), .choices = words
#define TEXT(name, argument, field)       OPTION_TEXT, name, argument, OPTION_FIELD(field)
#define LIST(name, argument, field)       OPTION_LIST, name, argument, OPTION_FIELD(field)
#define DEFAULT(text)                     .initial = text
#define BARE(word)                        .bare = word
#define HELP(text)                        .help = text
#define EXCLUDES(names, reason)           .excludes = names, .why = reason
#define NEEDS(option, reason)             .needs = option, .because = reason
