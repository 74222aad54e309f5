#include "tests/test.h"

static struct CMUnitTest list[64];
static size_t count;

void test_list(struct CMUnitTest test) {
  if (count == sizeof list / sizeof *list) abort();
  list[count++] = test;
}

int tests_run_each(const char *group, CMFixtureFunction setup, CMFixtureFunction teardown,
                   CMFixtureFunction after_each) {
  for (size_t i = 0; i < count; i++) list[i].teardown_func = after_each;
  return _cmocka_run_group_tests(group, list, count, setup, teardown);
}

int tests_run(const char *group, CMFixtureFunction setup, CMFixtureFunction teardown) {
  return tests_run_each(group, setup, teardown, NULL);
}

static void test_nothing(__attribute__((unused)) void **state) {
  skip();
}

int skip_all(const char *group, const char *what, const char *why) {
  print_message("%s is not tested: %s\n", what, why);
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing)};
  return cmocka_run_group_tests_name(group, tests, NULL, NULL);
}

// Memory of a failing call is the exiting program's, no leak; absent in a build without LeakSanitizer.
void __lsan_disable(void) __attribute__((weak));
void __lsan_enable(void) __attribute__((weak));

jmp_buf caught_jump;
char caught_sentence[2048];

static void catch_sentence(const char *text) {
  snprintf(caught_sentence, sizeof caught_sentence, "%s", text);
  longjmp(caught_jump, 1);
}

void expect_failures(bool expected) {
  fail_set_handler(expected ? catch_sentence : NULL);
  if (expected && __lsan_disable) __lsan_disable();
  if (!expected && __lsan_enable) __lsan_enable();
}
