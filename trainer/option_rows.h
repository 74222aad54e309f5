// Short forms for the rows of an option table, after `#define OPTION_VALUES Settings` (the struct of values):
// {INTEGER("steps", "N", steps, 0, 100), "Optimizer steps", "20"} has a help text and an initial value.
#pragma once

#include "trainer/option_table.h"

#define AT(field) .offset = offsetof(OPTION_VALUES, field), .size = sizeof((OPTION_VALUES *)0)->field
// A row begins with one of these,
#define GROUP(title)                             OPTION_GROUP, .help = title
#define ELSEWHERE(advice, ...)                   OPTION_ELSEWHERE, .help = advice, .also = {__VA_ARGS__}
#define FLAG(name, field, value)                 OPTION_FLAG, name, .min = value, .bare = "set", AT(field)
#define INTEGER(name, argument, field, min, max) OPTION_INTEGER, name, argument, min, max, AT(field)
#define NUMBER(name, argument, field, min, max)  OPTION_NUMBER, name, argument, min, max, AT(field)
#define CHOICE(name, field, ...)                 OPTION_CHOICE, name, .words = {__VA_ARGS__}, AT(field)
#define SET(name, field, ...)                    OPTION_SET, name, .words = {__VA_ARGS__}, AT(field)
#define TEXT(name, argument, field)              OPTION_TEXT, name, argument, AT(field)
#define LIST(name, argument, field)              OPTION_LIST, name, argument, AT(field)
// and may end with these.
#define ALSO(...)                    .also = {__VA_ARGS__}
#define EXCLUDES(reason, ...)        .why = ": " reason, .excludes = {__VA_ARGS__}
#define NEEDS(option, value, reason) .needs = option, .at_least = value, .because = ": " reason
