// Short forms for the rows of an option table, after `#define OPTION_VALUES Settings` (the struct of values):
// {INTEGER("steps", "N", steps, 0, 100), "Optimizer steps", "20"} has a help text and an initial value.
#pragma once

#include "trainer/option_table.h"

#define AT(field)                offsetof(OPTION_VALUES, field), sizeof((OPTION_VALUES *)0)->field
#define GROUP(title)             OPTION_GROUP, .help = title
#define FLAG(name, field, value) OPTION_FLAG, name, NULL, AT(field), value, 0, .words = {NULL}
#define INTEGER(name, argument, field, min, max)                                                             \
  OPTION_INTEGER, name, argument, AT(field), min, max, .words = {NULL}
#define NUMBER(name, argument, field, min, max)                                                              \
  OPTION_NUMBER, name, argument, AT(field), min, max, .words = {NULL}
#define CHOICE(name, field, ...)     OPTION_CHOICE, name, NULL, AT(field), 0, 0, .words = {__VA_ARGS__}
#define SET(name, field, ...)        OPTION_SET, name, NULL, AT(field), 0, 0, .words = {__VA_ARGS__}
#define TEXT(name, argument, field)  OPTION_TEXT, name, argument, AT(field), 0, 0, .words = {NULL}
#define LIST(name, argument, field)  OPTION_LIST, name, argument, AT(field), 0, 0, .words = {NULL}
#define ALSO(...)                    .also = {__VA_ARGS__}
#define EXCLUDES(reason, ...)        .why = ": " reason, .excludes = {__VA_ARGS__}
#define NEEDS(option, value, reason) .needs = option, .at_least = value, .because = ": " reason
