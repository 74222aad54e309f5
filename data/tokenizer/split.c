#include "data/tokenizer/split.h"

#ifdef HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

#include "base/fail.h"
#include "base/text.h"

const char split_gpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

#ifdef HAVE_PCRE2

static Reason error_text(int error) {
  Reason message = {""};
  pcre2_get_error_message(error, (PCRE2_UCHAR *)message.text, sizeof message.text);
  return message;
}

bool splitter_add(Splitter *s, const char *expression, Reason *reason) {
  if (s->count == SPLIT_MAX) return refuse(reason, "it splits text by more than %d expressions", SPLIT_MAX);
  int error;
  PCRE2_SIZE offset;
  pcre2_code *code = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                                   &error, &offset, NULL);
  if (!code)
    return refuse(reason, "character %zu of its regular expression is not understood (%s)", (size_t)offset,
                  error_text(error).text);
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // where that is not possible the interpreter remains
  s->expressions[s->count++] = code;
  return true;
}

void splitter_free(Splitter *s) {
  for (int i = 0; i < s->count; i++) pcre2_code_free(s->expressions[i]);
  *s = (Splitter){0};
}

// What is handed down from one expression to the next.
typedef struct {
  const Splitter *splitter;
  SplitPiece piece;
  void *context;
  Reason *reason;
} Split;

static bool split_from(const Split *s, int level, const char *text, int64_t length);

static bool hand_down(const Split *s, int level, const char *text, int64_t length) {
  return length == 0 || split_from(s, level + 1, text, length);
}

static bool split_by(const Split *s, int level, pcre2_match_data *match, const char *text, int64_t length) {
  const pcre2_code *code = s->splitter->expressions[level];
  int64_t done = 0, from = 0; // pieces end at `done`; the next match is looked for at `from`
  while (from < length) {
    int result =
        pcre2_match(code, (PCRE2_SPTR)text, (size_t)length, (size_t)from, PCRE2_NO_UTF_CHECK, match, NULL);
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0)
      return refuse(s->reason, "its regular expression fails on the text (%s)", error_text(result).text);
    const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(match);
    int64_t start = (int64_t)ends[0], end = (int64_t)ends[1];
    if (start < done || end <= start) { // an empty match (or one by \K) splits nothing
      for (from++; from < length && ((unsigned char)text[from] & 0xC0) == 0x80;) from++;
      continue;
    }
    if (!hand_down(s, level, text + done, start - done) || !hand_down(s, level, text + start, end - start))
      return false;
    done = from = end;
  }
  return hand_down(s, level, text + done, length - done);
}

static bool split_from(const Split *s, int level, const char *text, int64_t length) {
  if (level == s->splitter->count) {
    s->piece(s->context, text, length);
    return true;
  }
  pcre2_match_data *match = pcre2_match_data_create_from_pattern(s->splitter->expressions[level], NULL);
  if (!match) fail("out of memory for a piece of text of %lld bytes", (long long)length);
  bool good = split_by(s, level, match, text, length);
  pcre2_match_data_free(match);
  return good;
}

static bool check_utf8(const char *text, size_t size, Reason *reason) {
  for (size_t at = 0, taken; at < size; at += taken)
    if (!(taken = (size_t)utf8_length(text + at, size - at)))
      return refuse(reason, "the text is not UTF-8 at byte %zu", at);
  return true;
}

bool splitter_split(const Splitter *splitter, const char *text, int64_t length, SplitPiece piece,
                    void *context, Reason *reason) {
  if (length == 0) return true;
  Split s = {.splitter = splitter, .piece = piece, .context = context, .reason = reason};
  return check_utf8(text, (size_t)length, reason) && split_from(&s, 0, text, length);
}

#else

bool splitter_add(Splitter *s, const char *expression, Reason *reason) {
  (void)s, (void)expression;
  return refuse(
      reason, "this program was built without PCRE2, which splits text into words: `make deps` installs it");
}

void splitter_free(Splitter *s) {
  (void)s;
}

bool splitter_split(const Splitter *s, const char *text, int64_t length, SplitPiece piece, void *context,
                    Reason *reason) {
  (void)s, (void)reason;
  piece(context, text, length);
  return true;
}

#endif
