// Drawing, by coverage: a shape first says how much of every pixel it covers, in a mask of its own; then the
// colour is laid on once. So the joints of a line do not show, and neither do the seams of an area.
#include "tools/plot/canvas.h"

#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/fail.h"
#include "base/file.h"
#include "base/text.h"

#ifdef HAVE_STB
#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STB_TRUETYPE_IMPLEMENTATION
#include <stb/stb_image_write.h>
#include <stb/stb_truetype.h>
#endif

struct Canvas {
  double scale;
  int columns, rows; // pixels
  Color *pixels;
  float *mask;                  // coverage of the shape being drawn; 0 between shapes
  int left, top, right, bottom; // the part of the mask that is not 0
  unsigned char *fonts[2];      // the files: regular, bold
#ifdef HAVE_STB
  stbtt_fontinfo faces[2];
#endif
};

// --- the mask ----------------------------------------------------------------------------------------------

static int within(int value, int low, int high) {
  return value < low ? low : value > high ? high : value;
}

// Says that the pixels of a box are about to be covered, and returns the box on the canvas.
typedef struct {
  int left, top, right, bottom;
} Pixels;

static Pixels touch(Canvas *c, double left, double top, double right, double bottom) {
  Pixels p = {within((int)floor(left), 0, c->columns), within((int)floor(top), 0, c->rows),
              within((int)ceil(right), 0, c->columns), within((int)ceil(bottom), 0, c->rows)};
  if (p.left < c->left) c->left = p.left;
  if (p.top < c->top) c->top = p.top;
  if (p.right > c->right) c->right = p.right;
  if (p.bottom > c->bottom) c->bottom = p.bottom;
  return p;
}

static float *mask_at(Canvas *c, int x, int y) {
  return &c->mask[(size_t)y * (size_t)c->columns + (size_t)x];
}

static void cover_at_least(Canvas *c, int x, int y, double coverage) {
  float *m = mask_at(c, x, y), value = (float)fmin(coverage, 1);
  if (value > *m) *m = value;
}

static unsigned char blend(unsigned char below, unsigned char above, float share) {
  return (unsigned char)lrintf((float)below + share * ((float)above - (float)below));
}

// Lays the colour on where the mask covers, and clears the mask.
static void paint(Canvas *c, Color color, double opacity) {
  for (int y = c->top; y < c->bottom; y++)
    for (int x = c->left; x < c->right; x++) {
      float *m = mask_at(c, x, y), share = fminf(*m, 1) * (float)opacity;
      if (*m == 0) continue;
      Color *p = &c->pixels[(size_t)y * (size_t)c->columns + (size_t)x];
      *p = (Color){blend(p->r, color.r, share), blend(p->g, color.g, share), blend(p->b, color.b, share)};
      *m = 0;
    }
  c->left = c->columns, c->top = c->rows, c->right = c->bottom = 0;
}

// --- lines and markers -------------------------------------------------------------------------------------

// How far a place lies outside a marker at `a` (negative: inside), or outside a stroke from a to b, in pixels.
static double outside(Marker marker, Spot at, Spot a, Spot b, double radius) {
  double x = at.x - a.x, y = at.y - a.y, dx = b.x - a.x, dy = b.y - a.y, length2 = dx * dx + dy * dy;
  if (marker == MARKER_SQUARE)
    return fmax(fabs(x), fabs(y)) - 0.89 * radius; // as large to the eye as the circle
  if (marker == MARKER_DIAMOND) return (fabs(x) + fabs(y)) * 0.7071 - 0.89 * radius;
  double along = length2 > 0 ? fmin(1, fmax(0, (x * dx + y * dy) / length2)) : 0;
  return hypot(x - along * dx, y - along * dy) - radius;
}

// A marker at a = b, or a straight stroke with round ends. Places in points, the radius in pixels.
static void cover_shape(Canvas *c, Marker marker, Spot a, Spot b, double radius) {
  double margin = 1.5 * radius + 1;
  a = (Spot){a.x * c->scale, a.y * c->scale}, b = (Spot){b.x * c->scale, b.y * c->scale};
  Pixels p = touch(c, fmin(a.x, b.x) - margin, fmin(a.y, b.y) - margin, fmax(a.x, b.x) + margin,
                   fmax(a.y, b.y) + margin);
  for (int y = p.top; y < p.bottom; y++)
    for (int x = p.left; x < p.right; x++) {
      double inside = 0.5 - outside(marker, (Spot){x + 0.5, y + 0.5}, a, b, radius);
      if (inside > 0) cover_at_least(c, x, y, inside);
    }
}

void canvas_line(Canvas *c, Spot from, Spot to, Stroke stroke) {
  double half = 0.5 * stroke.width * c->scale, length = hypot(to.x - from.x, to.y - from.y);
  double dash = stroke.dash > 0 ? stroke.dash : fmax(length, 1), period = dash + stroke.gap;
  for (double start = 0; start == 0 || start < length; start += period) {
    double a = length > 0 ? start / length : 0, b = length > 0 ? fmin(1, (start + dash) / length) : 0;
    cover_shape(c, MARKER_CIRCLE, (Spot){from.x + a * (to.x - from.x), from.y + a * (to.y - from.y)},
                (Spot){from.x + b * (to.x - from.x), from.y + b * (to.y - from.y)}, half);
  }
  paint(c, stroke.color, 1);
}

void canvas_marker(Canvas *c, Marker marker, Spot at, double radius, Color color, bool filled) {
  const Color white = {255, 255, 255};
  double pixels = radius * c->scale;
  if (marker == MARKER_NONE) return;
  if (marker == MARKER_CROSS) {
    for (double x = 0.8 * radius, y = x; y >= -x; y -= 2 * x)
      canvas_line(c, (Spot){at.x - x, at.y - y}, (Spot){at.x + x, at.y + y},
                  (Stroke){.color = color, .width = 1.3});
    return;
  }
  if (filled) {
    cover_shape(c, marker, at, at, pixels + 1.1 * c->scale);
    paint(c, white, 1);
  }
  cover_shape(c, marker, at, at, pixels);
  paint(c, color, 1);
  if (filled) return;
  cover_shape(c, marker, at, at, pixels - 1.5 * c->scale);
  paint(c, white, 1);
}

// --- areas -------------------------------------------------------------------------------------------------

static double overlap(double low, double high, int pixel) {
  return fmax(0, fmin(high, pixel + 1) - fmax(low, pixel));
}

void canvas_area(Canvas *c, const double *x, const double *upper, const double *lower, int count, Color color,
                 double opacity) {
  for (int i = 0; i + 1 < count; i++) {
    double left = x[i] * c->scale, right = x[i + 1] * c->scale;
    if (right <= left) continue; // a step
    int end = within((int)ceil(right), 0, c->columns);
    for (int column = within((int)floor(left), 0, c->columns); column < end; column++) {
      double middle = (fmin(right, column + 1) + fmax(left, column)) / 2,
             t = (middle - left) / (right - left);
      double top = (upper[i] + t * (upper[i + 1] - upper[i])) * c->scale;
      double bottom = (lower[i] + t * (lower[i + 1] - lower[i])) * c->scale;
      if (bottom <= top) continue;
      Pixels p = touch(c, column, top, column + 1, bottom);
      for (int y = p.top; y < p.bottom; y++)
        *mask_at(c, column, y) += (float)(overlap(left, right, column) * overlap(top, bottom, y));
    }
  }
  paint(c, color, opacity);
}

void canvas_box(Canvas *c, Box b, Color color, double opacity) {
  canvas_area(c, (double[]){b.left, b.right}, (double[]){b.top, b.top}, (double[]){b.bottom, b.bottom}, 2,
              color, opacity);
}

static double snapped(double value, double scale) {
  return round(value * scale) / scale;
}

void canvas_rule(Canvas *c, Spot from, Spot to, Color color) {
  double thick = fmax(1, round(c->scale)) / c->scale, half = floor(0.5 * thick * c->scale) / c->scale;
  Box box = {snapped(fmin(from.x, to.x), c->scale), snapped(fmin(from.y, to.y), c->scale),
             snapped(fmax(from.x, to.x), c->scale), snapped(fmax(from.y, to.y), c->scale)};
  if (from.y == to.y)
    box.top -= half, box.bottom = box.top + thick;
  else
    box.left -= half, box.right = box.left + thick;
  canvas_box(c, box, color, 1);
}

// --- text and files ----------------------------------------------------------------------------------------

#ifdef HAVE_STB
// The file of a font; NULL when it is nowhere. The caller frees it.
static char *read_font(bool bold) {
  static const char *const folders[] = {NULL, // $LCE_FONT_DIR
                                        "/usr/share/fonts/truetype/dejavu",
                                        "/usr/share/fonts/TTF",
                                        "/usr/share/fonts/dejavu-sans-fonts",
                                        "/usr/share/fonts/dejavu",
                                        "/usr/local/share/fonts"};
  char *font = NULL;
  for (size_t i = 0; i < sizeof folders / sizeof *folders && !font; i++) {
    const char *folder = i ? folders[i] : getenv("LCE_FONT_DIR");
    size_t size;
    char *path = path_join(folder ? folder : "", bold ? "DejaVuSans-Bold.ttf" : "DejaVuSans.ttf");
    if (folder) font = file_read(path, &size);
    free(path);
  }
  return font;
}

const char *canvas_missing(void) {
  char *regular = read_font(false), *bold = read_font(true);
  bool missing = !regular || !bold;
  free(regular);
  free(bold);
  return missing ? "DejaVuSans.ttf and DejaVuSans-Bold.ttf are not there; `make deps` installs them "
                   "(fonts-dejavu-core), or LCE_FONT_DIR says where they are"
                 : NULL;
}

static void load_fonts(Canvas *c) {
  for (int bold = 0; bold < 2; bold++) {
    unsigned char *data = c->fonts[bold] = (unsigned char *)read_font(bold);
    if (!data || !stbtt_InitFont(&c->faces[bold], data, stbtt_GetFontOffsetForIndex(data, 0)))
      fail("the font DejaVuSans is damaged; install fonts-dejavu-core again");
  }
}

// The next code point of UTF-8 text; damaged bytes stand for themselves.
static int next_letter(const char **text) {
  const unsigned char *t = (const unsigned char *)*text;
  int length = utf8_length(*text, strlen(*text)), code = length > 1 ? t[0] & (0x7F >> length) : t[0];
  for (int i = 1; i < length; i++) code = code << 6 | (t[i] & 0x3F);
  *text += length ? length : 1;
  return code;
}

// Walks the text from pixel x on and draws into the mask unless told only to measure. Returns where it ends.
static double walk_text(Canvas *c, TextStyle style, double x, int baseline, const char *text, bool draw) {
  const stbtt_fontinfo *face = &c->faces[style.bold];
  float scale = stbtt_ScaleForMappingEmToPixels(face, (float)(style.size * c->scale));
  while (*text) {
    int letter = next_letter(&text), advance, bearing;
    stbtt_GetCodepointHMetrics(face, letter, &advance, &bearing);
    if (draw) {
      int width, height, dx, dy;
      float shift = (float)(x - floor(x));
      unsigned char *bitmap =
          stbtt_GetCodepointBitmapSubpixel(face, scale, scale, shift, 0, letter, &width, &height, &dx, &dy);
      int left = (int)floor(x) + dx, top = baseline + dy;
      Pixels p = touch(c, left, top, left + width, top + height);
      for (int row = p.top; row < p.bottom; row++)
        for (int column = p.left; column < p.right; column++)
          cover_at_least(c, column, row, bitmap[(row - top) * width + column - left] / 255.0);
      stbtt_FreeBitmap(bitmap, NULL);
    }
    x += advance * (double)scale;
    if (*text) {
      const char *peek = text;
      x += stbtt_GetCodepointKernAdvance(face, letter, next_letter(&peek)) * (double)scale;
    }
  }
  return x;
}

// The bytes of the file; the caller frees them.
static unsigned char *encode_png(const Canvas *c, int *size) {
  return stbi_write_png_to_mem((const unsigned char *)c->pixels, c->columns * 3, c->columns, c->rows, 3,
                               size);
}
#else
const char *canvas_missing(void) {
  return "the program was built without stb; `make deps` installs it (libstb-dev)";
}

// canvas_create fails, so nobody calls these.
static void load_fonts(Canvas *c) {
  (void)c;
}

static double walk_text(Canvas *c, TextStyle style, double x, int baseline, const char *text, bool draw) {
  return (void)c, (void)style, (void)baseline, (void)text, (void)draw, x;
}

static unsigned char *encode_png(const Canvas *c, int *size) {
  return (void)c, (void)size, NULL;
}
#endif

Canvas *canvas_create(double width, double height, double scale) {
  const char *missing = canvas_missing();
  if (missing) fail("cannot draw: %s", missing);
  Canvas *c = host_alloc(1, sizeof *c, "a picture");
  c->scale = scale;
  c->columns = (int)lround(width * scale);
  c->rows = (int)lround(height * scale);
  int64_t count = (int64_t)c->columns * c->rows;
  c->pixels = host_alloc(count, sizeof *c->pixels, "a picture");
  c->mask = host_alloc(count, sizeof *c->mask, "a picture");
  memset(c->pixels, 255, (size_t)count * sizeof *c->pixels);
  c->left = c->columns, c->top = c->rows;
  load_fonts(c);
  return c;
}

void canvas_destroy(Canvas *c) {
  for (int bold = 0; bold < 2; bold++) free(c->fonts[bold]);
  free(c->pixels);
  free(c->mask);
  free(c);
}

double canvas_text_width(const Canvas *c, TextStyle style, const char *text) {
  return walk_text((Canvas *)c, style, 0, 0, text, false) / c->scale;
}

double canvas_text(Canvas *c, Spot at, TextStyle style, const char *text) {
  double width = canvas_text_width(c, style, text);
  walk_text(c, style, (at.x - style.before * width) * c->scale, (int)lround(at.y * c->scale), text, true);
  paint(c, style.color, 1);
  return width;
}

void canvas_write_png(const Canvas *c, const char *path) {
  int size = 0;
  unsigned char *png = encode_png(c, &size);
  if (!png) fail("out of host memory for the picture %s", path);
  FILE *file = file_create("the picture", path, "\x89PNG", false);
  bool whole = fwrite(png, 1, (size_t)size, file) == (size_t)size;
  if (fclose(file) || !whole) fail("cannot write the picture %s: %s", path, strerror(errno));
  free(png);
}
