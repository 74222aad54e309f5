// For every test program: cmocka with its headers, and TEST, which defines a test and puts it on the list.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

// cmocka's fail() takes nothing, the program's a sentence.
#undef fail
#undef fail_msg
#define fail_msg(...) (print_error(__VA_ARGS__), print_error("\n"), _fail(__FILE__, __LINE__), abort())
#include "kernels/base/fail.h"

// TEST(test_name) { ... } runs in its place of the file. `state` is the group's.
#define TEST(name)                                                                                           \
  static void name(void **state);                                                                            \
  __attribute__((constructor)) static void list_##name(void) {                                               \
    test_list((struct CMUnitTest)cmocka_unit_test(name));                                                    \
  }                                                                                                          \
  static void name(__attribute__((unused)) void **state)

void test_list(struct CMUnitTest test);

// Runs the list; setup and teardown, of the group, may be NULL. Returns the failures: a main's result.
int tests_run(const char *group, CMFixtureFunction setup, CMFixtureFunction teardown);
// The same with a teardown after each test.
int tests_run_each(const char *group, CMFixtureFunction setup, CMFixtureFunction teardown,
                   CMFixtureFunction after_each);
// The program's main, which returns the failures: TEST_MAIN(tests_run("texts", NULL, NULL)).
#define TEST_MAIN(failures)                                                                                  \
  int main(void) {                                                                                           \
    return failures;                                                                                         \
  }
// A main's result where nothing can be tested: says that `what` is not, and why; one skipped test.
int skip_all(const char *group, const char *what, const char *why);

// CATCH(statement) runs it until it ends or fails: caught_sentence is then fail()'s, else empty.
extern jmp_buf caught_jump;
extern char caught_sentence[2048];
void expect_failures(bool expected);
#define CATCH(...)                                                                                           \
  do {                                                                                                       \
    caught_sentence[0] = 0;                                                                                  \
    expect_failures(true);                                                                                   \
    if (setjmp(caught_jump) == 0) (void)(__VA_ARGS__);                                                       \
    expect_failures(false);                                                                                  \
  } while (0)
