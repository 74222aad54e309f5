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
