// Short forms for the rows of an option table, after `#define OPTION_VALUES Settings` (the struct of values):
// {INTEGER("steps", "N", steps, 0, 100), "Optimizer steps", "20"} has a help text and an initial value.
#pragma once

#include "trainer/option_table.h"

#define OPTION_ROW(type, name, argument, field, min, max, ...)                                               \
  type, name, argument, offsetof(OPTION_VALUES, field), sizeof((OPTION_VALUES *)0)->field, min, max,         \
      .words = {__VA_ARGS__}

#define GROUP(title)             OPTION_GROUP, .help = title
#define FLAG(name, field, value) OPTION_ROW(OPTION_FLAG, name, NULL, field, value, 0, NULL)
#define INTEGER(name, argument, field, min, max)                                                             \
  OPTION_ROW(OPTION_INTEGER, name, argument, field, min, max, NULL)
#define NUMBER(name, argument, field, min, max)                                                              \
  OPTION_ROW(OPTION_NUMBER, name, argument, field, min, max, NULL)
#define CHOICE(name, field, ...)     OPTION_ROW(OPTION_CHOICE, name, NULL, field, 0, 0, __VA_ARGS__)
#define SET(name, field, ...)        OPTION_ROW(OPTION_SET, name, NULL, field, 0, 0, __VA_ARGS__)
#define TEXT(name, argument, field)  OPTION_ROW(OPTION_TEXT, name, argument, field, 0, 0, NULL)
#define LIST(name, argument, field)  OPTION_ROW(OPTION_LIST, name, argument, field, 0, 0, NULL)
#define ALSO(...)                    .also = {__VA_ARGS__}
#define EXCLUDES(reason, ...)        .why = ": " reason, .excludes = {__VA_ARGS__}
#define NEEDS(option, value, reason) .needs = option, .at_least = value, .because = ": " reason
