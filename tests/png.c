#include "tests/png.h"

#include <stdlib.h>

#ifdef HAVE_STB
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_PNG
#include <stb/stb_image.h>
#pragma GCC diagnostic pop
#endif

Picture picture_read(const char *path) {
  Picture picture = {0};
#ifdef HAVE_STB
  int channels;
  picture.rgb = stbi_load(path, &picture.width, &picture.height, &channels, 3);
#else
  (void)path;
#endif
  return picture;
}

void picture_free(Picture *picture) {
  free(picture->rgb);
  *picture = (Picture){0};
}
